"""Tests for partitions: exact facts, then the laws, which wrong ones fail."""

import itertools

import numpy as np
import pytest
from scipy import stats

from simulation.population import partition
from simulation.population.partition import PartitionKind
from tests.distributed_dp.goodness_of_fit import FALSE_FAILURE, compute_p_value

NUM_DRAWS = 2_500
DIRICHLET, SHARDS, PACHINKO = PartitionKind
# Training labels: odd counts, unbalanced, with classes that nothing has, few.
LABELS = {
    "balanced": np.repeat(np.arange(5), 40),
    "odd": np.arange(211) % 7,
    "unbalanced": np.repeat([0, 1, 2], [150, 40, 13]),
    "gaps": np.repeat([2, 5, 9], [30, 31, 32]),
    "one class": np.full(57, 4),
}
NUM_CLASSES = {name: len(np.unique(labels)) for name, labels in LABELS.items()}


def build(kind: PartitionKind, num_clients: int, **options) -> partition.Partition:
    return partition.Partition(kind=kind, num_clients=num_clients, **options)


def divide(kind, num_clients, labels, **options) -> partition.Division:
    coarse = labels // 2 if kind is PACHINKO else None
    return build(kind, num_clients, **options).divide(labels, coarse=coarse)


def check_division(rows: list[np.ndarray], num_rows: int) -> int:
    """Checks that nobody shares and all have equally many. Returns how many."""
    joined = np.concatenate(rows)
    assert len(np.unique(joined)) == len(joined)
    assert joined.min() >= 0 and joined.max() < num_rows
    assert all((np.diff(row) > 0).all() for row in rows)
    (size,) = {len(row) for row in rows}
    return size


