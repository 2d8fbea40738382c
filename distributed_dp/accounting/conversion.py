"""From Renyi and concentrated DP to (epsilon, delta), and the closed Gaussian curve."""

import dataclasses
import math

import numpy as np
import numpy.typing as npt
from scipy import special

from distributed_dp.accounting import search, validation
from distributed_dp.accounting.rdp import FloatArray, check_orders

# Orders for bounds that hold at integers only.
INTEGER_ORDERS: FloatArray = np.unique(
    np.concatenate([np.arange(2, 129), np.geomspace(128, 32768, 49).round()])
).astype(np.float64)
# Orders for curves in closed form at every real order.
REAL_ORDERS: FloatArray = 1 + np.geomspace(1e-3, 1e7, 1501)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpsilonAtOrder:
    """An epsilon and the Renyi order at which it was reached (None: no order)."""

    epsilon: float
    order: float | None


def compute_epsilon_from_rdp(
    orders: npt.ArrayLike, rdp: npt.ArrayLike, *, delta: float
) -> EpsilonAtOrder:
    """Returns the least epsilon that a Renyi curve implies at delta.

    Source: Canonne, Kamath, Steinke 2020, proposition 12:
    min_a rdp(a) + log(1/(a delta))/(a-1) + log(1 - 1/a), floored at 0.

    Args:
      orders: alpha > 1.
      rdp: one bound per order, of the whole composition; may be inf.
      delta: in (0, 1).

    Returns:
      epsilon (inf if every bound is) and the order that gave it.
    """
    alphas = check_orders(orders)
    values = np.asarray(rdp, dtype=np.float64)
    if values.shape != alphas.shape or not np.all(values >= 0):
        raise ValueError(
            f"`rdp` must hold one non-negative value per order. Found {rdp!r}."
        )
    validation.check_delta(delta)
    epsilons = (
        values - (np.log(delta) + np.log(alphas)) / (alphas - 1) + np.log1p(-1 / alphas)
    )
    best = int(np.argmin(epsilons))
    return EpsilonAtOrder(
        epsilon=max(0.0, float(epsilons[best])), order=float(alphas[best])
    )


def compute_epsilon_from_zcdp(rho: float, *, delta: float) -> EpsilonAtOrder:
    """Returns the least epsilon that rho-zCDP implies at delta, through Renyi DP.

    Args:
      rho: of the whole composition; D_alpha <= rho alpha for all alpha > 1.
      delta: in (0, 1).

    Returns:
      epsilon and the order that gave it.
    """
    if not rho >= 0:
        raise ValueError(f"`rho` must be at least 0. Found {rho!r}.")
    return compute_epsilon_from_rdp(REAL_ORDERS, rho * REAL_ORDERS, delta=delta)


def compute_delta_analytic_gaussian(
    epsilon: float, *, noise_multiplier: float
) -> float:
    """Returns the least delta of one Gaussian release at epsilon.

    Source: Balle and Wang 2018, theorem 8, with z = stddev / sensitivity:
    Phi(1/(2z) - eps z) - e^eps Phi(-1/(2z) - eps z).

    Args:
      epsilon: at least 0.
      noise_multiplier: z > 0.

    Returns:
      delta in [0, 1].
    """
    validation.check_non_negative("epsilon", epsilon)
    validation.check_positive("noise_multiplier", noise_multiplier)
    half = 0.5 / noise_multiplier
    shift = epsilon * noise_multiplier
    log_first = float(special.log_ndtr(half - shift))
    log_ratio = epsilon + float(special.log_ndtr(-half - shift)) - log_first
    return math.exp(log_first) * -math.expm1(min(0.0, log_ratio))


def compute_epsilon_analytic_gaussian(
    delta: float, *, noise_multiplier: float
) -> float:
    """Returns the least epsilon of one Gaussian release at delta.

    Source: Balle and Wang 2018. T adaptive releases on everyone are one release at
    noise multiplier z / sqrt(T).

    Guarantees: rounded up; the delta at the epsilon returned is at most `delta`.
    """
    validation.check_delta(delta)
    validation.check_non_negative("noise_multiplier", noise_multiplier)
    if noise_multiplier == 0:
        return math.inf

    def compute_excess(epsilon: float) -> float:
        found = compute_delta_analytic_gaussian(
            epsilon, noise_multiplier=noise_multiplier
        )
        return found - delta

    if compute_excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while compute_excess(high) > 0:
        high *= 2
    return search.find_safe_root(compute_excess, 0.0, high)


def calibrate_analytic_gaussian(
    epsilon: float, delta: float, *, sensitivity: float
) -> float:
    """Returns the least standard deviation of one (epsilon, delta)-DP Gaussian release.

    Source: Balle and Wang 2018, algorithm 1.

    Guarantees: rounded up; the delta at `epsilon` is at most `delta`.

    Args:
      epsilon: positive.
      delta: in (0, 1).
      sensitivity: L2 sensitivity of the release.

    Returns:
      The standard deviation, in units of the sensitivity.
    """
    validation.check_positive("epsilon", epsilon)
    validation.check_delta(delta)
    validation.check_positive("sensitivity", sensitivity)

    def compute_excess(log_multiplier: float) -> float:
        found = compute_delta_analytic_gaussian(
            epsilon, noise_multiplier=math.exp(log_multiplier)
        )
        return found - delta

    low, high = -1.0, 1.0
    while compute_excess(high) > 0:
        high += 1
    while compute_excess(low) <= 0:
        low -= 1
    return sensitivity * math.exp(search.find_safe_root(compute_excess, low, high))
