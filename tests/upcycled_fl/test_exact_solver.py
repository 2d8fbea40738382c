"""Tests of the exact solver: its gradient by hand, and SciPy's minimiser."""

import numpy as np
import pytest
import tensorflow as tf
from scipy import optimize, special

from simulation.client_training import draw_batches, pad_client
from simulation.linear_models import (
    build_one_output_logistic_regression,
    scale_features,
)
from upcycled_fl import exact_solver

DIM = 6
SHAPE = (DIM - 1, 1, 1)
SEED = np.int32([1, 2])


def build_client(rng, size, *, batch_size=4, num_epochs=2):
    """Returns examples and batches, padded."""
    examples = {
        "x": rng.normal(size=[size, *SHAPE]).astype(np.float32),
        "y": rng.integers(2, size=size).astype(np.int32),
    }
    batches = draw_batches(size, batch_size=batch_size, num_epochs=num_epochs, rng=rng)
    return pad_client(examples, batches)


class Oracle:
    """The problem in NumPy, on features that it scales itself."""

    def __init__(self, examples, size, initial, shift, mu):
        rows = np.float64(examples["x"][:size]).reshape([size, -1])
        z = np.concatenate([rows, np.ones([size, 1])], axis=1)
        self.z = z / np.maximum(1, np.linalg.norm(z, axis=1, keepdims=True))
        self.signs = 2.0 * examples["y"][:size] - 1
        self.initial, self.shift = np.float64(initial), np.float64(shift)
        self.mu = mu

    def compute_value(self, w):
        losses = np.logaddexp(0, -self.signs * (self.z @ w))
        moved = w - self.initial
        return losses.mean() + self.mu / 2 * moved @ moved + self.shift @ w

    def compute_gradient(self, w):
        errors = special.expit(self.z @ w) - (self.signs + 1) / 2
        pull = self.mu * (w - self.initial)
        return self.z.T @ errors / len(self.z) + pull + self.shift

    def minimise(self):
        found = optimize.minimize(
            self.compute_value,
            self.initial - self.shift / self.mu,
            jac=self.compute_gradient,
            method="BFGS",
            options={"gtol": 1e-7},
        )
        # Where values no longer differ, the last digits are the gradient's root.
        found = optimize.root(self.compute_gradient, found.x, tol=1e-12)
        assert np.linalg.norm(self.compute_gradient(found.x)) < 1e-7
        return found.x


# Size, mu, scale of the initial weights, scale of the shift (None: no shift).
PROBLEMS = {
    "plain": (50, 0.1, 0.0, None),
    "one example": (1, 0.5, 1.0, None),
    "shifted": (50, 0.5, 1.0, 1.0),
    "shifted far": (30, 1.0, 0.1, 100.0),
    "weak": (40, 1e-3, 0.0, None),
    "weak and shifted": (40, 0.01, 1.0, 1.0),
    "strong": (40, 10.0, 1.0, 3.0),
    "far from the start": (40, 0.1, 300.0, None),
}


