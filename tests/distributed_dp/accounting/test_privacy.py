"""The analyst's epsilon: charges, limits, monotonicity and sandwiches."""

import dataclasses
import json
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld as dp_pld

from distributed_dp.accounting import (
    SAMPLER_TOTAL_VARIATION,
    Accountant,
    AmplificationBound,
    CohortScheme,
    DDGaussParameters,
    Sampling,
    SkellamParameters,
    compute_cohort_bounds,
    compute_epsilon_analytic_gaussian,
    compute_privacy,
    compute_server_privacy,
)
from distributed_dp.accounting.pld import compute_epsilon_pld
from tests.distributed_dp.accounting import exact_law
from tests.distributed_dp.accounting.run_settings import (
    FIXED,
    POISSON,
    RUN,
    compute_epsilon,
    get_gaussian,
    get_parameters,
)


class TestDelta:
    def test_charges_by_hand(self):
        statement = compute_privacy(get_parameters(), POISSON, **RUN)
        bounds = compute_cohort_bounds(POISSON)
        # The expected cohort and the user: 100 + 1 shares a coordinate.
        plain = 1500 * 101 * 2**20 * SAMPLER_TOTAL_VARIATION
        assert 2 * plain <= statement.sampler_charge <= 2.2 * plain
        assert statement.overflow_charge == 1500 * bounds.overflow_probability
        assert f"{statement.sampler_charge:.3g}" in str(statement)
        assert f"{statement.overflow_charge:.3g}" in str(statement)

    def test_a_delta_below_the_charges_is_refused(self):
        with pytest.raises(ValueError, match="`delta` must exceed .* Found 1e-10"):
            compute_epsilon(get_parameters(), delta=1e-10)
        # The central Gaussian has no sampler to pay for.
        assert compute_epsilon(get_gaussian(), delta=1e-10) < math.inf

    def test_the_charges_raise_epsilon(self):
        """Near the charges' size, epsilon grows without bound."""
        parameters = get_parameters()
        statement = compute_privacy(parameters, POISSON, **RUN)
        charge = statement.sampler_charge + statement.overflow_charge
        near = compute_epsilon(parameters, delta=charge * 1.0001)
        assert near > compute_epsilon(parameters, delta=2 * charge) + 1


class TestLimits:
    def test_no_noise_claims_nothing(self):
        for kind in (DDGaussParameters, SkellamParameters):
            for scheme in (POISSON, FIXED):
                parameters = get_parameters(kind, local_stddev=0.0)
                statement = compute_privacy(parameters, scheme, **RUN)
                assert statement.epsilon == math.inf
        assert compute_epsilon(get_gaussian(0.0)) == math.inf
        statement = compute_privacy(get_gaussian(0.0), POISSON, **RUN)
        assert json.loads(json.dumps(statement.to_dict()))["epsilon"] == "inf"

    def test_hardly_any_noise_claims_nothing(self):
        assert compute_epsilon(get_parameters(local_stddev=1e-6)) == math.inf

    def test_coarse_shares_claim_nothing(self):
        # 0.005 / 0.008 < 1/2 only at the largest cohort: 0.625 sqrt(100 / 188).
        parameters = get_parameters(granularity=0.008, padded_dim=1)
        assert parameters.local_scale > 0.5
        assert compute_epsilon(parameters) == math.inf
        skellam = get_parameters(SkellamParameters, granularity=0.008, padded_dim=1)
        assert compute_epsilon(skellam) < math.inf

    def test_one_release_of_everyone_is_near_the_exact_gaussian(self):
        scheme = CohortScheme(Sampling.POISSON, 100, 100)
        parameters = get_parameters(granularity=1e-7, padded_dim=64)
        found = compute_epsilon(parameters, scheme, num_rounds=1, delta=1e-5)
        exact = compute_epsilon_analytic_gaussian(
            1e-5, noise_multiplier=parameters.noise_multiplier
        )
        assert exact <= found <= 1.15 * exact

    def test_the_analytic_gaussian_composes(self):
        scheme = CohortScheme(Sampling.POISSON, 100, 100)
        analytic, by_pld, by_rdp = (
            compute_epsilon(
                get_gaussian(20.0), scheme, num_rounds=100, accountant=accountant
            )
            for accountant in (Accountant.ANALYTIC, Accountant.PLD, Accountant.RDP)
        )
        expected = compute_epsilon_analytic_gaussian(1 / 3400, noise_multiplier=2.0)
        assert analytic == expected
        assert expected <= by_pld <= expected * (1 + 1e-3)
        assert by_rdp > by_pld

    @pytest.mark.parametrize("kind", [DDGaussParameters, SkellamParameters])
    def test_a_rate_near_one_is_near_no_sampling(self, kind):
        parameters = get_parameters(kind)
        everyone = compute_epsilon(
            parameters, CohortScheme(Sampling.FIXED, 100, 100), num_rounds=20
        )
        most = compute_epsilon(
            parameters, CohortScheme(Sampling.FIXED, 101, 100), num_rounds=20
        )
        # Only the sampler's charge, which differs at q = 1, may tell them apart.
        assert 0.9 * everyone < most <= everyone * (1 + 1e-5)


