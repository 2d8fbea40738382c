"""A source whose records are a list, and imports of it."""

import dataclasses
import pathlib
import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from simulation.population import builder, layout, split
from simulation.sources import source

INT = source.Feature(kind=source.Kind.INT64)
BYTES = source.Feature(kind=source.Kind.BYTES)
NAME = "data.sqlite"
BY_USER = split.SplitRule(
    by=split.SplitBy.USER, test_fraction=0.2, validation_fraction=0.2
)
BY_EXAMPLE = split.SplitRule(by=split.SplitBy.EXAMPLE, test_fraction=0.2)


@dataclasses.dataclass(kw_only=True)
class ListSource(source.Source):
    """Yields records, tells source errors to `on_bad`, raises others, and calls calls.

    Attributes:
        path: The file that it pretends to read.
        items: What it yields, tells and raises.
        kinds: The features.
        counted: The separators.
        more: Further files.
        num_reads: How often it was read.
    """

    path: pathlib.Path
    items: list[Any]
    kinds: Mapping[str, source.Feature] = dataclasses.field(
        default_factory=lambda: {"label": INT}
    )
    counted: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more: tuple[pathlib.Path, ...] = ()
    num_reads: int = 0

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        return (self.path, *self.more)

    @property
    def features(self) -> Mapping[str, source.Feature]:
        return self.kinds

    @property
    def separators(self) -> Mapping[str, str]:
        return self.counted

    def read(self, on_bad: source.OnBad) -> Iterator[source.Record]:
        self.num_reads += 1
        for item in self.items:
            if isinstance(item, source.SourceError):
                on_bad(item)
            elif isinstance(item, BaseException):
                raise item
            elif callable(item):
                item()
            else:
                yield item


def record(user: str, where: str | None = None, **features: Any) -> source.Record:
    """Returns a record; its place is its user."""
    features = features or {"label": 0}
    return source.Record(
        client_id=user, features=features, place=f"of {user}", split=where
    )


def build_source(folder: pathlib.Path, items: list[Any], **options: Any) -> ListSource:
    """Returns a source of a file that is made here."""
    path = folder / "input.txt"
    path.write_text("an input")
    return ListSource(path=path, items=items, **options)


def build_job(read: source.Source, **changes: Any) -> builder.Import:
    """Returns an import in TFF's plainest layout, divided by the source."""
    values = {
        "kind": "list",
        "source": read,
        "layout": layout.PLAIN,
        "rule": split.SplitRule(by=split.SplitBy.SOURCE),
        "options": {"size": 1},
    }
    return builder.Import(**(values | changes))


def read_rows(path: pathlib.Path) -> dict[str, list[tuple]]:
    """Returns all rows of a file's tables, and its indices."""
    connection = sqlite3.connect(path)
    try:
        return {
            table: connection.execute(f"SELECT rowid, * FROM {table}").fetchall()
            for table in ("examples", "client_metadata", "sqlite_master")
        }
    finally:
        connection.close()


def list_names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_labels(path: pathlib.Path) -> dict[str, dict[str, list[int]]]:
    """Returns the labels of each user in each split, in the file's order."""
    found: dict[str, dict[str, list[int]]] = {}
    for _, name, user, proto in read_rows(path)["examples"]:
        feature = tf.train.Example.FromString(proto).features.feature["label"]
        found.setdefault(name, {}).setdefault(user, []).extend(feature.int64_list.value)
    return found


def make_many(size: int) -> list:
    """Returns records of 97 users who take turns."""
    return [record(f"user {n % 97}", label=n) for n in range(size)]
