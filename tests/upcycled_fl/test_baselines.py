"""Tests of the baselines against the papers' algorithms in NumPy."""

import collections
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp import NoPrivacyFactory
from distributed_dp.accounting import CohortScheme, Sampling
from distributed_dp.update_layout import NoiseSeeds
from simulation import client_training, execution, learning
from simulation.algorithm import FederatedAveraging
from simulation.engine import lockstep
from simulation.image_models import build_logistic_regression
from tests.upcycled_fl import papers
from upcycled_fl import baselines, finalizer

SHAPE, NUM_CLASSES = (2, 1, 1), 3
SIZES, EPOCHS = (5, 2, 8, 0, 6, 7), (2, 3, 2, 1, 2, 1)
# Half of the clients a round; some come back, with what they kept.
COHORTS = ((0, 1, 2), (1, 3, 5), (0, 3, 4), (1, 2, 0))
SHARE = 0.5
LR, COEFFICIENT = 0.2, 0.37


@pytest.fixture(scope="module", autouse=True)
def engine():
    return execution.set_execution_context()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An algorithm in a setting."""

    kind: str
    momentum: float = 0.0
    by_examples: bool = False
    server_lr: float = 1.0
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def algorithm(self) -> FederatedAveraging:
        return getattr(baselines, self.kind)(**self.fields)

    def get_rule(self, **changes) -> Any:
        """The paper's algorithm, or with `changes` another one."""
        names = {"proximal_strength": "mu", "participation": "share"}
        fields = {names.get(name, name): v for name, v in self.fields.items()}
        own = {"lr": LR, "momentum": self.momentum, "server_lr": self.server_lr}
        return getattr(papers, self.kind)(**(own | fields | changes))


CASES = {
    "fednova": Case(kind="FedNova", by_examples=True),
    # Both roots of the recursion are real: no gradient has a negative weight.
    "fednova_proximal": Case(
        kind="FedNova",
        momentum=0.4,
        server_lr=0.8,
        fields={"proximal_strength": 0.5},
    ),
    "scaffold": Case(kind="Scaffold", fields={"participation": SHARE}),
    "scaffold_proximal": Case(
        kind="Scaffold",
        momentum=0.4,
        server_lr=0.8,
        by_examples=True,
        fields={"participation": SHARE, "proximal_strength": 0.5},
    ),
    "feddyn": Case(
        kind="FedDyn", fields={"participation": SHARE, "proximal_strength": 0.6}
    ),
    "feddyn_momentum": Case(
        kind="FedDyn",
        momentum=0.5,
        by_examples=True,
        fields={"participation": SHARE, "proximal_strength": 0.6},
    ),
    "pfedme": Case(
        kind="PFedMe",
        by_examples=True,
        fields={"penalty": 1.5, "personal_steps": 3, "local_lr": 0.3},
    ),
    "pfedme_momentum": Case(
        kind="PFedMe",
        momentum=0.5,
        server_lr=0.8,
        fields={"penalty": 1.5, "personal_steps": 2, "local_lr": 0.3},
    ),
}
RICH = ("fednova_proximal", "scaffold_proximal", "feddyn_momentum", "pfedme_momentum")


def build_model(stackable=False):
    model = build_logistic_regression(SHAPE, NUM_CLASSES)
    return dataclasses.replace(model, stackable=stackable)


def draw_initial_weights():
    rng = np.random.default_rng(7)
    specs = build_model().initialize(rng)
    return tuple(rng.normal(size=part.shape).astype(np.float32) for part in specs)


INITIAL = draw_initial_weights()


def flatten(weights):
    return np.concatenate([np.asarray(part, np.float64).ravel() for part in weights])


def draw_client(index, round_number, *, size=None, num_epochs=None):
    """One client's examples, and batches of its own number of epochs."""
    size = SIZES[index] if size is None else size
    data = np.random.default_rng([1, index])
    examples = {
        "x": data.normal(size=[size, *SHAPE]).astype(np.float32),
        "y": data.integers(NUM_CLASSES, size=size).astype(np.int32),
    }
    batches = client_training.draw_batches(
        size,
        batch_size=2,
        num_epochs=num_epochs or EPOCHS[index],
        rng=np.random.default_rng([2, index, round_number]),
    )
    return examples, batches


def carry(client, state=()):
    return learning.build_client_data(
        *client_training.pad_client(*client),
        noise_seed=np.int32([1, 2]),
        training_seed=np.int32([3, 4]),
        num_joined=3,
        client_state=state,
    )


