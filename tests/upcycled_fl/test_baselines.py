"""Tests of the baselines against the papers' algorithms in NumPy."""

import collections
import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from simulation import execution
from simulation.algorithm import FederatedAveraging
from simulation.engine import lockstep
from tests.upcycled_fl import papers
from tests.upcycled_fl.baseline_cases import (
    CASES,
    COHORTS,
    INITIAL,
    RICH,
    build_process,
    build_uniform,
    carry,
    draw_client,
    flatten,
    follow,
    is_close,
    run,
)
from upcycled_fl import baselines, finalizer

COEFFICIENT = 0.37


@pytest.fixture(scope="module", autouse=True)
def engine():
    return execution.set_execution_context()


@pytest.fixture(scope="module")
def runs(engine):
    """The rounds of a case, run once."""
    return functools.cache(lambda name: run(build_process(CASES[name])))


def find_far(case, found, wanted):
    """What of the rounds is not the papers': (round, weights, "server" or client)."""
    far = []
    for number, (one, (x, shared, states)) in enumerate(
        zip(found, wanted, strict=True)
    ):
        if not is_close(one.weights, x):
            far.append((number, "weights"))
        if case.kind == "Scaffold" and not is_close(one.shared, shared):
            far.append((number, "server"))
        if case.kind == "FedDyn":
            _, drift = one.state.finalizer
            if not is_close(drift, shared / case.algorithm.proximal_strength):
                far.append((number, "server"))
        if case.kind == "FedNova":
            assert not one.clients
            continue
        assert set(one.clients) == set(states)
        for index, state in states.items():
            if not is_close(one.clients[index], state):
                far.append((number, index))
    return far


class TestPapers:
    @pytest.mark.parametrize("name", CASES)
    def test_rounds_are_the_papers(self, runs, name):
        case = CASES[name]
        assert find_far(case, runs(name), follow(case)) == []

    @pytest.mark.parametrize(
        "name",
        [RICH[0], *(pytest.param(name, marks=pytest.mark.slow) for name in RICH[1:])],
    )
    def test_a_stack_of_clients_does_the_same(self, name, monkeypatch):
        case, calls = CASES[name], []
        run_stack = lockstep.Lockstep.run

        def watch(self, clients):
            calls.append(len(clients))
            return run_stack(self, clients)

        monkeypatch.setattr(lockstep.Lockstep, "run", watch)
        found = run(build_process(case, stackable=True))
        assert sum(calls) == sum(map(len, COHORTS))
        assert find_far(case, found, follow(case)) == []

    @pytest.mark.parametrize(
        ("name", "changes"),
        [
            ("fednova", {"by_examples": False}),
            ("fednova_proximal", {"momentum": 0.0}),
            ("fednova_proximal", {"mu": 0.0}),
            ("fednova_proximal", {"server_lr": 1.0}),
            ("scaffold", {"share": 1.0}),
            ("scaffold", {"by_examples": True}),
            ("scaffold_proximal", {"momentum": 0.0}),
            ("scaffold_proximal", {"mu": 0.0}),
            ("scaffold_proximal", {"share": 1.0}),
            ("feddyn", {"share": 1.0}),
            ("feddyn", {"mu": 0.5}),
            ("feddyn_momentum", {"momentum": 0.0}),
            ("pfedme", {"personal_steps": 2}),
            ("pfedme", {"penalty": 1.4}),
            ("pfedme", {"local_lr": 0.31}),
            ("pfedme_momentum", {"server_lr": 1.0}),
        ],
    )
    def test_others_are_told_apart(self, runs, name, changes):
        case = CASES[name]
        far = find_far(case, runs(name), follow(case, **changes))
        assert (len(COHORTS) - 1, "weights") in far

    @pytest.mark.parametrize("name", ["scaffold", "feddyn", "pfedme"])
    def test_who_does_not_take_part_or_has_no_data_keeps_its_state(self, runs, name):
        """Client 3 has no example: it takes no step, in rounds 1 and 2."""
        rounds = runs(name)
        assert set(rounds[0].clients) == {0, 1, 2}
        for before, after, cohort in zip(
            rounds[:-1], rounds[1:], COHORTS[1:], strict=True
        ):
            for index in set(before.clients) - set(cohort):
                assert before.clients[index] is after.clients[index]
        empty = flatten(rounds[2].clients[3])
        if name == "pfedme":
            assert np.array_equal(empty, flatten(rounds[1].weights))
        else:
            assert not np.any(empty)

    def test_the_norm_of_a_for_plain_sgd_momentum_and_a_proximal_term(self):
        """The oracle's own: 1, (1 - m^(K - j)) / (1 - m) and (1 - lr mu)^(K - 1 - j),
        section 4 of the paper."""
        steps = np.arange(6)
        rule = papers.FedNova(lr=0.2)
        assert rule.unroll(6).tolist() == pytest.approx([1.0] * 6)
        rule = papers.FedNova(lr=0.2, momentum=0.9)
        expected = (1 - 0.9 ** (6 - steps)) / (1 - 0.9)
        np.testing.assert_allclose(rule.unroll(6), expected, rtol=1e-12)
        rule = papers.FedNova(lr=0.2, mu=0.5)
        np.testing.assert_allclose(rule.unroll(6), 0.9 ** (5 - steps), rtol=1e-12)


