"""The discrete Gaussian sampler: exact facts, the exact law, goodness of fit."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from distributed_dp import alias_table, discrete_gaussian
from distributed_dp.accounting import SAMPLER_TOTAL_VARIATION
from distributed_dp.discrete_gaussian import (
    MAX_SCALE,
    build_discrete_gaussian_sampler,
    sample_discrete_gaussian,
)
from tests.distributed_dp import goodness_of_fit, integer_law

_LOWER = discrete_gaussian._LOWER_RATIO
_SCALES = [0, 1e-3, 0.3, 1, 7.5, 1e3, 1e6, 2.0**24, 2.0**33, MAX_SCALE]


def _compute_law(sampler, row: int = 0, *, strides=None):
    """Returns the exact law of the sampler's row, from its tables and strides."""
    total = None
    strides = sampler.strides if strides is None else strides
    for table, stride in zip(sampler.tables, strides, strict=True):
        index = row if table.packed.shape[0] > 1 else 0
        columns = alias_table.compute_table_law(table, index)
        law = integer_law.compute_table_laws([columns], table.offset)[0]
        if total is None:
            assert stride == 1
            total = law
        else:
            total = integer_law.add_multiple(total, stride, law)
    return total


def _measure_distance(sampler, row: int = 0, **options):
    variance = sampler.variances[row]
    law = _compute_law(sampler, row, **options)
    radius = max(max(law), math.ceil(14 * math.sqrt(variance)))
    exact = integer_law.compute_discrete_gaussian(variance, radius)
    return integer_law.compute_total_variation(law, exact)


