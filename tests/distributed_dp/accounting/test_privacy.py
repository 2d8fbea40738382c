"""Statements: modes and refusals, limits, monotonicity, sandwiches and their words."""

import dataclasses
import itertools
import json
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld as dp_pld

from distributed_dp.accounting import (
    AS_PUBLISHED_WORDS,
    SAMPLER_TOTAL_VARIATION,
    Accountant,
    Accounting,
    AmplificationBound,
    CohortScheme,
    DDGaussParameters,
    GaussianParameters,
    Mechanism,
    Sampling,
    SkellamParameters,
    calibrate,
    compute_cohort_bounds,
    compute_epsilon_analytic_gaussian,
    compute_epsilon_from_zcdp,
    compute_privacy,
    compute_server_privacy,
    compute_zcdp_ddgauss,
)
from tests.distributed_dp.accounting import exact_law

_POISSON = CohortScheme(Sampling.POISSON, 3400, 100)
_FIXED = CohortScheme(Sampling.FIXED, 3400, 100)
_RUN = dict(num_rounds=1500, delta=1 / 3400)


def _get_parameters(kind=DDGaussParameters, **changes):
    fields = dict(
        l2_clip=0.03,
        granularity=6e-6,
        local_stddev=0.005,
        beta=math.exp(-0.5),
        bits=16,
        padded_dim=2**20,
        clients_per_round=100,
    )
    return kind(**{**fields, **changes})


def _get_gaussian(noise_multiplier=1.6, clients_per_round=100):
    return GaussianParameters(
        l2_clip=0.03,
        noise_multiplier=noise_multiplier,
        clients_per_round=clients_per_round,
    )


def _compute_epsilon(parameters, scheme=_POISSON, **keywords):
    return compute_privacy(parameters, scheme, **{**_RUN, **keywords}).epsilon


