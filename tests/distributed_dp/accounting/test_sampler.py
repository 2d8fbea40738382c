"""The sampler's charge against adversarial samplers, both ways and in every mode."""

import math

import numpy as np
import pytest

from distributed_dp.accounting import SAMPLER_TOTAL_VARIATION, compute_rdp_gaussian
from distributed_dp.accounting.release import Release
from distributed_dp.accounting.sampler import (
    Draws,
    compute_least_sampler_charge,
    compute_sampler_charge,
)
from tests.distributed_dp.accounting import exact_law

_EPSILONS = np.arange(0, 8, 0.5)


def _get_draws(num_shares, rate=1.0, num_rounds=1, replace_one=False):
    return Draws(
        num_rounds=num_rounds,
        shares_per_round=num_shares,
        sampling_rate=rate,
        replace_one=replace_one,
    )


def _get_release(ratio, dim=1):
    def compute_curve(orders):
        return compute_rdp_gaussian(orders, 1 / ratio)

    return Release(
        base_curve=compute_curve,
        moment_curve=compute_curve,
        closeness=0.0,
        num_coordinates=dim,
    )


def _cut_tail(law, mass, both):
    """Moves `mass` of a law from its tail to 0: total variation `mass`."""
    radius = (len(law) - 1) // 2
    z = np.arange(-radius, radius + 1)
    result, left = law.copy(), mass
    for index in np.argsort(-np.abs(z) if both else -z, kind="stable"):
        taken = min(left, result[index])
        result[index] -= taken
        left -= taken
    result[radius] += mass
    return result


def _compute_laws(scale, num_shares, mass, both):
    """Laws of the summed noise: exact, and with the shares' tails cut."""
    radius = int(16 * scale) + 20
    share = exact_law.compute_discrete_gaussian(scale / math.sqrt(num_shares), radius)
    return [
        exact_law.compute_sum([law] * num_shares)
        for law in (share, _cut_tail(share, mass, both))
    ]


def _compute_gain(ideal, real):
    """How much delta rises at the worst epsilon, over both directions.

    `ideal` and `real` are pairs of neighbouring laws.
    """
    gains = [
        exact_law.compute_hockey_stick(*real[::step], epsilon)
        - exact_law.compute_hockey_stick(*ideal[::step], epsilon)
        for epsilon in _EPSILONS
        for step in (1, -1)
    ]
    return max(gains)


def _mix(law, shift, rate):
    return (1 - rate) * law + rate * exact_law.shift(law, shift)


_ADVERSARIES = [
    pytest.mark.parametrize(("scale", "shift"), [(3, 1), (3, 6), (6, 3)]),
    pytest.mark.parametrize("num_shares", [1, 2]),
    pytest.mark.parametrize("mass", [1e-6, 1e-2]),
    pytest.mark.parametrize("rate", [1.0, 0.9, 0.5, 0.05]),
    pytest.mark.parametrize("both", [False, True]),
]


def _against_adversaries(test):
    for mark in _ADVERSARIES:
        test = mark(test)
    return test


class TestSamplerCharge:
    @_against_adversaries
    def test_covers_add_or_remove(self, scale, shift, num_shares, mass, rate, both):
        ideal, real = (
            (law, _mix(law, shift, rate))
            for law in _compute_laws(scale, num_shares, mass, both)
        )
        charge = compute_sampler_charge(
            _get_release(shift / scale),
            _get_draws(num_shares, rate),
            total_variation=mass,
        )
        assert _compute_gain(ideal, real) <= charge

    @_against_adversaries
    def test_covers_replace_one(self, scale, shift, num_shares, mass, rate, both):
        ideal, real = (
            (_mix(law, -shift, rate), _mix(law, shift, rate))
            for law in _compute_laws(scale, num_shares, mass, both)
        )
        charge = compute_sampler_charge(
            _get_release(2 * shift / scale),
            _get_draws(num_shares, rate, replace_one=True),
            total_variation=mass,
        )
        assert _compute_gain(ideal, real) <= charge

    def test_covers_two_rounds(self):
        """Two independent rounds: the product of the laws."""
        pairs = [
            (np.outer(law, law).ravel(), np.outer(mixed, mixed).ravel())
            for law in _compute_laws(3, 1, 1e-4, False)
            for mixed in (_mix(law, 2, 0.5),)
        ]
        charge = compute_sampler_charge(
            _get_release(2 / 3), _get_draws(1, 0.5, num_rounds=2), total_variation=1e-4
        )
        assert 1e-4 < _compute_gain(*pairs) <= charge

    @pytest.mark.parametrize("rate", [1.0, 0.5])
    def test_the_total_variation_alone_would_be_wrong(self, rate):
        """d n T eta, without what the shifted tail misses, is too little."""
        ideal, real = (
            (law, _mix(law, 3, rate)) for law in _compute_laws(6, 1, 1e-6, False)
        )
        assert _compute_gain(ideal, real) > 3 * 1e-6

    def test_is_far_below_the_crude_charge(self):
        """The crude one, (1 + e^epsilon) d n T eta, would exceed 1 / N here."""
        plain = 1500 * 100 * 2**20 * 2.0**-60
        draws = _get_draws(100, 100 / 3400, num_rounds=1500)
        found = compute_sampler_charge(
            _get_release(1 / 0.89, dim=2**20), draws, total_variation=2.0**-60
        )
        assert 2 * plain < found < 2.5 * plain < 1e-2 / 3400
        assert (1 + math.exp(10)) * plain > 1 / 3400

    def test_endless_noise_costs_twice_the_draws(self):
        release = _get_release(1e-9, dim=50)
        plain = 7 * 10 * 50 * SAMPLER_TOTAL_VARIATION
        for rate, factor in ((1.0, 2), (0.5, 3), (0.01, 2 + 0.01 / 0.99)):
            draws = _get_draws(10, rate, num_rounds=7)
            least = compute_least_sampler_charge(release, draws)
            assert least == pytest.approx(factor * plain, rel=1e-12, abs=0)
            found = compute_sampler_charge(release, draws)
            assert found == pytest.approx(least, rel=1e-3, abs=0)
        draws = _get_draws(10, 0.25, num_rounds=7, replace_one=True)
        assert compute_least_sampler_charge(release, draws) == pytest.approx(
            2.5 * plain, rel=1e-12, abs=0
        )

    def test_grows_with_everything(self):
        def get(ratio=0.5, shares=10, dim=50, rounds=7, rate=0.5):
            return compute_sampler_charge(
                _get_release(ratio, dim=dim), _get_draws(shares, rate, rounds)
            )

        assert get(ratio=0.6) > get()
        assert get(shares=11) > get()
        assert get(dim=51) > get()
        assert get(rounds=8) > get()
        assert get(rate=0.6) > get()

    def test_hardly_any_noise_is_charged_at_most_one(self):
        assert compute_sampler_charge(_get_release(1e6), _get_draws(10)) == 1.0

    def test_continuous_noise_has_no_draws(self):
        charge = compute_sampler_charge(_get_release(1.0, dim=0), _get_draws(10))
        assert charge == 0.0
