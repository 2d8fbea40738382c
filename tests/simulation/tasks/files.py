"""Files of data as an import makes them, of toy examples that are known."""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from simulation.population import builder, layout
from simulation.population.split import SplitBy, SplitRule
from simulation.sources import source
from simulation.sources.source import TEST, TRAIN, VALIDATION, Feature, Kind

# Client, split and features of each example, in the order of the file.
Rows = list[tuple[str, str, dict]]
NUMBER, TEXT = Feature(kind=Kind.INT64), Feature(kind=Kind.BYTES)
CIFAR10 = layout.rename(layout.PLAIN, "cifar10")
SENT140 = layout.rename(layout.PLAIN, "sent140")
LETTERS_A_TO_J = range(36, 46)
# One user has more than the 256 sentences that are taken, one has none for training.
MANY_SENTENCES = 260


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSource(source.Source):
    """Rows in memory."""

    rows: Rows
    given_features: Mapping[str, Feature]
    counted: Mapping[str, str]

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        return ()

    @property
    def features(self) -> Mapping[str, Feature]:
        return self.given_features

    @property
    def separators(self) -> Mapping[str, str]:
        return self.counted

    def read(self, on_bad: source.OnBad) -> Iterator[source.Record]:
        for index, (client_id, split, features) in enumerate(self.rows):
            yield source.Record(
                client_id=client_id, features=features, place=str(index), split=split
            )


def write(
    folder: pathlib.Path,
    target: layout.Layout,
    rows: Rows,
    features: Mapping[str, Feature],
    *,
    counted: Mapping[str, str] | None = None,
    classes: tuple[str, ...] | None = None,
) -> pathlib.Path:
    """Imports rows. Returns the file."""
    rows_source = RowSource(rows=rows, given_features=features, counted=counted or {})
    job = builder.Import(
        kind="rows",
        source=rows_source,
        layout=target,
        rule=SplitRule(by=SplitBy.SOURCE),
        options={},
        classes=classes,
    )
    return builder.build_population(job, folder).path


def gather(rows: Rows, split: str) -> dict[str, dict[str, np.ndarray]]:
    """Returns the features of each client, in the order of the rows."""
    found: dict = collections.defaultdict(lambda: collections.defaultdict(list))
    for client_id, where, features in rows:
        if where == split:
            for name, value in features.items():
                found[client_id][name].append(value)
    return {
        client_id: {name: np.array(values) for name, values in features.items()}
        for client_id, features in sorted(found.items())
    }


def draw_characters(seed: int = 1) -> Rows:
    """Draws characters of five writers, and many letters a to j of a sixth."""
    rng = np.random.default_rng(seed)
    classes = {
        "f0_mixed": [3, 12, 61, 36, 9, 40],
        "f1_digits": [0, 1, 9],
        "f2_letters": [10, 35, 36],
        "f3_mixed": [5, 45, 46],
        "f4_one": [20],
        "f5_a_to_j": sorted(LETTERS_A_TO_J) * 30,
    }
    return [
        (
            writer,
            split,
            {
                "pixels": (rng.integers(256, size=[28, 28]) / 255).astype(np.float32),
                "label": label,
            },
        )
        for writer, labels in classes.items()
        for split in (TRAIN, TEST)
        for label in labels
    ]


def write_emnist(folder: pathlib.Path) -> Rows:
    rows = draw_characters()
    pixels = Feature(kind=Kind.FLOAT, shape=(28, 28))
    write(folder, layout.EMNIST, rows, {"pixels": pixels, "label": NUMBER})
    return rows


def draw_pictures(num_classes: int, seed: int = 2) -> Rows:
    """Draws pictures of two users, half as many for the test."""
    rng = np.random.default_rng(seed)
    rows: Rows = []
    for split, count in ((TRAIN, 80), (TEST, 40)):
        for index in range(count):
            features = {
                "image": rng.integers(256, size=[32, 32, 3]),
                "label": index * num_classes // count,
            }
            if num_classes == 100:
                features["coarse_label"] = features["label"] // 5
            rows.append((f"user_{index % 2}", split, features))
    return rows


def write_cifar(folder: pathlib.Path, num_classes: int) -> Rows:
    rows = draw_pictures(num_classes)
    features = {"image": Feature(kind=Kind.INT64, shape=(32, 32, 3)), "label": NUMBER}
    target = CIFAR10
    if num_classes == 100:
        features["coarse_label"] = NUMBER
        target = layout.CIFAR100
    write(folder, target, rows, features)
    return rows


def draw_posts() -> Rows:
    """Writes sentences about few words, some rare, of several lengths."""
    rng = np.random.default_rng(3)
    words = [f"w{index}" for index in range(40)]
    odds = 1.0 / np.arange(1, 41)
    tags = ["c++", "vb . net", "git", "sql", "css", "yield", "rare"]

    def build(length: int) -> dict:
        chosen = rng.choice(words, size=length, p=odds / odds.sum())
        return {
            "tokens": " ".join(chosen).encode(),
            "title": " ".join(rng.choice(words, size=3)).encode(),
            "tags": "|".join(
                rng.choice(tags, size=rng.integers(1, 4), replace=False)
            ).encode(),
            "creation_date": b"2020-01-01 00:00:00 UTC",
            "type": b"question",
            "score": 1,
        }

    lengths = [1, 18, 19, 20, 21, 40, 120]
    rows: Rows = [("many", TRAIN, build(4)) for _ in range(MANY_SENTENCES)]
    for client_id, split in (
        ("many", TEST),
        ("some", TRAIN),
        ("some", TEST),
        ("late", TEST),
        ("held", VALIDATION),
    ):
        rows += [(client_id, split, build(length)) for length in lengths]
    rows += [("many", TEST, build(4)) for _ in range(MANY_SENTENCES)]
    return rows


def write_posts(folder: pathlib.Path) -> Rows:
    rows = draw_posts()
    names = ("tokens", "title", "tags", "creation_date", "type")
    features = {name: TEXT for name in names} | {"score": NUMBER}
    counted = {"tokens": " ", "tags": "|"}
    write(folder, layout.STACKOVERFLOW, rows, features, counted=counted)
    return rows


TWEETS: Rows = [
    ("u1", TRAIN, {"tokens": b"so so so happy today", "label": 1}),
    ("u1", TRAIN, {"tokens": b"so sad", "label": 0}),
    ("u2", TRAIN, {"tokens": " ".join(["happy"] * 30).encode(), "label": 1}),
    ("u2", TEST, {"tokens": b"never seen today", "label": 0}),
    ("u3", TEST, {"tokens": b"", "label": 1}),
]


def write_tweets(
    folder: pathlib.Path, target: layout.Layout = SENT140, counted: str | None = " "
) -> Rows:
    counts = {} if counted is None else {"tokens": counted}
    write(folder, target, TWEETS, {"tokens": TEXT, "label": NUMBER}, counted=counts)
    return TWEETS


def write_own(
    folder: pathlib.Path,
    x: Sequence,
    *,
    kind: Kind = Kind.FLOAT,
    name: str = "mine",
    shape: tuple[int, ...] | None = None,
) -> Rows:
    """Imports examples called `x` of two users, with three classes."""
    rows: Rows = [
        (
            "ab"[index % 2],
            (TRAIN, TEST)[index // 2 % 2],
            {"x": value, "label": index % 3},
        )
        for index, value in enumerate(x)
    ]
    feature = Feature(kind=kind, shape=np.shape(x[0]) if shape is None else shape)
    target = layout.rename(layout.PLAIN, name)
    write(folder, target, rows, {"x": feature, "label": NUMBER})
    return rows
