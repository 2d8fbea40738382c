"""Tests for cohorts. The law of a sampler is tested so that a wrong one fails."""

import collections

import numpy as np
import pytest
from scipy import stats

from simulation import cohort, seeds

CLIENTS = tuple(f"client_{index}" for index in range(60))
RATE = 0.15
NUM_ROUNDS = 4_000
FALSE_FAILURE_RATE = 1e-6


@pytest.fixture
def root(rng) -> seeds.RootSeed:
    return seeds.build_root_seed(int(rng.integers(2**62)))


def build_poisson(root: seeds.RootSeed, rate: float = RATE) -> cohort.PoissonCohort:
    return cohort.PoissonCohort(client_ids=CLIENTS, sampling_rate=rate, root=root)


def build_fixed(root: seeds.RootSeed, size: int = 9) -> cohort.FixedCohort:
    return cohort.FixedCohort(client_ids=CLIENTS, clients_per_round=size, root=root)


def compute_binomial_p_value(sizes: list[int], rate: float) -> float:
    """Returns the p-value of pooled chi-square against Binomial(N, rate)."""
    law = stats.binom(len(CLIENTS), rate)
    expected, observed = [], []
    counts = collections.Counter(sizes)
    pool_expected = pool_observed = 0.0
    for size in range(len(CLIENTS) + 1):
        pool_expected += len(sizes) * law.pmf(size)
        pool_observed += counts[size]
        if pool_expected >= 10:
            expected.append(pool_expected)
            observed.append(pool_observed)
            pool_expected = pool_observed = 0.0
    expected[-1] += pool_expected
    observed[-1] += pool_observed
    return stats.chisquare(
        observed, np.array(expected) * sum(observed) / sum(expected)
    )[1]


def select_sizes(sampler: cohort.CohortSampler) -> list[int]:
    return [len(sampler.select(number)) for number in range(NUM_ROUNDS)]


class TestPoisson:
    def test_sizes_follow_the_binomial_law(self, root):
        sizes = select_sizes(build_poisson(root))
        assert compute_binomial_p_value(sizes, RATE) > FALSE_FAILURE_RATE

    def test_a_fixed_size_fails_the_same_test(self, root):
        sizes = select_sizes(build_fixed(root))
        assert compute_binomial_p_value(sizes, RATE) < FALSE_FAILURE_RATE

    def test_a_rate_that_is_off_by_a_twentieth_fails_the_same_test(self, root):
        sizes = select_sizes(build_poisson(root, RATE * 1.05))
        assert compute_binomial_p_value(sizes, RATE) < FALSE_FAILURE_RATE

    def test_every_client_joins_at_the_rate_and_pairs_are_independent(self, root):
        joined = np.zeros([NUM_ROUNDS, len(CLIENTS)])
        sampler = build_poisson(root)
        for number in range(NUM_ROUNDS):
            for client_id in sampler.select(number):
                joined[number, CLIENTS.index(client_id)] = 1
        counts = joined.sum(axis=0)
        deviation = np.sqrt(NUM_ROUNDS * RATE * (1 - RATE))
        limit = stats.norm.isf(FALSE_FAILURE_RATE / len(CLIENTS) / 2)
        assert np.abs(counts - NUM_ROUNDS * RATE).max() < limit * deviation
        correlation = np.corrcoef(joined, rowvar=False)[np.triu_indices(60, 1)]
        limit = stats.norm.isf(FALSE_FAILURE_RATE / correlation.size / 2)
        assert np.abs(correlation).max() < limit / np.sqrt(NUM_ROUNDS)

    def test_empty_cohorts_occur(self, root):
        sampler = build_poisson(root, 0.01)
        assert min(select_sizes(sampler)) == 0

    def test_rate_one_selects_everyone(self, root):
        assert build_poisson(root, 1.0).select(5) == list(CLIENTS)

    @pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan")])
    def test_rate_out_of_range_is_refused(self, root, rate):
        with pytest.raises(ValueError, match=r"`sampling_rate` must be in \(0, 1\]"):
            build_poisson(root, rate)


class TestFixed:
    def test_size_is_fixed_and_clients_are_distinct(self, root):
        for number in range(50):
            selected = build_fixed(root).select(number)
            assert len(selected) == len(set(selected)) == 9

    def test_every_client_is_equally_likely(self, root):
        sampler = build_fixed(root)
        counts = collections.Counter(
            client_id
            for number in range(NUM_ROUNDS)
            for client_id in sampler.select(number)
        )
        share = 9 / len(CLIENTS)
        deviation = np.sqrt(NUM_ROUNDS * share * (1 - share))
        limit = stats.norm.isf(FALSE_FAILURE_RATE / len(CLIENTS) / 2)
        for client_id in CLIENTS:
            assert abs(counts[client_id] - NUM_ROUNDS * share) < limit * deviation

    @pytest.mark.parametrize("size", [0, 61])
    def test_size_out_of_range_is_refused(self, root, size):
        with pytest.raises(ValueError, match="`clients_per_round` must be in"):
            build_fixed(root, size)


@pytest.mark.parametrize("build", [build_poisson, build_fixed])
class TestPurity:
    def test_a_round_is_the_same_whenever_it_is_asked_for(self, build, root):
        forward = [build(root).select(number) for number in range(5)]
        sampler = build(root)
        assert [sampler.select(number) for number in reversed(range(5))] == forward[
            ::-1
        ]

    def test_rounds_and_roots_differ(self, build, root):
        other = seeds.build_root_seed(root.value + 1)
        assert build(root).select(0) != build(root).select(1)
        assert build(root).select(0) != build(other).select(0)

    def test_order_is_that_of_the_population(self, build, root):
        positions = [CLIENTS.index(name) for name in build(root).select(2)]
        assert positions == sorted(positions)


class TestSurvivors:
    def test_rate_zero_keeps_everyone(self, root):
        kept = cohort.select_survivors(CLIENTS, root=root, round_number=0, rate=0.0)
        assert kept == list(CLIENTS)

    def test_share_of_survivors_is_that_of_the_rate(self, root):
        kept = sum(
            len(cohort.select_survivors(CLIENTS, root=root, round_number=t, rate=0.3))
            for t in range(300)
        )
        total = 300 * len(CLIENTS)
        p_value = stats.binom_test(kept, total, 0.7)
        assert p_value > FALSE_FAILURE_RATE
        assert stats.binom_test(kept, total, 0.75) < FALSE_FAILURE_RATE

    def test_a_client_drops_out_whoever_else_joined(self, root):
        everyone = cohort.select_survivors(CLIENTS, root=root, round_number=4, rate=0.5)
        some = cohort.select_survivors(
            CLIENTS[::3], root=root, round_number=4, rate=0.5
        )
        assert some == [name for name in CLIENTS[::3] if name in everyone]

    @pytest.mark.parametrize("rate", [-0.1, 1.0])
    def test_rate_out_of_range_is_refused(self, root, rate):
        with pytest.raises(ValueError, match=r"`rate` must be in \[0, 1\)"):
            cohort.select_survivors(CLIENTS, root=root, round_number=0, rate=rate)


def test_repeated_or_missing_clients_are_refused(root):
    with pytest.raises(ValueError, match="must be distinct"):
        cohort.FixedCohort(client_ids=("a", "a"), clients_per_round=1, root=root)
    with pytest.raises(ValueError, match="must not be empty"):
        cohort.FixedCohort(client_ids=(), clients_per_round=1, root=root)
