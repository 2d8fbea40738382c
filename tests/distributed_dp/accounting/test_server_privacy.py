"""The server's own epsilon, and dropout."""

import math

import numpy as np
import pytest

from distributed_dp.accounting import (
    Accounting,
    CohortScheme,
    Mechanism,
    Sampling,
    calibrate,
    compute_epsilon_from_zcdp,
    compute_server_privacy,
    compute_zcdp_ddgauss,
)
from tests.distributed_dp.accounting.run_settings import (
    RUN,
    compute_epsilon,
    get_gaussian,
    get_parameters,
)


class TestServer:
    def test_zero_out_without_amplification(self):
        statement = compute_server_privacy(
            get_parameters(), num_shares=100, max_shares=100, num_clients=3400, **RUN
        )
        assert statement.adjacency == "zero out one user's update"
        assert statement.view == "the server itself"
        assert statement.epsilon > 10 * compute_epsilon(get_parameters())

    def test_by_zcdp(self):
        """The curve is at most rho alpha, and at a fine grid equal to it."""
        parameters = get_parameters()
        rho = compute_zcdp_ddgauss(
            l2_sensitivity=parameters.l2_sensitivity,
            l1_sensitivity=parameters.l1_sensitivity,
            local_scale=parameters.local_scale,
            num_shares=60,
            dim=parameters.padded_dim,
        )
        found = compute_server_privacy(
            parameters,
            num_rounds=5,
            num_shares=60,
            max_shares=60,
            delta=1e-3,
            num_clients=3400,
        )
        remaining = 1e-3 - found.sampler_charge
        expected = compute_epsilon_from_zcdp(5 * rho, delta=remaining)
        assert found.epsilon == pytest.approx(expected.epsilon, rel=1e-9)

    def test_fewer_shares_and_more_rounds_cost_more(self):
        parameters = get_parameters()
        keywords = dict(max_shares=10, delta=1e-3, num_clients=3400)
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
        parameters = get_parameters(granularity=0.006, padded_dim=1)
        keywords = dict(num_rounds=1, num_shares=50, delta=1e-3, num_clients=3400)
        fine = compute_server_privacy(parameters, max_shares=50, **keywords)
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
                    max_shares=100,
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
        keywords = dict(num_rounds=9, num_shares=100, max_shares=100)
        keywords |= dict(delta=1e-5, num_clients=3400)
        with pytest.raises(ValueError, match=message):
            compute_server_privacy(get_parameters(), **{**keywords, **changes})

    def test_a_central_mechanism_has_no_server_view(self):
        with pytest.raises(ValueError, match="`parameters` must be a distributed"):
            compute_server_privacy(
                get_gaussian(),
                num_rounds=1,
                num_shares=1,
                max_shares=1,
                delta=0.1,
                num_clients=9,
            )
