"""Alias tables against laws computed with mpmath, in exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest

from distributed_dp import alias_table
from distributed_dp.accounting import SAMPLER_TOTAL_VARIATION
from distributed_dp.skellam import compute_half_width
from tests.distributed_dp import integer_law

_LIMIT = SAMPLER_TOTAL_VARIATION
_SCALES = [0.3, 1.0, 7.5, 49.0]


def _build_gaussian(variance: Fraction, word_bits: int = 32):
    index_bits = alias_table.compute_index_bits(math.sqrt(variance))
    half_width = 1 << (index_bits - 1)
    weights = alias_table.compute_discrete_gaussian_weights(variance, half_width)
    return alias_table.build_alias_table([weights], word_bits=word_bits)


def _build_skellam(variance: Fraction):
    half_width = compute_half_width(float(variance))
    weights = alias_table.compute_skellam_weights(variance, half_width)
    return alias_table.build_alias_table([weights], word_bits=64)


def _extract_law(table, row: int = 0):
    law = alias_table.compute_table_law(table, row)
    return integer_law.compute_table_laws([law], table.offset)[0]


@pytest.mark.parametrize("scale", _SCALES)
class TestDiscreteGaussian:
    def test_law_is_within_the_limit(self, scale: float) -> None:
        variance = Fraction(scale) ** 2
        law = _extract_law(_build_gaussian(variance))
        exact = integer_law.compute_discrete_gaussian(variance, int(20 * scale) + 20)
        assert integer_law.compute_total_variation(law, exact) <= _LIMIT

    def test_masses_sum_to_one_exactly(self, scale: float) -> None:
        assert sum(_extract_law(_build_gaussian(Fraction(scale) ** 2)).values()) == 1

    def test_tails_are_covered(self, scale: float) -> None:
        variance = Fraction(scale) ** 2
        table = _build_gaussian(variance)
        exact = integer_law.compute_discrete_gaussian(variance, int(20 * scale) + 20)
        tail = sum(p for z, p in exact.items() if abs(z) >= table.offset)
        assert tail <= _LIMIT
        assert table.offset > alias_table.TAIL_STDDEVS * scale

    def test_wrong_laws_are_rejected(self, scale: float) -> None:
        law = _extract_law(_build_gaussian(Fraction(scale) ** 2))
        radius = int(20 * scale) + 20
        wider = Fraction(scale) ** 2 * (1 + Fraction(1, 1 << 60)) ** 2
        exact = integer_law.compute_discrete_gaussian(Fraction(scale) ** 2, radius)
        shifted = {z + 1: p for z, p in exact.items()}
        for wrong in (integer_law.compute_discrete_gaussian(wider, radius), shifted):
            assert integer_law.compute_total_variation(law, wrong) > _LIMIT


@pytest.mark.parametrize("variance", [0.09, 1.0, 56.25, 2704.0])
class TestSkellam:
    def test_law_is_within_the_limit(self, variance: float) -> None:
        law = _extract_law(_build_skellam(Fraction(variance)))
        radius = int(10 * math.sqrt(variance)) + 60
        exact = integer_law.compute_skellam(Fraction(variance), radius)
        assert integer_law.compute_total_variation(law, exact) <= _LIMIT
        assert sum(law.values()) == 1

    def test_wrong_laws_are_rejected(self, variance: float) -> None:
        law = _extract_law(_build_skellam(Fraction(variance)))
        radius = int(10 * math.sqrt(variance)) + 60
        wider = Fraction(variance) * (1 + Fraction(1, 1 << 60))
        for wrong in (
            integer_law.compute_skellam(wider, radius),
            integer_law.compute_discrete_gaussian(Fraction(variance), radius),
        ):
            assert integer_law.compute_total_variation(law, wrong) > _LIMIT


def test_scale_zero_is_the_point_mass() -> None:
    for weights in (
        alias_table.compute_discrete_gaussian_weights(Fraction(0), 8),
        alias_table.compute_skellam_weights(Fraction(0), 8),
    ):
        table = alias_table.build_alias_table([weights])
        assert _extract_law(table) == {0: 1}


def test_weights_are_symmetric_and_leave_the_lowest_out() -> None:
    for weights in (
        alias_table.compute_discrete_gaussian_weights(Fraction(2), 16),
        alias_table.compute_skellam_weights(Fraction(2), 16),
    ):
        assert len(weights) == 32
        assert weights[0] == 0
        assert weights[1:] == weights[:0:-1]


@pytest.mark.parametrize("word_bits", [32, 64])
@pytest.mark.parametrize("kind", ["uniform", "sparse", "one", "steep"])
def test_any_law_is_met_to_the_rounding(
    word_bits: int, kind: str, rng: np.random.Generator
) -> None:
    draws = [int(number) for number in rng.integers(1, 2**62, size=64)]
    weights = {
        "uniform": [7] * 64,
        "sparse": [draw if draw % 4 == 0 else 0 for draw in draws],
        "one": [0] * 63 + [5],
        "steep": [draw >> (i % 60) for i, draw in enumerate(draws)],
    }[kind]
    table = alias_table.build_alias_table([weights], word_bits=word_bits)
    law = alias_table.compute_table_law(table)
    total = sum(weights)
    distance = sum(
        abs(mass - Fraction(weight, total))
        for mass, weight in zip(law, weights, strict=True)
    )
    assert sum(law) == 1
    assert distance / 2 <= Fraction(1, 1 << (word_bits - 6 + alias_table.LOW_BITS))


def test_each_row_has_its_own_law() -> None:
    variances = [Fraction(1, 4), Fraction(4), Fraction(0)]
    rows = [alias_table.compute_discrete_gaussian_weights(v, 32) for v in variances]
    table = alias_table.build_alias_table(rows)
    for row, weights in enumerate(rows):
        alone = alias_table.build_alias_table([weights])
        assert _extract_law(table, row) == _extract_law(alone)


@pytest.mark.parametrize("max_stddev", [0.0, 1e-3, 0.3, 1.0, 7.5, 49.5, 49.6, 210.0])
def test_tables_are_the_least_that_cover_the_tails(max_stddev: float) -> None:
    half_width = 1 << (alias_table.compute_index_bits(max_stddev) - 1)
    needed = alias_table.TAIL_STDDEVS * max_stddev + 1
    assert half_width >= needed
    least = 1 << (alias_table.MIN_INDEX_BITS - 1)
    assert half_width == least or half_width // 2 < needed + 1


@pytest.mark.parametrize(
    ("rows", "word_bits"),
    [([[1, 1, 1]], 32), ([[1, 1], [1, 1, 1, 1]], 32), ([[1, 1]], 16)],
)
def test_bad_tables_are_refused(rows: list[list[int]], word_bits: int) -> None:
    with pytest.raises(ValueError, match="`rows` must|`word_bits` must"):
        alias_table.build_alias_table(rows, word_bits=word_bits)
