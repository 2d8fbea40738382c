"""The archives of CIFAR-10 and CIFAR-100 in their version for Python.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009):
cifar-10-python.tar.gz and cifar-100-python.tar.gz. The images have no users: a
partition assigns them.

The batches are pickles, and a pickle can run code. Those that are read here cannot:
the few names that the published files ask for stand for harmless things of this module,
and any other name is an error. Nothing is unpacked onto the disk.
"""

import dataclasses
import functools
import lzma
import math
import pathlib
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

from simulation.sources import source
from simulation.sources.source import SourceError

_SIDE, _CHANNELS = 32, 3
_WIDTH = _CHANNELS * _SIDE * _SIDE
_SPLITS = {
    10: {f"data_batch_{number}": source.TRAIN for number in range(1, 6)}
    | {"test_batch": source.TEST},
    100: {"train": source.TRAIN, "test": source.TEST},
}
# By the number of classes: where a feature stands in a batch, and how many values it
# can have.
_LABELS = {
    10: {"label": ("labels", 10)},
    100: {"label": ("fine_labels", 100), "coarse_label": ("coarse_labels", 20)},
}
_NAMES = tuple(name for splits in _SPLITS.values() for name in splits)
# Among the labels of a batch: where their images stand in it.
_INDEX = "index"
_FOLDERS = ("cifar-10-batches-py", "cifar-100-python")
# What a damaged archive raises while it is read.
_DAMAGE = (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError)


