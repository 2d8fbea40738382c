"""Tests for images divided anew: one client and one part each, and who says so."""

import dataclasses
import gzip
import itertools
import pathlib

import numpy as np
import pytest

from simulation.population import layout
from simulation.population.federated_data import DataError
from simulation.population.partition import Partition, PartitionKind
from simulation.sources import idx
from simulation.sources.source import TEST, TRAIN
from simulation.tasks import TaskOptions, load_task, stored
from tests.simulation.tasks import files

_MNIST = pathlib.Path(__file__).parents[4] / "shared/data/mnist"
CHARACTERS = files.draw_characters()
# As widely published, of red, green and blue.
MEAN, STDDEV = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@pytest.fixture
def load(data_dir):
    return lambda name, **options: load_task(
        name, TaskOptions(data_dir=data_dir, **options)
    )


def name_rows(data) -> dict[bytes, tuple[str, int]]:
    """Returns the client and the label of each image; none may be there twice."""
    found = {}
    for client_id in data.client_ids:
        for image, label in zip(*data.load(client_id), strict=True):
            assert image.tobytes() not in found
            found[image.tobytes()] = (client_id, int(label))
    return found


@dataclasses.dataclass(frozen=True)
class Labels:
    """One user's labels, and for images numbers from `first` on."""

    labels: np.ndarray
    first: int
    client_ids: tuple[str, ...] = ("all",)

    def read(self, client_id: str) -> dict[str, np.ndarray]:
        numbers = self.first + np.arange(len(self.labels))
        return {"label": self.labels, "number": numbers}

    def decode(self, features):
        return features["number"], features["label"]


def divide_labels(train: np.ndarray, test: np.ndarray, partition, **options):
    """Divides labels as if they were those of a file."""
    parts = Labels(train, 0), Labels(test, len(train))
    return stored.divide(partition, *parts, **options)


class TestEmnistPartitions:
    """Characters divided anew, their writers left aside."""

    @pytest.mark.parametrize(
        ("name", "first", "last"),
        [
            ("emnist_character", 0, 61),
            ("emnist_digits", 0, 9),
            ("emnist_letters", 10, 61),
        ],
    )
    def test_all_characters_of_a_split_and_no_others(self, name, first, last, load):
        # One client has all there are.
        task = load(name, partition=PartitionKind.DIRICHLET, num_clients=1)
        for data, split in ((task.train, TRAIN), (task.test, TEST)):
            found = name_rows(data)
            assert {owner for owner, _ in found.values()} == {"part_00000"}
            expected = {
                (np.float32(1.0) - features["pixels"]).tobytes(): features["label"]
                for _, where, features in CHARACTERS
                if where == split and first <= features["label"] <= last
            }
            labels = {image: label + first for image, (_, label) in found.items()}
            assert labels == expected
            assert data.count("part_00000") == len(expected)

    def test_shards(self, load):
        task = load(
            "emnist_letters",
            partition=PartitionKind.SHARDS,
            num_clients=12,
            classes_per_client=3,
        )
        assert task.num_clients == 12
        train, test = name_rows(task.train), name_rows(task.test)
        assert not set(train) & set(test)
        for client_id in task.train.client_ids:
            labels = set(task.train.load(client_id)[1])
            assert len(labels) == 3
            assert set(task.test.load(client_id)[1]) == labels

    def test_it_is_in_description_identity_and_caveats(self, load):
        plain = load("emnist_digits")
        task = load("emnist_digits", partition=PartitionKind.DIRICHLET, num_clients=2)
        assert "EMNIST's digits by writer, from" in plain.description
        assert "their writers left aside: 2 clients, Dirichlet" in task.description
        assert task.identity != plain.identity
        assert task.identity.items() > plain.identity.items()
        (caveat,) = task.caveats
        assert "which followed from their labels" in caveat
        assert plain.caveats == ()


def gather_all(num_classes: int) -> dict[bytes, int]:
    """Returns the label of each picture of both splits, by its normal form."""
    return {
        cifar_form(features["image"]): features["label"]
        for _, _, features in files.draw_pictures(num_classes)
    }


def cifar_form(image: np.ndarray) -> bytes:
    x = image.astype(np.float32) / np.float32(255.0)
    return ((x - np.float32(MEAN)) / np.float32(STDDEV)).tobytes()


