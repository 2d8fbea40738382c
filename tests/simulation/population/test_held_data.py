"""Tests for data held in memory: bounded, oldest out first, the same as loaded."""

import collections
import pickle
import threading
from concurrent import futures

import cloudpickle
import numpy as np
import pytest

from simulation.population import held_data
from simulation.population.federated_data import DataError

# Of a client's examples, as `Recorder` makes them.
NUM_BYTES = 100
NAMES = tuple("abcdef")


class Recorder:
    """Clients of `NUM_BYTES` each, or of as many as said; knows what was loaded."""

    def __init__(self, sizes=None, failing=()):
        self.client_ids = NAMES
        self.sizes = sizes or {}
        self.failing = set(failing)
        self.loaded = collections.Counter()

    def count(self, client_id):
        return self.sizes.get(client_id, NUM_BYTES) // 10

    def load(self, client_id):
        self.loaded[client_id] += 1
        if client_id in self.failing:
            raise DataError(f"{client_id} is broken")
        count = self.count(client_id)
        value = NAMES.index(client_id)
        return np.full([count, 2], value, np.float32), np.full([count], value, "i2")


def hold(num_clients: float, data=None, **options):
    data = data or Recorder(**options)
    return held_data.HeldData(data, max_bytes=int(num_clients * NUM_BYTES)), data


def load_all(held, names: str) -> None:
    for name in names:
        x, y = held.load(name)
        assert x.tolist() == [[NAMES.index(name)] * 2] * held.count(name)
        assert y.tolist() == [NAMES.index(name)] * held.count(name)


class TestLoad:
    def test_once(self):
        held, data = hold(3)
        load_all(held, "abcabcabc")
        assert data.loaded == {"a": 1, "b": 1, "c": 1}
        assert held.num_bytes == 3 * NUM_BYTES
        assert held.load("a")[0] is held.load("a")[0]

    def test_is_what_the_data_are(self):
        held, data = hold(2)
        assert held.client_ids == data.client_ids
        assert held.count("a") == 10
        assert not data.loaded

    def test_the_one_not_asked_for_longest_makes_room(self):
        held, data = hold(2)
        load_all(held, "ab")
        load_all(held, "a")
        load_all(held, "c")
        data.loaded.clear()
        load_all(held, "ac")
        assert not data.loaded
        # First in, first out would have kept it.
        load_all(held, "b")
        assert data.loaded == {"b": 1}

    @pytest.mark.parametrize("limit", [0.5, 1, 2.5, 4])
    def test_the_bound(self, limit, rng):
        sizes = dict(zip(NAMES, [50, 100, 150, 200, 250, 300], strict=True))
        held, _ = hold(limit, sizes=sizes)
        for name in rng.choice(NAMES, size=200):
            held.load(name)
            assert held.num_bytes <= limit * NUM_BYTES
        kept = held.num_bytes
        assert kept >= 50

    def test_exactly_full_is_not_too_much(self):
        held, data = hold(2)
        load_all(held, "abab")
        assert data.loaded == {"a": 1, "b": 1}
        held, data = hold(1.99)
        load_all(held, "abab")
        assert data.loaded == {"a": 2, "b": 2}

    def test_one_that_is_too_large_pushes_nobody_out(self):
        held, data = hold(2, sizes={"c": 210})
        load_all(held, "abccab")
        assert data.loaded == {"a": 1, "b": 1, "c": 2}

    def test_one_may_push_out_several(self):
        held, data = hold(3, sizes={"d": 210})
        load_all(held, "abcd")
        assert held.num_bytes == 210
        load_all(held, "d")
        assert data.loaded["d"] == 1

    def test_nothing(self):
        held, data = hold(0)
        held.read_ahead("ab")
        held.wait()
        assert not data.loaded
        load_all(held, "aa")
        assert data.loaded == {"a": 2}
        assert held.num_bytes == 0

    def test_an_error_is_raised_and_not_held(self):
        held, data = hold(2, failing="a")
        with pytest.raises(DataError, match="a is broken"):
            held.load("a")
        data.failing.clear()
        load_all(held, "a")

    def test_less_than_nothing(self):
        with pytest.raises(ValueError, match="`max_bytes` must be >= 0. Found -1"):
            held_data.HeldData(Recorder(), max_bytes=-1)


class TestReadAhead:
    def test_is_not_read_again(self):
        held, data = hold(6)
        held.read_ahead(["b", "a"])
        held.wait()
        assert data.loaded == {"a": 1, "b": 1}
        load_all(held, "abc")
        assert data.loaded == {"a": 1, "b": 1, "c": 1}

    def test_in_order_until_half_is_full(self):
        held, data = hold(4)
        held.read_ahead("fedcba")
        held.wait()
        # The third tells that it is over.
        assert data.loaded == {"f": 1, "e": 1, "d": 1}

    def test_those_that_are_held_count(self):
        held, data = hold(6)
        load_all(held, "abc")
        held.read_ahead("abcdef")
        held.wait()
        assert set(data.loaded) == set("abcd")
        assert set(data.loaded.values()) == {1}

    @pytest.mark.parametrize("last", [61, 100, 1000])
    def test_they_do_not_push_each_other_out(self, last):
        held, data = hold(1, sizes={"a": 40, "b": last})
        held.read_ahead("ab")
        held.wait()
        data.loaded.clear()
        load_all(held, "a")
        assert not data.loaded

    def test_errors_wait_for_load(self):
        held, data = hold(6, failing="a")
        held.read_ahead("abx")
        held.wait()
        load_all(held, "b")
        assert data.loaded == {"a": 1, "b": 1, "x": 1}
        with pytest.raises(DataError, match="a is broken"):
            held.load("a")

    def test_does_not_wait_and_a_later_one_replaces_those_that_wait(self):
        held, data = hold(12)
        release, entered = threading.Event(), threading.Event()
        original = data.load

        def load(client_id):
            entered.set()
            assert release.wait(10)
            return original(client_id)

        data.load = load
        held.read_ahead("a")
        assert entered.wait(10)
        held.read_ahead("b")
        held.read_ahead("c")
        assert not data.loaded
        release.set()
        held.wait()
        assert data.loaded == {"a": 1, "c": 1}

    def test_wait_without_any(self):
        hold(2)[0].wait()


class TestElsewhere:
    @pytest.mark.parametrize("module", [pickle, cloudpickle])
    def test_a_copy_is_empty_and_as_large(self, module):
        held, _ = hold(1)
        held.read_ahead("ab")
        held.wait()
        load_all(held, "a")
        empty = module.dumps(hold(1)[0])
        text = module.dumps(held)
        # Nothing of what is held: only the counts of what was loaded.
        assert len(text) < len(empty) + NUM_BYTES
        copy = pickle.loads(text)
        assert copy.num_bytes == 0
        load_all(copy, "abb")
        assert copy.num_bytes == NUM_BYTES

    def test_many_threads(self, rng):
        held, _ = hold(3)
        orders = [rng.choice(NAMES, size=200) for _ in range(8)]

        def work(order) -> int:
            most = 0
            for index, name in enumerate(order):
                if index % 50 == 0:
                    held.read_ahead(order[index : index + 3].tolist())
                load_all(held, name)
                most = max(most, held.num_bytes)
            return most

        with futures.ThreadPoolExecutor(8) as pool:
            assert max(pool.map(work, orders)) <= 3 * NUM_BYTES
        held.wait()
        load_all(held, "abc")
        assert held.num_bytes == 3 * NUM_BYTES