def test_fednova_is_fedavg_where_all_take_equally_many_steps(engine):
    case = dataclasses.replace(CASES["fednova"], momentum=0.5)
    processes = [
        build_process(case),
        build_process(case, algorithm=FederatedAveraging()),
    ]

    def run_both(draw):
        cohorts = [(0, 1, 2)] * 2
        return [run(process, cohorts, draw)[-1].weights for process in processes]

    # As many examples as 4 and 3, two batches an epoch.
    draw_equal = functools.partial(draw_client, num_epochs=2)
    equal = run_both(lambda index, n: draw_equal(index, n, size=4 - index % 2))
    assert is_close(equal[0], flatten(equal[1]), rtol=1e-6)
    nova, average = run_both(draw_client)
    assert not is_close(nova, flatten(average), rtol=1e-2)


class TestUpcycled:
    """The even step around each server's step, and in whole rounds."""

    def run_server(self, name, wrap=lambda inner: inner):
        """The server's states and weights after three means of the clients."""
        case, rng = CASES[name], np.random.default_rng(5)
        weights = tff.learning.models.ModelWeights(
            INITIAL, case.algorithm.initialize_shared(INITIAL)
        )
        weights_type = tff.types.to_type(
            tf.nest.map_structure(
                lambda part: tff.TensorType(part.dtype, part.shape), weights
            )
        )
        process = wrap(
            case.algorithm.wrap_finalizer(
                tff.learning.templates.build_apply_optimizer_finalizer(
                    tff.learning.optimizers.build_sgdm(0.5, momentum=0.9), weights_type
                )
            )
        )
        state, found = process.initialize(), []
        for _ in range(3):
            parts = [
                tuple(
                    rng.normal(size=part.shape).astype(np.float32) for part in INITIAL
                )
                for _ in range(2)
            ]
            means = {"FedNova": (parts[0], np.float32(1.7)), "Scaffold": tuple(parts)}
            output = process.next(state, weights, means.get(case.kind, parts[0]))
            state, weights = output.state, output.result
            found.append((state, weights))
        return found

    @pytest.mark.parametrize("name", RICH)
    def test_bit_for_bit_the_baseline_or_its_server_rate(self, name):
        """At coefficient 0, and at a constant one."""

        def upcycle(coefficient):
            return functools.partial(
                finalizer.build_upcycled_finalizer, coefficients=[coefficient]
            )

        plain = self.run_server(name)
        same = self.run_server(name, upcycle(0.0))
        upcycled = self.run_server(name, upcycle(COEFFICIENT))
        factor = float(np.float32(1) + np.float32(COEFFICIENT))
        scale = functools.partial(finalizer.build_scaled_finalizer, factor=factor)
        scaled = self.run_server(name, scale)
        before = flatten(INITIAL)
        for a, b, c, d in zip(plain, same, upcycled, scaled, strict=True):
            wanted = (*a, *d)
            got = (b[0]["inner"], b[1], c[0]["inner"], c[1])
            tf.nest.map_structure(np.testing.assert_array_equal, got, wanted)
            odd, after = flatten(c[0]["odd_weights"]), flatten(c[1].trainable)
            assert is_close(after, before + (1 + COEFFICIENT) * (odd - before), 1e-6)
            before = after
            # The server's control variate is not extrapolated.
            tf.nest.map_structure(
                np.testing.assert_array_equal, a[1].non_trainable, c[1].non_trainable
            )
            assert not is_close(a[1].trainable, flatten(c[1].trainable), rtol=1e-2)

    @pytest.mark.parametrize("name", RICH)
    def test_a_round_by_hand(self, runs, name):
        wrap = functools.partial(
            finalizer.build_upcycled_finalizer, coefficients=[COEFFICIENT]
        )
        [first] = run(build_process(CASES[name], wrap_finalizer=wrap), COHORTS[:1])
        baseline = runs(name)[0]
        start, odd = flatten(INITIAL), flatten(baseline.weights)
        expected = start + (1 + COEFFICIENT) * (odd - start)
        assert is_close(first.weights, expected)
        assert not is_close(first.weights, odd, rtol=1e-3)
        # Only the weights go on: what clients and the server keep is the odd step's.
        assert is_close(first.state.finalizer["odd_weights"], odd)
        for got, wanted in (
            (first.shared, baseline.shared),
            *(
                (first.clients[index], baseline.clients[index])
                for index in first.clients
            ),
        ):
            if wanted:
                assert is_close(got, flatten(wanted))


