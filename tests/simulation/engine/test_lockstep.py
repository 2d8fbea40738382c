"""Tests for stacks of clients: what is compiled is shared, by what it computes."""

import dataclasses
import functools
import re
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from simulation import client_training, learning
from simulation.engine import canonical_graph, graph_cut, local_context, lockstep
from simulation.image_models import build_logistic_regression
from tests.simulation import toys

FLOATS, INTS = tf.TensorSpec([3], tf.float32), tf.TensorSpec([3], tf.int32)


@pytest.fixture(autouse=True)
def no_former_programs():
    lockstep.forget_shared()


def build_lockstep(
    function: Callable[..., graph_cut.Flat],
    specs: Sequence[tf.TensorSpec] = (FLOATS, FLOATS),
    device: str | None = None,
) -> lockstep.Lockstep:
    """Returns a client's work that is one call of a function of stacked clients."""
    wrapped = tf.compat.v1.wrap_function(
        lambda *tensors: lockstep.call_stacked(function, tensors), list(specs)
    )
    found = lockstep.find_lockstep(wrapped, device)
    assert found is not None
    return found


def build_part(
    function: Callable[..., graph_cut.Flat], specs: Sequence[tf.TensorSpec]
) -> graph_cut.Part:
    graph = tf.compat.v1.wrap_function(function, list(specs)).graph
    return graph_cut.extract(graph, graph.inputs, graph.outputs)


def draw_stacks(specs=(FLOATS, FLOATS), size: int = 4) -> list[tf.Tensor]:
    rng = np.random.default_rng(0)
    return [
        tf.cast(100 * rng.normal(size=[size, *spec.shape]), spec.dtype)
        for spec in specs
    ]


def loop(x, y, *, scale=0.5, act=tf.math.sin, steps=3):
    """Has functions of all kinds in it, some of which are in others."""

    @tf.custom_gradient
    def act_for_itself(z):
        return act(z), lambda up: 2.0 * up

    @tf.function(autograph=False)
    def step(z):
        with tf.compat.v1.colocate_with(z.op):
            z = act_for_itself(z) * scale
        return tf.cond(tf.reduce_sum(z) > 0, lambda: z + 1.0, lambda: z - y)

    def go_on(number, z, gradient):
        with tf.GradientTape() as tape:
            tape.watch(z)
            stepped = step(z)
        return number + 1, stepped, gradient + tape.gradient(stepped, z)

    return tf.while_loop(
        lambda number, *_: number < steps, go_on, (tf.constant(0), x, y)
    )[1:]


def switch(x, y, *, scale=2.0):
    branches = [lambda: x, lambda: y, lambda: x * scale]
    return [tf.switch_case(tf.shape(x)[0] % 3 + 1, branches)]


def list_functions(part: graph_cut.Part) -> list[str]:
    return [function.signature.name for function in part.content.library.function]


def compute_alone(monkeypatch, function, stacks) -> list[np.ndarray]:
    """Returns the results of what was compiled without other names."""

    def refuse(part, specs):
        raise ValueError

    with monkeypatch.context() as patch:
        patch.setattr(canonical_graph, "canonicalize", refuse)
        built = build_lockstep(function)
    return [result.numpy() for result in built.together(*stacks)]


