"""Base curves against exact convolutions in one dimension, and closed forms."""

import math

import mpmath
import numpy as np
import pytest

from distributed_dp.accounting import (
    compute_closeness,
    compute_rdp_ddgauss,
    compute_rdp_gaussian,
    compute_rdp_skellam,
    compute_tau,
    compute_zcdp_ddgauss,
    rdp,
)
from tests.distributed_dp.accounting import exact_law

_ORDERS = np.array([1.01, 1.5, 2.0, 4.0, 8.0, 32.0])
_SCALES = [0.5, 0.6, 0.8, 1.0, 2.0]
_SHARES = [2, 3, 5, 10]


def _compute_summed_law(scale, shares, reach=40):
    radius = int(reach * scale * math.sqrt(shares)) + 20
    share = exact_law.compute_discrete_gaussian(scale, radius)
    return exact_law.compute_sum([share] * shares), radius


def _compute_exact_curve(first, second):
    return np.array(
        [exact_law.compute_worse_renyi(first, second, order) for order in _ORDERS]
    )


def _compute_bound(scale, shares, shift):
    return compute_rdp_ddgauss(
        _ORDERS,
        l2_sensitivity=shift,
        l1_sensitivity=shift,
        local_scale=scale,
        num_shares=shares,
        dim=1,
    )


class TestCloseness:
    @pytest.mark.parametrize("scale", _SCALES)
    @pytest.mark.parametrize("shares", _SHARES)
    def test_bounds_the_exact_log_ratio(self, scale, shares):
        law, radius = _compute_summed_law(scale, shares)
        ideal = exact_law.compute_discrete_gaussian(scale * math.sqrt(shares), radius)
        z = np.abs(np.arange(-radius, radius + 1))
        near = z <= 20 * scale * math.sqrt(shares)
        exact = np.abs(np.log(law[near] / ideal[near])).max()
        # Float64 itself leaves about 1e-12.
        assert exact <= compute_closeness(scale, shares) + 1e-11

    def test_half_of_it_would_be_wrong(self):
        law, radius = _compute_summed_law(0.5, 2)
        ideal = exact_law.compute_discrete_gaussian(0.5 * math.sqrt(2), radius)
        near = slice(radius - 14, radius + 15)
        exact = np.abs(np.log(law[near] / ideal[near])).max()
        assert exact > compute_closeness(0.5, 2) / 2

    def test_closed_forms(self):
        assert compute_closeness(0.7, 1) == 0.0
        assert compute_closeness(0.1, 1) == 0.0
        expected = 5 * math.exp(-(math.pi**2) * 0.49)
        assert compute_closeness(0.7, 2) == pytest.approx(expected, rel=1e-13)
        expected += 5 * math.exp(-(math.pi**2) * 0.49 * 4 / 3)
        assert compute_closeness(0.7, 3) == pytest.approx(expected, rel=1e-13)
        assert compute_tau(0.7, 3) == pytest.approx(2 * expected, rel=1e-13)

    def test_a_fraction_of_a_share_is_rounded_up(self):
        assert compute_closeness(0.7, 2.2) == compute_closeness(0.7, 3)

    @pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
    def test_many_shares_are_never_underestimated(self, scale):
        k = np.arange(1, 200_000, dtype=np.float64)
        exact = 5 * np.exp(-2 * np.pi**2 * scale**2 * k / (k + 1)).sum()
        assert exact <= compute_closeness(scale, 200_000) <= 1.05 * exact

    def test_coarse_shares_have_no_bound(self):
        assert compute_closeness(0.499, 2) == math.inf
        assert compute_closeness(0.0, 5) == math.inf

    def test_fine_shares_are_ideal(self):
        assert compute_closeness(100.0, 1000) == 0.0

    @pytest.mark.parametrize(
        ("arguments", "name"),
        [((-1.0, 2), "local_scale"), ((1.0, 0), "num_shares"), ((math.nan, 2), "loc")],
    )
    def test_bad_values(self, arguments, name):
        with pytest.raises(ValueError, match=f"`{name}"):
            compute_closeness(*arguments)


