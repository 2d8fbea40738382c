"""Tests of the clients' own models: how they are made, and what they are tested on."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from centaur.personal_evaluation import PersonalEvaluation, PersonalEvaluator
from simulation import client_data, client_training, execution, seeds
from simulation.client_states import ClientStates
from simulation.population.federated_data import ArrayData
from tests.centaur import papers
from tests.centaur.centaur_cases import (
    CASES,
    FINAL,
    INITIAL,
    STACK_SIZES,
    Case,
    convert,
    draw_examples,
    follow,
    measure,
)

ROOT = seeds.build_root_seed(5)
NUM_ROUNDS, BATCH_SIZE, FAR = 7, 2, 3e-6
IDS = ("a", "b", "c", "d")
# Of training, validation and test; client b has nothing to choose by.
SIZES = {"train": STACK_SIZES, "validation": (3, 0, 2, 1), "test": (4, 6, 1, 5)}
METHODS = {**CASES, "stand_alone": Case(kind="stand_alone")}


@pytest.fixture(scope="module", autouse=True)
def engine():
    return execution.set_execution_context()


def draw(part, client_id):
    index = IDS.index(client_id)
    stream = {"train": 1, "validation": 5, "test": 6}[part]
    return draw_examples(index, SIZES[part][index], stream=stream)


def build_data(part, change=lambda y: y) -> ArrayData:
    def make(client_id):
        examples = draw(part, client_id)
        return examples["x"], change(examples["y"])

    return ArrayData(client_ids=IDS, make=make)


def permute(y):
    """Other labels, each of the three in another's place."""
    return (y + 1) % 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A method after some rounds, where client d took no part yet."""

    case: Case
    held: tuple[np.ndarray, ...]
    kept: ClientStates

    @property
    def num_kept(self):
        """How many of the last arrays of a model a client has for itself."""
        if self.case.kind == "stand_alone":
            return len(INITIAL)
        return len(INITIAL) - self.case.build_program().count

    def measure(self, head, model):
        """How far a client's own arrays are from those of a model."""
        assert len(head) == self.num_kept
        return measure(head, model[-self.num_kept :])

    @classmethod
    def build(cls, name):
        case = METHODS[name]
        if case.kind == "stand_alone":
            return cls(case=case, held=INITIAL, kept=ClientStates())
        case = dataclasses.replace(case, cohorts=((0, 1), (1, 2)))
        left = follow(case)[-1]
        own = case.build_algorithm().initialize_client_state(INITIAL)
        kept = {}
        if own:
            kept = {IDS[index]: cast(head) for index, head in left.kept.items()}
        return cls(
            case=case,
            held=cast(left.held),
            kept=ClientStates(initial=own, kept=kept),
        )

    def evaluate(self, *, stackable=False, train=None, held=None, **changes):
        """What the evaluation finds of both parts."""
        algorithm = self.case.build_algorithm(stackable=stackable)
        evaluation = PersonalEvaluation(
            algorithm.final_fit,
            shared=self.held,
            own=algorithm.initialize_own_head(INITIAL),
            train=train or build_data("train"),
            batch_size=BATCH_SIZE,
            root=ROOT,
            num_kept_weights=self.num_kept,
        )
        held = held or [build_data("validation"), build_data("test")]
        arguments = {"shared": self.held, "kept": self.kept} | changes
        return evaluation(
            arguments["shared"], arguments["kept"], held, num_rounds=NUM_ROUNDS
        )

    def follow(self, client_id, *, own=None, **changes) -> papers.Arrays:
        """A client's own model by the papers' program, or by another one."""
        program = self.case.build_program(**changes)
        key = client_data.derive_key(
            client_id,
            root=ROOT,
            noise_root=ROOT,
            round_number=NUM_ROUNDS,
            num_joined=len(IDS),
        )
        examples = draw("train", client_id)
        batches = client_training.draw_batches(
            len(examples["y"]),
            batch_size=BATCH_SIZE,
            num_epochs=program.final.epochs,
            rng=np.random.default_rng(key.batch_seed),
        )
        client = convert(examples, batches, program.final.epochs)
        own = self.kept.kept.get(client_id) if own is None else own
        own = program.start_own() if own is None else list(own)
        return program.personalize(client, list(self.held), own)


def cast(weights):
    return tuple(part.astype(np.float32) for part in weights)


@pytest.fixture(scope="module")
def settings(engine):
    return functools.cache(Setting.build)


@pytest.fixture(scope="module")
def found(settings):
    """What is found of a method, once."""
    return functools.cache(lambda name: settings(name).evaluate())


