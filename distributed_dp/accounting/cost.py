"""The cost of a run in a resolved mode: the computation below every statement."""

import dataclasses
import math

import numpy as np

from distributed_dp.accounting import amplification, conversion, validation
from distributed_dp.accounting.cohort import (
    CohortBounds,
    CohortScheme,
    compute_cohort_bounds,
)
from distributed_dp.accounting.conversion import INTEGER_ORDERS, REAL_ORDERS
from distributed_dp.accounting.mode import Amplification, Mode
from distributed_dp.accounting.parameters import (
    Accountant,
    GaussianParameters,
    Parameters,
    Sampling,
    SkellamParameters,
)
from distributed_dp.accounting.pld import compute_epsilon_pld
from distributed_dp.accounting.rdp import FloatArray
from distributed_dp.accounting.release import (
    QuantileRelease,
    Release,
    build_release,
    compute_joint_multiplier,
)
from distributed_dp.accounting.sampler import (
    Draws,
    compute_least_sampler_charge,
    compute_sampler_charge,
)

# Skellam shares are scaled for cohorts down to this fraction of the largest
# (`distributed_dp.noise`); smaller ones are completed by the server.
SKELLAM_COHORT_RATIO = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyCost:
    """An epsilon with what was charged to delta to reach it.

    Attributes:
      epsilon: inf where nothing can be claimed.
      order: the Renyi order that gave it, if any.
      sampler_charge: the part of delta spent on the inexact noise sampler.
      overflow_charge: the part of delta spent on cohorts above the largest size.
      remaining_delta: what the conversion had; if it is not positive, epsilon is inf.
      least_charge: what would be charged however much noise there is.
    """

    epsilon: float
    order: float | None
    sampler_charge: float
    overflow_charge: float
    remaining_delta: float
    least_charge: float


def compute_cost(
    parameters: Parameters,
    scheme: CohortScheme,
    *,
    mode: Mode,
    num_rounds: int,
    delta: float,
    quantile: QuantileRelease | None,
) -> PrivacyCost:
    """Returns the analyst's cost; epsilon is inf where nothing can be claimed."""
    validation.check_integer("num_rounds", num_rounds, low=1)
    validation.check_delta(delta)
    if mode.accountant is not Accountant.RDP:
        return _compute_gaussian_cost(
            parameters,
            scheme,
            mode=mode,
            num_rounds=num_rounds,
            delta=delta,
            quantile=quantile,
        )
    bounds = compute_cohort_bounds(scheme)
    release = build_release(
        parameters,
        num_shares=bounds.high,
        local_stddev=parameters.central_stddev / math.sqrt(bounds.high),
        central_stddev=parameters.central_stddev,
        sensitivity_factor=mode.sensitivity_factor,
        quantile=quantile,
    )
    # Above `high` only distributed noise changes its law.
    distributed = release.num_coordinates > 0
    overflow = num_rounds * bounds.overflow_probability if distributed else 0.0
    # Unsampled curves hold at every real order, sampled ones at integers.
    curves = [(REAL_ORDERS, num_rounds * release.base_curve(REAL_ORDERS))]
    if scheme.sampling_rate < 1:
        sampled = compute_sampled_rdp(release, scheme.sampling_rate, mode.amplification)
        curves.append((INTEGER_ORDERS, num_rounds * sampled))
    return convert(
        curves,
        delta=delta,
        release=release,
        draws=_count_draws(
            parameters, scheme, bounds, mode=mode, num_rounds=num_rounds
        ),
        overflow_charge=overflow,
    )


def compute_sampled_rdp(
    release: Release, sampling_rate: float, kind: Amplification
) -> FloatArray:
    """Returns the curve of one sampled round at INTEGER_ORDERS."""
    orders = INTEGER_ORDERS
    if kind is Amplification.PUBLISHED:
        return amplification.amplify_poisson_published(
            orders, sampling_rate, base_curve=release.base_curve
        )
    if kind is Amplification.REPLACE_ONE:
        return amplification.amplify_fixed_replace_one(
            orders, sampling_rate, base_curve=release.base_curve
        )
    ideal = amplification.amplify_poisson_symmetric(
        orders, sampling_rate, base_curve=release.moment_curve
    )
    # The true densities lie within e^{+-closeness} of the ideal ones, on both sides.
    sampled = ideal + release.closeness * (2 * orders - 1) / (orders - 1)
    return np.minimum(sampled, release.base_curve(orders))


