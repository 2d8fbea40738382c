"""Accuracy and epsilon under clients' own noise: figure 3, and equal epsilon.

T server steps are T rounds with clients for FedProx and T / 2 for Upcycled-FL. The
paper compares the two at a noise of its own for each; here also at equal epsilon, where
half the rounds take less noise, and against FedProx with T / 2 rounds, with and without
a server learning rate, which costs exactly what Upcycled-FL does.

Source of the claim: Yin et al. 2024, figure 3: higher accuracy at a smaller epsilon.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scripts.upcycled_study_claims import (
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

Factors = Mapping[tuple[str, str, float], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained over the seeds.

    Attributes:
        title: Its name in outputs.
        algorithm: What is trained.
        rounds: Rounds with clients.
        noise_level: sigma or alpha.
        server_factor: The server's learning rate.
    """

    title: str
    algorithm: Algorithm
    rounds: int
    noise_level: float
    server_factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivateRow:
    """Accuracy and epsilon of a setting.

    Attributes:
        data: The data set.
        noise: Where clients add noise.
        mu: The strength of the proximal term.
        setting: What was trained.
        accuracy: Test accuracy of each seed, in [0, 1].
        epsilons: By accountant, the mean, least and largest of the clients' epsilons,
            the mean over seeds; and what the accountant's figures are to be called.
    """

    data: str
    noise: Noise
    mu: float
    setting: Setting
    accuracy: tuple[float, ...]
    epsilons: Mapping[str, tuple[float, float, float, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivateComparison:
    """Upcycled-FL minus an opponent in test accuracy, over seeds.

    Attributes:
        data: The data set.
        noise: Where clients add noise.
        mu: The strength of the proximal term.
        opponent: The other side.
        question: What is compared.
        difference: The interval.
        verdict: What it says of Upcycled-FL.
        saves: Whether Upcycled-FL's mean epsilon, as published, is the smaller.
    """

    data: str
    noise: Noise
    mu: float
    opponent: str
    question: str
    difference: Interval
    verdict: Verdict
    saves: bool


def list_settings(
    config: StudyConfig, noise: Noise, mu: float, factor: float
) -> dict[str, Setting]:
    """Returns what is trained for one data set, noise and mu, by role.

    Args:
        config: The configuration.
        noise: Where clients add noise.
        mu: The strength of the proximal term.
        factor: The chosen server learning rate.
    """
    place = config.noises.index(noise.value)
    level, paper = config.noise_levels[place], config.baseline_noise_levels[place]
    whole, half = config.total_rounds, config.total_rounds // 2
    fedprox = Algorithm.FEDPROX

    def build(
        title: str,
        algorithm: Algorithm,
        rounds: int,
        noise_level: float,
        server_factor: float = 1.0,
    ) -> Setting:
        return Setting(
            title=title,
            algorithm=algorithm,
            rounds=rounds,
            noise_level=noise_level,
            server_factor=server_factor,
        )

    settings = {
        "upcycled": build("Upcycled-FL", Algorithm.UPCYCLED, half, level),
        "paper": build("FedProx, the paper's noise", fedprox, whole, paper),
    }
    if not config.equal_epsilon:
        return settings
    equal = compute_equal_level(noise, level, mu=mu)
    return settings | {
        "steps": build("FedProx, equal epsilon", fedprox, whole, equal),
        "rounds": build("FedProx, half the rounds", fedprox, half, level),
        "tuned": build("FedProx, half, server rate", fedprox, half, level, factor),
    }


def compute_equal_level(noise: Noise, level: float, *, mu: float) -> float:
    """Returns FedProx's noise level at which twice the releases cost as much.

    Output noise: A = M tau^2 / (2 sigma^2 |D|^2) is the same at sqrt 2 sigma. Objective
    noise: (2 alpha u_1 mu + 2.8 u_2) M / (|D| mu) is the same where the bracket halves.

    Raises:
        ValueError: If what does not depend on alpha alone costs too much.
    """
    if noise is Noise.OUTPUT:
        return level * math.sqrt(2)
    lipschitz, curvature = math.sqrt(2), 0.5
    bracket = 2 * level * lipschitz * mu + 2.8 * curvature
    found = (bracket / 2 - 2.8 * curvature) / (2 * lipschitz * mu)
    if found <= 0:
        raise ValueError(
            "`noise_levels` of objective noise must be larger for twice the releases "
            f"to be possible at the same epsilon with mu = {mu!r}. Found {level!r}."
        )
    return found


def list_factor_runs(config: StudyConfig, rates: Mapping[str, float]) -> list[Run]:
    """Returns FedProx with half the rounds at every server learning rate."""
    runs: list[Run] = []
    for data, noise, mu in list_pairs(config) if config.equal_epsilon else []:
        for factor in config.server_factor_grid:
            setting = list_settings(config, noise, mu, factor)["tuned"]
            runs.append(
                build_run(
                    config, data, noise, mu, setting, rates, config.selection_seed
                )
            )
    return runs


def choose_factors(
    config: StudyConfig, rates: Mapping[str, float], curves: Mapping[str, Curve]
) -> dict[tuple[str, str, float], float]:
    """Returns the rates with the least training loss on the selection seed.

    Raises:
        ValueError: If no loss is finite.
    """
    scores: dict[tuple[str, str, float], dict[float, float]] = {}
    for run in list_factor_runs(config, rates):
        assert run.noise is not None
        found = scores.setdefault((run.data, run.noise.value, run.mu), {})
        found[run.server_factor] = curves[run.key].get("train_loss")
    return {
        key: choose_least(found, f"`server_factor_grid` for {key}")
        for key, found in scores.items()
    }


def list_runs(
    config: StudyConfig, rates: Mapping[str, float], factors: Factors
) -> list[Run]:
    """Returns all runs that are reported."""
    runs: dict[str, Run] = {}
    for data, noise, mu in list_pairs(config):
        factor = factors.get((data, noise.value, mu), 1.0)
        for setting in list_settings(config, noise, mu, factor).values():
            for seed in config.seeds:
                run = build_run(config, data, noise, mu, setting, rates, seed)
                runs[run.key] = run
    return list(runs.values())


def build_run(
    config: StudyConfig,
    data: str,
    noise: Noise,
    mu: float,
    setting: Setting,
    rates: Mapping[str, float],
    seed: int,
) -> Run:
    """Returns one run of a setting."""
    return config.build_run(
        data,
        setting.algorithm,
        mu=mu,
        client_lr=rates[data],
        seed=seed,
        rounds=setting.rounds,
        server_factor=setting.server_factor,
        noise=noise,
        noise_level=setting.noise_level,
    )


def list_pairs(config: StudyConfig) -> list[tuple[str, Noise, float]]:
    """Returns the data sets, noises and mus."""
    noises = [Noise(name) for name in config.noises]
    return list(itertools.product(config.data, noises, config.mu))


def build_rows(
    config: StudyConfig,
    data: Mapping[str, StudyData],
    rates: Mapping[str, float],
    factors: Factors,
    curves: Mapping[str, Curve],
) -> list[PrivateRow]:
    """Returns accuracy and epsilons of every setting."""
    rows = []
    for name, noise, mu in list_pairs(config):
        factor = factors.get((name, noise.value, mu), 1.0)
        for setting in list_settings(config, noise, mu, factor).values():
            accuracy = tuple(
                curves[
                    build_run(config, name, noise, mu, setting, rates, seed).key
                ].get("test_accuracy")
                for seed in config.seeds
            )
            rows.append(
                PrivateRow(
                    data=name,
                    noise=noise,
                    mu=mu,
                    setting=setting,
                    accuracy=accuracy,
                    epsilons=compute_epsilons(config, data[name], noise, mu, setting),
                )
            )
    return rows


def compute_epsilons(
    config: StudyConfig, data: StudyData, noise: Noise, mu: float, setting: Setting
) -> dict[str, tuple[float, float, float, str]]:
    """Returns mean, least and largest epsilon by accountant, and their standing.

    Clients pay for the rounds that they join, which the seed decides; figures are means
    over the seeds.
    """
    perturbation = build_perturbation(
        noise, setting.noise_level, mu=mu, model_clip=config.model_clip
    )
    assert perturbation is not None
    sizes = [len(data.train.load(one)[1]) for one in data.train.client_ids]
    accountants = [accounting.Accountant.AS_PUBLISHED]
    if noise is Noise.OUTPUT:
        accountants += [
            accounting.Accountant.REPLACE_ONE_AVERAGE,
            accounting.Accountant.PROVEN,
        ]
    found = {}
    for accountant in accountants:
        statements = [
            accounting.compute_privacy(
                perturbation,
                num_examples=sizes,
                num_releases=_count_releases(config, data, seed, setting.rounds),
                accountant=accountant,
                delta=config.client_delta if noise is Noise.OUTPUT else None,
            )
            for seed in config.seeds
        ]
        found[accountant.value] = (
            float(np.mean([one.epsilon_mean for one in statements])),
            float(np.mean([one.epsilon_min for one in statements])),
            float(np.mean([one.epsilon_max for one in statements])),
            statements[0].standing or "proven",
        )
    return found


def compare(config: StudyConfig, rows: Sequence[PrivateRow]) -> list[PrivateComparison]:
    """Returns Upcycled-FL against each of the others, paired by seed."""
    questions = {
        "FedProx, the paper's noise": "figure 3: equal server steps, its noises",
        "FedProx, equal epsilon": "equal epsilon, equal server steps",
        "FedProx, half the rounds": "equal epsilon, equal client rounds",
        "FedProx, half, server rate": "equal epsilon, equal client rounds",
    }
    found = []
    for data, noise, mu in list_pairs(config):
        own = {
            row.setting.title: row
            for row in rows
            if (row.data, row.noise, row.mu) == (data, noise, mu)
        }
        ours = own.pop("Upcycled-FL")
        for title, row in own.items():
            interval = compute_interval(
                [a - b for a, b in zip(ours.accuracy, row.accuracy, strict=True)]
            )
            published = accounting.Accountant.AS_PUBLISHED.value
            found.append(
                PrivateComparison(
                    data=data,
                    noise=noise,
                    mu=mu,
                    opponent=title,
                    question=questions[title],
                    difference=interval,
                    verdict=judge(interval, larger_is_better=True),
                    saves=ours.epsilons[published][0] < row.epsilons[published][0],
                )
            )
    return found


def to_json(row: PrivateRow) -> dict[str, Any]:
    """Returns a row as JSON values."""
    return {
        "data": row.data,
        "noise": row.noise.value,
        "mu": row.mu,
        "title": row.setting.title,
        "rounds": row.setting.rounds,
        "noise_level": row.setting.noise_level,
        "server_factor": row.setting.server_factor,
        "test_accuracy": list(row.accuracy),
        "epsilons": {
            name: {"mean": mean, "min": low, "max": high, "standing": standing}
            for name, (mean, low, high, standing) in row.epsilons.items()
        },
    }


def _count_releases(
    config: StudyConfig, data: StudyData, seed: int, rounds: int
) -> np.ndarray:
    """Returns how many of the rounds each client joins, int64[N]."""
    cohorts = cohort.FixedCohort(
        client_ids=data.train.client_ids,
        clients_per_round=config.clients_per_round,
        root=seeds.build_root_seed(seed),
    )
    counts = dict.fromkeys(data.train.client_ids, 0)
    for number in range(rounds):
        for client_id in cohorts.select(number):
            counts[client_id] += 1
    return np.array(list(counts.values()), np.int64)
