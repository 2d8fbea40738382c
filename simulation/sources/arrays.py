"""NPZ files: examples `x`, labels `y` and users `user` as arrays of one length.

A file either divides its examples (`x_train`, `y_train`, `user_train`, `x_test`, ...;
the layout of the synthetic sets of Upcycled-FL) or does not (`x`, `y`, `user`). `x` is
read in blocks; labels and users are held in memory.
"""

import contextlib
import dataclasses
import math
import pathlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from simulation.sources import source
from simulation.sources.source import SourceError

_BLOCK_BYTES = 2**22
_SUFFIXES = {
    "": None,
    "_train": source.TRAIN,
    "_validation": source.VALIDATION,
    "_test": source.TEST,
}
# What a damaged file raises while it is read.
_DAMAGE = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    zlib.error,
    zipfile.BadZipFile,
)
# The kinds of `np.dtype` that each array may have.
_KINDS = {
    "x": ("buif", "numbers"),
    "y": ("buif", "integers"),
    "user": ("uiUS", "integers or strings"),
}
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class ArraySource(source.Source):
    """Arrays with a user for each example: `x` FLOAT [...] and `label` INT64."""

    def __init__(self, *, path: pathlib.Path) -> None:
        """Reads the shapes.

        Args:
            path: The .npz file, written by `np.savez` or `np.savez_compressed`.

        Raises:
            SourceError: If the file is no .npz, lacks an array, or its arrays do not
                fit one another.
        """
        self._path = path
        self._suffixes = self._find_suffixes()
        headers = {suffix: self._check_split(suffix) for suffix in self._suffixes}
        shapes = {header.shape[1:] for header in headers.values()}
        if len(shapes) > 1:
            raise SourceError(
                str(path),
                "the examples of all splits must have one shape. Found "
                f"{sorted(shapes)}.",
            )
        self._headers, self._shape = headers, shapes.pop()

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        """The file."""
        return (self._path,)

    @property
    def features(self) -> Mapping[str, source.Feature]:
        """`x` of the shape of an example, and `label`."""
        return {
            "x": source.Feature(kind=source.Kind.FLOAT, shape=self._shape),
            "label": source.Feature(kind=source.Kind.INT64),
        }

    def read(self, on_bad: source.OnBad) -> Iterator[source.Record]:
        """Yields the examples by split, in the order of the arrays."""
        for suffix in self._suffixes:
            yield from self._read_split(suffix, on_bad)

    def _read_split(self, suffix: str, on_bad: source.OnBad) -> Iterator[source.Record]:
        try:
            labels = self._read_array("y" + suffix)
            users = self._read_array("user" + suffix)
        except SourceError as error:
            on_bad(error)
            return
        blocks, index = self._read_blocks("x" + suffix, self._headers[suffix]), 0
        while True:
            try:
                block = next(blocks, None)
            except _DAMAGE as error:
                on_bad(
                    SourceError(
                        f"{self._path}, x{suffix}[{index}]",
                        f"is damaged here or later: {error}.",
                    )
                )
                return
            if block is None:
                return
            for x in block:
                places = {
                    name: f"{self._path}, {name}{suffix}[{index}]"
                    for name in ("x", "y", "user")
                }
                try:
                    record = source.Record(
                        client_id=_name_user(users[index], places["user"]),
                        features={
                            "x": _to_floats(x, places["x"]),
                            "label": _to_label(labels[index], places["y"]),
                        },
                        place=places["x"],
                        split=_SUFFIXES[suffix],
                    )
                except SourceError as error:
                    on_bad(error)
                else:
                    yield record
                index += 1

    def _find_suffixes(self) -> tuple[str, ...]:
        try:
            with zipfile.ZipFile(self._path) as archive:
                names = [name.removesuffix(".npy") for name in archive.namelist()]
        except _DAMAGE as error:
            raise SourceError(
                str(self._path), f"cannot be read as .npz: {error}."
            ) from error
        found = tuple(
            suffix
            for suffix in _SUFFIXES
            if any(name + suffix in names for name in ("x", "y", "user"))
        )
        if not found or ("" in found and len(found) > 1):
            raise SourceError(
                str(self._path),
                "must have either the arrays x, y, user or x_train, y_train, "
                f"user_train (and _validation, _test). Found {names}.",
            )
        missing = [
            name + suffix
            for suffix in found
            for name in ("x", "y", "user")
            if name + suffix not in names
        ]
        if missing:
            raise SourceError(
                str(self._path), f"must have the arrays {missing}. Found {names}."
            )
        return found

    def _check_split(self, suffix: str) -> "_Header":
        """Returns what `x` says about itself."""
        headers = {}
        for name, (kinds, what) in _KINDS.items():
            header = headers[name] = self._read_header(name + suffix)
            place = f"{self._path}, {name}{suffix}"
            if header.dtype.kind not in kinds:
                raise SourceError(place, f"must be {what}. Found {header.dtype}.")
            if not header.shape or (name != "x" and len(header.shape) != 1):
                wanted = "[N, ...]" if name == "x" else "[N]"
                raise SourceError(
                    place, f"must have shape {wanted}. Found {list(header.shape)}."
                )
            count = headers["x"].shape[0]
            if header.shape[0] != count:
                raise SourceError(
                    place,
                    f"must have one for each of {count} examples of x{suffix}. Found "
                    f"{header.shape[0]}.",
                )
        return headers["x"]

    def _read_header(self, name: str) -> "_Header":
        try:
            with self._open(name) as stream:
                return _read_header(stream)
        except _DAMAGE as error:
            raise SourceError(
                f"{self._path}, {name}", f"is damaged: {error}."
            ) from error

    def _read_array(self, name: str) -> np.ndarray:
        try:
            with self._open(name) as stream:
                return npy.read_array(stream, allow_pickle=False)
        except _DAMAGE as error:
            raise SourceError(
                f"{self._path}, {name}", f"is damaged: {error}."
            ) from error

    def _read_blocks(self, name: str, header: "_Header") -> Iterator[np.ndarray]:
        with self._open(name) as stream:
            if header.is_fortran:
                # Its examples are not contiguous.
                yield npy.read_array(stream, allow_pickle=False)
            else:
                _read_header(stream)
                yield from _iterate_blocks(stream, header)

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        with (
            zipfile.ZipFile(self._path) as archive,
            archive.open(name + ".npy") as stream,
        ):
            yield stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Header:
    """What an array says about itself."""

    shape: tuple[int, ...]
    dtype: np.dtype
    is_fortran: bool


