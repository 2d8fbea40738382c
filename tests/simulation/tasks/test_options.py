"""Tests for options: what is refused, by which name, and every task by name."""

import dataclasses
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from simulation.population.partition import Partition, PartitionKind
from simulation.tasks import TASK_NAMES, TaskOptions, load_task
from simulation.tasks.options import PARTITION_OPTIONS

# A value of each option that is not its own default.
VALUES = {
    "synthetic_data": True,
    "data_name": "mine",
    "partition": PartitionKind.SHARDS,
    "num_clients": 3,
    "data_alpha": 0.5,
    "data_beta": 0.5,
    "classes_per_client": 2,
    "test_fraction": 0.25,
    "vocabulary_size": 10,
    "embedding_file": pathlib.Path("vectors.txt"),
}
ALWAYS = {"data_dir", "data_seed", "eval_examples", "hold_mb"}
_PARTITION = {
    "partition",
    "num_clients",
    "data_alpha",
    "classes_per_client",
    "test_fraction",
}
_EMNIST = {"synthetic_data", "data_name"} | _PARTITION
_WORDS = {"synthetic_data", "data_name", "vocabulary_size"}
TAKEN = {
    "digits": set(_PARTITION),
    "emnist_character": _EMNIST,
    "emnist_digits": _EMNIST,
    "emnist_letters": _EMNIST,
    "emnist_character_synthetic": set(),
    "femnist_af": {"data_name", "num_clients", "classes_per_client"},
    "cifar10": {"data_name"} | _PARTITION,
    "cifar100": {"data_name", "synthetic_data"} | _PARTITION,
    "stackoverflow_word": _WORDS,
    "stackoverflow_tag": _WORDS,
    "sent140": {"data_name", "vocabulary_size", "embedding_file"},
    "synthetic": {"num_clients", "data_alpha", "data_beta"},
    "synthetic_iid": {"num_clients"},
    "synthetic_20": {"num_clients", "data_alpha", "data_beta"},
    "synthetic_20_iid": {"num_clients"},
    "synthetic_20_binary": {"num_clients", "data_alpha", "data_beta"},
    "own": {"data_name", "vocabulary_size"} | _PARTITION,
}


class TestTaskOptions:
    @pytest.mark.parametrize(
        "name",
        ["num_clients", "classes_per_client", "vocabulary_size", "eval_examples"],
    )
    def test_numbers_are_at_least_one(self, name):
        for value in (0, -1):
            with pytest.raises(
                ValueError, match=f"`{name}` must be >= 1. Found {value}"
            ):
                TaskOptions(**{name: value})
        assert getattr(TaskOptions(**{name: 1}), name) == 1

    @pytest.mark.parametrize("name", ["data_alpha", "data_beta"])
    @pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
    def test_spreads_are_finite_and_not_negative(self, name, value):
        with pytest.raises(
            ValueError, match=f"`{name}` must be finite and >= 0. Found"
        ):
            TaskOptions(**{name: value})
        assert getattr(TaskOptions(**{name: 0.0}), name) == 0.0

    @pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 1.5, float("nan")])
    def test_a_fraction_leaves_something_for_both(self, value):
        match = rf"`test_fraction` must be in \(0, 1\). Found {value}"
        with pytest.raises(ValueError, match=match):
            TaskOptions(test_fraction=value)
        assert TaskOptions(test_fraction=0.999).test_fraction == 0.999

    @pytest.mark.parametrize("name", ["data_seed", "hold_mb"])
    def test_seeds_and_sizes_are_not_negative(self, name):
        with pytest.raises(ValueError, match=f"`{name}` must be >= 0. Found -1."):
            TaskOptions(**{name: -1})
        assert getattr(TaskOptions(**{name: 0}), name) == 0

    def test_the_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        assert TaskOptions().folder == tmp_path / ".tff"
        assert TaskOptions(data_dir=pathlib.Path("~/d")).folder == tmp_path / "d"
        assert TaskOptions(data_dir=pathlib.Path("/d")).folder == pathlib.Path("/d")