def count_classes(rows: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    """Returns how many examples of each class each client has."""
    size = int(labels.max()) + 1
    return np.array([np.bincount(labels[row], minlength=size) for row in rows])


class TestFacts:
    @pytest.mark.parametrize("kind", [DIRICHLET, PACHINKO])
    @pytest.mark.parametrize("num_clients", [1, 2, 7, 50])
    @pytest.mark.parametrize("name", LABELS)
    def test_equally_many_and_nobody_shares(self, kind, num_clients, name):
        labels = LABELS[name]
        division = divide(kind, num_clients, labels)
        assert len(division.rows) == num_clients
        size = check_division(division.rows, len(labels))
        assert size == len(labels) // num_clients

    @pytest.mark.parametrize("kind", PartitionKind)
    @pytest.mark.parametrize("name", LABELS)
    def test_as_many_clients_as_examples(self, kind, name):
        labels = LABELS[name]
        division = divide(kind, len(labels), labels, classes_per_client=1)
        assert check_division(division.rows, len(labels)) == 1
        assert sorted(np.concatenate(division.rows)) == list(range(len(labels)))

    @pytest.mark.parametrize("kind", PartitionKind)
    def test_the_seed_decides(self, kind):
        labels, test_labels = LABELS["balanced"], LABELS["odd"] % 5
        first, same, other = (
            divide(kind, 5, labels, seed=seed) for seed in (3, 3, 2**40)
        )
        rows = [row.tolist() for row in first.rows]
        assert rows == [row.tolist() for row in same.rows]
        assert rows != [row.tolist() for row in other.rows]
        followed = [row.tolist() for row in first.follow(test_labels)]
        # Twice, and by another division that was asked for something else before.
        same.follow(test_labels[:50])
        for division in (first, same):
            assert [row.tolist() for row in division.follow(test_labels)] == followed

    @pytest.mark.parametrize("kind", PartitionKind)
    def test_which_examples_of_a_class_depends_on_the_seed(self, kind):
        labels = LABELS["one class"]
        sets = {
            tuple(divide(kind, 3, labels, seed=seed, classes_per_client=1).rows[0])
            for seed in range(20)
        }
        assert len(sets) == 20

    @pytest.mark.parametrize("kind", PartitionKind)
    @pytest.mark.parametrize("num_clients", [1, 4, 9])
    @pytest.mark.parametrize("name", LABELS)
    def test_the_test_is_divided_too(self, kind, num_clients, name, rng):
        labels = LABELS[name]
        division = divide(
            kind, num_clients, labels, classes_per_client=min(2, NUM_CLASSES[name])
        )
        test_labels = rng.permutation(np.tile(labels, 3))[: 2 * len(labels) + 1]
        size = check_division(division.follow(test_labels), len(test_labels))
        if kind is not SHARDS:
            assert size == len(test_labels) // num_clients

    @pytest.mark.parametrize("kind", PartitionKind)
    def test_classes_without_training_examples_are_nobodys(self, kind):
        division = divide(kind, 4, LABELS["gaps"])
        test_labels = np.repeat([0, 2, 5, 7, 9, 11], 20)
        rows = division.follow(test_labels)
        size = check_division(rows, len(test_labels))
        assert set(test_labels[np.concatenate(rows)]) <= {2, 5, 9}
        if kind is not SHARDS:
            assert size == 60 // 4

    @pytest.mark.parametrize("kind", PartitionKind)
    def test_the_test_may_lack_a_class(self, kind):
        division = divide(kind, 2, LABELS["balanced"], classes_per_client=1)
        owned = sorted({int(LABELS["balanced"][row[0]]) for row in division.rows})
        test_labels = np.repeat(owned, 10)
        size = check_division(division.follow(test_labels), len(test_labels))
        assert size == len(test_labels) // 2

    @pytest.mark.parametrize("kind", [DIRICHLET, PACHINKO])
    def test_what_is_used_up_is_made_up_for(self, kind):
        # Far more of the test in a class that some hardly wish for.
        division = divide(kind, 10, LABELS["balanced"], alpha=1e-3)
        test_labels = np.repeat([0, 1], [95, 5])
        assert check_division(division.follow(test_labels), 100) == 10

    def test_description(self):
        told = build(SHARDS, 9, classes_per_client=3, seed=4).description
        assert told == "9 clients, at most 3 classes a client, seed 4"
        assert (
            "Dirichlet(0.25) over the classes"
            in build(DIRICHLET, 9, alpha=0.25).description
        )
        assert "(0.1 over coarse labels, 10 over" in build(PACHINKO, 9).description


class TestShards:
    @pytest.mark.parametrize(
        ("name", "per_client"),
        [
            (name, number)
            for name, number in itertools.product(LABELS, [1, 2, 3, 7])
            if number <= NUM_CLASSES[name]
        ],
    )
    @pytest.mark.parametrize("num_clients", [1, 3, 8])
    def test_the_largest_shards_there_can_be(self, per_client, num_clients, name):
        labels = LABELS[name]
        division = divide(SHARDS, num_clients, labels, classes_per_client=per_client)
        size = check_division(division.rows, len(labels))
        counts = count_classes(division.rows, labels)
        assert ((counts > 0).sum(axis=1) <= per_client).all()
        shard, rest = divmod(size, per_client)
        assert rest == 0 and (counts % shard == 0).all()
        number = num_clients * per_client
        held = np.bincount(labels)
        larger = range(shard + 1, len(labels) // number + 1)
        assert all((held // wide).sum() < number for wide in larger)

    @pytest.mark.parametrize(("num_clients", "per_client"), [(5, 3), (7, 2), (20, 5)])
    def test_a_clients_shards_are_of_different_classes(self, num_clients, per_client):
        labels = LABELS["odd"]
        for seed in range(50):
            rows = divide(
                SHARDS, num_clients, labels, classes_per_client=per_client, seed=seed
            ).rows
            classes = (count_classes(rows, labels) > 0).sum(axis=1)
            assert classes.tolist() == [per_client] * num_clients

    def test_no_more_shards_of_one_class_than_must_be(self):
        # Ten shards of class 0 for six clients: four get it twice, nobody thrice.
        labels = np.repeat([0, 1, 2], [100, 10, 10])
        for seed in range(50):
            rows = divide(SHARDS, 6, labels, classes_per_client=2, seed=seed).rows
            counts = count_classes(rows, labels)[:, 0]
            assert sorted(counts) == [10, 10, 20, 20, 20, 20]

    @pytest.mark.parametrize("name", ["balanced", "odd", "gaps", "unbalanced"])
    def test_the_test_has_the_same_classes(self, name, rng):
        labels = LABELS[name]
        division = divide(SHARDS, 6, labels)
        test_labels = rng.permutation(np.repeat(labels, 2))
        train = count_classes(division.rows, labels)
        test = count_classes(division.follow(test_labels), test_labels)
        # As many shards of each.
        np.testing.assert_array_equal(test * train.sum(), train * test.sum())

    def test_every_class_is_as_likely(self, rng):
        labels = np.repeat(np.arange(5), 8)
        seeds = rng.integers(2**40, size=NUM_DRAWS)
        observed = np.zeros(5)
        for seed in seeds:
            rows = divide(SHARDS, 4, labels, seed=int(seed), classes_per_client=1).rows
            observed[labels[rows[0][0]]] += 1
        assert stats.chisquare(observed).pvalue > FALSE_FAILURE
        # Shards that are dealt in order.
        assert stats.chisquare([NUM_DRAWS, 0, 0, 0, 0]).pvalue < FALSE_FAILURE


class TestLaw:
    """Two clients and two classes: nothing is used up before the first has its share.

    So the first client's count is beta-binomial, and the other has what is left.
    """

    def draw(self, kind, labels, rng, *, coarse=None, **options) -> np.ndarray:
        seeds = rng.integers(2**40, size=NUM_DRAWS)
        rows = [
            build(kind, 2, seed=int(seed), **options).divide(labels, coarse=coarse).rows
            for seed in seeds
        ]
        return np.array([(labels[first] == 1).sum() for first, _ in rows])

    def compute_p_value(self, counts, num_zeros, num_ones, concentration) -> float:
        """Returns the p-value of counts of ones if the first client may be either."""
        share = (num_zeros + num_ones) // 2
        zeros, ones = concentration
        law = stats.betabinom(share, ones, zeros).pmf(np.arange(share + 1))
        clipped = np.append(law[:num_ones], law[num_ones:].sum())
        mixed = (clipped + clipped[::-1]) / 2
        edges = np.arange(num_ones)
        return compute_p_value(counts, edges, np.cumsum(mixed)[:-1])

    @pytest.mark.parametrize("alpha", [0.1, 1.0, 5.0])
    def test_dirichlet(self, alpha, rng):
        counts = self.draw(DIRICHLET, np.repeat([0, 1], 20), rng, alpha=alpha)
        fit = {
            factor: self.compute_p_value(counts, 20, 20, [factor * alpha] * 2)
            for factor in (1.0, 0.5, 2.0)
        }
        assert fit[1.0] > FALSE_FAILURE
        # Without the number of classes (Hsu et al.'s alpha), or with it twice.
        assert fit[0.5] < FALSE_FAILURE > fit[2.0]

    def test_dirichlet_of_unbalanced_classes(self, rng):
        labels = np.repeat([0, 1], [30, 10])
        counts = self.draw(DIRICHLET, labels, rng, alpha=1.0)
        assert self.compute_p_value(counts, 30, 10, [1.5, 0.5]) > FALSE_FAILURE
        # Without the prior, with it reversed, and without the number of classes.
        for wrong in ([1.0, 1.0], [0.5, 1.5], [0.75, 0.25]):
            assert self.compute_p_value(counts, 30, 10, wrong) < FALSE_FAILURE

    def test_dirichlet_counts_the_classes_that_are_there(self, rng):
        counts = self.draw(DIRICHLET, np.repeat([7, 1], 20), rng, alpha=1.0)
        assert self.compute_p_value(counts, 20, 20, [1.0, 1.0]) > FALSE_FAILURE
        # With the six that are not.
        assert self.compute_p_value(counts, 20, 20, [4.0, 4.0]) < FALSE_FAILURE

    @pytest.mark.parametrize(
        ("coarse", "right", "wrong"), [([3, 0], 0.1, 10.0), ([2, 2], 10.0, 0.1)]
    )
    def test_pachinko(self, coarse, right, wrong, rng):
        labels = np.repeat([0, 1], 20)
        counts = self.draw(
            PACHINKO, labels, rng, coarse=np.repeat(coarse, 20), alpha=77.0
        )
        assert self.compute_p_value(counts, 20, 20, [right] * 2) > FALSE_FAILURE
        for value in (wrong, right / 2, right * 2):
            assert self.compute_p_value(counts, 20, 20, [value] * 2) < FALSE_FAILURE

    def test_small_alphas_give_one_class_and_large_ones_all_alike(self):
        labels = np.repeat(np.arange(10), 100)
        counts = {
            alpha: count_classes(
                divide(DIRICHLET, 10, labels, alpha=alpha).rows, labels
            )
            for alpha in (1e-4, 1e-2, 1e6)
        }
        for alpha in (1e-4, 1e-2):
            assert np.median((counts[alpha] > 0).sum(axis=1)) <= 2
        # Alike: what is left at the end makes the last clients no different.
        assert stats.chi2_contingency(counts[1e6])[1] > FALSE_FAILURE
        assert stats.chi2_contingency(counts[1e-2])[1] < FALSE_FAILURE

    @pytest.mark.parametrize("kind", [DIRICHLET, PACHINKO])
    def test_the_test_follows_each_client(self, kind, rng):
        labels = np.repeat(np.arange(10), 200)
        division = divide(kind, 20, labels)
        test_labels = rng.permutation(np.repeat(np.arange(10), 100))
        train = count_classes(division.rows, labels) / 100
        test = count_classes(division.follow(test_labels), test_labels) / 50
        distance = {
            shift: np.abs(train - np.roll(test, shift, axis=0)).sum(axis=1).mean() / 2
            for shift in range(20)
        }
        own = distance.pop(0)
        # The test of another client is of other classes.
        assert own < 0.5 * min(distance.values())


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"num_clients": 0}, "`num_clients` must be >= 1. Found 0"),
            ({"alpha": 0.0}, "`alpha` must be positive and finite. Found 0.0"),
            ({"alpha": -1.0}, "`alpha` must be positive"),
            ({"alpha": float("inf")}, "`alpha` must be positive and finite. Found inf"),
            ({"alpha": float("nan")}, "`alpha` must be positive and finite. Found nan"),
            ({"classes_per_client": 0}, "`classes_per_client` must be >= 1. Found 0"),
        ],
    )
    def test_of_a_partition(self, options, match):
        with pytest.raises(ValueError, match=match):
            partition.Partition(**({"kind": SHARDS, "num_clients": 3} | options))

    @pytest.mark.parametrize(
        ("kind", "size"), itertools.product(PartitionKind, [0, 1, 3])
    )
    def test_too_few_examples(self, kind, size):
        match = f"at most the number of examples to divide, {size}. Found 4"
        with pytest.raises(ValueError, match=match):
            divide(kind, 4, np.zeros(size, int))

    def test_too_few_for_the_shards(self):
        match = (
            "`classes_per_client` times `num_clients` must be at most .*10. Found 12"
        )
        with pytest.raises(ValueError, match=match):
            divide(SHARDS, 4, np.arange(10), classes_per_client=3)

    @pytest.mark.parametrize("name", LABELS)
    def test_more_shards_than_classes(self, name):
        # Those that no example has are none of them.
        number = NUM_CLASSES[name]
        divide(SHARDS, 2, LABELS[name], classes_per_client=number)
        match = (
            "`classes_per_client` must be at most the number of classes, "
            rf"{number}\. Found {number + 1}\."
        )
        with pytest.raises(ValueError, match=match):
            divide(SHARDS, 2, LABELS[name], classes_per_client=number + 1)

    def test_pachinko_without_coarse_labels(self):
        with pytest.raises(ValueError, match="must have coarse labels"):
            build(PACHINKO, 2).divide(np.arange(10))

    @pytest.mark.parametrize("kind", PartitionKind)
    @pytest.mark.parametrize("test_labels", [[], [0, 1, 2], [8] * 50])
    def test_too_few_test_examples(self, kind, test_labels):
        division = divide(kind, 4, LABELS["balanced"])
        match = f"`num_clients` must be small .* 4 clients, and {len(test_labels)} test"
        with pytest.raises(ValueError, match=match):
            division.follow(np.array(test_labels, int))
