"""Laws on the integers in exact arithmetic, made without the code under test.

A law is a dict from integer to probability, an `mpmath.mpf` at 400 bits or a Fraction.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import mpmath
import numpy as np
from scipy import special

CONTEXT = mpmath.mp.clone()
CONTEXT.prec = 400

Law = Mapping[int, mpmath.mpf | Fraction]


def to_mpf(number: Fraction | int | float | mpmath.mpf) -> mpmath.mpf:
    if isinstance(number, Fraction):
        return CONTEXT.mpf(number.numerator) / number.denominator
    return CONTEXT.mpf(number)


def compute_discrete_gaussian(variance: Fraction, radius: int) -> Law:
    """Returns the law on -radius..radius; what lies beyond must be negligible."""
    rate = -1 / (2 * to_mpf(variance))
    right = [CONTEXT.exp(rate * (z * z)) for z in range(radius + 1)]
    total = 2 * CONTEXT.fsum(right) - right[0]
    return {z: right[abs(z)] / total for z in range(-radius, radius + 1)}


def compute_skellam(variance: Fraction, radius: int) -> Law:
    """Returns exp(-v) I_z(v) on -radius..radius, each value from its own series."""
    mean = to_mpf(variance)
    scale = CONTEXT.exp(-mean)
    right = [scale * CONTEXT.besseli(z, mean) for z in range(radius + 1)]
    return {z: right[abs(z)] for z in range(-radius, radius + 1)}


def compute_total_variation(first: Law, second: Law) -> mpmath.mpf:
    """Returns half the L1 distance; mass outside both supports counts as equal."""
    support = set(first) | set(second)
    differences = [
        abs(to_mpf(first.get(z, 0)) - to_mpf(second.get(z, 0))) for z in support
    ]
    return CONTEXT.fsum(differences) / 2


def add_multiple(first: Law, stride: int, second: Law) -> Law:
    """Returns the exact law of X + stride * Y for Fractions with a common denominator.

    Goes through integers, so that a convolution of a few million terms is quick.
    """
    denominators = []
    numerators = []
    for law in (first, second):
        denominator = math.lcm(*(Fraction(p).denominator for p in law.values()))
        denominators.append(denominator)
        numerators.append({z: int(p * denominator) for z, p in law.items() if p})
    low = min(numerators[0]) + stride * min(numerators[1])
    high = max(numerators[0]) + stride * max(numerators[1])
    total = [0] * (high - low + 1)
    for y, q in numerators[1].items():
        start = stride * y - low
        for x, p in numerators[0].items():
            total[x + start] += p * q
    scale = denominators[0] * denominators[1]
    return {low + i: Fraction(mass, scale) for i, mass in enumerate(total) if mass}


def compute_gaussian_cdf(scale: float, radius: int, shift: int = 0) -> np.ndarray:
    """Returns P[Z + shift <= z] for z = -radius..radius in float64."""
    z = np.arange(-radius - 40, radius + 41, dtype=np.float64) - shift
    weights = np.exp(-(z**2) / (2 * scale**2))
    return (np.cumsum(weights) / weights.sum())[40:-40]


def compute_skellam_cdf(variance: float, radius: int, shift: int = 0) -> np.ndarray:
    """Returns P[Z + shift <= z] for z = -radius..radius in float64."""
    z = np.arange(-radius - 40, radius + 41, dtype=np.float64) - shift
    weights = special.ive(np.abs(z), variance)
    return (np.cumsum(weights) / weights.sum())[40:-40]


def compute_table_laws(laws: Sequence[Sequence[Fraction]], offset: int) -> list[Law]:
    """Returns laws given column by column as dicts; column i is outcome i - offset."""
    return [{i - offset: p for i, p in enumerate(law) if p} for law in laws]
