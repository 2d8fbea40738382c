"""Tests for linear models: losses against NumPy, and the bounds on features."""

import fractions

import numpy as np
import pytest
import tensorflow as tf

from simulation import linear_models
from simulation.image_models import build_logistic_regression

SHAPE = (5, 2, 1)
DIM = 10
# What a client's data should not be, but a bound must hold for.
ROWS = {
    "zero": np.zeros(DIM),
    "small": np.full(DIM, 1e-30),
    "ordinary": np.linspace(-2.0, 1.0, DIM),
    "one large": np.r_[1e30, np.zeros(DIM - 1)],
    "largest": np.full(DIM, np.finfo(np.float32).max),
    "infinite": np.r_[np.inf, np.ones(DIM - 1)],
    "minus infinite": np.r_[-np.inf, np.inf, np.ones(DIM - 2)],
    "nan": np.r_[np.nan, np.ones(DIM - 1)],
}


def as_images(rows) -> tf.Tensor:
    return tf.constant(np.reshape(np.float32(rows), [-1, *SHAPE]))


def compute_softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


class TestDoubleSoftmax:
    @pytest.fixture
    def model(self):
        return linear_models.build_double_softmax_regression(SHAPE, 4)

    def test_the_loss_is_that_of_two_softmaxes(self, model, rng):
        x, y = rng.normal(size=[20, DIM]), rng.integers(4, size=20)
        kernel, bias = rng.normal(size=[DIM, 4]), rng.normal(size=4)
        weights = (np.float32(kernel), np.float32(bias))
        outputs = model.predict(weights, as_images(x), None)
        once = compute_softmax(x @ kernel + bias)
        np.testing.assert_allclose(outputs, once, rtol=1e-4)
        losses = model.compute_loss(tf.constant(y, tf.int32), outputs).numpy()
        twice = compute_softmax(once)
        chosen = np.arange(20), y
        np.testing.assert_allclose(losses, -np.log(twice[chosen]), rtol=1e-5)
        assert not np.allclose(losses, -np.log(once[chosen]), rtol=0.1)
        accuracy = model.metrics["accuracy"](tf.constant(y, tf.int32), outputs)
        assert accuracy.numpy().tolist() == (once.argmax(-1) == y).tolist()

    def test_it_starts_at_zero_as_the_proper_one(self, model):
        weights = model.initialize(np.random.default_rng(0))
        proper = build_logistic_regression(SHAPE, 4)
        for one, two in zip(
            weights, proper.initialize(np.random.default_rng(0)), strict=True
        ):
            assert one.dtype == np.float32 and np.array_equal(one, two)
        assert model.num_parameters == 4 * (DIM + 1)
        outputs = model.predict(weights, as_images([ROWS["ordinary"]]), None)
        assert outputs.numpy().tolist() == [[0.25] * 4]
        losses = model.compute_loss(tf.constant([2]), outputs).numpy()
        assert losses == pytest.approx([np.log(4.0)], rel=1e-6)

    def test_bounds_of_the_loss_and_a_vanishing_gradient(self, model):
        x = as_images([ROWS["zero"]])
        kernel, bias = tf.zeros([DIM, 4]), tf.constant([200.0, 0.0, 0.0, 0.0])
        for label, expected in ((0, np.log1p(3 / np.e)), (1, np.log(np.e + 3))):
            with tf.GradientTape() as tape:
                tape.watch(bias)
                outputs = model.predict((kernel, bias), x, None)
                loss = model.compute_loss(tf.constant([label]), outputs)
            assert loss.numpy() == pytest.approx([expected], rel=1e-6)
            assert np.all(tape.gradient(loss, bias).numpy() == 0.0)

    def test_name(self, model):
        assert model.name == "double_softmax_regression" and model.stackable


class TestScaleFeatures:
    @pytest.mark.parametrize("name", ROWS)
    def test_norms_are_at_most_1_in_exact_arithmetic(self, name):
        (scaled,) = linear_models.scale_features(as_images([ROWS[name]])).numpy()
        assert scaled.dtype == np.float32 and scaled.shape == (DIM + 1,)
        norm = sum(fractions.Fraction(float(value)) ** 2 for value in scaled)
        assert norm <= 1
        if np.all(np.isfinite(ROWS[name])):
            assert norm > 1 - fractions.Fraction(1, 10**6)
        else:
            assert norm == 0

    def test_norms_of_many_are_at_most_1_in_exact_arithmetic(self, rng):
        rows = rng.normal(size=[500, DIM]) * 10.0 ** rng.uniform(-5, 30, [500, 1])
        for row in linear_models.scale_features(as_images(rows)).numpy():
            assert sum(fractions.Fraction(float(value)) ** 2 for value in row) <= 1

    def test_directions(self, rng):
        x = rng.normal(size=[6, DIM])
        z = np.concatenate([x, np.ones([6, 1])], axis=1)
        expected = z / np.linalg.norm(z, axis=1, keepdims=True)
        scaled = linear_models.scale_features(as_images(x)).numpy()
        np.testing.assert_allclose(scaled, expected, rtol=1e-5)

    def test_it_looks_at_one_example_alone(self):
        rows = list(ROWS.values())
        together = linear_models.scale_features(as_images(rows)).numpy()
        for row, expected in zip(rows, together, strict=True):
            (alone,) = linear_models.scale_features(as_images([row])).numpy()
            assert np.array_equal(alone, expected)


