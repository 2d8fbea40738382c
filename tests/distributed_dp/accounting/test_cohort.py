"""Cohort schemes: exact binomial tails on both sides of each bound."""

import mpmath
import pytest

from distributed_dp.accounting import CohortScheme, Sampling, compute_cohort_bounds


def _compute_tail(count, rate, at_least):
    """P[Binomial(count, rate) >= at_least], summed in high precision."""
    with mpmath.workdps(40):
        q = mpmath.mpf(rate)
        return float(
            mpmath.fsum(
                mpmath.binomial(count, k) * q**k * (1 - q) ** (count - k)
                for k in range(at_least, count + 1)
            )
        )


@pytest.mark.parametrize(
    ("num_clients", "clients_per_round"),
    [(3400, 100), (800, 80), (50, 1), (30, 29), (2, 1), (10, 5)],
)
def test_bounds_are_the_tightest(num_clients, clients_per_round):
    scheme = CohortScheme(Sampling.POISSON, num_clients, clients_per_round)
    bounds = compute_cohort_bounds(scheme)
    rate = clients_per_round / num_clients
    tail = _compute_tail(num_clients - 1, rate, bounds.high)
    assert bounds.overflow_probability == pytest.approx(tail, rel=1e-6, abs=1e-300)
    assert tail <= 1e-15
    # One less would be too small: exactly the boundary.
    assert _compute_tail(num_clients - 1, rate, bounds.high - 1) > 1e-15
    assert 1 - _compute_tail(num_clients, rate, bounds.low) <= 1e-9 or bounds.low == 1
    if bounds.low < bounds.high:
        assert 1 - _compute_tail(num_clients, rate, bounds.low + 1) > 1e-9
    assert bounds.low <= clients_per_round <= bounds.high


@pytest.mark.parametrize("sampling", list(Sampling))
def test_everyone_or_a_fixed_number_is_certain(sampling):
    bounds = compute_cohort_bounds(CohortScheme(sampling, 100, 100))
    assert (bounds.low, bounds.high) == (100, 100)
    assert bounds.overflow_probability == 0.0
    fixed = compute_cohort_bounds(CohortScheme(Sampling.FIXED, 3400, 100))
    assert (fixed.low, fixed.high, fixed.underflow_probability) == (100, 100, 0.0)


def test_bounds_do_not_depend_on_the_length_of_training():
    scheme = CohortScheme(Sampling.POISSON, 3400, 100)
    assert compute_cohort_bounds(scheme, 1) == compute_cohort_bounds(scheme, 10_000)


def test_too_many_rounds_for_the_tail_are_refused():
    scheme = CohortScheme(Sampling.POISSON, 3400, 100)
    with pytest.raises(ValueError, match="`num_rounds` must be at most"):
        compute_cohort_bounds(scheme, 10**7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Sampling.POISSON, 0, 1), "`num_clients` must be an integer at least 1"),
        ((Sampling.POISSON, 10, 0), "`clients_per_round` must be an integer at least"),
        ((Sampling.FIXED, 10, 11), "`clients_per_round` must be at most `num_clients`"),
        (("poisson", 10, 1), "`sampling` must be a member of Sampling"),
        ((Sampling.FIXED, 10.5, 1), "`num_clients` must be an integer"),
    ],
)
def test_bad_schemes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CohortScheme(*arguments)