class TestTaken:
    def test_every_option_and_task_is_in_the_table(self):
        fields = {field.name for field in dataclasses.fields(TaskOptions)}
        assert fields == set(VALUES) | ALWAYS
        assert set(TAKEN) == set(TASK_NAMES)

    @pytest.mark.parametrize("task", TASK_NAMES)
    def test_others_are_refused_by_name(self, task, tmp_path):
        for name in set(VALUES) - TAKEN[task]:
            # Before any file is looked for.
            options = TaskOptions(data_dir=tmp_path, **{name: VALUES[name]})
            with pytest.raises(
                ValueError, match=f"`{name}` must be unset for the task {task}. Found"
            ):
                load_task(task, options)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("task", "name"),
        [
            ("emnist_character", "data_name"),
            ("stackoverflow_word", "data_name"),
            *(("cifar100", name) for name in sorted(_PARTITION)),
            *(("emnist_digits", name) for name in sorted(_PARTITION)),
        ],
    )
    def test_made_up_data_are_neither_named_nor_divided(self, task, name):
        options = TaskOptions(synthetic_data=True, **{name: VALUES[name]})
        with pytest.raises(
            ValueError, match=f"`{name}` must be unset with `synthetic_data`. Found"
        ):
            load_task(task, options)


class TestPartition:
    def test_none(self):
        assert TaskOptions().build_partition(num_clients=7) is None

    def test_its_options_are_in_the_table(self):
        assert set(PARTITION_OPTIONS) == _PARTITION

    @pytest.mark.parametrize("name", sorted(_PARTITION - {"partition"}))
    def test_its_options_need_it(self, name):
        options = TaskOptions(**{name: VALUES[name]})
        with pytest.raises(
            ValueError, match=f"`{name}` must be unset without `partition`. Found"
        ):
            options.build_partition(num_clients=7)

    @pytest.mark.parametrize(
        ("kind", "name"),
        [
            (PartitionKind.DIRICHLET, "classes_per_client"),
            (PartitionKind.SHARDS, "data_alpha"),
            (PartitionKind.PACHINKO, "data_alpha"),
            (PartitionKind.PACHINKO, "classes_per_client"),
        ],
    )
    def test_those_of_another_kind_are_refused(self, kind, name):
        options = TaskOptions(partition=kind, **{name: VALUES[name]})
        with pytest.raises(
            ValueError,
            match=f"`{name}` must be unset for the partition {kind.value}. Found",
        ):
            options.build_partition(num_clients=7)

    def test_what_is_given_is_used(self):
        dirichlet = TaskOptions(
            partition=PartitionKind.DIRICHLET, data_alpha=0.5, data_seed=3
        )
        assert dirichlet.build_partition(num_clients=7) == Partition(
            kind=PartitionKind.DIRICHLET, num_clients=7, alpha=0.5, seed=3
        )
        shards = TaskOptions(
            partition=PartitionKind.SHARDS, num_clients=4, classes_per_client=5
        )
        assert shards.build_partition(num_clients=7) == Partition(
            kind=PartitionKind.SHARDS, num_clients=4, classes_per_client=5
        )


def load_anything(name: str, data_dir: pathlib.Path):
    more = {"data_name": "mine"} if name == "own" else {}
    return load_task(name, TaskOptions(data_dir=data_dir, **more))


# Each is loaded here, from toy files where it needs some.
@pytest.mark.parametrize("name", TASK_NAMES)
def test_a_forward_pass_of_the_default_model(name, data_dir):
    task = load_anything(name, data_dir)
    model = task.build_model()
    assert task.metric in model.metrics
    weights = model.initialize(np.random.default_rng(0))
    for data in (task.train, task.test):
        client_id = max(data.client_ids[:50], key=data.count)
        x, y = (part[:8] for part in data.load(client_id))
        for part, spec in zip((x, y), model.example_spec.values(), strict=True):
            assert spec.shape.is_compatible_with(part.shape)
            assert spec.dtype == part.dtype
        outputs = model.predict(weights, tf.constant(x), None)
        losses = model.compute_loss(tf.constant(y), outputs).numpy()
        assert losses.shape == (len(y),) and np.all(np.isfinite(losses))
        values = model.metrics[task.metric](tf.constant(y), outputs)
        assert values.shape == (len(y),)


@pytest.mark.parametrize("name", TASK_NAMES)
def test_counts_are_those_of_what_is_loaded(name, data_dir):
    task = load_anything(name, data_dir)
    for data in (task.train, task.test):
        assert len(set(data.client_ids)) == len(data.client_ids) > 0
        for client_id in data.client_ids[:60]:
            assert data.count(client_id) == len(data.load(client_id)[1])
