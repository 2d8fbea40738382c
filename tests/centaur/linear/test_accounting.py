"""One ledger of start and rounds, against closed forms and other accountants."""

import math

import dp_accounting
import mpmath
import pytest
from dp_accounting import rdp

from centaur import linear
from distributed_dp.accounting import Accountant

ZERO, REPLACE = linear.Adjacency.ZERO_OUT, linear.Adjacency.REPLACE_ONE
DELTA = 1e-5
LEDGER = (
    linear.ReleaseLedger().add("start", 30.0, count=40).add("rounds", 12.0, count=20)
)


def compute(ledger, adjacency=ZERO, accountant=Accountant.ANALYTIC, delta=DELTA):
    return linear.compute_epsilon(
        ledger, delta=delta, adjacency=adjacency, accountant=accountant
    )


def compute_exact_delta(epsilon, mu):
    """Balle and Wang 2018, theorem 8, in 50 digits."""
    with mpmath.workdps(50):
        first = mpmath.ncdf(mu / 2 - epsilon / mu)
        return first - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


class TestLedger:
    def test_one_release_that_costs_as_much(self):
        mu = math.sqrt(40 / 30.0**2 + 20 / 12.0**2)
        assert LEDGER.noise_multiplier == pytest.approx(1 / mu, rel=1e-14)
        assert LEDGER.count == 60

    def test_like_releases_are_counted_together(self):
        ledger = linear.ReleaseLedger()
        for _ in range(3):
            ledger = ledger.add("rounds", 2.0)
        assert ledger.entries == (
            linear.Releases(purpose="rounds", count=3, noise_multiplier=2.0),
        )
        assert len(ledger.add("rounds", 2.5).entries) == 2

    def test_nothing_costs_nothing_and_no_noise_everything(self):
        for accountant in (Accountant.ANALYTIC, Accountant.RDP):
            assert compute(linear.ReleaseLedger(), accountant=accountant) == 0
            free = LEDGER.add("rounds", 0.0)
            assert compute(free, accountant=accountant) == math.inf

    def test_reject(self):
        with pytest.raises(ValueError, match="`count` must be an integer at least 1"):
            LEDGER.add("rounds", 1.0, count=0)
        with pytest.raises(ValueError, match="`noise_multiplier` must be at least 0"):
            LEDGER.add("rounds", -1.0)


class TestEpsilon:
    @pytest.mark.parametrize(("adjacency", "factor"), [(ZERO, 1), (REPLACE, 2)])
    def test_analytic_solves_the_exact_equation(self, adjacency, factor):
        epsilon = compute(LEDGER, adjacency)
        mu = factor / LEDGER.noise_multiplier
        assert compute_exact_delta(epsilon, mu) <= DELTA
        assert compute_exact_delta(epsilon * (1 - 1e-9), mu) > DELTA

    @pytest.mark.parametrize(("adjacency", "factor"), [(ZERO, 1), (REPLACE, 2)])
    def test_rdp_equals_the_closed_form(self, adjacency, factor):
        """min over a of a mu^2 / 2 + conversion, by a fine search of its own."""
        square = factor**2 * (40 / 30.0**2 + 20 / 12.0**2)
        least = min(
            order * square / 2
            - (math.log(DELTA) + math.log(order)) / (order - 1)
            + math.log1p(-1 / order)
            for order in (1 + 0.001 * step for step in range(1, 60_000))
        )
        found = compute(LEDGER, adjacency, Accountant.RDP)
        assert found == pytest.approx(least, rel=1e-4)

    def test_rdp_equals_another_accountant(self):
        events = [
            dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(sigma), n)
            for sigma, n in ((30.0, 40), (12.0, 20))
        ]
        other = rdp.RdpAccountant([1 + 0.01 * step for step in range(1, 6000)])
        other.compose(dp_accounting.ComposedDpEvent(events))
        found = compute(LEDGER, accountant=Accountant.RDP)
        assert found == pytest.approx(other.get_epsilon(DELTA), rel=1e-3)

    def test_rdp_is_never_less_than_exact(self):
        for sigma in (0.5, 3.0, 25.0, 300.0):
            ledger = linear.ReleaseLedger().add("rounds", sigma, count=20)
            exact = compute(ledger)
            bound = compute(ledger, accountant=Accountant.RDP)
            assert exact <= bound <= 1.5 * exact + 0.1

    @pytest.mark.parametrize(
        ("rounds", "by_rdp", "exact"),
        [(40, 25.59, 23.59), (200, 57.21, 52.76), (400, 80.91, 74.61)],
    )
    def test_noise_for_epsilon_one(self, rounds, by_rdp, exact):
        """Published multipliers at eps = 1, delta = 1e-5, of the whole run."""
        for accountant, sigma in (
            (Accountant.RDP, by_rdp),
            (Accountant.ANALYTIC, exact),
        ):
            ledger = linear.ReleaseLedger().add("rounds", sigma, count=rounds)
            assert compute(ledger, accountant=accountant) == pytest.approx(1, abs=1e-3)

    def test_replacing_a_user_at_that_noise(self):
        ledger = linear.ReleaseLedger().add("rounds", 25.59, count=40)
        found = compute(ledger, REPLACE, Accountant.RDP)
        assert found == pytest.approx(2.14, abs=0.01)

    def test_more_releases_and_less_noise_cost_more(self):
        for accountant in (Accountant.ANALYTIC, Accountant.RDP):
            base = compute(LEDGER, accountant=accountant)
            assert compute(LEDGER.add("rounds", 12.0), accountant=accountant) > base
            assert compute(LEDGER, accountant=accountant, delta=1e-6) > base
            assert compute(LEDGER, REPLACE, accountant) > base

    def test_reject(self):
        with pytest.raises(ValueError, match=r"`delta` must be in \(0, 1\)"):
            compute(LEDGER, delta=0.0)
        with pytest.raises(ValueError, match="`accountant` must be 'analytic' or"):
            compute(LEDGER, accountant=Accountant.PLD)


