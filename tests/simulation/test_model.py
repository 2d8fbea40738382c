"""Tests for what models share: layers, means, accuracy, dropout, initial kernels."""

import dataclasses

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


def build_layer(name: str, num_weights: int = 1) -> models.Layer:
    """Returns x -> w_1 x + seed[0], with as many weights as asked for."""

    def apply(weights, x, seed):
        return weights[0] * x + (0.0 if seed is None else float(seed[0]))

    return models.Layer(name=name, num_weights=num_weights, apply=apply)


class TestLayers:
    WEIGHTS = (tf.constant(2.0), tf.constant(0.0), tf.constant(-3.0))
    CHAIN = models.LayerChain(layers=(build_layer("one", 2), build_layer("two")))

    def test_each_takes_its_own_weights_in_order_and_the_whole_seed(self):
        assert self.CHAIN.num_weights == 3
        x = tf.constant([1.0, 2.0])
        assert self.CHAIN(self.WEIGHTS, x, None).numpy().tolist() == [-6.0, -12.0]
        seed = tf.constant([5, 0])
        # -3 (2 x + 5) + 5.
        assert self.CHAIN(self.WEIGHTS, x, seed).numpy().tolist() == [-16.0, -22.0]

    @pytest.mark.parametrize("number", [0, 2, 4])
    def test_weights_that_are_too_many_or_too_few_are_refused(self, number):
        weights = [tf.constant(1.0)] * number
        with pytest.raises(ValueError, match=f"must be 3 arrays. Found {number}."):
            self.CHAIN(weights, tf.constant([1.0]), None)

    def test_names_differ(self):
        layers = (build_layer("one"), build_layer("two"), build_layer("one"))
        with pytest.raises(ValueError, match=r"names that differ. .*'one', 'two'"):
            models.LayerChain(layers=layers)

    @pytest.mark.parametrize("number", [0, -1])
    def test_a_layer_has_weights(self, number):
        with pytest.raises(ValueError, match=f"'empty' must be positive.*{number}"):
            build_layer("empty", number)

    def test_what_a_model_predicts_is_what_its_layers_do(self):
        model = models.build_classifier(
            "made_up", lambda rng: (), self.CHAIN.layers, tf.TensorSpec([None])
        )
        assert model.layers == self.CHAIN.layers
        assert model.predict(self.WEIGHTS, tf.constant([1.0]), None).numpy() == [-6.0]
        # Others that are equal may take their place, and what is no model's may not.
        dataclasses.replace(model, predict=models.LayerChain(layers=model.layers))
        for changes in (
            {"predict": lambda weights, x, seed: x},
            {"layers": model.layers[:1]},
            {"layers": model.layers[::-1]},
        ):
            with pytest.raises(ValueError, match="`predict` must be the `LayerChain`"):
                dataclasses.replace(model, **changes)
        apart = dataclasses.replace(model, predict=lambda *_: 0, layers=())
        assert apart.predict((), tf.constant([1.0]), None) == 0


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