class TestMonotone:
    @pytest.mark.parametrize("kind", [DDGaussParameters, SkellamParameters])
    @pytest.mark.parametrize("scheme", [POISSON, FIXED])
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("local_stddev", 0.004),
            ("l2_clip", 0.04),
            ("granularity", 1e-5),
            ("padded_dim", 2**21),
            ("beta", 0.1),
            ("beta", 0.0),
        ],
    )
    def test_epsilon_rises_with_each_parameter(self, kind, scheme, field, value):
        parameters = get_parameters(kind)
        changed = dataclasses.replace(parameters, **{field: value})
        assert compute_epsilon(changed, scheme) > compute_epsilon(parameters, scheme)

    @pytest.mark.parametrize("parameters", [get_parameters(), get_gaussian()])
    @pytest.mark.parametrize("sampling", list(Sampling))
    def test_epsilon_rises_with_rounds_rate_and_smaller_delta(
        self, parameters, sampling
    ):
        scheme = CohortScheme(sampling, 3400, 100)
        by_rounds = [
            compute_epsilon(parameters, scheme, num_rounds=rounds)
            for rounds in (1, 10, 100, 1500, 3000)
        ]
        assert np.all(np.diff(by_rounds) > 0)
        by_rate = [
            compute_epsilon(parameters, CohortScheme(sampling, population, 100))
            for population in (100_000, 3400, 1000, 200)
        ]
        assert np.all(np.diff(by_rate) > 0)
        by_delta = [
            compute_epsilon(parameters, scheme, delta=delta)
            for delta in (0.1, 1e-3, 1e-5)
        ]
        assert np.all(np.diff(by_delta) > 0)

    @pytest.mark.parametrize("parameters", [get_parameters(), get_gaussian()])
    def test_the_quantile_is_paid_for(self, parameters):
        plain = compute_epsilon(parameters)
        some = compute_epsilon(
            parameters, quantile_noise_multiplier=10.0, quantile_contribution=64
        )
        more = compute_epsilon(
            parameters, quantile_noise_multiplier=5.0, quantile_contribution=64
        )
        assert plain < some < more

    def test_the_quantile_of_the_central_gaussian_by_hand(self):
        joint = 1 / math.sqrt(1 / 1.6**2 + 1 / 5**2)
        expected = compute_epsilon(get_gaussian(joint))
        found = compute_epsilon(get_gaussian(1.6), quantile_noise_multiplier=5.0)
        assert found == pytest.approx(expected, rel=1e-12)
        fixed = compute_epsilon(get_gaussian(1.6), FIXED, quantile_noise_multiplier=5.0)
        assert fixed == pytest.approx(
            compute_epsilon(get_gaussian(joint), FIXED), rel=1e-12
        )

    def test_a_quantile_with_coarse_shares_claims_nothing(self):
        found = compute_epsilon(get_parameters(), quantile_noise_multiplier=5.0)
        assert found == math.inf


