"""Tests for models in two parts: sizes, features by hand, the whole bit for bit."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from centaur.split_model import build_split_model
from simulation import image_models, text_models
from simulation.keras_model import build_keras_model
from simulation.model import LayerChain

SHAPE = (28, 28, 1)
build_emnist_mlp = functools.partial(
    image_models.build_mlp, SHAPE, 10, hidden_sizes=[256, 128, 16]
)


@functools.cache
def build_keras_mlp():
    """Returns the Keras twin of `build_emnist_mlp`, its layers named otherwise."""
    layers = [tf.keras.layers.Flatten()]
    for size in (256, 128, 16):
        layers.append(tf.keras.layers.Dense(size, "relu", name=f"hidden_{size}"))
    layers.append(tf.keras.layers.Dense(10, name="output"))
    return build_keras_model(
        lambda: tf.keras.Sequential(layers),
        name="keras_mlp",
        x_spec=tf.TensorSpec([None, *SHAPE]),
    )


MODELS = {
    "mlp": functools.partial(image_models.build_mlp, SHAPE, 5, hidden_sizes=[40, 30]),
    "three_filter_cnn": functools.partial(
        image_models.build_three_filter_cnn, (5, 5, 1), 4
    ),
    "emnist_cnn": functools.partial(image_models.build_emnist_cnn, (12, 12, 1), 4),
    "lenet": functools.partial(
        image_models.build_lenet, (16, 16, 3), 4, hidden_sizes=[40, 30]
    ),
    "next_word": functools.partial(text_models.build_next_word_lstm, 9, 4),
    "sentiment": functools.partial(text_models.build_sentiment_lstm, 9, 4),
    "keras": build_keras_mlp,
}
WITH_DROPOUT = {"three_filter_cnn", "emnist_cnn"}


def draw(model, rng) -> tuple[tuple[tf.Tensor, ...], tf.Tensor]:
    """Returns weights, biases too, and the inputs of three examples."""
    weights = tuple(
        tf.constant(rng.normal(scale=0.1, size=weight.shape), tf.float32)
        for weight in model.initialize(rng)
    )
    spec = model.example_spec["x"]
    shape = [3, *spec.shape[1:]]
    if spec.dtype == tf.int32:
        return weights, tf.constant(rng.integers(1, 10, size=shape), tf.int32)
    return weights, tf.constant(rng.normal(size=shape), tf.float32)


class TestParameters:
    @pytest.mark.parametrize(
        ("build", "split_layer", "representation", "head"),
        [
            # CIFAR10, CIFAR100 and EMNIST digits of Shen et al. 2023.
            (
                lambda: image_models.build_lenet(
                    (32, 32, 3), 10, hidden_sizes=[384, 32]
                ),
                "logits",
                734_432,
                330,
            ),
            (
                lambda: image_models.build_lenet(
                    (32, 32, 3), 100, hidden_sizes=[128, 32]
                ),
                "logits",
                316_384,
                3_300,
            ),
            (build_emnist_mlp, "logits", 235_920, 170),
            (build_emnist_mlp, "dense_3", 235_920 - 129 * 16, 170 + 129 * 16),
            (build_emnist_mlp, "dense_2", 785 * 256, 257 * 128 + 129 * 16 + 170),
            (build_keras_mlp, "output", 235_920, 170),
            (build_keras_mlp, "hidden_16", 235_920 - 129 * 16, 170 + 129 * 16),
            (
                text_models.build_next_word_lstm,
                "dense_1",
                10_004 * 96 + 4 * 670 * (96 + 670 + 1),
                671 * 96 + 97 * 10_004,
            ),
            (
                lambda: text_models.build_sentiment_lstm(9),
                "logits",
                351_490 + 11 * 300 - 258,
                258,
            ),
        ],
    )
    def test_of_representation_and_head(self, build, split_layer, representation, head):
        model = build()
        split = build_split_model(model, split_layer)
        assert split.model is model and split.split_layer == split_layer
        assert split.num_representation_parameters == representation
        assert split.num_head_parameters == head
        first, second = split.split(model.initialize(np.random.default_rng(0)))
        assert sum(weight.size for weight in first) == representation
        assert sum(weight.size for weight in second) == head
        numbers = (split.num_representation_weights, split.num_head_weights)
        assert (len(first), len(second)) == numbers

    @pytest.mark.parametrize("name", ["mlp", "emnist_cnn", "keras"])
    def test_the_last_layer_is_the_head_unless_another_is_named(self, name):
        model = MODELS[name]()
        last = model.layers[-1]
        split = build_split_model(model)
        assert split == build_split_model(model, last.name)
        assert split.num_head_weights == 2
        assert split.apply_head == LayerChain(layers=(last,))


class TestParts:
    def test_features_are_the_activations_that_the_head_multiplies(self):
        model = image_models.build_mlp((1, 2, 1), 2, hidden_sizes=[2])
        split = build_split_model(model)
        weights = [[[1, 2], [3, -4]], [0.5, -0.5], [[1, 0], [2, 3]], [0, -1]]
        weights = tuple(np.array(weight, np.float32) for weight in weights)
        representation, head = split.split(weights)
        features = split.compute_features(
            representation, tf.constant([[[[1.0], [2.0]]]]), None
        )
        # relu(7.5, -6.5).
        assert features.numpy().tolist() == [[7.5, 0.0]]
        outputs = split.apply_head(head, tf.constant([[2.0, 1.0]]), None)
        assert outputs.numpy().tolist() == [[4.0, 2.0]]

    def test_sixteen_activations_of_the_emnist_network(self, rng):
        split = build_split_model(build_emnist_mlp())
        weights, x = draw(split.model, rng)
        features = split.compute_features(split.split(weights)[0], x, None)
        assert features.shape == [3, 16]
        assert np.min(features) == 0.0 < np.max(features)

    @pytest.mark.parametrize("name", MODELS)
    def test_together_they_are_the_model_bit_for_bit(self, name, rng):
        model = MODELS[name]()
        weights, x = draw(model, rng)
        seeds = (None, tf.constant([3, 4]))
        whole = [model.predict(weights, x, seed).numpy() for seed in seeds]
        for layer in model.layers[1:]:
            split = build_split_model(model, layer.name)
            representation, head = split.split(weights)
            moved = [weight + 0.1 for weight in head]
            for seed, expected in zip(seeds, whole, strict=True):
                features = split.compute_features(representation, x, seed)
                assert features.shape[0] == 3
                outputs = split.apply_head(head, features, seed).numpy()
                assert np.array_equal(outputs, expected)
                # With other features or another head they are not.
                other = split.apply_head(head, 1.5 * features, seed)
                assert not np.array_equal(other, expected)
                other = split.apply_head(moved, features, seed)
                assert not np.array_equal(other, expected)

    @pytest.mark.parametrize("name", sorted(WITH_DROPOUT))
    def test_dropout_before_the_head_is_in_the_features(self, name, rng):
        split = build_split_model(MODELS[name]())
        weights, x = draw(split.model, rng)
        representation, head = split.split(weights)
        plain, drawn, other = (
            split.compute_features(representation, x, seed).numpy()
            for seed in (None, tf.constant([3, 4]), tf.constant([3, 5]))
        )
        assert not np.array_equal(plain, drawn)
        assert not np.array_equal(drawn, other)
        one, two = (split.apply_head(head, plain, seed) for seed in (None, [3, 4]))
        assert np.array_equal(one, two)

    def test_gradients_are_the_parts_of_the_whole_gradient(self, rng):
        split = build_split_model(MODELS["mlp"](), "dense_2")
        weights, x = draw(split.model, rng)
        representation, head = split.split(weights)

        def compute(predict, trained):
            with tf.GradientTape() as tape:
                tape.watch(trained)
                loss = tf.reduce_sum(tf.sin(predict(trained)))
            return [gradient.numpy() for gradient in tape.gradient(loss, trained)]

        whole = compute(lambda given: split.model.predict(given, x, None), weights)
        features = split.compute_features(representation, x, None)
        parts = [
            *compute(
                lambda given: split.apply_head(
                    head, split.compute_features(given, x, None), None
                ),
                representation,
            ),
            *compute(lambda given: split.apply_head(given, features, None), head),
        ]
        for one, two in zip(parts, whole, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5)
            assert np.any(two != 0.0)

    def test_a_stack_of_clients_is_what_each_gets_alone(self, rng):
        split = build_split_model(MODELS["mlp"]())
        assert split.model.stackable
        clients = [draw(split.model, rng) for _ in range(3)]
        stacked = tf.nest.map_structure(lambda *parts: tf.stack(parts), *clients)

        def compute(arguments):
            weights, x = arguments
            representation, head = split.split(weights)
            features = split.compute_features(representation, x, None)
            return features, split.apply_head(head, features, None)

        found = tf.function(
            lambda stacked: tf.vectorized_map(
                compute, stacked, fallback_to_while_loop=False
            )
        )(stacked)
        for index, client in enumerate(clients):
            for one, two in zip(found, compute(client), strict=True):
                scale = np.max(np.abs(two))
                np.testing.assert_allclose(one[index], two, 1e-5, 1e-6 * scale)


class TestErrors:
    @pytest.mark.parametrize("name", ["dense_4", "Logits", ""])
    def test_an_unknown_layer_with_the_names_there_are(self, name):
        with pytest.raises(ValueError) as caught:
            build_split_model(build_emnist_mlp(), name)
        assert str(caught.value) == (
            "`split_layer` must be a layer of model 'mlp': one of ['dense_1', "
            f"'dense_2', 'dense_3', 'logits']. Found {name!r}."
        )

    @pytest.mark.parametrize(
        ("build", "split_layer", "first"),
        [
            (lambda: image_models.build_logistic_regression(SHAPE, 10), None, "logits"),
            (lambda: text_models.build_tag_regression(9, 5), "logits", "logits"),
            (build_emnist_mlp, "dense_1", "dense_1"),
        ],
    )
    def test_nothing_before_the_head(self, build, split_layer, first):
        message = f"`split_layer` must have a layer before it.*Found '{first}'"
        with pytest.raises(ValueError, match=message):
            build_split_model(build(), split_layer)

    def test_a_model_without_layers(self):
        model = dataclasses.replace(
            build_emnist_mlp(), predict=lambda weights, x, seed: x, layers=()
        )
        with pytest.raises(ValueError, match="`model` must have layers.*'mlp'"):
            build_split_model(model)

    def test_layers_of_other_weights_than_the_model_has(self):
        model = dataclasses.replace(
            build_emnist_mlp(), initialize=lambda rng: (np.zeros([3], np.float32),)
        )
        with pytest.raises(ValueError, match="as many arrays .* 1. Found 8"):
            build_split_model(model)

    @pytest.mark.parametrize("number", [0, 3, 7, 9])
    def test_weights_of_another_model(self, number):
        split = build_split_model(build_emnist_mlp())
        with pytest.raises(ValueError, match=f"must be 8 arrays. Found {number}."):
            split.split([np.zeros([1])] * number)
