"""The measurements of run_linear_representation, each a few stacks of releases.

What is measured on the same users runs as one stack: several epsilons, repetitions and
starts share every pass over the users, and each has noise of its own.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from centaur import linear
from distributed_dp.accounting import Accountant
from scripts.linear_config import LinearConfig
from scripts.linear_results import (
    BOOSTED,
    CENTAUR,
    NO_PRIVACY,
    NORMAL_EQUATIONS,
    RANDOM_START,
    SAME_BUDGET,
    SINGLE,
    WHOLE_MATRIX,
    Run,
    StartOutcome,
)
from simulation import seeds


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Population:
    """Users, their client values, and where their truth and streams come from."""

    users: linear.GeneratedUsers
    blocks: Sequence[dict[str, npt.NDArray[np.generic]]]
    truth: npt.NDArray[np.float64]
    rng: np.random.Generator
    root: seeds.RootSeed

    def derive_noise(self, purpose: str) -> tuple[int, int] | None:
        """Returns the root of a factory's noise; None for entropy."""
        if not self.root.reproducible:
            return None
        scoped = seeds.scope_root(self.root, purpose)
        pair = seeds.derive_seed(scoped, purpose=seeds.Purpose.SERVER_NOISE)
        first, second = pair.tolist()
        return first, second

    def measure(self, stacks: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Returns the distances of [..., d, k] to the truth."""
        array = np.asarray(stacks)
        flat = array.reshape(-1, *array.shape[-2:])
        found = [linear.compute_distance(matrix, self.truth) for matrix in flat]
        return np.reshape(found, array.shape[:-2])


class Study:
    """Runs the measurements of a configuration."""

    def __init__(self, config: LinearConfig, root: seeds.RootSeed) -> None:
        """Checks the configuration's noise; raises ValueError if it is out of range."""
        self.config = config
        # Noise is shared with no run of other settings.
        scope = json.dumps(["linear", config.to_dict()], sort_keys=True)
        self._root = seeds.scope_root(root, scope)
        for epsilon in (*config.epsilons, config.dim_epsilon):
            self._calibrate(epsilon)

    @property
    def num_groups(self) -> int:
        """How many groups of starts there are."""
        return self.config.boost_starts // self.config.boost_group

    @property
    def num_parts(self) -> int:
        """How many measurements there are."""
        return 1 + len(self.config.dims) + self.num_groups

    def measure_epsilons(self) -> Iterator[Run]:
        """Measures CENTAUR at every epsilon, without noise, and from a random start."""
        config = self.config
        population = self._build_population("epsilon", config.dim, config.num_users)
        plans = [
            (epsilon, repeat, self._calibrate(epsilon))
            for epsilon in config.epsilons
            for repeat in range(config.repeats)
        ]
        start = self._run_start(
            population, [0.0, *[_get_start(noise) for _, _, noise in plans]]
        )
        random = [
            linear.sample_orthonormal(population.rng, config.dim, config.rank)
            for _ in plans
        ]
        without_start = [
            self._calibrate_alone(epsilon, config.rounds) for epsilon, _, _ in plans
        ]
        rounds = linear.run_rounds(
            population.users,
            population.blocks,
            self._build_rounds(config.dim),
            stack=np.concatenate([start.stack, np.stack(random)]),
            noise_multipliers=[
                0.0,
                *[noise.rounds for _, _, noise in plans],
                *without_start,
            ],
            ledgers=[
                *start.trajectory.ledgers,
                *[linear.ReleaseLedger() for _ in plans],
            ],
            noise_seed=population.derive_noise("rounds"),
        )
        labels = [
            (NO_PRIVACY, math.inf, 0),
            *[(CENTAUR, epsilon, repeat) for epsilon, repeat, _ in plans],
            *[(RANDOM_START, epsilon, repeat) for epsilon, repeat, _ in plans],
        ]
        yield from self._read(
            "epsilon",
            labels,
            population,
            rounds,
            start=start,
            clip=self._build_rounds(config.dim).l2_clip,
            last=config.floor_rounds,
        )

    def measure_dim(self, dim: int) -> Iterator[Run]:
        """Measures CENTAUR and what it is compared with in one dimension.

        Each method runs once more without noise, start included: what is left then is
        the error of the sample and of too few rounds.
        """
        config = self.config
        population = self._build_population(f"dim={dim}", dim, config.num_users)
        noise = self._calibrate(config.dim_epsilon)
        start = self._run_start(population, self._repeat(_get_start(noise)))
        rounds = linear.run_rounds(
            population.users,
            population.blocks,
            self._build_rounds(dim),
            stack=start.stack,
            noise_multipliers=self._repeat(noise.rounds),
            ledgers=start.trajectory.ledgers,
            noise_seed=population.derive_noise("rounds"),
        )
        yield from self._read(
            "dim",
            self._label(CENTAUR),
            population,
            rounds,
            start=start,
            clip=self._build_rounds(dim).l2_clip,
            last=config.floor_rounds,
        )
        yield from self._measure_normal_equations(population, start)
        yield from self._measure_whole_matrix(population)

    def measure_starts(self, group: int) -> list[StartOutcome]:
        """Measures one group of starts with one trial, with several, and at equal cost.

        The last has the noise that one trial may have for the epsilon of them all.
        """
        config = self.config
        trials, steps = config.boost_trials, config.boost_steps
        population = self._build_population(
            f"starts={group}", config.boost_dim, config.boost_users, is_boost=True
        )
        epsilon = config.boost_epsilon
        alone = self._run_boost(
            population, 1, self._calibrate_alone(epsilon, steps), SAME_BUDGET
        )
        start = self._run_boost(
            population, trials, self._calibrate_alone(epsilon, trials * steps), BOOSTED
        )
        trial_distances = population.measure(start.trials)
        alone_distances = population.measure(alone.stack)
        chosen = population.measure(start.stack)
        outcomes = []
        for index, selection in enumerate(start.selections):
            found = selection.index is not None
            outcomes.append(
                StartOutcome(
                    index=group * config.boost_group + index,
                    distances={
                        SINGLE: float(trial_distances[index, 0]),
                        BOOSTED: float(chosen[index]) if found else math.inf,
                        SAME_BUDGET: float(alone_distances[index]),
                    },
                    trials=tuple(map(float, trial_distances[index])),
                    has_majority=found,
                    clipped=float(start.trajectory.clipped.max()),
                )
            )
        return outcomes

    def _measure_normal_equations(
        self, population: _Population, start: linear.Start
    ) -> Iterator[Run]:
        config, dim = self.config, population.users.problem.dim
        noises = self._repeat(
            self._calibrate(config.dim_epsilon, config.comparison_rounds).rounds
        )
        clip = config.matrix_clip_scale * dim * config.rank
        factory = linear.StackedGaussianFactory(
            noises,
            l2_clip=clip,
            num_users=config.num_users,
            noise_seed=population.derive_noise(NORMAL_EQUATIONS),
        )
        rounds = linear.run_process(
            linear.build_normal_equations(population.users, factory),
            population.blocks,
            stack=start.stack,
            num_releases=config.comparison_rounds,
            num_users=config.num_users,
            ledgers=[
                ledger.add("rounds", noise, count=config.comparison_rounds)
                for ledger, noise in zip(start.trajectory.ledgers, noises, strict=True)
            ],
        )
        yield from self._read(
            "dim",
            self._label(NORMAL_EQUATIONS),
            population,
            rounds,
            start=start,
            clip=clip,
            last=max(1, config.comparison_rounds // 2),
        )

    def _measure_whole_matrix(self, population: _Population) -> Iterator[Run]:
        config, dim = self.config, population.users.problem.dim
        noises = self._repeat(self._calibrate_alone(config.dim_epsilon, 1))
        clip = config.matrix_clip_scale * dim * config.rank
        factory = linear.StackedGaussianFactory(
            noises,
            l2_clip=clip,
            num_users=config.num_users,
            noise_seed=population.derive_noise(WHOLE_MATRIX),
        )
        first = [
            linear.sample_orthonormal(population.rng, dim, config.rank) for _ in noises
        ]
        released = linear.run_process(
            linear.build_whole_matrix(population.users, factory),
            population.blocks,
            stack=np.stack(first),
            num_releases=1,
            num_users=config.num_users,
            ledgers=[linear.ReleaseLedger().add("matrix", noise) for noise in noises],
        )
        yield from self._read(
            "dim",
            self._label(WHOLE_MATRIX),
            population,
            released,
            start=None,
            clip=clip,
            last=1,
        )

    def _repeat(self, noise_multiplier: float) -> list[float]:
        """Returns the noise of the repetitions, and none for one member more."""
        return [noise_multiplier] * self.config.repeats + [0.0]

    def _label(self, method: str) -> list[tuple[str, float, int]]:
        """Returns the labels of these members."""
        epsilon, repeats = self.config.dim_epsilon, self.config.repeats
        named = [(method, epsilon, repeat) for repeat in range(repeats)]
        return [*named, (method, math.inf, 0)]

    def _calibrate(self, epsilon: float, num_rounds: int | None = None) -> linear.Noise:
        """Returns the noise of the start and of rounds, those of CENTAUR by default."""
        config = self.config
        return linear.calibrate_noise(
            epsilon,
            config.delta,
            adjacency=read_adjacency(config),
            start_releases=config.trials * config.steps,
            num_rounds=num_rounds or config.rounds,
            start_share=config.start_share,
            accountant=Accountant(config.accountant),
        )

    def _calibrate_alone(self, epsilon: float, num_releases: int) -> float:
        """Returns the noise of releases that have the whole budget."""
        config = self.config
        return linear.calibrate_noise(
            epsilon,
            config.delta,
            adjacency=read_adjacency(config),
            start_releases=0,
            num_rounds=num_releases,
            start_share=config.start_share,
            accountant=Accountant(config.accountant),
        ).rounds

    def _build_population(
        self, name: str, dim: int, num_users: int, *, is_boost: bool = False
    ) -> _Population:
        config = self.config
        root = seeds.scope_root(self._root, name)
        rng = seeds.derive_generator(root, purpose=seeds.Purpose.MODEL_INIT)
        start_examples = config.start_examples
        examples = config.examples_per_user
        rounds = max(config.rounds, config.comparison_rounds)
        if is_boost:
            start_examples, rounds = config.boost_start_examples, 1
            examples = start_examples + config.head_examples + config.gradient_examples
        users = linear.GeneratedUsers(
            problem=linear.LinearProblem(
                num_users=num_users, dim=dim, rank=config.rank
            ),
            subsets=linear.Subsets(
                start=start_examples,
                head=config.head_examples,
                gradient=config.gradient_examples,
            ),
            examples_per_user=examples,
            num_rounds=rounds,
            users_per_block=config.users_per_block,
        )
        truth = linear.sample_orthonormal(rng, dim, config.rank)
        data = seeds.derive_generator(root, purpose=seeds.Purpose.CLIENT_DATA)
        block_seeds = linear.build_block_seeds(
            data, num_users // config.users_per_block
        )
        return _Population(
            users=users,
            blocks=users.build_blocks(truth, block_seeds),
            truth=truth,
            rng=rng,
            root=root,
        )

    def _build_rounds(self, dim: int) -> linear.RoundsConfig:
        config = self.config
        return linear.RoundsConfig(
            num_rounds=config.rounds,
            l2_clip=config.clip_scale * math.sqrt(dim * config.rank),
            learning_rate=config.learning_rate,
        )

    def _build_start(self, dim: int, trials: int, steps: int) -> linear.StartConfig:
        config = self.config
        return linear.StartConfig(
            trials=trials,
            steps=steps,
            l2_clip=config.start_clip_scale * math.sqrt(dim * config.rank),
            trial_distance=config.trial_distance,
        )

    def _run_start(
        self, population: _Population, noise_multipliers: Sequence[float]
    ) -> linear.Start:
        config, dim = self.config, population.users.problem.dim
        return linear.run_start(
            population.users,
            population.blocks,
            self._build_start(dim, config.trials, config.steps),
            noise_multipliers=noise_multipliers,
            rng=population.rng,
            noise_seed=population.derive_noise("start"),
        )

    def _run_boost(
        self, population: _Population, trials: int, noise: float, purpose: str
    ) -> linear.Start:
        config = self.config
        return linear.run_start(
            population.users,
            population.blocks,
            self._build_start(config.boost_dim, trials, config.boost_steps),
            noise_multipliers=[noise] * config.boost_group,
            rng=population.rng,
            noise_seed=population.derive_noise(purpose),
        )

    def _read(
        self,
        sweep: str,
        labels: Sequence[tuple[str, float, int]],
        population: _Population,
        rounds: linear.Trajectory,
        *,
        start: linear.Start | None,
        clip: float,
        last: int,
    ) -> Iterator[Run]:
        """Returns the runs of a stack's members, by labels (method, epsilon, repeat).

        The first members have the starts, in their order; others began without.
        """
        distances = population.measure(rounds.stacks)
        for index, (method, epsilon, repeat) in enumerate(labels):
            has_start = start is not None and index < len(start.selections)
            start_clipped, started = math.nan, True
            if start is not None and has_start:
                trials = start.trials.shape[1]
                own = slice(index * trials, (index + 1) * trials)
                start_clipped = float(start.trajectory.clipped[:, own].max())
                started = start.selections[index].index is not None
            ledger = rounds.ledgers[index]
            yield Run(
                sweep=sweep,
                method=method,
                dim=population.users.problem.dim,
                epsilon=epsilon,
                repeat=repeat,
                noise_multiplier=ledger.entries[-1].noise_multiplier,
                start_distance=float(distances[0, index]),
                started=started,
                distances=tuple(map(float, distances[:, index])),
                floor=float(linear.compute_floor(distances[1:, index], last=last)),
                clipped=float(rounds.clipped[:, index].max()),
                start_clipped=start_clipped,
                largest=float(rounds.largest[:, index].max()) / clip,
                ledger=None if math.isinf(epsilon) else ledger,
            )


def read_adjacency(config: LinearConfig) -> linear.Adjacency:
    """Returns the adjacency of a configuration."""
    return linear.Adjacency[config.adjacency.upper()]


def _get_start(noise: linear.Noise) -> float:
    assert noise.start is not None
    return noise.start