def convert(client):
    """The same client for the papers' algorithms."""
    examples, batches = client
    return papers.Client(
        x=examples["x"].reshape([-1, SHAPE[0]]).astype(np.float64),
        y=examples["y"],
        batches=[rows[rows > 0] - 1 for rows in batches],
        num_classes=NUM_CLASSES,
    )


def build_uniform(l2_clip=None):
    return NoPrivacyFactory(
        CohortScheme(Sampling.FIXED, 6, 3),
        l2_clip=l2_clip,
        noise_seeds=NoiseSeeds.CARRIED,
    )


def build_process(case, *, stackable=False, factory=None, algorithm=None, **options):
    if factory is None:
        by_examples = tff.aggregators.MeanFactory() if case.by_examples else None
        factory = by_examples or build_uniform()
    sgdm = tff.learning.optimizers.build_sgdm
    return learning.build_learning_process(
        build_model(stackable),
        factory,
        algorithm or case.algorithm,
        client_optimizer=sgdm(LR, momentum=case.momentum or None),
        server_optimizer=sgdm(case.server_lr),
        initial_weights=INITIAL,
        **options,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """What a round leaves."""

    state: Any
    clients: dict[int, Any]

    @property
    def weights(self):
        return self.state.global_model_weights.trainable

    @property
    def shared(self):
        return self.state.global_model_weights.non_trainable


def run(process, cohorts=COHORTS, draw=draw_client) -> list[Round]:
    """Runs rounds, handing clients what they kept."""
    initial = getattr(process, "initial_client_state", ())
    state, kept, found = process.initialize(), {}, []
    for number, cohort in enumerate(cohorts):
        data = [
            carry(draw(index, number), kept.get(index, initial)) for index in cohort
        ]
        output = process.next(state, data)
        state = output.state
        if initial:
            kept = kept | dict(zip(cohort, output.client_states, strict=True))
        found.append(Round(state=state, clients=kept))
    return found


def follow(case, *, send=lambda message: message, by_examples=None, **changes):
    """The same rounds by the paper's algorithm."""
    by_examples = case.by_examples if by_examples is None else by_examples
    rounds = [
        {index: convert(draw_client(index, number)) for index in cohort}
        for number, cohort in enumerate(COHORTS)
    ]
    return papers.run_rounds(
        case.get_rule(**changes),
        flatten(INITIAL),
        rounds,
        by_examples=by_examples,
        send=send,
    )


@pytest.fixture(scope="module")
def runs(engine):
    """The rounds of a case, run once."""
    return functools.cache(lambda name: run(build_process(CASES[name])))


def is_close(got, wanted, rtol=1e-5):
    wanted = np.asarray(wanted)
    difference = np.linalg.norm(flatten(got) - wanted)
    return difference <= rtol * np.linalg.norm(wanted)


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

    @pytest.mark.parametrize("name", RICH)
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
    equal = run_both(
        lambda index, number: draw_client(index, number, size=4 - index % 2, num_epochs=2)
    )
    assert is_close(equal[0], flatten(equal[1]), rtol=1e-6)
    nova, average = run_both(draw_client)
    assert not is_close(nova, flatten(average), rtol=1e-2)


class TestUpcycled:
    def build(self, name, coefficient):
        return build_process(
            CASES[name],
            wrap_finalizer=functools.partial(
                finalizer.build_upcycled_finalizer, coefficients=[coefficient]
            ),
        )

    @pytest.mark.parametrize("name", RICH)
    def test_coefficient_0_is_the_baseline_bit_for_bit(self, runs, name):
        wrapped = run(self.build(name, 0.0))
        for got, wanted in zip(wrapped, runs(name), strict=True):
            tf.nest.map_structure(
                np.testing.assert_array_equal,
                (got.weights, got.shared, got.state.finalizer["inner"], got.clients),
                (wanted.weights, wanted.shared, wanted.state.finalizer, wanted.clients),
            )

    @pytest.mark.parametrize("name", RICH)
    def test_an_even_step_by_hand(self, runs, name):
        [first] = run(self.build(name, COEFFICIENT), COHORTS[:1])
        baseline = runs(name)[0]
        # Only the weights go on: what clients and the server keep is the odd step's.
        tf.nest.map_structure(
            np.testing.assert_array_equal,
            (first.state.finalizer["odd_weights"], first.shared, first.clients),
            (baseline.weights, baseline.shared, baseline.clients),
        )
        start, odd = flatten(INITIAL), flatten(baseline.weights)
        expected = start + (1 + COEFFICIENT) * (odd - start)
        assert is_close(first.weights, expected, rtol=1e-6)
        assert not is_close(first.weights, odd, rtol=1e-3)


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
        assert sum(norm > 1.2 * clip for norm in norms) >= 3
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
