"""Tests for models of images: values by hand and TFF's, sizes, dropout, weights."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_federated.python.simulation.baselines.emnist import emnist_models

from simulation import image_models

SHAPE = (28, 28, 1)
build_upcycled_mlp = functools.partial(
    image_models.build_mlp, hidden_sizes=[196], dropout_rate=0.5
)
BUILDERS = {
    "logistic_regression": image_models.build_logistic_regression,
    "mlp": functools.partial(image_models.build_mlp, hidden_sizes=[9, 5]),
    "mlp with dropout": build_upcycled_mlp,
    "small_cnn": image_models.build_small_cnn,
    "emnist_cnn": image_models.build_emnist_cnn,
    "conv_dropout_cnn": image_models.build_conv_dropout_cnn,
    "fedavg_cnn": image_models.build_fedavg_cnn,
    "three_filter_cnn": image_models.build_three_filter_cnn,
    "lenet": functools.partial(image_models.build_lenet, hidden_sizes=[9, 5]),
}
LAYERS = {
    "logistic_regression": ["logits"],
    "mlp": ["dense_1", "dense_2", "logits"],
    "mlp with dropout": ["dense_1", "logits"],
    "small_cnn": ["conv_1", "conv_2", "logits"],
    "emnist_cnn": ["conv_1", "conv_2", "dense_1", "logits"],
    "conv_dropout_cnn": ["conv_1", "conv_2", "dense_1", "logits"],
    "fedavg_cnn": ["conv_1", "conv_2", "dense_1", "logits"],
    "three_filter_cnn": ["conv_1", "dense_1", "dense_2", "logits"],
    "lenet": ["conv_1", "conv_2", "dense_1", "dense_2", "logits"],
}
WITH_DROPOUT = {
    "mlp with dropout",
    "emnist_cnn",
    "conv_dropout_cnn",
    "three_filter_cnn",
}


def test_logistic_regression_by_hand():
    model = image_models.build_logistic_regression((1, 2, 1), 2)
    weights = (
        np.array([[1.0, 2.0], [3.0, 4.0]], np.float32),
        np.array([0.5, -0.5], np.float32),
    )
    x = np.array([[[[1.0], [2.0]]]], np.float32)
    logits = model.predict(weights, tf.constant(x), None)
    assert logits.numpy().tolist() == [[7.5, 9.5]]
    loss = model.compute_loss(tf.constant([1]), logits)
    assert loss.numpy() == pytest.approx([np.log1p(np.exp(-2.0))], rel=1e-6)


def test_mlp_by_hand():
    model = image_models.build_mlp((1, 2, 1), 2, hidden_sizes=[2])
    weights = [[[1, 2], [3, -4]], [0.5, -0.5], [[1, 0], [2, 3]], [0, -1]]
    weights = tuple(np.array(weight, np.float32) for weight in weights)
    logits = model.predict(weights, tf.constant([[[[1.0], [2.0]]]]), None)
    # Hidden: relu(7.5, -6.5).
    assert logits.numpy().tolist() == [[7.5, -1.0]]


@pytest.mark.parametrize("name", BUILDERS)
def test_outputs_have_one_row_an_example(name):
    model = BUILDERS[name](SHAPE, 7)
    weights = model.initialize(np.random.default_rng(0))
    assert all(weight.dtype == np.float32 for weight in weights)
    for seed in (None, tf.constant([1, 2])):
        assert model.predict(weights, tf.zeros([3, *SHAPE]), seed).shape == [3, 7]


@pytest.mark.parametrize("name", BUILDERS)
def test_initial_weights_follow_the_generator(name):
    model = BUILDERS[name](SHAPE, 7)
    one, two = (model.initialize(np.random.default_rng(4)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", BUILDERS)
def test_dropout_is_on_in_training_alone(name):
    model = BUILDERS[name](SHAPE, 5)
    # Biases too, so that no layer is zero.
    rng = np.random.default_rng(0)
    weights = [
        rng.normal(scale=0.1, size=weight.shape).astype(np.float32)
        for weight in model.initialize(rng)
    ]
    x = tf.random.stateless_uniform([2, *SHAPE], [1, 1])
    seeds = (None, None, *(tf.constant([1, number]) for number in (0, 0, 1)))
    one, same, drawn, again, other = (
        model.predict(weights, x, seed).numpy() for seed in seeds
    )
    assert np.array_equal(one, same)
    assert np.array_equal(drawn, again)
    assert np.array_equal(one, drawn) is (name not in WITH_DROPOUT)
    assert np.array_equal(drawn, other) is (name not in WITH_DROPOUT)
    # TensorFlow cannot vectorize draws over clients' seeds.
    assert not (name in WITH_DROPOUT and model.stackable)


@pytest.mark.parametrize("name", BUILDERS)
def test_layers_are_named_and_return_what_the_next_multiplies(name, rng):
    model = BUILDERS[name](SHAPE, 7)
    assert [layer.name for layer in model.layers] == LAYERS[name]
    weights = [
        rng.normal(scale=0.1, size=weight.shape).astype(np.float32)
        for weight in model.initialize(rng)
    ]
    assert 2 * len(model.layers) == len(weights)
    x = tf.constant(rng.normal(size=[3, *SHAPE]), tf.float32)
    for index, layer in enumerate(model.layers):
        kernel, bias = weights[2 * index : 2 * index + 2]
        assert layer.num_weights == 2
        if index:
            assert x.shape[-1] == kernel.shape[-2]
            assert x.shape.rank == kernel.ndim
            # Behind its ReLU, and no ReLU behind the logits.
            assert np.min(x) == 0.0 < np.max(x)
        x = layer.apply((kernel, bias), x, None)
    assert x.shape == [3, 7] and np.min(x) < 0.0


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.5])
def test_a_dropout_rate_is_a_probability(rate):
    with pytest.raises(ValueError, match=r"`dropout_rate` must be in \(0, 1\)"):
        image_models.build_mlp(SHAPE, 10, hidden_sizes=[3], dropout_rate=rate)


@pytest.mark.parametrize(
    ("build", "shape", "num_classes", "head", "rest"),
    [
        (image_models.build_logistic_regression, SHAPE, 10, 7_850, 0),
        (image_models.build_small_cnn, SHAPE, 10, 15_690, 4_800),
        (image_models.build_emnist_cnn, SHAPE, 62, 7_998, 1_010_176),
        (image_models.build_conv_dropout_cnn, SHAPE, 10, 1_290, 1_198_592),
        (image_models.build_conv_dropout_cnn, SHAPE, 62, 7_998, 1_198_592),
        (image_models.build_fedavg_cnn, SHAPE, 10, 5_130, 1_658_240),
        (image_models.build_fedavg_cnn, SHAPE, 62, 31_806, 1_658_240),
        (image_models.build_three_filter_cnn, SHAPE, 10, 1_010, 2_129_130),
        (build_upcycled_mlp, SHAPE, 10, 1_970, 153_860),
        (
            functools.partial(image_models.build_mlp, hidden_sizes=[256, 128, 16]),
            SHAPE,
            10,
            170,
            235_920,
        ),
        (
            functools.partial(image_models.build_lenet, hidden_sizes=[384, 32]),
            (32, 32, 3),
            10,
            330,
            734_432,
        ),
        (
            functools.partial(image_models.build_lenet, hidden_sizes=[128, 32]),
            (32, 32, 3),
            100,
            3_300,
            316_384,
        ),
    ],
)
def test_parameters_of_head_and_rest(build, shape, num_classes, head, rest):
    model = build(shape, num_classes)
    sizes = [weight.size for weight in model.initialize(np.random.default_rng(0))]
    split = len(sizes) - model.layers[-1].num_weights
    assert (sum(sizes[split:]), sum(sizes[:split])) == (head, rest)
    assert model.num_parameters == head + rest
    outputs = model.predict(
        model.initialize(np.random.default_rng(0)), tf.zeros([2, *shape]), None
    )
    assert outputs.shape == [2, num_classes]


@pytest.mark.parametrize(
    ("build", "build_tff"),
    [
        (
            image_models.build_conv_dropout_cnn,
            emnist_models.create_conv_dropout_model,
        ),
        (
            image_models.build_fedavg_cnn,
            emnist_models.create_original_fedavg_cnn_model,
        ),
    ],
)
def test_networks_of_tff_give_its_probabilities(build, build_tff):
    model, theirs = build(SHAPE, 62), build_tff(only_digits=False, debug_seed=1)
    x = tf.random.stateless_uniform([3, *SHAPE], [1, 1])
    logits = model.predict([tf.constant(w) for w in theirs.get_weights()], x, None)
    np.testing.assert_allclose(tf.nn.softmax(logits), theirs(x), rtol=1e-5)
