"""Accuracy and epsilon under clients' own noise: figure 3, and equal epsilon.

T server steps are T rounds with clients for FedProx and T / 2 for Upcycled-FL. The
paper compares the two at a noise of its own for each; here also at equal epsilon, where
half the rounds take less noise, and against FedProx with T / 2 rounds, with and without
a server learning rate, which costs exactly what Upcycled-FL does.

Source of the claim: Yin et al. 2024, figure 3: higher accuracy at a smaller epsilon.
"""

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scripts.paired_difference import (
    Interval,
    Verdict,
    choose_least,
    compute_interval,
    judge,
)
from scripts.upcycled_study_config import Algorithm, Noise, Run, StudyConfig
from scripts.upcycled_study_curve import Curve
from scripts.upcycled_study_data import StudyData
from scripts.upcycled_study_training import build_perturbation
from simulation import cohort, seeds
from upcycled_fl import accounting

# Epsilons that differ by less are called equal: calibration rounds its noise up.
_SAME_EPSILON = 1e-4

Factors = Mapping[tuple[str, str, float], float]


class Role(enum.Enum):
    """What is trained for one data set, noise and mu, with T server steps."""

    UPCYCLED = "Upcycled-FL"
    PAPER = "FedProx, the paper's noise"
    STEPS = "FedProx, equal epsilon"
    ROUNDS = "FedProx, half the rounds"
    TUNED = "FedProx, half, server rate"