class TestDDGauss:
    @pytest.mark.parametrize("scale", _SCALES)
    @pytest.mark.parametrize("shares", _SHARES)
    @pytest.mark.parametrize("shift", [1, 3])
    def test_bounds_the_exact_divergence(self, scale, shares, shift):
        """The least of the three bounds holds, so each of them does."""
        law, _ = _compute_summed_law(scale, shares, reach=60)
        exact = _compute_exact_curve(law, exact_law.shift(law, shift))
        assert np.all(exact <= _compute_bound(scale, shares, shift) * (1 + 1e-9))

    @pytest.mark.parametrize(("shares", "fewer"), [(5, 4), (5, 1), (3, 2)])
    @pytest.mark.parametrize("scale", [0.5, 0.7, 1.0])
    @pytest.mark.parametrize("shift", [0, 1, 2])
    def test_bounds_the_divergence_between_cohorts(self, scale, shares, fewer, shift):
        """The noise of fewer, larger shares of the same sum is covered as well."""
        law, radius = _compute_summed_law(scale, shares, reach=60)
        larger = scale * math.sqrt(shares / fewer)
        other = exact_law.compute_sum(
            [exact_law.compute_discrete_gaussian(larger, radius)] * fewer
        )
        exact = _compute_exact_curve(law, exact_law.shift(other, shift))
        assert np.all(exact <= _compute_bound(scale, shares, shift) * (1 + 1e-9))

    def test_ignoring_tau_would_be_wrong(self):
        law, _ = _compute_summed_law(0.5, 2, reach=60)
        exact = _compute_exact_curve(law, exact_law.shift(law, 1))
        assert np.any(exact > compute_rdp_gaussian(_ORDERS, 0.5 * math.sqrt(2)))

    def test_a_wrong_share_count_would_be_wrong(self):
        law, _ = _compute_summed_law(1.0, 4, reach=60)
        exact = _compute_exact_curve(law, exact_law.shift(law, 2))
        assert np.all(exact > _compute_bound(1.0, 5, 2))

    def test_a_fine_grid_is_the_gaussian(self):
        found = _compute_bound(100.0, 7, 50)
        expected = _ORDERS / 2 * (50 / 100) ** 2 / 7
        np.testing.assert_allclose(found, expected, rtol=1e-13)

    @pytest.mark.parametrize(
        ("ratios", "tau", "dim", "least"),
        [
            ((1.0, 2.0), 1e-3, 4, 0),
            ((1.0, 2.0), 1e-3, 100, 1),
            ((1.0, 30.0), 1e-3, 100, 2),
        ],
    )
    def test_each_bound_is_the_least_somewhere(self, ratios, tau, dim, least):
        (l2, l1), order = ratios, 8.0
        bounds = [
            order / 2 * l2**2 + tau * dim,
            order / 2 * (l2**2 + 2 * l1 * tau + tau**2 * dim),
            order / 2 * (l2 + tau * math.sqrt(dim)) ** 2,
        ]
        assert bounds.index(min(bounds)) == least
        found = rdp.compute_rdp_near_gaussian(
            [order], l2_ratio=l2, l1_ratio=l1, tau=tau, dim=dim
        )
        assert found[0] == pytest.approx(min(bounds), rel=1e-13)

    def test_useless_closeness_is_infinite_not_nan(self):
        assert np.all(np.isposinf(_compute_bound(0.4, 2, 1)))
        assert np.all(np.isposinf(_compute_bound(0.0, 1, 1)))

    @pytest.mark.parametrize("scale", [0.5, 0.8, 2.0])
    @pytest.mark.parametrize("shares", [1, 3])
    def test_zcdp_bounds_every_order(self, scale, shares):
        rho = compute_zcdp_ddgauss(
            l2_sensitivity=2,
            l1_sensitivity=2,
            local_scale=scale,
            num_shares=shares,
            dim=1,
        )
        law, _ = _compute_summed_law(scale, shares, reach=60)
        exact = _compute_exact_curve(law, exact_law.shift(law, 2))
        assert np.all(exact <= rho * _ORDERS * (1 + 1e-9))
        if scale == 2.0:
            assert np.any(exact > 0.95 * rho * _ORDERS)

    def test_zcdp_without_noise_is_infinite(self):
        keywords = dict(l2_sensitivity=1, l1_sensitivity=1, num_shares=2, dim=1)
        assert compute_zcdp_ddgauss(local_scale=0.0, **keywords) == math.inf

    @pytest.mark.parametrize("orders", [[1.0], [0.5], [math.nan], [math.inf], [2, -1]])
    def test_bad_orders(self, orders):
        with pytest.raises(ValueError, match="`orders` must be finite and above 1"):
            compute_rdp_gaussian(orders, 1.0)


