"""The idx files of MNIST, QMNIST and EMNIST; the users are the writers of the digits.

Source: LeCun, Cortes and Burges, "The MNIST database" (the format); Yadav and Bottou,
"Cold Case: The Lost MNIST Digits" (2019), whose extended labels name the writers; Cohen
et al., "EMNIST" (2017), whose idx files are transposed.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from simulation.sources import idx_file, source
from simulation.sources.source import SourceError

NUM_CLASSES = 62
_SIDE = 28
# TFF's EMNIST has the polarity of paper: 1.0 is the background. The quotient is taken
# in float64 and rounded once.
_PIXELS = (1 - np.arange(256) / 255).astype(np.float32)
_FEATURES = {
    "pixels": source.Feature(kind=source.Kind.FLOAT, shape=(_SIDE, _SIDE)),
    "label": source.Feature(kind=source.Kind.INT64),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdxSplit:
    """The files of one split, aligned by index; each plain or compressed by gzip.

    Attributes:
        split: TRAIN, VALIDATION or TEST.
        images: An idx3-ubyte file of [N, 28, 28].
        labels: An idx1 file of [N], or QMNIST's idx2-int of [M, 8] with M >= N.
        writers: The writers where `labels` does not have them: an idx1 file of [N], an
            idx2-int of [M, >= writer_column] or a text file of N lines without a
            header. None: they are a column of `labels`.
        writer_column: The column of the writer in an idx2-int file.
        label_column: The column of the label in an idx2-int file.
        transpose: Whether rows and columns are exchanged in `images`, as in EMNIST's
            published files.
    """

    split: str
    images: pathlib.Path
    labels: pathlib.Path
    writers: pathlib.Path | None = None
    writer_column: int = 2
    label_column: int = 0
    transpose: bool = False

    def __post_init__(self) -> None:
        splits = (source.TRAIN, source.VALIDATION, source.TEST)
        if self.split not in splits:
            raise ValueError(f"`split` must be one of {splits}. Found {self.split!r}.")
        for name in ("writer_column", "label_column"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"`{name}` must not be negative. Found {getattr(self, name)!r}."
                )


class IdxSource(source.Source):
    """Digits and letters with TFF's EMNIST features, `pixels` and `label`.

    Attributes:
        splits: The files.
    """

    def __init__(
        self, *, splits: Sequence[IdxSplit], assign: source.Assign | None = None
    ) -> None:
        """Reads the headers.

        Args:
            splits: The files of each split, in the order in which they are read.
            assign: Given a split and its labels, returns the client of each image, in
                the place of its writer; None for the writers.

        Raises:
            SourceError: If a file cannot be opened, is of another type or shape, has
                another number of records than the images, or names no writers.
            ValueError: If there are no splits.
        """
        if not splits:
            raise ValueError("`splits` must not be empty.")
        self.splits = tuple(splits)
        self._plans = [_plan_split(split, assign) for split in self.splits]

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        """The files of all splits, each once."""
        paths: dict[pathlib.Path, None] = {}
        for split in self.splits:
            paths[split.images] = paths[split.labels] = None
            if split.writers is not None:
                paths[split.writers] = None
        return tuple(paths)

    @property
    def features(self) -> Mapping[str, source.Feature]:
        """`pixels`, FLOAT [28, 28] in [0, 1] with background 1.0, and `label`."""
        return _FEATURES

    def read(self, on_bad: source.OnBad) -> Iterator[source.Record]:
        """Yields the images by split, in the order of the files."""
        for plan in self._plans:
            yield from _read_split(plan, on_bad)


def find_idx_files(folder: pathlib.Path) -> tuple[IdxSplit, ...]:
    """Finds the published names of MNIST, QMNIST or EMNIST in a folder.

    QMNIST's extended labels are preferred to MNIST's, with which they are aligned. A
    file of writers is `train-writers.csv`, `t10k-writers.csv` or, for EMNIST,
    `emnist-byclass-train-writers.csv`; also `.txt`, `-idx1-int` and `-idx1-ubyte`.

    Args:
        folder: Where to look; its subfolders are not searched.

    Returns:
        The splits that are there, train first. EMNIST's are marked as transposed.

    Raises:
        SourceError: If there are none, more than one data set, or images without
            labels.
    """
    sets = sorted(
        {
            match[1]
            for path in folder.glob("emnist-*")
            if (match := re.match(r"emnist-(\w+)-(?:train|test)-images", path.name))
        }
    )
    families = [
        {
            source.TRAIN: _Names(stems=("qmnist-train", "train")),
            source.TEST: _Names(stems=("qmnist-test", "t10k")),
        }
    ]
    for name in sets:
        families.append(
            {
                source.TRAIN: _Names(stems=(f"emnist-{name}-train",), transpose=True),
                source.TEST: _Names(stems=(f"emnist-{name}-test",), transpose=True),
            }
        )
    found = [splits for family in families if (splits := _find_family(folder, family))]
    if not found:
        raise SourceError(
            str(folder),
            "has no train-images-idx3-ubyte[.gz], t10k-images-idx3-ubyte[.gz], "
            "qmnist-...-images-idx3-ubyte[.gz] or emnist-...-images-idx3-ubyte[.gz].",
        )
    if len(found) > 1:
        names = ", ".join(splits[0].images.name for splits in found)
        raise SourceError(
            str(folder), f"must hold one data set. Found {names}: name the files."
        )
    return found[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Names:
    """What the files of a split may begin with, by preference."""

    stems: tuple[str, ...]
    transpose: bool = False


def _find_family(
    folder: pathlib.Path, family: Mapping[str, _Names]
) -> tuple[IdxSplit, ...]:
    splits = []
    for split, names in family.items():
        images = _find_file(folder, names.stems, ("-images-idx3-ubyte",))
        if images is None:
            continue
        labels = _find_file(
            folder, names.stems, ("-labels-idx2-int", "-labels-idx1-ubyte")
        )
        if labels is None:
            raise SourceError(
                str(images), f"must stand beside {names.stems[-1]}-labels-idx1-ubyte."
            )
        writers = None
        if "idx2" not in labels.name:
            kinds = ("-idx1-int", "-idx1-ubyte", ".csv", ".txt")
            endings = tuple("-writers" + kind for kind in kinds)
            writers = _find_file(folder, names.stems, endings)
        splits.append(
            IdxSplit(
                split=split,
                images=images,
                labels=labels,
                writers=writers,
                transpose=names.transpose,
            )
        )
    return tuple(splits)


def _find_file(
    folder: pathlib.Path, stems: Sequence[str], endings: Sequence[str]
) -> pathlib.Path | None:
    for stem in stems:
        for ending in endings:
            # Some unpackers write train-images.idx3-ubyte.
            for name in (stem + ending, (stem + ending).replace("-idx", ".idx")):
                for suffix in ("", ".gz"):
                    if (path := folder / (name + suffix)).is_file():
                        return path
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Column:
    """One value for each of `count` images: a column of an idx file, or lines of text.

    Attributes:
        path: The file.
        header: What it says about itself; None for text.
        column: The column of an idx2 file.
        count: How many records are read.
    """

    path: pathlib.Path
    header: idx_file.Header | None
    column: int
    count: int

    def read(self) -> Iterator[list]:
        """Yields at most idx_file.BLOCK values at a time."""
        if self.header is None:
            yield from idx_file.read_lines(self.path)
            return
        for block in idx_file.read_blocks(self.header, self.count):
            yield (block if block.ndim == 1 else block[:, self.column]).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """A split whose headers were read: its clients are writers, or a partition's."""

    split: IdxSplit
    images: idx_file.Header
    labels: _Column
    clients: _Column | source.Assign