class TestMinimiser:
    @pytest.mark.parametrize("name", PROBLEMS)
    def test_against_scipy_and_the_gradient(self, name, rng):
        size, mu, scale, shift_scale = PROBLEMS[name]
        examples, batches = build_client(rng, size)
        initial = (scale * rng.normal(size=DIM)).astype(np.float32)
        shift = ((shift_scale or 0.0) * rng.normal(size=DIM)).astype(np.float32)
        oracle = Oracle(examples, size, initial, shift, mu)
        expected = oracle.minimise()
        solve = exact_solver.build_exact_solver(mu=mu)
        given = None if shift_scale is None else (tf.constant(shift),)
        run = tf.function(lambda *arguments: solve(*arguments)[0])
        (found,) = run((initial,), examples, tf.constant(batches), SEED, given)
        assert found.dtype == tf.float32
        found = np.float64(found.numpy())
        # The oracle's features differ by 2**-22: of the gradient's terms, each of norm
        # at most 1 and of curvature 1/4, that part of 1 + ||w|| / 2.
        apart = 2.0**-21 * (1 + np.linalg.norm(found))
        bound = exact_solver.DEFAULT_TOLERANCE + apart
        assert np.linalg.norm(oracle.compute_gradient(found)) <= bound
        assert np.linalg.norm(found - expected) <= bound / mu
        # Other problems are told apart.
        for other in (
            (initial, shift, 1.05 * mu),
            (initial, -shift, mu),
            (-initial, shift, mu),
            (initial, shift, mu * size),
        ):
            if all(map(np.array_equal, other, (initial, shift, mu))):
                continue
            wrong = Oracle(examples, size, *other)
            assert np.linalg.norm(wrong.compute_gradient(found)) > bound
            distance = np.linalg.norm(wrong.minimise() - found)
            assert distance > 10 * np.linalg.norm(found - expected)

    @pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-6])
    def test_the_tolerance_holds_for_what_is_returned(self, tolerance, rng):
        """By hand on the solver's own features: no slack but the oracle's rounding."""
        solve = exact_solver.build_exact_solver(mu=0.2, tolerance=tolerance)
        for size in (1, 3, 16, 64):
            examples, batches = build_client(rng, size)
            initial = rng.normal(size=DIM).astype(np.float32)
            (found,), _ = solve(
                (tf.constant(initial),), examples, tf.constant(batches), SEED
            )
            oracle = Oracle(examples, size, initial, np.zeros(DIM), 0.2)
            oracle.z = np.float64(scale_features(tf.constant(examples["x"][:size])))
            gradient = oracle.compute_gradient(np.float64(found.numpy()))
            assert np.linalg.norm(gradient) <= tolerance

    def test_by_hand_without_features(self):
        """z = [0, 1] and y = 1: f' = b - 1 / (1 + e^b) + shift, made 0 at log 2."""
        mu, shift = 1.0, 1 / (1 + 2.0) - np.log(2.0)
        examples = {
            "x": np.zeros([1, 1, 1, 1], np.float32),
            "y": np.ones([1], np.int32),
        }
        solve = exact_solver.build_exact_solver(mu=mu, tolerance=1e-6)
        (found,), _ = solve(
            (tf.zeros([2]),),
            examples,
            tf.constant([[1]]),
            SEED,
            shift=(tf.constant([0.0, shift], tf.float32),),
        )
        assert found[0] == 0.0
        assert found[1].numpy() == pytest.approx(np.log(2.0), abs=2e-6)


