"""Tables with a column of users: CSV files, plain or compressed by gzip, and Parquet.

CSV is read as RFC 4180 has it, in UTF-8, with a header. Parquet needs pyarrow.
"""

import csv
import functools
import gzip
import importlib
import math
import pathlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from simulation.sources import source
from simulation.sources.source import SourceError

X, LABEL = "x", "label"
_GZIP_MAGIC = b"\x1f\x8b"
_PARQUET_MAGIC = b"PAR1"
# What a damaged file raises while it is read.
_DAMAGE = (OSError, EOFError, zlib.error)
# A longer line is read in parts, which then are no rows.
_MAX_LINE = 2**24
_PARQUET_ROWS = 4096
# With more, the column of labels is more likely a wrong one.
_MAX_CLASSES = 10_000
_INTEGER = re.compile(r"[+-]?[0-9]+(\.0*)?", re.ASCII)
# What pandas calls an index without a name.
_INDEX = re.compile("__index_level_[0-9]+__")
# Bytes that are not UTF-8, as `surrogateescape` decodes them.
_SURROGATE = re.compile("[\udc80-\udcff]")
_MAX_FLOAT = float(np.finfo(np.float32).max)
_MAX_LISTED = 20
_SPLITS = (source.TRAIN, source.VALIDATION, source.TEST)

# A row: its place, and the values of the columns that were asked for.
_Row = tuple[str, Sequence[Any]]


