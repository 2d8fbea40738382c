"""One round's release, as the accountant sees it: curves, closeness and draws."""

import dataclasses
import math

from distributed_dp.accounting import rdp, validation
from distributed_dp.accounting.parameters import (
    DDGaussParameters,
    GaussianParameters,
    Parameters,
    SkellamParameters,
)
from distributed_dp.accounting.rdp import Curve, FloatArray


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
    """

    base_curve: Curve
    moment_curve: Curve
    closeness: float
    num_coordinates: int


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
    )