class TestArguments:
    def solve(self, examples, batches, *, initial=None, seed=SEED, shift=None):
        solve = exact_solver.build_exact_solver(mu=0.3)
        initial = np.zeros(DIM, np.float32) if initial is None else initial
        weights, sums = solve(
            (tf.constant(initial, tf.float32),),
            examples,
            tf.constant(batches, tf.int32),
            tf.constant(seed),
            shift,
        )
        return weights[0].numpy(), {k: v.numpy() for k, v in sums.items()}

    def test_padding_is_not_data(self, rng):
        examples, batches = build_client(rng, 5)
        assert len(examples["y"]) == 8
        one, sums = self.solve(examples, batches)
        for x, y in ((1e9, 1), (np.nan, -3)):
            other = {name: np.copy(part) for name, part in examples.items()}
            other["x"][5:], other["y"][5:] = x, y
            again, sums_again = self.solve(other, batches)
            assert np.array_equal(one, again) and sums == sums_again
        other = {**examples, "x": np.copy(examples["x"])}
        other["x"][4] += 1
        assert not np.array_equal(one, self.solve(other, batches)[0])

    def test_orders_epochs_and_the_seed_do_not_matter(self, rng):
        examples, batches = build_client(rng, 11)
        one, sums = self.solve(examples, batches)
        rows = draw_batches(11, batch_size=3, num_epochs=5, rng=rng)
        again, sums_again = self.solve(examples, rows, seed=SEED + 1)
        assert np.array_equal(one, again) and sums == sums_again
        zero = (tf.zeros([DIM]),)
        assert np.array_equal(one, self.solve(examples, batches, shift=zero)[0])

    def test_sums_are_the_models_at_the_start(self, rng):
        model = build_one_output_logistic_regression(SHAPE)
        examples, batches = build_client(rng, 21)
        initial = rng.normal(size=DIM).astype(np.float32)
        trained, sums = self.solve(examples, batches, initial=initial)
        assert list(sums) == ["num_examples", "loss", "accuracy"]
        assert all(value.dtype == np.float32 for value in sums.values())

        def measure(vector):
            labels = tf.constant(examples["y"][:21])
            outputs = model.predict((vector,), tf.constant(examples["x"][:21]), None)
            loss = tf.reduce_sum(model.compute_loss(labels, outputs))
            accuracy = tf.reduce_sum(model.metrics["accuracy"](labels, outputs))
            return [21.0, pytest.approx(float(loss), rel=1e-6), float(accuracy)]

        assert list(sums.values()) == measure(initial)
        assert list(sums.values()) != measure(trained)

    def test_labels_that_are_not_1_are_0_as_in_the_loss(self, rng):
        examples, batches = build_client(rng, 9)
        one, _ = self.solve(examples, batches)
        other = {**examples, "y": np.where(examples["y"] == 1, 1, -5).astype("i")}
        assert np.array_equal(one, self.solve(other, batches)[0])


class TestErrors:
    def run_graph(self, initial, batches, tolerance=1e-4, scale=1.0):
        """Runs in a graph that has no control dependencies but the solver's own."""
        rng = np.random.default_rng(0)
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            solve = exact_solver.build_exact_solver(mu=1.0, tolerance=tolerance)
            examples = {
                "x": tf.constant(rng.normal(size=[3, *SHAPE]), tf.float32),
                "y": tf.constant([0, 1, 1]),
            }
            initial = tf.constant(scale * np.float64(initial), tf.float32)
            (trained,), _ = solve((initial,), examples, tf.constant(batches), SEED)
            return session.run(trained)

    def test_what_float32_cannot_hold_is_refused(self):
        ones = np.ones(DIM)
        assert np.all(np.isfinite(self.run_graph(ones, [[1, 2, 3]], 1e-6)))
        # A norm of 1e3 is within the default tolerance, and not within less.
        assert np.all(np.isfinite(self.run_graph(ones, [[1, 2, 3]], scale=400.0)))
        for tolerance, scale in ((1e-8, 400.3), (1e-4, 1e6)):
            with pytest.raises(
                tf.errors.InvalidArgumentError, match="must be within `tolerance`"
            ):
                self.run_graph(ones, [[1, 2, 3]], tolerance, scale)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_weights_that_are_not_finite_are_refused(self, bad):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="must be within `tolerance`"
        ):
            self.run_graph([bad, *np.ones(DIM - 1)], [[1, 2, 3]])

    def test_a_client_without_examples_is_refused(self):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="a client must have examples"
        ):
            self.run_graph(np.ones(DIM), [[0]])

    @pytest.mark.parametrize("mu", [0.0, -1.0, np.inf, np.nan])
    def test_bad_strengths_are_refused(self, mu):
        with pytest.raises(ValueError, match="`mu` must be positive and finite"):
            exact_solver.build_exact_solver(mu=mu)

    @pytest.mark.parametrize("tolerance", [0.0, -1.0, 0.9e-8, np.inf, np.nan])
    def test_bad_tolerances_are_refused(self, tolerance):
        with pytest.raises(ValueError, match="`tolerance` must be finite and >= 1e-08"):
            exact_solver.build_exact_solver(mu=1.0, tolerance=tolerance)
        exact_solver.build_exact_solver(mu=1.0, tolerance=1e-8)
