"""Parameters: hand-computed properties and refused values."""

import math

import numpy as np
import pytest

from distributed_dp.accounting import (
    DDGaussParameters,
    GaussianParameters,
    Mechanism,
    SkellamParameters,
    compute_max_squared_norm,
)

_VALID = dict(
    l2_clip=3.0,
    granularity=0.5,
    local_stddev=2.0,
    beta=0.0,
    bits=10,
    padded_dim=16,
    clients_per_round=25,
)


def test_properties_by_hand():
    parameters = DDGaussParameters(**_VALID)
    assert parameters.mechanism is Mechanism.DDGAUSS
    assert parameters.modulus == 1024
    assert parameters.local_scale == 4.0
    assert parameters.central_stddev == 10.0
    assert parameters.central_scale == 20.0
    assert parameters.noise_multiplier == 10.0 / 3.0
    assert parameters.scaled_l2_clip == 6.0
    # beta = 0: (c / gamma + sqrt(d))^2 = (6 + 4)^2.
    assert parameters.max_squared_norm == 100.0
    assert parameters.l2_sensitivity == 10.0
    # min(sqrt(16) * 10, 100).
    assert parameters.l1_sensitivity == 40.0


def test_l1_sensitivity_of_a_short_vector_is_its_squared_norm():
    parameters = SkellamParameters(**{**_VALID, "l2_clip": 0.05, "padded_dim": 10_000})
    assert parameters.mechanism is Mechanism.SKELLAM
    beta_free = (0.1 + 100) ** 2
    assert parameters.max_squared_norm == pytest.approx(beta_free, rel=1e-12)
    assert parameters.l1_sensitivity == pytest.approx(
        min(100 * math.sqrt(beta_free), beta_free), rel=1e-12
    )


def test_squared_norm_with_beta_by_hand():
    # 6^2 + 16/4 + sqrt(2 log e^(1/2)) (6 + 2) = 36 + 4 + 8.
    found = compute_max_squared_norm(6.0, 16, beta=math.exp(-0.5))
    assert found == pytest.approx(48.0, rel=1e-12)
    # A tiny beta never gives more than the bound that always holds.
    assert compute_max_squared_norm(6.0, 16, beta=1e-300) == 100.0


@pytest.mark.parametrize("beta", [0.0, 0.01, 0.3, math.exp(-0.5), 0.9])
def test_rounding_is_accepted_often_enough(beta, rng):
    """Draws are accepted with probability 1 - beta at least, all of them at 0."""
    dim, scaled_clip = 24, 5.0
    vector = rng.normal(size=dim)
    vector *= scaled_clip / np.linalg.norm(vector)
    draws = np.floor(vector + rng.random((4000, dim)))
    squared = (draws**2).sum(axis=1)
    bound = compute_max_squared_norm(scaled_clip, dim, beta=beta)
    accepted = (squared <= bound).mean()
    # A binomial share falls 5 deviations short with probability below 1e-6.
    deviation = math.sqrt(beta * (1 - beta) / 4000)
    assert accepted >= 1 - beta - 5 * deviation
    # The bound leaves room for rounding: the clip alone would refuse most draws.
    assert (squared <= scaled_clip**2).mean() < 0.9


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("l2_clip", 0.0),
        ("l2_clip", -1.0),
        ("l2_clip", math.nan),
        ("l2_clip", math.inf),
        ("l2_clip", "1"),
        ("l2_clip", True),
        ("granularity", 0.0),
        ("local_stddev", -1e-9),
        ("local_stddev", math.inf),
        ("beta", -0.1),
        ("beta", 1.0),
        ("beta", math.nan),
        ("bits", 0),
        ("bits", 54),
        ("bits", 16.0),
        ("padded_dim", 0),
        ("clients_per_round", 0),
        ("clients_per_round", 2.5),
    ],
)
@pytest.mark.parametrize("kind", [DDGaussParameters, SkellamParameters])
def test_bad_values_are_refused_by_name(kind, name, value):
    with pytest.raises(ValueError, match=rf"`{name}` must .* Found {value!r}"):
        kind(**{**_VALID, name: value})


def test_gaussian_parameters():
    parameters = GaussianParameters(
        l2_clip=0.5, noise_multiplier=3.0, clients_per_round=7
    )
    assert parameters.mechanism is Mechanism.GAUSSIAN
    assert parameters.central_stddev == 1.5
    with pytest.raises(ValueError, match="`noise_multiplier` must be at least 0"):
        GaussianParameters(l2_clip=0.5, noise_multiplier=-1.0, clients_per_round=7)


def test_no_noise_is_allowed():
    assert DDGaussParameters(**{**_VALID, "local_stddev": 0.0}).central_scale == 0.0