def _plan_split(split: IdxSplit, assign: source.Assign | None) -> _Plan:
    images = idx_file.read_header(split.images)
    if images.dtype != idx_file.UBYTE or images.shape[1:] != (_SIDE, _SIDE):
        raise SourceError(
            str(split.images),
            f"must hold bytes of shape [N, {_SIDE}, {_SIDE}]. Found "
            f"{images.dtype.name} of {list(images.shape)}.",
        )
    count = images.shape[0]
    labels = _plan_column(split.labels, split.label_column, count, name="label")
    if assign is not None:
        return _Plan(split=split, images=images, labels=labels, clients=assign)
    if split.writers is None and labels.header and len(labels.header.shape) == 1:
        raise SourceError(
            str(split.labels),
            f"names no writers: `labels` must be an idx2-int file with the writer in "
            f"column {split.writer_column} (qmnist-train-labels-idx2-int), or `writers`"
            " a file with one writer for each image; or give a `partition`.",
        )
    path = split.labels if split.writers is None else split.writers
    writers = _plan_column(path, split.writer_column, count, name="writer")
    return _Plan(split=split, images=images, labels=labels, clients=writers)


def _plan_column(path: pathlib.Path, column: int, count: int, *, name: str) -> _Column:
    if name == "writer" and idx_file.is_text(path):
        _check_count(path, idx_file.count_lines(path), count, unit="lines")
        return _Column(path=path, header=None, column=0, count=count)
    header = idx_file.read_header(path)
    rows = header.shape[0]
    if len(header.shape) == 3:
        raise SourceError(str(path), f"must be an idx1 or idx2 file of {name}s.")
    if len(header.shape) == 1:
        _check_count(path, rows, count, unit="records")
    elif column >= header.shape[1]:
        raise SourceError(
            str(path),
            f"`{name}_column` must be less than its {header.shape[1]} columns. Found "
            f"{column}.",
        )
    elif rows < count:
        # More are fine: QMNIST has 60,000 test labels, of which the first 10,000 are
        # those of MNIST's images.
        _check_count(path, rows, count, unit="rows")
    return _Column(path=path, header=header, column=column, count=count)


