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

    def build_dataset(
        self,
        client_id: str,
        *,
        batch_size: int,
        num_epochs: int,
        rng: np.random.Generator,
    ) -> tf.data.Dataset:
        """Returns one client's batches, a mapping of "x" and "y" each.

        Args:
            client_id: The client.
            batch_size: Examples in a batch; the last one of an epoch may be smaller.
            num_epochs: Passes over the client's examples, each in a new order.
            rng: Draws the orders.

        Raises:
            DataError: If the client's data cannot be trained on.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayData:
    """Clients whose examples are arrays in memory, made when they are asked for.

    Attributes:
        client_ids: The clients.
        load: Returns a client's x and y, with equally many examples, at least one.
    """

    client_ids: tuple[str, ...]
    load: Callable[[str], tuple[np.ndarray, np.ndarray]]

    def build_dataset(
        self,
        client_id: str,
        *,
        batch_size: int,
        num_epochs: int,
        rng: np.random.Generator,
    ) -> tf.data.Dataset:
        """Returns one client's batches. See `FederatedData`."""
        x, y = self.load(client_id)
        check_finite(x, f"x of client {client_id}")
        orders = [rng.permutation(len(x)) for _ in range(num_epochs)]
        order = np.concatenate(orders)
        # No op here holds a traced function: it would stay in memory for as long as the
        # process lives.
        size = min(batch_size, len(x))
        if len(x) % size == 0:
            return build_batches(
                x[order].reshape([-1, size, *x.shape[1:]]),
                y[order].reshape([-1, size, *y.shape[1:]]),
            )
        full, rest = divmod(len(x), size)
        whole = collections.OrderedDict(x=x[order], y=y[order])
        # The sizes repeat with every epoch.
        return tf.data.Dataset.from_tensors(whole).rebatch([size] * full + [rest])


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


def build_batches(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    """Returns the data set whose elements are the slices along the first axis."""
    return tf.data.Dataset.from_tensor_slices(collections.OrderedDict(x=x, y=y))


def check_finite(values: np.ndarray, name: str) -> None:
    """Raises DataError if an entry is not a finite number."""
    num_bad = int(np.size(values) - np.count_nonzero(np.isfinite(values)))
    if num_bad:
        raise DataError(
            f"`{name}` must be finite. Found {num_bad} values that are NaN or infinite."
        )
