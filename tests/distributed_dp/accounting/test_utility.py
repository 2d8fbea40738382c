"""Theorem 36 and the wrap-around bound against a plain NumPy mechanism."""

import math

import numpy as np
import pytest
from scipy import linalg

from distributed_dp.accounting import (
    DDGaussParameters,
    NormBound,
    compute_coordinate_stddev,
    compute_granularity,
    compute_utility_bound,
    compute_wraparound_probability,
)
from tests.distributed_dp.accounting import exact_law

_REPEATS = 1500


def _get_parameters(beta, num_stddevs, bits=10, local_stddev=0.05):
    shared = dict(l2_clip=1.0, bits=bits, padded_dim=32, clients_per_round=10)
    granularity = compute_granularity(local_stddev, num_stddevs=num_stddevs, **shared)
    return DDGaussParameters(
        granularity=granularity, local_stddev=local_stddev, beta=beta, **shared
    )


def _round(scaled, limit, rng):
    """Rounds at random; a vector whose squared norm passes the limit is redrawn."""
    rounded = np.floor(scaled + rng.random(scaled.shape))
    while True:
        refused = (rounded**2).sum(axis=-1) > limit
        if not refused.any():
            return rounded
        again = scaled[refused]
        rounded[refused] = np.floor(again + rng.random(again.shape))


def _compute_errors(parameters, rng):
    """Returns the decoding errors of `_REPEATS` sums and the share that wrapped.

    All clients hold the same vector, the worst case of the norm of the sum.
    """
    count, dim = parameters.clients_per_round, parameters.padded_dim
    vector = rng.normal(size=(_REPEATS, dim))
    vector *= parameters.l2_clip / np.linalg.norm(vector, axis=1, keepdims=True)
    signs = rng.choice([-1.0, 1.0], size=(_REPEATS, dim))
    matrix = linalg.hadamard(dim) / math.sqrt(dim)
    scaled = (vector * signs) @ matrix / parameters.granularity
    total = np.zeros((_REPEATS, dim))
    radius = int(12 * parameters.local_scale) + 2
    law = exact_law.compute_discrete_gaussian(parameters.local_scale, radius)
    for _ in range(count):
        total += _round(scaled.copy(), parameters.max_squared_norm, rng)
        total += rng.choice(np.arange(-radius, radius + 1), size=total.shape, p=law)
    half = parameters.modulus // 2
    wrapped = (total + half) % parameters.modulus - half
    decoded = (wrapped * parameters.granularity) @ matrix * signs
    return decoded - count * vector, np.mean(wrapped != total)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_measured_error_is_within_the_bound(beta, rng):
    """beta = 0 and 1 / n, where hardly anything wraps around."""
    parameters = _get_parameters(beta, num_stddevs=8)
    errors, wrapped = _compute_errors(parameters, rng)
    measured = (errors**2).sum(axis=1).mean()
    bound = compute_utility_bound(parameters)
    assert wrapped == 0
    assert measured <= bound
    if beta == 0:
        # Rejects a bound without the rounding's variance, or without one of n shares.
        assert measured > 0.9 * bound
        noise = 32 * 10 * parameters.local_stddev**2
        assert measured > 0.99 * noise


def test_the_rounding_is_part_of_the_bound(rng):
    parameters = _get_parameters(0.0, num_stddevs=8, bits=6, local_stddev=0.02)
    errors, wrapped = _compute_errors(parameters, rng)
    measured = (errors**2).sum(axis=1).mean()
    noise = 32 * 10 * parameters.local_stddev**2
    assert wrapped == 0
    assert 3 * noise < measured <= compute_utility_bound(parameters)


def test_the_wrap_around_is_part_of_the_bound(rng):
    parameters = _get_parameters(0.0, num_stddevs=2.5)
    errors, wrapped = _compute_errors(parameters, rng)
    measured = (errors**2).sum(axis=1).mean()
    without = 32 * 10 * (parameters.granularity**2 / 4 + parameters.local_stddev**2)
    assert measured <= compute_utility_bound(parameters)
    assert measured > 1.5 * without
    assert 0 < wrapped <= compute_wraparound_probability(parameters)
    assert compute_wraparound_probability(parameters) == pytest.approx(
        2 * math.exp(-3.125)
    )


def test_the_bound_by_hand():
    parameters = DDGaussParameters(
        l2_clip=1.0,
        granularity=0.5,
        local_stddev=1.0,
        beta=0.2,
        bits=5,
        padded_dim=4,
        clients_per_round=2,
    )
    variance = 4 / 4 + (0.25 / 4 + 1) * 2
    assert compute_coordinate_stddev(parameters) == pytest.approx(math.sqrt(variance))
    optimistic = compute_coordinate_stddev(parameters, norm_bound=NormBound.OPTIMISTIC)
    assert optimistic == pytest.approx(math.sqrt(variance - 0.5))
    r = 8.0
    wrap = 2 * math.sqrt(2) * r * math.exp(-64 / (4 * variance)) / math.sqrt(2 * 0.8)
    kept = math.sqrt(0.25 / 4 + 0.04 * 0.25 * 2 / 0.8 + 0.8)
    expected = 4 * 2 / 0.8 * (wrap + kept) ** 2
    assert compute_utility_bound(parameters) == pytest.approx(expected, rel=1e-12)


def test_outside_the_theorem_there_is_no_bound():
    """sigma_hat > r: the sum does not fit."""
    parameters = _get_parameters(0.0, num_stddevs=0.9)
    assert compute_utility_bound(parameters) == math.inf


def test_a_large_beta_overflows_to_no_bound():
    parameters = DDGaussParameters(
        l2_clip=1.0,
        granularity=1e-3,
        local_stddev=0.1,
        beta=0.99,
        bits=20,
        padded_dim=4,
        clients_per_round=10_000,
    )
    assert compute_utility_bound(parameters) == math.inf


@pytest.mark.parametrize("function", [compute_utility_bound, compute_coordinate_stddev])
def test_bad_values(function):
    with pytest.raises(ValueError, match="`rho` must be positive"):
        function(_get_parameters(0.0, 4), rho=0.0)
    with pytest.raises(ValueError, match="`norm_bound` must be a member"):
        function(_get_parameters(0.0, 4), norm_bound="optimistic")
