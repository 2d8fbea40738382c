"""Turns a source into the SQLite file that TFF reads: resumable, whole or not at all.

Records are serialised into a staging file, which an interrupted import takes up again.
When all are there they are written in order of users, divided, counted and checked, and
only then does the file get its name.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from simulation import run_folder
from simulation.population.federated_data import DataError
from simulation.population.layout import Layout
from simulation.population.manifest import Manifest, read_manifest
from simulation.population.split import SplitBy, SplitRule
from simulation.sources.source import (
    TEST,
    TRAIN,
    VALIDATION,
    Feature,
    Kind,
    Record,
    Source,
    SourceError,
    Value,
)

_LABEL = "label"
# Features of which the users that have them are counted, not the occurrences.
_COUNTED_BY_USER = ("tags",)
# Whose records are those that are left out.
_NOBODY = ""
_COMMIT_EVERY = 5_000
_MAX_LISTED = 1_000
_HASH_BLOCK = 1 << 20
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
    """What is to be imported.

    Attributes:
        kind: The kind of the source, for the manifest.
        source: The source.
        layout: The file and its splits.
        rule: How examples are divided.
        options: All else that decides the result, as JSON values.
        classes: The names of the classes, where known.
        skip_bad: Whether records that are wrong are left out and listed.
    """

    kind: str
    source: Source
    layout: Layout
    rule: SplitRule
    options: Mapping[str, Any]
    classes: tuple[str, ...] | None = None
    skip_bad: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an import left.

    Attributes:
        path: The file.
        manifest: What is in it.
        was_there: Whether it had been made before, of the same files and options.
    """

    path: pathlib.Path
    manifest: Manifest
    was_there: bool


# Told of the number of examples that are staged.
Progress = Callable[[int], None]


def build_population(
    job: Import,
    folder: pathlib.Path,
    *,
    overwrite: bool = False,
    on_progress: Progress = lambda _: None,
) -> Outcome:
    """Imports a source.

    Args:
        job: What to import.
        folder: Where the file goes.
        overwrite: Whether a file made of something else may be replaced.
        on_progress: Told how many examples are staged.

    Raises:
        SourceError: If a record is wrong and may not be skipped.
        DataError: If the file is there and made of something else, or the result fails
            its checks.
    """
    path = folder / job.layout.file_name
    hashes = _hash_files(job.source.files)
    wanted = {
        "kind": job.kind,
        "files": hashes,
        "options": dict(job.options),
        "split": job.rule.by.value,
        "test_fraction": job.rule.test_fraction,
        "validation_fraction": job.rule.validation_fraction,
        "seed": job.rule.seed,
        "skip_bad": job.skip_bad,
    }
    wanted = json.loads(json.dumps(wanted))
    if path.exists() and not overwrite:
        return _take_present(path, job, wanted)
    folder.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(path.name + ".staging")
    try:
        with _open_staging(staging, wanted) as staged:
            bad = _stage(staged, job, on_progress)
            manifest = _write_final(staged, path, job, wanted, bad)
    except (SourceError, ValueError):
        # Mended files or other options begin anew.
        staging.unlink(missing_ok=True)
        raise
    except sqlite3.Error as error:
        raise DataError(
            f"{path} cannot be written: {error}. (Is another import writing it, or the "
            f"disk full? If {staging.name} is damaged, delete it.)"
        ) from error
    staging.unlink(missing_ok=True)
    return Outcome(path=path, manifest=manifest, was_there=False)