# What Upcycled-FL is compared with, and what both have as much of.
QUESTIONS = {
    Role.PAPER: "figure 3: equal server steps, each its own noise",
    Role.STEPS: "equal epsilon, equal server steps",
    Role.ROUNDS: "equal epsilon, equal client rounds",
    Role.TUNED: "equal epsilon, equal client rounds",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epsilons:
    """Epsilons of the clients, by one accountant.

    Attributes:
        mean: The mean over clients and seeds: no client's guarantee.
        least: The least of a client, in any seed.
        largest: The largest of a client, in any seed.
        standing: What the figures are to be called.
    """

    mean: float
    least: float
    largest: float
    standing: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivateRow:
    """Accuracy and epsilon of one role.

    Attributes:
        data: The data set.
        noise: Where clients add noise.
        mu: The strength of the proximal term.
        role: What was trained.
        rounds: Its rounds with clients.
        noise_level: sigma or alpha, the mean over seeds.
        server_factor: The server's learning rate.
        accuracy: Test accuracy of each seed, in [0, 1].
        epsilons: By accountant.
    """

    data: str
    noise: Noise
    mu: float
    role: Role
    rounds: int
    noise_level: float
    server_factor: float
    accuracy: tuple[float, ...]
    epsilons: Mapping[str, Epsilons]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivateComparison:
    """Upcycled-FL minus an opponent in test accuracy, over seeds.

    Attributes:
        data: The data set.
        noise: Where clients add noise.
        mu: The strength of the proximal term.
        opponent: The other side.
        difference: The interval.
        verdict: What it says of Upcycled-FL.
        epsilons: The largest of a client, as published: Upcycled-FL's, the opponent's.
    """

    data: str
    noise: Noise
    mu: float
    opponent: Role
    difference: Interval
    verdict: Verdict
    epsilons: tuple[float, float]

    @property
    def order(self) -> str:
        """How Upcycled-FL's epsilon compares with the opponent's."""
        ours, theirs = self.epsilons
        if math.isclose(ours, theirs, rel_tol=_SAME_EPSILON):
            return "equal"
        return "smaller" if ours < theirs else "larger"


def list_roles(config: StudyConfig) -> list[Role]:
    """Returns what is trained."""
    return list(Role) if config.equal_epsilon else [Role.UPCYCLED, Role.PAPER]


def build_run(
    config: StudyConfig,
    data: StudyData,
    noise: Noise,
    mu: float,
    role: Role,
    *,
    client_lr: float,
    seed: int,
    factor: float = 1.0,
) -> Run:
    """Returns one run.

    Args:
        config: The configuration.
        data: The data set.
        noise: Where clients add noise.
        mu: The strength of the proximal term.
        role: What is trained.
        client_lr: The learning rate of the clients.
        seed: The root seed.
        factor: The server's learning rate, of TUNED.

    Raises:
        ValueError: If FedProx cannot have Upcycled-FL's epsilon at any noise.
    """
    place = config.noises.index(noise.value)
    level, rounds = config.noise_levels[place], config.total_rounds // 2
    if role in (Role.PAPER, Role.STEPS):
        rounds = config.total_rounds
    if role is Role.PAPER:
        level = config.baseline_noise_levels[place]
    if role is Role.STEPS:
        level = compute_equal_level(config, data, noise, level, mu=mu, seed=seed)
    return config.build_run(
        data.name,
        Algorithm.UPCYCLED if role is Role.UPCYCLED else Algorithm.FEDPROX,
        mu=mu,
        client_lr=client_lr,
        seed=seed,
        rounds=rounds,
        server_factor=factor if role is Role.TUNED else 1.0,
        noise=noise,
        noise_level=level,
    )


@functools.cache
def compute_equal_level(
    config: StudyConfig,
    data: StudyData,
    noise: Noise,
    level: float,
    *,
    mu: float,
    seed: int,
) -> float:
    """Returns the noise of FedProx's T rounds that costs what T / 2 do at `level`.

    Equal is the largest epsilon of a client, as published, for the rounds that the seed
    has each client join.

    Raises:
        ValueError: If no noise does it.
    """
    sizes = _count_examples(data)
    rounds = config.total_rounds
    half = _count_releases(config, data, seed, rounds // 2)
    whole = _count_releases(config, data, seed, rounds)
    perturbation = build_perturbation(noise, level, mu=mu, model_clip=config.model_clip)
    assert perturbation is not None
    published = accounting.Accountant.AS_PUBLISHED
    delta = config.client_delta if noise is Noise.OUTPUT else None
    target = accounting.compute_privacy(
        perturbation,
        num_examples=sizes,
        num_releases=half,
        accountant=published,
        delta=delta,
    ).epsilon_max
    common: dict[str, Any] = {
        "epsilon": target,
        "num_examples": sizes,
        "num_releases": whole,
        "accountant": published,
    }
    if isinstance(perturbation, accounting.OutputPerturbation):
        return accounting.calibrate_output_perturbation(
            delta=config.client_delta, l2_clip=config.model_clip, **common
        ).local_stddev
    try:
        return accounting.calibrate_objective_perturbation(
            mu=mu, loss=perturbation.loss, **common
        ).noise_rate
    except ValueError as error:
        raise ValueError(
            "`noise_levels` of objective noise must be larger for FedProx to have the "
            f"same epsilon in {rounds} rounds with mu = {mu!r}, or equal_epsilon off: "
            f"{error}"
        ) from None


def check(config: StudyConfig, data: Mapping[str, StudyData]) -> None:
    """Raises ValueError for what no run could have, before any is trained."""
    for name, noise, mu in list_pairs(config):
        for seed in config.seeds:
            for role in list_roles(config):
                run = build_run(
                    config, data[name], noise, mu, role, client_lr=1.0, seed=seed
                )
                _compute_statement(
                    config, data[name], run, accounting.Accountant.AS_PUBLISHED
                )


def list_factor_runs(
    config: StudyConfig, data: Mapping[str, StudyData], rates: Mapping[str, float]
) -> list[Run]:
    """Returns FedProx with half the rounds at every server learning rate."""
    if not config.equal_epsilon:
        return []
    return [
        build_run(
            config,
            data[name],
            noise,
            mu,
            Role.TUNED,
            client_lr=rates[name],
            seed=config.selection_seed,
            factor=factor,
        )
        for name, noise, mu in list_pairs(config)
        for factor in config.server_factor_grid
    ]


def choose_factors(
    runs: Sequence[Run], curves: Mapping[str, Curve]
) -> dict[tuple[str, str, float], float]:
    """Returns the rates with the least training loss, for each (data, noise, mu).

    Raises:
        ValueError: If no loss is finite.
    """
    scores: dict[tuple[str, str, float], dict[float, float]] = {}
    for run in runs:
        assert run.noise is not None
        found = scores.setdefault((run.data, run.noise.value, run.mu), {})
        found[run.server_factor] = curves[run.key].get("train_loss")
    return {
        key: choose_least(found, f"`server_factor_grid` for {key}")
        for key, found in scores.items()
    }


def list_runs(
    config: StudyConfig,
    data: Mapping[str, StudyData],
    rates: Mapping[str, float],
    factors: Factors,
) -> dict[tuple[str, Noise, float, Role], list[Run]]:
    """Returns the runs that are reported, one a seed, by what they are."""
    return {
        (name, noise, mu, role): [
            build_run(
                config,
                data[name],
                noise,
                mu,
                role,
                client_lr=rates[name],
                seed=seed,
                factor=factors.get((name, noise.value, mu), 1.0),
            )
            for seed in config.seeds
        ]
        for name, noise, mu in list_pairs(config)
        for role in list_roles(config)
    }


def list_pairs(config: StudyConfig) -> list[tuple[str, Noise, float]]:
    """Returns the data sets, noises and mus."""
    noises = [Noise(name) for name in config.noises]
    return list(itertools.product(config.data, noises, config.mu))


def build_rows(
    config: StudyConfig,
    data: Mapping[str, StudyData],
    runs_by_role: Mapping[tuple[str, Noise, float, Role], Sequence[Run]],
    curves: Mapping[str, Curve],
) -> list[PrivateRow]:
    """Returns accuracy and epsilons of everything that is reported."""
    return [
        PrivateRow(
            data=name,
            noise=noise,
            mu=mu,
            role=role,
            rounds=runs[0].rounds,
            noise_level=float(np.mean([run.noise_level or 0.0 for run in runs])),
            server_factor=runs[0].server_factor,
            accuracy=tuple(curves[run.key].get("test_accuracy") for run in runs),
            epsilons=compute_epsilons(config, data[name], runs),
        )
        for (name, noise, mu, role), runs in runs_by_role.items()
    ]


def compute_epsilons(
    config: StudyConfig, data: StudyData, runs: Sequence[Run]
) -> dict[str, Epsilons]:
    """Returns the clients' epsilons over the runs of all seeds, by accountant.

    Clients pay for the rounds that they join, which the seed decides.
    """
    accountants = [accounting.Accountant.AS_PUBLISHED]
    if runs[0].noise is Noise.OUTPUT:
        accountants += [
            accounting.Accountant.REPLACE_ONE_AVERAGE,
            accounting.Accountant.PROVEN,
        ]
    found = {}
    for accountant in accountants:
        statements = [_compute_statement(config, data, run, accountant) for run in runs]
        found[accountant.value] = Epsilons(
            mean=float(np.mean([one.epsilon_mean for one in statements])),
            least=min(one.epsilon_min for one in statements),
            largest=max(one.epsilon_max for one in statements),
            standing=statements[0].standing or "proven",
        )
    return found


def compare(config: StudyConfig, rows: Sequence[PrivateRow]) -> list[PrivateComparison]:
    """Returns Upcycled-FL against each of the others, paired by seed."""
    published = accounting.Accountant.AS_PUBLISHED.value
    found = []
    for data, noise, mu in list_pairs(config):
        own = {
            row.role: row
            for row in rows
            if (row.data, row.noise, row.mu) == (data, noise, mu)
        }
        ours = own.pop(Role.UPCYCLED)
        for role, row in own.items():
            interval = compute_interval(
                [a - b for a, b in zip(ours.accuracy, row.accuracy, strict=True)]
            )
            found.append(
                PrivateComparison(
                    data=data,
                    noise=noise,
                    mu=mu,
                    opponent=role,
                    difference=interval,
                    verdict=judge(interval, larger_is_better=True),
                    epsilons=(
                        ours.epsilons[published].largest,
                        row.epsilons[published].largest,
                    ),
                )
            )
    return found


def _compute_statement(
    config: StudyConfig,
    data: StudyData,
    run: Run,
    accountant: accounting.Accountant,
) -> accounting.ClientPrivacyStatement:
    perturbation = build_perturbation(
        run.noise, run.noise_level, mu=run.mu, model_clip=config.model_clip
    )
    assert perturbation is not None
    return accounting.compute_privacy(
        perturbation,
        num_examples=_count_examples(data),
        num_releases=_count_releases(config, data, run.seed, run.rounds),
        accountant=accountant,
        delta=config.client_delta if run.noise is Noise.OUTPUT else None,
        conversion=accounting.choose_conversion(accountant),
    )


def _count_examples(data: StudyData) -> list[int]:
    return [len(data.train.load(one)[1]) for one in data.train.client_ids]


@functools.cache
def _count_releases(
    config: StudyConfig, data: StudyData, seed: int, rounds: int
) -> np.ndarray:
    """Returns how many of the rounds each client joins, int64[N]."""
    cohorts = cohort.FixedCohort(
        client_ids=data.train.client_ids,
        clients_per_round=config.clients_per_round,
        root=seeds.build_root_seed(seed),
    )
    return cohort.count_rounds_joined(cohorts, rounds)
