"""The discrete Gaussian on the integers, and its sampler.

Law with scale s: P[z] proportional to exp(-z**2 / (2 s**2)), z an integer (Canonne,
Kamath, Steinke 2020, arXiv 2004.00010, definition 1). Scale 0 is the point mass at 0.

How a draw is made. For s up to about 49 one alias table holds the whole law. A larger
scale is composed: with X ~ DG(a w) and Y ~ DG(t), X + w Y has, by completing the
square, P[z] proportional to exp(-z**2 / (2 (a**2 w**2 + w**2 t**2))) * Theta(c_z),
where Theta(c) = sum_y exp(-(y - c)**2 / (2 b**2)) and 1 / b**2 = 1 / a**2 + 1 / t**2.
Poisson summation gives Theta(c) = b sqrt(2 pi) (1 + 2 sum_k exp(-2 pi**2 b**2 k**2)
cos(2 pi k c)), so for every c it lies within a factor 1 +- r of the same constant, r =
2.0001 exp(-2 pi**2 b**2). With s**2 = w**2 (a**2 + t**2) the law of X + w Y hence
differs from DG(s) by at most r in total variation. `t` is real, so every real s is met
exactly; Y is drawn by the same rule.

Distance to the exact law, per draw (`SAMPLER_TOTAL_VARIATION` = 2**-70):
  * table rounding: 2**-(32 - 13 + 64) = 2**-83 a table (`alias_table`);
  * mass outside a table: 10.3 standard deviations or more are covered, and for |z| >=
    L the tail of DG(s) is at most 2 exp(-L**2 / (2 s**2)) <= 2**-75.5;
  * composition: b**2 >= 2.83 is kept, so r <= 2.0001 exp(-55.86) < 2**-79.5.
A draw uses at most 9 tables and 8 compositions: 9 (2**-75.5 + 2**-83) + 8 * 2**-79.5 <
2**-72. The statement is about uniform random words; the words come from a
counter-based generator (Philox) keyed by the seed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import tensorflow as tf

from distributed_dp.alias_table import (
    TAIL_STDDEVS,
    AliasTable,
    build_alias_table,
    compute_discrete_gaussian_weights,
    compute_index_bits,
)
from distributed_dp.table_sampler import sample_tables

SAMPLER_TOTAL_VARIATION = 2.0**-70
MAX_SCALE = 2.0**40
"""Largest scale; beyond it values could leave int64."""

_LOWER_RATIO = Fraction(17, 10)  # a in the module docstring.
_MIN_TOP_SCALE = 12.0  # Then b**2 = 1 / (1 / a**2 + 1 / t**2) >= 2.83.
_TOP_INDEX_BITS = 10
_MAX_TOP_INDEX_BITS = 13  # Then scales may differ by a factor of 16, see below.
_STRIDE = 29  # a * 29 = 49.3 still fits a table of 2**10 columns.
_INT32_SCALE = 2.0**31 / 128


@dataclasses.dataclass(frozen=True)
class DiscreteGaussianSampler:
    """Sampler for a family of scales (rows), chosen when the graph runs.

    Attributes:
      variances: Exact scale**2 of each row.
      tables: One alias table a level; only the last has a row for each scale.
      strides: Factor of each level.
      wide: Whether draws are int64.
    """

    variances: tuple[Fraction, ...]
    tables: tuple[AliasTable, ...]
    strides: tuple[int, ...]
    wide: bool

    def sample(
        self, shape: Sequence[int], seed: tf.Tensor, *, row: tf.Tensor | int = 0
    ) -> tf.Tensor:
        """Draws from the law of `row`.

        Args:
          shape: Static shape.
          seed: int32[2].
          row: Scalar integer, index into `variances`.

        Returns:
          int32 tensor of `shape` (int64 if `wide`).
        """
        return sample_tables(
            self.tables, self.strides, shape, seed, row=row, wide=self.wide
        )


def build_discrete_gaussian_sampler(
    variances: Sequence[Fraction | float],
) -> DiscreteGaussianSampler:
    """Builds the tables for every scale**2 in `variances`.

    Args:
      variances: scale**2 of each row, >= 0. Where the largest scale needs several
        levels, the smallest must be within a factor of 16 of it.

    Returns:
      The sampler.

    Raises:
      ValueError: If a variance is negative, not finite, above MAX_SCALE**2, or the
        range is too wide.
    """
    exact = tuple(_check_variance(variance) for variance in variances)
    if not exact:
        raise ValueError(f"`variances` must not be empty. Found {variances!r}.")
    return _build_sampler(exact)


def sample_discrete_gaussian(
    scale: float, shape: Sequence[int], seed: tf.Tensor
) -> tf.Tensor:
    """Draws independent discrete Gaussians.

    Source: Canonne, Kamath, Steinke 2020, definition 1; sampler: module docstring.

    Guarantees: each coordinate's law is within SAMPLER_TOTAL_VARIATION of the exact one
    if the generator's words are uniform. Stateless: same arguments, same draw.
    Not guaranteed: cryptographic strength of TensorFlow's random generator.

    Args:
      scale: Real number in [0, 2**40]; the parameter s of the law, not rounded.
      shape: Static shape of the result.
      seed: int32[2] tensor or pair.

    Returns:
      int64 tensor of `shape`.

    Raises:
      ValueError: If `scale` is negative, not finite or above MAX_SCALE.
    """
    if not 0 <= scale <= MAX_SCALE:
        raise ValueError(f"`scale` must be in [0, 2**40]. Found {scale!r}.")
    sampler = build_discrete_gaussian_sampler([Fraction(float(scale)) ** 2])
    return tf.cast(sampler.sample(shape, tf.convert_to_tensor(seed)), tf.int64)


def _check_variance(variance: Fraction | float) -> Fraction:
    if not math.isfinite(variance) or not 0 <= variance <= MAX_SCALE**2:
        raise ValueError(
            f"`variances` must be finite and in [0, 2**80]. Found {float(variance)!r}."
        )
    # Through float: a NumPy integer in a Fraction would overflow silently.
    return variance if isinstance(variance, Fraction) else Fraction(float(variance))


@functools.lru_cache(maxsize=32)
def _build_sampler(variances: tuple[Fraction, ...]) -> DiscreteGaussianSampler:
    tables: list[AliasTable] = []
    strides: list[int] = []
    stride, top = 1, variances
    while _compute_scale(max(top)) > _compute_max_scale(_TOP_INDEX_BITS):
        step = _compute_stride(top)
        if step is None:
            break
        lower = (_LOWER_RATIO * step) ** 2
        tables.append(_build_level([lower]))
        strides.append(stride)
        top = tuple((variance - lower) / step**2 for variance in top)
        stride *= step
    tables.append(_build_level(top))
    strides.append(stride)
    wide = _compute_scale(max(variances)) > _INT32_SCALE
    return DiscreteGaussianSampler(variances, tuple(tables), tuple(strides), wide)


def _compute_stride(variances: Sequence[Fraction]) -> int | None:
    """The stride w of the next level, or None to make this the last level.

    The remaining scales are sqrt(s**2 / w**2 - a**2) and must all be at least
    _MIN_TOP_SCALE; the stride is the least that lets the largest fit one table.
    """
    smallest, largest = _compute_scale(min(variances)), _compute_scale(max(variances))
    widest = smallest / math.hypot(_MIN_TOP_SCALE, float(_LOWER_RATIO)) * (1 - 1e-9)
    needed = math.ceil(largest / _compute_max_scale(_TOP_INDEX_BITS))
    stride = min(_STRIDE, needed, math.floor(widest))
    if stride >= 2:
        return stride
    if largest <= _compute_max_scale(_MAX_TOP_INDEX_BITS):
        return None
    raise ValueError(
        "`variances` must have scales within a factor of 16 of each other. Found "
        f"scales from {smallest!r} to {largest!r}."
    )


def _compute_max_scale(index_bits: int) -> float:
    return ((1 << (index_bits - 1)) - 2) / TAIL_STDDEVS


def _compute_scale(variance: Fraction) -> float:
    return math.sqrt(variance)


def _build_level(variances: Sequence[Fraction]) -> AliasTable:
    index_bits = compute_index_bits(_compute_scale(max(variances)))
    half_width = 1 << (index_bits - 1)
    rows = [compute_discrete_gaussian_weights(v, half_width) for v in variances]
    return build_alias_table(rows, word_bits=32)
