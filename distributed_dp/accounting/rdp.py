"""Renyi DP curves of one release, without sampling.

Every curve is a pure function of an array of orders (alpha > 1), and bounds D_alpha in
both directions between the release with and without one user's integer vector y, where
||y||_p <= Delta_p. Sensitivities and scales are in grid units.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from distributed_dp.accounting import validation

FloatArray = npt.NDArray[np.float64]
Curve = Callable[[FloatArray], FloatArray]

# Terms of the closeness sum that are added one by one; the rest, which decrease, are
# bounded by the first of them.
_EXACT_TERMS = 4096


def check_orders(orders: npt.ArrayLike) -> FloatArray:
    """Returns the orders as an array; raises unless all are finite and above 1."""
    array = np.asarray(orders, dtype=np.float64)
    if not (np.all(np.isfinite(array)) and np.all(array > 1)):
        raise ValueError(f"`orders` must be finite and above 1. Found {orders!r}.")
    return array


def compute_closeness(local_scale: float, num_shares: float) -> float:
    """Returns t: how far a sum of discrete Gaussians is from one discrete Gaussian.

    Source: Kairouz, Liu, Steinke 2021, theorem on the convolution of discrete
    Gaussians, applied num_shares - 1 times:
    t = 5 sum_{k=1}^{n-1} exp(-2 pi^2 s^2 k / (k + 1)).

    Guarantees: the log of the ratio of the two laws is at most t in absolute value at
    every integer. Never below the sum above; infinite where the theorem does not apply
    (scale below 1/2 and more than one share).

    Args:
      local_scale: s, the scale of one share in grid units.
      num_shares: n, the number of shares; a fraction is rounded up.

    Returns:
      t, at least 0, possibly inf.
    """
    validation.check_non_negative("local_scale", local_scale)
    validation.check_positive("num_shares", num_shares)
    terms = math.ceil(num_shares) - 1
    if terms == 0:
        return 0.0
    if local_scale < 0.5:
        return math.inf
    rate = 2 * math.pi**2 * local_scale**2
    k = np.arange(1, min(terms, _EXACT_TERMS) + 1, dtype=np.float64)
    total = float(np.sum(np.exp(-rate * k / (k + 1))))
    if terms > _EXACT_TERMS:
        first = _EXACT_TERMS + 1
        total += (terms - _EXACT_TERMS) * math.exp(-rate * first / (first + 1))
    return 5 * total


def compute_tau(local_scale: float, num_shares: float) -> float:
    """Returns tau, twice the closeness.

    tau = 10 sum_{k=1}^{n-1} exp(-2 pi^2 s^2 k / (k + 1)).

    Source: Kairouz, Liu, Steinke 2021, proposition 14. See `compute_closeness`.
    """
    return 2 * compute_closeness(local_scale, num_shares)


def compute_rdp_gaussian(orders: npt.ArrayLike, noise_multiplier: float) -> FloatArray:
    """Returns alpha / (2 z^2), the curve of Gaussian noise (also of a discrete one).

    Args:
      orders: alpha > 1.
      noise_multiplier: z, standard deviation over L2 sensitivity.

    Returns:
      One value per order; inf for z = 0.
    """
    alphas = check_orders(orders)
    validation.check_non_negative("noise_multiplier", noise_multiplier)
    if noise_multiplier == 0:
        return np.full_like(alphas, np.inf)
    return alphas * (0.5 / noise_multiplier / noise_multiplier)


def compute_rdp_ddgauss(
    orders: npt.ArrayLike,
    *,
    l2_sensitivity: float,
    l1_sensitivity: float,
    local_scale: float,
    num_shares: float,
    dim: int,
) -> FloatArray:
    """Returns the curve of a sum of discrete Gaussian shares: the least of 3 bounds.

    Source: Kairouz, Liu, Steinke 2021, proposition 14; L_p = Delta_p / (sqrt(n) s):
    min{ (a/2) L_2^2 + tau d, (a/2)(L_2^2 + 2 L_1 tau + tau^2 d),
         (a/2)(L_2 + tau sqrt(d))^2 }.

    Guarantees: holds for every order above 1, and also between two noise laws that are
    both within the closeness tau / 2 of the same discrete Gaussian (docs/privacy.md).

    Args:
      orders: alpha > 1.
      l2_sensitivity: Delta_2 in grid units.
      l1_sensitivity: Delta_1 in grid units.
      local_scale: s, scale of one share in grid units.
      num_shares: n, shares that are really added; a fraction scales the variance.
      dim: d.

    Returns:
      One value per order; inf where no bound holds.
    """
    alphas = check_orders(orders)
    sum_scale = math.sqrt(num_shares) * local_scale
    tau = compute_tau(local_scale, num_shares)
    return compute_rdp_near_gaussian(
        alphas,
        l2_ratio=_divide(l2_sensitivity, sum_scale),
        l1_ratio=_divide(l1_sensitivity, sum_scale),
        tau=tau,
        dim=dim,
    )


def compute_rdp_near_gaussian(
    orders: npt.ArrayLike, *, l2_ratio: float, l1_ratio: float, tau: float, dim: int
) -> FloatArray:
    """Returns the least of proposition 14's bounds for given L_2, L_1 and tau.

    Args:
      orders: alpha > 1.
      l2_ratio: L_2, the L2 sensitivity over the standard deviation of the sum's noise.
      l1_ratio: L_1, likewise.
      tau: twice the closeness of the noise to a discrete Gaussian; may be inf.
      dim: d.

    Returns:
      One value per order, inf where tau or a ratio is.
    """
    alphas = check_orders(orders)
    if not math.isfinite(l2_ratio + l1_ratio + tau):
        return np.full_like(alphas, np.inf)
    half = alphas / 2
    additive = half * l2_ratio**2 + tau * dim
    mixed = half * (l2_ratio**2 + 2 * l1_ratio * tau + tau**2 * dim)
    rooted = half * (l2_ratio + tau * math.sqrt(dim)) ** 2
    return np.minimum(additive, np.minimum(mixed, rooted))


def compute_zcdp_ddgauss(
    *,
    l2_sensitivity: float,
    l1_sensitivity: float,
    local_scale: float,
    num_shares: float,
    dim: int,
) -> float:
    """Returns rho such that a sum of discrete Gaussian shares is rho-zCDP.

    Source: Kairouz, Liu, Steinke 2021, proposition 14: eps^2 / 2 with
    eps = min{ sqrt(L_2^2 + 2 tau d), sqrt(L_2^2 + 2 L_1 tau + tau^2 d),
    L_2 + tau sqrt(d) }.

    Args:
      l2_sensitivity: Delta_2 in grid units.
      l1_sensitivity: Delta_1 in grid units.
      local_scale: s, scale of one share in grid units.
      num_shares: n, shares that are really added.
      dim: d.

    Returns:
      rho, possibly inf. Rounds add up.
    """
    sum_scale = math.sqrt(num_shares) * local_scale
    l2_ratio = _divide(l2_sensitivity, sum_scale)
    l1_ratio = _divide(l1_sensitivity, sum_scale)
    tau = compute_tau(local_scale, num_shares)
    if not math.isfinite(l2_ratio + l1_ratio + tau):
        return math.inf
    squared_epsilon = min(
        l2_ratio**2 + 2 * tau * dim,
        l2_ratio**2 + 2 * l1_ratio * tau + tau**2 * dim,
        (l2_ratio + tau * math.sqrt(dim)) ** 2,
    )
    return squared_epsilon / 2


def compute_rdp_skellam(
    orders: npt.ArrayLike,
    *,
    l2_sensitivity: float,
    l1_sensitivity: float,
    variance: float,
) -> FloatArray:
    """Returns the curve of symmetric Skellam noise of variance mu on an integer sum.

    Source: Agarwal, Kairouz, Liu 2021, theorem 3.5, for integer a:
    a Delta_2^2 / (2 mu) + min{ ((2a-1) Delta_2^2 + 6 Delta_1) / (4 mu^2),
    3 Delta_1 / (2 mu) }. Shares sum exactly, so mu = n mu_local.

    A fractional order takes the chord of (a - 1) D_a, which is convex in a and 0 at 1.

    Args:
      orders: alpha > 1.
      l2_sensitivity: Delta_2 in grid units.
      l1_sensitivity: Delta_1 in grid units.
      variance: mu of the whole sum, grid units squared.

    Returns:
      One value per order; inf for variance 0.
    """
    alphas = check_orders(orders)
    validation.check_non_negative("variance", variance)
    squared = _divide(l2_sensitivity, math.sqrt(variance)) ** 2
    linear = _divide(l1_sensitivity, variance)
    if not math.isfinite(squared + linear):
        return np.full_like(alphas, np.inf)

    def compute_scaled(order: FloatArray) -> FloatArray:
        excess = ((2 * order - 1) * squared + 6 * linear) / (4 * variance)
        return (order - 1) * (order * squared / 2 + np.minimum(excess, 1.5 * linear))

    return interpolate_scaled(alphas, compute_scaled) / (alphas - 1)


def interpolate_scaled(
    orders: FloatArray, compute_scaled: Callable[[FloatArray], FloatArray]
) -> FloatArray:
    """Returns the chords, at any orders, of a bound on (alpha - 1) D_alpha at integers.

    Guarantees: log E_Q[(P/Q)^alpha] is convex in alpha (Hoelder) and 0 at alpha = 1, so
    a chord between bounds at neighbouring integers is a bound.

    Args:
      orders: alpha > 1.
      compute_scaled: maps an array of integers above 1 to bounds on (a - 1) D_a.

    Returns:
      Bounds on (alpha - 1) D_alpha, one per order.
    """
    low, high = np.floor(orders), np.ceil(orders)
    integers = np.unique(np.concatenate([low.ravel(), high.ravel()]))
    integers = integers[integers > 1]
    knots = np.concatenate([[1.0], integers])
    values = np.concatenate([[0.0], compute_scaled(integers)])
    left = values[np.searchsorted(knots, low)]
    right = values[np.searchsorted(knots, high)]
    weight = orders - low
    # A weight of 0 must not meet an infinite neighbour.
    safe_right = np.where(weight > 0, right, 0.0)
    return np.where(weight > 0, (1 - weight) * left, left) + weight * safe_right


def _divide(numerator: float, denominator: float) -> float:
    return math.inf if denominator == 0 else numerator / denominator