def _check_count(path: pathlib.Path, found: int, count: int, *, unit: str) -> None:
    if found != count:
        raise SourceError(
            str(path),
            f"must have one for each of {count} images. Found {found} {unit}.",
        )


def _read_split(plan: _Plan, on_bad: source.OnBad) -> Iterator[source.Record]:
    split, index = plan.split, 0
    images = idx_file.read_blocks(plan.images, plan.images.shape[0])
    try:
        clients = _read_clients(plan)
    except SourceError as error:
        on_bad(error)
        return
    labels = plan.labels.read()
    while True:
        try:
            # A file that ends early gives a shorter block, and raises at the next. At
            # the end all three are asked, so that each looks for data to spare.
            block = next(images, None)
            label_block, client_block = next(labels, None), next(clients, None)
        except SourceError as error:
            on_bad(error)
            return
        if block is None or label_block is None or client_block is None:
            return
        pixels = _PIXELS[block.swapaxes(1, 2) if split.transpose else block]
        for image, label, client in zip(
            pixels, label_block, client_block, strict=False
        ):
            record = None
            try:
                # None for an image that the partition gives to nobody.
                if client is not None:
                    record = _build_record(plan, index, image, label, client)
            except SourceError as error:
                on_bad(error)
            if record is not None:
                yield record
            index += 1


def _read_clients(plan: _Plan) -> Iterator[list]:
    """Yields writers, or the names that a partition gives, idx_file.BLOCK at a time.

    Raises:
        SourceError: If the labels that a partition needs cannot be read.
    """
    if isinstance(plan.clients, _Column):
        return plan.clients.read()
    labels = [label for block in plan.labels.read() for label in block]
    names = source.assign_clients(
        plan.clients, plan.split.split, {"label": np.array(labels, np.int64)}
    )
    return (
        list(names[k : k + idx_file.BLOCK])
        for k in range(0, len(names), idx_file.BLOCK)
    )


def _build_record(
    plan: _Plan, index: int, image: np.ndarray, label: int, client: int | str
) -> source.Record:
    if not 0 <= label < NUM_CLASSES:
        raise SourceError(
            f"{plan.labels.path}, record {index}",
            f"the label must be in [0, {NUM_CLASSES}). Found {label}.",
        )
    client_id = str(client)
    if isinstance(plan.clients, _Column):
        place = f"{plan.clients.path}, record {index}"
        try:
            client_id = _name_writer(client)
        except ValueError as error:
            raise SourceError(place, str(error)) from None
    return source.Record(
        client_id=client_id,
        features={"pixels": image, "label": label},
        place=f"{plan.split.images}, record {index}",
        split=plan.split.split,
    )


def _name_writer(writer: int | str) -> str:
    """Returns `writer_0123` for a number and `writer_<name>` for a name."""
    if isinstance(writer, str):
        name = writer.strip().strip('"').strip()
        if not (name.isascii() and name.isdigit()):
            if not name or "," in name or "\N{REPLACEMENT CHARACTER}" in name:
                raise ValueError(
                    f"a line must be one writer in UTF-8. Found {writer!r}."
                )
            return f"writer_{name}"
        writer = int(name)
    if writer < 0:
        raise ValueError(f"a writer must not be negative. Found {writer}.")
    return f"writer_{writer:04d}"