class TestOneOutput:
    @pytest.fixture
    def model(self):
        return linear_models.build_one_output_logistic_regression(SHAPE)

    def test_against_numpy(self, model, rng):
        x, y = rng.normal(size=[30, DIM]), rng.integers(2, size=30)
        vector = 3 * rng.normal(size=DIM + 1)
        z = np.concatenate([x, np.ones([30, 1])], axis=1)
        z /= np.maximum(1.0, np.linalg.norm(z, axis=1, keepdims=True))
        outputs = model.predict((tf.constant(np.float32(vector)),), as_images(x), None)
        np.testing.assert_allclose(outputs, z @ vector, rtol=1e-4, atol=1e-5)
        labels = tf.constant(y, tf.int32)
        losses = model.compute_loss(labels, outputs)
        expected = np.log1p(np.exp(-(2 * y - 1) * (z @ vector)))
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        accuracy = model.metrics["accuracy"](labels, outputs).numpy()
        assert accuracy.tolist() == ((z @ vector > 0) == y).tolist()
        assert 0 < accuracy.mean() < 1

    def test_a_vector_by_hand(self):
        model = linear_models.build_one_output_logistic_regression((2, 1, 1))
        # z = [2, 2, 1] / 3.
        x, vector = tf.constant([[[[2.0]], [[2.0]]]]), tf.constant([3.0, 6.0, -9.0])
        outputs = model.predict((vector,), x, None)
        assert outputs.numpy() == pytest.approx([3.0], rel=1e-6)
        for label, margin in ((1, 3.0), (0, -3.0)):
            loss = model.compute_loss(tf.constant([label]), outputs).numpy()
            assert loss == pytest.approx([np.log1p(np.exp(-margin))], rel=1e-6)

    def test_it_starts_at_zero(self, model):
        (vector,) = weights = model.initialize(np.random.default_rng(0))
        assert vector.dtype == np.float32 and vector.tolist() == [0.0] * (DIM + 1)
        assert model.num_parameters == DIM + 1
        outputs = model.predict(weights, as_images([ROWS["ordinary"]] * 2), None)
        labels = tf.constant([0, 1])
        losses = model.compute_loss(labels, outputs).numpy()
        assert losses == pytest.approx([np.log(2)] * 2, rel=1e-6)
        # A tie is class 0, as with argmax.
        assert model.metrics["accuracy"](labels, outputs).numpy().tolist() == [1, 0]

    def test_large_outputs_stay_finite(self, model):
        outputs = tf.constant([1e30, -1e30, 1e30, -1e30])
        losses = model.compute_loss(tf.constant([1, 1, 0, 0]), outputs).numpy()
        assert losses.tolist() == [0.0, np.float32(1e30), np.float32(1e30), 0.0]

    @pytest.mark.parametrize("label", [0, 1, 2, -7, 2**31 - 1])
    def test_gradients_of_every_example_have_norm_at_most_1(self, model, label):
        x = as_images(list(ROWS.values()))
        for scale in (0.0, 1.0, 1e6):
            vector = scale * tf.linspace(-1.0, 1.0, DIM + 1)
            with tf.GradientTape() as tape:
                tape.watch(vector)
                outputs = model.predict((vector,), x, None)
                losses = model.compute_loss(tf.fill([len(ROWS)], label), outputs)
            gradients = tape.jacobian(losses, vector).numpy()
            norms = np.linalg.norm(np.float64(gradients), axis=1)
            # The sigmoid and the product round too.
            assert np.all(norms <= 1 + 1e-6)
            if scale == 1e6:
                assert norms.max() > 0.99

    def test_name(self, model):
        assert model.name == "one_output_logistic_regression" and model.stackable


@pytest.mark.parametrize(
    "model",
    [
        linear_models.build_double_softmax_regression(SHAPE, 2),
        linear_models.build_one_output_logistic_regression(SHAPE),
    ],
    ids=lambda model: model.name,
)
def test_the_only_layer_is_the_logits(model):
    [layer] = model.layers
    assert layer.name == "logits"
    assert layer.num_weights == len(model.initialize(np.random.default_rng(0)))


@pytest.mark.parametrize(
    "model",
    [
        linear_models.build_double_softmax_regression(SHAPE, 2),
        linear_models.build_one_output_logistic_regression(SHAPE),
    ],
    ids=lambda model: model.name,
)
def test_a_stack_of_clients_compiles_to_what_each_gets_alone(model, rng):
    """A `stackable` model is vectorized over its weights, and compiled by XLA."""
    x = as_images(rng.normal(size=[3 * 7, DIM]))
    x = tf.reshape(x, [3, 7, *SHAPE])
    y = tf.constant(rng.integers(2, size=[3, 7]), tf.int32)
    weights = tuple(
        tf.constant(rng.normal(size=[3, *weight.shape]), tf.float32)
        for weight in model.initialize(rng)
    )

    def compute(arguments):
        weights, x, y = arguments
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs = model.predict(weights, x, None)
            losses = model.compute_loss(y, outputs)
        return losses, tape.gradient(losses, weights)

    stack = tf.function(
        lambda *arguments: tf.vectorized_map(
            compute, arguments, fallback_to_while_loop=False
        ),
        jit_compile=True,
    )
    found = tf.nest.flatten(stack(weights, x, y))
    for client in range(3):
        own = (tuple(weight[client] for weight in weights), x[client], y[client])
        alone = compute(own)
        for one, two in zip(found, tf.nest.flatten(alone), strict=True):
            np.testing.assert_allclose(one[client], two, rtol=1e-4, atol=1e-6)