class TestShared:
    @pytest.mark.parametrize(
        "function",
        [loop, switch, lambda x, y: [x - y], lambda x, y: [y, tf.math.tanh(x)]],
    )
    def test_what_is_traced_twice_is_compiled_once_and_right(
        self, function, monkeypatch
    ):
        stacks = draw_stacks()
        expected = compute_alone(monkeypatch, function, stacks)
        one = build_lockstep(function)
        # TensorFlow counts on, by another number of digits.
        for _ in range(3):
            build_lockstep(functools.partial(loop, steps=2))
        two = build_lockstep(function)
        assert one.together is two.together
        for result, wanted in zip(two.together(*stacks), expected, strict=True):
            np.testing.assert_array_equal(result.numpy(), wanted, strict=True)

    def test_the_numbers_of_a_trace_are_in_its_text_and_not_in_ours(self):
        parts = [build_part(loop, [FLOATS, FLOATS]) for _ in range(2)]
        names = [set(list_functions(part)) for part in parts]
        assert len(names[0]) > 4 and not names[0] & names[1]
        (digest, one), (other, two) = (
            canonical_graph.canonicalize(part, [FLOATS, FLOATS]) for part in parts
        )
        assert digest == other and one == two
        assert len(list_functions(one)) > 4
        assert not any(name in str(one.content) for name in names[0])

    def test_the_work_around_the_call_is_not_part_of_it(self):
        def build(add, num_inputs):
            def work(*tensors):
                stacked = [tensor + add for tensor in tensors[-2:]]
                [z] = lockstep.call_stacked(lambda x, y: [x * y], stacked)
                return z - add

            specs = [FLOATS] * num_inputs
            wrapped = tf.compat.v1.wrap_function(work, specs)
            return lockstep.find_lockstep(wrapped, None)

        one, two = build(1.0, 2), build(5.0, 3)
        assert one.together is two.together
        client = [tf.fill([3], value) for value in (1.0, 2.0, 3.0)]
        for found, inputs, expected in ((one, client[1:], 11), (two, client, 51)):
            for outputs in found.run([inputs] * 5):
                np.testing.assert_array_equal(outputs[0], np.full(3, expected))

    def test_threads_that_come_at_once_get_one_program(self):
        barrier = threading.Barrier(4)
        found: list[tuple[object, float]] = []

        def work():
            built = build_lockstep(lambda x, y: [x + 2.0 * y])
            barrier.wait()
            [result] = built.together(*draw_stacks())
            found.append((built.together, float(result[0, 0])))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4 and len(set(found)) == 1


def swap(function):
    return lambda x, y: function(y, x)


def chain(first, second):
    first, second = tf.function(first), tf.function(second)
    return lambda x, y: [second(first(x)) + y]


def double(x):
    return 2.0 * x


def square(x):
    return x * x


DIFFERENT = {
    "constant": [lambda x, y: [x + 2.0 * y], lambda x, y: [x + 3.0 * y]],
    "smallest_constant": [
        lambda x, y: [x + np.float32(1) * y],
        lambda x, y: [x + np.nextafter(np.float32(1), np.float32(2)) * y],
    ],
    "constant_in_a_loop": [loop, functools.partial(loop, scale=0.25)],
    "op_in_a_loop": [loop, functools.partial(loop, act=tf.math.cos)],
    "steps_of_a_loop": [loop, functools.partial(loop, steps=4)],
    "order_of_inputs": [loop, swap(loop)],
    "order_of_inputs_at_the_top": [lambda x, y: [x - y], lambda x, y: [y - x]],
    "order_of_outputs": [loop, lambda x, y: loop(x, y)[::-1]],
    "order_of_functions": [chain(double, square), chain(square, double)],
    "functions": [chain(double, square), chain(double, double)],
    "branch": [switch, functools.partial(switch, scale=3.0)],
    "attribute": [
        lambda x, y: [tf.matmul(x[:, None], y[:, None], transpose_b=True)],
        lambda x, y: [tf.matmul(x[:, None], y[:, None], transpose_a=True)],
    ],
}