class TestModes:
    @pytest.mark.parametrize("kind", [DDGaussParameters, SkellamParameters])
    def test_poisson_is_add_or_remove(self, kind):
        statement = compute_privacy(_get_parameters(kind), _POISSON, **_RUN)
        assert statement.adjacency == "add or remove one user"
        assert "Poisson amplification for symmetric noise" in statement.bound
        assert not statement.as_published
        assert AS_PUBLISHED_WORDS not in str(statement)

    def test_published_is_proven_where_poisson_is_drawn(self):
        parameters = _get_parameters()
        statement = compute_privacy(
            parameters, _POISSON, bound=AmplificationBound.PUBLISHED, **_RUN
        )
        assert "Zhu, Wang 2019" in statement.bound
        assert not statement.as_published
        assert statement.epsilon > _compute_epsilon(parameters)

    @pytest.mark.parametrize("kind", [DDGaussParameters, SkellamParameters])
    def test_fixed_is_replace_one(self, kind):
        statement = compute_privacy(_get_parameters(kind), _FIXED, **_RUN)
        assert statement.adjacency == "replace one user"
        assert "sensitivities doubled" in statement.bound
        assert not statement.as_published
        assert statement.overflow_charge == 0.0

    def test_fixed_as_published_says_so(self):
        statement = compute_privacy(
            _get_parameters(), _FIXED, accounting=Accounting.AS_PUBLISHED, **_RUN
        )
        assert statement.adjacency == "zero out one user's update"
        assert statement.as_published
        assert AS_PUBLISHED_WORDS in str(statement)
        assert AS_PUBLISHED_WORDS in statement.bound
        assert statement.to_dict()["standing"] == AS_PUBLISHED_WORDS

    def test_honest_accounting_of_fixed_cohorts_costs_more(self):
        parameters = _get_parameters()
        published = _compute_epsilon(
            parameters, _FIXED, accounting=Accounting.AS_PUBLISHED
        )
        assert _compute_epsilon(parameters, _FIXED) > 2 * published

    @pytest.mark.parametrize("accountant", [Accountant.RDP, Accountant.PLD])
    def test_central_gaussian_names_its_accountant(self, accountant):
        statement = compute_privacy(
            _get_gaussian(), _POISSON, accountant=accountant, **_RUN
        )
        assert accountant.name in statement.accountant
        assert (statement.order is None) == (accountant is Accountant.PLD)

    @pytest.mark.parametrize(
        ("parameters", "scheme", "choices", "message"),
        [
            (
                _get_parameters(),
                _POISSON,
                dict(accounting=Accounting.AS_PUBLISHED),
                "`accounting` must be PROVEN when cohorts are Poisson",
            ),
            (
                _get_gaussian(),
                _POISSON,
                dict(accounting=Accounting.AS_PUBLISHED),
                "`accounting` must be PROVEN",
            ),
            (
                _get_parameters(),
                _FIXED,
                dict(bound=AmplificationBound.SYMMETRIC),
                "`bound` must be None for fixed-size cohorts",
            ),
            (
                _get_parameters(),
                _FIXED,
                dict(bound=AmplificationBound.PUBLISHED),
                "`bound` must be None for fixed-size cohorts",
            ),
            (
                _get_parameters(),
                _FIXED,
                dict(
                    accounting=Accounting.AS_PUBLISHED,
                    bound=AmplificationBound.SYMMETRIC,
                ),
                "`bound` must be PUBLISHED",
            ),
            (
                _get_gaussian(),
                _POISSON,
                dict(bound=AmplificationBound.PUBLISHED),
                "`bound` must be None for the central Gaussian",
            ),
            (
                _get_parameters(),
                _POISSON,
                dict(accountant=Accountant.PLD),
                "`accountant` must be RDP for the ddgauss",
            ),
            (
                _get_parameters(SkellamParameters),
                _POISSON,
                dict(accountant=Accountant.ANALYTIC),
                "`accountant` must be RDP for the skellam",
            ),
            (
                _get_gaussian(),
                _POISSON,
                dict(accountant=Accountant.ANALYTIC),
                "`accountant` can be ANALYTIC only if everyone takes part",
            ),
            (
                _get_gaussian(),
                _FIXED,
                dict(accountant=Accountant.PLD),
                "`accountant` must be RDP .* fixed-size",
            ),
            (
                _get_parameters(clients_per_round=99),
                _POISSON,
                {},
                "`clients_per_round` of the parameters must be the scheme's",
            ),
            (_get_parameters(), _POISSON, dict(num_rounds=0), "`num_rounds` must be"),
            (_get_parameters(), _POISSON, dict(num_rounds=1.5), "`num_rounds` must"),
            (_get_parameters(), _POISSON, dict(delta=0.0), r"`delta` must be in"),
            (_get_parameters(), _POISSON, dict(delta=1.0), r"`delta` must be in"),
            (
                _get_parameters(),
                _POISSON,
                dict(accounting="proven"),
                "`accounting` must be a member of Accounting",
            ),
            (
                _get_parameters(),
                _POISSON,
                dict(quantile_noise_multiplier=0.0),
                "`quantile_noise_multiplier` must be positive",
            ),
        ],
    )
    def test_refusals(self, parameters, scheme, choices, message):
        with pytest.raises(ValueError, match=message):
            compute_privacy(parameters, scheme, **{**_RUN, **choices})


class TestDelta:
    def test_charges_by_hand(self):
        statement = compute_privacy(_get_parameters(), _POISSON, **_RUN)
        bounds = compute_cohort_bounds(_POISSON)
        # The expected cohort and the user: 100 + 1 shares a coordinate.
        plain = 1500 * 101 * 2**20 * SAMPLER_TOTAL_VARIATION
        assert 2 * plain <= statement.sampler_charge <= 2.2 * plain
        assert statement.overflow_charge == 1500 * bounds.overflow_probability
        assert f"{statement.sampler_charge:.3g}" in str(statement)
        assert f"{statement.overflow_charge:.3g}" in str(statement)

    def test_a_delta_below_the_charges_is_refused(self):
        with pytest.raises(ValueError, match="`delta` must exceed .* Found 1e-08"):
            _compute_epsilon(_get_parameters(), delta=1e-8)
        # The central Gaussian has no sampler to pay for.
        assert _compute_epsilon(_get_gaussian(), delta=1e-8) < math.inf

    def test_the_charges_raise_epsilon(self):
        """Near the charges' size, epsilon grows without bound."""
        parameters = _get_parameters()
        charge = compute_privacy(parameters, _POISSON, **_RUN).sampler_charge
        near = _compute_epsilon(parameters, delta=charge * 1.0001)
        assert near > _compute_epsilon(parameters, delta=2 * charge) + 1


