"""Amplification against brute-force mixtures, quadrature and dp_accounting."""

import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import rdp as dp_rdp

from distributed_dp.accounting import (
    amplify_fixed_replace_one,
    amplify_poisson_published,
    amplify_poisson_symmetric,
    compute_closeness,
    compute_rdp_gaussian,
    compute_rdp_skellam,
    compute_tau,
    rdp,
)
from tests.distributed_dp.accounting import exact_law

_AMPLIFIERS = [
    amplify_poisson_symmetric,
    amplify_poisson_published,
    amplify_fixed_replace_one,
]
_ORDERS = np.array([2.0, 3.0, 4.0, 8.0, 16.0])


def _get_gaussian(noise_multiplier):
    return lambda orders: compute_rdp_gaussian(orders, noise_multiplier)


def _get_near_gaussian(ratio, tau):
    return lambda orders: rdp.compute_rdp_near_gaussian(
        orders, l2_ratio=ratio, l1_ratio=ratio, tau=tau, dim=1
    )


class TestFormulas:
    """The formulas, term by term in plain arithmetic, at small orders."""

    @staticmethod
    def _curve(order):
        return 0.1 * order + 0.05

    def _terms(self, order, rate):
        for count in range(order + 1):
            weight = math.comb(order, count) * (1 - rate) ** (order - count)
            exponent = (count - 1) * self._curve(count) if count > 1 else 0.0
            yield count, weight * rate**count, math.exp(exponent)

    @pytest.mark.parametrize("order", [2, 3, 5, 9])
    @pytest.mark.parametrize("rate", [0.02, 0.4])
    def test_symmetric(self, order, rate):
        total = sum(weight * factor for _, weight, factor in self._terms(order, rate))
        found = amplify_poisson_symmetric(
            [order], rate, base_curve=lambda orders: self._curve(orders)
        )
        expected = math.log(total) / (order - 1)
        assert found[0] == pytest.approx(expected, rel=1e-10)

    @pytest.mark.parametrize("order", [2, 3, 5, 9])
    @pytest.mark.parametrize("rate", [0.02, 0.4])
    def test_published(self, order, rate):
        total = sum(
            (3 if count > 2 else 1) * weight * factor
            for count, weight, factor in self._terms(order, rate)
        )
        found = amplify_poisson_published(
            [order], rate, base_curve=lambda orders: self._curve(orders)
        )
        expected = min(math.log(total) / (order - 1), self._curve(order))
        assert found[0] == pytest.approx(expected, rel=1e-10)

    @pytest.mark.parametrize("order", [2, 3, 5, 9])
    @pytest.mark.parametrize("rate", [0.02, 0.4])
    def test_fixed_replace_one(self, order, rate):
        second = math.exp(self._curve(2))
        total = 1 + rate**2 * math.comb(order, 2) * min(4 * (second - 1), 2 * second)
        for count in range(3, order + 1):
            factor = math.exp((count - 1) * self._curve(count))
            total += 2 * rate**count * math.comb(order, count) * factor
        found = amplify_fixed_replace_one(
            [order], rate, base_curve=lambda orders: self._curve(orders)
        )
        expected = min(math.log(total) / (order - 1), self._curve(order))
        assert found[0] == pytest.approx(expected, rel=1e-10)


