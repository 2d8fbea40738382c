"""From a configuration to a mechanism: calibrated, with its factory and statements."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow_federated as tff
from scipy import stats

from distributed_dp import accounting, rotation
from distributed_dp.central_gaussian_factory import CentralGaussianFactory
from distributed_dp.ddgauss_factory import DDGaussFactory
from distributed_dp.no_privacy_factory import NoPrivacyFactory
from distributed_dp.noise_seeds import NoiseSeeds
from distributed_dp.skellam_factory import DistributedSkellamFactory
from scripts.training_config import TrainingConfig
from simulation import ledger, seeds, table

# The delta at which every epsilon is also given: 1 / N is weak.
REFERENCE_DELTA = 1e-5
SEEDED_NOTE = "this run has a root seed: whoever knows it can remove the noise"
# How unlikely an event must be to leave it out of the server's view before the run.
_RARE = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismPlan:
    """One mechanism of a run.

    Attributes:
        name: Its name in files: "ddgauss", "skellam", "gaussian" or "none".
        title: Its name for people.
        parameters: Its parameters; None for no privacy.
        scheme: Who is sampled.
        bounds: The cohort sizes that shares are scaled for.
        epsilon: The budget; inf for no privacy.
        delta: The delta of the budget.
        accounting: The standing of the bound.
        bound: The bound of Poisson amplification, or None for the default.
        accountant: The accountant.
        quantile_noise_multiplier: Of adaptive clipping, or None.
        factory: The aggregation factory, for values with carried seeds.
        bits_per_client: Bits that a client sends in a round.
        reproducible: Whether the run has a root seed.
    """

    name: str
    title: str
    parameters: accounting.Parameters | None
    scheme: accounting.CohortScheme
    bounds: accounting.CohortBounds
    epsilon: float
    delta: float
    accounting: accounting.Accounting
    bound: accounting.AmplificationBound | None
    accountant: accounting.Accountant
    quantile_noise_multiplier: float | None
    factory: tff.aggregators.UnweightedAggregationFactory
    bits_per_client: int
    reproducible: bool

    @property
    def is_distributed(self) -> bool:
        """Whether clients add the noise."""
        return isinstance(self.parameters, accounting.DistributedParameters)

    def compute_statement(
        self, num_rounds: int, *, delta: float | None = None
    ) -> accounting.PrivacyStatement | None:
        """Returns the analyst's view of a number of rounds, None without privacy."""
        if self.parameters is None:
            return None
        statement = accounting.compute_privacy(
            self.parameters,
            self.scheme,
            num_rounds=num_rounds,
            delta=self.delta if delta is None else delta,
            accounting=self.accounting,
            bound=self.bound,
            quantile_noise_multiplier=self.quantile_noise_multiplier,
            accountant=self.accountant,
        )
        return self._note_seed(statement)

    def compute_epsilon(self, num_rounds: int) -> float:
        """Returns the analyst's epsilon of a number of rounds."""
        if num_rounds == 0:
            return 0.0
        statement = self.compute_statement(num_rounds)
        return math.inf if statement is None else statement.epsilon

    def compute_server_statement(
        self, state: ledger.LedgerState, *, dropout_rate: float
    ) -> accounting.PrivacyStatement | None:
        """Returns the server's view of what happened.

        None where the server sees the sum without noise, or nothing was released.
        """
        rounds = state.most_rounds_joined
        if not self.is_distributed or rounds == 0:
            return None
        share, assumption = self._find_least_share(state, dropout_rate)
        statement = accounting.compute_server_privacy(
            self.parameters,
            num_rounds=rounds,
            num_shares=share * self.scheme.clients_per_round,
            delta=self.delta,
            num_clients=self.scheme.num_clients,
            max_shares=self.bounds.high,
            quantile_noise_multiplier=self.quantile_noise_multiplier,
        )
        if assumption is not None:
            statement = dataclasses.replace(
                statement, assumptions=(*statement.assumptions, assumption)
            )
        return self._note_seed(statement)

    def describe_columns(self, num_rounds: int) -> Mapping[str, table.Scalar]:
        """Returns the columns of metrics.csv that an epsilon rests on."""
        statement = _compute_columns_statement(self, num_rounds)
        if statement is None or self.parameters is None:
            return {"mechanism": self.name}
        return {
            "mechanism": self.name,
            "delta": statement.delta,
            "order": statement.order,
            "adjacency": statement.adjacency,
            "sampler": self.scheme.sampling.value,
            "sampling_rate": statement.sampling_rate,
            "bound": statement.bound,
            "accountant": statement.accountant,
            "as_published": statement.as_published,
            "noise_multiplier": self.parameters.noise_multiplier,
            "central_stddev": self.parameters.central_stddev,
        }

    def _find_least_share(
        self, state: ledger.LedgerState, dropout_rate: float
    ) -> tuple[float, str | None]:
        """Returns the least part of the central variance that survivors added.

        From what happened where that was recorded; else a part that is undercut with
        negligible probability, with the assumption that says so.
        """
        low, high = self.bounds.low, self.bounds.high
        reported = state.survivor_counts[state.survivor_counts > 0]
        recorded = np.any(state.cohort_sizes >= 0) and not state.rounds_lost
        if recorded and len(reported):
            joined = state.cohort_sizes[state.survivor_counts > 0]
            return float(np.min(reported / np.clip(joined, low, high))), None
        sizes = np.arange(low, high + 1)
        survivors = np.maximum(stats.binom.ppf(_RARE, sizes, 1 - dropout_rate), 1)
        return float(np.min(survivors / sizes)), (
            f"no cohort was smaller than {low}, and in none did more clients drop out "
            f"than happens with probability {_RARE:g} in a round"
        )

    def _note_seed(
        self, statement: accounting.PrivacyStatement
    ) -> accounting.PrivacyStatement:
        if not self.reproducible:
            return statement
        return dataclasses.replace(
            statement, not_covered=(*statement.not_covered, SEEDED_NOTE)
        )


@functools.lru_cache(maxsize=4)
def _compute_columns_statement(
    plan: MechanismPlan, num_rounds: int
) -> accounting.PrivacyStatement | None:
    return plan.compute_statement(num_rounds)


def build_plans(
    config: TrainingConfig, *, num_clients: int, dim: int, root: seeds.RootSeed
) -> list[MechanismPlan]:
    """Returns the mechanism of a run, and the central Gaussian to compare it with.

    Args:
        config: The configuration.
        num_clients: N.
        dim: The number of the model's parameters.
        root: The root of the streams.

    Raises:
        ValueError: If no noise reaches the target, naming the knob to turn.
    """
    kind = config.mechanism_kind
    plans = [_build_plan(config, kind, num_clients=num_clients, dim=dim, root=root)]
    if config.compare_central and plans[0].is_distributed:
        central = accounting.Mechanism.GAUSSIAN
        plans.append(
            _build_plan(config, central, num_clients=num_clients, dim=dim, root=root)
        )
    return plans
