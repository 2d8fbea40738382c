"""Noise shares: one law of the sum, whoever joined and whoever dropped out."""

import functools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import tensorflow as tf

from distributed_dp import noise
from distributed_dp.accounting import (
    CohortScheme,
    Sampling,
    compute_cohort_bounds,
    cost,
)
from distributed_dp.discrete_gaussian import build_discrete_gaussian_sampler
from distributed_dp.noise import (
    SKELLAM_COHORT_RATIO,
    DiscreteGaussianShares,
    NoiseShares,
    SkellamShares,
)
from tests.distributed_dp import goodness_of_fit, integer_law

_KINDS = [DiscreteGaussianShares, SkellamShares]
_CENTRAL_SCALE = 40.0
_LOW, _HIGH = 4, 12
_DIM = 1 << 14


@functools.cache
def _build_shares(kind: type[NoiseShares]) -> NoiseShares:
    return kind(_CENTRAL_SCALE, low=_LOW, high=_HIGH)


def _sum_noise(
    shares: NoiseShares, joined: int, arrived: int, seed: np.ndarray
) -> np.ndarray:
    """Returns the noise of a round: the shares that arrived and what is missing."""
    size = tf.constant(joined, tf.int64)
    total = np.zeros(_DIM, np.int64)
    for client in range(arrived):
        stream = tf.constant(seed + np.int32([client, 0]))
        share = shares.sample_share(_DIM, stream, size)
        assert share.dtype == tf.int32
        total += share.numpy()
    stream = tf.constant(seed + np.int32([0, 1]))
    missing = shares.sample_missing(_DIM, stream, size, tf.constant(arrived, tf.int64))
    assert missing.dtype == tf.int64
    return total + missing.numpy()


def _has_variance(noise: np.ndarray, variance: float) -> bool:
    p_value = goodness_of_fit.compute_variance_p_value(noise, variance)
    return p_value > goodness_of_fit.FALSE_FAILURE