class TestTestFraction:
    """All examples of a file divided among clients, and some of each held out."""

    KINDS = [
        (10, {"partition": PartitionKind.DIRICHLET, "num_clients": 6}, 20),
        # Twelve of each of ten classes: shards of six, two of each class.
        (
            10,
            {
                "partition": PartitionKind.SHARDS,
                "num_clients": 7,
                "classes_per_client": 2,
            },
            12,
        ),
        (100, {"partition": PartitionKind.PACHINKO, "num_clients": 4}, 30),
    ]

    @pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.99])
    @pytest.mark.parametrize(("num_classes", "options", "size"), KINDS)
    def test_each_image_has_one_client_and_one_part(
        self, num_classes, options, size, fraction, load
    ):
        task = load(f"cifar{num_classes}", test_fraction=fraction, **options)
        train, test = name_rows(task.train), name_rows(task.test)
        assert not set(train) & set(test)
        pool, found = gather_all(num_classes), train | test
        assert {image: label for image, (_, label) in found.items()}.items() <= (
            pool.items()
        )
        assert len(found) == size * options["num_clients"]
        held_out = min(max(1, round(fraction * size)), size - 1)
        assert task.train.client_ids == task.test.client_ids
        for client_id in task.train.client_ids:
            assert task.train.count(client_id) == size - held_out
            assert task.test.count(client_id) == held_out
        # Of both parts of the file, in both parts of the task.
        pictures = {
            split: {
                cifar_form(features["image"])
                for _, where, features in files.draw_pictures(num_classes)
                if where == split
            }
            for split in (TRAIN, TEST)
        }
        if fraction == 0.5:
            for split in (TRAIN, TEST):
                assert pictures[split] & set(train) and pictures[split] & set(test)

    @pytest.mark.parametrize(("num_classes", "options", "size"), KINDS)
    def test_the_clients_are_those_of_the_partition(
        self, num_classes, options, size, load
    ):
        tasks = [
            load(f"cifar{num_classes}", test_fraction=fraction, **options)
            for fraction in (0.2, 0.6)
        ]
        owners = []
        for task in tasks:
            found = name_rows(task.train) | name_rows(task.test)
            owners.append({image: owner for image, (owner, _) in found.items()})
        assert owners[0] == owners[1]
        if options["partition"] is PartitionKind.SHARDS:
            for client_id in tasks[0].train.client_ids:
                both = [
                    data.load(client_id)[1] for data in (tasks[0].train, tasks[0].test)
                ]
                assert len(set(np.concatenate(both))) == 2

    def test_the_seed_decides(self, load):
        shards = self.KINDS[1][1]
        one, same, other = (
            load("cifar10", test_fraction=0.4, data_seed=seed, **shards)
            for seed in (3, 3, 4)
        )
        assert name_rows(one.test) == name_rows(same.test)
        assert name_rows(one.train) == name_rows(same.train)
        assert name_rows(one.test) != name_rows(other.test)

    def test_clients_are_not_cut_alike(self):
        partition = Partition(kind=PartitionKind.DIRICHLET, num_clients=12)
        train, test = divide_labels(
            np.arange(80) % 10, np.arange(40) % 10, partition, test_fraction=0.5
        )
        cuts = set()
        for client_id in train.client_ids:
            held_out = test.load(client_id)[0]
            owned = np.sort(np.concatenate([train.load(client_id)[0], held_out]))
            cuts.add(tuple(np.searchsorted(owned, held_out)))
        # Of 252 ways to choose 5 of 10: that 12 draws have but eight has chance 1e-8.
        assert len(cuts) > 8

    def test_the_seed_decides_what_is_held_out_of_the_same_examples(self):
        found = []
        for seed in (3, 3, 4):
            # All are the one client's, whatever the seed.
            partition = Partition(
                kind=PartitionKind.DIRICHLET, num_clients=1, seed=seed
            )
            train, test = divide_labels(
                np.zeros(30, int), np.zeros(10, int), partition, test_fraction=0.5
            )
            found.append(test.load("part_00000")[0].tolist())
            both = found[-1] + train.load("part_00000")[0].tolist()
            assert sorted(both) == list(range(40))
        assert found[0] == found[1] != found[2]

    def test_it_is_in_description_and_identity(self, load):
        shards = {"partition": PartitionKind.SHARDS, "num_clients": 5}
        tasks = [
            load("cifar10", **shards, **options)
            for options in ({}, {"test_fraction": 0.2}, {"test_fraction": 0.25})
        ]
        for one, other in itertools.combinations(tasks, 2):
            assert one.identity != other.identity
            assert one.description != other.description
        assert tasks[1].identity["test_fraction"] == 0.2
        assert "0.2 held out for the test" in tasks[1].description
        for task in tasks:
            (caveat,) = task.caveats
            assert "how the examples were divided among clients" in caveat

    def test_a_client_with_one_example(self, load):
        options = {"partition": PartitionKind.DIRICHLET, "test_fraction": 0.5}
        task = load("cifar10", num_clients=60, **options)
        assert {task.train.count(c) for c in task.train.client_ids} == {1}
        match = "`num_clients` must be small enough .*two examples.* 61 clients, and 1"
        with pytest.raises(DataError, match=match):
            load("cifar10", num_clients=61, **options)
        with pytest.raises(DataError, match="`num_clients` must be at most .*120"):
            load("cifar10", num_clients=121, **options)

    def test_too_few_test_examples_say_what_helps(self, load):
        shards = {
            "partition": PartitionKind.SHARDS,
            "num_clients": 10,
            "classes_per_client": 5,
        }
        with pytest.raises(DataError, match="Found 10 clients.*Or give `test_fracti"):
            load("cifar10", **shards)
        task = load("cifar10", test_fraction=0.2, **shards)
        assert {task.test.count(c) for c in task.test.client_ids} == {2}

    def test_more_classes_than_there_are(self, load):
        match = "`classes_per_client` must be at most the number of classes, 10. Found"
        with pytest.raises(DataError, match=match):
            load(
                "cifar10",
                partition=PartitionKind.SHARDS,
                classes_per_client=11,
                test_fraction=0.2,
            )

    def test_without_a_partition(self, load):
        for name in ("cifar10", "emnist_digits"):
            with pytest.raises(
                ValueError, match="`test_fraction` must be unset without `partition`"
            ):
                load(name, test_fraction=0.2)