def _read_header(stream: IO[bytes]) -> _Header:
    version = npy.read_magic(stream)
    if version not in _READERS:
        raise ValueError(f"it is of version {version}")
    shape, is_fortran, dtype = _READERS[version](stream)
    return _Header(shape=shape, dtype=dtype, is_fortran=is_fortran)


def _iterate_blocks(stream: IO[bytes], header: _Header) -> Iterator[np.ndarray]:
    """Yields the examples in blocks of at most `_BLOCK_BYTES`, or of one."""
    count, shape = header.shape[0], header.shape[1:]
    size = math.prod(shape) * header.dtype.itemsize
    rows = max(1, _BLOCK_BYTES // max(1, size))
    for start in range(0, count, rows):
        wanted = min(rows, count - start)
        data = stream.read(wanted * size)
        if len(data) < wanted * size:
            raise ValueError(f"it announces {count} examples and ends early")
        yield np.frombuffer(data, header.dtype).reshape(wanted, *shape)


def _to_floats(x: np.ndarray, place: str) -> np.ndarray:
    # Beyond float32 is infinite too.
    with np.errstate(over="ignore"):
        values = np.asarray(x, np.float32)
    if not np.isfinite(values).all():
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise SourceError(
            place,
            f"must hold finite numbers of 32 bits. Found {np.asarray(x)[index]} at "
            f"{list(index)}.",
        )
    return values


def _to_label(value: Any, place: str) -> int:
    # A float may be NaN or infinite; an unsigned integer beyond int64.
    if value != value or value in (np.inf, -np.inf) or int(value) != value:
        raise SourceError(place, f"must be an integer. Found {value}.")
    if not -(2**63) <= int(value) < 2**63:
        raise SourceError(place, f"must fit into int64. Found {value}.")
    return int(value)


def _name_user(value: Any, place: str) -> str:
    try:
        name = value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise SourceError(place, f"must be UTF-8. Found {value!r}.") from error
    if not name.strip():
        raise SourceError(place, "must name a user.")
    return name
