"""The Skellam sampler: exact facts, the exact law, goodness of fit."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from distributed_dp import alias_table
from distributed_dp.accounting import SAMPLER_TOTAL_VARIATION
from distributed_dp.skellam import (
    MAX_VARIANCE,
    build_skellam_sampler,
    compute_half_width,
    sample_skellam,
)
from tests.distributed_dp import goodness_of_fit, integer_law


def _compute_law(sampler, row: int = 0):
    columns = alias_table.compute_table_law(sampler.table, row)
    return integer_law.compute_table_laws([columns], sampler.table.offset)[0]


class TestExactLaw:
    @pytest.mark.parametrize("variance", [1e-9, 0.09, 2.5, 400.0])
    def test_distance_is_within_the_limit(self, variance: float) -> None:
        law = _compute_law(build_skellam_sampler([variance]))
        exact = integer_law.compute_skellam(Fraction(variance), max(law) + 60)
        distance = integer_law.compute_total_variation(law, exact)
        assert distance <= SAMPLER_TOTAL_VARIATION

    def test_wrong_laws_are_rejected(self) -> None:
        law = _compute_law(build_skellam_sampler([400.0]))
        radius = max(law) + 60
        wider = integer_law.compute_skellam(400 + Fraction(1, 1 << 50), radius)
        gaussian = integer_law.compute_discrete_gaussian(Fraction(400), radius)
        for wrong in (wider, gaussian):
            distance = integer_law.compute_total_variation(law, wrong)
            assert distance > SAMPLER_TOTAL_VARIATION

    def test_variances_add(self) -> None:
        sampler = build_skellam_sampler([2.0, 3.0, 5.0])
        laws = [_compute_law(sampler, row) for row in range(3)]
        total = integer_law.add_multiple(laws[0], 1, laws[1])
        distance = integer_law.compute_total_variation(total, laws[2])
        assert distance <= 3 * SAMPLER_TOTAL_VARIATION
        twice = integer_law.add_multiple(laws[0], 1, laws[0])
        assert integer_law.compute_total_variation(twice, laws[2]) > 1e-2

    def test_large_variances_at_some_points(self) -> None:
        # mpmath's Bessel function is slow here: the ratios of a few probabilities.
        variance = 1e6
        weights = alias_table.compute_skellam_weights(
            Fraction(variance), compute_half_width(variance)
        )
        right = weights[len(weights) // 2 :]
        context = integer_law.CONTEXT
        exact = {z: context.besseli(z, variance) for z in (0, 1, 1000, 5000)}
        for z, value in exact.items():
            ratio = context.mpf(right[z]) / right[0]
            assert abs(ratio / (value / exact[0]) - 1) < 2.0**-100

    @pytest.mark.parametrize("variance", [0.0, 1e-9, 0.1, 1.0, 30.0, 1e4, MAX_VARIANCE])
    def test_tails_are_covered(self, variance: float) -> None:
        half_width = compute_half_width(variance)
        if variance == 0:
            assert half_width == 8
            return
        # Chernoff at the best tilt, here found numerically.
        with mpmath.workprec(200):
            exponents = [
                variance * (mpmath.cosh(tilt) - 1) - tilt * half_width
                for tilt in map(mpmath.mpf, np.geomspace(1e-4, 60, 2000))
            ]
            assert 2 * mpmath.exp(min(exponents)) <= SAMPLER_TOTAL_VARIATION


class TestSampleFacts:
    @pytest.mark.parametrize("variance", [0, 1e-6, 0.09, 1, 56.25, 1e6])
    def test_every_variance_is_drawn(self, variance: float, seed: np.ndarray) -> None:
        drawn = sample_skellam(variance, [100, 10], tf.constant(seed))
        again = sample_skellam(variance, [100, 10], tuple(seed.tolist()))
        other = sample_skellam(variance, [100, 10], tf.constant(seed ^ 1))
        assert drawn.dtype == tf.int64
        assert drawn.shape == [100, 10]
        assert np.array_equal(drawn, again)
        assert np.array_equal(drawn, other) == (variance < 1e-3)
        assert np.abs(drawn).max() <= 12 * math.sqrt(variance) + 10

    def test_variance_zero_gives_zeros(self, seed: np.ndarray) -> None:
        assert not np.any(sample_skellam(0.0, [1000], tf.constant(seed)))

    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_same_bits_compiled(self, jit_compile: bool, seed: np.ndarray) -> None:
        sample = tf.function(
            lambda seed: sample_skellam(300.0, [5000], seed), jit_compile=jit_compile
        )
        eager = sample_skellam(300.0, [5000], tf.constant(seed))
        assert np.array_equal(eager, sample(tf.constant(seed)))

    @pytest.mark.parametrize("variance", [-1.0, math.nan, math.inf, 2.6e9])
    def test_bad_variances_are_refused(self, variance: float, seed) -> None:
        with pytest.raises(ValueError, match="`variance` must be in"):
            sample_skellam(variance, [3], tf.constant(seed))
        with pytest.raises(ValueError, match="`variances` must be in"):
            build_skellam_sampler([1.0, variance])

    @pytest.mark.parametrize("variance", [np.int64(300), np.float32(300.0), 300])
    def test_the_type_of_the_variance_does_not_matter(self, variance, seed) -> None:
        drawn = sample_skellam(variance, [100], tf.constant(seed))
        assert np.array_equal(drawn, sample_skellam(300.0, [100], tf.constant(seed)))

    def test_no_variance_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`variances` must not be empty"):
            build_skellam_sampler([])


class TestFit:
    _NUM = 1 << 19

    @pytest.mark.parametrize("variance", [0.09, 1.0, 56.25, 1600.0])
    def test_small_variances(self, variance: float, seed: np.ndarray) -> None:
        sample = tf.function(lambda seed: sample_skellam(variance, [self._NUM], seed))
        drawn = sample(tf.constant(seed)).numpy()
        stddev = math.sqrt(variance)
        radius = math.ceil(4 * stddev) + 1
        keep = slice(None, None, max(1, round(stddev / 5)))
        edges = np.arange(-radius, radius + 1)[keep]

        def fits(variance: float, shift: int = 0) -> bool:
            cdf = integer_law.compute_skellam_cdf(variance, radius, shift)[keep]
            p_value = goodness_of_fit.compute_p_value(drawn, edges, cdf)
            return p_value > goodness_of_fit.FALSE_FAILURE

        assert fits(variance)
        assert not fits(variance * 1.05**2)
        assert not fits(variance / 1.05**2)
        assert not fits(variance, shift=1)
        assert not fits(variance, shift=-1)
        if variance <= 1:
            cdf = integer_law.compute_gaussian_cdf(stddev, radius)[keep]
            p_value = goodness_of_fit.compute_p_value(drawn, edges, cdf)
            assert p_value < goodness_of_fit.FALSE_FAILURE

    def test_a_large_variance(self, seed: np.ndarray) -> None:
        stddev = 1000.0
        sample = tf.function(lambda seed: sample_skellam(1e6, [self._NUM], seed))
        drawn = sample(tf.constant(seed)).numpy()
        edges = np.round(np.linspace(-3.5, 3.5, 64) * stddev)

        def fits(factor: float) -> bool:
            cdf = stats.norm.cdf((edges + 0.5) / (stddev * factor))
            p_value = goodness_of_fit.compute_p_value(drawn, edges, cdf)
            return p_value > goodness_of_fit.FALSE_FAILURE

        assert fits(1.0)
        assert not fits(1.05)
        assert not fits(1 / 1.05)

    def test_rows_have_their_own_variance(self, seed: np.ndarray) -> None:
        sampler = build_skellam_sampler([100.0, 0.0, 400.0])
        sample = tf.function(lambda seed, row: sampler.sample([1 << 16], seed, row=row))
        for row, variance in ((0, 100.0), (2, 400.0)):
            drawn = sample(tf.constant(seed), tf.constant(row, tf.int64)).numpy()
            p_value = goodness_of_fit.compute_variance_p_value(drawn, variance)
            assert p_value > goodness_of_fit.FALSE_FAILURE
            p_value = goodness_of_fit.compute_variance_p_value(drawn, variance * 1.1)
            assert p_value < goodness_of_fit.FALSE_FAILURE
        assert not np.any(sample(tf.constant(seed), tf.constant(1, tf.int64)))
