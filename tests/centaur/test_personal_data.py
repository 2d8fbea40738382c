"""Tests for personal data: parts that share nothing, lose nothing, and see no test."""

import collections
import dataclasses
import pickle

import numpy as np
import pytest

from centaur import personal_data
from simulation.population.federated_data import ArrayData, DataError
from simulation.population.partition import PartitionKind
from simulation.tasks import TaskOptions, load_task
from simulation.tasks.task import Task
from tests.simulation.tasks import files

SIZES = {"one": 1, "two": 2, "ten": 10, "many": 235}
PARTS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Numbered:
    """Clients whose inputs are numbers that no other has.

    Attributes:
        first: The first number.
        sizes: The number of each client's examples.
        label: The label of all of them.
        loaded: The clients that were loaded, in order.
    """

    first: int
    sizes: dict[str, int] = dataclasses.field(default_factory=lambda: dict(SIZES))
    label: int = 0
    loaded: list[str] = dataclasses.field(default_factory=list)

    @property
    def client_ids(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def count(self, client_id: str) -> int:
        return self.sizes[client_id]

    def load(self, client_id: str):
        self.loaded.append(client_id)
        start = self.first + 1_000 * list(self.sizes).index(client_id)
        x = np.arange(start, start + self.sizes[client_id], dtype=np.float32)
        return x[:, None], np.full(len(x), self.label, np.int32)


def build_task(**changes) -> Task:
    fields = {
        "name": "numbers",
        "description": "numbers",
        "train": Numbered(0),
        "test": Numbered(1_000_000),
        "has_test_users": True,
        "models": {"none": lambda: None},
        "metric": "accuracy",
        "identity": {"file": "numbers"},
    }
    return Task(**{**fields, **changes})


def split(task=None, *, fraction=0.1, seed=0, **options) -> personal_data.PersonalData:
    return personal_data.split_personal_data(
        task or build_task(), validation_fraction=fraction, seed=seed, **options
    )


def read(data) -> dict[str, list[float]]:
    return {client: data.load(client)[0][:, 0].tolist() for client in data.client_ids}


def read_parts(data: personal_data.PersonalData) -> list[dict[str, list[float]]]:
    return [read(getattr(data, part)) for part in PARTS]


class TestParts:
    @pytest.mark.parametrize("fraction", [0.0, 0.001, 0.1, 0.5, 0.999])
    def test_they_are_disjoint_and_together_whole(self, fraction):
        task = build_task()
        train, validation, test = read_parts(split(task, fraction=fraction))
        assert list(train) == list(validation) == list(test) == list(SIZES)
        for client_id, whole in read(task.train).items():
            assert not set(train[client_id]) & set(validation[client_id])
            assert sorted(train[client_id] + validation[client_id]) == whole
            # In the order of the task.
            for part in (train, validation):
                assert part[client_id] == sorted(part[client_id])
        assert test == read(task.test)

    @pytest.mark.parametrize(
        ("fraction", "expected"),
        [
            (0.0, [0, 0, 0, 0]),
            (0.001, [0, 1, 1, 1]),
            (0.1, [0, 1, 1, 24]),
            (0.25, [0, 1, 2, 59]),
            (0.5, [0, 1, 5, 118]),
            (0.999, [0, 1, 9, 234]),
        ],
    )
    def test_sizes_are_rounded(self, fraction, expected):
        # 0.1 * 235 and 0.25 * 10 are halves: 23.5 and 2.5 go to the even number.
        data = split(fraction=fraction)
        sizes = [data.validation.count(client_id) for client_id in SIZES]
        assert sizes == expected
        left = [data.train.count(client_id) for client_id in SIZES]
        assert left == [n - e for n, e in zip(SIZES.values(), expected, strict=True)]
        for part in (data.train, data.validation, data.test):
            for client_id in SIZES:
                x, y = part.load(client_id)
                assert len(x) == len(y) == part.count(client_id)

    def test_the_seed_decides(self):
        first, same, other = (read_parts(split(seed=seed)) for seed in (3, 3, 4))
        assert first == same
        for part in (0, 1):
            assert first[part]["many"] != other[part]["many"]
        assert first[2] == other[2]

    def test_a_client_has_the_same_parts_among_others(self):
        few = {"ten": 10, "new": 30, "many": 235}
        task = build_task(train=Numbered(0, few), test=Numbered(10**6, few))
        starts = {"few": 0, "all": 2_000}
        found = {
            "few": read(split(task, seed=5).validation)["ten"],
            "all": read(split(seed=5).validation)["ten"],
        }
        positions = {key: np.subtract(x, starts[key]) for key, x in found.items()}
        np.testing.assert_array_equal(positions["few"], positions["all"])

    def test_clients_of_one_size_are_not_cut_alike(self):
        sizes = {f"c{index}": 10 for index in range(40)}
        task = build_task(train=Numbered(0, sizes), test=Numbered(10**6, sizes))
        chosen = [int(x[0]) % 1_000 for x in read(split(task).validation).values()]
        # One of ten positions each: that 40 draws have but four has chance 1e-13.
        assert len(collections.Counter(chosen)) > 4

    def test_the_labels_go_with_the_inputs(self):
        x = np.arange(50, dtype=np.float32)[:, None]
        y = np.random.default_rng(0).integers(1_000, size=50).astype(np.int32)
        pairs = dict(zip(x[:, 0].tolist(), y.tolist(), strict=True))
        pool = ArrayData(client_ids=("a",), make=lambda _: (x, y))
        data = split(build_task(train=pool, test=pool), fraction=0.4)
        for part in (data.train, data.validation):
            x_part, y_part = part.load("a")
            assert y_part.tolist() == [pairs[value] for value in x_part[:, 0].tolist()]


class TestTestData:
    def test_labels_of_the_test_change_neither_training_nor_validation(self):
        one = split(build_task(test=Numbered(1_000_000, label=1)))
        other = split(build_task(test=Numbered(2_000_000, label=2)))
        for part in ("train", "validation"):
            for client_id in SIZES:
                for left, right in zip(
                    getattr(one, part).load(client_id),
                    getattr(other, part).load(client_id),
                    strict=True,
                ):
                    np.testing.assert_array_equal(left, right)
        for client_id in SIZES:
            assert set(one.test.load(client_id)[1]) == {1}
            assert set(other.test.load(client_id)[1]) == {2}

    def test_others_who_are_tested_are_left_out(self):
        more = {"nobody": 3, **dict(reversed(SIZES.items()))}
        task = build_task(test=Numbered(1_000_000, more))
        data = split(task)
        assert data.test.client_ids == tuple(SIZES)
        np.testing.assert_array_equal(
            data.test.load("ten")[0], task.test.load("ten")[0]
        )


class TestLoading:
    def test_nothing_is_loaded_to_divide_and_to_count(self):
        task = build_task()
        data = split(task)
        for part in PARTS:
            for client_id in SIZES:
                getattr(data, part).count(client_id)
        assert task.train.loaded == task.test.loaded == []

    def test_a_client_is_loaded_alone_and_once(self):
        task = build_task()
        data = split(task)
        for _ in range(3):
            data.train.load("ten")
        assert task.train.loaded == ["ten"] and task.test.loaded == []
        data.test.load("two")
        assert task.train.loaded == ["ten"] and task.test.loaded == ["two"]

    def test_without_memory_it_is_loaded_again(self):
        task = build_task()
        data = split(task, hold_mb=0)
        for _ in range(3):
            data.train.load("ten")
        assert task.train.loaded == ["ten"] * 3

    def test_they_go_to_other_processes(self):
        data = split(seed=7)
        for part in PARTS:
            copy = pickle.loads(pickle.dumps(getattr(data, part)))
            assert read(copy) == read(getattr(data, part))
            assert copy.client_ids == tuple(SIZES)


class TestIdentity:
    def test_it_tells_parts_apart(self):
        found = [
            split(fraction=fraction, seed=seed)
            for fraction, seed in ((0.1, 0), (0.1, 1), (0.2, 0))
        ]
        assert len({data.description for data in found}) == 3
        for data in found:
            assert data.identity["file"] == "numbers"
        assert len({tuple(sorted(data.identity.items())) for data in found}) == 3
        assert found[0].identity == split(fraction=0.1, seed=0).identity


class TestErrors:
    @pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
    def test_fraction(self, fraction):
        match = rf"`validation_fraction` must be in \[0, 1\). Found {fraction}"
        with pytest.raises(ValueError, match=match):
            split(fraction=fraction)

    def test_seed(self):
        with pytest.raises(ValueError, match="`seed` must be >= 0. Found -1."):
            split(seed=-1)

    def test_no_users_are_tested(self):
        with pytest.raises(DataError, match="--partition with --test_fraction"):
            split(build_task(has_test_users=False))

    @pytest.mark.parametrize("given", ["absent", "empty"])
    def test_a_client_without_test_examples(self, given):
        sizes = {**SIZES, "ten": 0, "many": 0}
        if given == "absent":
            del sizes["ten"], sizes["many"]
        match = "--partition with --test_fraction.*Found none of client 'ten' and 1 mo"
        with pytest.raises(DataError, match=match):
            split(build_task(test=Numbered(0, sizes)))

    def test_a_client_without_training_examples(self):
        task = build_task(train=Numbered(0, {**SIZES, "two": 0}))
        match = r"must have training examples. Found none of client 'two'\."
        with pytest.raises(DataError, match=match):
            split(task)


class TestTasks:
    """The parts of a task as --partition and --test_fraction make it."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("data")
        files.write_cifar(folder, 10)
        files.write_emnist(folder)
        return folder

    def load(self, folder, name: str, **options) -> Task:
        return load_task(name, TaskOptions(data_dir=folder, **options))

    def test_each_image_has_one_client_and_one_part(self, folder):
        task = self.load(
            folder,
            "cifar10",
            partition=PartitionKind.SHARDS,
            num_clients=4,
            classes_per_client=3,
            test_fraction=0.25,
        )
        data = split(task, fraction=0.2)
        images = collections.Counter()
        for part, size in zip(PARTS, (11, 3, 4), strict=True):
            for client_id in task.train.client_ids:
                x, _ = getattr(data, part).load(client_id)
                assert len(x) == size == getattr(data, part).count(client_id)
                images.update(image.tobytes() for image in x)
        assert set(images.values()) == {1} and len(images) == 4 * 18
        assert data.identity["test_fraction"] == 0.25

    def test_other_users_are_tested(self, folder):
        # Without a partition the writers of the file are left; one has no letters.
        with pytest.raises(DataError, match="Found none of client 'f1_digits'"):
            split(self.load(folder, "emnist_letters"))
        data = split(self.load(folder, "emnist_digits"), fraction=0.5)
        # One writer has three digits.
        sizes = [part.count("f1_digits") for part in (data.train, data.validation)]
        assert sizes == [1, 2]
