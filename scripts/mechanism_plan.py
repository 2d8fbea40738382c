"""From a configuration to a mechanism: calibrated, with its factory and statements."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_federated as tff
from scipy import stats

from distributed_dp import accounting
from distributed_dp.adaptive_clip import AdaptiveClip, build_adaptive_clip
from distributed_dp.central_gaussian_factory import CentralGaussianFactory
from distributed_dp.ddgauss_factory import DDGaussFactory
from distributed_dp.distributed_factory import DistributedFactory
from distributed_dp.no_privacy_factory import NoPrivacyFactory
from distributed_dp.rotation import RotationKind, build_rotation
from distributed_dp.skellam_factory import DistributedSkellamFactory
from distributed_dp.update_layout import NoiseSeeds
from scripts.training_config import TrainingConfig
from simulation import ledger, seeds, table

# The delta at which every epsilon is also given: 1 / N is weak.
REFERENCE_DELTA = 1e-5
# What changes nothing that is released: the same noise then gives the same release.
_WITHOUT_EFFECT = frozenset(
    {
        "compare_central",
        "eval_every",
        "eval_examples",
        "checkpoint_every",
        "evaluate_test",
        "measure_updates",
    }
)
SEEDED_NOTE = (
    "this run has a root seed, which stands in config.json: no epsilon holds against "
    "those who know or guess it, or see another run with it on other data; rounds lost "
    "in a crash count once, as the same machine repeats them bit for bit"
)
COMPARED_NOTE = (
    "whoever sees both models of this run, which were trained on the same cohorts: "
    "each epsilon is that of its own model alone"
)
_KEPT_STATE_NOTE = (
    "what clients keep between rounds: who joins in a client's place keeps, and sends "
    "later, something else for it, which the published bound leaves out"
)
# How unlikely an event must be to leave it out of the server's view before the run.
_RARE = 1e-9
_FLOAT_BITS = 32
_DISTRIBUTED = (accounting.DDGaussParameters, accounting.SkellamParameters)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismPlan:
    """One mechanism of a run.

    Attributes:
        name: Its name in files: "ddgauss", "skellam", "gaussian" or "none".
        noise_root: The root of its noise under this configuration.
        title: Its name for people.
        parameters: Its parameters; None for no privacy.
        scheme: Who is sampled.
        bounds: The cohort sizes that shares are scaled for.
        epsilon: The budget; inf for no privacy.
        delta: The delta of the budget.
        standing: Whether the bound is proven or as published.
        bound: The bound of Poisson amplification, or None for the default.
        accountant: The accountant.
        adaptive_clip: Adaptive clipping, or None.
        factory: The aggregation factory, for values with carried seeds.
        bits_per_client: Bits that a client sends in a round.
        not_covered: What epsilon does not cover, beyond what the accounting says.
    """

    name: str
    noise_root: seeds.RootSeed = dataclasses.field(repr=False)
    title: str
    parameters: accounting.Parameters | None
    scheme: accounting.CohortScheme
    bounds: accounting.CohortBounds
    epsilon: float
    delta: float
    standing: accounting.Accounting
    bound: accounting.AmplificationBound | None
    accountant: accounting.Accountant
    adaptive_clip: AdaptiveClip | None
    factory: tff.aggregators.UnweightedAggregationFactory
    bits_per_client: int
    not_covered: tuple[str, ...]

    @property
    def is_distributed(self) -> bool:
        """Whether clients add the noise."""
        return isinstance(self.parameters, _DISTRIBUTED)

    @property
    def epsilon_name(self) -> str:
        """What people are shown beside an epsilon of this plan."""
        published = self.standing is accounting.Accounting.AS_PUBLISHED
        return "epsilon (as published)" if published else "epsilon"

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
            accounting=self.standing,
            bound=self.bound,
            **_read_quantile(self.adaptive_clip),
            accountant=self.accountant,
        )
        return self._add_notes(statement)

    def compute_epsilon(self, num_rounds: int) -> float:
        """Returns the analyst's epsilon of a number of rounds."""
        if num_rounds == 0:
            return 0.0
        statement = _compute_statement(self, num_rounds)
        return math.inf if statement is None else statement.epsilon

    def compute_server_statement(
        self, state: ledger.LedgerState, *, dropout_rate: float
    ) -> accounting.PrivacyStatement | None:
        """Returns the server's view of what happened.

        None where the server sees the sum without noise, or nothing was released.
        """
        rounds = state.most_rounds_joined
        if not isinstance(self.parameters, _DISTRIBUTED) or rounds == 0:
            return None
        share, assumption = self._find_least_share(state, dropout_rate)
        statement = accounting.compute_server_privacy(
            self.parameters,
            num_rounds=rounds,
            num_shares=share * self.scheme.clients_per_round,
            delta=self.delta,
            num_clients=self.scheme.num_clients,
            max_shares=self.bounds.high,
            **_read_quantile(self.adaptive_clip),
        )
        if assumption is not None:
            statement = dataclasses.replace(
                statement, assumptions=(*statement.assumptions, assumption)
            )
        return self._add_notes(statement)

    def describe_columns(self, num_rounds: int) -> Mapping[str, table.Scalar]:
        """Returns the columns of metrics.csv that an epsilon rests on."""
        statement = _compute_statement(self, num_rounds)
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
            # An adaptive clip takes it along: see l2_clip of the same row.
            "central_stddev": None
            if self.adaptive_clip
            else self.parameters.central_stddev,
        }

    def _find_least_share(
        self, state: ledger.LedgerState, dropout_rate: float
    ) -> tuple[float, str | None]:
        """Returns the least part of the central variance that survivors added.

        From what happened where that was recorded; else a part that is undercut with
        negligible probability, with the assumption that says so.
        """
        if not isinstance(self.factory, DistributedFactory):
            raise TypeError("Only a distributed mechanism has shares.")
        compute_part = self.factory.compute_variance_fraction
        reported = state.survivor_counts[state.survivor_counts > 0]
        recorded = np.any(state.cohort_sizes >= 0) and not state.rounds_lost
        if recorded and len(reported):
            joined = state.cohort_sizes[state.survivor_counts > 0]
            pairs = zip(joined, reported, strict=True)
            return min(compute_part(int(k), int(n)) for k, n in pairs), None
        low, high = self.bounds.low, self.bounds.high
        sizes = np.arange(low, high + 1)
        survivors = sizes
        # At a rate of 0, SciPy 1.9 answers 0 instead of all.
        if dropout_rate > 0:
            survivors = np.maximum(stats.binom.ppf(_RARE, sizes, 1 - dropout_rate), 1)
        pairs = zip(sizes, survivors, strict=True)
        return min(compute_part(int(k), int(n)) for k, n in pairs), (
            f"no cohort was smaller than {low}, and in none did more clients drop out "
            f"than happens with probability {_RARE:g} in a round"
        )

    def _add_notes(
        self, statement: accounting.PrivacyStatement
    ) -> accounting.PrivacyStatement:
        return dataclasses.replace(
            statement, not_covered=(*statement.not_covered, *self.not_covered)
        )