class TestLimits:
    def test_no_noise_claims_nothing(self):
        for kind in (DDGaussParameters, SkellamParameters):
            for scheme in (_POISSON, _FIXED):
                parameters = _get_parameters(kind, local_stddev=0.0)
                statement = compute_privacy(parameters, scheme, **_RUN)
                assert statement.epsilon == math.inf
        assert _compute_epsilon(_get_gaussian(0.0)) == math.inf
        statement = compute_privacy(_get_gaussian(0.0), _POISSON, **_RUN)
        assert json.loads(json.dumps(statement.to_dict()))["epsilon"] == "inf"

    def test_hardly_any_noise_claims_nothing(self):
        assert _compute_epsilon(_get_parameters(local_stddev=1e-6)) == math.inf

    def test_coarse_shares_claim_nothing(self):
        # 0.005 / 0.008 < 1/2 only at the largest cohort: 0.625 sqrt(100 / 188).
        parameters = _get_parameters(granularity=0.008, padded_dim=1)
        assert parameters.local_scale > 0.5
        assert _compute_epsilon(parameters) == math.inf
        skellam = _get_parameters(SkellamParameters, granularity=0.008, padded_dim=1)
        assert _compute_epsilon(skellam) < math.inf

    def test_one_release_of_everyone_is_near_the_exact_gaussian(self):
        scheme = CohortScheme(Sampling.POISSON, 100, 100)
        parameters = _get_parameters(granularity=1e-7, padded_dim=64)
        found = _compute_epsilon(parameters, scheme, num_rounds=1, delta=1e-5)
        exact = compute_epsilon_analytic_gaussian(
            1e-5, noise_multiplier=parameters.noise_multiplier
        )
        assert exact <= found <= 1.15 * exact

    def test_the_analytic_gaussian_composes(self):
        scheme = CohortScheme(Sampling.POISSON, 100, 100)
        analytic, by_pld, by_rdp = (
            _compute_epsilon(
                _get_gaussian(20.0), scheme, num_rounds=100, accountant=accountant
            )
            for accountant in (Accountant.ANALYTIC, Accountant.PLD, Accountant.RDP)
        )
        expected = compute_epsilon_analytic_gaussian(1 / 3400, noise_multiplier=2.0)
        assert analytic == expected
        assert expected <= by_pld <= expected * (1 + 1e-3)
        assert by_rdp > by_pld

    @pytest.mark.parametrize("kind", [DDGaussParameters, SkellamParameters])
    def test_a_rate_near_one_is_near_no_sampling(self, kind):
        parameters = _get_parameters(kind)
        everyone = _compute_epsilon(
            parameters, CohortScheme(Sampling.FIXED, 100, 100), num_rounds=20
        )
        most = _compute_epsilon(
            parameters, CohortScheme(Sampling.FIXED, 101, 100), num_rounds=20
        )
        # Only the sampler's charge, which differs at q = 1, may tell them apart.
        assert 0.9 * everyone < most <= everyone * (1 + 1e-5)


class TestMonotone:
    @pytest.mark.parametrize("kind", [DDGaussParameters, SkellamParameters])
    @pytest.mark.parametrize("scheme", [_POISSON, _FIXED])
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
        parameters = _get_parameters(kind)
        changed = dataclasses.replace(parameters, **{field: value})
        assert _compute_epsilon(changed, scheme) > _compute_epsilon(parameters, scheme)

    @pytest.mark.parametrize("parameters", [_get_parameters(), _get_gaussian()])
    @pytest.mark.parametrize("sampling", list(Sampling))
    def test_epsilon_rises_with_rounds_rate_and_smaller_delta(
        self, parameters, sampling
    ):
        scheme = CohortScheme(sampling, 3400, 100)
        by_rounds = [
            _compute_epsilon(parameters, scheme, num_rounds=rounds)
            for rounds in (1, 10, 100, 1500, 3000)
        ]
        assert np.all(np.diff(by_rounds) > 0)
        by_rate = [
            _compute_epsilon(parameters, CohortScheme(sampling, population, 100))
            for population in (100_000, 3400, 1000, 200)
        ]
        assert np.all(np.diff(by_rate) > 0)
        by_delta = [
            _compute_epsilon(parameters, scheme, delta=delta)
            for delta in (0.1, 1e-3, 1e-5)
        ]
        assert np.all(np.diff(by_delta) > 0)

    @pytest.mark.parametrize("parameters", [_get_parameters(), _get_gaussian()])
    def test_the_quantile_is_paid_for(self, parameters):
        plain = _compute_epsilon(parameters)
        some = _compute_epsilon(
            parameters, quantile_noise_multiplier=10.0, quantile_contribution=64
        )
        more = _compute_epsilon(
            parameters, quantile_noise_multiplier=5.0, quantile_contribution=64
        )
        assert plain < some < more

    def test_the_quantile_of_the_central_gaussian_by_hand(self):
        joint = 1 / math.sqrt(1 / 1.6**2 + 1 / 5**2)
        expected = _compute_epsilon(_get_gaussian(joint))
        found = _compute_epsilon(_get_gaussian(1.6), quantile_noise_multiplier=5.0)
        assert found == pytest.approx(expected, rel=1e-12)
        fixed = _compute_epsilon(
            _get_gaussian(1.6), _FIXED, quantile_noise_multiplier=5.0
        )
        assert fixed == pytest.approx(
            _compute_epsilon(_get_gaussian(joint), _FIXED), rel=1e-12
        )

    def test_a_quantile_with_coarse_shares_claims_nothing(self):
        found = _compute_epsilon(_get_parameters(), quantile_noise_multiplier=5.0)
        assert found == math.inf


