"""Tests of the perturbations: exact facts, then laws that reject the wrong ones."""

import fractions

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from distributed_dp import random_bits
from tests.distributed_dp.goodness_of_fit import (
    FALSE_FAILURE,
    compute_mean_p_value,
    compute_variance_p_value,
)
from upcycled_fl import perturbation

LARGEST = np.finfo(np.float32).max
SIGMA = 0.8
NUM_DRAWS = 10_000


def as_tensors(*arrays) -> tuple[tf.Tensor, ...]:
    return tuple(tf.constant(np.float32(array)) for array in arrays)


def compute_square(weights) -> fractions.Fraction:
    """Returns the squared joint norm, exactly."""
    values = np.concatenate([np.ravel(weight) for weight in weights])
    return sum(
        (fractions.Fraction(float(value)) ** 2 for value in values),
        fractions.Fraction(0),
    )


def check_norm(weights, l2_clip: float) -> None:
    limit = fractions.Fraction(l2_clip) ** 2
    assert compute_square(weights) <= limit * (1 + fractions.Fraction(1, 10**13))


def flatten(weights) -> np.ndarray:
    return np.concatenate([np.ravel(weight) for weight in weights])


def fit(values: np.ndarray, law) -> float:
    """Returns the p-value of Kolmogorov and Smirnov."""
    return float(stats.kstest(values, law.cdf).pvalue)


class TestClip:
    def test_by_hand(self):
        clipped = perturbation.clip_to_norm(as_tensors([3.0], [[4.0]]), 2.5)
        # Jointly of norm 5.
        assert clipped[0].numpy().tolist() == [1.5]
        assert clipped[1].numpy().tolist() == [[2.0]]

    def test_identity_to_the_boundary(self):
        weights = as_tensors([3.0, 0.0], [[-4.0]])
        for l2_clip in (5.0, 5.0001, 1e30):
            same = perturbation.clip_to_norm(weights, l2_clip)
            for one, two in zip(weights, same, strict=True):
                assert np.array_equal(one, two)
        above = as_tensors([3.0, 0.0], [[np.nextafter(np.float32(-4), np.float32(-5))]])
        clipped = perturbation.clip_to_norm(above, 5.0)
        assert not np.array_equal(flatten(clipped), flatten(above))
        check_norm(clipped, 5.0)
        zeros = perturbation.clip_to_norm(as_tensors([0.0], [[0.0]]), 5.0)
        assert flatten(zeros).tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("size", [0.1, 1e30])
    def test_weights_that_are_not_finite_become_zero(self, bad, size):
        for arrays in (([bad, size], [size]), ([size, size], [bad])):
            clipped = perturbation.clip_to_norm(as_tensors(*arrays), 1.0)
            assert [part.shape for part in clipped] == [[2], [1]]
            assert flatten(clipped).tolist() == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize(
        "weights",
        [
            ([1e30, -1e30], [1e30]),
            ([LARGEST] * 1000, [-LARGEST]),
            ([LARGEST, 1e-30], [1.0]),
            ([1e19, 1e-19], [1e20]),
        ],
    )
    @pytest.mark.parametrize("l2_clip", [1e-6, 1.0, 10.0, 1e6])
    def test_squares_that_overflow(self, weights, l2_clip):
        clipped = perturbation.clip_to_norm(as_tensors(*weights), l2_clip)
        check_norm(clipped, l2_clip)
        assert np.linalg.norm(flatten(clipped)) == pytest.approx(l2_clip, rel=1e-6)
        exact = np.float64(flatten(weights))
        expected = exact * (l2_clip / np.linalg.norm(exact))
        np.testing.assert_allclose(flatten(clipped), expected, rtol=1e-6, atol=1e-36)

    def test_the_bound_holds_in_exact_arithmetic(self, rng):
        exceeded = 0
        for _ in range(100):
            weights = 10 ** rng.uniform(0, 20) * rng.normal(size=20)
            clipped = perturbation.clip_to_norm(as_tensors(weights), 0.7)
            check_norm(clipped, 0.7)
            # Rounding to the nearest goes beyond.
            exact = np.float64(np.float32(weights))
            nearest = np.float32(exact * (0.7 / np.linalg.norm(exact)))
            limit = fractions.Fraction(0.7) ** 2 * (1 + fractions.Fraction(1, 10**13))
            exceeded += compute_square([nearest]) > limit
        assert exceeded > 10

    def test_distances_do_not_grow(self, rng):
        for scale in (1e-3, 1.0, 100.0):
            one = rng.normal(size=8)
            two = one + scale * rng.normal(size=8)
            clipped = [
                flatten(perturbation.clip_to_norm(as_tensors(each), 2.0))
                for each in (one, two)
            ]
            distance = np.linalg.norm(np.float64(clipped[0]) - clipped[1])
            # Coordinates of at most 2 round by at most 2**-23.
            assert distance <= np.linalg.norm(one - two) + 2 * 8**0.5 * 2.0**-23

    @pytest.mark.parametrize("l2_clip", [0.0, -1.0, np.inf, np.nan])
    def test_bad_clips_are_refused(self, l2_clip):
        with pytest.raises(ValueError, match="`l2_clip` must be positive and finite"):
            perturbation.clip_to_norm(as_tensors([1.0]), l2_clip)


