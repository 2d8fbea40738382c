"""Tests for stacks of clients: what is done for a stack is what is done for each."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from simulation.engine import (
    combination,
    graph_cut,
    local_context,
    lockstep,
    stack,
    stack_output,
)
from simulation.engine.context import ClientFailure

X = tf.TensorSpec([None, 3], tf.float32)
SEED, WEIGHTS = tf.TensorSpec([2], tf.int32), tf.TensorSpec([3], tf.float32)
# x, seed, weights: the last are one object for all clients.
SPECS, SHARED = (X, SEED, WEIGHTS), frozenset({2})


def train(x, seed, rate, weights):
    """Of a stack; a negative entry of x gives what is not finite."""
    del seed
    return [
        weights - rate[:, None] * tf.reduce_sum(tf.sqrt(x), 1),
        tf.reduce_sum(x, [1, 2]),
    ]


def work(x, seed, weights, *, check=True):
    """One client's: before the call something is computed, given and shared."""
    if check:
        positive = tf.debugging.Assert(tf.reduce_all(x < 100.0), ["too large"])
        with tf.control_dependencies([positive]):
            scaled = x / 3.0
    else:
        scaled = x / 3.0
    stacked = [scaled, seed, tf.constant(0.1), weights]
    trained, total = lockstep.call_stacked(train, stacked)
    noise = tf.random.stateless_normal([3], seed)
    update = weights - trained + noise * tf.norm(x)
    with tf.control_dependencies([tf.debugging.Assert(total < 50.0, ["too much"])]):
        return [update, tf.identity(total), tf.reduce_max(x, 0), seed]


def build(function=work, specs=SPECS, shared=SHARED) -> tuple:
    """Returns one client's function, and it cut at its call."""
    wrapped = tf.compat.v1.wrap_function(function, list(specs))
    found = lockstep.find_lockstep(wrapped, None, shared=shared)
    assert found is not None
    return wrapped, found


def draw_clients(rng, sizes) -> list[list]:
    weights = tf.constant(rng.normal(size=3).astype(np.float32))
    return [
        [
            rng.uniform(0, 1, size=[size, 3]).astype(np.float32),
            np.array([7, number], np.int32),
            weights,
        ]
        for number, size in enumerate(sizes)
    ]


def run_each(found: lockstep.Lockstep, clients) -> list:
    """Returns what clients get who share the call alone: as if there were no stacks."""
    outputs = found._run_apart(range(len(clients)), clients)
    return [outputs.get(index) for index in range(len(clients))]


