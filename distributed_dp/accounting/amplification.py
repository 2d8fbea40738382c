"""Privacy amplification by sampling: curves of one release from a random cohort.

Each function maps a base curve e(l), the Renyi bound without sampling at integer orders
l >= 2, to the curve of the sampled release. The bounds hold at integer orders; at a
fractional one the chord of (alpha - 1) D_alpha is returned, which is a bound because
(alpha - 1) D_alpha is convex in alpha and 0 at alpha = 1.
"""

import functools

import numpy as np
import numpy.typing as npt
from scipy import special

from distributed_dp.accounting import validation
from distributed_dp.accounting.rdp import (
    Curve,
    FloatArray,
    check_orders,
    interpolate_scaled,
)

# Sums of consecutive small orders are taken together, as one matrix.
_MATRIX_ORDER = 256


def amplify_poisson_symmetric(
    orders: npt.ArrayLike, sampling_rate: float, *, base_curve: Curve
) -> FloatArray:
    """Returns the curve under Poisson sampling for symmetric, fixed noise.

    Source: docs/privacy.md (its proof), after Mironov, Talwar, Zhang 2019:
    1/(a-1) log sum_l C(a,l) (1-q)^(a-l) q^l e^{(l-1) e(l)}, where the terms of
    l = 0 and 1 have no exponential.

    Guarantees: bounds D_a in both directions under true add/remove, if the noise is
    symmetric on Z^d (or R^d) and its law is the same whoever takes part, and
    E_P[(Q/P)^l] <= exp((l - 1) e(l)) for P = law(noise), Q = law(noise + y).
    Not guaranteed: the comparison with the base curve; take the minimum where valid.

    Args:
      orders: alpha > 1.
      sampling_rate: q in (0, 1].
      base_curve: e, called with integers of at least 2.

    Returns:
      One value per order, inf where the base curve is.
    """
    alphas = check_orders(orders)
    validation.check_sampling_rate(sampling_rate)

    def compute_log_excess(order: FloatArray) -> FloatArray:
        return log_expm1((order - 1) * base_curve(order))

    return _amplify_poisson(alphas, sampling_rate, compute_log_excess)


def amplify_poisson_published(
    orders: npt.ArrayLike, sampling_rate: float, *, base_curve: Curve
) -> FloatArray:
    """Returns the curve under Poisson sampling for any mechanism.

    Source: Zhu and Wang 2019, theorem 5:
    1/(a-1) log( (1-q)^(a-1) (a q - q + 1) + C(a,2) q^2 (1-q)^(a-2) e^{e(2)}
    + 3 sum_{l=3}^a C(a,l) (1-q)^(a-l) q^l e^{(l-1) e(l)} ).

    Guarantees: bounds D_a in both directions under true add/remove. Never above the
    base curve at integer orders.

    Args:
      orders: alpha > 1.
      sampling_rate: q in (0, 1].
      base_curve: e, called with integers of at least 2; bounds the mechanism between
        any cohort and the same cohort with one more user.

    Returns:
      One value per order, inf where the base curve is.
    """
    alphas = check_orders(orders)
    validation.check_sampling_rate(sampling_rate)

    def compute_log_excess(order: FloatArray) -> FloatArray:
        # 3 e^x - 1 = 3 (e^x - 1) + 2.
        exponent = (order - 1) * base_curve(order)
        plain = log_expm1(exponent)
        tripled = np.logaddexp(np.log(3) + plain, np.log(2))
        return np.where(order >= 3, tripled, plain)

    return _amplify_poisson(
        alphas, sampling_rate, compute_log_excess, cap_curve=base_curve
    )


def amplify_fixed_replace_one(
    orders: npt.ArrayLike, sampling_rate: float, *, base_curve: Curve
) -> FloatArray:
    """Returns the curve under sampling of n users without replacement, replace-one.

    Source: Wang, Balle, Kasiviswanathan 2019, theorem 9:
    1/(a-1) log( 1 + q^2 C(a,2) min{4 (e^{e(2)} - 1), 2 e^{e(2)}}
    + sum_{j=3}^a 2 q^j C(a,j) e^{(j-1) e(j)} ).

    Guarantees: bounds D_a between populations of the same size that differ in one
    user. Never above the base curve at integer orders.

    Args:
      orders: alpha > 1.
      sampling_rate: q = n / N in (0, 1].
      base_curve: e under replace-one, that is at sensitivities 2 Delta_2 and 2 Delta_1;
        called with integers of at least 2.

    Returns:
      One value per order, inf where the base curve is.
    """
    alphas = check_orders(orders)
    validation.check_sampling_rate(sampling_rate)
    log_rate = np.log(sampling_rate)

    def compute_scaled(integers: FloatArray) -> FloatArray:
        counts = np.arange(2, integers.max() + 1)
        exponent = (counts - 1) * base_curve(counts)
        terms = np.log(2) + exponent
        terms[0] = min(np.log(4) + log_expm1(exponent[:1])[0], terms[0])
        terms += counts * log_rate
        log_sums = _sum_over_counts(integers, terms)
        uncapped = np.logaddexp(0.0, log_sums)
        return np.minimum(uncapped, (integers - 1) * base_curve(integers))

    return interpolate_scaled(alphas, compute_scaled) / (alphas - 1)