class TestCalibration:
    @pytest.mark.parametrize("accountant", [Accountant.ANALYTIC, Accountant.RDP])
    @pytest.mark.parametrize("adjacency", [ZERO, REPLACE])
    @pytest.mark.parametrize("share", [0.2, 0.5])
    def test_the_ledger_of_all_releases_reaches_epsilon(
        self, accountant, adjacency, share
    ):
        for epsilon in (0.25, 1.0, 8.0):
            noise = linear.calibrate_noise(
                epsilon,
                DELTA,
                adjacency=adjacency,
                start_releases=50,
                num_rounds=20,
                start_share=share,
                accountant=accountant,
            )
            start = linear.ReleaseLedger().add("start", noise.start, count=50)
            whole = start.add("rounds", noise.rounds, count=20)
            found = compute(whole, adjacency, accountant)
            assert epsilon * (1 - 1e-6) <= found <= epsilon
            parts = [1 / ledger.noise_multiplier**2 for ledger in (start, whole)]
            assert parts[0] / parts[1] == pytest.approx(share)

    def test_without_a_start(self):
        noise = linear.calibrate_noise(
            1.0,
            DELTA,
            adjacency=ZERO,
            start_releases=0,
            num_rounds=40,
            start_share=0.5,
        )
        assert noise.start is None
        assert noise.rounds == pytest.approx(23.59, abs=0.01)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"epsilon": 0.0}, "`epsilon` must be positive"),
            ({"epsilon": -1.0}, "`epsilon` must be positive"),
            ({"delta": 1.0}, r"`delta` must be in \(0, 1\)"),
            ({"start_releases": -1}, "`start_releases` must be an integer"),
            ({"num_rounds": 0}, "`num_rounds` must be an integer"),
            ({"start_share": 0.0}, r"`start_share` must be in \(0, 1\)"),
            ({"start_share": 1.0}, r"`start_share` must be in \(0, 1\)"),
        ],
    )
    def test_reject(self, changes, message):
        fields = {
            "epsilon": 1.0,
            "delta": DELTA,
            "start_releases": 4,
            "num_rounds": 2,
            "start_share": 0.5,
            **changes,
        }
        with pytest.raises(ValueError, match=message):
            linear.calibrate_noise(
                fields.pop("epsilon"), fields.pop("delta"), adjacency=ZERO, **fields
            )


class TestStatement:
    def test_names_what_it_rests_on(self):
        found = linear.compute_statement(
            LEDGER,
            num_users=100,
            delta=DELTA,
            adjacency=REPLACE,
            accountant=Accountant.RDP,
            notes=("the seed",),
        )
        assert found.epsilon == compute(LEDGER, REPLACE, Accountant.RDP)
        assert found.num_rounds == 60 and found.order > 1
        text = str(found)
        assert "replace one user" in text
        assert "40 of the start" in text and "20 of the rounds" in text
        assert "does not cover: the seed" in text
        assert "distances to B*" in text and "public and fixed" in text

    def test_reject_an_empty_ledger(self):
        with pytest.raises(ValueError, match="`ledger` must hold a release"):
            linear.compute_statement(
                linear.ReleaseLedger(), num_users=1, delta=DELTA, adjacency=ZERO
            )
