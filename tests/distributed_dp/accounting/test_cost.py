"""The curve of one sampled round, put together as the statements use it."""

import math

import numpy as np
import pytest

from distributed_dp.accounting import (
    SAMPLER_TOTAL_VARIATION,
    CohortScheme,
    DDGaussParameters,
    Sampling,
    amplify_fixed_replace_one,
    amplify_poisson_published,
    amplify_poisson_symmetric,
    compute_closeness,
    compute_cohort_bounds,
    compute_rdp_gaussian,
)
from distributed_dp.accounting.conversion import INTEGER_ORDERS
from distributed_dp.accounting.cost import compute_cost, compute_sampled_rdp
from distributed_dp.accounting.mode import Amplification, Mode
from distributed_dp.accounting.parameters import Accountant
from distributed_dp.accounting.release import build_release

_RATE = 0.2


def _get_release(local_scale, num_shares=8, dim=1):
    parameters = DDGaussParameters(
        l2_clip=1.0,
        granularity=1.0,
        local_stddev=local_scale,
        beta=0.0,
        bits=12,
        padded_dim=dim,
        clients_per_round=num_shares,
    )
    return build_release(
        parameters,
        num_shares=num_shares,
        local_stddev=local_scale,
        central_stddev=local_scale * math.sqrt(num_shares),
    )


@pytest.mark.parametrize("rate", [0.01, 0.2, 0.9999])
@pytest.mark.parametrize("local_scale", [0.6, 0.8, 1.0, 5.0])
def test_symmetric_pays_for_the_closeness(local_scale, rate):
    """Delta_2 = 2 in one dimension; d t (2a - 1) / (a - 1) on top of the ideal."""
    release = _get_release(local_scale)
    found = compute_sampled_rdp(release, rate, Amplification.SYMMETRIC)
    ideal = amplify_poisson_symmetric(
        INTEGER_ORDERS,
        rate,
        base_curve=lambda orders: compute_rdp_gaussian(
            orders, local_scale * math.sqrt(8) / 2
        ),
    )
    closeness = compute_closeness(local_scale, 8)
    cost = closeness * (2 * INTEGER_ORDERS - 1) / (INTEGER_ORDERS - 1)
    base = release.base_curve(INTEGER_ORDERS)
    np.testing.assert_allclose(found, np.minimum(ideal + cost, base), rtol=1e-12)
    if local_scale == 0.6:
        # Both sides of the minimum are met, and the closeness tells.
        assert np.any(found == base) == (rate == 0.9999)
        assert np.all(found > ideal + 0.1)


def test_the_other_theorems_take_the_base_curve():
    release = _get_release(0.8)
    for kind, amplify in (
        (Amplification.PUBLISHED, amplify_poisson_published),
        (Amplification.REPLACE_ONE, amplify_fixed_replace_one),
    ):
        found = compute_sampled_rdp(release, _RATE, kind)
        expected = amplify(INTEGER_ORDERS, _RATE, base_curve=release.base_curve)
        np.testing.assert_array_equal(found, expected)


def test_the_closeness_is_that_of_the_largest_cohort():
    """Shares at the largest cohort are too coarse by a hair, and then fine by one."""
    scheme = CohortScheme(Sampling.POISSON, 100, 10)
    high = compute_cohort_bounds(scheme).high
    mode = Mode(
        adjacency="",
        sensitivity_factor=1,
        amplification=Amplification.SYMMETRIC,
        accountant=Accountant.RDP,
        as_published=False,
    )

    def compute_epsilon(smallest_scale):
        parameters = DDGaussParameters(
            l2_clip=1.0,
            granularity=1.0,
            local_stddev=smallest_scale * math.sqrt(high / 10),
            beta=0.0,
            bits=12,
            padded_dim=1,
            clients_per_round=10,
        )
        return compute_cost(
            parameters, scheme, mode=mode, num_rounds=1, delta=1e-3, quantile=None
        ).epsilon

    assert compute_epsilon(0.4999) == math.inf
    assert compute_epsilon(0.5001) < math.inf


def test_draws_are_counted_with_the_user():
    """The expected cohort, given that the user joins: n + 1 shares a coordinate."""
    parameters = DDGaussParameters(
        l2_clip=1.0,
        granularity=1.0,
        local_stddev=1e9,
        beta=0.0,
        bits=40,
        padded_dim=1000,
        clients_per_round=10,
    )
    mode = Mode(
        adjacency="",
        sensitivity_factor=1,
        amplification=Amplification.PUBLISHED,
        accountant=Accountant.RDP,
        as_published=False,
    )
    for sampling, population, shares, factor in (
        (Sampling.POISSON, 100, 11, 2 + 1 / 9),
        (Sampling.FIXED, 100, 10, 2 + 1 / 9),
        (Sampling.POISSON, 10, 10, 2),
    ):
        cost = compute_cost(
            parameters,
            CohortScheme(sampling, population, 10),
            mode=mode,
            num_rounds=7,
            delta=1e-3,
            quantile=None,
        )
        expected = factor * 7 * shares * 1000 * SAMPLER_TOTAL_VARIATION
        assert cost.sampler_charge == pytest.approx(expected, rel=1e-3, abs=0)
