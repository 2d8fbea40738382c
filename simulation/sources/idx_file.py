"""Files of the idx format, and text beside them, read in blocks; plain or gzip.

Source: LeCun, Cortes and Burges, "The MNIST database".
"""

import dataclasses
import gzip
import math
import pathlib
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from simulation.sources.source import SourceError

BLOCK = 1024
"""How many records are read at a time."""
UBYTE = np.dtype(np.uint8)
_GZIP_MAGIC = b"\x1f\x8b"
# What a damaged file raises while it is read.
_DAMAGE = (OSError, EOFError, zlib.error)
_DTYPES: dict[int, np.dtype] = {0x08: UBYTE, 0x0C: np.dtype(">i4")}
# A line of text that is longer than this is cut.
_MAX_LINE = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What an idx file says about itself.

    Attributes:
        path: The file.
        dtype: The type of its values.
        shape: The number of its records, and the shape of one.
    """

    path: pathlib.Path
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its own bytes."""
        return 4 + 4 * len(self.shape)


def _open(path: pathlib.Path) -> BinaryIO:
    """Opens a file; unpacks it where it begins like gzip, whatever its name."""
    try:
        stream = path.open("rb")
        try:
            is_packed = stream.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            stream.seek(0)
        except OSError:
            stream.close()
            raise
    except OSError as error:
        raise SourceError(str(path), f"cannot be read: {error}.") from error
    if is_packed:
        stream.close()
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return stream


def read_header(path: pathlib.Path) -> Header:
    """Returns what an idx file says about itself.

    Raises:
        SourceError: If it is no such file, damaged or cannot be opened.
    """
    with _open(path) as stream:
        try:
            magic = stream.read(4)
            ndim = magic[3] if len(magic) == 4 else 0
            dims = stream.read(4 * ndim)
        except _DAMAGE as error:
            raise SourceError(str(path), f"is damaged: {error}.") from error
    is_idx = len(magic) == 4 and magic[:2] == b"\0\0" and ndim in (1, 2, 3)
    if not is_idx or magic[2] not in _DTYPES:
        raise SourceError(
            str(path),
            "must begin with 00 00, a type (08 bytes, 0c int32) and 1 to 3 dimensions. "
            f"Found {magic.hex(' ') or 'nothing'}.",
        )
    if len(dims) < 4 * ndim:
        raise SourceError(str(path), "ends in its header.")
    return Header(
        path=path,
        dtype=_DTYPES[magic[2]],
        shape=tuple(np.frombuffer(dims, ">u4").tolist()),
    )


def read_blocks(header: Header, count: int) -> Iterator[np.ndarray]:
    """Yields the first `count` records, [<= BLOCK, ...] at a time.

    Raises:
        SourceError: If the file is damaged, ends early or has more than it says.
    """
    shape = header.shape[1:]
    size = math.prod(shape) * header.dtype.itemsize
    with _open(header.path) as stream:
        stream.read(header.size)
        for start in range(0, count, BLOCK):
            wanted = min(BLOCK, count - start)
            try:
                data = stream.read(wanted * size)
                # The end is looked at too: gzip checks its sum there.
                is_last = start + wanted == header.shape[0]
                has_more = is_last and len(data) == wanted * size and stream.read(1)
            except _DAMAGE as error:
                raise SourceError(
                    f"{header.path}, record {start}",
                    f"the file is damaged here or in the next {wanted}: {error}.",
                ) from error
            whole = len(data) // size
            if whole:
                kept = np.frombuffer(data, header.dtype, count=whole * math.prod(shape))
                yield kept.reshape(whole, *shape)
            if whole < wanted:
                raise SourceError(
                    f"{header.path}, record {start + whole}",
                    f"the file ends early: it announces {header.shape[0]} records.",
                )
            if has_more:
                raise SourceError(
                    f"{header.path}, record {header.shape[0]}",
                    "the file has more than the records that it announces.",
                )


def is_text(path: pathlib.Path) -> bool:
    """Whether a file does not begin as idx files do."""
    with _open(path) as stream:
        try:
            return stream.read(2) != b"\0\0"
        except _DAMAGE as error:
            raise SourceError(str(path), f"is damaged: {error}.") from error


def _iterate_lines(path: pathlib.Path) -> Iterator[bytes]:
    with _open(path) as stream:
        try:
            while line := stream.readline(_MAX_LINE):
                yield line
        except _DAMAGE as error:
            raise SourceError(str(path), f"is damaged: {error}.") from error


def count_lines(path: pathlib.Path) -> int:
    """Returns the number of lines."""
    return sum(1 for _ in _iterate_lines(path))


def read_lines(path: pathlib.Path) -> Iterator[list[str]]:
    """Yields the lines, at most BLOCK at a time."""
    block: list[str] = []
    for line in _iterate_lines(path):
        block.append(line.decode(errors="replace").removeprefix("\ufeff"))
        if len(block) == BLOCK:
            yield block
            block = []
    if block:
        yield block