def hash_file(path: pathlib.Path) -> str:
    """Returns a file's SHA-256."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _hash_files(files: Sequence[pathlib.Path]) -> dict[str, str]:
    """Returns the SHA-256 of each file, by its path below the folder of them all.

    Files of several folders may have one name, and the folder may be the class.
    """
    if not files:
        return {}
    root = os.path.commonpath([file.absolute().parent for file in files])
    return {
        file.absolute().relative_to(root).as_posix(): hash_file(file) for file in files
    }


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


def _take_present(path: pathlib.Path, job: Import, wanted: Any) -> Outcome:
    """Returns what is there, if it is what would be made."""
    try:
        manifest = read_manifest(path.with_name(job.layout.manifest_name))
        same = dict(manifest.options) == wanted
    except DataError:
        same = False
    if not same:
        raise DataError(
            f"{path} is there, made of other files or with other options, or without "
            "its manifest; give --overwrite to replace it, or another --name."
        )
    return Outcome(path=path, manifest=manifest, was_there=True)


@contextlib.contextmanager
def _open_staging(path: pathlib.Path, wanted: Any) -> Iterator[sqlite3.Connection]:
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
            for table in ("wanted", "staged", "skipped"):
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


def _stage(staged: sqlite3.Connection, job: Import, on_progress: Progress) -> list[str]:
    """Stages the records that are not staged yet. Returns what was wrong."""
    (done,) = staged.execute("SELECT COUNT(*) FROM staged").fetchone()
    bad: list[SourceError] = []

    def on_bad(error: SourceError) -> None:
        if not job.skip_bad:
            raise error
        bad.append(error)

    features, count = job.source.features, done
    records = itertools.islice(job.source.read(on_bad), done, None)
    staged.execute("BEGIN")
    try:
        for record in records:
            try:
                row = _build_row(record, features, job.rule.by)
            except SourceError as error:
                if not job.skip_bad:
                    raise
                # A row for each record, also for those that are left out.
                row = (_NOBODY, None, None, str(error).encode(errors="replace"))
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
    rows = staged.execute(f"SELECT proto FROM staged WHERE client_id = '{_NOBODY}'")
    return [str(error) for error in bad] + [row[0].decode() for row in rows]


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
    return record.client_id, record.split, label, proto


def _is_text(name: str) -> bool:
    """Returns whether SQLite gives a name back as it is."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in name


def _write_final(
    staged: sqlite3.Connection,
    path: pathlib.Path,
    job: Import,
    wanted: Any,
    bad: list[str],
) -> Manifest:
    """Writes the file, its counts and its manifest, and gives them their names."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    counts = {name: Counter[str]() for name in job.source.separators}
    num_classes = staged.execute("SELECT MAX(label) + 1 FROM staged").fetchone()[0]
    try:
        with contextlib.closing(sqlite3.connect(partial)) as final:
            for statement in (
                "PRAGMA journal_mode = OFF",
                "PRAGMA synchronous = OFF",
                "CREATE TABLE examples (split_name TEXT NOT NULL, "
                "client_id TEXT NOT NULL, serialized_example_proto BLOB NOT NULL)",
                "CREATE TABLE client_metadata (client_id TEXT NOT NULL, "
                "split_name TEXT NOT NULL, num_examples INTEGER NOT NULL)",
            ):
                final.execute(statement)
            written = _write_users(staged, final, job, counts)
            final.execute(
                "CREATE INDEX examples_of_client ON examples (client_id, split_name)"
            )
            final.commit()
            splits = _check(final, job, written)
        manifest = Manifest(
            source=job.kind,
            files=wanted["files"],
            options=wanted,
            features=job.source.features,
            splits=splits,
            classes=job.classes,
            num_classes=len(job.classes) if job.classes else num_classes,
            skipped=tuple(bad[:_MAX_LISTED]),
            num_skipped=len(bad),
        )
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        # A manifest never stands beside a file that it does not tell of.
        path.with_name(job.layout.manifest_name).unlink(missing_ok=True)
        for feature, counter in counts.items():
            run_folder.write_text(
                path.with_name(job.layout.name_count_file(feature)),
                _format_counts(feature, counter),
                durable=True,
            )
        os.replace(partial, path)
        run_folder.write_text(
            path.with_name(job.layout.manifest_name), manifest.to_json(), durable=True
        )
    finally:
        partial.unlink(missing_ok=True)
    return manifest


def _write_users(
    staged: sqlite3.Connection,
    final: sqlite3.Connection,
    job: Import,
    counts: Mapping[str, Counter[str]],
) -> Counter[str]:
    """Writes all users. Returns the number of examples of each of our splits."""
    written: Counter[str] = Counter()
    staged.execute("CREATE INDEX IF NOT EXISTS by_client ON staged (client_id)")
    query = f"SELECT DISTINCT client_id FROM staged WHERE client_id != '{_NOBODY}'"
    by_user: Mapping[str, str] = {}
    if job.rule.by is SplitBy.USER:
        by_user = job.rule.assign_users(row[0] for row in staged.execute(query))
    rows = staged.execute(
        "SELECT client_id, split, label, proto FROM staged "
        f"WHERE client_id != '{_NOBODY}' "
        "ORDER BY client_id, rowid"
    )
    for client_id, group in itertools.groupby(rows, key=lambda row: row[0]):
        examples = list(group)
        if job.rule.by is SplitBy.EXAMPLE:
            splits = job.rule.assign_examples(client_id, len(examples))
        elif job.rule.by is SplitBy.USER:
            splits = [by_user[client_id]] * len(examples)
        else:
            splits = [row[1] for row in examples]
        written.update(splits)
        named: dict[str, list[bytes]] = {}
        for split, (_, _, label, proto) in zip(splits, examples, strict=True):
            for name in job.layout.name_splits(split, label):
                named.setdefault(name, []).append(proto)
        for name, protos in sorted(named.items()):
            final.executemany(
                "INSERT INTO examples VALUES (?, ?, ?)",
                [(name, client_id, proto) for proto in protos],
            )
            final.execute(
                "INSERT INTO client_metadata VALUES (?, ?, ?)",
                (client_id, name, len(protos)),
            )
        training = [
            row[3]
            for split, row in zip(splits, examples, strict=True)
            if split == TRAIN
        ]
        _count_parts(training, job.source.separators, counts)
    return written


def _count_parts(
    protos: list[bytes],
    separators: Mapping[str, str],
    counts: Mapping[str, Counter[str]],
) -> None:
    """Counts the words and tags of one user's training examples."""
    if not separators:
        return
    found = {name: Counter[str]() for name in separators}
    for proto in protos:
        example = tf.train.Example.FromString(proto).features.feature
        for name, separator in separators.items():
            text = example[name].bytes_list.value[0].decode("utf-8")
            found[name].update(
                part for part in text.split(separator.strip() or None) if part
            )
    for name, counter in found.items():
        by_user = name in _COUNTED_BY_USER
        counts[name].update(counter.keys() if by_user else counter)


