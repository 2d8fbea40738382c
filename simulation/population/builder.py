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
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from simulation import run_folder
from simulation.population import staging
from simulation.population.federated_data import DataError
from simulation.population.layout import Layout
from simulation.population.manifest import Manifest, read_manifest
from simulation.population.split import SplitBy, SplitRule
from simulation.sources.source import (
    TEST,
    TRAIN,
    VALIDATION,
    Source,
    SourceError,
)

# Features of which the users that have them are counted, not the occurrences.
_COUNTED_BY_USER = ("tags",)
_MAX_LISTED = 1_000


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
        needs_test: Whether there must be examples for training and test.
    """

    kind: str
    source: Source
    layout: Layout
    rule: SplitRule
    options: Mapping[str, Any]
    classes: tuple[str, ...] | None = None
    skip_bad: bool = False
    needs_test: bool = False


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


def build_population(
    job: Import,
    folder: pathlib.Path,
    *,
    overwrite: bool = False,
    on_progress: staging.Progress = lambda _: None,
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
    staged_path = path.with_name(path.name + ".staging")
    try:
        with staging.open_staging(staged_path, wanted) as staged:
            bad = staging.stage(
                staged,
                job.source,
                job.rule.by,
                skip_bad=job.skip_bad,
                on_progress=on_progress,
            )
            manifest = _write_final(staged, path, job, wanted, bad)
    except (SourceError, ValueError):
        # Mended files or other options begin anew.
        staged_path.unlink(missing_ok=True)
        raise
    except sqlite3.Error as error:
        raise DataError(
            f"{path} cannot be written: {error}. (Is another import writing it, or the "
            f"disk full? If {staged_path.name} is damaged, delete it.)"
        ) from error
    staged_path.unlink(missing_ok=True)
    return Outcome(path=path, manifest=manifest, was_there=False)


def hash_file(path: pathlib.Path) -> str:
    """Returns a file's SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
        # Nobody finds a file with another one's manifest or counts: what is replaced
        # goes first. What ends here is finished from the staging file.
        path.unlink(missing_ok=True)
        for feature, counter in counts.items():
            run_folder.write_text(
                path.with_name(job.layout.name_count_file(feature)),
                _format_counts(feature, counter),
                durable=True,
            )
        run_folder.write_text(
            path.with_name(job.layout.manifest_name), manifest.to_json(), durable=True
        )
        os.replace(partial, path)
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
    query = (
        f"SELECT DISTINCT client_id FROM staged WHERE client_id != '{staging.NOBODY}'"
    )
    by_user: Mapping[str, str] = {}
    if job.rule.by is SplitBy.USER:
        by_user = job.rule.assign_users(row[0] for row in staged.execute(query))
    rows = staged.execute(
        "SELECT client_id, split, label, proto FROM staged "
        f"WHERE client_id != '{staging.NOBODY}' "
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
    for split in (TRAIN, TEST):
        if job.needs_test and not written[split]:
            raise DataError(
                f"{job.layout.file_name} must have examples for training and test. "
                f"Found none for {split} by --split={job.rule.by.value}: give another "
                "--split, or more users or examples."
            )
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