class TestGaussian:
    def add(self, weights, stddev, seed) -> np.ndarray:
        return flatten(perturbation.add_gaussian_noise(weights, stddev, seed))

    def test_none_is_the_identity(self, seed):
        weights = as_tensors([1.0, -0.0, np.nan], [[1e30]])
        same = perturbation.add_gaussian_noise(weights, 0.0, seed)
        for one, two in zip(weights, same, strict=True):
            assert one.numpy().tobytes() == two.numpy().tobytes()

    def test_a_draw_is_a_function_of_the_seed(self, seed):
        weights = as_tensors(np.ones(3), np.ones([2, 2]))
        one = self.add(weights, SIGMA, seed)
        assert np.array_equal(one, self.add(weights, SIGMA, tf.constant(seed)))
        assert not np.any(one == self.add(weights, SIGMA, seed ^ [0, 1]))
        assert not np.any(one == self.add(weights, SIGMA, seed ^ [1, 0]))
        compiled = tf.function(perturbation.add_gaussian_noise, jit_compile=True)
        np.testing.assert_allclose(
            flatten(compiled(weights, SIGMA, seed)), one, rtol=1e-5
        )

    def test_it_is_added_and_scales(self, seed):
        zeros, weights = as_tensors(np.zeros(5)), as_tensors(np.arange(5.0))
        noise = self.add(zeros, 1.0, seed)
        assert np.array_equal(self.add(zeros, 2.0, seed), 2 * noise)
        assert not np.any(noise == 0)
        assert np.array_equal(self.add(weights, 1.0, seed), weights[0] + noise)

    def test_law(self, seed):
        noise = self.add(
            as_tensors(np.zeros([100, 1000]), np.zeros(100_000)), SIGMA, seed
        )
        assert fit(noise, stats.norm(scale=SIGMA)) > FALSE_FAILURE
        assert compute_variance_p_value(noise, SIGMA**2) > FALSE_FAILURE
        assert compute_mean_p_value(noise, 0.0, SIGMA) > FALSE_FAILURE
        # The variance for the standard deviation, 5 % more and less, another law of the
        # same variance, a shift.
        for wrong in (SIGMA**2, 1.05 * SIGMA, 0.95 * SIGMA, SIGMA**0.5):
            assert fit(noise, stats.norm(scale=wrong)) < FALSE_FAILURE
            assert compute_variance_p_value(noise, wrong**2) < FALSE_FAILURE
        assert fit(noise, stats.laplace(scale=SIGMA / 2**0.5)) < FALSE_FAILURE
        assert compute_mean_p_value(noise, 0.02, SIGMA) < FALSE_FAILURE

    def test_tensors_and_seeds_are_independent(self, seed):
        def correlate(one, two) -> float:
            products = np.float64(one) * two / SIGMA**2
            return compute_mean_p_value(products, 0.0, 1.0)

        zeros = as_tensors(np.zeros(50_000), np.zeros(50_000))
        first, second = np.split(self.add(zeros, SIGMA, seed), 2)
        (other, _) = np.split(self.add(zeros, SIGMA, seed ^ [0, 1]), 2)
        assert correlate(first, second) > FALSE_FAILURE
        assert correlate(first, other) > FALSE_FAILURE
        # One stream for both; a twentieth in common.
        assert correlate(first, first) < FALSE_FAILURE
        assert correlate(first, second + 0.05 * first) < FALSE_FAILURE

    @pytest.mark.parametrize("stddev", [-0.1, np.inf, np.nan])
    def test_bad_deviations_are_refused(self, stddev):
        with pytest.raises(ValueError, match="`stddev` must be finite and >= 0"):
            perturbation.add_gaussian_noise(as_tensors([1.0]), stddev, [1, 2])