def read_labels(name: str) -> np.ndarray:
    """Returns the digits of an idx file of labels."""
    content = gzip.decompress((_MNIST / f"{name}-labels-idx1-ubyte.gz").read_bytes())
    return np.frombuffer(content, np.uint8, offset=8).astype(np.int64)


def check_parts(train, test, sizes: tuple[int, int]) -> None:
    """Checks that 2,000 clients have five classes each, and no example two owners."""
    assert len(train.client_ids) == 2_000 and train.client_ids == test.client_ids
    owned = []
    for client_id in train.client_ids:
        parts = [data.load(client_id) for data in (train, test)]
        assert tuple(len(y) for _, y in parts) == sizes
        assert len(set(np.concatenate([y for _, y in parts]))) == 5
        owned += [part.tobytes() for x, _ in parts for part in x]
    assert len(set(owned)) == len(owned) == 2_000 * sum(sizes)


@pytest.mark.skipif(not _MNIST.is_dir(), reason=f"the real digits are absent: {_MNIST}")
class TestRealDigits:
    """The EMNIST setting of CENTAUR on MNIST: N = 2,000 and S = 5.

    At 35 images a client, shards of 7, the classes hold 9,996 shards, not 10,000.
    """

    SHARDS = Partition(
        kind=PartitionKind.SHARDS, num_clients=2_000, classes_per_client=5
    )

    def divide(self, partition, **options):
        train, test = read_labels("train"), read_labels("t10k")
        return divide_labels(train, test, partition, **options)

    def test_thirty_images_a_client(self):
        check_parts(*self.divide(self.SHARDS, test_fraction=0.2), (24, 6))

    def test_the_test_images_cannot_follow(self):
        with pytest.raises(DataError, match="10000 test examples. Or give `test_fract"):
            self.divide(self.SHARDS)

    def test_one_client_less_gets_thirty_five(self):
        partition = dataclasses.replace(self.SHARDS, num_clients=1_999)
        train, test = self.divide(partition, test_fraction=0.2)
        for data, size in ((train, 28), (test, 7)):
            assert {data.count(client_id) for client_id in data.client_ids} == {size}

    @pytest.mark.slow
    def test_the_images(self, tmp_path):
        def fail(error):
            raise error

        reader = idx.IdxSource(splits=idx.find_idx_files(_MNIST))
        rows = [
            (record.client_id, record.split, dict(record.features))
            for record in reader.read(fail)
        ]
        target = layout.rename(layout.EMNIST, "qmnist")
        files.write(tmp_path, target, rows, reader.features)
        options = TaskOptions(
            data_dir=tmp_path,
            data_name="qmnist",
            partition=PartitionKind.SHARDS,
            num_clients=2_000,
            classes_per_client=5,
            test_fraction=0.2,
        )
        task = load_task("emnist_digits", options)
        check_parts(task.train, task.test, (24, 6))
        x, _ = task.train.load("part_01999")
        assert x.shape == (24, 28, 28, 1) and x.min() == 0.0 and x.max() == 1.0