class TestSandwich:
    def test_between_the_optimum_and_the_published_bound(self):
        """Central Gaussian by PLD <= ours <= published <= no amplification."""
        parameters = _get_parameters()
        effective = parameters.central_scale / parameters.l2_sensitivity
        accountant = dp_pld.PLDAccountant()
        event = dp_accounting.PoissonSampledDpEvent(
            100 / 3400, dp_accounting.GaussianDpEvent(effective)
        )
        accountant.compose(event, 1500)
        optimum = accountant.get_epsilon(1 / 3400)
        ours = _compute_epsilon(parameters)
        published = _compute_epsilon(parameters, bound=AmplificationBound.PUBLISHED)
        unamplified = compute_server_privacy(
            parameters, num_shares=100, num_clients=3400, **_RUN
        ).epsilon
        assert optimum < ours < published < unamplified
        assert ours < 1.3 * optimum

    def test_rdp_of_the_central_gaussian_is_above_pld(self):
        by_rdp = _compute_epsilon(_get_gaussian())
        by_pld = _compute_epsilon(_get_gaussian(), accountant=Accountant.PLD)
        assert by_pld < by_rdp < 1.3 * by_pld

    @pytest.mark.parametrize("local_stddev", [1.1, 1.5, 4.0])
    @pytest.mark.parametrize("population", [3, 4, 8])
    def test_one_round_against_the_exact_delta(self, local_stddev, population):
        """The exact delta of a whole round in one dimension, Poisson cohorts."""
        scheme = CohortScheme(Sampling.POISSON, population, 2)
        parameters = _get_parameters(
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


class TestServer:
    def test_zero_out_without_amplification(self):
        statement = compute_server_privacy(
            _get_parameters(), num_shares=100, num_clients=3400, **_RUN
        )
        assert statement.adjacency == "zero out one user's update"
        assert statement.view == "the server itself"
        assert statement.epsilon > 10 * _compute_epsilon(_get_parameters())

    def test_by_zcdp(self):
        """The curve is at most rho alpha, and at a fine grid equal to it."""
        parameters = _get_parameters()
        rho = compute_zcdp_ddgauss(
            l2_sensitivity=parameters.l2_sensitivity,
            l1_sensitivity=parameters.l1_sensitivity,
            local_scale=parameters.local_scale,
            num_shares=60,
            dim=parameters.padded_dim,
        )
        found = compute_server_privacy(
            parameters, num_rounds=5, num_shares=60, delta=1e-3, num_clients=3400
        )
        remaining = 1e-3 - found.sampler_charge
        expected = compute_epsilon_from_zcdp(5 * rho, delta=remaining)
        assert found.epsilon == pytest.approx(expected.epsilon, rel=1e-9)

    def test_fewer_shares_and_more_rounds_cost_more(self):
        parameters = _get_parameters()
        keywords = dict(delta=1e-3, num_clients=3400)
        by_shares = [
            compute_server_privacy(
                parameters, num_rounds=3, num_shares=shares, **keywords
            ).epsilon
            for shares in (100, 70.5, 40, 10)
        ]
        assert np.all(np.diff(by_shares) > 0)
        more = compute_server_privacy(
            parameters, num_rounds=4, num_shares=100, **keywords
        )
        assert more.epsilon > by_shares[0]

    def test_the_largest_cohort_decides_how_coarse_a_share_is(self):
        parameters = _get_parameters(granularity=0.006, padded_dim=1)
        keywords = dict(num_rounds=1, num_shares=50, delta=1e-3, num_clients=3400)
        fine = compute_server_privacy(parameters, **keywords)
        coarse = compute_server_privacy(parameters, max_shares=188, **keywords)
        assert fine.epsilon < coarse.epsilon < math.inf
        over = compute_server_privacy(parameters, max_shares=300, **keywords)
        assert over.epsilon == math.inf

    def test_dropout_of_the_published_figure(self):
        """Figure 9's setting: epsilon rises with dropout, as sqrt(n / n') at least."""
        scheme = CohortScheme(Sampling.FIXED, 100, 100)
        for epsilon in (1, 2, 4, 6, 8):
            parameters = calibrate(
                Mechanism.DDGAUSS,
                scheme,
                epsilon=epsilon,
                delta=1e-5,
                num_rounds=1500,
                l2_clip=1.0,
                bits=32,
                padded_dim=2**20,
                accounting=Accounting.AS_PUBLISHED,
            )
            found = [
                compute_server_privacy(
                    parameters,
                    num_rounds=1500,
                    num_shares=100 * (1 - dropout),
                    delta=1e-5,
                    num_clients=100,
                ).epsilon
                for dropout in (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
            ]
            # No dropout: the calibrated epsilon again.
            assert found[0] == pytest.approx(epsilon, rel=1e-4)
            assert np.all(np.diff(found) > 0)
            # At 60 %: between sqrt(1 / 0.4) and 1 / 0.4 times as much.
            assert 1.5 < found[-1] / epsilon < 2.5

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(num_shares=0), "`num_shares` must be positive"),
            (dict(num_shares=math.nan), "`num_shares` must be positive"),
            (dict(num_rounds=0), "`num_rounds` must be"),
            (dict(delta=1.5), "`delta` must be in"),
            (dict(delta=1e-12), "`delta` must exceed"),
            (dict(num_clients=0), "`num_clients` must be"),
            (dict(max_shares=1.5), "`max_shares` must be"),
        ],
    )
    def test_bad_values(self, changes, message):
        keywords = dict(num_rounds=9, num_shares=100, delta=1e-5, num_clients=3400)
        with pytest.raises(ValueError, match=message):
            compute_server_privacy(_get_parameters(), **{**keywords, **changes})

    def test_a_central_mechanism_has_no_server_view(self):
        with pytest.raises(ValueError, match="`parameters` must be a distributed"):
            compute_server_privacy(
                _get_gaussian(), num_rounds=1, num_shares=1, delta=0.1, num_clients=9
            )