def check_equal(some, others) -> None:
    assert len(some) == len(others)
    for one, two in zip(some, others, strict=True):
        assert (one is None) == (two is None)
        for a, b in zip(one or [], two or [], strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


def is_row(outputs) -> list[bool]:
    return [isinstance(one, stack_output.Row) for one in outputs]


class TestStackWork:
    # Stacks of 16, of 4 and of 1, and clients whose shapes differ inside a group.
    @pytest.mark.parametrize(
        "sizes", [[5] * 16, [5] * 6, [5], [5, 2, 5, 5, 2, 5, 1, 5, 5, 2], [0, 0, 3]]
    )
    def test_a_stack_gives_what_each_client_gives_bit_for_bit(self, sizes, rng):
        _, found = build()
        clients = draw_clients(rng, sizes)
        outputs = found.run(clients)
        assert all(is_row(outputs))
        check_equal(outputs, run_each(found, clients))
        # It tells clients apart.
        assert len({outputs[n][3][1] for n in range(len(sizes))}) == len(sizes)

    def test_inputs_of_the_call_are_given_common_or_computed(self):
        _, found = build()
        assert found.stack_work._given == {1: 1}
        assert found.stack_work._computed == [0]
        assert sorted(found.stack_work._common) == [2, 3]

    def test_what_is_shared_is_taken_anew_with_the_next_weights(self, rng):
        _, found = build()
        for _ in range(2):
            clients = draw_clients(rng, [4] * 5)
            check_equal(found.run(clients), run_each(found, clients))

    def test_inputs_that_ought_to_be_shared_but_differ_are_done_one_by_one(self, rng):
        _, found = build()
        clients = draw_clients(rng, [4] * 5)
        clients[3][2] = clients[3][2] + 1.0
        outputs = found.run(clients)
        assert not any(is_row(outputs))
        check_equal(outputs, run_each(found, clients))
        np.testing.assert_allclose(
            outputs[3][1], np.sum(clients[3][0]) / 3.0, rtol=1e-6
        )

    @pytest.mark.parametrize(
        ("entry", "why"), [(150.0, "before the call"), (99.0, "after the call")]
    )
    def test_a_client_that_raises_takes_no_other_with_it(self, entry, why, rng):
        alone, found = build()
        clients = draw_clients(rng, [4] * 9)
        sound = found.run(clients)
        clients[2][0] = np.full_like(clients[2][0], entry)
        outputs = found.run(clients)
        assert [one is None for one in outputs] == [n == 2 for n in range(9)], why
        with pytest.raises(tf.errors.InvalidArgumentError):
            alone(*map(tf.convert_to_tensor, clients[2]))
        check_equal(outputs, run_each(found, clients))
        for number in (0, 8):
            np.testing.assert_allclose(outputs[number][0], sound[number][0], rtol=1e-5)

    def test_a_client_that_raises_leaves_clients_of_other_shapes_in_their_stack(
        self, rng
    ):
        _, found = build()
        clients = draw_clients(rng, [4, 2] * 4)
        clients[2][0][:] = 150.0
        outputs = found.run(clients)
        assert is_row(outputs) == [False, True] * 4
        assert [one is None for one in outputs] == [n == 2 for n in range(8)]

    def test_results_that_are_not_finite_are_left_to_the_client_alone(self, rng):
        _, found = build()
        clients = draw_clients(rng, [4] * 7)
        sound = found.run(clients)
        for number in (1, 5):
            clients[number][0][2, 1] = -1.0
        outputs = found.run(clients)
        assert [one is None for one in outputs] == [n in (1, 5) for n in range(7)]
        for number in (0, 2, 3, 4, 6):
            check_equal([outputs[number]], [sound[number]])

    def test_outputs_whose_shapes_differ_are_each_its_own(self, rng):
        def choose(x, seed, weights):
            [doubled] = lockstep.call_stacked(
                lambda x, w: [x + w[:, None]], [x, weights]
            )
            return [tf.boolean_mask(doubled, x[:, 0] > 0.5), seed]

        _, found = build(choose)
        clients = draw_clients(rng, [6] * 4)
        outputs = found.run(clients)
        assert all(is_row(outputs))
        assert len({outputs[n][0].shape for n in range(4)}) > 1
        check_equal(outputs, run_each(found, clients))

    def test_what_goes_into_the_call_may_differ_in_shape_where_inputs_do_not(self, rng):
        def choose(x, seed, weights):
            [doubled] = lockstep.call_stacked(
                lambda x: [2.0 * x], [tf.boolean_mask(x, x[:, 0] > 0.5)]
            )
            return [tf.reduce_sum(doubled, 0) + weights, seed]

        _, found = build(choose)
        clients = draw_clients(rng, [6] * 4)
        outputs = found.run(clients)
        assert all(one is not None for one in outputs)
        check_equal(outputs, run_each(found, clients))

    def test_outputs_are_arrays_of_their_own(self, rng):
        _, found = build()
        one, two = found.run(draw_clients(rng, [4, 4]))
        first = one[0]
        assert first.flags.writeable and first.base is None
        first[:] = 0.0
        assert np.all(one[0] != 0.0) and np.all(two[0] != 0.0)
        assert isinstance(one[1], np.float32)

    @pytest.mark.parametrize("place", ["before", "after", "in_a_loop"])
    def test_what_draws_is_done_one_by_one(self, place):
        def draw(x, seed, weights):
            del seed
            if place == "before":
                x = x + tf.random.uniform([])
            [y] = lockstep.call_stacked(lambda x: [2.0 * x], [x])
            if place == "after":
                y = y + tf.random.uniform([])
            if place == "in_a_loop":
                y = tf.while_loop(
                    lambda y: tf.reduce_sum(y) < 9.0,
                    lambda y: [y + tf.random.uniform([])],
                    [y],
                )[0]
            return [y * weights]

        assert build(draw)[1].stack_work is None

    def test_what_fails_to_build_is_not_built_again(self, rng, monkeypatch):
        _, found = build()
        builds = []

        def fail(self):
            builds.append(self)
            raise ValueError("no")

        monkeypatch.setattr(stack.StackWork, "_build", fail)
        clients = draw_clients(rng, [4, 4, 2])
        for _ in range(2):
            check_equal(found.run(clients), run_each(found, clients))
        assert len(builds) == 1


def test_a_part_has_a_state_where_something_in_it_draws():
    def check(function) -> bool:
        graph = tf.compat.v1.wrap_function(function, [WEIGHTS]).graph
        part = graph_cut.extract(graph, graph.inputs, graph.outputs)
        return graph_cut.has_state(part)

    step = tf.function(lambda x: x + tf.random.uniform([]))
    plain = tf.function(lambda x: x + 1.0)
    assert not check(lambda x: [plain(x)])
    assert not check(lambda x: [tf.random.stateless_uniform([3], [1, 2]) + x])
    assert check(lambda x: [step(x)])
    assert check(lambda x: [tf.cond(x[0] > 0, lambda: step(x), lambda: x)])
    # Not in what is asked for.
    assert not check(lambda x: [step(x), plain(x)][1:])


@pytest.fixture
def context():
    before = tff.framework.get_context_stack().current
    context = local_context.LocalContext(max_concurrent_clients=2)
    tff.framework.set_default_context(context)
    yield context
    tff.framework.set_default_context(before)
    context.close()


VALUE = tff.TensorType(np.float32, [2])


@tff.tensorflow.computation(VALUE)
def scale(x):
    [y] = lockstep.call_stacked(lambda x: [x * 1.0], [x])
    return y


@tff.federated_computation(tff.FederatedType(VALUE, tff.CLIENTS))
def add_up(values):
    scaled = tff.federated_map(scale, values)
    return tff.federated_sum(scaled), scaled


@tff.tensorflow.computation(VALUE, VALUE)
def add_small(total, value):
    fits = tf.debugging.Assert(tf.reduce_all(value < 100.0), ["too large"])
    with tf.control_dependencies([fits]):
        return total * 0.5 + value


@tff.tensorflow.computation
def make_zero():
    return tf.zeros([2])


@tff.tensorflow.computation(VALUE, VALUE)
def merge(one, two):
    return one + two


@tff.tensorflow.computation(VALUE)
def report(total):
    return total


@tff.federated_computation(tff.FederatedType(VALUE, tff.CLIENTS))
def fold(values):
    scaled = tff.federated_map(scale, values)
    zero = make_zero()
    return tff.federated_aggregate(scaled, zero, add_small, merge, report)


def add_by_hand(values, *, start=0.0, keep=1.0) -> np.ndarray:
    total = np.full([2], start, np.float32)
    for value in values:
        total = np.float32(keep) * total + value
    return total


class TestCombination:
    def draw(self, rng, count=50) -> list[np.ndarray]:
        # Of so different sizes that every order has its own last bits.
        return list((10.0 ** rng.uniform(-4, 4, size=[count, 2])).astype(np.float32))

    def test_clients_are_added_in_their_order(self, context, rng):
        values = self.draw(rng)
        total, kept = add_up(values)
        np.testing.assert_array_equal(total, add_by_hand(values))
        assert np.any(total != add_by_hand(values[::-1]))
        np.testing.assert_array_equal(kept, values)

    def test_stacks_are_added_in_one_call(self, context, rng, monkeypatch):
        folds = []
        former = combination.Combination.fold

        def count(self, totals, rows):
            folds.append(len(rows))
            return former(self, totals, rows)

        monkeypatch.setattr(combination.Combination, "fold", count)
        monkeypatch.delattr(combination.Combination, "combine")
        add_up(self.draw(rng, 32))
        assert folds == [16, 16]

    def test_clients_of_several_stacks_are_added_in_their_order(self, context, rng):
        anything = tff.TensorType(np.float32, [None])

        @tff.tensorflow.computation(anything)
        def take_two(x):
            [y] = lockstep.call_stacked(lambda x: [x * 1.0], [x])
            return tf.ensure_shape(y[:2], [2])

        @tff.federated_computation(tff.FederatedType(anything, tff.CLIENTS))
        def run(values):
            return tff.federated_sum(tff.federated_map(take_two, values))

        values = [
            np.concatenate([value, np.zeros(number % 3, np.float32)])
            for number, value in enumerate(self.draw(rng))
        ]
        expected = add_by_hand([value[:2] for value in values])
        np.testing.assert_array_equal(run(values), expected)

    def test_a_value_that_cannot_be_added_is_its_clients_failure(self, context, rng):
        context._client_failure = ClientFailure.DROP
        values = [value % 100 for value in self.draw(rng, 40)]
        values[17] = np.full(2, 150.0, np.float32)
        result = fold(values)
        assert [failure.client_index for failure in context.failures] == [17]
        expected = add_by_hand(values[:17] + values[18:], keep=0.5)
        np.testing.assert_array_equal(result, expected)

    def test_a_client_that_is_run_alone_is_added_in_its_place(self, context, rng):
        values = self.draw(rng, 40)
        values[3][0] = values[30][1] = np.inf
        total, kept = add_up(values)
        np.testing.assert_array_equal(total, [np.inf, np.inf])
        np.testing.assert_array_equal(kept, values)