class TableSource(source.Source):
    """Rows with a user, a label, numbers (`x`) and texts."""

    def __init__(
        self,
        *,
        path: pathlib.Path,
        user_column: str,
        label_column: str,
        text_columns: tuple[str, ...] = (),
        split_column: str | None = None,
        feature_columns: tuple[str, ...] | None = None,
        labels: tuple[str, ...] | None = None,
    ) -> None:
        """Reads the names of the columns.

        Args:
            path: The file: CSV, CSV compressed by gzip, or Parquet, as its first bytes
                say.
            user_column: Whose a row is.
            label_column: Its label: integers, or names of classes.
            text_columns: Texts that become features of their own names.
            split_column: Which split a row is of: train, validation or test. None: the
                source does not divide its rows.
            feature_columns: The numbers that become `x`, in order. None: all other
                columns. Empty: there is no `x`.
            labels: The names of the classes, in order. None: integers stay what they
                are, and other names are numbered in sorted order, which takes another
                pass over the file.

        Raises:
            SourceError: If the file cannot be opened, is empty, lacks a column or has
                one twice.
            ValueError: If a column is named twice, no feature is left, or `labels` is
                empty or not distinct.
        """
        self._path = path
        if labels is not None and (not labels or len(set(labels)) != len(labels)):
            raise ValueError(f"`labels` must be distinct names. Found {labels!r}.")
        self._labels = labels
        self._is_parquet = _read_magic(path).startswith(_PARQUET_MAGIC)
        read_columns = _read_parquet_columns if self._is_parquet else _read_csv_columns
        columns = read_columns(path)
        special = (user_column, label_column, *text_columns)
        special += () if split_column is None else (split_column,)
        if feature_columns is None:
            feature_columns = tuple(name for name in columns if name not in special)
            if any(not name or _INDEX.match(name) for name in feature_columns):
                raise SourceError(
                    str(path),
                    "has a column without a name, such as an index: name "
                    f"`feature_columns`. Found {list(columns)}.",
                )
        self._columns = (*special, *feature_columns)
        self._user_column, self._label_column = user_column, label_column
        self._split_column = split_column
        _check_columns(path, self._columns, columns)
        for name in text_columns:
            if name in (X, LABEL):
                raise ValueError(
                    f"`text_columns` must not have {name!r}, which is a feature that "
                    "is made of others."
                )
        self._text_columns, self._feature_columns = text_columns, feature_columns
        if not text_columns and not feature_columns:
            raise ValueError(
                "`feature_columns` or `text_columns` must name a column. Found none "
                f"beside {special}."
            )

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        """The file."""
        return (self._path,)

    @property
    def features(self) -> Mapping[str, source.Feature]:
        """`x` FLOAT [columns] where there are numbers, the texts, and `label`."""
        features = {}
        if self._feature_columns:
            shape = (len(self._feature_columns),)
            features[X] = source.Feature(kind=source.Kind.FLOAT, shape=shape)
        for name in self._text_columns:
            features[name] = source.Feature(kind=source.Kind.BYTES)
        features[LABEL] = source.Feature(kind=source.Kind.INT64)
        return features

    @property
    def separators(self) -> Mapping[str, str]:
        """The words of the texts are counted."""
        return {name: " " for name in self._text_columns}

    @functools.cached_property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the labels in order; None where the labels are integers.

        Raises:
            SourceError: If the labels of the file are names, and far too many.
        """
        if self._labels is not None:
            return self._labels
        names: set[str] = set()
        has_names = False
        for _, (value,) in self._read_rows((self._label_column,), lambda _: None):
            if _is_empty(value):
                continue
            has_names = has_names or _to_integer(value) is None
            # Integers may be many: only names are numbered.
            if len(names) <= _MAX_CLASSES:
                names.add(str(value))
            if has_names and len(names) > _MAX_CLASSES:
                raise SourceError(
                    str(self._path),
                    f"column {self._label_column!r} must hold at most {_MAX_CLASSES} "
                    "labels where they are not integers. Found more.",
                )
        return tuple(sorted(names)) if has_names else None

    def read(self, on_bad: source.OnBad) -> Iterator[source.Record]:
        """Yields the rows in order."""
        known = self.classes
        numbers = None if known is None else {name: i for i, name in enumerate(known)}
        is_empty = True
        for place, values in self._read_rows(self._columns, on_bad):
            is_empty = False
            try:
                record = self._build_record(place, values, numbers)
            except SourceError as error:
                on_bad(error)
            else:
                yield record
        if is_empty:
            on_bad(SourceError(str(self._path), "must hold a row that can be read."))

    def _build_record(
        self, place: str, values: Sequence[Any], numbers: Mapping[str, int] | None
    ) -> source.Record:
        left = iter(values)
        user, label = next(left), next(left)
        if _is_empty(user):
            raise SourceError(place, f"{self._user_column!r} must name a user.")
        features: dict[str, source.Value] = {}
        for name in self._text_columns:
            features[name] = _encode_text(next(left), place, name)
        split = None
        if self._split_column is not None:
            split = next(left)
            if split not in _SPLITS:
                raise SourceError(
                    place,
                    f"{self._split_column!r} must be one of {_SPLITS}. Found "
                    f"{split!r}.",
                )
        if self._feature_columns:
            features[X] = _parse_numbers(tuple(left), place, self._feature_columns)
        features[LABEL] = _parse_label(label, numbers, place, self._label_column)
        return source.Record(
            client_id=str(user), features=features, place=place, split=split
        )

    def _read_rows(
        self, columns: tuple[str, ...], on_bad: source.OnBad
    ) -> Iterator[_Row]:
        read = _read_parquet if self._is_parquet else _read_csv
        return read(self._path, columns, on_bad)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _encode_text(value: Any, place: str, column: str) -> bytes:
    if not isinstance(value, str):
        raise SourceError(place, f"{column!r} must be text. Found {value!r}.")
    return value.encode()


def _parse_numbers(
    values: Sequence[Any], place: str, columns: Sequence[str]
) -> np.ndarray:
    """Returns float32 [columns]."""
    numbers = np.empty(len(values), np.float32)
    for index, value in enumerate(values):
        try:
            # Python alone takes 1_000 for a number.
            number = math.nan if "_" in str(value) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not abs(number) <= _MAX_FLOAT:
            raise SourceError(
                place,
                f"{columns[index]!r} must be a finite number of 32 bits. Found "
                f"{value!r}.",
            )
        numbers[index] = number
    return numbers


def _parse_label(
    value: Any, numbers: Mapping[str, int] | None, place: str, column: str
) -> int:
    if numbers is None:
        label = None if value is None else _to_integer(value)
        if label is None:
            raise SourceError(place, f"{column!r} must be an integer. Found {value!r}.")
        return label
    if _is_empty(value) or str(value) not in numbers:
        names = list(numbers)
        known = ", ".join(names[:_MAX_LISTED]) + (
            f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        )
        raise SourceError(place, f"{column!r} must be one of {known}. Found {value!r}.")
    return numbers[str(value)]


def _to_integer(value: Any) -> int | None:
    """Returns the integer that is meant (also by 3.0), None where none is."""
    if isinstance(value, str):
        if not _INTEGER.fullmatch(value.strip()):
            return None
        number = int(value.strip().partition(".")[0])
    elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
    else:
        return None
    return number if -(2**63) <= number < 2**63 else None


def _check_columns(
    path: pathlib.Path, wanted: Sequence[str], columns: Sequence[str]
) -> None:
    repeated = sorted({name for name in columns if columns.count(name) > 1})
    if repeated:
        raise SourceError(
            str(path),
            f"the names of columns must be distinct. Found twice: {repeated}.",
        )
    missing = [name for name in wanted if name not in columns]
    if missing:
        raise SourceError(
            str(path), f"must have the columns {missing}. Found {list(columns)}."
        )
    twice = sorted({name for name in wanted if wanted.count(name) > 1})
    if twice:
        raise ValueError(f"A column must have one role. Found {twice} in two.")


def _read_magic(path: pathlib.Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(4)
    except OSError as error:
        raise SourceError(str(path), f"cannot be read: {error}.") from error


def _read_csv_columns(path: pathlib.Path) -> tuple[str, ...]:
    with _open_csv(path) as stream:
        try:
            columns = next(_split_rows(stream), None)
        except csv.Error as error:
            raise SourceError(f"{path}, line 1", f"is no CSV: {error}.") from error
        except _DAMAGE as error:
            raise SourceError(str(path), f"is damaged: {error}.") from error
    if not columns:
        raise SourceError(str(path), "is empty: line 1 must name the columns.")
    _check_text(columns, f"{path}, line 1")
    return tuple(columns)


def _read_csv(
    path: pathlib.Path, columns: Sequence[str], on_bad: source.OnBad
) -> Iterator[_Row]:
    with _open_csv(path) as stream:
        rows = _split_rows(stream)
        header = next(rows)
        positions = [header.index(name) for name in columns]
        while True:
            place = f"{path}, line {rows.line_num + 1}"
            try:
                row = next(rows)
                if not row:
                    continue
                if len(row) != len(header):
                    raise SourceError(
                        place, f"must have {len(header)} fields. Found {len(row)}."
                    )
                _check_text(row, place)
            except StopIteration:
                return
            except csv.Error as error:
                on_bad(SourceError(place, f"is no row of CSV: {error}."))
            except SourceError as error:
                on_bad(error)
            except _DAMAGE as error:
                on_bad(SourceError(place, f"the file is damaged: {error}."))
                return
            else:
                yield place, [row[position] for position in positions]


def _open_csv(path: pathlib.Path) -> BinaryIO:
    if _read_magic(path).startswith(_GZIP_MAGIC):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def _split_rows(stream: BinaryIO) -> Any:
    """Returns the rows; what is not UTF-8 becomes surrogates, which no UTF-8 has."""
    lines = iter(functools.partial(stream.readline, _MAX_LINE), b"")
    decoded = (line.decode(errors="surrogateescape") for line in lines)
    return csv.reader(_skip_mark(decoded), strict=True)


def _skip_mark(lines: Iterator[str]) -> Iterator[str]:
    for first in lines:
        yield first.removeprefix("\ufeff")
        yield from lines


def _check_text(row: Sequence[str], place: str) -> None:
    for field in row:
        if not field.isascii() and _SURROGATE.search(field):
            found = field.encode(errors="surrogateescape")
            raise SourceError(place, f"must be UTF-8. Found {found[:40]!r}.")


def _import_parquet(path: pathlib.Path) -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise SourceError(
            str(path), "Parquet needs pyarrow: `pip install pyarrow`."
        ) from error


def _read_parquet_columns(path: pathlib.Path) -> tuple[str, ...]:
    parquet = _import_parquet(path)
    try:
        return tuple(parquet.read_schema(path).names)
    # pyarrow's ArrowInvalid is a ValueError.
    except (ValueError, OSError) as error:
        raise SourceError(str(path), f"is damaged: {error}") from error


def _read_parquet(
    path: pathlib.Path, columns: Sequence[str], on_bad: source.OnBad
) -> Iterator[_Row]:
    parquet = _import_parquet(path)
    index = 0
    with parquet.ParquetFile(path) as file:
        batches = file.iter_batches(batch_size=_PARQUET_ROWS, columns=list(columns))
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (ValueError, OSError) as error:
                on_bad(SourceError(f"{path}, row {index}", f"is damaged: {error}"))
                return
            # The columns come in the file's order.
            values = [batch.column(name).to_pylist() for name in columns]
            for row in zip(*values, strict=True):
                yield f"{path}, row {index}", row
                index += 1