class TestWords:
    def test_everything_is_printed(self):
        statement = compute_privacy(_get_parameters(), _POISSON, **_RUN)
        text = str(statement)
        for part in (
            f"epsilon = {statement.epsilon:.6g}",
            "delta = 0.000294118",
            "delta * N = 1)",
            "analyst of the released models",
            "add or remove one user",
            "Poisson: each user joins independently",
            "q = 0.0294118",
            "T = 1500",
            "order = 5",
            "Poisson amplification for symmetric noise",
            "RDP",
            "secure aggregation",
            "independent",
            "expected cohort size 100",
            "before centring and decoding",
            "diagnostics, losses, accuracies",
            "fractions clipped",
            "private validation data",
        ):
            assert part in text, part
        assert AS_PUBLISHED_WORDS not in text

    @pytest.mark.parametrize(
        ("parameters", "scheme", "accounting"),
        [
            *itertools.product(
                [_get_parameters(), _get_gaussian()], [_POISSON], [Accounting.PROVEN]
            ),
            *itertools.product(
                [_get_parameters(), _get_gaussian()], [_FIXED], list(Accounting)
            ),
        ],
    )
    def test_json_holds_every_field(self, parameters, scheme, accounting):
        statement = compute_privacy(parameters, scheme, accounting=accounting, **_RUN)
        values = json.loads(json.dumps(statement.to_dict()))
        names = {field.name for field in dataclasses.fields(statement)}
        assert names <= set(values)
        assert values["delta_times_num_clients"] == pytest.approx(1.0)
        assert values["epsilon"] == statement.epsilon
        assert ("standing" in values) == statement.as_published
