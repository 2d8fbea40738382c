"""Tests for models: values by hand, dropout, initial weights."""

import numpy as np
import pytest
import tensorflow as tf

from simulation import model as models

SHAPE = (28, 28, 1)
BUILDERS = [
    models.build_logistic_regression,
    models.build_small_cnn,
    models.build_emnist_cnn,
]


def test_logistic_regression_by_hand():
    model = models.build_logistic_regression((1, 2, 1), 2)
    weights = (
        np.array([[1.0, 2.0], [3.0, 4.0]], np.float32),
        np.array([0.5, -0.5], np.float32),
    )
    x = np.array([[[[1.0], [2.0]]]], np.float32)
    logits = model.predict(weights, tf.constant(x), None)
    assert logits.numpy().tolist() == [[7.5, 9.5]]
    loss = model.compute_loss(tf.constant([1]), logits)
    assert loss.numpy() == pytest.approx([np.log1p(np.exp(-2.0))], rel=1e-6)


@pytest.mark.parametrize("build", BUILDERS)
def test_outputs_have_one_row_an_example(build):
    model = build(SHAPE, 7)
    weights = model.initialize(np.random.default_rng(0))
    assert all(weight.dtype == np.float32 for weight in weights)
    for seed in (None, tf.constant([1, 2])):
        assert model.predict(weights, tf.zeros([3, *SHAPE]), seed).shape == [3, 7]


@pytest.mark.parametrize("build", BUILDERS)
def test_initial_weights_follow_the_generator(build):
    model = build(SHAPE, 7)
    one, two = (model.initialize(np.random.default_rng(4)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_kernels_have_glorot_variance():
    kernel = models.build_emnist_cnn(SHAPE, 62).initialize(np.random.default_rng(1))[4]
    fan = sum(kernel.shape)
    assert np.var(kernel) == pytest.approx(2.0 / fan, rel=0.01)


def test_accuracy_counts_in_graphs_of_tff_too():
    labels = np.array([0, 1, 1], np.int32)
    logits = np.array([[2.0, 1.0], [2.0, 1.0], [0.0, 1.0]], np.float32)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        values = models.compute_accuracy(tf.constant(labels), tf.constant(logits))
        assert session.run(values).tolist() == [1.0, 0.0, 1.0]


class TestDropout:
    def test_it_is_off_without_a_seed(self):
        x = tf.constant([1.0, 2.0])
        assert models.apply_dropout(x, 0.5, None) is x

    def test_share_and_scale(self):
        x = tf.ones([40_000])
        kept = models.apply_dropout(x, 0.25, tf.constant([3, 4])).numpy()
        assert np.unique(kept).tolist() == [0.0, np.float32(1 / 0.75)]
        # Six standard deviations.
        assert np.mean(kept == 0) == pytest.approx(0.25, abs=0.013)

    def test_the_seed_decides(self):
        def draw(seed):
            return models.apply_dropout(tf.ones([64]), 0.5, tf.constant(seed)).numpy()

        assert np.array_equal(draw([1, 2]), draw([1, 2]))
        assert not np.array_equal(draw([1, 2]), draw([1, 3]))

    def test_the_network_uses_it_in_training_alone(self):
        model = models.build_emnist_cnn(SHAPE, 5)
        weights = model.initialize(np.random.default_rng(0))
        x = tf.random.stateless_uniform([2, *SHAPE], [1, 1])
        plain = model.predict(weights, x, None).numpy()
        assert np.array_equal(plain, model.predict(weights, x, None).numpy())
        one, two = (
            model.predict(weights, x, tf.constant([1, number])).numpy()
            for number in range(2)
        )
        assert not np.array_equal(one, two)
        assert not np.array_equal(one, plain)
