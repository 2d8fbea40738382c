"""Sampler, bound and accountant: what goes together and what is refused."""

import pytest

from distributed_dp.accounting import (
    AS_PUBLISHED_WORDS,
    Accountant,
    Accounting,
    AmplificationBound,
    DDGaussParameters,
    SkellamParameters,
    compute_privacy,
)
from tests.distributed_dp.accounting.run_settings import (
    FIXED,
    POISSON,
    RUN,
    compute_epsilon,
    get_gaussian,
    get_parameters,
)


class TestModes:
    @pytest.mark.parametrize("kind", [DDGaussParameters, SkellamParameters])
    def test_poisson_is_add_or_remove(self, kind):
        statement = compute_privacy(get_parameters(kind), POISSON, **RUN)
        assert statement.adjacency == "add or remove one user"
        assert "Poisson amplification for symmetric noise" in statement.bound
        assert not statement.as_published
        assert AS_PUBLISHED_WORDS not in str(statement)

    def test_published_is_proven_where_poisson_is_drawn(self):
        parameters = get_parameters()
        statement = compute_privacy(
            parameters, POISSON, bound=AmplificationBound.PUBLISHED, **RUN
        )
        assert "Zhu, Wang 2019" in statement.bound
        assert not statement.as_published
        assert statement.epsilon > compute_epsilon(parameters)

    @pytest.mark.parametrize("kind", [DDGaussParameters, SkellamParameters])
    def test_fixed_is_replace_one(self, kind):
        statement = compute_privacy(get_parameters(kind), FIXED, **RUN)
        assert statement.adjacency == "replace one user"
        assert "sensitivities doubled" in statement.bound
        assert not statement.as_published
        assert statement.overflow_charge == 0.0

    def test_fixed_as_published_says_so(self):
        statement = compute_privacy(
            get_parameters(), FIXED, accounting=Accounting.AS_PUBLISHED, **RUN
        )
        assert statement.adjacency == "zero out one user's update"
        assert statement.as_published
        assert AS_PUBLISHED_WORDS in str(statement)
        assert AS_PUBLISHED_WORDS in statement.bound
        assert statement.to_dict()["standing"] == AS_PUBLISHED_WORDS

    def test_honest_accounting_of_fixed_cohorts_costs_more(self):
        parameters = get_parameters()
        published = compute_epsilon(
            parameters, FIXED, accounting=Accounting.AS_PUBLISHED
        )
        assert compute_epsilon(parameters, FIXED) > 2 * published

    @pytest.mark.parametrize("accountant", [Accountant.RDP, Accountant.PLD])
    def test_central_gaussian_names_its_accountant(self, accountant):
        statement = compute_privacy(
            get_gaussian(), POISSON, accountant=accountant, **RUN
        )
        assert accountant.name in statement.accountant
        assert (statement.order is None) == (accountant is Accountant.PLD)

    @pytest.mark.parametrize(
        ("parameters", "scheme", "choices", "message"),
        [
            (
                get_parameters(),
                POISSON,
                dict(accounting=Accounting.AS_PUBLISHED),
                "`accounting` must be 'proven' when cohorts are Poisson",
            ),
            (
                get_gaussian(),
                POISSON,
                dict(accounting=Accounting.AS_PUBLISHED),
                "`accounting` must be 'proven'",
            ),
            (
                get_parameters(),
                FIXED,
                dict(bound=AmplificationBound.SYMMETRIC),
                "`bound` must be None for fixed-size cohorts",
            ),
            (
                get_parameters(),
                FIXED,
                dict(bound=AmplificationBound.PUBLISHED),
                "`bound` must be None for fixed-size cohorts",
            ),
            (
                get_parameters(),
                FIXED,
                dict(
                    accounting=Accounting.AS_PUBLISHED,
                    bound=AmplificationBound.SYMMETRIC,
                ),
                "`bound` must be 'published'",
            ),
            (
                get_gaussian(),
                POISSON,
                dict(bound=AmplificationBound.PUBLISHED),
                "`bound` must be None for the central Gaussian",
            ),
            (
                get_parameters(),
                POISSON,
                dict(accountant=Accountant.PLD),
                "`accountant` must be 'rdp' for the ddgauss",
            ),
            (
                get_parameters(SkellamParameters),
                POISSON,
                dict(accountant=Accountant.ANALYTIC),
                "`accountant` must be 'rdp' for the skellam",
            ),
            (
                get_gaussian(),
                POISSON,
                dict(accountant=Accountant.ANALYTIC),
                "`accountant` can be 'analytic' only if everyone takes part",
            ),
            (
                get_gaussian(),
                FIXED,
                dict(accountant=Accountant.PLD),
                "`accountant` must be 'rdp' .* fixed-size",
            ),
            (
                get_parameters(clients_per_round=99),
                POISSON,
                {},
                "`clients_per_round` of the parameters must be the scheme's",
            ),
            (get_parameters(), POISSON, dict(num_rounds=0), "`num_rounds` must be"),
            (get_parameters(), POISSON, dict(num_rounds=1.5), "`num_rounds` must"),
            (get_parameters(), POISSON, dict(delta=0.0), r"`delta` must be in"),
            (get_parameters(), POISSON, dict(delta=1.0), r"`delta` must be in"),
            (
                get_parameters(),
                POISSON,
                dict(accounting="proven"),
                "`accounting` must be a member of Accounting",
            ),
            (
                get_parameters(),
                POISSON,
                dict(quantile_noise_multiplier=0.0),
                "`quantile_noise_multiplier` must be positive",
            ),
        ],
    )
    def test_refusals(self, parameters, scheme, choices, message):
        with pytest.raises(ValueError, match=message):
            compute_privacy(parameters, scheme, **{**RUN, **choices})
