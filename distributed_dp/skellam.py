"""The symmetric Skellam law on the integers, and its sampler.

Law with variance v: the difference of two independent Poisson(v / 2) variables, P[z] =
exp(-v) I_z(v) with the modified Bessel function I (Skellam 1946; as a distributed
mechanism: Agarwal, Kairouz, Liu 2021, arXiv 2110.04995). Sums add their variances
exactly.

The whole law is one alias table with 64-bit first words. Distance to the exact law per
draw (`SAMPLER_TOTAL_VARIATION` = 2**-70):
  * table rounding 2**-(64 - 20 + 64) = 2**-108;
  * mass outside the table, |Z| >= L: at most 2 exp(v (cosh t - 1) - t L) with t =
    arcsinh(L / v) (Chernoff); the table is widened until this is below 2**-71.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import tensorflow as tf

from distributed_dp.alias_table import (
    AliasTable,
    build_alias_table,
    compute_skellam_weights,
)
from distributed_dp.table_sampler import sample_tables

MAX_VARIANCE = 2.5e9
"""Largest variance; the table then has 2**20 columns."""

_TAIL_BITS = 71


@dataclasses.dataclass(frozen=True)
class SkellamSampler:
    """Sampler for a family of variances (rows), chosen when the graph runs.

    Attributes:
      variances: Exact variance of each row.
      table: Their alias tables.
    """

    variances: tuple[Fraction, ...]
    table: AliasTable

    def sample(
        self, shape: Sequence[int], seed: tf.Tensor, *, row: tf.Tensor | int = 0
    ) -> tf.Tensor:
        """Draws an int32 tensor of `shape` from the law of `row`; seed int32[2]."""
        return sample_tables([self.table], [1], shape, seed, row=row)


def build_skellam_sampler(variances: Sequence[Fraction | float]) -> SkellamSampler:
    """Builds the tables for every variance.

    Raises:
      ValueError: If a variance is negative, not finite or above MAX_VARIANCE, or there
        is none.
    """
    if len(variances) == 0:
        raise ValueError(f"`variances` must not be empty. Found {variances!r}.")
    for variance in variances:
        if not 0 <= variance <= MAX_VARIANCE:
            raise ValueError(
                f"`variances` must be in [0, {MAX_VARIANCE!r}]. Found "
                f"{float(variance)!r}."
            )
    # Through float: a NumPy integer in a Fraction would overflow silently.
    exact = [v if isinstance(v, Fraction) else Fraction(float(v)) for v in variances]
    return _build_sampler(tuple(exact))


def sample_skellam(variance: float, shape: Sequence[int], seed: tf.Tensor) -> tf.Tensor:
    """Draws independent symmetric Skellam variables.

    Source: Agarwal, Kairouz, Liu 2021, definition 3.1; sampler: module docstring.

    Guarantees: each coordinate's law is within 2**-70 of the exact one in total
    variation if the generator's words are uniform. Stateless.
    Not guaranteed: cryptographic strength of TensorFlow's random generator.

    Args:
      variance: Real number in [0, MAX_VARIANCE].
      shape: Static shape of the result.
      seed: int32[2] tensor or pair.

    Returns:
      int64 tensor of `shape`.

    Raises:
      ValueError: If `variance` is out of range.
    """
    if not 0 <= variance <= MAX_VARIANCE:
        raise ValueError(
            f"`variance` must be in [0, {MAX_VARIANCE!r}]. Found {variance!r}."
        )
    sampler = build_skellam_sampler([variance])
    return tf.cast(sampler.sample(shape, tf.convert_to_tensor(seed)), tf.int64)


@functools.lru_cache(maxsize=16)
def _build_sampler(variances: tuple[Fraction, ...]) -> SkellamSampler:
    half_width = compute_half_width(float(max(variances)))
    rows = [compute_skellam_weights(variance, half_width) for variance in variances]
    return SkellamSampler(variances, build_alias_table(rows, word_bits=64))


def compute_half_width(variance: float) -> int:
    """Returns the least power of two beyond which the mass is below 2**-71."""
    half_width = 8
    while variance > 0:
        tilt = math.asinh(half_width / variance)
        growth = 2 * variance * math.sinh(tilt / 2) ** 2
        if growth - tilt * half_width < -(_TAIL_BITS + 1) * math.log(2):
            break
        half_width *= 2
    return half_width
