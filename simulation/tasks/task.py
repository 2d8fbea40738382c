"""What a task is: clients with data, test data, models and the metric that counts."""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import tensorflow as tf

from simulation.model import Model


class DataError(ValueError):
    """Data that cannot be trained on."""


class FederatedData(Protocol):
    """The data of many clients."""

    @property
    def client_ids(self) -> tuple[str, ...]:
        """The clients, in a fixed order."""

    def load(self, client_id: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns one client's x and y, with equally many examples.

        Raises:
            DataError: If the client's data cannot be trained on.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayData:
    """Clients whose examples are arrays in memory, made when they are asked for.

    Attributes:
        client_ids: The clients.
        make: Returns a client's x and y, with equally many examples.
    """

    client_ids: tuple[str, ...]
    make: Callable[[str], tuple[np.ndarray, np.ndarray]]

    def load(self, client_id: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns one client's x and y. See `FederatedData`."""
        x, y = self.make(client_id)
        if len(x) != len(y):
            raise DataError(
                f"x and y of client {client_id} must have equally many examples. Found "
                f"{len(x)} and {len(y)}."
            )
        check_finite(x, f"x of client {client_id}")
        return x, y


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A learning task.

    Attributes:
        name: Its name in flags and outputs.
        description: One sentence: what the data are, where they come from, and, for
            data that are not real, that they are not.
        train: The clients' data.
        test_x: Test examples, float32[M, ...].
        test_y: Their labels, int32[M].
        models: Builds a model, by name. The first is the default.
        metric: The name of the metric that the task is judged by.
    """

    name: str
    description: str
    train: FederatedData
    test_x: np.ndarray
    test_y: np.ndarray
    models: Mapping[str, Callable[[], Model]]
    metric: str

    def __post_init__(self) -> None:
        if len(self.test_x) != len(self.test_y) or not len(self.test_x):
            raise ValueError(
                "`test_x` and `test_y` must have equally many examples, at least one. "
                f"Found {len(self.test_x)} and {len(self.test_y)}."
            )
        check_finite(self.test_x, "test_x")

    @property
    def num_clients(self) -> int:
        """The number N of clients."""
        return len(self.train.client_ids)

    def build_model(self, name: str | None = None) -> Model:
        """Returns a model by name, the task's default for None.

        Raises:
            ValueError: If the task has no such model.
        """
        if name is None:
            name = next(iter(self.models))
        if name not in self.models:
            raise ValueError(
                f"`model` must be one of {', '.join(self.models)} for the task "
                f"{self.name}. Found {name!r}."
            )
        return self.models[name]()


def build_dataset(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    """Returns the data set of examples, for TFF's own algorithms and for evaluation."""
    return tf.data.Dataset.from_tensor_slices(collections.OrderedDict(x=x, y=y))


def check_finite(values: np.ndarray, name: str) -> None:
    """Raises DataError if an entry is not a finite number."""
    num_bad = int(np.size(values) - np.count_nonzero(np.isfinite(values)))
    if num_bad:
        raise DataError(
            f"`{name}` must be finite. Found {num_bad} values that are NaN or infinite."
        )
