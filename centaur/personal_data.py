"""What each client trains on, chooses settings by, and is tested on.

Source: the CENTAUR experiments, where a tenth of each client's training examples is for
validation. A head is fitted on the client's training part alone.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from simulation.population.federated_data import DataError, Examples, FederatedData
from simulation.population.held_data import HeldData
from simulation.population.split import SplitBy, SplitRule
from simulation.sources.source import TRAIN, VALIDATION
from simulation.tasks import TaskOptions, stored
from simulation.tasks.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersonalData:
    """The parts of each client's data. All three have the same clients.

    Attributes:
        train: The training parts; none is empty.
        validation: The parts that settings are chosen by. That of a client with a
            single training example is empty, and all are where the fraction is 0.
        test: The task's own test data of each client; none is empty.
        description: How they were made, in words.
        identity: What says whether two runs had the same parts, as JSON values.
    """

    train: FederatedData
    validation: FederatedData
    test: FederatedData
    description: str
    identity: Mapping[str, Any]


def split_personal_data(
    task: Task,
    *,
    validation_fraction: float,
    seed: int,
    hold_mb: int = TaskOptions.hold_mb,
) -> PersonalData:
    """Divides each client's training examples into training and validation.

    A client's data are loaded when they are asked for, and counted without.

    Guarantees: training and validation parts are disjoint, together the client's
    training examples in their order, and a function of these, their number, the seed
    and the client's name; test data have no part in them.

    Args:
        task: The task, whose test data are of its clients.
        validation_fraction: The fraction of a client's training examples that is for
            validation, rounded; at least one example where it is positive, but never
            the last one.
        seed: Decides which.
        hold_mb: The most memory for what was loaded of each part, in megabytes.

    Raises:
        ValueError: If `validation_fraction` is not in [0, 1) or the seed is negative.
        DataError: If a client has no examples for training or none for the test.
    """
    if seed < 0:
        raise ValueError(f"`seed` must be >= 0. Found {seed!r}.")
    rule = SplitRule(
        by=SplitBy.EXAMPLE,
        test_fraction=0.0,
        validation_fraction=validation_fraction,
        seed=seed,
    )
    _check_clients(task)
    options = TaskOptions(hold_mb=hold_mb)

    def hold(part: str) -> HeldData:
        return stored.hold(_Part(data=task.train, rule=rule, part=part), options)

    return PersonalData(
        train=hold(TRAIN),
        validation=hold(VALIDATION),
        test=stored.hold(
            _Listed(data=task.test, client_ids=task.train.client_ids), options
        ),
        description=(
            f"of each client's training examples {validation_fraction:g} for "
            f"validation (seed {seed}), its test examples for the test alone"
        ),
        identity={
            **task.identity,
            "validation_fraction": validation_fraction,
            "validation_seed": seed,
        },
    )


def _check_clients(task: Task) -> None:
    """Raises DataError unless each client can be trained and tested."""
    if not task.has_test_users:
        raise DataError(
            f"the test data of {task.name} must be of its clients, or no personal "
            "model can be tested; where the task takes them, --partition with "
            "--test_fraction makes such. Found test examples without users."
        )
    tested = set(task.test.client_ids)
    untrained, untested = [], []
    for client_id in task.train.client_ids:
        if not task.train.count(client_id):
            untrained.append(client_id)
        elif client_id not in tested or not task.test.count(client_id):
            untested.append(client_id)
    if untrained:
        raise DataError(
            f"the clients of {task.name} must have training examples. Found none of "
            f"{_name(untrained)}."
        )
    if untested:
        raise DataError(
            f"the clients of {task.name} must have test examples, or their models "
            "cannot be tested: give --partition with --test_fraction, which holds some "
            f"of each client's out. Found none of {_name(untested)}."
        )


def _name(client_ids: list[str]) -> str:
    """Returns the first client, and how many more there are."""
    more = len(client_ids) - 1
    return f"client {client_ids[0]!r}" + (f" and {more:,} more" if more else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Listed:
    """Data of the clients that are listed.

    Attributes:
        data: The data, perhaps of more clients.
        client_ids: The clients, in the order of the training data.
    """

    data: FederatedData
    client_ids: tuple[str, ...]

    def count(self, client_id: str) -> int:
        """Returns the number of a client's examples."""
        return self.data.count(client_id)

    def load(self, client_id: str) -> Examples:
        """Returns one client's x and y. See `FederatedData`."""
        return self.data.load(client_id)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """One part of each client's examples.

    Attributes:
        data: All of its examples.
        rule: Divides them.
        part: Which part.
    """

    data: FederatedData
    rule: SplitRule
    part: str

    @property
    def client_ids(self) -> tuple[str, ...]:
        """The clients, in the order of the data."""
        return self.data.client_ids

    def count(self, client_id: str) -> int:
        """Returns the number of the part's examples."""
        return _count_parts(self.rule, self.data.count(client_id))[self.part]

    def load(self, client_id: str) -> Examples:
        """Returns the part's x and y. See `FederatedData`."""
        x, y = self.data.load(client_id)
        # A stream of its own: a partition's test part follows from the bare name.
        splits = self.rule.assign_examples(f"validation of {client_id}", len(y))
        rows = np.flatnonzero(np.array(splits) == self.part)
        return x[rows], y[rows]


@functools.lru_cache(maxsize=4096)
def _count_parts(rule: SplitRule, count: int) -> Mapping[str, int]:
    """Returns the size of each part of so many examples, whosever they are."""
    splits = rule.assign_examples("", count)
    return {part: splits.count(part) for part in (TRAIN, VALIDATION)}
