"""What clients keep between rounds, held for them by the simulation.

On real devices it would lie on each client. Here the training loop holds it, hands each
client its own with its data, and saves it in the checkpoints.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np

Arrays = tuple[np.ndarray, ...]
_IDS, _PART = "ids", "part"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientStates:
    """The states of the clients; nothing where clients keep nothing.

    Attributes:
        initial: What a client has before its first round.
        kept: What the clients have that took part in a round, by client.
    """

    initial: Arrays = ()
    kept: Mapping[str, Arrays] = dataclasses.field(default_factory=dict)

    def get(self, client_id: str) -> Arrays:
        """Returns a client's state."""
        return self.kept.get(client_id, self.initial)

    def replace(
        self, client_ids: Sequence[str], states: Sequence[Arrays]
    ) -> "ClientStates":
        """Returns the states with some clients' new ones.

        A new state that is not finite is not taken: the client would be lost for good,
        where the one round that made it so may have been bad luck.

        Raises:
            ValueError: If there are not as many states as clients.
        """
        new = {
            client_id: tuple(np.asarray(part) for part in state)
            for client_id, state in zip(client_ids, states, strict=True)
            if all(np.all(np.isfinite(part)) for part in state)
        }
        return dataclasses.replace(self, kept={**self.kept, **new})

    def pack(self) -> dict[str, np.ndarray]:
        """Returns them as arrays by name; nothing where clients keep nothing."""
        if not self.initial:
            return {}
        ids = json.dumps(list(self.kept)).encode()
        arrays = {_IDS: np.frombuffer(ids, np.uint8)}
        for index, part in enumerate(self.initial):
            # Without clients too the arrays say what each would have.
            parts = [state[index] for state in self.kept.values()]
            empty = np.empty([0, *part.shape], part.dtype)
            arrays[f"{_PART}{index}"] = np.stack(parts) if parts else empty
        return arrays

    def unpack(self, arrays: Mapping[str, np.ndarray]) -> "ClientStates":
        """Returns what `pack` was given, with this one's initial state.

        Raises:
            ValueError: If the arrays are of other clients' states.
        """
        ids = json.loads(arrays[_IDS].tobytes().decode()) if _IDS in arrays else []
        parts = [arrays[name] for name in arrays if name != _IDS]
        found = [(part.shape, part.dtype) for part in parts]
        wanted = [((len(ids), *part.shape), part.dtype) for part in self.initial]
        if found != wanted:
            raise ValueError("it holds client states of another structure")
        columns = [arrays[f"{_PART}{index}"] for index in range(len(parts))]
        kept = {
            client_id: tuple(column[row] for column in columns)
            for row, client_id in enumerate(ids)
        }
        return dataclasses.replace(self, kept=kept)
