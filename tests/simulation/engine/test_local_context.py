"""Tests for the local engine: order, bounds, failures, devices, arguments, no child."""

import collections
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import psutil
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from simulation import execution
from simulation.engine.cohort_run import ClientError, Workers, split_cohort
from simulation.engine.local_context import LocalContext

CLIENT_FLOATS = tff.FederatedType(np.float32, tff.CLIENTS)


@pytest.fixture
def build_context():
    """Builds a context and makes it the default; the former one comes back."""
    before = tff.framework.get_context_stack().current
    built = []

    def build(**choices) -> LocalContext:
        context = LocalContext(**choices)
        built.append(context)
        tff.framework.set_default_context(context)
        return context

    yield build
    tff.framework.set_default_context(before)
    for context in built:
        context.close()


@tff.tensorflow.computation(np.float32)
def invert(x):
    check = tf.debugging.assert_none_equal(x, 0.0, message="no inverse of zero")
    with tf.control_dependencies([check]):
        return 1.0 / x


@tff.tensorflow.computation(np.float32)
def count_one(x):
    del x
    return tf.constant(1)


@tff.federated_computation(CLIENT_FLOATS)
def sum_inverses(values):
    ones = tff.federated_sum(tff.federated_map(count_one, values))
    return tff.federated_sum(tff.federated_map(invert, values)), ones


class TestWorkers:
    def test_results_come_in_order_whatever_the_timing(self):
        workers, order = Workers(4), []
        workers.run(
            lambda group, slot: (
                time.sleep(0.01 * (7 - group.start % 8)) or [str(i) for i in group]
            ),
            lambda index, result: order.append((index, result)),
            groups=split_cohort(range(24), 2),
            on_failure=pytest.fail,
        )
        workers.close()
        assert order == [(index, str(index)) for index in range(24)]

    def test_no_two_calls_share_a_slot_and_few_results_wait(self):
        workers, lock = Workers(3), threading.Lock()
        busy, most, results, alive = set(), [0], [], weakref.WeakSet()

        class Result:
            pass

        def work(group: range, slot: int) -> list[Result]:
            with lock:
                assert slot not in busy and 0 <= slot < 3
                busy.add(slot)
            # The first is the slowest: the others must not run away from it.
            time.sleep(0.2 if group.start == 0 else 0.001)
            result = Result()
            with lock:
                busy.remove(slot)
                alive.add(result)
                most[0] = max(most[0], len(alive))
            return [result]

        workers.run(
            work,
            lambda index, result: results.append(index),
            groups=split_cohort(range(100), 1),
            on_failure=pytest.fail,
        )
        workers.close()
        assert len(results) == 100
        assert most[0] <= 3 * 3 + 1

    def test_after_a_failure_nothing_new_is_begun(self):
        workers, begun = Workers(2), []

        def work(group: range, slot: int) -> list[None | Exception]:
            begun.append(group.start)
            return [KeyError("gone") if group.start == 1 else None]

        def fail(error: ClientError) -> None:
            raise error

        with pytest.raises(ClientError, match="client 1 of 50 failed: KeyError"):
            workers.run(
                work,
                lambda *_: None,
                groups=split_cohort(range(50), 1),
                on_failure=fail,
            )
        time.sleep(0.05)
        workers.close()
        assert max(begun) <= 1 + 2 * 3


def test_groups_are_even_and_complete():
    assert split_cohort(range(0), 4) == []
    assert [len(group) for group in split_cohort(range(9), 4)] == [3, 3, 3]
    assert [i for group in split_cohort(range(101), 32) for i in group] == list(
        range(101)
    )
    assert max(len(group) for group in split_cohort(range(101), 32)) <= 32


