"""Conversion to (epsilon, delta): dp_accounting, mpmath and round trips."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting import rdp as dp_rdp
from dp_accounting.pld import common, privacy_loss_mechanism

from distributed_dp.accounting import (
    calibrate_analytic_gaussian,
    compute_delta_analytic_gaussian,
    compute_epsilon_analytic_gaussian,
    compute_epsilon_from_rdp,
    compute_epsilon_from_zcdp,
    compute_rdp_gaussian,
)
from distributed_dp.accounting.conversion import INTEGER_ORDERS, REAL_ORDERS

_DELTAS = [1e-12, 1e-5, 1e-2, 0.3]


def _compute_exact_delta(epsilon, z):
    with mpmath.workdps(60):
        half, shift = mpmath.mpf(1) / (2 * z), mpmath.mpf(epsilon) * z
        first = mpmath.ncdf(half - shift)
        return float(first - mpmath.exp(epsilon) * mpmath.ncdf(-half - shift))


class TestRdp:
    @pytest.mark.parametrize("delta", _DELTAS)
    def test_against_dp_accounting(self, delta):
        orders = [1.5, 2, 3, 8, 64]
        curve = [0.1 * order + 0.3 for order in orders]
        found = compute_epsilon_from_rdp(orders, curve, delta=delta)
        expected, order = dp_rdp.compute_epsilon(orders, curve, delta)
        assert found.epsilon == pytest.approx(expected, rel=1e-12)
        assert found.order == order

    def test_by_hand(self):
        # 0.5 + log(1 / (4 * 0.01)) / 3 + log(3 / 4).
        found = compute_epsilon_from_rdp([4], [0.5], delta=0.01)
        expected = 0.5 + math.log(25) / 3 + math.log(0.75)
        assert found.epsilon == pytest.approx(expected, rel=1e-13)

    def test_is_floored_at_zero(self):
        assert compute_epsilon_from_rdp([100], [0.0], delta=0.9).epsilon == 0.0

    def test_infinite_orders_are_passed_over(self):
        found = compute_epsilon_from_rdp([2, 3], [1.0, math.inf], delta=0.01)
        assert found.order == 2.0
        assert compute_epsilon_from_rdp([2], [math.inf], delta=0.1).epsilon == math.inf

    @pytest.mark.parametrize("curve", [[-0.1, 1], [math.nan, 1], [1.0]])
    def test_bad_curves(self, curve):
        with pytest.raises(ValueError, match="`rdp` must hold one non-negative value"):
            compute_epsilon_from_rdp([2, 3], curve, delta=0.1)

    @pytest.mark.parametrize("delta", [0.0, 1.0, -1e-9, math.nan, 2])
    def test_bad_delta(self, delta):
        with pytest.raises(ValueError, match=r"`delta` must be in \(0, 1\)"):
            compute_epsilon_from_rdp([2], [1.0], delta=delta)

    def test_orders_cover_small_and_large_epsilons(self):
        """The best order is never an end of the grid in the range of use."""
        for z in np.geomspace(0.03, 3000, 30):
            curve = compute_rdp_gaussian(REAL_ORDERS, z)
            best = compute_epsilon_from_rdp(REAL_ORDERS, curve, delta=1e-6)
            assert REAL_ORDERS[0] < best.order < REAL_ORDERS[-1]
        assert INTEGER_ORDERS[0] == 2
        assert np.all(INTEGER_ORDERS == np.round(INTEGER_ORDERS))
        assert np.all(np.diff(INTEGER_ORDERS) > 0)


class TestZcdp:
    @pytest.mark.parametrize("delta", _DELTAS)
    @pytest.mark.parametrize("rho", [1e-6, 0.01, 0.5, 20.0])
    def test_sandwich(self, rho, delta):
        """Between the exact Gaussian and Bun and Steinke's closed form."""
        found = compute_epsilon_from_zcdp(rho, delta=delta).epsilon
        crude = rho + 2 * math.sqrt(rho * math.log(1 / delta))
        optimal = compute_epsilon_analytic_gaussian(
            delta, noise_multiplier=1 / math.sqrt(2 * rho)
        )
        assert optimal <= found < crude

    def test_bad_rho(self):
        with pytest.raises(ValueError, match="`rho` must be at least 0"):
            compute_epsilon_from_zcdp(-1.0, delta=0.1)


class TestAnalyticGaussian:
    @pytest.mark.parametrize("z", [0.05, 0.7, 3.0, 200.0])
    @pytest.mark.parametrize("epsilon", [0.0, 1e-3, 0.5, 3.0, 30.0])
    def test_delta_against_mpmath(self, z, epsilon):
        found = compute_delta_analytic_gaussian(epsilon, noise_multiplier=z)
        expected = _compute_exact_delta(epsilon, z)
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-200)

    @pytest.mark.parametrize("z", [0.1, 0.7, 3.0, 200.0])
    @pytest.mark.parametrize("delta", _DELTAS)
    def test_epsilon_inverts_delta_on_the_safe_side(self, z, delta):
        epsilon = compute_epsilon_analytic_gaussian(delta, noise_multiplier=z)
        found = compute_delta_analytic_gaussian(epsilon, noise_multiplier=z)
        assert found <= delta
        if epsilon > 0:
            assert found == pytest.approx(delta, rel=1e-6)

    @pytest.mark.parametrize("epsilon", [1e-4, 0.1, 1.0, 6.0, 50.0, 1000.0])
    @pytest.mark.parametrize("delta", [*_DELTAS, 1e-30])
    def test_calibration_is_safe_and_tight(self, epsilon, delta):
        stddev = calibrate_analytic_gaussian(epsilon, delta, sensitivity=2.5)
        z = stddev / 2.5
        assert compute_delta_analytic_gaussian(epsilon, noise_multiplier=z) <= delta
        less = compute_delta_analytic_gaussian(epsilon, noise_multiplier=z * 0.9999)
        assert less > delta

    @pytest.mark.parametrize("epsilon", [0.75, 3.0, 6.0])
    def test_against_dp_accounting(self, epsilon):
        found = calibrate_analytic_gaussian(epsilon, 1e-5, sensitivity=1.0)
        target = common.DifferentialPrivacyParameters(epsilon, 1e-5)
        kind = privacy_loss_mechanism.GaussianPrivacyLoss
        expected = kind.from_privacy_guarantee(target).standard_deviation
        assert found == pytest.approx(expected, rel=1e-4)

    def test_is_tighter_than_the_classical_formula(self):
        found = calibrate_analytic_gaussian(0.5, 1e-5, sensitivity=1.0)
        assert found < math.sqrt(2 * math.log(1.25e5)) / 0.5

    def test_no_noise(self):
        found = compute_epsilon_analytic_gaussian(1e-5, noise_multiplier=0.0)
        assert found == math.inf

    @pytest.mark.parametrize(
        ("epsilon", "delta", "sensitivity", "name"),
        [
            (0.0, 0.1, 1.0, "epsilon"),
            (math.inf, 0.1, 1.0, "epsilon"),
            (1.0, 0.0, 1.0, "delta"),
            (1.0, 0.1, 0.0, "sensitivity"),
        ],
    )
    def test_bad_values(self, epsilon, delta, sensitivity, name):
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            calibrate_analytic_gaussian(epsilon, delta, sensitivity=sensitivity)
