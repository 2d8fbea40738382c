"""Tests of a client's work: one client by hand, phases, stragglers, and bad values."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from scipy import optimize

from centaur import algorithms
from centaur.local_training import Phase, SplitTraining
from centaur.personal_fit import HeadFit, WholeFit
from centaur.split_model import build_split_model
from simulation import execution, image_models, learning
from tests.centaur import papers
from tests.centaur.centaur_cases import (
    CASES,
    HEAD,
    INITIAL,
    NUM_CLASSES,
    SHAPE,
    SHARED,
    Case,
    build_factory,
    build_phase,
    build_process,
    build_sgd,
    build_split,
    carry,
    convert,
    draw_client,
    draw_examples,
    measure,
)


@pytest.fixture(scope="module", autouse=True)
def engine():
    return execution.set_execution_context()


def compute_objective(b, w, examples, decay):
    """The mean cross entropy of relu(relu(x k1 + a1) k2 + a2) k3 + a3, plus half the
    decay times ||w||^2; b and w as vectors."""
    sizes = [(4, 5), (5,), (5, 6), (6,), (6, 3), (3,)]
    ends = np.cumsum([np.prod(size) for size in sizes])[:-1]
    parts = np.split(np.concatenate([b, w]), ends)
    k1, a1, k2, a2, k3, a3 = (p.reshape(s) for p, s in zip(parts, sizes, strict=True))
    h = np.maximum(examples["x"].reshape([-1, 4]) @ k1 + a1, 0)
    z = np.maximum(h @ k2 + a2, 0) @ k3 + a3
    loss = np.log(np.sum(np.exp(z), axis=1)) - z[np.arange(len(z)), examples["y"]]
    return np.mean(loss) + 0.5 * decay * np.sum(w**2)


def ravel(parts) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.float64).ravel() for part in parts])


class TestAlternatingMinimisation:
    """One client, no noise, one batch: the head to its minimum, then a step of b."""

    RATE, DECAY, ROUNDS = 0.2, 0.05, 2

    @pytest.fixture(scope="class")
    def rounds(self):
        algorithm = algorithms.build_centaur_algorithm(
            build_split(),
            head=Phase(
                optimizer=build_sgd(1.0, 0.9), num_epochs=400, weight_decay=self.DECAY
            ),
            shared_epochs=1,
        )
        process = learning.build_learning_process(
            algorithm.split.model,
            build_factory(divisor=1),
            algorithm,
            client_optimizer=build_sgd(self.RATE, 0.0),
            server_optimizer=build_sgd(1.0, 0.0),
            initial_weights=INITIAL,
        )
        state, kept, found = process.initialize(), process.initial_client_state, []
        for number in range(self.ROUNDS):
            client = draw_client(2, number, 401, size=8, batch_size=8)
            output = process.next(state, [carry(client, kept, joined=1)])
            state, [kept] = output.state, output.client_states
            found.append((ravel(state.global_model_weights.trainable), ravel(kept)))
        return found

    def solve(self, *, decay=DECAY, steps=1):
        examples = draw_examples(2, 8)
        b, found = ravel(INITIAL[:4]), []
        for _ in range(self.ROUNDS):

            def compute_of_head(w, b=b):
                return compute_objective(b, w, examples, decay)

            w = optimize.minimize(
                compute_of_head, ravel(INITIAL[4:]), method="BFGS", tol=1e-9
            ).x
            for _ in range(steps):
                gradient = optimize.approx_fprime(
                    b, lambda b, w=w: compute_objective(b, w, examples, decay), 1e-7
                )
                b = b - self.RATE * gradient
            found.append((b, w))
        return found

    def test_it_is_that(self, rounds):
        start = ravel(INITIAL[:4])
        for (b, w), (b_wanted, w_wanted) in zip(rounds, self.solve(), strict=True):
            np.testing.assert_allclose(w, w_wanted, rtol=1e-3, atol=1e-4)
            # Of the step, not of b alone.
            step, wanted = b - start, b_wanted - start
            difference = np.linalg.norm(step - wanted)
            assert difference < 1e-3 * np.linalg.norm(wanted)

    @pytest.mark.parametrize("changes", [{"decay": 0.03}, {"steps": 2}])
    def test_others_are_told_apart(self, rounds, changes):
        start = ravel(INITIAL[:4])
        b, _ = rounds[0]
        wanted, _ = self.solve(**changes)[0]
        difference = np.linalg.norm(b - wanted)
        assert difference > 1e-2 * np.linalg.norm(wanted - start)


class TestPhases:
    @pytest.mark.parametrize("num_epochs", [1, 2, 3, 5])
    def test_a_straggler_makes_fewer_of_both(self, num_epochs):
        """Of 4 epochs of the head and 2 of the representation."""
        case = CASES["centaur"]
        process = build_process(case, factory=build_factory(divisor=1))
        client = draw_client(0, 0, num_epochs, size=5)
        state = process.initial_client_state
        output = process.next(process.initialize(), [carry(client, state)])
        rows = [row[row > 0] - 1 for row in client[1]]
        num_head = len(rows) * 4 // 6
        whole = convert(*client, num_epochs)
        split = dataclasses.replace(whole, epochs=[rows[:num_head], rows[num_head:]])
        program = case.build_program(head={"epochs": 1}, shared={"epochs": 1})
        [wanted] = papers.run_rounds(program, [{0: split}], divisor=1, server_lr=0.8)
        held = output.state.global_model_weights.trainable
        assert measure(held, wanted.held) < 3e-6
        assert measure(output.client_states[0], wanted.kept[0]) < 3e-6

    def test_losses_are_those_of_the_representation(self):
        """Of the passes that move what is sent, at the weights that they meet."""
        case = dataclasses.replace(CASES["centaur"], shared=SHARED | {"lr": 1e-30})
        process = build_process(case)
        client = draw_client(0, 0, 6, size=5)
        state = process.initial_client_state
        output = process.next(process.initialize(), [carry(client, state)])
        sums = output.metrics["client_work"]
        assert sums["num_examples"] == SHARED["epochs"] * 5
        # The representation all but stays, so the loss does too.
        model = [*INITIAL[:4], *output.client_states[0]]
        one = convert(*client, 6)
        losses = papers.compute_losses(
            [part.astype(np.float64) for part in model], one.x, one.y
        )
        assert sums["loss"] == pytest.approx(2 * np.sum(losses), rel=1e-5)
        before = papers.compute_losses(
            [part.astype(np.float64) for part in INITIAL], one.x, one.y
        )
        assert not np.isclose(np.sum(before), np.sum(losses), rtol=1e-2)

    def test_features_are_without_dropout(self):
        """Another seed is another representation, but the same head."""
        model = image_models.build_mlp(
            SHAPE, NUM_CLASSES, hidden_sizes=[5, 6], dropout_rate=0.5
        )
        algorithm = algorithms.build_centaur_algorithm(
            build_split_model(model),
            head=build_phase(HEAD),
            shared_epochs=SHARED["epochs"],
        )
        process = learning.build_learning_process(
            model,
            build_factory(),
            algorithm,
            client_optimizer=build_sgd(0.1, 0.0),
            server_optimizer=build_sgd(1.0, 0.0),
            initial_weights=INITIAL,
        )
        [element] = carry(draw_client(0, 0, 6, size=5), process.initial_client_state)
        outputs = []
        for seed in (1, 2):
            element["training_seed"] = np.int32([seed, 0])
            outputs.append(process.next(process.initialize(), [[element]]))
        heads = [output.client_states[0] for output in outputs]
        tf.nest.map_structure(np.testing.assert_array_equal, *heads)
        held = [o.state.global_model_weights.trainable for o in outputs]
        assert measure(held[0], held[1]) > 1e-3

    def test_a_client_without_batches_sends_nothing_and_keeps_its_head(self):
        process = build_process(CASES["centaur"])
        examples, batches = draw_client(0, 0, 6, size=5)
        kept = tuple(part + 1 for part in process.initial_client_state)
        output = process.next(
            process.initialize(), [carry((examples, 0 * batches), kept)]
        )
        held = output.state.global_model_weights.trainable
        tf.nest.map_structure(np.testing.assert_array_equal, tuple(held), INITIAL[:4])
        tf.nest.map_structure(
            np.testing.assert_array_equal, tuple(output.client_states[0]), kept
        )


class TestBadValues:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_epochs": 0}, "`num_epochs` must be >= 1. Found 0"),
            ({"num_steps": 0}, "`num_steps` must be >= 1. Found 0"),
            ({"weight_decay": -0.1}, "`weight_decay` must be finite and >= 0. .*-0.1"),
            ({"weight_decay": np.inf}, "`weight_decay` must be finite.*inf"),
            ({"weight_decay": np.nan}, "`weight_decay` must be finite.*nan"),
        ],
    )
    def test_of_a_phase(self, changes, message):
        phase = build_phase(HEAD)
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(phase, **changes)

    def test_a_fit_of_heads_leaves_the_rest(self):
        training = SplitTraining(
            split=build_split(), head=build_phase(HEAD), shared=build_phase(SHARED)
        )
        with pytest.raises(ValueError, match="`training` must leave what the server"):
            HeadFit(training=training)
        HeadFit(training=dataclasses.replace(training, shared=None))

    def test_a_fit_of_a_whole_model_is_of_whole_epochs(self):
        training = dataclasses.replace(build_phase(HEAD), num_steps=3)
        with pytest.raises(ValueError, match="whole epochs. Found 3 steps"):
            WholeFit(model=build_split().model, training=training)

    def test_epochs_that_are_drawn(self):
        """Of the head and of what is shared, whatever the flag of epochs says."""
        counts = {name: case.count_epochs() for name, case in CASES.items()}
        assert counts == {
            "centaur": 6,
            "centaur_some": 6,
            "centaur_deep": 6,
            "centaur_clip": 6,
            "refit": 6,
            "ppsgd_paper": 2,
            "ppsgd_authors": 2,
            "fedavg_fb": 2,
            "pmtl_ft": 2,
        }
        assert Case(kind="stand_alone").count_epochs() == 1