class TestGaussian:
    @pytest.mark.parametrize("order", [1.5, 2.0, 7.0])
    def test_against_quadrature(self, order):
        z = 0.8

        def integrand(x):
            first = mpmath.npdf(x, 0, z)
            second = mpmath.npdf(x, 1, z)
            return first**order * second ** (1 - order)

        points = [-60, -20, -5, 0, 5, 60]
        moment = mpmath.quad(integrand, points)
        expected = float(mpmath.log(moment) / (order - 1))
        assert compute_rdp_gaussian([order], z)[0] == pytest.approx(expected, rel=1e-6)

    def test_no_noise(self):
        assert np.all(np.isposinf(compute_rdp_gaussian([2, 3], 0.0)))


class TestSkellam:
    @pytest.mark.parametrize("variance", [1.0, 4.0, 50.0, 1000.0])
    @pytest.mark.parametrize("shift", [1, 2, 7])
    def test_bounds_the_exact_divergence(self, variance, shift):
        radius = int(40 * math.sqrt(variance)) + 80
        law = exact_law.compute_skellam(variance, radius)
        orders = np.array([2, 3, 4, 6, 8])
        exact = [
            exact_law.compute_worse_renyi(law, exact_law.shift(law, shift), order)
            for order in orders
        ]
        bound = compute_rdp_skellam(
            orders, l2_sensitivity=shift, l1_sensitivity=shift, variance=variance
        )
        assert np.all(np.array(exact) <= bound * (1 + 1e-9))
        # The Gaussian's own curve is the limit, and too small.
        assert np.all(bound > compute_rdp_gaussian(orders, math.sqrt(variance) / shift))

    def test_the_gaussian_curve_would_be_wrong(self):
        law = exact_law.compute_skellam(1.0, 200)
        exact = exact_law.compute_worse_renyi(law, exact_law.shift(law, 1), 1.1)
        assert exact > 1.03 * compute_rdp_gaussian([1.1], 1.0)[0]

    def test_by_hand(self):
        # a = 3: 3 * 4 / 20 + min((5 * 4 + 6 * 3) / 400, 9 / 20).
        found = compute_rdp_skellam(
            [3], l2_sensitivity=2, l1_sensitivity=3, variance=10.0
        )
        assert found[0] == pytest.approx(0.6 + 0.095, rel=1e-13)
        # The other branch, at a large order: 400 * 4 / 20 + 9 / 20.
        found = compute_rdp_skellam(
            [400], l2_sensitivity=2, l1_sensitivity=3, variance=10.0
        )
        assert found[0] == pytest.approx(80 + 0.45, rel=1e-13)

    def test_fractional_orders_take_the_chord(self):
        def scaled(order):
            curve = compute_rdp_skellam(
                [order], l2_sensitivity=2, l1_sensitivity=3, variance=10.0
            )
            return (order - 1) * curve[0]

        expected = 0.7 * scaled(2) + 0.3 * scaled(3)
        assert scaled(2.3) == pytest.approx(expected, rel=1e-12)
        assert scaled(1.25) == pytest.approx(0.25 * scaled(2), rel=1e-12)

    @pytest.mark.parametrize("order", [1.2, 1.7, 2.5, 4.5])
    def test_fractional_orders_bound_the_exact_divergence(self, order):
        law = exact_law.compute_skellam(9.0, 300)
        exact = exact_law.compute_worse_renyi(law, exact_law.shift(law, 2), order)
        bound = compute_rdp_skellam(
            [order], l2_sensitivity=2, l1_sensitivity=2, variance=9.0
        )
        assert exact <= bound[0]

    def test_no_noise(self):
        found = compute_rdp_skellam(
            [2, 2.5], l2_sensitivity=1, l1_sensitivity=1, variance=0.0
        )
        assert np.all(np.isposinf(found))