RATE = 20.0


def draw_many(shapes, rng, count=NUM_DRAWS) -> np.ndarray:
    """Returns [count, dim] draws, each from its own seed."""
    seeds = tf.constant(rng.integers(0, 2**31, size=[count, 2]), tf.int32)

    @tf.function
    def draw(seeds):
        def draw_one(seed):
            parts = perturbation.draw_spherical_noise(shapes, RATE, seed)
            return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

        return tf.map_fn(draw_one, seeds, fn_output_signature=tf.float32)

    return np.float64(draw(seeds).numpy())


def square_cosines(draws: np.ndarray, axis: np.ndarray) -> np.ndarray:
    """Returns the squared cosine of each draw with an axis: Beta if uniform."""
    norms = np.linalg.norm(draws, axis=1) * np.linalg.norm(axis)
    return (draws @ axis / norms) ** 2


def test_the_largest_and_smallest_words_are_finite_draws(monkeypatch):
    """TensorFlow's own normal draws end at 5.68 standard deviations."""
    words = tf.constant([0, 1 << 63, (1 << 64) - 1], tf.uint64)
    monkeypatch.setattr(random_bits, "draw_uint64", lambda seed, shape: words)
    noise = flatten(
        perturbation.add_gaussian_noise(as_tensors(np.zeros(3)), 1.0, [1, 2])
    )
    assert noise[2] == -noise[0] == pytest.approx(stats.norm.isf(2.0**-53), rel=1e-6)
    assert 0 < noise[1] < 1e-15
    (spherical,) = perturbation.draw_spherical_noise([(3,)], 1.0, [1, 2])
    expected = 53 * np.log(2) + np.log(2) + 2.0**-53
    assert np.linalg.norm(spherical) == pytest.approx(expected, rel=1e-6)


class TestSphericalShape:
    def test_shapes(self, seed):
        parts = perturbation.draw_spherical_noise(
            [(2, 3), tf.TensorShape([4]), []], RATE, seed
        )
        assert [part.shape for part in parts] == [[2, 3], [4], []]
        assert all(part.dtype == tf.float32 for part in parts)

    def test_a_draw_is_a_function_of_the_seed(self, seed):
        def draw(seed, rate=RATE, shapes=((3,), (2, 2))):
            return flatten(perturbation.draw_spherical_noise(shapes, rate, seed))

        one = draw(seed)
        assert np.array_equal(one, draw(tf.constant(seed)))
        # The division into tensors is not part of the law.
        assert np.array_equal(one, draw(seed, shapes=((7,),)))
        for other in (seed ^ [0, 1], seed ^ [1, 0]):
            assert not np.any(one == draw(other))
        assert np.array_equal(2 * one, draw(seed, rate=RATE / 2))
        compiled = tf.function(perturbation.draw_spherical_noise, jit_compile=True)
        np.testing.assert_allclose(
            flatten(compiled([(7,)], RATE, seed)), one, rtol=1e-5
        )

    @pytest.mark.parametrize("rate", [0.0, -1.0, np.inf, np.nan])
    def test_bad_rates_are_refused(self, rate):
        with pytest.raises(ValueError, match="`rate` must be positive and finite"):
            perturbation.draw_spherical_noise([(2,)], rate, [1, 2])

    @pytest.mark.parametrize("shapes", [[], [(0,)]])
    def test_no_coordinates_are_refused(self, shapes):
        with pytest.raises(ValueError, match="`shapes` must have coordinates"):
            perturbation.draw_spherical_noise(shapes, RATE, [1, 2])