def log_expm1(exponent: FloatArray) -> FloatArray:
    """Returns log(e^x - 1) for x >= 0 without overflow; -inf at 0."""
    with np.errstate(divide="ignore"):
        return exponent + np.log(-np.expm1(-exponent))


def _amplify_poisson(
    alphas: FloatArray,
    sampling_rate: float,
    compute_log_excess: Curve,
    *,
    cap_curve: Curve | None = None,
) -> FloatArray:
    """Returns log(1 + sum_l pmf(l) excess(l)) / (a - 1) for pmf of Binomial(a, q).

    The binomial weights sum to 1, so writing each factor as 1 + excess avoids the
    cancellation that would lose everything at tiny q.
    """

    def compute_scaled(integers: FloatArray) -> FloatArray:
        counts = np.arange(2, integers.max() + 1)
        excess = compute_log_excess(counts)
        if sampling_rate == 1:
            log_sums = excess[integers.astype(int) - 2]
        else:
            log_odds = np.log(sampling_rate) - np.log1p(-sampling_rate)
            log_sums = _sum_over_counts(integers, excess + counts * log_odds)
            log_sums = log_sums + integers * np.log1p(-sampling_rate)
        scaled = np.logaddexp(0.0, log_sums)
        if cap_curve is None:
            return scaled
        return np.minimum(scaled, (integers - 1) * cap_curve(integers))

    return interpolate_scaled(alphas, compute_scaled) / (alphas - 1)


def _sum_over_counts(integers: FloatArray, log_terms: FloatArray) -> FloatArray:
    """Returns log sum_{l=2}^{a} C(a, l) e^{log_terms[l - 2]} for each integer a."""
    result = np.empty_like(integers)
    small = integers <= _MATRIX_ORDER
    if small.any():
        width = int(integers[small].max())
        rows = integers[small].astype(int) - 2
        log_binomials = _compute_log_binomials(width)[rows]
        with np.errstate(invalid="ignore"):
            summands = log_binomials + log_terms[: width - 1]
        # Impossible counts contribute nothing, even to an infinite term.
        summands[np.isneginf(log_binomials)] = -np.inf
        result[small] = _log_sum_exp(summands)
    for index in np.flatnonzero(~small):
        order = int(integers[index])
        log_binomials = _compute_log_binomial_row(order)
        result[index] = _log_sum_exp(log_binomials + log_terms[: order - 1])
    return result


@functools.lru_cache(maxsize=8)
def _compute_log_binomials(width: int) -> FloatArray:
    """Returns log C(a, l) for a, l in 2..width; -inf where l > a."""
    order = np.arange(2, width + 1, dtype=np.float64)[:, np.newaxis]
    count = np.arange(2, width + 1, dtype=np.float64)[np.newaxis, :]
    rest = np.maximum(order - count, 0)
    table = (
        special.gammaln(order + 1)
        - special.gammaln(count + 1)
        - special.gammaln(rest + 1)
    )
    return np.where(count <= order, table, -np.inf)


@functools.lru_cache(maxsize=64)
def _compute_log_binomial_row(order: int) -> FloatArray:
    """Returns log C(order, l) for l in 2..order."""
    count = np.arange(2, order + 1, dtype=np.float64)
    return (
        special.gammaln(order + 1.0)
        - special.gammaln(count + 1)
        - special.gammaln(order - count + 1)
    )


def _log_sum_exp(terms: FloatArray) -> FloatArray:
    """Returns log sum exp over the last axis; inf if a term is, -inf if all are."""
    peak = np.max(terms, axis=-1)
    shift = np.where(np.isfinite(peak), peak, 0.0)
    with np.errstate(over="ignore", divide="ignore"):
        return np.log(np.sum(np.exp(terms - shift[..., np.newaxis]), axis=-1)) + shift
