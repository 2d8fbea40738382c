"""Alias tables whose law is an exact rational, built in integer arithmetic.

A law on consecutive integers becomes `2**index_bits` columns of equal capacity. A
column holds at most two outcomes: its own index below a threshold, its alias at or
above it (Walker 1977; Vose 1991). Masses are integers that sum to exactly
`2**(index_bits + threshold_bits)`, so the only errors are the rounding of the pmf to
those integers (total variation <= 2**-threshold_bits) and the mass outside the table.

No TensorFlow here: tables are made once with Python integers and stored as NumPy
arrays. `distributed_dp.table_sampler` draws from them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np

LOW_BITS = 64
"""Bits of a threshold kept beside the first random word, for ties."""

PMF_BITS = 192
"""Fixed-point precision of the unnormalised probabilities."""

TAIL_STDDEVS = 10.3
"""Tables cover this many standard deviations: exp(-10.3**2 / 2) < 2**-76.5."""

MIN_INDEX_BITS = 4

_WORD_TYPES = {32: (np.uint32, np.int32), 64: (np.uint64, np.int64)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AliasTable:
    """Alias tables of the same size for a family of laws (rows).

    Attributes:
      index_bits: log2 of the number of columns.
      word_bits: 32 or 64, the width of the first random word. It holds the column in
        its low `index_bits` bits and the leading threshold bits above them.
      packed: [rows, columns] int32 or int64; (leading threshold bits << index_bits) |
        alias, as a bit pattern.
      low: [rows, columns] int64; the following 64 threshold bits, as a bit pattern.
      offset: The outcome of column i is i - offset.
    """

    index_bits: int
    word_bits: int
    packed: np.ndarray
    low: np.ndarray
    offset: int

    @property
    def num_columns(self) -> int:
        return 1 << self.index_bits


def compute_index_bits(max_stddev: float) -> int:
    """Returns log2 of the least table that covers TAIL_STDDEVS on both sides."""
    half_width = math.ceil(TAIL_STDDEVS * max_stddev) + 1
    return max(MIN_INDEX_BITS, (2 * half_width - 1).bit_length())


def compute_discrete_gaussian_weights(variance: Fraction, half_width: int) -> list[int]:
    """Returns exp(-z**2 / (2 variance)) * 2**PMF_BITS for |z| < half_width.

    The ratio of neighbours is multiplied up: rho(z + 1) = rho(z) * q**(2 z + 1) with
    q = exp(-1 / (2 variance)). Each step loses less than one unit in the last place of
    2**-PMF_BITS, so the absolute error is below half_width**2 * 2**-PMF_BITS.

    Args:
      variance: Parameter s**2 of the law, >= 0 (0 puts all mass on zero).
      half_width: Weights are given for z = -half_width .. half_width - 1; the weight of
        -half_width is 0, so that the law is symmetric.

    Returns:
      2 * half_width integers.
    """
    one = 1 << PMF_BITS
    right = [one] + [0] * (half_width - 1)
    if variance > 0:
        step = _compute_exp(-1 / (2 * variance))
        ratio, square = step, (step * step) >> PMF_BITS
        for z in range(1, half_width):
            right[z] = (right[z - 1] * ratio) >> PMF_BITS
            ratio = (ratio * square) >> PMF_BITS
    return [0] + right[:0:-1] + right


def compute_skellam_weights(variance: Fraction, half_width: int) -> list[int]:
    """Returns weights proportional to the symmetric Skellam law, |z| < half_width.

    Its pmf is exp(-v) I_z(v). The Bessel functions obey I_{z-1} = I_{z+1} + (2 z / v)
    I_z; Miller's backward recurrence from far outside the table is stable, and the law
    is normalised by its own sum (DLMF 10.74(iv)).

    Args:
      variance: v >= 0.
      half_width: As for `compute_discrete_gaussian_weights`.

    Returns:
      2 * half_width integers.
    """
    if variance == 0:
        return compute_discrete_gaussian_weights(variance, half_width)
    start = half_width + 64 + math.ceil(14 * math.sqrt(float(variance)))
    numerator, denominator = variance.denominator * 2, variance.numerator
    values = [0] * (start + 1)
    above, here = 0, 1 << PMF_BITS
    for z in range(start, 0, -1):
        values[z] = here
        above, here = here, above + here * z * numerator // denominator
    values[0] = here
    shift = max(0, here.bit_length() - PMF_BITS)
    right = [value >> shift for value in values[:half_width]]
    return [0] + right[:0:-1] + right


def build_alias_table(
    rows: Sequence[Sequence[int]], *, word_bits: int = 32
) -> AliasTable:
    """Builds the tables of several laws given as integer weights.

    Args:
      rows: For each law 2**index_bits non-negative weights; the outcome of weight i is
        i - 2**(index_bits - 1). All rows have the same length.
      word_bits: 32 or 64.

    Returns:
      The tables. The law of row r differs from its normalised weights by at most
      2**-(word_bits - index_bits + 64) in total variation.

    Raises:
      ValueError: If a length is not a power of two or too large for the word, lengths
        differ, or `word_bits` is neither 32 nor 64.
    """
    if word_bits not in _WORD_TYPES:
        raise ValueError(f"`word_bits` must be 32 or 64. Found {word_bits!r}.")
    num_columns = len(rows[0])
    index_bits = num_columns.bit_length() - 1
    if num_columns != 1 << index_bits or index_bits >= word_bits:
        raise ValueError(
            "`rows` must have a power of two of weights, fewer than 2**word_bits. "
            f"Found {num_columns!r}."
        )
    if any(len(row) != num_columns for row in rows):
        raise ValueError(
            "`rows` must all have the same length. Found "
            f"{sorted({len(row) for row in rows})!r}."
        )
    columns = [_build_columns(row, index_bits, word_bits) for row in rows]
    unsigned, signed = _WORD_TYPES[word_bits]
    return AliasTable(
        index_bits=index_bits,
        word_bits=word_bits,
        packed=np.array([c[0] for c in columns], unsigned).view(signed),
        low=np.array([c[1] for c in columns], np.uint64).view(np.int64),
        offset=num_columns // 2,
    )


def compute_table_law(table: AliasTable, row: int = 0) -> list[Fraction]:
    """Returns the exact law that `table` draws from, column by column."""
    leading_bits = table.word_bits - table.index_bits
    capacity = 1 << (leading_bits + LOW_BITS)
    packed = table.packed.view(f"u{table.word_bits // 8}")[row]
    masses = [0] * table.num_columns
    for column, (word, low) in enumerate(
        zip(packed, table.low.view("u8")[row], strict=True)
    ):
        threshold = (int(word) >> table.index_bits << LOW_BITS) | int(low)
        masses[column] += threshold
        masses[int(word) & (table.num_columns - 1)] += capacity - threshold
    return [Fraction(mass, capacity << table.index_bits) for mass in masses]


def _compute_exp(exponent: Fraction) -> int:
    """Returns floor(exp(exponent) * 2**PMF_BITS), one unit either way."""
    with localcontext() as context:
        context.prec = 80
        value = Decimal(exponent.numerator) / Decimal(exponent.denominator)
        return int(value.exp() * (1 << PMF_BITS))


def _build_columns(
    weights: Sequence[int], index_bits: int, word_bits: int
) -> tuple[list[int], list[int]]:
    """Splits integer masses into columns; returns (packed, low) of each column."""
    capacity = 1 << (word_bits - index_bits + LOW_BITS)
    total = sum(weights)
    masses = [(weight * capacity << index_bits) // total for weight in weights]
    masses[len(masses) // 2] += (capacity << index_bits) - sum(masses)
    # Column i starts as its own alias with threshold 0: always outcome i.
    alias = list(range(len(masses)))
    threshold = [0] * len(masses)
    small = [i for i, mass in enumerate(masses) if mass < capacity]
    large = [i for i, mass in enumerate(masses) if mass > capacity]
    while small:
        column, donor = small.pop(), large[-1]
        alias[column], threshold[column] = donor, masses[column]
        masses[donor] -= capacity - masses[column]
        if masses[donor] <= capacity:
            large.pop()
            if masses[donor] < capacity:
                small.append(donor)
    low_mask = (1 << LOW_BITS) - 1
    packed = [
        (t >> LOW_BITS << index_bits) | a for t, a in zip(threshold, alias, strict=True)
    ]
    return packed, [t & low_mask for t in threshold]
