"""Tests of what leaves a client: the representation's change, never its own head."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from simulation import execution
from tests.centaur.centaur_cases import (
    CASES,
    INITIAL,
    build_factory,
    build_model,
    build_process,
    carry,
    draw_client,
    flatten,
)

# The last two arrays of the model: no other has their shapes.
HEAD_SHAPES = {part.shape for part in INITIAL[4:]}
WITH_STATE = ["centaur", "ppsgd_paper", "ppsgd_authors"]
# The server never has a head at all.
WITHOUT_SHARED_HEAD = ["centaur", "refit", "ppsgd_paper"]
ALL = [*WITHOUT_SHARED_HEAD, "ppsgd_authors"]


@pytest.fixture(scope="module", autouse=True)
def engine():
    return execution.set_execution_context()


class WatchingFactory(tff.aggregators.UnweightedAggregationFactory):
    """Measures the only client's message, and lets none of it through: zeros."""

    def create(self, value_type):
        self.value_type = value_type

        @tff.tensorflow.computation(value_type)
        def spell(value):
            update, seed, joined = value
            flat = [tf.reshape(part, [-1]) for part in tf.nest.flatten(update)]
            return collections.OrderedDict(
                update=tf.concat(flat, 0), seed=seed, joined=joined
            )

        zeros = tuple(np.zeros(part.shape, np.float32) for part in value_type[0])

        @tff.tensorflow.computation
        def make():
            return tf.nest.map_structure(tf.constant, zeros)

        @tff.federated_computation
        def initialize():
            return tff.federated_value((), tff.SERVER)

        @tff.federated_computation(
            initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state, value):
            return tff.templates.MeasuredProcessOutput(
                state,
                tff.federated_eval(make, tff.SERVER),
                tff.federated_sum(tff.federated_map(spell, value)),
            )

        return tff.templates.AggregationProcess(initialize, next_fn)


def list_shapes(type_spec) -> list[tuple[int, ...]]:
    """The shapes of all tensors in a type."""
    if isinstance(type_spec, tff.TensorType):
        return [tuple(type_spec.shape)]
    if isinstance(type_spec, tff.FederatedType):
        return list_shapes(type_spec.member)
    if isinstance(type_spec, tff.SequenceType):
        return list_shapes(type_spec.element)
    return [shape for inner in type_spec for shape in list_shapes(inner)]


@functools.cache
def build_watched(name):
    return build(name)


def build(name, **options):
    factory = WatchingFactory()
    return factory, build_process(CASES[name], factory=factory, **options)


def send(name, process, index, state=()):
    """What a round of one client leaves."""
    client = draw_client(index, 0, CASES[name].count_epochs(), size=5)
    return process.next(process.initialize(), [carry(client, state, joined=1)])


class TestTypes:
    @pytest.mark.parametrize("name", ALL)
    def test_what_is_aggregated_is_what_the_server_holds(self, name):
        factory, process = build_watched(name)
        held = INITIAL if name == "ppsgd_authors" else INITIAL[:4]
        update, seed, joined = factory.value_type
        shapes = list_shapes(update)
        assert shapes == [part.shape for part in held]
        assert (list_shapes(seed), list_shapes(joined)) == ([(2,)], [()])
        algorithm = CASES[name].build_algorithm()
        sent = sum(int(np.prod(shape)) for shape in shapes)
        assert algorithm.count_sent(build_model().num_parameters) == sent
        assert sent == (82 if name == "ppsgd_authors" else 61)

    @pytest.mark.parametrize("name", ALL)
    def test_of_the_next_round(self, name):
        _, process = build_watched(name)
        signature = process.next.type_signature
        state_type, data_type = signature.parameter
        assert state_type.placement is tff.SERVER
        assert data_type.placement is tff.CLIENTS
        assert state_type == signature.result[0]
        assert signature.result[1].placement is tff.SERVER
        at_server = [*list_shapes(signature.result[0]), *list_shapes(state_type)]
        # Where a head is shared it is held once, and it is not the client's own.
        found = {shape: at_server.count(shape) // 2 for shape in HEAD_SHAPES}
        assert found == dict.fromkeys(HEAD_SHAPES, int(name == "ppsgd_authors"))
        assert not HEAD_SHAPES & set(list_shapes(signature.result[1]))
        if name not in WITH_STATE:
            assert len(signature.result) == 2
            assert not HEAD_SHAPES & set(list_shapes(data_type))
            return
        kept = signature.result[2]
        assert kept.placement is tff.CLIENTS and not kept.all_equal
        assert list_shapes(kept) == [part.shape for part in INITIAL[4:]]
        assert list_shapes(data_type.member.element["state"]) == list_shapes(kept)

    def test_such_a_shape_would_be_seen(self):
        """What the test above would find if the whole model were sent."""
        _, process = build("fedavg_fb")
        assert HEAD_SHAPES <= set(list_shapes(process.next.type_signature.result[0]))


class TestBytes:
    @pytest.mark.parametrize("name", ALL)
    def test_they_are_the_change_of_what_the_server_holds(self, name):
        """The message, bit for bit, of what the server would hold after it."""
        _, process = build_watched(name)
        kept = getattr(process, "initial_client_state", ())
        output = send(name, process, 0, kept)
        message = output.metrics["aggregator"]
        assert set(message) == {"update", "seed", "joined"}
        assert message["update"].dtype == np.float32
        held = INITIAL if name == "ppsgd_authors" else INITIAL[:4]
        assert message["update"].nbytes == 4 * sum(part.size for part in held)
        plain = build_process(CASES[name], factory=build_factory(divisor=1))
        after = send(name, plain, 0, kept).state.global_model_weights.trainable
        rate = np.float32(0.8)
        update = np.concatenate([part.ravel() for part in after])
        expected = flatten(held).astype(np.float32) - rate * message["update"]
        np.testing.assert_allclose(update, expected, rtol=1e-6)

    @pytest.mark.parametrize("name", ALL)
    def test_the_servers_state_does_not_depend_on_clients(self, name):
        """Where nothing of a message is let through."""
        _, process = build(name, measure_clients=False)
        kept = getattr(process, "initial_client_state", ())
        outputs = [
            send(name, process, index, tuple(part + index for part in kept))
            for index in (0, 3)
        ]
        states = [output.state for output in outputs]
        tf.nest.map_structure(np.testing.assert_array_equal, *states)
        updates = [output.metrics["aggregator"]["update"] for output in outputs]
        assert not np.array_equal(*updates)
        assert all(not output.metrics["client_work"] for output in outputs)
        if kept:
            heads = [output.client_states[0] for output in outputs]
            assert not np.array_equal(heads[0][0], heads[1][0])

    @pytest.mark.parametrize("name", WITH_STATE)
    def test_a_head_that_nothing_follows_from_is_not_sent(self, name):
        """Clients whose representation is dead: all of its units are off, so that no
        gradient reaches it. Their heads differ, and what they send does not."""
        dead = tuple(
            np.full_like(part, -100.0) if part.ndim == 1 else 0 * part
            for part in INITIAL[:4]
        )
        _, process = build(name, initial_weights=(*dead, *INITIAL[4:]))
        outputs = [
            send(
                name,
                process,
                1,
                tuple(part + shift for part in process.initial_client_state),
            )
            for shift in (0.0, 1.0)
        ]
        count = sum(part.size for part in dead)
        updates = [output.metrics["aggregator"]["update"] for output in outputs]
        assert np.array_equal(updates[0][:count], updates[1][:count])
        heads = [output.client_states[0] for output in outputs]
        assert not np.array_equal(heads[0][1], heads[1][1])