def _check_amplification(config: TrainingConfig, num_clients: int) -> None:
    """Raises ValueError where amplification is not proven if clients keep state.

    Whom a fixed-size cohort takes in a client's place depends on that client's coin,
    and so do what those keep and send later: docs/privacy.md.
    """
    scheme = config.build_scheme(num_clients)
    if (
        scheme.sampling is accounting.Sampling.FIXED
        and scheme.sampling_rate < 1
        and config.accounting_kind is accounting.Accounting.PROVEN
    ):
        raise ValueError(
            "`sampling` must be poisson, or all clients must join every round, where "
            "clients keep something between rounds (as their heads, unless "
            "--head_state=refit): that fixed-size cohorts amplify is not proven there. "
            f"Found {config.sampling!r} with {scheme.clients_per_round} of "
            f"{num_clients} clients."
        )


# A round asks for its epsilon three times, and the PLD accountant takes its time.
@functools.lru_cache(maxsize=8)
def _compute_statement(
    plan: MechanismPlan, num_rounds: int
) -> accounting.PrivacyStatement | None:
    return plan.compute_statement(num_rounds)


def build_plans(
    config: TrainingConfig,
    *,
    num_clients: int,
    dim: int,
    root: seeds.RootSeed,
    identity: Mapping[str, Any] | None = None,
    caveats: Sequence[str] = (),
    clients_keep_state: bool = False,
) -> list[MechanismPlan]:
    """Returns the mechanism of a run, and the central Gaussian to compare it with.

    Args:
        config: The configuration.
        num_clients: N.
        dim: The number of the model's parameters.
        root: The root of the streams.
        identity: What tells the task's data from others, as JSON values: other data
            draw other noise.
        caveats: What the data keep the statements from covering.
        clients_keep_state: Whether clients keep something between rounds.

    Raises:
        ValueError: If no noise reaches the target, naming the knob to turn; or if
            nothing is proven for what is asked.
    """
    if clients_keep_state and config.mechanism_kind is not None:
        _check_amplification(config, num_clients)
    kinds = [config.mechanism_kind]
    if config.compare_central and kinds[0] in _FACTORIES:
        kinds.append(accounting.Mechanism.GAUSSIAN)
    notes = [SEEDED_NOTE] if root.reproducible else []
    if len(kinds) > 1:
        notes.append(COMPARED_NOTE)
    notes += caveats
    published = config.accounting_kind is accounting.Accounting.AS_PUBLISHED
    if clients_keep_state and published:
        notes.append(_KEPT_STATE_NOTE)
    plans = []
    for kind in kinds:
        name = "none" if kind is None else kind.value
        plan = _build_plan(
            config,
            kind,
            num_clients=num_clients,
            dim=dim,
            noise_root=_scope_noise(config, root, name, identity or {}),
        )
        plans.append(dataclasses.replace(plan, not_covered=tuple(notes)))
    return plans