class TestExactLaw:
    """The claim of the module, a total variation, computed exactly."""

    @pytest.mark.parametrize("scale", [0.3, 45.0, 60.0, 100.0, 1000.0 / 3])
    def test_distance_is_within_the_limit(self, scale: float) -> None:
        sampler = build_discrete_gaussian_sampler([Fraction(scale) ** 2])
        assert len(sampler.tables) == (1 if scale < 50 else 2)
        assert _measure_distance(sampler) <= SAMPLER_TOTAL_VARIATION

    def test_of_three_levels(self) -> None:
        sampler = build_discrete_gaussian_sampler([Fraction(1800) ** 2])
        assert len(sampler.tables) == 3
        assert _measure_distance(sampler) <= SAMPLER_TOTAL_VARIATION

    def test_of_the_widest_family(self) -> None:
        # The stride is 2 and the least scale above it is 12, where the composition is
        # at its worst.
        smallest = 2 * math.hypot(12.0, float(_LOWER)) * (1 + 1e-6)
        sampler = build_discrete_gaussian_sampler(
            [Fraction(smallest) ** 2, Fraction(380) ** 2]
        )
        assert len(sampler.tables) == 2
        for row in range(2):
            assert _measure_distance(sampler, row) <= SAMPLER_TOTAL_VARIATION

    @pytest.mark.parametrize("scale", [60.0, 100.0])
    def test_a_wrong_stride_is_rejected(self, scale: float) -> None:
        sampler = build_discrete_gaussian_sampler([Fraction(scale) ** 2])
        wrong = (1, sampler.strides[1] + 1)
        assert _measure_distance(sampler, strides=wrong) > 1e-3

    @pytest.mark.parametrize("scale", [60.0, 100.0])
    def test_a_missing_level_is_rejected(self, scale: float) -> None:
        # The variance of the lower level left out of the upper one's.
        sampler = build_discrete_gaussian_sampler([Fraction(scale) ** 2])
        stride = sampler.strides[1]
        upper = Fraction(scale) ** 2 / stride**2
        half_width = sampler.tables[1].offset
        weights = alias_table.compute_discrete_gaussian_weights(upper, half_width)
        wrong = discrete_gaussian.DiscreteGaussianSampler(
            sampler.variances,
            (sampler.tables[0], alias_table.build_alias_table([weights])),
            sampler.strides,
            False,
        )
        assert _measure_distance(wrong) > 1e-5

    def test_a_lower_level_that_is_too_narrow_is_rejected(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # With a = 1.2 the composition itself misses the limit: the law is compared to
        # that precision, and the ratio is no idle choice.
        monkeypatch.setattr(discrete_gaussian, "_LOWER_RATIO", Fraction(6, 5))
        discrete_gaussian._build_sampler.cache_clear()
        try:
            sampler = build_discrete_gaussian_sampler([Fraction(60) ** 2])
        finally:
            discrete_gaussian._build_sampler.cache_clear()
        assert _measure_distance(sampler) > SAMPLER_TOTAL_VARIATION


@pytest.mark.parametrize("scale", [60.0, 1e3, 1e6, 2.0**33, MAX_SCALE])
def test_levels_add_up_to_the_scale_and_the_limit(scale: float) -> None:
    sampler = build_discrete_gaussian_sampler([Fraction(scale) ** 2])
    distance = mpmath.mpf(0)
    remaining = Fraction(scale) ** 2
    for index in range(1, len(sampler.strides)):
        step, rest = divmod(sampler.strides[index], sampler.strides[index - 1])
        assert rest == 0
        remaining = remaining / step**2 - _LOWER**2
        # The part below has scale `_LOWER` in units of the stride; b^2 of the proof.
        b_squared = float(1 / (1 / _LOWER**2 + 1 / remaining))
        distance += _compute_composition_bound(b_squared)
        distance += _compute_table_bound(sampler.tables[index - 1], _LOWER * step)
    distance += _compute_table_bound(sampler.tables[-1], math.sqrt(remaining))
    assert distance <= SAMPLER_TOTAL_VARIATION


def _compute_composition_bound(b_squared: float) -> mpmath.mpf:
    return mpmath.mpf("2.0001") * mpmath.exp(-2 * mpmath.pi**2 * b_squared)


def _compute_table_bound(table, scale) -> mpmath.mpf:
    """Returns what a table misses: its tails and the rounding of its masses."""
    tail = 2 * mpmath.exp(-((mpmath.mpf(table.offset) / float(scale)) ** 2) / 2)
    return tail + mpmath.mpf(2) ** -(32 - table.index_bits + alias_table.LOW_BITS)


class TestFamilies:
    def test_rows_have_their_own_scale(self, seed: np.ndarray) -> None:
        scales = [1000.0, 1500.0, 250.0]
        sampler = build_discrete_gaussian_sampler([Fraction(s) ** 2 for s in scales])
        sample = tf.function(lambda seed, row: sampler.sample([1 << 17], seed, row=row))
        for row, scale in enumerate(scales):
            drawn = sample(tf.constant(seed), tf.constant(row, tf.int64)).numpy()
            for factor in (1, 1.05):
                variance = (scale * factor) ** 2
                p_value = goodness_of_fit.compute_variance_p_value(drawn, variance)
                is_right = p_value > goodness_of_fit.FALSE_FAILURE
                assert is_right == (factor == 1)

    def test_a_family_is_as_good_as_its_members(self) -> None:
        variances = [Fraction(9), Fraction(1, 4), Fraction(0)]
        sampler = build_discrete_gaussian_sampler(variances)
        for row in range(2):
            assert _measure_distance(sampler, row) <= SAMPLER_TOTAL_VARIATION
        assert _compute_law(sampler, 2) == {0: 1}

    @pytest.mark.parametrize("largest", [45.0, 190.0, 390.0, 1e3, 12345.0, 1e5])
    def test_scales_within_the_stated_range_are_built(self, largest: float) -> None:
        for step in range(20):
            top = largest * (1 + step / 20)
            build_discrete_gaussian_sampler(
                [Fraction(top / 16) ** 2, Fraction(top) ** 2]
            )

    @pytest.mark.parametrize("scales", [(1.0, 500.0), (0.0, 1e4), (100.0, 1e6)])
    def test_wide_ranges_are_refused(self, scales: tuple[float, float]) -> None:
        with pytest.raises(ValueError, match="`variances` must have scales within"):
            build_discrete_gaussian_sampler([Fraction(s) ** 2 for s in scales])

    def test_no_variance_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`variances` must not be empty"):
            build_discrete_gaussian_sampler([])

    @pytest.mark.parametrize("variance", [-1.0, math.nan, math.inf, 2.0**81])
    def test_bad_variances_are_refused(self, variance: float) -> None:
        with pytest.raises(ValueError, match="`variances` must be finite"):
            build_discrete_gaussian_sampler([1.0, variance])


class TestSampleFacts:
    @pytest.mark.parametrize("scale", _SCALES)
    def test_every_scale_is_drawn(self, scale: float, seed: np.ndarray) -> None:
        drawn = sample_discrete_gaussian(scale, [100, 10], tf.constant(seed))
        again = sample_discrete_gaussian(scale, [100, 10], tuple(seed.tolist()))
        other = sample_discrete_gaussian(scale, [100, 10], tf.constant(seed ^ 1))
        assert drawn.dtype == tf.int64
        assert drawn.shape == [100, 10]
        assert np.array_equal(drawn, again)
        assert np.array_equal(drawn, other) == (scale < 0.1)
        assert np.abs(drawn).max() <= 10 * scale
        if scale >= 1:
            assert np.abs(drawn).max() >= 2 * scale

    @pytest.mark.parametrize("scale", [0, 1e-3])
    def test_no_noise_is_zero(self, scale: float, seed: np.ndarray) -> None:
        drawn = sample_discrete_gaussian(scale, [1000], tf.constant(seed))
        assert not np.any(drawn)

    @pytest.mark.parametrize("scale", [7.5, 1e3, 2.0**33])
    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_same_bits_compiled(
        self, scale: float, jit_compile: bool, seed: np.ndarray
    ) -> None:
        sample = tf.function(
            lambda seed: sample_discrete_gaussian(scale, [5000], seed),
            jit_compile=jit_compile,
        )
        eager = sample_discrete_gaussian(scale, [5000], tf.constant(seed))
        assert np.array_equal(eager, sample(tf.constant(seed)))

    @pytest.mark.parametrize("scale", [-1.0, -1e-9, math.nan, math.inf, 2.0**40 + 1])
    def test_bad_scales_are_refused(self, scale: float, seed: np.ndarray) -> None:
        with pytest.raises(ValueError, match="`scale` must be in"):
            sample_discrete_gaussian(scale, [3], tf.constant(seed))

    @pytest.mark.parametrize("scale", [np.int64(2**33), np.float32(2.0**33), 2**33])
    def test_the_type_of_the_scale_does_not_matter(self, scale, seed) -> None:
        drawn = sample_discrete_gaussian(scale, [100], tf.constant(seed))
        expected = sample_discrete_gaussian(2.0**33, [100], tf.constant(seed))
        assert np.array_equal(drawn, expected)

    def test_the_sampler_is_narrow_where_int32_holds_it(self) -> None:
        for scale, wide in ((2.0**24, False), (2.0**24 * 1.01, True)):
            sampler = build_discrete_gaussian_sampler([Fraction(scale) ** 2])
            assert sampler.wide == wide
            reach = sum(
                table.offset * stride
                for table, stride in zip(sampler.tables, sampler.strides, strict=True)
            )
            assert reach < (2**63 if wide else 2**31)

    def test_the_widest_draw_stays_within_int64(self) -> None:
        sampler = build_discrete_gaussian_sampler([Fraction(MAX_SCALE) ** 2])
        pairs = zip(sampler.tables, sampler.strides, strict=True)
        assert sum(table.offset * stride for table, stride in pairs) < 2**62


class TestFit:
    _NUM = 1 << 19

    def _sample(self, scale: float, seed: np.ndarray) -> np.ndarray:
        sample = tf.function(
            lambda seed: sample_discrete_gaussian(scale, [self._NUM], seed)
        )
        return sample(tf.constant(seed)).numpy()

    @pytest.mark.parametrize("scale", [0.3, 1.0, 7.5, 40.0, 60.0])
    def test_small_scales(self, scale: float, seed: np.ndarray) -> None:
        drawn = self._sample(scale, seed)
        radius = math.ceil(4 * scale) + 1
        step = max(1, round(scale / 5))
        keep = slice(None, None, step)
        edges = np.arange(-radius, radius + 1)[keep]

        def fits(scale: float, shift: int = 0) -> bool:
            cdf = integer_law.compute_gaussian_cdf(scale, radius, shift)[keep]
            p_value = goodness_of_fit.compute_p_value(drawn, edges, cdf)
            return p_value > goodness_of_fit.FALSE_FAILURE

        assert fits(scale)
        assert not fits(scale * 1.05)
        assert not fits(scale / 1.05)
        assert not fits(scale, shift=1)
        assert not fits(scale, shift=-1)

    @pytest.mark.parametrize("scale", [1e3, 1e6, 2.0**38])
    def test_large_scales(self, scale: float, seed: np.ndarray) -> None:
        drawn = self._sample(scale, seed)
        edges = np.round(np.linspace(-3.5, 3.5, 64) * scale)

        def fits(scale: float, shift: float = 0.0) -> bool:
            cdf = stats.norm.cdf((edges + 0.5 - shift) / scale)
            p_value = goodness_of_fit.compute_p_value(drawn, edges, cdf)
            return p_value > goodness_of_fit.FALSE_FAILURE

        assert fits(scale)
        assert not fits(scale * 1.05)
        assert not fits(scale / 1.05)
        assert not fits(scale, shift=0.03 * scale)

    @pytest.mark.parametrize("scale", [60.0, 1e3, 1e6])
    def test_residues_are_uniform(self, scale: float, seed: np.ndarray) -> None:
        # A level with a wrong law or offset shows modulo the strides.
        drawn = self._sample(scale, seed)
        sampler = build_discrete_gaussian_sampler([Fraction(scale) ** 2])
        for modulus in {2, 3, 5, *sampler.strides[1:]}:
            modulus = min(modulus, 64)
            counts = np.bincount(drawn % modulus, minlength=modulus)
            assert stats.chisquare(counts).pvalue > goodness_of_fit.FALSE_FAILURE

    def test_draws_are_independent(self, seed: np.ndarray) -> None:
        drawn = self._sample(60.0, seed).astype(np.float64) / 60.0
        for lag in (1, 2, 1024):
            product = drawn[:-lag] * drawn[lag:]
            p_value = goodness_of_fit.compute_mean_p_value(product, 0.0, 1.0)
            assert p_value > goodness_of_fit.FALSE_FAILURE


def test_the_limit_is_what_the_accountant_charges() -> None:
    assert discrete_gaussian.SAMPLER_TOTAL_VARIATION == SAMPLER_TOTAL_VARIATION
