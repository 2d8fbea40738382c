"""The privacy ledger: what has been spent, kept apart from what it costs.

The ledger counts releases. What they cost is a function that is passed in.

Crashes. A round is written to the journal *before* it runs: from that moment on its
result may have been seen. After a crash, the journal may be ahead of the checkpoint.

- With the user's root seed the lost rounds are repeated with the same clients, noise
  and rotation: the result is the same release once more, and is not counted twice.
- With the operating system's entropy the repeated rounds draw fresh noise. Their lost
  twins stay counted, so that the run ends before its budget is passed, some rounds
  earlier than planned.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from simulation import run_folder


class BudgetExceededError(RuntimeError):
    """The next round would cost more than the budget."""


class LedgerError(RuntimeError):
    """The journal is missing, damaged, or behind its checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerState:
    """What happened so far.

    Attributes:
        rounds_completed: Rounds whose result is in the state of the training.
        rounds_lost: Releases that a crash took away and that fresh noise replaced.
        join_counts: int64[N], the rounds that each client joined.
        cohort_sizes: int64[T], clients that joined each round; -1 for no such round.
        survivor_counts: int64[T], clients among them that did not drop out.
    """

    rounds_completed: int
    rounds_lost: int
    join_counts: np.ndarray
    cohort_sizes: np.ndarray
    survivor_counts: np.ndarray

    @property
    def rounds_spent(self) -> int:
        """Releases that must be paid for."""
        return self.rounds_completed + self.rounds_lost

    @property
    def most_rounds_joined(self) -> int:
        """The largest number of releases that any one client may have been part of.

        The clients of a lost release are unknown: every client is assumed to be one.
        """
        return int(self.join_counts.max(initial=0)) + self.rounds_lost


def build_ledger_state(num_clients: int, total_rounds: int) -> LedgerState:
    """Returns the state before the first round."""
    return LedgerState(
        rounds_completed=0,
        rounds_lost=0,
        join_counts=np.zeros(num_clients, np.int64),
        cohort_sizes=np.full(total_rounds, -1, np.int64),
        survivor_counts=np.full(total_rounds, -1, np.int64),
    )


def count_client_releases(state: LedgerState, *, recorded: bool) -> np.ndarray:
    """Returns the releases that each client may have been part of, int64[N].

    Args:
        state: What happened.
        recorded: Whether it was recorded who joined; otherwise everyone is assumed to
            have joined every round, as in rounds that were lost.
    """
    if not recorded:
        return np.full_like(state.join_counts, state.rounds_spent)
    return state.join_counts + state.rounds_lost