def _build_plan(
    config: TrainingConfig,
    kind: accounting.Mechanism | None,
    *,
    num_clients: int,
    dim: int,
    noise_root: seeds.RootSeed,
) -> MechanismPlan:
    scheme = config.build_scheme(num_clients)
    bounds = accounting.compute_cohort_bounds(scheme)
    is_distributed = kind in _FACTORIES
    adaptive_clip = None
    if config.adaptive_clip and is_distributed:
        adaptive_clip = build_adaptive_clip(
            clients_per_round=scheme.clients_per_round,
            max_clients=bounds.high,
            noise_multiplier=config.quantile_noise_multiplier,
            target_quantile=config.target_quantile,
            learning_rate=config.clip_lr,
        )
    rotation = RotationKind(config.rotation)
    padded_dim = build_rotation(rotation, dim).padded_dim if is_distributed else dim
    delta = config.resolve_delta(num_clients)
    accountant = (
        accounting.Accountant.RDP if is_distributed else config.central_accountant_kind
    )
    parameters = None
    if kind is not None:
        parameters = accounting.calibrate(
            kind,
            scheme,
            epsilon=config.epsilon,
            delta=delta,
            num_rounds=config.total_rounds,
            l2_clip=config.clip,
            bits=config.bits,
            padded_dim=padded_dim,
            beta=config.beta,
            num_stddevs=config.num_stddevs,
            accounting=config.accounting_kind,
            bound=config.bound_kind,
            accountant=accountant,
            **_read_quantile(adaptive_clip),
        )
    return MechanismPlan(
        name="none" if kind is None else kind.value,
        noise_root=noise_root,
        title=_TITLES[kind].format(bits=config.bits),
        parameters=parameters,
        scheme=scheme,
        bounds=bounds,
        epsilon=math.inf if kind is None else config.epsilon,
        delta=delta,
        standing=config.accounting_kind,
        bound=config.bound_kind,
        accountant=accountant,
        adaptive_clip=adaptive_clip,
        factory=_build_factory(
            parameters,
            scheme,
            rotation,
            adaptive_clip,
            config.keeps_diagnostics,
            noise_root,
        ),
        bits_per_client=_count_bits(config, is_distributed, padded_dim, adaptive_clip),
        not_covered=(),
    )