class TestFailures:
    def test_the_client_is_named(self, build_context):
        build_context()
        with pytest.raises(
            ClientError, match=r"client 2 of 4 failed: .*Invalid"
        ) as caught:
            sum_inverses([1.0, 2.0, 0.0, 4.0])
        assert caught.value.client_index == 2
        caught.value.add_client_id("anna")
        assert str(caught.value).startswith("anna: client 2 of 4")
        assert sum_inverses([1.0, 2.0, 4.0]) == (1.75, 3)

    def test_a_dropped_client_is_in_no_sum_and_is_counted(self, build_context):
        context = build_context(client_failure=execution.ClientFailure.DROP)
        assert sum_inverses([1.0, 2.0, 0.0, 4.0]) == (1.75, 3)
        assert [failure.client_index for failure in context.failures] == [2]
        assert sum_inverses([1.0]) == (1.0, 1)
        assert not context.failures

    def test_a_client_that_fails_before_a_second_look_is_counted_once(
        self, build_context
    ):
        @tff.tensorflow.computation(np.float32, np.float32)
        def multiply(x, y):
            return x * y

        @tff.federated_computation(CLIENT_FLOATS)
        def run(values):
            inverses = tff.federated_map(invert, values)
            total = tff.federated_broadcast(tff.federated_sum(inverses))
            return tff.federated_sum(tff.federated_map(multiply, (inverses, total)))

        context = build_context(client_failure=execution.ClientFailure.DROP)
        assert run([1.0, 0.0, 2.0]) == 1.5 * 1.5
        assert [failure.client_index for failure in context.failures] == [1]

    def test_a_client_whose_value_cannot_be_added_is_dropped_too(self, build_context):
        @tff.tensorflow.computation(np.float32, np.float32)
        def add_positive(total, x):
            check = tf.debugging.assert_positive(x, message="not positive")
            with tf.control_dependencies([check]):
                return total + x

        merge = tff.tensorflow.computation(lambda a, b: a + b, [np.float32, np.float32])
        report = tff.tensorflow.computation(lambda total: total, np.float32)

        @tff.federated_computation(CLIENT_FLOATS)
        def run(values):
            return tff.federated_aggregate(values, 0.0, add_positive, merge, report)

        context = build_context(client_failure=execution.ClientFailure.DROP)
        assert run([1.0, -1.0, 2.0]) == 3.0
        assert [failure.client_index for failure in context.failures] == [1]
        build_context()
        with pytest.raises(ClientError, match="client 1 of 3 failed.*not positive"):
            run([1.0, -1.0, 2.0])

    def test_progress_counts_every_client(self, build_context):
        seen = []
        context = build_context()
        context.on_client_done = lambda done, total: seen.append((done, total))
        sum_inverses([1.0, 2.0, 4.0])
        assert seen == [(1, 3), (2, 3), (3, 3)]


class TestArguments:
    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (3.0, "must be a list"),
            ([1.0, "two"], "failed: TypeError"),
            ([np.zeros(3, np.float32)], r"must have shape \(\)"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, build_context, value, message):
        build_context()
        with pytest.raises((TypeError, ClientError), match=message):
            sum_inverses(value)

    def test_two_cohorts_of_different_sizes_are_refused(self, build_context):
        @tff.federated_computation(CLIENT_FLOATS, CLIENT_FLOATS)
        def run(x, y):
            return tff.federated_sum(x), tff.federated_sum(y)

        build_context()
        with pytest.raises(ValueError, match=r"one number of entries. Found \[1, 2\]"):
            run([1.0], [1.0, 2.0])

    def test_structures_are_read_by_name(self, build_context):
        pair = tff.to_type(collections.OrderedDict(a=np.float32, b=np.float32))

        @tff.tensorflow.computation(pair)
        def subtract(pair):
            return pair["a"] - pair["b"]

        build_context()
        assert subtract({"b": 1.0, "a": 5.0}) == 4.0
        assert subtract(collections.OrderedDict(a=5.0, b=1.0)) == 4.0

    def test_data_sets_of_another_type_are_refused(self, build_context):
        @tff.tensorflow.computation(tff.SequenceType(np.float32))
        def total(numbers):
            return numbers.reduce(0.0, lambda x, y: x + y)

        build_context()
        floats = tf.data.Dataset.from_tensor_slices([1.0, 2.0])
        assert total(floats) == 3.0
        assert total([1.0, 2.0, 4.0]) == 7.0
        assert total([]) == 0.0
        with pytest.raises(TypeError, match="elements of type float32. Found int64"):
            total(tf.data.Dataset.range(3))


