"""Tests for the division of users and of examples."""

import collections
import itertools

import pytest
from scipy import stats

from simulation.population import split
from simulation.sources.source import TEST, TRAIN, VALIDATION

USERS = [f"user {index}" for index in range(1000)]
FALSE_FAILURE_RATE = 1e-6


def build(by=split.SplitBy.USER, **options) -> split.SplitRule:
    return split.SplitRule(by=by, **options)


def count(splits) -> tuple[int, int, int]:
    counter = collections.Counter(splits)
    assert counter.keys() <= {TRAIN, VALIDATION, TEST}
    return counter[TRAIN], counter[VALIDATION], counter[TEST]


class TestFractions:
    @pytest.mark.parametrize(
        ("fractions", "expected"),
        [
            ((0.1, 0.0), (900, 0, 100)),
            ((0.0, 0.0), (1000, 0, 0)),
            ((0.0, 0.25), (750, 250, 0)),
            ((0.3, 0.2), (500, 200, 300)),
            # At least one each, also of the training.
            ((1e-9, 1e-9), (998, 1, 1)),
            ((0.5, 0.4999), (1, 499, 500)),
            ((0.9999, 0.0), (1, 0, 999)),
        ],
    )
    def test_of_users_and_of_examples(self, fractions, expected):
        rule = build(test_fraction=fractions[0], validation_fraction=fractions[1])
        assert count(rule.assign_users(USERS).values()) == expected
        assert count(rule.assign_examples("a", 1000)) == expected

    @pytest.mark.parametrize(
        ("test_fraction", "validation_fraction"),
        itertools.product([1e-9, 0.1, 0.45, 0.5, 0.6], [1e-9, 0.1, 0.35]),
    )
    def test_few_users_still_fill_every_split(self, test_fraction, validation_fraction):
        rule = build(
            test_fraction=test_fraction, validation_fraction=validation_fraction
        )
        for size in range(3, 20):
            assert min(count(rule.assign_users(USERS[:size]).values())) >= 1
            assert min(count(rule.assign_examples("a", size))) >= 1

    @pytest.mark.parametrize(
        ("size", "expected"), [(0, []), (1, [TRAIN]), (2, [TEST, TRAIN])]
    )
    def test_a_user_with_few_examples(self, size, expected):
        for test_fraction, validation_fraction in [(1e-9, 0.3), (0.5, 0.4), (0.9, 0)]:
            rule = build(
                test_fraction=test_fraction, validation_fraction=validation_fraction
            )
            for user in USERS[:20]:
                assert sorted(rule.assign_examples(user, size)) == expected

    def test_nothing_asked_for_is_all_for_training(self):
        rule = build(test_fraction=0)
        assert rule.assign_users(["a"]) == {"a": TRAIN}
        assert rule.assign_examples("a", 3) == [TRAIN] * 3


class TestChoice:
    def test_users_do_not_depend_on_their_order(self, rng):
        expected = build().assign_users(USERS)
        assert build().assign_users(rng.permutation(USERS).tolist()) == expected

    def test_examples_do_not_depend_on_other_users(self):
        rule = build()
        alone = rule.assign_examples("b", 50)
        rule.assign_examples("a", 7)
        assert rule.assign_examples("b", 50) == alone

    def test_another_seed_chooses_others(self):
        one, other = build(seed=1), build(seed=2)
        users = one.assign_users(USERS), other.assign_users(USERS)
        shared = sum(users[0][name] == users[1][name] == TEST for name in USERS)
        # Of 100 and 100 of 1000: hypergeometric, with mean 10.
        law = stats.hypergeom(1000, 100, 100)
        assert law.sf(shared - 1) > FALSE_FAILURE_RATE < law.cdf(shared)
        assert law.sf(100 - 1) < FALSE_FAILURE_RATE
        assert one.assign_examples("a", 50) != other.assign_examples("a", 50)

    def test_another_user_has_other_examples_in_the_test(self):
        splits = {tuple(build().assign_examples(user, 50)) for user in USERS[:50]}
        assert len(splits) == 50

    def test_every_position_is_as_often_in_the_test(self):
        observed = [0] * 5
        for user in range(5000):
            position = build().assign_examples(f"{user}", 5).index(TEST)
            observed[position] += 1
        assert stats.chisquare(observed).pvalue > FALSE_FAILURE_RATE
        # The last example of each, say.
        assert stats.chisquare([0, 0, 0, 0, 5000]).pvalue < FALSE_FAILURE_RATE

    @pytest.mark.parametrize("user", ["", "a\nb", "it's", "\u65e5\u672c", "x" * 10**6])
    def test_odd_names(self, user):
        assert count(build().assign_examples(user, 10)) == (9, 0, 1)


class TestErrors:
    @pytest.mark.parametrize("value", [-0.1, 1.0, float("nan"), float("inf")])
    @pytest.mark.parametrize("name", ["test_fraction", "validation_fraction"])
    def test_no_fraction(self, name, value):
        match = rf"`{name}` must be in \[0, 1\). Found {value}"
        with pytest.raises(ValueError, match=match):
            build(**{name: value})

    @pytest.mark.parametrize("fractions", [(0.5, 0.5), (0.9, 0.2)])
    def test_nothing_left_to_train_on(self, fractions):
        with pytest.raises(ValueError, match="must leave something to train on"):
            build(test_fraction=fractions[0], validation_fraction=fractions[1])

    @pytest.mark.parametrize(
        ("size", "validation_fraction"), [(0, 0.0), (1, 0.0), (2, 0.1)]
    )
    def test_too_few_users(self, size, validation_fraction):
        rule = build(validation_fraction=validation_fraction)
        match = f"at least one user for each split. Found {size} users"
        with pytest.raises(ValueError, match=match):
            rule.assign_users(USERS[:size])
        assert len(rule.assign_users(USERS[: size + 1 + (size == 0)])) == max(
            2, size + 1
        )