def _format_counts(feature: str, counter: Counter[str]) -> str:
    """Returns counts as TFF stores those of Stack Overflow: JSON of tags, or lines."""
    ranked = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
    if feature in _COUNTED_BY_USER:
        return json.dumps(dict(ranked)) + "\n"
    return "".join(f"{word} {count}\n" for word, count in ranked)


def _check(
    final: sqlite3.Connection, job: Import, written: Counter[str]
) -> dict[str, dict[str, int]]:
    """Returns users and examples of each split, read back from the file.

    Raises:
        DataError: If something is missing, or a user is where it must not be.
    """
    splits = {
        name: {"users": users, "examples": examples}
        for name, users, examples in final.execute(
            "SELECT split_name, COUNT(DISTINCT client_id), COUNT(*) FROM examples "
            "GROUP BY split_name ORDER BY split_name"
        )
    }
    if not splits:
        raise DataError(f"{job.layout.file_name} would have no examples at all.")
    largest = {
        split: max(
            (
                splits.get(name, {"examples": 0})["examples"]
                for name in job.layout.name_splits(split, None)
            ),
            default=0,
        )
        for split in (TRAIN, VALIDATION, TEST)
    }
    if any(largest[split] != written[split] for split in largest):
        raise DataError(f"{job.layout.file_name} must hold {written}. Found {largest}.")
    if job.rule.by is SplitBy.USER:
        homes: dict[str, str] = {}
        base = {
            name: split
            for split in (TRAIN, VALIDATION, TEST)
            for label in (None, 0)
            for name in job.layout.name_splits(split, label)
        }
        query = "SELECT DISTINCT client_id, split_name FROM examples"
        for client_id, name in final.execute(query):
            if homes.setdefault(client_id, base[name]) != base[name]:
                raise DataError(
                    f"{job.layout.file_name}: user {client_id!r} must be in one split."
                )
    return splits
