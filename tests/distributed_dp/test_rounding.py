"""Randomised and conditional rounding: support, mean, and the bound on the norm."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from distributed_dp import rounding
from distributed_dp.accounting import compute_max_squared_norm
from tests.distributed_dp import goodness_of_fit

_DIM = 256


def _compute_exact_squared_norm(values: np.ndarray) -> int:
    return sum(int(value) ** 2 for value in values.reshape(-1))


def _round_many(x: np.ndarray, num: int, seed: np.ndarray) -> np.ndarray:
    """Returns `num` independent roundings of x, [num, d]."""
    tiled = tf.reshape(tf.tile(tf.constant(x)[tf.newaxis], [num, 1]), [-1])
    return rounding.round_randomly(tiled, tf.constant(seed)).numpy().reshape(num, -1)


def _compute_bias_p_value(drawn: np.ndarray, x: np.ndarray) -> float:
    """Two-sided p-value of the largest coordinate-wise z-score, Bonferroni."""
    fraction = x - np.floor(x)
    stddev = np.sqrt(fraction * (1 - fraction) / len(drawn))
    scores = np.abs(drawn.mean(axis=0) - x) / stddev
    return float(min(1.0, 2 * stats.norm.sf(scores.max()) * len(x)))


class TestRoundRandomly:
    def test_values_are_the_two_neighbours(
        self, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        x = rng.normal(size=_DIM).astype(np.float32) * 5
        drawn = _round_many(x, 200, seed)
        up = drawn - np.floor(x)
        assert set(np.unique(up)) == {0.0, 1.0}

    def test_integers_stay(self, seed: np.ndarray) -> None:
        x = np.float32([0, -0.0, 1, -1, 7, -7, 2**23, -(2**24), 2**30])
        assert np.array_equal(_round_many(x, 100, seed), np.tile(x, [100, 1]))

    def test_mean_is_x_and_deterministic_rounding_is_rejected(
        self, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        whole = rng.integers(-4, 4, size=64)
        x = (whole + rng.uniform(0.05, 0.95, size=64)).astype(np.float32)
        drawn = _round_many(x, 20_000, seed).astype(np.float64)
        assert _compute_bias_p_value(drawn, x) > goodness_of_fit.FALSE_FAILURE
        nearest = np.tile(np.rint(x), [20_000, 1])
        fair_coin = np.floor(x) + (np.arange(20_000) % 2)[:, np.newaxis]
        slightly_high = drawn + (np.arange(20_000) % 25 == 0)[:, np.newaxis]
        for wrong in (nearest, fair_coin, slightly_high):
            assert _compute_bias_p_value(wrong, x) < goodness_of_fit.FALSE_FAILURE

    def test_coordinates_are_independent(self, seed: np.ndarray) -> None:
        up = _round_many(np.full([2], 0.5, np.float32), 1 << 16, seed)
        agree = int(np.sum(up[:, 0] == up[:, 1]))
        p_value = stats.binomtest(agree, len(up)).pvalue
        assert p_value > goodness_of_fit.FALSE_FAILURE

    def test_same_seed_same_draw(self, seed: np.ndarray) -> None:
        x = np.linspace(-3, 3, _DIM, dtype=np.float32)
        first = rounding.round_randomly(tf.constant(x), tf.constant(seed))
        again = rounding.round_randomly(tf.constant(x), tf.constant(seed))
        other = rounding.round_randomly(tf.constant(x), tf.constant(seed ^ 1))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)


@functools.cache
def _build_rounding(bound: float, mode: str, max_tries: int):
    """Builds a function of x and seed; traced once for each test of the module."""

    def run(x, seed):
        rounded = rounding.round_conditionally(x, bound, seed, max_tries=max_tries)
        return rounded.values, rounded.squared_norm, rounded.num_redraws

    if mode == "eager":
        return run
    return tf.function(run, jit_compile=mode == "xla")


def _round(x, bound: float, seed, mode="eager", max_tries=rounding.MAX_TRIES):
    run = _build_rounding(bound, mode, max_tries)
    values, squared_norm, num_redraws = run(tf.constant(x, tf.float32), seed)
    return values.numpy(), float(squared_norm), int(num_redraws)


def _build_adversarial_vectors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    normal = rng.normal(size=_DIM).astype(np.float32)
    return {
        "zeros": np.zeros(_DIM, np.float32),
        "within": normal / np.linalg.norm(normal) * 10,
        "just_below_one": np.full(_DIM, 0.999, np.float32),
        "one_spike": np.eye(1, _DIM, dtype=np.float32)[0] * 21.5,
        "unclipped": normal * 100,
        "huge": normal * np.float32(1e30),
        "largest": np.full(_DIM, np.finfo(np.float32).max, np.float32),
        "infinite": np.where(np.arange(_DIM) == 3, np.inf, normal).astype(np.float32),
        "minus_infinite": np.full(_DIM, -np.inf, np.float32),
        "nan": np.where(np.arange(_DIM) == 3, np.nan, normal).astype(np.float32),
        "all_nan": np.full(_DIM, np.nan, np.float32),
        "tiny": np.full(_DIM, -1e-30, np.float32),
    }


_VECTORS = list(_build_adversarial_vectors(np.random.default_rng(0)))


class TestRoundConditionally:
    @pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
    @pytest.mark.parametrize("name", _VECTORS)
    def test_the_bound_is_never_exceeded(
        self, mode: str, name: str, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        x = _build_adversarial_vectors(rng)[name]
        bounds = (0.0, 0.99, 110.0, 460.0) if mode == "eager" else (110.0,)
        for bound in bounds:
            for max_tries in (1, 3) if mode == "eager" else (3,):
                values, squared_norm, num_redraws = _round(
                    x, bound, seed, mode, max_tries
                )
                assert np.array_equal(values, np.floor(values))
                exact = _compute_exact_squared_norm(values)
                assert exact <= bound
                assert squared_norm == exact
                assert 0 <= num_redraws <= max_tries

    def test_fallback_rounds_toward_zero(self, seed: np.ndarray) -> None:
        # A bound that random rounding meets with probability 2**-256.
        x = np.where(np.arange(_DIM) % 2, 1.5, -1.5).astype(np.float32)
        values, squared_norm, num_redraws = _round(x, 256.0, seed, max_tries=5)
        assert np.array_equal(values, np.trunc(x))
        assert squared_norm == 256
        assert num_redraws == 5

    def test_fallback_of_the_fallback_is_zero(self, seed: np.ndarray) -> None:
        x = np.full(_DIM, 1.5, np.float32)
        values, squared_norm, num_redraws = _round(x, 255.9, seed)
        assert not values.any()
        assert squared_norm == 0
        assert num_redraws == rounding.MAX_TRIES

    def test_an_accepted_draw_is_the_plain_one(
        self, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        x = rng.normal(size=_DIM).astype(np.float32)
        _, _, num_redraws = _round(x, 1e6, seed)
        assert num_redraws == 0
        values = np.stack(
            [_round(x, 1e6, seed + np.int32([0, i]))[0] for i in range(9)]
        )
        assert set(np.unique(values - np.floor(x))) == {0.0, 1.0}

    def test_the_bound_itself_is_accepted(self, seed: np.ndarray) -> None:
        x = np.full(_DIM, 2.0, np.float32)
        values, squared_norm, num_redraws = _round(x, 4.0 * _DIM, seed)
        assert np.array_equal(values, x)
        assert squared_norm == 4 * _DIM
        assert num_redraws == 0

    def test_redraws_are_counted_and_fresh(self, seed: np.ndarray) -> None:
        # One coordinate of 1/2: each draw is within the bound with probability 1/2,
        # so that redraws are geometric. A loop that drew the same again would not end.
        x = np.zeros(8, np.float32)
        x[0] = 0.5
        results = [
            _round(x, 0.5, tf.constant(seed + np.int32([i, 0])), "graph")
            for i in range(1000)
        ]
        redraws = np.array([num_redraws for _, _, num_redraws in results])
        assert all(squared_norm == 0 for _, squared_norm, _ in results)
        assert redraws.max() < rounding.MAX_TRIES
        edges = np.arange(8)
        right = goodness_of_fit.compute_p_value(redraws, edges, 1 - 0.5 ** (edges + 1))
        wrong = goodness_of_fit.compute_p_value(redraws, edges, 1 - 0.6 ** (edges + 1))
        assert right > goodness_of_fit.FALSE_FAILURE > wrong

    @pytest.mark.parametrize("beta", [0.5, math.exp(-0.5)])
    @pytest.mark.parametrize("scaled_clip", [0.0, 3.0, 40.0])
    def test_acceptance_is_at_least_one_minus_beta(
        self,
        beta: float,
        scaled_clip: float,
        seed: np.ndarray,
        rng: np.random.Generator,
    ) -> None:
        # Half-integers have the largest variance; the norm is the clip where it can be.
        x = rng.normal(size=_DIM)
        x = (x / np.linalg.norm(x) * scaled_clip).astype(np.float32)
        drawn = _round_many(x, 4000, seed).astype(np.float64)
        bound = compute_max_squared_norm(scaled_clip, _DIM, beta=beta)
        accepted = int(np.sum(np.sum(drawn**2, axis=1) <= bound))
        p_value = stats.binomtest(accepted, 4000, 1 - beta, "less").pvalue
        assert p_value > goodness_of_fit.FALSE_FAILURE

    def test_a_tighter_bound_would_not_be_accepted_as_often(
        self, seed: np.ndarray
    ) -> None:
        # The negative control: with x = 1/2 everywhere, ||y||^2 is Binomial(d, 1/2) of
        # mean c^2 + d/4, which is the bound without its deviation term.
        x = np.full(_DIM, 0.5, np.float32)
        drawn = _round_many(x, 4000, seed).astype(np.float64)
        norms = np.sum(drawn**2, axis=1)
        clip = float(np.linalg.norm(x))
        beta = 0.05
        right = compute_max_squared_norm(clip, _DIM, beta=beta)
        accepted = int(np.sum(norms <= right))
        tight = int(np.sum(norms <= clip**2 + _DIM / 4))
        limit = goodness_of_fit.FALSE_FAILURE
        assert stats.binomtest(accepted, 4000, 1 - beta, "less").pvalue > limit
        assert stats.binomtest(tight, 4000, 1 - beta, "less").pvalue < limit

    @pytest.mark.parametrize("scaled_clip", [1e-3, 1.0, 30.0, 1e4])
    def test_without_beta_no_draw_is_rejected(
        self, scaled_clip: float, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        bound = compute_max_squared_norm(scaled_clip, _DIM, beta=0.0)
        normal = rng.normal(size=_DIM)
        for direction in (normal, np.eye(1, _DIM)[0], np.ones(_DIM), -np.ones(_DIM)):
            x = (direction / np.linalg.norm(direction) * scaled_clip).astype(np.float32)
            norms = np.sum(_round_many(x, 500, seed).astype(np.float64) ** 2, axis=1)
            assert norms.max() <= bound
            assert _round(x, bound, seed)[2] == 0

    @pytest.mark.parametrize("mode", ["graph", "xla"])
    def test_same_compiled(
        self, mode: str, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        x = rng.normal(size=_DIM).astype(np.float32)
        bound = float(np.sum(x.astype(np.float64) ** 2)) + _DIM / 6
        eager, compiled = _round(x, bound, seed), _round(x, bound, seed, mode)
        assert np.array_equal(eager[0], compiled[0])
        assert eager[1:] == compiled[1:]


def test_squared_norm_is_exact(rng: np.random.Generator) -> None:
    # Above 2**24, where float32 squares and sums are not.
    values = rng.integers(-(2**20), 2**20, size=4096).astype(np.float32)
    exact = _compute_exact_squared_norm(values)
    assert 2**50 < exact < 2**53
    assert int(rounding.compute_squared_norm(tf.constant(values))) == exact
    assert exact != int(np.sum(values**2, dtype=np.float32))


def test_beyond_2_to_the_53_the_bound_still_holds(
    seed: np.ndarray, rng: np.random.Generator
) -> None:
    values = np.rint(rng.normal(size=512) * 2**27).astype(np.float32)
    exact = _compute_exact_squared_norm(values)
    assert exact > 2**53
    for step in (-(2**20), -1, 0, 1, 2**20):
        bound = float(exact + step)
        rounded = rounding.round_conditionally(tf.constant(values), bound, seed)
        assert _compute_exact_squared_norm(rounded.values.numpy()) <= bound