class TestSubsampledGaussian:
    @staticmethod
    def _integrate(rate, z, order, reverse):
        def integrand(x):
            without = mpmath.npdf(x, 0, z)
            mixed = (1 - rate) * without + rate * mpmath.npdf(x, 1, z)
            first, second = (without, mixed) if reverse else (mixed, without)
            return first**order * second ** (1 - order)

        points = [-80, -20, -5, -1, 0, 1, 2, 5, 10, 20, 80]
        return float(mpmath.log(mpmath.quad(integrand, points)) / (order - 1))

    @pytest.mark.parametrize(
        ("rate", "z"), [(0.03, 0.8), (0.03, 1.6), (0.3, 1.0), (0.9, 2.0)]
    )
    @pytest.mark.parametrize("order", [2, 3, 6])
    def test_is_exact_in_one_direction_and_bounds_the_other(self, rate, z, order):
        found = amplify_poisson_symmetric([order], rate, base_curve=_get_gaussian(z))[0]
        forward = self._integrate(rate, z, order, reverse=False)
        backward = self._integrate(rate, z, order, reverse=True)
        assert found == pytest.approx(forward, rel=1e-4)
        assert backward <= found
        published = amplify_poisson_published(
            [order], rate, base_curve=_get_gaussian(z)
        )
        assert published[0] >= min(found, compute_rdp_gaussian([order], z)[0]) - 1e-12

    @pytest.mark.parametrize("order", [1.3, 2.5, 3.7])
    def test_fractional_orders_are_bounded_by_the_chord(self, order):
        found = amplify_poisson_symmetric([order], 0.1, base_curve=_get_gaussian(1.0))[
            0
        ]
        exact = self._integrate(0.1, 1.0, order, reverse=False)
        assert exact <= found <= 2 * exact

    @pytest.mark.parametrize(("rate", "z"), [(0.03, 0.85), (1e-3, 1.1), (0.5, 4.0)])
    def test_equals_dp_accounting_at_integer_orders(self, rate, z):
        orders = [2, 3, 5, 17, 64, 200, 300]
        event = dp_accounting.PoissonSampledDpEvent(
            rate, dp_accounting.GaussianDpEvent(z)
        )
        found = amplify_poisson_symmetric(orders, rate, base_curve=_get_gaussian(z))
        for order, value in zip(orders, found, strict=True):
            accountant = dp_rdp.RdpAccountant([order])
            accountant.compose(event, 1000)
            expected, _ = dp_rdp.compute_epsilon([order], [1000 * value], 1e-5)
            assert accountant.get_epsilon(1e-5) == pytest.approx(expected, rel=1e-7)


class TestBruteForcePoisson:
    """Exact mixtures over all cohorts of a small population, both directions."""

    # The other users' integers, and the user's own.
    _POPULATIONS = [((1, -1, 2), 1), ((0, 0, 0), 2), ((1, 1, -2), 3), ((3, -3, 1), -1)]

    @staticmethod
    def _mix(values, value, rate, laws):
        """Laws of the noisy sum without and with the user; laws[K] is the noise."""
        without, including = 0.0, 0.0
        for mask in itertools.product((0, 1), repeat=len(values)):
            joined = sum(mask)
            weight = rate**joined * (1 - rate) ** (len(values) - joined)
            total = sum(m * v for m, v in zip(mask, values, strict=True))
            absent = exact_law.shift(laws[joined], total)
            present = exact_law.shift(laws[joined + 1], total + value)
            without = without + weight * absent
            including = including + weight * ((1 - rate) * absent + rate * present)
        return without, including

    @staticmethod
    def _get_ddgauss_laws(scale, largest, radius):
        # Shares of scale S / sqrt(K); an empty cohort's noise is the server's.
        return [
            exact_law.compute_sum(
                [
                    exact_law.compute_discrete_gaussian(
                        scale / math.sqrt(max(1, joined)), radius
                    )
                ]
                * max(1, joined)
            )
            for joined in range(largest + 1)
        ]

    @pytest.mark.parametrize(("values", "value"), _POPULATIONS)
    @pytest.mark.parametrize("scale", [1.05, 1.3, 2.0])
    @pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
    def test_ddgauss(self, values, value, scale, rate):
        largest = len(values) + 1
        laws = self._get_ddgauss_laws(scale, largest, int(60 * scale) + 40)
        without, including = self._mix(values, value, rate, laws)
        exact = [
            exact_law.compute_worse_renyi(without, including, order)
            for order in _ORDERS
        ]
        local_scale, ratio = scale / math.sqrt(largest), abs(value) / scale
        base_curve = _get_near_gaussian(ratio, compute_tau(local_scale, largest))
        ideal = amplify_poisson_symmetric(
            _ORDERS, rate, base_curve=_get_gaussian(1 / ratio)
        )
        closeness = compute_closeness(local_scale, largest)
        symmetric = ideal + closeness * (2 * _ORDERS - 1) / (_ORDERS - 1)
        symmetric = np.minimum(symmetric, base_curve(_ORDERS))
        published = amplify_poisson_published(_ORDERS, rate, base_curve=base_curve)
        assert np.all(exact <= symmetric * (1 + 1e-9))
        assert np.all(exact <= published * (1 + 1e-9))

    def test_ignoring_the_closeness_would_be_wrong(self):
        laws = self._get_ddgauss_laws(0.75, 2, 100)
        without, including = self._mix((0,), 1, 0.9, laws)
        exact = exact_law.compute_worse_renyi(without, including, 3)
        ideal = amplify_poisson_symmetric([3], 0.9, base_curve=_get_gaussian(0.75))
        assert exact > 1.005 * ideal[0]

    @pytest.mark.parametrize(("values", "value"), _POPULATIONS)
    @pytest.mark.parametrize("rate", [0.1, 0.5])
    def test_skellam_needs_no_closeness(self, values, value, rate):
        law = exact_law.compute_skellam(4.0, 250)
        laws = [law] * (len(values) + 2)
        without, including = self._mix(values, value, rate, laws)
        bound = amplify_poisson_symmetric(
            _ORDERS,
            rate,
            base_curve=lambda orders: compute_rdp_skellam(
                orders,
                l2_sensitivity=abs(value),
                l1_sensitivity=abs(value),
                variance=4.0,
            ),
        )
        for order, largest in zip(_ORDERS, bound, strict=True):
            exact = exact_law.compute_worse_renyi(without, including, order)
            assert exact <= largest * (1 + 1e-9)

    def test_a_share_that_leaves_with_its_user_is_not_covered(self):
        """The cohort-size scaling is needed: with fixed shares the bound fails."""
        share = exact_law.compute_discrete_gaussian(1.0, 200)
        laws = [exact_law.compute_sum([share] * max(1, k)) for k in range(5)]
        without, including = self._mix((0, 0, 0), 1, 0.5, laws)
        exact = exact_law.compute_worse_renyi(without, including, 16)
        bound = amplify_poisson_symmetric([16], 0.5, base_curve=_get_gaussian(2.0))
        assert exact > bound[0]