def test_sums_are_in_the_order_that_is_written(build_context):
    """TensorFlow's AddN would begin with the term that nobody else needs."""
    build_context()
    x, y, z = np.random.default_rng(0).normal(size=[3, 5000]).astype(np.float32)

    @tff.tensorflow.computation(*[tff.TensorType(np.float32, [5000])] * 3)
    def add(x, y, z):
        return x + y + 2.0 * z

    found = add(x, y, z)
    assert np.array_equal(found, (x + y) + 2 * z)
    assert not np.array_equal(found, x + (y + 2 * z))


def test_two_calls_of_one_computation_do_not_share_its_variables(build_context):
    @tff.tensorflow.computation(np.float32)
    def keep(x):
        variable = tf.Variable(0.0)
        with tf.control_dependencies([variable.assign(x)]):
            return variable.read_value()

    server_float = tff.FederatedType(np.float32, tff.SERVER)

    @tff.federated_computation(server_float, server_float)
    def run(x, y):
        return tff.federated_map(keep, x), tff.federated_map(keep, y)

    context = build_context()
    assert run(1.0, 2.0) == (1.0, 2.0)
    # Shared, the later assignment would now and then be what both read.
    [(_, program, _)] = context._programs.values()
    [stage] = program._stages
    names = [
        op.get_attr("shared_name")
        for op in stage._functions[0].graph.get_operations()
        if op.type == "VarHandleOp"
    ]
    assert len(set(names)) == len(names) == 2


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("modulus", [1, 2, 7, 8, 1000, 1024, 2**30, 2**30 - 1, -8])
def test_remainders_are_those_of_a_division(build_context, dtype, modulus):
    @tff.tensorflow.computation(tff.TensorType(dtype, [None]), dtype)
    def compute(x, y):
        return tf.math.floormod(x, y)

    build_context()
    limits = np.iinfo(dtype)
    x = np.array([0, 1, 5, 7, 8, 1023, 1024, 12345, limits.max], dtype)
    x = np.concatenate([x, -x, [limits.min]])
    # Python's own remainders, of integers without a bound.
    expected = [int(value) % modulus for value in x]
    assert compute(x, dtype(modulus)).tolist() == expected


PLACED = textwrap.dedent("""
    import os
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import numpy as np
    import psutil
    import tensorflow as tf
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    import tensorflow_federated as tff
    from simulation.engine.local_context import LocalContext

    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    context = LocalContext(devices=names, max_concurrent_clients=4)
    tff.framework.set_default_context(context)

    @tff.tensorflow.computation(np.float32)
    def double(x):
        return 2 * x

    @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
    def run(values):
        return tff.federated_sum(tff.federated_map(double, values))

    assert run([1.0, 2.0, 3.0]) == 12.0
    [(_, _, runner)] = context._programs.values()
    [current] = runner.passes.values()
    for function in current.stage._functions:
        ops = [op for op in function.graph.get_operations() if op.type == "Mul"]
        print(*{op.device for op in ops})
    children = psutil.Process().children(recursive=True)
    assert not children, children
""")


def test_devices_share_the_clients_and_there_is_no_child():
    done = subprocess.run(
        [sys.executable, "-c", PLACED], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    devices = [line[-5:] for line in done.stdout.splitlines()]
    assert devices == ["CPU:0", "CPU:1", "CPU:0", "CPU:1"]


def test_memory_stays_flat_over_cohorts_of_many_sizes(build_context):
    build_context()

    @tff.tensorflow.computation(tff.SequenceType(np.float32))
    def total(numbers):
        return numbers.reduce(0.0, lambda x, y: x + y)

    @tff.federated_computation(
        tff.FederatedType(tff.SequenceType(np.float32), tff.CLIENTS)
    )
    def run(values):
        return tff.federated_sum(tff.federated_map(total, values))

    def play(rounds: int) -> int:
        for number in range(rounds):
            size = 1 + number % 13
            data = [tf.data.Dataset.from_tensor_slices([1.0, 2.0])] * size
            assert run(data) == 3.0 * size
        return psutil.Process().memory_info().rss

    before, after = play(60), play(140)
    assert after < 1.05 * before
