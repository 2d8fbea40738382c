"""One round's release, as the accountant sees it: curves, closeness and draws."""

import dataclasses
import math

import numpy as np

from distributed_dp.accounting import rdp, validation
from distributed_dp.accounting.conversion import REAL_ORDERS
from distributed_dp.accounting.parameters import (
    DDGaussParameters,
    GaussianParameters,
    Parameters,
    SkellamParameters,
)
from distributed_dp.accounting.rdp import Curve, FloatArray

# Total-variation distance of one drawn noise coordinate to its exact law.
SAMPLER_TOTAL_VARIATION = 2.0**-60


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantileRelease:
    """The extra coordinate of adaptive clipping: one integer per client, with noise.

    Attributes:
      noise_multiplier: standard deviation of the sum's noise over the largest
        contribution of one client.
      contribution: the integer u; a client sends -u or +u (0 when zeroed out).
    """

    noise_multiplier: float
    contribution: int

    @property
    def scale(self) -> float:
        """Standard deviation of the sum's noise, in grid units."""
        return self.noise_multiplier * self.contribution

    def __post_init__(self) -> None:
        validation.check_positive("quantile_noise_multiplier", self.noise_multiplier)
        validation.check_integer("quantile_contribution", self.contribution, low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """What one release without sampling costs.

    Attributes:
      base_curve: Renyi bound between the release with and without one user's
        vector (or between two vectors, at twice the sensitivities).
      moment_curve: e with E_P[(Q/P)^l] <= exp((l - 1) e(l)) for a noise law P that is
        symmetric and the same for every cohort: the ideal law.
      closeness: |log ratio| of the true noise law and the ideal one, over all
        coordinates together; may be inf.
      num_coordinates: coordinates that carry drawn noise; 0 for continuous noise.
      num_shares: the largest number of draws that are summed in a coordinate.
    """

    base_curve: Curve
    moment_curve: Curve
    closeness: float
    num_coordinates: int
    num_shares: float


def build_release(
    parameters: Parameters,
    *,
    num_shares: float,
    local_stddev: float,
    central_stddev: float,
    sensitivity_factor: int = 1,
    quantile: QuantileRelease | None = None,
) -> Release:
    """Returns the release of one round.

    Args:
      parameters: the mechanism.
      num_shares: the number of shares that the noise consists of (the largest
        plausible one where it varies).
      local_stddev: standard deviation of one share (the smallest plausible one where
        it varies), in units of x; decides the closeness.
      central_stddev: standard deviation of the whole noise, in units of x.
      sensitivity_factor: 1 for add/remove and zero-out, 2 for replace-one.
      quantile: the extra coordinate, if any.

    Returns:
      The release.
    """
    if isinstance(parameters, GaussianParameters):
        return _build_gaussian(parameters, sensitivity_factor, quantile)
    sum_scale = central_stddev / parameters.granularity
    main = _build_integer_release(
        parameters,
        l2_sensitivity=sensitivity_factor * parameters.l2_sensitivity,
        l1_sensitivity=sensitivity_factor * parameters.l1_sensitivity,
        sum_scale=sum_scale,
        local_scale=local_stddev / parameters.granularity,
        num_shares=num_shares,
        dim=parameters.padded_dim,
    )
    if quantile is None:
        return main
    # Its shares are scaled, split and lost like those of the other coordinates.
    planned = parameters.central_stddev
    scale = quantile.scale / planned if planned else 0.0
    extra = _build_integer_release(
        parameters,
        l2_sensitivity=float(sensitivity_factor * quantile.contribution),
        l1_sensitivity=float(sensitivity_factor * quantile.contribution),
        sum_scale=central_stddev * scale,
        local_scale=local_stddev * scale,
        num_shares=num_shares,
        dim=1,
    )
    return _join(main, extra)


def compute_sampler_charge(
    release: Release,
    num_rounds: int,
    *,
    total_variation: float = SAMPLER_TOTAL_VARIATION,
) -> float:
    """Returns the delta that the inexact noise sampler costs over all rounds.

    Source: docs/privacy.md, "The sampler". With p = n eta the distance of one
    coordinate's sum to its exact law, the charge is
    T (p d + 2 min_a p^(1 - 1/a) (d - 1 + e^{(1 - 1/a) e(a)})), a few times T n d eta.

    Guarantees: (epsilon, delta') for exact noise implies (epsilon, delta' + charge) for
    noise drawn within total variation eta a coordinate, at every epsilon.

    Args:
      release: its base curve must hold for exact noise.
      num_rounds: T.
      total_variation: eta.

    Returns:
      The charge; 0 for continuous noise, at most 1. Where the base curve is infinite
      there is nothing to claim, and the least charge is returned.
    """
    dim = release.num_coordinates
    if dim == 0:
        return 0.0
    distance = min(1.0, math.ceil(release.num_shares) * total_variation)
    base = release.base_curve(REAL_ORDERS)
    if not np.isfinite(base).any():
        return compute_least_sampler_charge(release, num_rounds)
    keep = 1 - 1 / REAL_ORDERS
    exponents = keep * base
    log_rest = math.log(dim - 1) if dim > 1 else -math.inf
    log_shifted = keep * math.log(distance) + np.logaddexp(log_rest, exponents)
    shifted = math.exp(min(0.0, float(np.min(log_shifted))))
    return min(1.0, num_rounds * (distance * dim + 2 * shifted))


def compute_least_sampler_charge(release: Release, num_rounds: int) -> float:
    """Returns 3 T n d eta, the charge in the limit of endless noise."""
    draws = num_rounds * math.ceil(release.num_shares) * release.num_coordinates
    return min(1.0, 3 * draws * SAMPLER_TOTAL_VARIATION)


def _build_gaussian(
    parameters: GaussianParameters,
    sensitivity_factor: int,
    quantile: QuantileRelease | None,
) -> Release:
    multiplier = compute_joint_multiplier(parameters.noise_multiplier, quantile)
    effective = multiplier / sensitivity_factor

    def compute_curve(orders: FloatArray) -> FloatArray:
        return rdp.compute_rdp_gaussian(orders, effective)

    return Release(
        base_curve=compute_curve,
        moment_curve=compute_curve,
        closeness=0.0,
        num_coordinates=0,
        num_shares=1,
    )


def compute_joint_multiplier(
    noise_multiplier: float, quantile: QuantileRelease | None
) -> float:
    """Returns z_eff with 1/z_eff^2 = 1/z^2 + 1/z_b^2."""
    if quantile is None or noise_multiplier == 0:
        return noise_multiplier
    return 1 / math.hypot(1 / noise_multiplier, 1 / quantile.noise_multiplier)


def _build_integer_release(
    parameters: DDGaussParameters | SkellamParameters,
    *,
    l2_sensitivity: float,
    l1_sensitivity: float,
    sum_scale: float,
    local_scale: float,
    num_shares: float,
    dim: int,
) -> Release:
    if isinstance(parameters, SkellamParameters):

        def compute_skellam(orders: FloatArray) -> FloatArray:
            return rdp.compute_rdp_skellam(
                orders,
                l2_sensitivity=l2_sensitivity,
                l1_sensitivity=l1_sensitivity,
                variance=sum_scale**2,
            )

        return Release(
            base_curve=compute_skellam,
            moment_curve=compute_skellam,
            closeness=0.0,
            num_coordinates=dim,
            num_shares=num_shares,
        )
    closeness = rdp.compute_closeness(local_scale, num_shares)

    def compute_base(orders: FloatArray) -> FloatArray:
        return rdp.compute_rdp_near_gaussian(
            orders,
            l2_ratio=l2_sensitivity / sum_scale if sum_scale else math.inf,
            l1_ratio=l1_sensitivity / sum_scale if sum_scale else math.inf,
            tau=2 * closeness,
            dim=dim,
        )

    def compute_ideal(orders: FloatArray) -> FloatArray:
        return rdp.compute_rdp_gaussian(orders, sum_scale / l2_sensitivity)

    return Release(
        base_curve=compute_base,
        moment_curve=compute_ideal,
        closeness=dim * closeness,
        num_coordinates=dim,
        num_shares=num_shares,
    )


def _join(first: Release, second: Release) -> Release:
    """Returns the joint release of independent noises: bounds and closeness add."""

    def compute_base(orders: FloatArray) -> FloatArray:
        return first.base_curve(orders) + second.base_curve(orders)

    def compute_moment(orders: FloatArray) -> FloatArray:
        return first.moment_curve(orders) + second.moment_curve(orders)

    return Release(
        base_curve=compute_base,
        moment_curve=compute_moment,
        closeness=first.closeness + second.closeness,
        num_coordinates=first.num_coordinates + second.num_coordinates,
        num_shares=max(first.num_shares, second.num_shares),
    )
