"""Exact laws of integer noise in one dimension, and exact divergences between them.

A law is an array of probabilities of the integers -radius..radius, summed without FFT
so that small probabilities keep their relative accuracy.
"""

import numpy as np
from scipy import special

# Probabilities below this are left out of a divergence: they are not accurate.
_FLOOR = 1e-280


def compute_discrete_gaussian(scale, radius):
    """Returns the discrete Gaussian of a real scale on -radius..radius."""
    z = np.arange(-radius, radius + 1, dtype=np.float64)
    weight = np.exp(-(z**2) / (2 * scale**2))
    return weight / weight.sum()


def compute_skellam(variance, radius):
    """Returns the symmetric Skellam law of a variance on -radius..radius."""
    z = np.abs(np.arange(-radius, radius + 1, dtype=np.float64))
    return special.ive(z, variance)


def compute_sum(laws):
    """Returns the law of a sum of independent integers of one common radius."""
    radius = (len(laws[0]) - 1) // 2
    total = laws[0]
    for law in laws[1:]:
        wide = np.convolve(total, law)
        middle = (len(wide) - 1) // 2
        total = wide[middle - radius : middle + radius + 1]
    return total


def shift(law, amount):
    """Returns the law of the integer plus `amount`."""
    result = np.zeros_like(law)
    if amount >= 0:
        result[amount:] = law[: len(law) - amount]
    else:
        result[:amount] = law[-amount:]
    return result


def compute_renyi(first, second, order):
    """Returns D_order(first || second), over integers that both laws reach."""
    kept = (first > _FLOOR) & (second > _FLOOR)
    log_first, log_second = np.log(first[kept]), np.log(second[kept])
    terms = order * log_first + (1 - order) * log_second
    return special.logsumexp(terms) / (order - 1)


def compute_worse_renyi(first, second, order):
    """Returns the larger of both directions."""
    return max(compute_renyi(first, second, order), compute_renyi(second, first, order))


def compute_hockey_stick(first, second, epsilon):
    """Returns the delta of `first` against `second` at epsilon."""
    return float(np.maximum(first - np.exp(epsilon) * second, 0).sum())
