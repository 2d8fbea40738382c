"""Tests for what is evaluated: all, or a part of exactly as many examples."""

import collections
import json

import numpy as np
import pytest

from simulation import evaluation
from simulation.population.federated_data import DataError
from tests.simulation import evaluation_toys, toys

MANY = {f"user_{index}": 1 + index % 5 for index in range(40)}


def list_rows(chosen: evaluation.EvaluationSet) -> list[float]:
    """Returns the numbers of the images that are taken."""
    return [
        number
        for client_id in chosen.client_ids
        for number in chosen.load(client_id)[0][:, 0, 0, 0].tolist()
    ]


class TestSelection:
    @pytest.mark.parametrize("max_examples", [1, 2, 7, 50, 119])
    def test_exactly_as_many_and_whole_clients_first(self, max_examples):
        data = evaluation_toys.build_data(MANY)
        assert sum(MANY.values()) == 120
        chosen = evaluation_toys.select(data, max_examples=max_examples, seed=3)
        rows = list_rows(chosen)
        assert len(rows) == len(set(rows)) == max_examples == chosen.num_examples
        sizes = [len(chosen.load(client_id)[1]) for client_id in chosen.client_ids]
        whole = [MANY[client_id] for client_id in chosen.client_ids]
        assert sizes[:-1] == whole[:-1]
        assert 0 < sizes[-1] <= whole[-1]
        assert not chosen.is_whole
        assert chosen.identify()["examples"] == max_examples

    def test_labels_stay_with_their_images(self):
        data = evaluation_toys.build_data({"a": 50})
        chosen = evaluation_toys.select(data, max_examples=20)
        x, y = chosen.load("a")
        all_x, all_y = data.load("a")
        rows = x[:, 0, 0, 0].astype(int)
        assert np.array_equal(x, all_x[rows]) and np.array_equal(y, all_y[rows])
        # Drawn, in the order of the data: neither the first ones nor the last.
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert rows.tolist() not in (list(range(20)), list(range(30, 50)))
        again = chosen.load("a")[0]
        assert np.array_equal(again, x)

    def test_partial_clients_are_drawn_evenly(self):
        taken = collections.Counter(
            int(row)
            for seed in range(300)
            for row in list_rows(
                evaluation_toys.select(
                    evaluation_toys.build_data({"a": 4}), max_examples=1, seed=seed
                )
            )
        )
        # Binomial(300, 1/4): 5 standard deviations are 37.5; "the first" is 300.
        assert sorted(taken) == [0, 1, 2, 3]
        assert max(abs(count - 75) for count in taken.values()) < 37.5

    def test_clients_are_drawn_evenly(self):
        sizes = {name: 2 for name in "abcd"}
        taken = collections.Counter(
            client_id
            for seed in range(300)
            for client_id in evaluation_toys.select(
                evaluation_toys.build_data(sizes), max_examples=2, seed=seed
            ).client_ids
        )
        assert sorted(taken) == list("abcd")
        assert max(abs(count - 75) for count in taken.values()) < 37.5

    @pytest.mark.parametrize("max_examples", [1, 17, 119])
    def test_it_does_not_depend_on_the_order_of_clients(self, max_examples):
        one = evaluation_toys.select(
            evaluation_toys.build_data(MANY), max_examples=max_examples, seed=1
        )
        backwards = evaluation_toys.build_data(MANY, client_ids=reversed(MANY))
        other = evaluation_toys.select(backwards, max_examples=max_examples, seed=1)
        assert one.client_ids == other.client_ids
        assert list_rows(one) == list_rows(other)
        assert one.identify() == other.identify()

    def test_the_whole_is_the_same_in_any_order(self):
        one = evaluation_toys.select(evaluation_toys.build_data(MANY))
        other = evaluation_toys.select(
            evaluation_toys.build_data(MANY, client_ids=reversed(MANY))
        )
        assert one.identify() == other.identify()
        assert set(list_rows(one)) == set(list_rows(other))

    def test_seeds_choose_others(self):
        chosen = [
            evaluation_toys.select(
                evaluation_toys.build_data(MANY), max_examples=17, seed=seed
            )
            for seed in range(5)
        ]
        assert len({tuple(sorted(list_rows(one))) for one in chosen}) == 5
        assert len({one.identify()["digest"] for one in chosen}) == 5
        again = evaluation_toys.select(
            evaluation_toys.build_data(MANY), max_examples=17, seed=2
        )
        assert again.identify() == chosen[2].identify()
        assert list_rows(again) == list_rows(chosen[2])

    def test_parts_of_one_client_by_another_seed_are_told_apart(self):
        one, other = (
            evaluation_toys.select(
                evaluation_toys.build_data({"a": 50}), max_examples=20, seed=seed
            )
            for seed in (0, 1)
        )
        assert list_rows(one) != list_rows(other)
        assert one.identify()["digest"] != other.identify()["digest"]

    def test_a_seed_that_cuts_nobody_is_not_in_the_digest(self):
        data = evaluation_toys.build_data({name: 2 for name in "ab"})
        found: dict[tuple[str, ...], set[str]] = {}
        for seed in range(10):
            chosen = evaluation_toys.select(data, max_examples=2, seed=seed)
            assert not chosen.limits
            digests = found.setdefault(tuple(chosen.client_ids), set())
            digests.add(chosen.identify()["digest"])
        assert found.keys() == {("a",), ("b",)}
        assert [len(digests) for digests in found.values()] == [1, 1]
        assert set.isdisjoint(*found.values())

    def test_the_data_are_told_apart_by_their_source(self):
        data = evaluation_toys.build_data(MANY)
        sources = [
            None,
            {"digest": "1"},
            {"digest": "2"},
            {"digest": "1", "vocabulary": "3"},
        ]
        digests = [
            evaluation_toys.select(data, source=source).identify()["digest"]
            for source in sources
        ]
        assert len(set(digests)) == len(sources)
        again = {"vocabulary": "3", "digest": "1"}
        assert (
            digests[3]
            == (evaluation_toys.select(data, source=again).identify()["digest"])
        )
        assert evaluation_toys.select(data).source == {}

    def test_clients_of_other_sizes_are_told_apart(self):
        """As many examples of the same clients, but not of each."""
        one, other, again = (
            evaluation_toys.select(evaluation_toys.build_data(sizes)).identify()
            for sizes in ({"a": 2, "b": 3}, {"a": 3, "b": 2}, {"b": 3, "a": 2})
        )
        assert one == again
        assert {**one, "digest": ""} == {**other, "digest": ""}
        assert one["digest"] != other["digest"]

    def test_sizes_are_told_apart(self):
        # The same client, with more of its examples.
        identities = [
            evaluation_toys.select(
                evaluation_toys.build_data({"a": 50}), max_examples=size
            ).identify()["digest"]
            for size in (19, 20, 50)
        ]
        assert len(set(identities)) == 3

    @pytest.mark.parametrize("max_examples", [None, 120, 121, 10**9])
    def test_the_whole(self, max_examples):
        data = evaluation_toys.build_data(MANY)
        chosen = evaluation_toys.select(data, max_examples=max_examples, seed=9)
        assert chosen.is_whole
        assert chosen.client_ids == data.client_ids
        assert chosen.num_examples == 120 and not chosen.limits
        identity = chosen.identify()
        assert identity["is_whole"] and identity["seed"] is None
        # It is the same whatever the seed and the limit.
        assert identity == evaluation_toys.select(data).identify()
        assert json.loads(json.dumps(identity)) == identity

    def test_what_an_identity_says(self):
        identity = evaluation_toys.select(
            evaluation_toys.build_data(MANY), max_examples=17, seed=4
        ).identify()
        assert identity.pop("clients") < 40
        assert len(identity.pop("digest")) == 16
        assert identity == {
            "examples": 17,
            "of_clients": 40,
            "is_whole": False,
            "seed": 4,
        }

    def test_only_what_is_chosen_is_evaluated(self):
        model, data = toys.build_toy_model(), evaluation_toys.build_data(MANY)
        weights = evaluation_toys.draw_weights(model)
        chosen = evaluation_toys.select(data, max_examples=33, seed=5)
        parts = [chosen.load(client_id) for client_id in chosen.client_ids]
        x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
        found = evaluation.Evaluation(model, chosen, batch_size=4)
        losses, right = evaluation_toys.compute_expected(weights, x, y)
        means = found(weights)
        assert means["loss"] == pytest.approx(losses.mean(), rel=1e-5)
        assert means["accuracy"] == pytest.approx(right.mean(), rel=1e-12)
        clients = found.evaluate_clients(weights)
        assert clients.client_ids == chosen.client_ids
        assert clients.num_examples.sum() == 33

    @pytest.mark.parametrize("max_examples", [None, 5])
    @pytest.mark.parametrize("sizes", [{}, {"a": 0, "b": 0}])
    def test_nothing_to_evaluate_is_refused(self, sizes, max_examples):
        data = evaluation_toys.build_data(sizes)
        match = f"the test data must have examples. Found none of {len(sizes)} clients"
        with pytest.raises(DataError, match=match):
            evaluation_toys.select(data, max_examples=max_examples)
        # One will do.
        data = evaluation_toys.build_data({**sizes, "c": 1})
        assert evaluation_toys.select(data, max_examples=max_examples).num_examples == 1

    @pytest.mark.parametrize("max_examples", [0, -1])
    def test_less_than_one_example_is_refused(self, max_examples):
        with pytest.raises(ValueError, match="`max_examples` must be >= 1. Found"):
            evaluation_toys.select(
                evaluation_toys.build_data(MANY), max_examples=max_examples
            )