class DroppingFactory(tff.aggregators.UnweightedAggregationFactory):
    """Keeps the type of what it is given, and aggregates nothing: zeros."""

    def create(self, value_type):
        self.value_type = value_type
        zeros = tff.types.type_to_py_container(
            tff.structure.map_structure(
                lambda leaf: np.zeros(leaf.shape, leaf.dtype), value_type[0]
            ),
            value_type[0],
        )

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
                tff.federated_value(collections.OrderedDict(), tff.SERVER),
            )

        return tff.templates.AggregationProcess(initialize, next_fn)


class TestWhatLeavesAClient:
    WEIGHTS = tff.types.to_type(
        tuple(tff.TensorType(np.float32, part.shape) for part in INITIAL)
    )

    @pytest.mark.parametrize(
        ("name", "sent"),
        [
            ("fednova", (WEIGHTS, np.float32)),
            ("scaffold", (WEIGHTS, WEIGHTS)),
            ("feddyn", WEIGHTS),
            ("pfedme", WEIGHTS),
        ],
    )
    def test_states_stay_at_the_clients(self, name, sent):
        """Where the aggregator lets nothing through, the server's state does not
        depend on the clients' data and states."""
        factory = DroppingFactory()
        process = build_process(CASES[name], factory=factory, measure_clients=False)
        carried = tff.types.to_type((sent, tff.TensorType(np.int32, [2]), np.int32))
        assert carried.is_assignable_from(factory.value_type)
        kept = getattr(process, "initial_client_state", ())
        signature = process.next.type_signature
        state_type, data_type = signature.parameter
        assert state_type.placement is tff.SERVER
        assert data_type.placement is tff.CLIENTS
        assert state_type == signature.result[0]
        assert signature.result[1].placement is tff.SERVER
        assert bool(kept) is (name != "fednova")
        if kept:
            assert signature.result[2].placement is tff.CLIENTS
            assert signature.result[2].member.is_equivalent_to(self.WEIGHTS)
            assert data_type.member.element["state"].is_equivalent_to(self.WEIGHTS)
        start = process.initialize()
        left = []
        for index in (0, 2):
            state = tuple(np.full_like(part, 5.0 + index) for part in kept)
            output = process.next(start, [carry(draw_client(index, 0), state)])
            left.append((output.state, output.metrics))
            if kept:
                assert not np.array_equal(output.client_states[0][0], state[0])
        tf.nest.map_structure(np.testing.assert_array_equal, *left)

    @pytest.mark.parametrize("name", ["fednova_proximal", "scaffold"])
    def test_all_that_a_client_sends_is_clipped_jointly(self, name):
        case, clip = CASES[name], 0.9
        norms = []

        def shorten(message):
            norms.append(np.linalg.norm(message))
            return message * min(1, clip / max(norms[-1], 1e-12))

        wanted = follow(case, send=shorten)
        # Some are clipped, and some are not.
        assert sum(norm > 1.2 * clip for norm in norms) >= 2
        assert any(norm < 0.8 * clip for norm in norms)
        found = run(build_process(case, factory=build_uniform(clip)))
        assert find_far(case, found, wanted) == []

        def shorten_apart(message):
            parts = np.split(message, [len(flatten(INITIAL))])
            norms = [max(np.linalg.norm(part), 1e-12) for part in parts]
            pairs = zip(parts, norms, strict=True)
            return np.concatenate([part * min(1, clip / norm) for part, norm in pairs])

        assert find_far(case, found, follow(case, send=shorten_apart))
        assert find_far(case, found, follow(case))