class TestSphericalLaw:
    def test_norms_in_five_dimensions(self, rng):
        draws = draw_many([(2,), (1, 3)], rng)
        norms = np.linalg.norm(draws, axis=1)
        assert fit(norms, stats.gamma(5, scale=1 / RATE)) > FALSE_FAILURE
        for dim, rate in ((4, RATE), (6, RATE), (5, 1.05 * RATE), (5, 0.95 * RATE)):
            assert fit(norms, stats.gamma(dim, scale=1 / rate)) < FALSE_FAILURE
        # Independent Laplace coordinates of this rate, and each tensor by itself.
        laplace = rng.laplace(scale=1 / RATE, size=draws.shape)
        apart = np.hypot(*(rng.gamma(dim, 1 / RATE, len(draws)) for dim in (2, 3)))
        for wrong_norms in (np.linalg.norm(laplace, axis=1), apart):
            assert fit(wrong_norms, stats.gamma(5, scale=1 / RATE)) < FALSE_FAILURE
            assert stats.ks_2samp(norms, wrong_norms).pvalue < FALSE_FAILURE

    def test_directions_in_five_dimensions(self, rng):
        draws = draw_many([(5,)], rng)
        cube = rng.uniform(-1, 1, size=draws.shape)
        laplace = rng.laplace(size=draws.shape)
        law = stats.beta(0.5, 2.0)
        for axis in np.array([*np.eye(5), np.ones(5), [1, -1, 0, 0, 0]]):
            assert fit(square_cosines(draws, axis), law) > FALSE_FAILURE
            # As many on either side.
            ahead = int(np.sum(draws @ axis > 0))
            assert stats.binomtest(ahead, len(draws)).pvalue > FALSE_FAILURE
        right = square_cosines(draws, np.eye(5)[0])
        for wrong in (cube, laplace):
            found = square_cosines(wrong, np.eye(5)[0])
            assert fit(found, law) < FALSE_FAILURE
            assert stats.ks_2samp(found, right).pvalue < FALSE_FAILURE
        # One side alone.
        ahead = int(np.sum(np.abs(draws[:, 0]) > 0))
        assert stats.binomtest(ahead, len(draws)).pvalue < FALSE_FAILURE

    def test_norm_and_direction_are_independent(self, rng):
        draws = draw_many([(5,)], rng)
        norms = np.linalg.norm(draws, axis=1)
        for part in (square_cosines(draws, np.eye(5)[0]), np.sign(draws[:, 0])):
            assert stats.spearmanr(norms, part).pvalue > FALSE_FAILURE
        # A coordinate as it is depends on the norm.
        assert stats.spearmanr(norms, np.abs(draws[:, 0])).pvalue < FALSE_FAILURE

    def test_a_coordinate_in_three_dimensions(self, rng):
        """Integrated over the other two: P[n_1 > x] = (2 + a x) exp(-a x) / 4."""

        def compute_cdf(x, rate=RATE):
            scaled = rate * np.abs(x)
            tail = (2 + scaled) * np.exp(-scaled) / 4
            return np.where(x > 0, 1 - tail, tail)

        draws = draw_many([(3,)], rng)[:, 1]
        assert stats.kstest(draws, compute_cdf).pvalue > FALSE_FAILURE
        for wrong in (0.85 * RATE, 1.15 * RATE):
            fitted = stats.kstest(draws, lambda x, wrong=wrong: compute_cdf(x, wrong))
            assert fitted.pvalue < FALSE_FAILURE
        assert fit(draws, stats.laplace(scale=1 / RATE)) < FALSE_FAILURE
        # Laplace of the right variance: 4 / rate^2.
        assert fit(draws, stats.laplace(scale=2**0.5 / RATE)) < FALSE_FAILURE

    def test_one_dimension_is_laplace(self, rng):
        draws = draw_many([()], rng)[:, 0]
        assert fit(draws, stats.laplace(scale=1 / RATE)) > FALSE_FAILURE
        sizes = np.abs(draws)
        assert fit(sizes, stats.expon(scale=1 / RATE)) > FALSE_FAILURE
        for wrong in (0.9, 1.1):
            law = stats.expon(scale=wrong / RATE)
            assert fit(sizes, law) < FALSE_FAILURE
        # One side alone.
        assert fit(sizes, stats.laplace(scale=1 / RATE)) < FALSE_FAILURE

    def test_many_dimensions(self, seed):
        dim = 200_000
        parts = perturbation.draw_spherical_noise([(400, 499), (400,)], 2.0, seed)
        noise = np.float64(flatten(parts))
        norm = float(np.linalg.norm(noise))

        def compute_tails(law) -> float:
            return 2 * float(min(law.cdf(norm), law.sf(norm)))

        assert compute_tails(stats.gamma(dim, scale=0.5)) > FALSE_FAILURE
        for wrong in (0.5 * 0.95, 0.5 * 1.05):
            assert compute_tails(stats.gamma(dim, scale=wrong)) < FALSE_FAILURE
        assert compute_tails(stats.gamma(dim**0.5, scale=0.5)) < FALSE_FAILURE
        coordinates = noise * dim**0.5 / norm
        assert fit(coordinates, stats.norm()) > FALSE_FAILURE
        width = 3**0.5
        for wrong_law in (
            stats.uniform(-width, 2 * width),
            stats.laplace(scale=0.5**0.5),
        ):
            assert fit(coordinates, wrong_law) < FALSE_FAILURE