class TestSandwich:
    def test_between_the_optimum_and_the_published_bound(self):
        """Central Gaussian by PLD <= ours <= published <= no amplification."""
        parameters = get_parameters()
        effective = parameters.central_scale / parameters.l2_sensitivity
        accountant = dp_pld.PLDAccountant()
        event = dp_accounting.PoissonSampledDpEvent(
            100 / 3400, dp_accounting.GaussianDpEvent(effective)
        )
        accountant.compose(event, 1500)
        optimum = accountant.get_epsilon(1 / 3400)
        ours = compute_epsilon(parameters)
        published = compute_epsilon(parameters, bound=AmplificationBound.PUBLISHED)
        unamplified = compute_server_privacy(
            parameters, num_shares=100, max_shares=188, num_clients=3400, **RUN
        ).epsilon
        assert optimum < ours < published < unamplified
        assert ours < 1.3 * optimum

    def test_rdp_of_the_central_gaussian_is_above_pld(self):
        by_rdp = compute_epsilon(get_gaussian())
        by_pld = compute_epsilon(get_gaussian(), accountant=Accountant.PLD)
        assert by_pld < by_rdp < 1.3 * by_pld

    def test_pld_refuses_a_delta_that_its_tails_hide(self):
        """At 1e-15 a multiplier of 1e8 was asked for, where 50 do."""
        with pytest.raises(ValueError, match="^`delta` must be at least 1e-12"):
            compute_epsilon_pld(45.0, 1.0, num_rounds=40, delta=1e-13)
        found = compute_epsilon_pld(45.0, 1.0, num_rounds=40, delta=1e-12)
        exact = compute_epsilon_analytic_gaussian(
            1e-12, noise_multiplier=45 / math.sqrt(40)
        )
        assert exact <= found <= 1.01 * exact

    @pytest.mark.parametrize("noise_multiplier", [1e-4, 1e-8, 1e-200])
    def test_pld_of_next_to_no_noise_is_infinite(self, noise_multiplier):
        found = compute_epsilon_pld(noise_multiplier, 0.5, num_rounds=2, delta=1e-5)
        assert found == math.inf

    @pytest.mark.parametrize("local_stddev", [1.1, 1.5, 4.0])
    @pytest.mark.parametrize("population", [3, 4, 8])
    def test_one_round_against_the_exact_delta(self, local_stddev, population):
        """The exact delta of a whole round in one dimension, Poisson cohorts."""
        scheme = CohortScheme(Sampling.POISSON, population, 2)
        parameters = get_parameters(
            l2_clip=1.0,
            granularity=1.0,
            local_stddev=local_stddev,
            beta=0.0,
            padded_dim=1,
            clients_per_round=2,
        )
        assert parameters.l2_sensitivity == 2.0
        bounds = compute_cohort_bounds(scheme)
        scale, rate = parameters.central_scale, scheme.sampling_rate
        radius = int(30 * scale) + 60
        laws = {}
        for joined in range(population + 1):
            shares = min(max(joined, bounds.low), bounds.high)
            share = exact_law.compute_discrete_gaussian(
                scale / math.sqrt(shares), radius
            )
            laws[joined] = exact_law.compute_sum([share] * max(shares, joined))
        without, including = 0.0, 0.0
        for joined in range(population):
            weight = math.comb(population - 1, joined) * rate**joined
            weight *= (1 - rate) ** (population - 1 - joined)
            absent = laws[joined]
            present = exact_law.shift(laws[joined + 1], 2)
            without = without + weight * absent
            including = including + weight * ((1 - rate) * absent + rate * present)
        keywords = dict(num_rounds=1, delta=1e-3)
        for bound in AmplificationBound:
            epsilon = compute_privacy(
                parameters, scheme, bound=bound, **keywords
            ).epsilon
            exact = max(
                exact_law.compute_hockey_stick(without, including, epsilon),
                exact_law.compute_hockey_stick(including, without, epsilon),
            )
            assert exact <= 1e-3
            # A quarter of the epsilon would not do: the bound is not vacuous.
            less = exact_law.compute_hockey_stick(including, without, epsilon / 4)
            assert less > 1e-3