class CifarSource(source.Source):
    """Images with TFF's CIFAR-100 features; `coarse_label` where there are 100 labels.

    The images come in the order of the archive. The labels that are given to the
    partition are in the order of the batches' names, so that it is the same for an
    archive and for its unpacked folder.
    """

    def __init__(self, *, path: pathlib.Path, assign: source.Assign) -> None:
        """Initializes the source.

        Args:
            path: The archive (.tar, .tar.gz, .tar.xz), or the folder that it holds or
                the one around it. Batches may be missing.
            assign: Given a split (TRAIN, TEST) and its labels, returns the client of
                each image. Called once a split.

        Raises:
            SourceError: If there is no such file or folder, or no batch in a folder.
        """
        self._path = path
        self._assign = assign
        if not path.exists():
            raise SourceError(str(path), "must be an archive or a folder.")
        self._folder = _find_folder(path) if path.is_dir() else None

    @functools.cached_property
    def num_classes(self) -> int:
        """10 or 100: of which data set the batches are.

        Raises:
            SourceError: If the archive is damaged before its first batch or has none.
        """
        for name, _ in self._open_members(_raise):
            for num_classes, splits in _SPLITS.items():
                if name in splits:
                    return num_classes
        raise SourceError(str(self._path), f"must hold one of {', '.join(_NAMES)}.")

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        """The archive, or the batches of the folder."""
        if self._folder is None:
            return (self._path,)
        names = _SPLITS[self.num_classes]
        return tuple(
            self._folder / name for name in names if (self._folder / name).is_file()
        )

    @property
    def features(self) -> Mapping[str, source.Feature]:
        """`image`, INT64 [32, 32, 3] in 0..255, `label` and, of 100, `coarse_label`."""
        image = source.Feature(kind=source.Kind.INT64, shape=(_SIDE, _SIDE, _CHANNELS))
        label = source.Feature(kind=source.Kind.INT64)
        return {"image": image, **dict.fromkeys(_LABELS[self.num_classes], label)}

    def read(self, on_bad: source.OnBad) -> Iterator[source.Record]:
        """Yields the images that have a client, one batch in memory at a time.

        Reads the batches twice: their labels for the partition, then the images.
        """
        batches = self._read_labels(on_bad)
        clients = self._assign_batches(batches)
        splits = _SPLITS[self.num_classes]
        for name, stream in self._open_members(on_bad):
            if name not in batches:
                continue
            labels, place = batches.pop(name), f"{self._path}, {name}"
            batch = _load_batch(stream, place, self.num_classes)
            indices = labels.pop(_INDEX)
            for row, (index, client_id) in enumerate(
                zip(indices, clients[name], strict=True)
            ):
                if client_id is not None:
                    values = {key: int(column[row]) for key, column in labels.items()}
                    yield source.Record(
                        client_id=client_id,
                        features={"image": _build_image(batch.data[index]), **values},
                        place=f"{place}, image {index}",
                        split=splits[name],
                    )
            if not batches:
                return

    def _read_labels(self, on_bad: source.OnBad) -> dict[str, dict[str, np.ndarray]]:
        """Returns the labels of each sound image, and its index, by batch."""
        splits, names = _SPLITS[self.num_classes], _LABELS[self.num_classes]
        found: dict[str, dict[str, np.ndarray]] = {}
        for name, stream in self._open_members(on_bad):
            if name not in splits:
                continue
            place = f"{self._path}, {name}"
            try:
                if name in found:
                    raise SourceError(place, "must be in the archive once.")
                batch = _load_batch(stream, place, self.num_classes)
            except SourceError as error:
                on_bad(error)
                continue
            sound = np.ones(len(batch.data), bool)
            for feature, (_, limit) in names.items():
                column = batch.labels[feature]
                for index in np.flatnonzero((column < 0) | (column >= limit)):
                    sound[index] = False
                    on_bad(
                        SourceError(
                            f"{place}, image {index}",
                            f"`{feature}` must be in [0, {limit}). Found "
                            f"{column[index]}.",
                        )
                    )
            indices = np.flatnonzero(sound)
            found[name] = {key: batch.labels[key][indices] for key in names}
            found[name][_INDEX] = indices
        return found

    def _assign_batches(
        self, batches: Mapping[str, Mapping[str, np.ndarray]]
    ) -> dict[str, Sequence[str | None]]:
        """Returns the clients of the images of each batch."""
        clients: dict[str, Sequence[str | None]] = {}
        splits = _SPLITS[self.num_classes]
        for split in (source.TRAIN, source.TEST):
            names = [name for name in splits if splits[name] == split]
            names = [name for name in names if name in batches]
            if not names:
                continue
            labels = {
                key: np.concatenate([batches[name][key] for name in names])
                for key in _LABELS[self.num_classes]
            }
            client_ids, start = source.assign_clients(self._assign, split, labels), 0
            for name in names:
                stop = start + len(batches[name][_INDEX])
                clients[name] = client_ids[start:stop]
                start = stop
        return clients

    def _open_members(self, on_bad: source.OnBad) -> Iterator[tuple[str, IO[bytes]]]:
        """Yields the files by name, open until the next; an archive as a stream."""
        if self._folder is not None:
            for name in _NAMES:
                if (self._folder / name).is_file():
                    with (self._folder / name).open("rb") as stream:
                        yield name, stream
            return
        try:
            with tarfile.open(self._path, "r|*") as archive:
                for member in archive:
                    name = pathlib.PurePosixPath(member.name).name
                    content = archive.extractfile(member) if member.isfile() else None
                    if content is not None:
                        yield name, content
        except _DAMAGE as error:
            on_bad(SourceError(str(self._path), f"is damaged: {error}."))


def _raise(error: SourceError) -> None:
    raise error


