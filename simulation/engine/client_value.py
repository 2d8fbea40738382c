"""A client's value that is made where, and when, the client's work runs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


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
    """Returns an argument, in Python's containers, with all clients' values made."""
    if isinstance(argument, ClientValue):
        return argument.make()
    if type(argument) in (list, tuple):
        return type(argument)(make_values(part) for part in argument)
    if isinstance(argument, Mapping):
        return {name: make_values(part) for name, part in argument.items()}
    return argument