@pytest.mark.parametrize("kind", _KINDS)
class TestSum:
    @pytest.mark.parametrize(
        ("joined", "arrived"),
        [
            *((joined, joined) for joined in (1, 3, _LOW, 7, 11, _HIGH)),
            *((joined, joined // 2) for joined in (2, 7, _HIGH)),
            *((joined, 0) for joined in (0, 1, 7, _HIGH, 20)),
            (20, 9),
        ],
    )
    def test_noise_is_the_full_one(
        self, kind: type[NoiseShares], joined: int, arrived: int, seed: np.ndarray
    ) -> None:
        noise = _sum_noise(_build_shares(kind), joined, arrived, seed)
        variance = _CENTRAL_SCALE**2
        assert _has_variance(noise, variance)
        # Wrong: a share too few or too many, and a standard deviation off by 5 %.
        size = min(max(joined, _LOW), _HIGH)
        for wrong in ((size - 1) / size, (size + 1) / size, 1.05**2, 1.05**-2):
            assert not _has_variance(noise, variance * wrong)
        p_value = goodness_of_fit.compute_mean_p_value(noise, 0.0, _CENTRAL_SCALE)
        assert p_value > goodness_of_fit.FALSE_FAILURE

    def test_a_cohort_above_the_largest_has_more(
        self, kind: type[NoiseShares], seed: np.ndarray
    ) -> None:
        noise = _sum_noise(_build_shares(kind), 20, 20, seed)
        assert _has_variance(noise, _CENTRAL_SCALE**2 * 20 / _HIGH)
        fraction = _build_shares(kind).compute_variance_fraction(20, 20)
        assert fraction == pytest.approx(20 / _HIGH)

    @pytest.mark.parametrize("joined", [0, 1, 4, 5, 7, 11, 12, 20])
    def test_variance_fraction(
        self, kind: type[NoiseShares], joined: int, seed: np.ndarray
    ) -> None:
        shares = _build_shares(kind)
        fraction = shares.compute_variance_fraction(joined, 1)
        stream = tf.constant(seed)
        share = shares.sample_share(4 * _DIM, stream, tf.constant(joined, tf.int64))
        assert _has_variance(share.numpy(), _CENTRAL_SCALE**2 * fraction)
        for arrived in range(min(joined, _HIGH) + 1):
            expected = pytest.approx(fraction * arrived)
            assert shares.compute_variance_fraction(joined, arrived) == expected

    def test_no_noise_is_no_noise(
        self, kind: type[NoiseShares], seed: np.ndarray
    ) -> None:
        shares = kind(0.0, low=2, high=5)
        assert not np.any(_sum_noise(shares, 3, 3, seed))
        assert not np.any(_sum_noise(shares, 3, 0, seed))

    def test_draws_are_functions_of_their_seeds(
        self, kind: type[NoiseShares], seed: np.ndarray
    ) -> None:
        shares, five = _build_shares(kind), tf.constant(5, tf.int64)
        one = tf.constant(1, tf.int64)
        for draw in (
            lambda stream: shares.sample_share(100, stream, five),
            lambda stream: shares.sample_missing(100, stream, five, one),
        ):
            first = draw(tf.constant(seed))
            assert np.array_equal(first, draw(tf.constant(seed)))
            assert not np.array_equal(first, draw(tf.constant(seed ^ 1)))

    def test_missing_draws_are_independent_of_each_other(
        self, kind: type[NoiseShares], seed: np.ndarray
    ) -> None:
        # The same draw added k times would have k times the variance of k draws.
        shares, zero = _build_shares(kind), tf.constant(0, tf.int64)
        for joined in (5, 12):
            size = tf.constant(joined, tf.int64)
            missing = shares.sample_missing(_DIM, tf.constant(seed), size, zero)
            assert _has_variance(missing.numpy(), _CENTRAL_SCALE**2)

    def test_same_bits_in_a_graph(
        self, kind: type[NoiseShares], seed: np.ndarray
    ) -> None:
        shares = kind(3.0, low=2, high=4)

        @tf.function
        def draw(seed, joined, arrived):
            return (
                shares.sample_share(2000, seed, joined),
                shares.sample_missing(2000, seed, joined, arrived),
            )

        sizes = tf.constant(3, tf.int64), tf.constant(1, tf.int64)
        share, missing = draw(tf.constant(seed), *sizes)
        expected = shares.sample_share(2000, tf.constant(seed), sizes[0])
        assert np.array_equal(share, expected)
        expected = shares.sample_missing(2000, tf.constant(seed), *sizes)
        assert np.array_equal(missing, expected)

    @pytest.mark.parametrize(("low", "high"), [(0, 3), (4, 3), (-1, -1)])
    def test_bad_ranges_are_refused(
        self, kind: type[NoiseShares], low: int, high: int
    ) -> None:
        with pytest.raises(ValueError, match="`low` must be in"):
            kind(1.0, low=low, high=high)

    @pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
    def test_bad_scales_are_refused(
        self, kind: type[NoiseShares], scale: float
    ) -> None:
        with pytest.raises(ValueError, match="`central_scale` must be"):
            kind(scale, low=1, high=2)

    def test_scales_without_tables_are_refused(self, kind: type[NoiseShares]) -> None:
        with pytest.raises(ValueError, match="`(central_scale|variances)` must"):
            kind(2.0**60, low=1, high=2)


class TestDiscreteGaussianShares:
    def test_every_cohort_has_its_scale(self) -> None:
        shares = DiscreteGaussianShares(10.0, low=3, high=9)
        variances = build_discrete_gaussian_sampler(
            [Fraction(100, size) for size in range(3, 10)]
        ).variances
        assert shares.sampler.variances == variances

    @pytest.mark.parametrize("scale", [199.2, 5764.4])
    def test_the_widest_poisson_cohort_can_be_built(self, scale: float) -> None:
        # The range is the widest, relative to its low end, where 23 are expected; the
        # scales are those whose strides leave the least room.
        scheme = CohortScheme(Sampling.POISSON, 10**6, 23)
        bounds = compute_cohort_bounds(scheme)
        assert bounds.low == 1
        DiscreteGaussianShares(scale, low=bounds.low, high=bounds.high)


class TestSkellamShares:
    @pytest.mark.parametrize(
        ("low", "high"), [(1, 1), (1, 2), (3, 3), (4, 12), (1, 17), (60, 140)]
    )
    def test_units_add_up_exactly(self, low: int, high: int) -> None:
        shares = SkellamShares(50.0, low=low, high=high)
        variances = shares.sampler.variances
        unit = variances[1]
        assert unit * shares.num_units == 2500
        assert variances == tuple(k * unit for k in range(shares.max_units + 1))
        assert shares.low == max(low, math.ceil(high / SKELLAM_COHORT_RATIO))
        for joined in range(shares.low, high + 1):
            units = shares.num_units // joined
            assert units <= shares.max_units
            # What the server tops up is less than a unit for each client.
            assert 0 <= shares.num_units - joined * units < joined

    def test_fixed_cohorts_need_one_table(self) -> None:
        shares = SkellamShares(50.0, low=7, high=7)
        assert shares.sampler.variances == (0, Fraction(2500, 7))


def _compute_renyi_2(first: dict, second: dict) -> float:
    """log sum p^2 / q of laws on the same support."""
    assert first.keys() == second.keys()
    return math.log(sum(p**2 / second[z] for z, p in first.items()))


def _wrap_law(law: dict, shift: int, modulus: int) -> dict:
    """The law of the centred residue of Z + shift."""
    wrapped = dict.fromkeys(range(-modulus // 2, modulus // 2), mpmath.mpf(0))
    for z, p in law.items():
        wrapped[(z + shift + modulus // 2) % modulus - modulus // 2] += p
    return wrapped


def _add_laws(first: dict, second: dict) -> dict:
    total: dict = {}
    for x, p in first.items():
        for y, q in second.items():
            total[x + y] = total.get(x + y, mpmath.mpf(0)) + p * q
    return total


def test_missing_noise_protects_inside_the_modulus_only() -> None:
    # Eleven clients of whom one arrived, a sum beside the wrap-around point; neighbours
    # differ by 3 grid units. Exact laws.
    modulus, shift, share_variance, num_shares = 16, 4, Fraction(3, 10), 11
    difference, radius = 3, 12
    share = integer_law.compute_discrete_gaussian(share_variance, radius)
    missing = functools.reduce(_add_laws, [share] * (num_shares - 1))
    bound = difference**2 / float(num_shares * share_variance)
    assert bound == pytest.approx(2.7, abs=0.1)

    def divide(compute) -> float:
        near, far = compute(shift), compute(shift + difference)
        return max(_compute_renyi_2(near, far), _compute_renyi_2(far, near))

    def add_inside(shift: int) -> dict:
        return _wrap_law(_add_laws(share, missing), shift, modulus)

    def add_after_centring(shift: int) -> dict:
        return _add_laws(_wrap_law(share, shift, modulus), missing)

    assert divide(add_inside) <= bound
    assert divide(add_after_centring) > 20


def test_the_accountant_counts_what_the_server_draws():
    """Both sides scale Skellam shares down to the same fraction of the cohort."""
    assert cost.SKELLAM_COHORT_RATIO == noise.SKELLAM_COHORT_RATIO


@pytest.mark.parametrize("scale", [2.0**20, 2.0**27])
def test_shares_beyond_int32_come_modulo_its_range(
    scale: float, seed: np.ndarray
) -> None:
    """A sum modulo 2**32 needs no more; the noise of one client leaves int32."""
    shares = DiscreteGaussianShares(scale * 3, low=1, high=9)
    one, whole = (
        shares.sample_share(200_000, tf.constant(seed), tf.constant(k, tf.int64))
        for k in (9, 1)
    )
    assert one.dtype == whole.dtype == tf.int32
    assert _has_variance(one.numpy(), scale**2)
    # Modulo 2**32, the smallest residues: three times the scale is within them or not.
    drawn = shares.sampler.sample(
        [200_000], tf.constant(seed), row=tf.constant(0, tf.int64)
    )
    residues = (drawn.numpy().astype(np.int64) + 2**31) % 2**32 - 2**31
    assert np.array_equal(whole.numpy(), residues)
