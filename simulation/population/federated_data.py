"""The data of many users: what a task gives the training, and wrappers around it."""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import tensorflow as tf

# One client's x and y, with equally many examples.
Examples = tuple[np.ndarray, np.ndarray]


class DataError(ValueError):
    """Data that cannot be trained on."""


class FederatedData(Protocol):
    """The data of many clients."""

    @property
    def client_ids(self) -> tuple[str, ...]:
        """The clients, in a fixed order."""

    def count(self, client_id: str) -> int:
        """Returns the number of a client's examples, where possible without them."""

    def load(self, client_id: str) -> Examples:
        """Returns one client's x and y, with equally many examples.

        May be called by several threads at a time.

        Raises:
            DataError: If the client's data cannot be trained on.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayData:
    """Clients whose examples are arrays in memory, made when they are asked for.

    Attributes:
        client_ids: The clients.
        make: Returns a client's x and y, with equally many examples.
        counts: The number of each client's examples; None makes them to count them.
    """

    client_ids: tuple[str, ...]
    make: Callable[[str], Examples]
    counts: Mapping[str, int] | None = None

    def count(self, client_id: str) -> int:
        """Returns the number of a client's examples."""
        if self.counts is not None:
            return self.counts[client_id]
        return len(self.make(client_id)[1])

    def load(self, client_id: str) -> Examples:
        """Returns one client's x and y. See `FederatedData`."""
        return check_examples(self.make(client_id), client_id)


def build_pool(x: np.ndarray, y: np.ndarray, *, client_id: str = "all") -> ArrayData:
    """Returns examples without users as the data of one client."""
    return ArrayData(client_ids=(client_id,), make=lambda _: (x, y))


def build_dataset(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    """Returns the data set of examples, for TFF's own algorithms."""
    return tf.data.Dataset.from_tensor_slices(collections.OrderedDict(x=x, y=y))


def check_examples(examples: Examples, client_id: str) -> Examples:
    """Returns a client's examples.

    Raises:
        DataError: If they are not equally many x and y, or not finite.
    """
    x, y = examples
    if len(x) != len(y):
        raise DataError(
            f"x and y of client {client_id} must have equally many examples. Found "
            f"{len(x)} and {len(y)}."
        )
    for name, values in (("x", x), ("y", y)):
        check_finite(values, f"{name} of client {client_id}")
    return examples


def check_finite(values: np.ndarray, name: str) -> None:
    """Raises DataError if an entry is not a finite number."""
    if values.dtype.kind not in "fc":
        return
    num_bad = int(np.size(values) - np.count_nonzero(np.isfinite(values)))
    if num_bad:
        raise DataError(
            f"`{name}` must be finite. Found {num_bad} values that are NaN or infinite."
        )
