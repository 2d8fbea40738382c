"""Tests for what models share: means, accuracy, dropout, initial kernels."""

import numpy as np
import pytest
import tensorflow as tf

from simulation import model as models


def test_kernels_have_glorot_variance():
    for shape, fan in (([3136, 128], 3264), ([5, 5, 32, 64], 25 * 96)):
        kernel = models.draw_glorot(np.random.default_rng(1), shape)
        assert kernel.dtype == np.float32
        assert np.var(kernel) == pytest.approx(2.0 / fan, rel=0.02)


def test_biases_are_zero():
    bias = models.draw_glorot(np.random.default_rng(1), [7])
    assert np.array_equal(bias, np.zeros(7, np.float32))


def test_accuracy_counts_in_graphs_of_tff_too():
    labels = np.array([0, 1, 1], np.int32)
    logits = np.array([[2.0, 1.0], [2.0, 1.0], [0.0, 1.0]], np.float32)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        values = models.compute_accuracy(tf.constant(labels), tf.constant(logits))
        assert session.run(values).tolist() == [1.0, 0.0, 1.0]


class TestMeans:
    def test_all_are_over_examples(self):
        sums = {"num_examples": np.float32(4), "loss": np.float32(6), "accuracy": 3.0}
        assert models.compute_means(sums) == {"loss": 1.5, "accuracy": 0.75}

    def test_metrics_are_over_their_weights_and_the_loss_is_not(self):
        sums = {"num_examples": 4.0, "loss": 6.0, "metric_weight": 12.0, "recall": 3.0}
        assert models.compute_means(sums) == {"loss": 1.5, "recall": 0.25}

    def test_there_is_none_of_nothing(self):
        sums = {"num_examples": 0.0, "loss": 0.0, "accuracy": 0.0}
        assert models.compute_means(sums) == {"loss": None, "accuracy": None}
        sums = {"num_examples": 2.0, "loss": 1.0, "metric_weight": 0.0, "recall": 0.0}
        assert models.compute_means(sums) == {"loss": 0.5, "recall": None}


class TestDropout:
    def test_it_is_off_without_a_seed(self):
        x = tf.constant([1.0, 2.0])
        assert models.apply_dropout(x, 0.5, None) is x
        assert models.fold_seed(None, 1) is None

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

    def test_layers_have_seeds_of_their_own(self):
        one, two = (models.fold_seed(tf.constant([1, 2]), layer) for layer in range(2))
        assert not np.array_equal(one, two)
