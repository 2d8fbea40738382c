"""What run_linear_representation measures: runs of methods, and starts."""

import dataclasses

from centaur import linear

CENTAUR = "CENTAUR"
NO_PRIVACY = "no privacy"
RANDOM_START = "random start"
NORMAL_EQUATIONS = "normal equations"
WHOLE_MATRIX = "whole matrix"
SINGLE, BOOSTED, SAME_BUDGET = "one trial", "boosted", "one trial, all the budget"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One method, once.

    Attributes:
        sweep: "epsilon" or "dim".
        method: Its name.
        dim: d.
        epsilon: Its budget; inf without noise.
        repeat: Which repetition.
        noise_multiplier: Of the releases after the start.
        start_distance: Where the start ended, or the method began.
        started: Whether the start had a majority (true where there was none to have).
        distances: To B* by round, from the start on.
        floor: The mean distance of the last rounds.
        clipped: The largest share of users clipped in a round.
        start_clipped: The same in a step of the start; NaN without one.
        largest: The largest norm of a contribution, over the threshold.
        ledger: What it released; None without noise.
    """

    sweep: str
    method: str
    dim: int
    epsilon: float
    repeat: int
    noise_multiplier: float
    start_distance: float
    started: bool
    distances: tuple[float, ...]
    floor: float
    clipped: float
    start_clipped: float
    largest: float
    ledger: linear.ReleaseLedger | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartOutcome:
    """One start of the success rates, three ways.

    Attributes:
        index: Its number.
        distances: By way; inf where no trial had a majority.
        trials: The distances of all trials.
        has_majority: Whether a trial was chosen.
        clipped: The largest share of users clipped in a step.
    """

    index: int
    distances: dict[str, float]
    trials: tuple[float, ...]
    has_majority: bool
    clipped: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured."""

    runs: tuple[Run, ...]
    starts: tuple[StartOutcome, ...]

    def select(self, sweep: str, method: str) -> list[Run]:
        """Returns the runs of a sweep and method."""
        return [r for r in self.runs if r.sweep == sweep and r.method == method]
