"""One round's release: curves by hand, closeness and the quantile's coordinate."""

import math

import numpy as np
import pytest

from distributed_dp.accounting import (
    DDGaussParameters,
    GaussianParameters,
    SkellamParameters,
    amplify_poisson_symmetric,
    compute_closeness,
    compute_rdp_ddgauss,
    compute_rdp_gaussian,
    compute_rdp_skellam,
)
from distributed_dp.accounting.release import QuantileRelease, build_release
from tests.distributed_dp.accounting import exact_law


def _get_parameters(kind, local_stddev=4.0):
    return kind(
        l2_clip=3.0,
        granularity=0.5,
        local_stddev=local_stddev,
        beta=0.0,
        bits=10,
        padded_dim=16,
        clients_per_round=25,
    )


def _build(parameters, **keywords):
    return build_release(
        parameters,
        num_shares=25,
        local_stddev=parameters.local_stddev,
        central_stddev=parameters.central_stddev,
        **keywords,
    )


class TestBuildRelease:
    def test_ddgauss_by_hand(self):
        release = _build(_get_parameters(DDGaussParameters))
        # Delta_2 = 10 (see the parameters' test), scale of the sum 5 * 4 / 0.5 = 40.
        np.testing.assert_allclose(release.moment_curve([2.0]), 2 / 2 * (10 / 40) ** 2)
        assert release.closeness == pytest.approx(16 * compute_closeness(8.0, 25))
        assert release.num_coordinates == 16

    @pytest.mark.parametrize("local_stddev", [0.3, 0.4, 0.5])
    def test_a_coarse_grid_pays_for_tau(self, local_stddev):
        parameters = _get_parameters(DDGaussParameters, local_stddev=local_stddev)
        expected = compute_rdp_ddgauss(
            [1.5, 2.0, 30.0],
            l2_sensitivity=10.0,
            l1_sensitivity=40.0,
            local_scale=local_stddev / 0.5,
            num_shares=25,
            dim=16,
        )
        found = _build(parameters).base_curve(np.array([1.5, 2.0, 30.0]))
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        ideal = _build(parameters).moment_curve(np.array([1.5, 2.0, 30.0]))
        assert np.all(found > 1.0001 * ideal)

    def test_replace_one_doubles_the_sensitivity(self):
        for kind in (DDGaussParameters, GaussianParameters):
            if kind is GaussianParameters:
                parameters = GaussianParameters(
                    l2_clip=1.0, noise_multiplier=3.0, clients_per_round=25
                )
                single, double = (
                    build_release(
                        parameters,
                        num_shares=1,
                        local_stddev=3.0,
                        central_stddev=3.0,
                        sensitivity_factor=factor,
                    )
                    for factor in (1, 2)
                )
            else:
                parameters = _get_parameters(kind)
                single = _build(parameters)
                double = _build(parameters, sensitivity_factor=2)
            np.testing.assert_allclose(
                double.base_curve([2.0]), 4 * single.base_curve([2.0]), rtol=1e-9
            )

    def test_skellam_sums_exactly(self):
        release = _build(_get_parameters(SkellamParameters))
        expected = compute_rdp_skellam(
            [2.0], l2_sensitivity=10.0, l1_sensitivity=40.0, variance=1600.0
        )
        np.testing.assert_allclose(release.base_curve([2.0]), expected)
        assert release.closeness == 0.0

    def test_the_quantile_adds_a_coordinate(self):
        quantile = QuantileRelease(noise_multiplier=8.0, contribution=4)
        release = _build(_get_parameters(DDGaussParameters), quantile=quantile)
        assert release.num_coordinates == 17
        # 1 / z_eff^2 = 1 / z^2 + 1 / z_b^2.
        expected = (10 / 40) ** 2 + 1 / 8**2
        np.testing.assert_allclose(release.moment_curve([2.0]), expected, rtol=1e-12)
        # A share of the quantile's noise has scale 8 * 4 / 5.
        closeness = 16 * compute_closeness(8.0, 25) + compute_closeness(6.4, 25)
        assert release.closeness == pytest.approx(closeness)

    def test_a_coarse_quantile_has_its_own_closeness(self):
        quantile = QuantileRelease(noise_multiplier=3.0, contribution=1)
        release = _build(_get_parameters(DDGaussParameters), quantile=quantile)
        assert release.closeness == pytest.approx(compute_closeness(0.6, 25))
        too_coarse = QuantileRelease(noise_multiplier=2.0, contribution=1)
        release = _build(_get_parameters(DDGaussParameters), quantile=too_coarse)
        assert release.closeness == math.inf

    def test_the_joint_release_by_brute_force(self):
        """Two coordinates, a Poisson mixture in two dimensions, both directions."""
        radius, rate, scale, quantile_scale = 60, 0.3, 2.0, 3.0
        first = exact_law.compute_discrete_gaussian(scale, radius)
        second = exact_law.compute_discrete_gaussian(quantile_scale, radius)
        without = np.outer(first, second).ravel()
        moved = np.outer(exact_law.shift(first, 2), exact_law.shift(second, -1)).ravel()
        mixed = (1 - rate) * without + rate * moved
        joint = 1 / math.hypot(2 / scale, 1 / quantile_scale)
        for order in (2, 3, 8):
            exact = exact_law.compute_worse_renyi(without, mixed, order)
            bounds = [
                amplify_poisson_symmetric(
                    [order], rate, base_curve=lambda a, z=z: compute_rdp_gaussian(a, z)
                )[0]
                for z in (joint, scale / 2)
            ]
            # Exact for one discrete Gaussian; the vector's noise alone is too little.
            assert exact <= bounds[0] * (1 + 1e-9)
            assert exact > bounds[1]

    @pytest.mark.parametrize(
        ("noise_multiplier", "contribution", "name"),
        [
            (0.0, 1, "quantile_noise_multiplier"),
            (math.nan, 1, "quantile_noise_multiplier"),
            (1.0, 0, "quantile_contribution"),
            (1.0, 1.5, "quantile_contribution"),
        ],
    )
    def test_bad_quantiles(self, noise_multiplier, contribution, name):
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            QuantileRelease(
                noise_multiplier=noise_multiplier, contribution=contribution
            )
