"""How often a client, or the server, releases something that its data is in."""

import enum

import numpy as np
import numpy.typing as npt

from distributed_dp.accounting import validation


class ServerRule(enum.Enum):
    """What a server step is."""

    BASELINE = "baseline"
    UPCYCLED = "upcycled"


def count_server_releases(rule: ServerRule, num_server_steps: int) -> int:
    """Returns how many of T server steps release an aggregate of the clients' data.

    For user-level mechanisms: what the ledger composes. Even Upcycled steps use the
    released models alone (lemma 5.1) and cost nothing.

    Args:
      rule: BASELINE, T; UPCYCLED, ceil(T / 2), since odd steps come first.
      num_server_steps: T, at least 0.
    """
    validation.check_choice("rule", rule, kind=ServerRule)
    validation.check_integer("num_server_steps", num_server_steps, low=0)
    if rule is ServerRule.BASELINE:
        return int(num_server_steps)
    return (int(num_server_steps) + 1) // 2


def count_client_releases(participation: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Returns M_i, the rounds that each client took part in.

    A round is an odd step (Upcycled) or a step (baseline): what has the clients work.

    Args:
      participation: [rounds, clients], bool; who took part must not depend on data.
    """
    array = np.asarray(participation)
    if array.ndim != 2 or array.dtype != np.bool_:
        raise ValueError(
            "`participation` must be boolean, of shape [rounds, clients]. Found "
            f"{array.dtype} of shape {array.shape!r}."
        )
    return array.sum(axis=0, dtype=np.int64)
