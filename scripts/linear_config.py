"""The configuration of run_linear_representation, one field for each flag."""

import dataclasses
import math
from typing import Any

from scripts import axis_flag
from scripts import flags as run_flags

ADJACENCIES = ("zero_out", "replace_one")
ACCOUNTANTS = ("analytic", "rdp")
# Where an output goes, and what ran it, does not decide what is in it.
_LOCATION_FIELDS = ("output_root", "experiment", "engine", "seed")
_COUNTS = (
    "num_users",
    "dim",
    "rank",
    "examples_per_user",
    "start_examples",
    "head_examples",
    "gradient_examples",
    "trials",
    "steps",
    "rounds",
    "comparison_rounds",
    "floor_rounds",
    "repeats",
    "users_per_block",
    "boost_starts",
    "boost_group",
    "boost_users",
    "boost_dim",
    "boost_start_examples",
    "boost_trials",
    "boost_steps",
)
_POSITIVE = (
    "dim_epsilon",
    "boost_epsilon",
    "learning_rate",
    "start_clip_scale",
    "clip_scale",
    "matrix_clip_scale",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """What the program is told. The fields are the flags of run_linear_representation.

    A tuple is an axis.
    """

    epsilons: tuple[float, ...]
    dims: tuple[int, ...]
    num_users: int
    dim: int
    rank: int
    examples_per_user: int
    start_examples: int
    head_examples: int
    gradient_examples: int
    trials: int
    steps: int
    rounds: int
    comparison_rounds: int
    floor_rounds: int
    repeats: int
    users_per_block: int
    boost_starts: int
    boost_group: int
    boost_users: int
    boost_dim: int
    boost_start_examples: int
    boost_trials: int
    boost_steps: int
    dim_epsilon: float
    boost_epsilon: float
    delta: float
    start_share: float
    learning_rate: float
    start_clip_scale: float
    clip_scale: float
    matrix_clip_scale: float
    trial_distance: float
    adjacency: str
    accountant: str
    engine: str
    seed: int | None
    output_root: str
    experiment: str | None

    def __post_init__(self) -> None:
        for name in ("epsilons", "dims"):
            axis_flag.check_axis(name, getattr(self, name))
            if len(getattr(self, name)) < 2:
                raise ValueError(
                    f"`{name}` must hold at least two values, or there is no slope. "
                    f"Found {getattr(self, name)!r}."
                )
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1. Found {getattr(self, name)!r}."
                )
        run_flags.check_positive(self, *_POSITIVE)
        for epsilon in self.epsilons:
            if not 0 < epsilon < math.inf:
                raise ValueError(
                    f"`epsilons` must be positive and finite. Found {epsilon!r}."
                )
        self._check_shapes()
        self._check_subsets()
        self._check_boost()
        for name, high in (("delta", 1.0), ("start_share", 1.0)):
            if not 0 < getattr(self, name) < high:
                raise ValueError(
                    f"`{name}` must be in (0, {high:g}). Found {getattr(self, name)!r}."
                )
        if not 0 < self.trial_distance < 0.5:
            raise ValueError(
                "`trial_distance` must be in (0, 1/2): agreement would say nothing. "
                f"Found {self.trial_distance!r}."
            )
        for name, choices in (("adjacency", ADJACENCIES), ("accountant", ACCOUNTANTS)):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"`{name}` must be one of {', '.join(choices)}. Found "
                    f"{getattr(self, name)!r}."
                )
        if self.experiment is not None:
            run_flags.check_experiment(self.experiment)
        if not self.output_root:
            raise ValueError("`output_root` must not be empty.")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that decide the result."""
        values = dataclasses.asdict(self)
        for name in _LOCATION_FIELDS:
            del values[name]
        return values

    def _check_shapes(self) -> None:
        least = min(self.dim, self.boost_dim, *self.dims)
        if self.rank > least:
            raise ValueError(
                "`rank` must be at most every dimension of `dim`, `dims` and "
                f"`boost_dim` ({least}). Found {self.rank!r}."
            )
        for name in ("num_users", "boost_users"):
            if getattr(self, name) % self.users_per_block:
                raise ValueError(
                    f"`users_per_block` must divide `{name}` ({getattr(self, name)}). "
                    f"Found {self.users_per_block!r}."
                )
        if self.floor_rounds > self.rounds:
            raise ValueError(
                f"`floor_rounds` must be at most `rounds` ({self.rounds}). Found "
                f"{self.floor_rounds!r}."
            )

    def _check_subsets(self) -> None:
        if self.head_examples < self.rank:
            raise ValueError(
                f"`head_examples` must be at least `rank` ({self.rank}), or the head "
                f"is not determined. Found {self.head_examples!r}."
            )
        rounds = max(self.rounds, self.comparison_rounds)
        a_round = self.head_examples + self.gradient_examples
        needed = self.start_examples + rounds * a_round
        if self.examples_per_user < needed:
            raise ValueError(
                f"`examples_per_user` must be at least {needed} for disjoint subsets: "
                f"{self.start_examples} for the start and {self.head_examples} + "
                f"{self.gradient_examples} in each of {rounds} rounds. Found "
                f"{self.examples_per_user!r}."
            )

    def _check_boost(self) -> None:
        if self.boost_starts % self.boost_group:
            raise ValueError(
                f"`boost_starts` must be a multiple of `boost_group` "
                f"({self.boost_group}). Found {self.boost_starts!r}."
            )
