"""Fixtures that the tests of the simulation share."""

import numpy as np
import pytest

from simulation.population.federated_data import ArrayData, build_pool
from simulation.tasks.task import Task
from tests.simulation import toys


@pytest.fixture(scope="session")
def engine():
    """The execution context of all tests of this folder."""
    from simulation import execution

    return execution.set_execution_context()


@pytest.fixture(scope="session")
def toy_task() -> Task:
    rng = np.random.default_rng(99)
    return Task(
        name="toy",
        description="made up",
        train=ArrayData(
            client_ids=tuple(str(index) for index in range(toys.NUM_CLIENTS)),
            make=toys.load_toy_client,
        ),
        test=build_pool(
            rng.normal(size=[20, *toys.SHAPE]).astype(np.float32),
            rng.integers(toys.NUM_CLASSES, size=20).astype(np.int32),
        ),
        has_test_users=False,
        models={"toy": toys.build_toy_model},
        metric="accuracy",
    )