def _count_draws(
    parameters: Parameters,
    scheme: CohortScheme,
    bounds: CohortBounds,
    *,
    mode: Mode,
    num_rounds: int,
) -> Draws:
    shares = float(scheme.clients_per_round)
    if scheme.sampling is Sampling.POISSON and scheme.sampling_rate < 1:
        # E[max(1 + the others who join, low)], the user being one of them.
        shares += 1 + bounds.low * bounds.underflow_probability
        if isinstance(parameters, SkellamParameters):
            # What the server draws for small cohorts, and the units left over.
            shares += math.ceil(bounds.high / SKELLAM_COHORT_RATIO) + 1
    return Draws(
        num_rounds=num_rounds,
        shares_per_round=shares,
        sampling_rate=scheme.sampling_rate,
        replace_one=mode.sensitivity_factor == 2,
    )


def convert(
    curves: list[tuple[FloatArray, FloatArray]],
    *,
    delta: float,
    release: Release,
    draws: Draws,
    overflow_charge: float,
) -> PrivacyCost:
    """Returns the least epsilon over curves (orders, rdp) after delta's charges."""
    sampler_charge = compute_sampler_charge(release, draws)
    least_charge = compute_least_sampler_charge(release, draws)
    remaining = delta - sampler_charge - overflow_charge
    candidates = [conversion.EpsilonAtOrder(epsilon=math.inf, order=None)]
    if remaining > 0:
        candidates += [
            conversion.compute_epsilon_from_rdp(orders, rdp, delta=remaining)
            for orders, rdp in curves
        ]
    best = min(candidates, key=lambda candidate: candidate.epsilon)
    return PrivacyCost(
        epsilon=best.epsilon,
        order=best.order,
        sampler_charge=sampler_charge,
        overflow_charge=overflow_charge,
        remaining_delta=remaining,
        least_charge=least_charge + overflow_charge,
    )


def check_charges(cost: PrivacyCost, delta: float) -> None:
    """Raises if the charges use up delta whatever the noise."""
    if cost.least_charge < delta:
        return
    raise ValueError(
        f"`delta` must exceed {cost.least_charge:.3g}, which the noise sampler and the "
        "cohort's tail are charged whatever the noise; take fewer rounds or a larger "
        f"delta. Found {delta!r}."
    )


def check_cohort(parameters: Parameters, scheme: CohortScheme) -> None:
    """Raises unless parameters and scheme agree on the cohort's size."""
    if parameters.clients_per_round != scheme.clients_per_round:
        raise ValueError(
            "`clients_per_round` of the parameters must be the scheme's "
            f"({scheme.clients_per_round!r}). Found {parameters.clients_per_round!r}."
        )


def build_quantile(
    noise_multiplier: float | None, contribution: int
) -> QuantileRelease | None:
    """Returns the quantile's release, or None without adaptive clipping."""
    if noise_multiplier is None:
        return None
    return QuantileRelease(noise_multiplier=noise_multiplier, contribution=contribution)


def _compute_gaussian_cost(
    parameters: Parameters,
    scheme: CohortScheme,
    *,
    mode: Mode,
    num_rounds: int,
    delta: float,
    quantile: QuantileRelease | None,
) -> PrivacyCost:
    if not isinstance(parameters, GaussianParameters):
        raise ValueError(
            f"`accountant` must be RDP for {parameters.mechanism.value}. "
            f"Found {mode.accountant!r}."
        )
    multiplier = compute_joint_multiplier(parameters.noise_multiplier, quantile)
    effective = multiplier / mode.sensitivity_factor
    if mode.accountant is Accountant.ANALYTIC:
        # T rounds on everyone are one release of the sum, at z / sqrt(T).
        epsilon = conversion.compute_epsilon_analytic_gaussian(
            delta, noise_multiplier=effective / math.sqrt(num_rounds)
        )
    else:
        epsilon = compute_epsilon_pld(
            effective,
            scheme.sampling_rate,
            num_rounds=num_rounds,
            delta=delta,
        )
    return PrivacyCost(
        epsilon=epsilon,
        order=None,
        sampler_charge=0.0,
        overflow_charge=0.0,
        remaining_delta=delta,
        least_charge=0.0,
    )