class TestBruteForceFixed:
    """Exact mixtures over all cohorts of n users, one of whom is replaced."""

    _CASES = [((1, -1, 1), 1), ((0, 0, 0), 2), ((1, 1, -2), 3), ((3, -3, 1, 2), -3)]

    @staticmethod
    def _mix(values, size, law):
        cohorts = list(itertools.combinations(values, size))
        return sum(exact_law.shift(law, sum(c)) for c in cohorts) / len(cohorts)

    def _compute_exact(self, values, value, size, scale):
        radius = int(60 * scale) + 40
        share = exact_law.compute_discrete_gaussian(scale / math.sqrt(size), radius)
        law = exact_law.compute_sum([share] * size)
        first = self._mix([*values, value], size, law)
        second = self._mix([*values, -value], size, law)
        return np.array(
            [exact_law.compute_worse_renyi(first, second, order) for order in _ORDERS]
        )

    @pytest.mark.parametrize(("values", "value"), _CASES)
    @pytest.mark.parametrize("size", [2, 3])
    @pytest.mark.parametrize("scale", [1.2, 2.0, 4.0])
    def test_bounds_the_exact_divergence(self, values, value, size, scale):
        exact = self._compute_exact(values, value, size, scale)
        tau = compute_tau(scale / math.sqrt(size), size)
        bound = amplify_fixed_replace_one(
            _ORDERS,
            size / (len(values) + 1),
            base_curve=_get_near_gaussian(2 * abs(value) / scale, tau),
        )
        assert np.all(exact <= bound * (1 + 1e-9))

    def test_an_undoubled_sensitivity_would_be_wrong(self):
        exact = self._compute_exact((1, -1, 1), 1, 2, 1.2)
        bound = amplify_fixed_replace_one(
            _ORDERS,
            0.5,
            base_curve=_get_near_gaussian(1 / 1.2, compute_tau(1.2 / math.sqrt(2), 2)),
        )
        assert np.any(exact > 1.5 * bound)

    def test_a_poisson_bound_would_be_wrong(self):
        exact = self._compute_exact((1, -1, 1), 1, 2, 2.0)
        bound = amplify_poisson_published(_ORDERS, 0.5, base_curve=_get_gaussian(2.0))
        assert np.any(exact > 1.5 * bound)


class TestProof:
    def test_the_pointwise_inequality(self):
        """docs/privacy.md: h(A) >= E h(C) at every ratio r, rate q and order a."""
        rate = np.linspace(0.01, 0.99, 50)[:, None, None]
        ratio = np.geomspace(1e-4, 1e4, 81)[None, :, None]
        order = np.array([1.01, 1.5, 2.0, 3.0, 8.0])[None, None, :]

        def gain(x):
            return x**order - x ** (1 - order)

        mixed = gain(1 - rate + rate * ratio)
        mirrored = ratio * gain(1 - rate + rate / ratio)
        assert np.all(mixed + mirrored >= -1e-9 * (np.abs(mixed) + np.abs(mirrored)))

    def test_an_asymmetric_law_breaks_it(self):
        """Symmetry is needed: one-sided noise reverses the two directions."""
        z = np.arange(400)
        absent = np.exp(-0.5 * z) / np.exp(-0.5 * z).sum()
        mixed = 0.1 * absent + 0.9 * exact_law.shift(absent, 3)
        backward = exact_law.compute_renyi(absent, mixed, 8)
        forward = exact_law.compute_renyi(mixed, absent, 8)
        assert backward > 1.2 * forward