_FACTORIES = {
    accounting.Mechanism.DDGAUSS: DDGaussFactory,
    accounting.Mechanism.SKELLAM: DistributedSkellamFactory,
}
_TITLES = {
    accounting.Mechanism.DDGAUSS: "distributed discrete Gaussian, {bits} bits",
    accounting.Mechanism.SKELLAM: "distributed Skellam, {bits} bits",
    accounting.Mechanism.GAUSSIAN: "central Gaussian",
    None: "no privacy",
}


def _build_factory(
    parameters: accounting.Parameters | None,
    scheme: accounting.CohortScheme,
    rotation: RotationKind,
    adaptive_clip: AdaptiveClip | None,
    diagnostics: bool,
    root: seeds.RootSeed,
) -> tff.aggregators.UnweightedAggregationFactory:
    server_seed = _derive_pair(root, seeds.Purpose.SERVER_NOISE)
    if parameters is None:
        return NoPrivacyFactory(
            scheme, noise_seeds=NoiseSeeds.CARRIED, diagnostics=diagnostics
        )
    if isinstance(parameters, accounting.GaussianParameters):
        return CentralGaussianFactory(
            parameters,
            scheme,
            noise_seeds=NoiseSeeds.CARRIED,
            server_noise_seed=server_seed,
            diagnostics=diagnostics,
        )
    return _FACTORIES[parameters.mechanism](
        parameters,
        scheme,
        rotation=rotation,
        noise_seeds=NoiseSeeds.CARRIED,
        rotation_seed=_derive_pair(root, seeds.Purpose.ROTATION),
        server_noise_seed=server_seed,
        adaptive_clip=adaptive_clip,
        diagnostics=diagnostics,
    )


def _scope_noise(
    config: TrainingConfig,
    root: seeds.RootSeed,
    name: str,
    identity: Mapping[str, Any],
) -> seeds.RootSeed:
    """Returns the root of a mechanism's noise under this configuration, on the data."""
    settings = {
        key: value
        for key, value in config.to_dict().items()
        if key not in _WITHOUT_EFFECT
    }
    # On a cluster the results are those of this machine, bit for bit.
    if settings["engine"] == "ray":
        settings["engine"] = "local"
    scope = json.dumps([name, settings, identity], sort_keys=True, default=str)
    return seeds.scope_root(root, scope)


def _derive_pair(
    root: seeds.RootSeed, purpose: seeds.Purpose
) -> tuple[int, int] | None:
    """Returns a seed for the factory, None for the operating system's entropy."""
    if not root.reproducible:
        return None
    first, second = seeds.derive_seed(root, purpose=purpose).tolist()
    return first, second


def _read_quantile(adaptive_clip: AdaptiveClip | None) -> dict[str, Any]:
    if adaptive_clip is None:
        return {}
    return {
        "quantile_noise_multiplier": adaptive_clip.noise_multiplier,
        "quantile_contribution": adaptive_clip.contribution,
    }


def _count_bits(
    config: TrainingConfig,
    is_distributed: bool,
    padded_dim: int,
    adaptive_clip: AdaptiveClip | None,
) -> int:
    """Returns the bits that a client sends in a round; floats have 32."""
    if not is_distributed:
        return _FLOAT_BITS * padded_dim
    return config.bits * (padded_dim + (adaptive_clip is not None))