class PrivacyLedger:
    """Counts the rounds of one training and refuses to pass its budget."""

    def __init__(
        self,
        state: LedgerState,
        *,
        compute_epsilon: Callable[[int], float],
        budget: float | None,
        journal_path: pathlib.Path,
        reproducible: bool,
    ) -> None:
        """Takes up the ledger at a state, and what the journal knows beyond it.

        Args:
            state: The state before the first round, or that of a checkpoint.
            compute_epsilon: The epsilon of a number of rounds.
            budget: The epsilon that no round may pass, or None for no limit.
            journal_path: The file that is written before every round.
            reproducible: Whether a repeated round is the same release once more.

        Raises:
            LedgerError: If the journal does not fit the state.
            ValueError: If the budget is negative.
        """
        if budget is not None and not budget >= 0:
            raise ValueError(f"`budget` must be >= 0 or None. Found {budget!r}.")
        self._compute_epsilon = compute_epsilon
        self._budget = budget
        self._journal_path = journal_path
        self._reproducible = reproducible
        self._state = _recover(state, journal_path, reproducible)

    @property
    def state(self) -> LedgerState:
        """What happened so far."""
        return self._state

    @property
    def epsilon(self) -> float:
        """The epsilon of everything spent so far."""
        return self._compute_epsilon(self._state.rounds_spent)

    def open_round(self) -> int:
        """Writes the next round to the journal and returns its number.

        Raises:
            BudgetExceededError: If its epsilon would pass the budget. Nothing is
                written then.
        """
        spent = self._state.rounds_spent + 1
        epsilon = self._compute_epsilon(spent)
        if self._budget is not None and epsilon > self._budget:
            raise BudgetExceededError(
                f"release {spent} would bring epsilon to {epsilon:.6g}, past the "
                f"budget of {self._budget:.6g}"
            )
        run_folder.write_text(
            self._journal_path,
            json.dumps({"rounds_spent": spent, "rounds_lost": self._state.rounds_lost}),
            durable=True,
        )
        return self._state.rounds_completed

    def close_round(
        self, joined: Sequence[int], *, num_survivors: int, record_clients: bool
    ) -> None:
        """Counts the round that was opened last.

        Args:
            joined: The indices in [0, N) of the clients that joined.
            num_survivors: How many of them did not drop out.
            record_clients: Whether to keep who joined. Without it, every client
                counts as one that joined: true, larger, and private.
        """
        state = self._state
        index = state.rounds_completed
        counts = state.join_counts.copy()
        sizes, survivors = state.cohort_sizes.copy(), state.survivor_counts.copy()
        if record_clients:
            counts[np.asarray(joined, np.int64)] += 1
            sizes[index], survivors[index] = len(joined), num_survivors
        else:
            counts += 1
        self._state = LedgerState(
            rounds_completed=index + 1,
            rounds_lost=state.rounds_lost,
            join_counts=counts,
            cohort_sizes=sizes,
            survivor_counts=survivors,
        )


def pack_ledger_state(state: LedgerState) -> dict[str, np.ndarray]:
    """Returns the state as arrays, for a checkpoint."""
    return {
        field.name: np.asarray(getattr(state, field.name), np.int64)
        for field in dataclasses.fields(state)
    }


def unpack_ledger_state(arrays: Mapping[str, np.ndarray]) -> LedgerState:
    """Returns the state of a checkpoint.

    Raises:
        LedgerError: If an array is missing or the counts contradict each other.
    """
    try:
        state = LedgerState(
            rounds_completed=int(arrays["rounds_completed"]),
            rounds_lost=int(arrays["rounds_lost"]),
            join_counts=np.asarray(arrays["join_counts"], np.int64),
            cohort_sizes=np.asarray(arrays["cohort_sizes"], np.int64),
            survivor_counts=np.asarray(arrays["survivor_counts"], np.int64),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(f"the ledger of the checkpoint is damaged: {error}") from None
    total = len(state.cohort_sizes)
    if not (0 <= state.rounds_completed <= total and state.rounds_lost >= 0):
        raise LedgerError(
            f"the ledger of the checkpoint counts {state.rounds_completed} of {total} "
            f"rounds and {state.rounds_lost} lost ones"
        )
    return state


def _recover(
    state: LedgerState, journal_path: pathlib.Path, reproducible: bool
) -> LedgerState:
    """Adds the rounds that the journal knows and the state does not."""
    if not journal_path.exists():
        if state.rounds_spent:
            raise LedgerError(
                f"the journal {journal_path} is missing, though {state.rounds_spent} "
                "rounds were spent: what was spent after the checkpoint is unknown"
            )
        return state
    try:
        spent = int(json.loads(journal_path.read_text())["rounds_spent"])
    except (KeyError, OverflowError, TypeError, ValueError):
        raise LedgerError(f"the journal {journal_path} is damaged") from None
    lost = spent - state.rounds_spent
    if lost < 0:
        raise LedgerError(
            f"the journal {journal_path} knows {spent} rounds, fewer than the "
            f"checkpoint's {state.rounds_spent}"
        )
    if reproducible:
        return state
    return dataclasses.replace(state, rounds_lost=state.rounds_lost + lost)