class TestNotShared:
    @pytest.mark.parametrize("name", list(DIFFERENT))
    def test_other_functions(self, name, monkeypatch):
        stacks = draw_stacks()
        one, two = (build_lockstep(function) for function in DIFFERENT[name])
        assert one.together is not two.together
        results = []
        for found, function in zip((one, two), DIFFERENT[name], strict=True):
            results.append([result.numpy() for result in found.together(*stacks)])
            expected = compute_alone(monkeypatch, function, stacks)
            for result, wanted in zip(results[-1], expected, strict=True):
                np.testing.assert_array_equal(result, wanted, strict=True)
        # To share would have been wrong.
        shapes = [[result.shape for result in computed] for computed in results]
        assert shapes[0] != shapes[1] or not all(map(np.array_equal, *results))

    def test_other_types_shapes_and_devices(self):
        def add(x, y):
            return [x + y]

        wide = tf.TensorSpec([7], tf.float32)
        built = [
            build_lockstep(add),
            build_lockstep(add, [INTS, INTS]),
            build_lockstep(add, [wide, wide]),
            build_lockstep(add, device="CPU:0"),
        ]
        assert len({id(found.together) for found in built}) == len(built)
        assert build_lockstep(add, device="CPU:0").together is built[-1].together

    def test_inputs_that_are_not_read_have_types_too(self):
        def ignore(x, y):
            del y
            return [x]

        one, two = (build_lockstep(ignore, [FLOATS, spec]) for spec in (FLOATS, INTS))
        assert one.together is not two.together
        one.together(*draw_stacks([FLOATS, FLOATS]))
        two.together(*draw_stacks([FLOATS, INTS]))

    @pytest.mark.parametrize("in_a_loop", [False, True])
    def test_what_has_a_state(self, in_a_loop):
        def draw(x):
            return x + tf.random.uniform(tf.shape(x), seed=3)

        def work(x, y):
            act = draw if in_a_loop else tf.identity
            return [loop(x, y, act=act)[0] if in_a_loop else draw(x)]

        one, two = (build_lockstep(work) for _ in range(2))
        assert one.together is not two.together
        assert not lockstep._shared
        for found in (one, two):
            assert found.together(*draw_stacks())[0].shape == [4, 3]


class TestCanonicalize:
    def test_digests_tell_types_shapes_and_order(self):
        part = build_part(lambda x, y: [x + 1.0, x + 2.0], [FLOATS, FLOATS])
        turned = dataclasses.replace(part, fetches=part.fetches[::-1])
        wide = tf.TensorSpec([7], tf.float32)
        cases = [(part, spec) for spec in (FLOATS, INTS, wide)] + [(turned, FLOATS)]
        digests = {
            canonical_graph.canonicalize(case, [FLOATS, spec])[0]
            for case, spec in cases
        }
        assert len(digests) == len(cases)

    def test_what_is_to_be_beside_a_node_still_is(self):
        part = build_part(loop, [FLOATS, FLOATS])
        _, renamed = canonical_graph.canonicalize(part, [FLOATS, FLOATS])
        former, places = (
            set(re.findall(r"loc:@([^\"]+)", str(one.content)))
            for one in (part, renamed)
        )
        assert former == {"z"} and places == {"n0"}

    @pytest.mark.parametrize(
        ("function", "specs", "message"),
        [
            (lambda x: [tf.random.uniform([])], [FLOATS], "RandomUniform.*a state"),
            (
                lambda x: [tf.raw_ops.ReadVariableOp(resource=x, dtype=tf.float32)],
                [tf.TensorSpec([], tf.resource)],
                "a resource that is given",
            ),
        ],
    )
    def test_what_its_text_does_not_tell_is_refused(self, function, specs, message):
        part = build_part(function, specs)
        with pytest.raises(ValueError, match=f"must be known by its text.*{message}"):
            canonical_graph.canonicalize(part, specs)

    def test_a_function_that_is_missing_is_refused(self):
        specs = [FLOATS, FLOATS]
        # A graph's own library, in no order, has functions that nothing calls.
        _, part = canonical_graph.canonicalize(build_part(loop, specs), specs)
        names = list_functions(part)
        assert len(names) > 3
        for index, name in enumerate(names):
            content = tf.compat.v1.GraphDef.FromString(part.content.SerializeToString())
            del content.library.function[index]
            with pytest.raises(ValueError, match=f"Found the function '{name}'"):
                canonical_graph.canonicalize(
                    dataclasses.replace(part, content=content), specs
                )

    @pytest.mark.parametrize(
        ("key", "message"),
        [
            ("api_implements", "a function that another may stand for"),
            ("_after", "a function's name as '_after'"),
        ],
    )
    def test_a_function_that_is_said_by_its_name_is_refused(self, key, message):
        part = build_part(loop, [FLOATS, FLOATS])
        for function in part.content.library.function:
            function.attr[key].s = list_functions(part)[0].encode()
        with pytest.raises(ValueError, match=f"Found {message}"):
            canonical_graph.canonicalize(part, [FLOATS, FLOATS])

    def test_an_op_that_is_not_known_is_refused(self):
        part = build_part(lambda x: [-x], [FLOATS])
        for node in part.content.node:
            node.op = node.op.replace("Neg", "Nay")
        with pytest.raises(ValueError, match="Found 'Nay'"):
            canonical_graph.canonicalize(part, [FLOATS])


