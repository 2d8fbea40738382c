"""Whether Upcycled-FL leads: learning rates chosen without it, then paired differences.

Source of the claim: Yin et al. 2024, section 5: Upcycled-FL outperforms FedProx on all
data sets with appropriate mu. It is tested here, not assumed. Choices are made for
FedProx, on the training loss alone, on a seed that is not reported.
"""

import dataclasses
import enum
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from scripts.paired_difference import (
    Interval,
    Verdict,
    choose_least,
    compute_interval,
    judge,
)
from scripts.upcycled_study_config import (
    Algorithm,
    StudyConfig,
    list_factor_runs,
    list_selection_runs,
)
from scripts.upcycled_study_curve import Curve

_CRITERION = "train_loss"


class Opponent(enum.Enum):
    """What Upcycled-FL is compared with."""

    FEDPROX = "FedProx"
    TUNED = "FedProx with a server learning rate"


class Budget(enum.Enum):
    """What both sides have as much of.

    CLIENT_ROUNDS: Rounds with clients, what training costs.
    SERVER_STEPS: Steps as the paper counts them: half of Upcycled-FL's are even.
    """

    CLIENT_ROUNDS = "equal client rounds"
    SERVER_STEPS = "equal server steps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Upcycled-FL minus its opponent, for one data set and mu, over seeds.

    Attributes:
        data: The data set.
        mu: The strength of the proximal term.
        client_lr: The learning rate of both sides' clients.
        opponent: What it is compared with.
        server_factor: The opponent's server learning rate.
        budget: What both have as much of.
        metric: The metric.
        rounds: Upcycled-FL's rounds with clients, and the opponent's.
        difference: The interval.
        verdict: What it says of Upcycled-FL.
    """

    data: str
    mu: float
    client_lr: float
    opponent: Opponent
    server_factor: float
    budget: Budget
    metric: str
    rounds: tuple[int, int]
    difference: Interval
    verdict: Verdict


def choose_client_rates(
    config: StudyConfig, curves: Mapping[str, Curve]
) -> dict[str, float]:
    """Returns the client learning rate of each data set.

    It is the given one, or that with the least final training loss of FedProx, averaged
    over mu, on the selection seed.

    Raises:
        ValueError: If no loss is finite.
    """
    if config.client_lr is not None:
        return dict.fromkeys(config.data, config.client_lr)
    scores: dict[str, dict[float, list[float]]] = {name: {} for name in config.data}
    for run in list_selection_runs(config):
        loss = curves[run.key].get(_CRITERION)
        scores[run.data].setdefault(run.client_lr, []).append(loss)
    return {
        data: choose_least(
            {rate: float(np.mean(losses)) for rate, losses in found.items()},
            f"`client_lr_grid` for the data {data}",
        )
        for data, found in scores.items()
    }


def choose_server_factors(
    config: StudyConfig, rates: Mapping[str, float], curves: Mapping[str, Curve]
) -> dict[tuple[str, float], float]:
    """Returns the server learning rate of FedProx for each (data, mu), likewise.

    Raises:
        ValueError: If no loss is finite.
    """
    scores: dict[tuple[str, float], dict[float, float]] = {}
    for run in list_factor_runs(config, rates):
        found = scores.setdefault((run.data, run.mu), {})
        found[run.server_factor] = curves[run.key].get(_CRITERION)
    return {
        pair: choose_least(found, f"`server_factor_grid` for data and mu {pair}")
        for pair, found in scores.items()
    }


def compare(
    config: StudyConfig,
    rates: Mapping[str, float],
    factors: Mapping[tuple[str, float], float],
    curves: Mapping[str, Curve],
) -> list[Comparison]:
    """Returns all comparisons: opponents, budgets and metrics for each (data, mu)."""
    found = []
    for opponent, budget, data, mu, metric in itertools.product(
        Opponent, Budget, config.data, config.mu, ("test_accuracy", "train_loss")
    ):
        factor = 1.0 if opponent is Opponent.FEDPROX else factors[data, mu]
        rounds = (config.total_rounds, config.total_rounds)
        if budget is Budget.SERVER_STEPS:
            rounds = (config.total_rounds // 2, config.total_rounds)

        differences = []
        for seed in config.seeds:
            common = {"mu": mu, "client_lr": rates[data], "seed": seed}
            ours = config.build_run(data, Algorithm.UPCYCLED, **common)
            theirs = config.build_run(
                data, Algorithm.FEDPROX, server_factor=factor, **common
            )
            pair = zip((ours, theirs), rounds, strict=True)
            left, right = (curves[one.key].get(metric, count) for one, count in pair)
            differences.append(left - right)
        interval = compute_interval(differences)
        found.append(
            Comparison(
                data=data,
                mu=mu,
                client_lr=rates[data],
                opponent=opponent,
                server_factor=factor,
                budget=budget,
                metric=metric,
                rounds=rounds,
                difference=interval,
                verdict=judge(interval, larger_is_better=metric == "test_accuracy"),
            )
        )
    return found


def count_verdicts(
    comparisons: Sequence[Comparison],
) -> dict[tuple[Opponent, Budget, str], dict[Verdict, int]]:
    """Returns how many pairs have each verdict, by opponent, budget and metric."""
    counts: dict[tuple[Opponent, Budget, str], dict[Verdict, int]] = {}
    for one in comparisons:
        key = (one.opponent, one.budget, one.metric)
        found = counts.setdefault(key, dict.fromkeys(Verdict, 0))
        found[one.verdict] += 1
    return counts
