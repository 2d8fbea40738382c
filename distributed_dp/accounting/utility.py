"""Utility theory: how far the mechanism's sum may be from the true one."""

import math

from distributed_dp.accounting import validation
from distributed_dp.accounting.calibration import compute_signal_variance
from distributed_dp.accounting.parameters import DistributedParameters, NormBound


def compute_coordinate_stddev(
    parameters: DistributedParameters,
    *,
    rho: float = 1.0,
    norm_bound: NormBound = NormBound.WORST_CASE,
) -> float:
    """Returns sigma_hat, which k = r / sigma_hat standard deviations are counted in.

    sigma_hat^2 = rho c^2 n^2 / d + (gamma^2/4 + sigma^2) n, in units of x squared.
    """
    validation.check_positive("rho", rho)
    validation.check_choice("norm_bound", norm_bound, kind=NormBound)
    count = parameters.clients_per_round
    signal = compute_signal_variance(
        parameters.l2_clip,
        count,
        padded_dim=parameters.padded_dim,
        rho=rho,
        norm_bound=norm_bound,
    )
    rounding = parameters.granularity**2 / 4
    return math.sqrt(signal + (rounding + parameters.local_stddev**2) * count)


def compute_utility_bound(
    parameters: DistributedParameters,
    *,
    rho: float = 1.0,
    norm_bound: NormBound = NormBound.WORST_CASE,
) -> float:
    """Returns a bound on the expected squared error of the decoded sum.

    Source: Kairouz, Liu, Steinke 2021, theorem 36, with r = gamma m / 2:
    d n / (1-beta) ( 2 sqrt(2) r e^{-r^2/(4 sigma_hat^2)} / sqrt(n (1-beta)^(n-1))
    + sqrt(gamma^2/4 + beta^2 gamma^2 n / (1-beta) + (1-beta) sigma^2) )^2.

    Guarantees: E ||estimate of the sum - sum||^2 is at most this, for vectors within
    the clip and, under OPTIMISTIC, a sum of norm at most c sqrt(n).
    Not guaranteed: anything useful for beta well above 1 / n.

    Args:
      parameters: the mechanism.
      rho: spread of the rotation.
      norm_bound: what to assume of the norm of the sum.

    Returns:
      The bound, in units of x squared; inf where r < sigma_hat, outside the theorem.
    """
    half_range = parameters.granularity * parameters.modulus / 2
    stddev = compute_coordinate_stddev(parameters, rho=rho, norm_bound=norm_bound)
    if half_range < stddev:
        return math.inf
    count, beta = parameters.clients_per_round, parameters.beta
    log_wrapped = (
        math.log(2 * math.sqrt(2) * half_range)
        - (half_range / stddev) ** 2 / 4
        - (math.log(count) + (count - 1) * math.log1p(-beta)) / 2
    )
    squared_granularity = parameters.granularity**2
    kept = math.sqrt(
        squared_granularity / 4
        + beta**2 * squared_granularity * count / (1 - beta)
        + (1 - beta) * parameters.local_stddev**2
    )
    if log_wrapped > 300:
        return math.inf
    wrapped = math.exp(log_wrapped)
    return parameters.padded_dim * count / (1 - beta) * (wrapped + kept) ** 2


def compute_wraparound_probability(
    parameters: DistributedParameters,
    *,
    rho: float = 1.0,
    norm_bound: NormBound = NormBound.WORST_CASE,
) -> float:
    """Returns a bound on the probability that one coordinate of the sum wraps around.

    Source: the sub-Gaussian tail 2 exp(-r^2 / (2 sigma_hat^2)) at r = gamma m / 2.

    Guarantees: holds over the random rotation, rounding (beta = 0) and noise.
    Not guaranteed: for beta > 0 acceptance may raise it by (1 - beta)^-n in theory.

    Args:
      parameters: the mechanism.
      rho: spread of the rotation.
      norm_bound: what to assume of the norm of the sum.

    Returns:
      A probability per coordinate.
    """
    half_range = parameters.granularity * parameters.modulus / 2
    stddev = compute_coordinate_stddev(parameters, rho=rho, norm_bound=norm_bound)
    return min(1.0, 2 * math.exp(-((half_range / stddev) ** 2) / 2))