def _find_folder(path: pathlib.Path) -> pathlib.Path:
    for folder in (path, *(path / name for name in _FOLDERS)):
        if any((folder / name).is_file() for name in _NAMES):
            return folder
    raise SourceError(str(path), f"must hold one of {', '.join(_NAMES)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Batch:
    """A batch: uint8 [N, 3072], planes of red, green and blue; int64 [N] by feature."""

    data: np.ndarray
    labels: Mapping[str, np.ndarray]


def _build_image(row: np.ndarray) -> np.ndarray:
    """Returns the image of a row, int64 [32, 32, 3]."""
    planes = row.reshape(_CHANNELS, _SIDE, _SIDE)
    return planes.transpose(1, 2, 0).astype(np.int64)


def _load_batch(stream: IO[bytes], place: str, num_classes: int) -> _Batch:
    try:
        content = _Unpickler(stream, encoding="bytes").load()
    except Exception as error:  # What a damaged pickle raises is not specified.
        raise SourceError(place, f"cannot be unpickled: {error}.") from error
    if not isinstance(content, dict):
        raise SourceError(
            place, f"must be a dictionary. Found {type(content).__name__}."
        )
    content = {
        key.decode("latin1") if isinstance(key, bytes) else key: value
        for key, value in content.items()
    }
    data = content.get("data")
    data = data.value if isinstance(data, _Array) else None
    if data is None or data.ndim != 2 or data.shape[1] != _WIDTH:
        found = "none" if data is None else list(data.shape)
        raise SourceError(
            place, f"`data` must be an array of [N, {_WIDTH}] bytes. Found {found}."
        )
    labels = {}
    for feature, (key, _) in _LABELS[num_classes].items():
        values = content.get(key)
        if not isinstance(values, list) or not all(type(x) is int for x in values):
            raise SourceError(place, f"`{key}` must be a list of integers.")
        if len(values) != len(data):
            raise SourceError(
                place,
                f"`{key}` must have one for each of {len(data)} images. Found "
                f"{len(values)}.",
            )
        # Beyond every class, and beyond no int64.
        bound = 2**31
        labels[feature] = np.array([max(-bound, min(x, bound)) for x in values])
    return _Batch(data=data, labels=labels)


class _Unpickler(pickle.Unpickler):
    """Loads lists, dictionaries, strings, numbers and arrays of bytes, and no more."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Returns the stand-in for a name.

        Raises:
            pickle.UnpicklingError: If the published files have no such name.
        """
        build = _STAND_INS.get((module_name, global_name))
        if build is None:
            raise pickle.UnpicklingError(
                f"it asks for `{module_name}.{global_name}`, which no published batch "
                "needs; it was not run"
            )
        return _Global(build)


class _Global:
    """What a name in a pickle stands for: it can be called, and not changed."""

    __slots__ = ("_build",)

    def __init__(self, build: Callable) -> None:
        self._build = build

    def __call__(self, *args: Any) -> Any:
        return self._build(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes a name that it asks for")


class _Array:
    """An array whose values come after it, as the state of `numpy.ndarray`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        sound = isinstance(dtype, _Bytes) and isinstance(data, bytes)
        sound = sound and all(type(size) is int and size >= 0 for size in shape)
        if not sound or math.prod(shape) != len(data):
            raise pickle.UnpicklingError("an array must be of bytes, and whole")
        order: Any = "F" if is_fortran else "C"
        self.value = np.frombuffer(data, np.uint8).reshape(shape, order=order)


class _Bytes:
    """The type of the values of an array, `numpy.dtype("u1")`."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


def _build_dtype(name: Any, *_: Any) -> _Bytes:
    if name not in ("u1", b"u1"):
        raise pickle.UnpicklingError(f"an array must be of bytes. Found {name!r}")
    return _Bytes()


def _encode(text: str, encoding: Any) -> bytes:
    """How a pickle of protocol 2 has bytes where Python 3 wrote it."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"it encodes as {encoding!r}")
    return text.encode("latin1")


def _build_nothing(*_: Any) -> Any:
    raise pickle.UnpicklingError("it calls `numpy.ndarray`")


# numpy.core was renamed in NumPy 2. An array is made empty, then given its state.
_STAND_INS: dict[tuple[str, str], Callable] = {
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy", "ndarray"): _build_nothing,
    ("numpy", "dtype"): _build_dtype,
    ("_codecs", "encode"): _encode,
    # No argument: the empty string.
    ("__builtin__", "bytes"): lambda: b"",
    ("builtins", "bytes"): lambda: b"",
}