class TestBadValues:
    @pytest.mark.parametrize("value", [0.0, -0.5, 1.5, np.inf, np.nan])
    @pytest.mark.parametrize("kind", ["Scaffold", "FedDyn"])
    def test_participation(self, kind, value):
        build = getattr(baselines, kind)
        rule = r"`participation` must be in \(0, 1\]. Found " + str(value)
        with pytest.raises(ValueError, match=rule):
            build(participation=value, proximal_strength=0.1)
        build(participation=1.0, proximal_strength=0.1)

    @pytest.mark.parametrize("value", [0.0, -0.5, np.inf, np.nan])
    def test_feddyn_needs_its_strength(self, value):
        with pytest.raises(
            ValueError,
            match="`proximal_strength` must be positive and finite for FedDyn: it is "
            f"its alpha. Found {value}",
        ):
            baselines.FedDyn(participation=0.5, proximal_strength=value)

    @pytest.mark.parametrize("value", [0.0, -0.5, np.inf, np.nan])
    @pytest.mark.parametrize("name", ["penalty", "local_lr"])
    def test_rates_of_pfedme(self, name, value):
        rule = f"`{name}` must be positive and finite. Found {value}"
        with pytest.raises(ValueError, match=rule):
            baselines.PFedMe(**{name: value})

    @pytest.mark.parametrize("value", [0, -1])
    def test_steps_of_pfedme(self, value):
        rule = f"`personal_steps` must be >= 1. Found {value}"
        with pytest.raises(ValueError, match=rule):
            baselines.PFedMe(personal_steps=value)

    def test_pfedme_has_its_own_pull(self):
        rule = "`proximal_strength` must be 0 for pFedMe, .* Found 0.1"
        with pytest.raises(ValueError, match=rule):
            baselines.PFedMe(proximal_strength=0.1)

    @pytest.mark.parametrize("name", ["fednova", "scaffold", "feddyn", "pfedme"])
    def test_all_need_carried_seeds(self, name):
        algorithm = CASES[name].algorithm
        rule = f"`carried_seeds` must be True for {algorithm.name}. Found False"
        with pytest.raises(ValueError, match=rule):
            build_process(CASES[name], carried_seeds=False)

    @pytest.mark.parametrize("name", ["fednova", "scaffold"])
    def test_a_proximal_strength_that_is_none(self, name):
        algorithm = dataclasses.replace(CASES[name].algorithm, proximal_strength=-1.0)
        with pytest.raises(ValueError, match="`proximal_strength` must be finite"):
            build_process(CASES[name], algorithm=algorithm)