class TestLimits:
    @pytest.mark.parametrize("amplify", _AMPLIFIERS)
    def test_everyone_sampled_is_the_base_curve(self, amplify):
        orders = np.array([2.0, 3.0, 50.0, 400.0])
        found = amplify(orders, 1.0, base_curve=_get_gaussian(1.3))
        expected = compute_rdp_gaussian(orders, 1.3)
        np.testing.assert_allclose(found, expected, rtol=1e-12)

    @pytest.mark.parametrize("amplify", _AMPLIFIERS)
    def test_a_rate_near_one_is_near_the_base_curve(self, amplify):
        orders = np.array([2.0, 3.0, 50.0])
        found = amplify(orders, 1 - 1e-12, base_curve=_get_gaussian(1.3))
        np.testing.assert_allclose(found, orders / 2 / 1.69, rtol=1e-6)

    @pytest.mark.parametrize("rate", [1e-4, 1e-8, 1e-12])
    def test_a_tiny_rate_keeps_its_leading_term(self, rate):
        """q^2 C(a,2) (e^{e(2)} - 1) / (a - 1); 1 + x in floats would lose it."""
        found = amplify_poisson_symmetric([2, 4], rate, base_curve=_get_gaussian(2.0))
        expected = rate**2 * np.array([2, 4]) / 2 * math.expm1(0.25)
        np.testing.assert_allclose(found, expected, rtol=1e-3)

    @pytest.mark.parametrize("amplify", _AMPLIFIERS)
    @pytest.mark.parametrize("rate", [1e-9, 0.03, 0.5, 1.0])
    def test_large_orders_and_little_noise_are_finite(self, amplify, rate):
        orders = np.array([2.0, 256.0, 257.0, 5000.0, 32768.0])
        found = amplify(orders, rate, base_curve=_get_gaussian(0.05))
        assert np.all(np.isfinite(found)) and np.all(found >= 0)
        assert np.all(found <= compute_rdp_gaussian(orders, 0.05) * (1 + 1e-9))

    @pytest.mark.parametrize("amplify", _AMPLIFIERS)
    @pytest.mark.parametrize("rate", [0.1, 1.0])
    def test_no_noise_is_infinite_not_nan(self, amplify, rate):
        found = amplify([2, 2.5, 300], rate, base_curve=_get_gaussian(0.0))
        assert np.all(np.isposinf(found))

    def test_orders_below_an_infinite_part_are_finite(self):
        def curve(orders):
            return np.where(np.asarray(orders) <= 4, 0.1, np.inf)

        found = amplify_poisson_symmetric([2, 4, 5], 0.1, base_curve=curve)
        assert np.isfinite(found[:2]).all() and np.isposinf(found[2])

    @pytest.mark.parametrize("amplify", [_AMPLIFIERS[0], _AMPLIFIERS[2]])
    def test_endless_noise_costs_nothing(self, amplify):
        found = amplify([2, 10], 0.1, base_curve=_get_gaussian(1e9))
        assert np.all(found <= 1e-17)


class TestMonotone:
    @pytest.mark.parametrize("amplify", _AMPLIFIERS)
    def test_in_rate_order_and_noise(self, amplify):
        rates = [1e-6, 1e-3, 0.01, 0.1, 0.5, 0.9, 1.0]
        orders = np.array([2, 2.5, 3, 4, 10, 128, 256, 257, 300.0])
        curves = np.array(
            [amplify(orders, rate, base_curve=_get_gaussian(1.5)) for rate in rates]
        )
        assert np.all(np.diff(curves, axis=0) >= 0)
        assert np.all(np.diff(curves, axis=1) >= -1e-15)
        noisier = amplify(orders, 0.1, base_curve=_get_gaussian(1.6))
        assert np.all(noisier < curves[3])

    @pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
    @pytest.mark.parametrize("amplify", _AMPLIFIERS)
    def test_bad_rates(self, amplify, rate):
        with pytest.raises(ValueError, match=r"`sampling_rate` must be in \(0, 1\]"):
            amplify([2], rate, base_curve=_get_gaussian(1.0))