class TestKept:
    def build(self, add: float) -> lockstep.Lockstep:
        return build_lockstep(lambda x, y: [x + y + add])

    def test_what_was_not_used_for_longest_goes_first(self, monkeypatch):
        monkeypatch.setattr(lockstep, "_MAX_SHARED", 2)
        first, second = self.build(1), self.build(2)
        assert self.build(1).together is first.together
        third = self.build(3)
        assert len(lockstep._shared) == 2
        assert self.build(1).together is first.together
        assert self.build(3).together is third.together
        # Whoever holds it goes on, and another one may be compiled from its like.
        x, y = draw_stacks()
        again = self.build(2)
        assert again.together is not second.together
        for found in (second, again, second):
            np.testing.assert_array_equal(found.together(x, y)[0], x + y + 2)

    def test_a_context_that_ends_lets_go_and_others_go_on(self):
        one = self.build(1)
        local_context.LocalContext().close()
        assert not lockstep._shared
        x, y = draw_stacks()
        np.testing.assert_array_equal(one.together(x, y)[0], x + y + 1)
        x, y = draw_stacks(size=2)
        np.testing.assert_array_equal(one.together(x, y)[0], x + y + 1)
        assert self.build(1).together is not one.together


@pytest.fixture
def context():
    before = tff.framework.get_context_stack().current
    context = local_context.LocalContext()
    tff.framework.set_default_context(context)
    yield context
    tff.framework.set_default_context(before)
    context.close()


def build_process(model, **choices) -> tff.learning.templates.LearningProcess:
    return learning.build_federated_averaging(
        model,
        toys.CarriedMeanFactory(divisor=1.0),
        client_optimizer=tff.learning.optimizers.build_sgdm(0.1),
        initial_weights=model.initialize(np.random.default_rng(3)),
        **choices,
    )


@pytest.mark.slow
def test_trainings_share_what_their_clients_do_alike(context, rng):
    def build(loss_scale):
        model = build_logistic_regression((2, 1, 1), 3)
        loss = model.compute_loss
        return dataclasses.replace(
            model, compute_loss=lambda y, outputs: loss_scale * loss(y, outputs)
        )

    processes = [
        build_process(build(scale), server_optimizer=server)
        for scale, server in (
            (1.0, tff.learning.optimizers.build_sgdm(1.0)),
            (1.0, tff.learning.optimizers.build_adam(0.1)),
            (2.0, tff.learning.optimizers.build_sgdm(1.0)),
        )
    ]
    examples = {
        "x": rng.normal(size=[6, 2, 1, 1]).astype(np.float32),
        "y": np.array([0, 1, 2, 0, 1, 2], np.int32),
    }
    batches = client_training.draw_batches(6, batch_size=2, num_epochs=2, rng=rng)
    seed = np.zeros(2, np.int32)
    data = learning.build_client_data(
        *client_training.pad_client(examples, batches),
        **dict(noise_seed=seed, training_seed=seed, num_joined=1),
    )
    losses = []
    for process in processes:
        output = process.next(process.initialize(), [data])
        losses.append(float(output.metrics["client_work"]["loss"]))
    found = [
        current.stage._lockstep[0].together
        for _, _, runner in context._programs.values()
        for current in runner.passes.values()
    ]
    assert len(found) == 3
    assert found[0] is found[1] and found[0] is not found[2]
    assert losses[0] == losses[1] and losses[2] > 1.2 * losses[0]