def compute_means(model, part, client_id):
    examples = draw(part, client_id)
    x, y = examples["x"].reshape([-1, 4]).astype(np.float64), examples["y"]
    losses = papers.compute_losses(model, x, y)
    right = np.argmax(papers.propagate(model, x, ends=True)[-1], axis=1) == y
    return {"loss": np.mean(losses), "accuracy": np.mean(right)}


class StaleBase(papers.Centaur):
    """The head is fitted over the representation of before the first round."""

    def personalize(self, client, held, own):
        start, w = self.start(), own
        return [
            *held,
            *papers.fit_head(self.final, start, client, w, client.epochs, []),
        ]


class WholeFit(papers.Whole):
    """The base is not frozen."""

    def personalize(self, client, held, own):
        def compute(theta, rows):
            return papers.compute_gradients(theta, client.x[rows], client.y[rows])

        return self.final.run(held, client.epochs, compute)


class FromStart(papers.Whole):
    """The head begins at the initial model's, not at the global one's."""

    def personalize(self, client, held, own):
        w = self.initial[self.count :]
        b = held[: self.count]
        return [*b, *papers.fit_head(self.final, b, client, w, client.epochs, [])]


class DecayedChange(papers.Whole):
    """Weight decay of the head's distance from the global one."""

    def personalize(self, client, held, own):
        b, v = held[: self.count], held[self.count :]
        u = [np.zeros_like(part) for part in v]
        u = papers.fit_head(self.final, b, client, u, client.epochs, v)
        return [*b, *papers.add(v, u)]


class DecayedSum(papers.SummedHeads):
    """Weight decay of the sum of both heads."""

    def personalize(self, client, held, own):
        b, v = held[: self.count], held[self.count :]
        w = papers.add(v, own)
        return [*b, *papers.fit_head(self.final, b, client, w, client.epochs, [])]


class OwnAlone(papers.SummedHeads):
    """Without the shared head."""

    def personalize(self, client, held, own):
        b = held[: self.count]
        return [*b, *papers.fit_head(self.final, b, client, own, client.epochs, [])]


class TestOwnModels:
    @pytest.mark.parametrize("name", METHODS)
    def test_they_are_the_papers(self, settings, found, name):
        setting, result = settings(name), found(name)
        assert list(result.heads) == list(IDS)
        models = {client_id: setting.follow(client_id) for client_id in IDS}
        for client_id, model in models.items():
            assert setting.measure(result.heads[client_id], model) < FAR
        for part, metrics in zip(("validation", "test"), result.metrics, strict=True):
            assert metrics.client_ids == IDS
            assert tuple(metrics.num_examples) == SIZES[part]
            assert list(metrics.means) == ["loss", "accuracy"]
            for index, (client_id, model) in enumerate(models.items()):
                got = {name: values[index] for name, values in metrics.means.items()}
                if not SIZES[part][index]:
                    assert all(np.isnan(value) for value in got.values())
                    continue
                wanted = compute_means(model, part, client_id)
                assert got == pytest.approx(wanted, rel=1e-5)

    @pytest.mark.parametrize(
        ("name", "changes"),
        [
            ("centaur", {"final": {"decay": 0.0}}),
            ("centaur", {"final": {"momentum": 0.0}}),
            ("centaur", {"final": {"lr": 0.3}}),
            ("centaur", {"final": {"epochs": FINAL["epochs"] - 1}}),
            ("centaur", {"keeps": False}),
            ("centaur", {"build": StaleBase}),
            ("refit", {"keeps": True, "own": tuple(0 * x for x in INITIAL[4:])}),
            ("ppsgd_authors", {"build": DecayedSum}),
            ("ppsgd_authors", {"build": OwnAlone}),
            ("fedavg_fb", {"build": WholeFit}),
            ("fedavg_fb", {"build": FromStart}),
            ("fedavg_fb", {"build": DecayedChange}),
            ("pmtl_ft", {"build": FromStart}),
            ("stand_alone", {"final": {"decay": 0.0}}),
            ("stand_alone", {"final": {"momentum": 0.0}}),
        ],
    )
    def test_others_are_told_apart(self, settings, found, name, changes):
        setting = settings(name)
        model = setting.follow("b", **changes)
        assert setting.measure(found(name).heads["b"], model) > 1_000 * FAR

    def test_each_begins_at_its_own_head(self, settings, found):
        setting = settings("centaur")
        heads = setting.kept.kept
        assert set(heads) == {"a", "b", "c"}
        for client_id, other in (("a", "b"), ("b", "c"), ("d", "a")):
            model = setting.follow(client_id, own=heads[other])
            got = found("centaur").heads[client_id]
            assert setting.measure(got, model) > 1_000 * FAR

    @pytest.mark.parametrize("name", ["pmtl_ft", "stand_alone"])
    @pytest.mark.slow
    def test_a_stack_of_clients_does_the_same(self, settings, found, name):
        one, two = found(name), settings(name).evaluate(stackable=True)
        for client_id in IDS:
            assert measure(two.heads[client_id], one.heads[client_id]) < FAR
        for a, b in zip(one.metrics, two.metrics, strict=True):
            for name in a.means:
                np.testing.assert_allclose(a.means[name], b.means[name], rtol=1e-5)

    def test_a_stack_fits_the_head_of_each_client(self, settings, found):
        one, two = found("centaur"), settings("centaur").evaluate(stackable=True)
        for client_id in IDS:
            assert measure(two.heads[client_id], one.heads[client_id]) < FAR
        for a, b in zip(one.metrics, two.metrics, strict=True):
            assert tuple(a.num_examples) == tuple(b.num_examples)
            for name in a.means:
                np.testing.assert_allclose(a.means[name], b.means[name], rtol=1e-5)

    @pytest.mark.slow
    def test_tffs_runtime_does_the_same(self, settings, found):
        one = found("centaur")
        with execution.use_execution_context(execution.Engine.TFF):
            two = settings("centaur").evaluate()
        for client_id in IDS:
            assert measure(two.heads[client_id], one.heads[client_id]) < FAR
        for a, b in zip(one.metrics, two.metrics, strict=True):
            for name in a.means:
                np.testing.assert_allclose(a.means[name], b.means[name], rtol=1e-5)


