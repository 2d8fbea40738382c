"""A start and the rounds after it, with what they release in one ledger.

A stack has R members, independent repetitions on the same users; a real run has one,
and pays for it alone. With several their noise, first matrices and trials differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import tensorflow_federated as tff

from centaur.linear import process, selection
from centaur.linear.accounting import ReleaseLedger
from centaur.linear.alternation import build_alternation
from centaur.linear.geometry import sample_orthonormal
from centaur.linear.mechanism import StackedGaussianFactory
from centaur.linear.power_method import build_power_method
from centaur.linear.users import Block, Users
from distributed_dp.accounting import validation

START, ROUNDS = "start", "rounds"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartConfig:
    """The start, algorithm 3.

    Attributes:
        trials: T_0, of the order of log n.
        steps: L, of the power method.
        l2_clip: zeta_0.
        trial_distance: eps_0 in (0, 1/2), what a good trial keeps from B*.
    """

    trials: int
    steps: int
    l2_clip: float
    trial_distance: float

    def __post_init__(self) -> None:
        validation.check_integer("trials", self.trials, low=1)
        validation.check_integer("steps", self.steps, low=1)
        validation.check_positive("l2_clip", self.l2_clip)
        selection.compute_radius(self.trial_distance)

    @property
    def num_releases(self) -> int:
        """T_0 L."""
        return self.trials * self.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """The rounds.

    Attributes:
        num_rounds: T.
        l2_clip: zeta_g.
        learning_rate: eta_g.
    """

    num_rounds: int
    l2_clip: float
    learning_rate: float

    def __post_init__(self) -> None:
        validation.check_integer("num_rounds", self.num_rounds, low=1)
        validation.check_positive("l2_clip", self.l2_clip)
        validation.check_positive("learning_rate", self.learning_rate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What a process released, release by release.

    Attributes:
        stacks: float32[releases + 1, R, d, k], the first before any release.
        clipped: float64[releases, R], the share of users whose contribution was
            clipped; with `largest` outside epsilon.
        largest: float64[releases, R], the largest norm before clipping.
        ledgers: Of each member.
    """

    stacks: npt.NDArray[np.float32]
    clipped: npt.NDArray[np.float64]
    largest: npt.NDArray[np.float64]
    ledgers: tuple[ReleaseLedger, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """A start of each member.

    Attributes:
        stack: float32[R, d, k], the trials chosen; where there is no majority, the
            first trial, which nothing vouches for.
        selections: The choices.
        trials: float32[R, T_0, d, k].
        trajectory: Of all R T_0 trials, whose ledgers are those of the R members.
    """

    stack: npt.NDArray[np.float32]
    selections: tuple[selection.Selection, ...]
    trials: npt.NDArray[np.float32]
    trajectory: Trajectory


def run_start(
    users: Users,
    blocks: Sequence[Block],
    config: StartConfig,
    *,
    noise_multipliers: Sequence[float],
    rng: np.random.Generator,
    noise_seed: tuple[int, int] | None = None,
    run: int = 0,
) -> Start:
    """Runs the trials of every member's start, and chooses.

    Args:
        users: The users.
        blocks: Their client values.
        config: The start.
        noise_multipliers: sigma_0 of each member.
        rng: Draws the first matrices, which are public.
        noise_seed: Root of the noise; None for the operating system's entropy.
        run: Number of this run under that root.
    """
    members, trials = len(noise_multipliers), config.trials
    dim, rank = users.problem.dim, users.problem.rank
    factory = StackedGaussianFactory(
        [value for value in noise_multipliers for _ in range(trials)],
        l2_clip=config.l2_clip,
        num_users=users.problem.num_users,
        noise_seed=noise_seed,
    )
    first = [sample_orthonormal(rng, dim, rank) for _ in range(members * trials)]
    trajectory = run_process(
        build_power_method(users, factory),
        blocks,
        stack=np.stack(first),
        num_releases=config.steps,
        num_users=users.problem.num_users,
        ledgers=[
            ReleaseLedger().add(START, value, count=config.num_releases)
            for value in noise_multipliers
        ],
        run=run,
    )
    found = trajectory.stacks[-1].reshape(members, trials, dim, rank)
    selections = selection.select_trials(found, trial_distance=config.trial_distance)
    chosen = [found[i, choice.index or 0] for i, choice in enumerate(selections)]
    return Start(
        stack=np.stack(chosen),
        selections=selections,
        trials=found,
        trajectory=trajectory,
    )


def run_rounds(
    users: Users,
    blocks: Sequence[Block],
    config: RoundsConfig,
    *,
    stack: npt.ArrayLike,
    noise_multipliers: Sequence[float],
    ledgers: Sequence[ReleaseLedger],
    noise_seed: tuple[int, int] | None = None,
    run: int = 0,
) -> Trajectory:
    """Runs CENTAUR's rounds from a start.

    Args:
        users: The users.
        blocks: Their client values.
        config: The rounds.
        stack: [R, d, k], the start.
        noise_multipliers: sigma_g of each member.
        ledgers: What the start of each member spent.
        noise_seed: Root of the noise, another one than the start's; None for the
            operating system's entropy.
        run: Number of this run under that root.
    """
    factory = StackedGaussianFactory(
        noise_multipliers,
        l2_clip=config.l2_clip,
        num_users=users.problem.num_users,
        noise_seed=noise_seed,
    )
    spent = [
        ledger.add(ROUNDS, value, count=config.num_rounds)
        for ledger, value in zip(ledgers, noise_multipliers, strict=True)
    ]
    return run_process(
        build_alternation(users, factory, learning_rate=config.learning_rate),
        blocks,
        stack=stack,
        num_releases=config.num_rounds,
        num_users=users.problem.num_users,
        ledgers=spent,
        run=run,
    )


def run_process(
    built: tff.templates.IterativeProcess,
    blocks: Sequence[Block],
    *,
    stack: npt.ArrayLike,
    num_releases: int,
    num_users: int,
    ledgers: Sequence[ReleaseLedger],
    run: int = 0,
) -> Trajectory:
    """Runs releases and keeps every stack.

    Args:
        built: What `process.build_process` returned.
        blocks: The client values.
        stack: [R, d, k], where to begin.
        num_releases: How many.
        num_users: n.
        ledgers: What the members have spent when all is done.
        run: Number of this run under the noise's root.
    """
    first = np.asarray(stack, np.float32)
    steps = list(
        process.run_releases(
            built, blocks, stack=first, num_releases=num_releases, run=run
        )
    )
    clipped = np.stack([step.clipped for step in steps])
    return Trajectory(
        stacks=np.stack([first, *[step.stack for step in steps]]),
        clipped=clipped / num_users,
        largest=np.stack([step.largest for step in steps]),
        ledgers=tuple(ledgers),
    )
