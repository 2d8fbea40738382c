"""The staging file of an import: records, serialised, that a later try takes up."""

import contextlib
import itertools
import json
import pathlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from simulation.population.split import SplitBy
from simulation.sources.source import Feature, Kind, Record, Source, SourceError, Value

_LABEL = "label"
# A label counts from 0: a larger one is a mistake, and a model for it enormous.
_MAX_CLASSES = 1 << 20
# Whose records are those that are left out.
NOBODY = ""
_COMMIT_EVERY = 5_000
# Lists: of an array of another type, protobuf takes nothing and raises nothing.
_FEATURES: Mapping[Kind, Callable[[Any], tf.train.Feature]] = {
    Kind.BYTES: lambda value: tf.train.Feature(
        bytes_list=tf.train.BytesList(value=[value])
    ),
    Kind.INT64: lambda value: tf.train.Feature(
        int64_list=tf.train.Int64List(value=np.ravel(value).tolist())
    ),
    Kind.FLOAT: lambda value: tf.train.Feature(
        float_list=tf.train.FloatList(value=np.ravel(value).tolist())
    ),
}
# Told of the number of examples that are staged.
Progress = Callable[[int], None]


@contextlib.contextmanager
def open_staging(path: pathlib.Path, wanted: Any) -> Iterator[sqlite3.Connection]:
    """Gives the staging file: that of an interrupted import of the same, or a new one.

    Nobody else can open it meanwhile.
    """
    connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute("CREATE TABLE IF NOT EXISTS wanted (text TEXT)")
        text = json.dumps(wanted, sort_keys=True)
        if connection.execute("SELECT text FROM wanted").fetchall() != [(text,)]:
            for table in ("wanted", "staged"):
                connection.execute(f"DROP TABLE IF EXISTS {table}")
            connection.execute("CREATE TABLE wanted (text TEXT)")
            connection.execute("INSERT INTO wanted VALUES (?)", [text])
            connection.execute(
                "CREATE TABLE staged (client_id TEXT NOT NULL, split TEXT, "
                "label INTEGER, proto BLOB NOT NULL)"
            )
        connection.execute("COMMIT")
        yield connection
    finally:
        connection.close()


def stage(
    staged: sqlite3.Connection,
    source: Source,
    by: SplitBy,
    *,
    skip_bad: bool,
    on_progress: Progress,
) -> list[str]:
    """Stages the records that are not staged yet. Returns what was wrong."""
    (done,) = staged.execute("SELECT COUNT(*) FROM staged").fetchone()
    bad: list[SourceError] = []

    def on_bad(error: SourceError) -> None:
        if not skip_bad:
            raise error
        bad.append(error)

    features, count = source.features, done
    records = itertools.islice(source.read(on_bad), done, None)
    staged.execute("BEGIN")
    try:
        for record in records:
            try:
                row = _build_row(record, features, by)
            except SourceError as error:
                if not skip_bad:
                    raise
                # A row for each record, also for those that are left out.
                row = (NOBODY, None, None, str(error).encode(errors="replace"))
            staged.execute("INSERT INTO staged VALUES (?, ?, ?, ?)", row)
            count += 1
            if count % _COMMIT_EVERY == 0:
                staged.execute("COMMIT")
                staged.execute("BEGIN")
                on_progress(count)
    finally:
        # Also what came before an error or a signal; not where the signal came between
        # a COMMIT and its BEGIN, or a full disk has ended the transaction.
        if staged.in_transaction:
            staged.execute("COMMIT")
    on_progress(count)
    rows = staged.execute(f"SELECT proto FROM staged WHERE client_id = '{NOBODY}'")
    return [str(error) for error in bad] + [row[0].decode() for row in rows]


def serialize(features: Mapping[str, Feature], values: Mapping[str, Value]) -> bytes:
    """Returns an example as a serialised `tf.train.Example`.

    Raises:
        ValueError: If a feature is missing, or of another shape or type.
    """
    if values.keys() != features.keys():
        raise ValueError(
            f"an example must have the features {sorted(features)}. Found "
            f"{sorted(values)}."
        )
    parts = {}
    for name, feature in features.items():
        value = values[name]
        if feature.kind is not Kind.BYTES and np.shape(value) != feature.shape:
            raise ValueError(
                f"`{name}` must have shape {feature.shape}. Found {np.shape(value)}."
            )
        try:
            parts[name] = _FEATURES[feature.kind](value)
        except (OverflowError, TypeError, ValueError) as error:
            kind = feature.kind.value
            raise ValueError(f"`{name}` must be {kind}: {error}.") from error
    example = tf.train.Example(features=tf.train.Features(feature=parts))
    return example.SerializeToString(deterministic=True)


def _build_row(
    record: Record, features: Mapping[str, Feature], by: SplitBy
) -> tuple[str, str | None, int | None, bytes]:
    if not record.client_id:
        raise SourceError(record.place, "the user must not be empty. Found ''.")
    if not _is_text(record.client_id):
        raise SourceError(
            record.place,
            f"the user must be Unicode without NUL. Found {record.client_id!r}.",
        )
    if by is SplitBy.SOURCE and record.split is None:
        raise SourceError(
            record.place,
            "the source does not say whether this is for training or test: give "
            "--split=user or --split=example",
        )
    try:
        proto = serialize(features, record.features)
    except ValueError as error:
        raise SourceError(record.place, str(error)) from error
    label = None
    if features.get(_LABEL) == Feature(kind=Kind.INT64):
        label = int(np.asarray(record.features[_LABEL]))
        if not 0 <= label < _MAX_CLASSES:
            raise SourceError(
                record.place,
                f"the label must be in [0, {_MAX_CLASSES}). Found {label}.",
            )
    return record.client_id, record.split, label, proto


def _is_text(name: str) -> bool:
    """Returns whether SQLite gives a name back as it is."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in name