class TestLabels:
    @pytest.mark.parametrize("name", ["centaur", "ppsgd_authors", "stand_alone"])
    def test_held_labels_touch_no_weight(self, settings, found, name):
        parts = [build_data("validation", permute), build_data("test", permute)]
        other = settings(name).evaluate(held=parts)
        tf.nest.map_structure(
            np.testing.assert_array_equal, found(name).heads, other.heads
        )
        for a, b in zip(found(name).metrics, other.metrics, strict=True):
            assert not np.array_equal(a.means["loss"], b.means["loss"], equal_nan=True)

    def test_training_labels_do(self, settings, found):
        other = settings("centaur").evaluate(train=build_data("train", permute))
        for client_id in IDS:
            head = found("centaur").heads[client_id]
            assert measure(other.heads[client_id], head) > 1e-2

    def test_between_rounds_the_test_part_is_not_looked_at(self, settings, found):
        looked_at = []

        def make(client_id):
            looked_at.append(client_id)
            examples = draw("test", client_id)
            return examples["x"], examples["y"]

        counts = dict(zip(IDS, SIZES["test"], strict=True))
        setting = settings("centaur")
        algorithm = setting.case.build_algorithm()
        evaluator = PersonalEvaluator(
            PersonalEvaluation(
                algorithm.final_fit,
                shared=setting.held,
                own=algorithm.initialize_own_head(INITIAL),
                train=build_data("train"),
                batch_size=BATCH_SIZE,
                root=ROOT,
                num_kept_weights=setting.num_kept,
            ),
            validation=build_data("validation"),
            test=ArrayData(client_ids=IDS, make=make, counts=counts),
            names=("loss", "accuracy"),
        )
        arguments = (setting.held, setting.kept)
        row = evaluator.evaluate_round(*arguments, num_rounds=NUM_ROUNDS)
        assert not looked_at
        assert list(row) == ["validation_loss", "validation_accuracy"]
        assert list(row) == list(evaluator.columns)
        final = evaluator.evaluate_final(*arguments, num_rounds=NUM_ROUNDS)
        assert sorted(looked_at) == list(IDS)
        validation, test = found("centaur").metrics
        for name in ("loss", "accuracy"):
            # Means over clients, whatever their sizes, of those that have examples.
            expected = np.mean(validation.means[name][[0, 2, 3]])
            assert row[f"validation_{name}"] == pytest.approx(expected)
            assert final.final[name] == pytest.approx(np.mean(test.means[name]))
            pooled = np.average(test.means[name], weights=SIZES["test"])
            assert final.final[name] != pytest.approx(pooled)
        assert final.clients is None
        assert final.own_models is not None and final.validation is not None
        tf.nest.map_structure(
            np.testing.assert_array_equal, final.heads, found("centaur").heads
        )
