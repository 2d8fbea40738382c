"""Tests for the embedded digits, divided anew."""

import numpy as np
import pytest

from simulation.population.partition import PartitionKind
from simulation.tasks import TaskOptions, load_task


def load(**options):
    return load_task("digits", TaskOptions(**options))


def list_images(data) -> list[bytes]:
    return [x.tobytes() for name in data.client_ids for x in data.load(name)[0]]


class TestPartition:
    @pytest.fixture(scope="class")
    def task(self):
        return load(
            partition=PartitionKind.SHARDS,
            num_clients=100,
            classes_per_client=3,
            test_fraction=0.2,
        )

    def test_all_images_have_one_client_and_one_part(self, task):
        plain = load()
        parts = [list_images(data) for data in (task.train, task.test)]
        whole = [list_images(data) for data in (plain.train, plain.test)]
        images = [image for part in parts for image in part]
        assert [len(part) for part in parts] == [3800, 1000]
        assert len(set(images)) == len(images)
        assert set(images) <= {image for part in whole for image in part}
        # From both of the parts that there are without a partition.
        assert set(parts[0]) & set(whole[1]) and set(parts[1]) & set(whole[0])

    def test_clients_have_few_digits_and_are_tested_on_them(self, task):
        assert task.has_test_users and task.train.client_ids == task.test.client_ids
        for name in task.train.client_ids:
            known = set(task.train.load(name)[1])
            assert len(known) == 3
            assert set(task.test.load(name)[1]) <= known

    def test_it_says_so(self, task):
        assert "at most 3 classes a client" in task.description
        assert task.identity["test_fraction"] == 0.2
        assert any("divided" in caveat for caveat in task.caveats)
        assert not load().caveats and not load().has_test_users

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_clients": 100}, "`num_clients` must be unset without `partition`"),
            (
                {"partition": PartitionKind.SHARDS, "classes_per_client": 11},
                "`classes_per_client` must be at most the number of classes, 10",
            ),
            (
                {"partition": PartitionKind.PACHINKO},
                "`partition` pachinko must have coarse labels",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            load(**options)

    def test_the_model_of_centaur_is_small(self, task):
        assert task.build_model("small_mlp").num_parameters == 52_848 + 170
        assert np.isfinite(task.train.load(task.train.client_ids[0])[0]).all()
