"""A client's value that is made where, and when, the client's work runs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow_federated as tff


@dataclasses.dataclass(frozen=True)
class ClientValue:
    """Stands for a value among the clients' values of an argument.

    Attributes:
        load: Returns the value for a key. One function for many clients: on a cluster
            it goes to each worker once, and only keys travel with the clients.
        key: What tells this client's value from others.
    """

    load: Callable[[Any], Any]
    key: Any

    def make(self) -> Any:
        """Returns the value."""
        return self.load(self.key)


def make_values(argument: Any) -> Any:
    """Returns an argument with the values of all clients made."""
    if isinstance(argument, list):
        return [
            value.make() if isinstance(value, ClientValue) else value
            for value in argument
        ]
    if isinstance(argument, tff.structure.Struct):
        pairs = tff.structure.to_elements(argument)
        return tff.structure.Struct([(name, make_values(part)) for name, part in pairs])
    return argument
