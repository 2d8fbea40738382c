"""Models of images."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from simulation.model import (
    Initialize,
    Model,
    Predict,
    Weights,
    apply_dropout,
    build_classifier,
    draw_glorot,
    fold_seed,
)


def build_logistic_regression(
    image_shape: tuple[int, int, int], num_classes: int
) -> Model:
    """Returns multinomial logistic regression on flattened images, zero at first."""
    dim = math.prod(image_shape)

    def initialize(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        del rng
        return (
            np.zeros([dim, num_classes], np.float32),
            np.zeros([num_classes], np.float32),
        )

    def predict(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        del seed
        kernel, bias = weights
        return tf.reshape(x, [-1, dim]) @ kernel + bias

    return _build_image_classifier(
        "logistic_regression", initialize, predict, image_shape, stackable=True
    )


def build_mlp(
    image_shape: tuple[int, int, int],
    num_classes: int,
    *,
    hidden_sizes: Sequence[int],
    dropout_rate: float | None = None,
) -> Model:
    """Returns dense layers with ReLU between them, on flattened images.

    For 28x28x1 images and 10 classes: 155,830 parameters with one hidden layer of 196
    (with dropout 0.5, that of Yin et al. 2024 for FEMNIST), 236,090 with 256, 128 and
    16 (Shen et al. 2023 for EMNIST: 235,920, and 170 of the head).

    Args:
        image_shape: Height, width, channels.
        num_classes: The number of classes.
        hidden_sizes: Units of the hidden layers.
        dropout_rate: After each hidden layer; None: no dropout. With it clients do not
            train as a stack: TensorFlow cannot vectorize draws over their seeds.

    Raises:
        ValueError: If `dropout_rate` is not in (0, 1).
    """
    if dropout_rate is not None and not 0 < dropout_rate < 1:
        raise ValueError(f"`dropout_rate` must be in (0, 1). Found {dropout_rate}.")
    sizes = [math.prod(image_shape), *hidden_sizes, num_classes]

    def predict(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        x = tf.reshape(x, [-1, sizes[0]])
        return _apply_dense_layers(x, weights, seed, dropout_rate)

    return _build_image_classifier(
        "mlp",
        _build_glorot(_list_dense_shapes(sizes)),
        predict,
        image_shape,
        stackable=dropout_rate is None,
        num_head_weights=2,
    )


def build_small_cnn(image_shape: tuple[int, int, int], num_classes: int) -> Model:
    """Returns two 3x3 convolutions (16 and 32 filters, each pooled) and a dense layer.

    20,490 parameters for 28x28x1 images and 10 classes.
    """
    height, width, channels = image_shape
    flat = (height // 4) * (width // 4) * 32
    shapes = ([3, 3, channels, 16], [16], [3, 3, 16, 32], [32], [flat, num_classes])

    def predict(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        del seed
        for kernel, bias in (weights[0:2], weights[2:4]):
            x = _convolve(x, kernel, bias, "SAME")
            x = tf.nn.max_pool2d(x, 2, 2, "VALID")
        return tf.reshape(x, [-1, flat]) @ weights[4] + weights[5]

    return _build_image_classifier(
        "small_cnn", _build_glorot([*shapes, [num_classes]]), predict, image_shape
    )


def build_emnist_cnn(image_shape: tuple[int, int, int], num_classes: int) -> Model:
    """Returns the convolutional network of the distributed-DP experiments on EMNIST.

    Source: Kairouz, Liu and Steinke 2021, EMNIST experiments: convolution 3x3x32, max
    pooling, convolution 3x3x64, dropout 0.25, dense 128, dropout 0.5, dense. 1,018,174
    parameters for 28x28x1 images and 62 classes.
    """
    height, width, channels = image_shape
    flat = ((height - 2) // 2 - 2) * ((width - 2) // 2 - 2) * 64
    shapes = (
        [3, 3, channels, 32],
        [32],
        [3, 3, 32, 64],
        [64],
        [flat, 128],
        [128],
        [128, num_classes],
        [num_classes],
    )

    def predict(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        x = _convolve(x, weights[0], weights[1], "VALID")
        x = tf.nn.max_pool2d(x, 2, 2, "VALID")
        x = _convolve(x, weights[2], weights[3], "VALID")
        x = apply_dropout(tf.reshape(x, [-1, flat]), 0.25, fold_seed(seed, 0))
        x = tf.nn.relu(x @ weights[4] + weights[5])
        x = apply_dropout(x, 0.5, fold_seed(seed, 1))
        return x @ weights[6] + weights[7]

    return _build_image_classifier(
        "emnist_cnn", _build_glorot(shapes), predict, image_shape
    )


def build_conv_dropout_cnn(
    image_shape: tuple[int, int, int], num_classes: int
) -> Model:
    """Returns TFF's convolutional network with dropout for EMNIST.

    Source: Reddi et al. 2021 (TFF's `create_conv_dropout_model`): convolutions 3x3x32
    and 3x3x64, max pooling, dropout 0.25, dense 128, dropout 0.5, dense. 1,206,590
    parameters for 28x28x1 images and 62 classes.
    """
    height, width, channels = image_shape
    flat = ((height - 4) // 2) * ((width - 4) // 2) * 64
    shapes = [[3, 3, channels, 32], [32], [3, 3, 32, 64], [64]]
    shapes += _list_dense_shapes([flat, 128, num_classes])

    def predict(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        x = _convolve(x, weights[0], weights[1], "VALID")
        x = _convolve(x, weights[2], weights[3], "VALID")
        x = tf.reshape(tf.nn.max_pool2d(x, 2, 2, "VALID"), [-1, flat])
        x = apply_dropout(x, 0.25, fold_seed(seed, 0))
        x = tf.nn.relu(x @ weights[4] + weights[5])
        x = apply_dropout(x, 0.5, fold_seed(seed, 1))
        return x @ weights[6] + weights[7]

    return _build_image_classifier(
        "conv_dropout_cnn", _build_glorot(shapes), predict, image_shape
    )


def build_fedavg_cnn(image_shape: tuple[int, int, int], num_classes: int) -> Model:
    """Returns the convolutional network of the paper on federated averaging.

    Source: McMahan et al. 2017 (TFF's `create_original_fedavg_cnn_model`): convolutions
    5x5x32 and 5x5x64, each pooled, dense 512, dense. 1,663,370 parameters for 28x28x1
    images and 10 classes, 1,690,046 for 62.
    """
    height, width, channels = image_shape
    # Pooling of odd sizes rounds up, twice.
    flat = -(-height // 4) * -(-width // 4) * 64
    shapes = [[5, 5, channels, 32], [32], [5, 5, 32, 64], [64]]
    shapes += _list_dense_shapes([flat, 512, num_classes])

    def predict(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        del seed
        for kernel, bias in (weights[0:2], weights[2:4]):
            x = _convolve(x, kernel, bias, "SAME")
            x = tf.nn.max_pool2d(x, 2, 2, "SAME")
        return _apply_dense_layers(tf.reshape(x, [-1, flat]), weights[4:])

    return _build_image_classifier(
        "fedavg_cnn", _build_glorot(shapes), predict, image_shape
    )


def build_three_filter_cnn(
    image_shape: tuple[int, int, int], num_classes: int
) -> Model:
    """Returns the convolutional network of Upcycled-FL on FEMNIST.

    Source: Yin et al. 2024, appendix H.2: a convolution 3x3x3, then dense layers of
    1000 and 100, each with dropout, and a dense layer. 2,130,140 parameters for 28x28x1
    images and 10 classes. The paper names neither padding nor pooling, so there is
    none, and no rate: dropout is 0.5, as in its other networks.
    """
    height, width, channels = image_shape
    flat = (height - 2) * (width - 2) * 3
    shapes = [[3, 3, channels, 3], [3]]
    shapes += _list_dense_shapes([flat, 1000, 100, num_classes])

    def predict(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        x = _convolve(x, weights[0], weights[1], "VALID")
        return _apply_dense_layers(tf.reshape(x, [-1, flat]), weights[2:], seed, 0.5)

    return _build_image_classifier(
        "three_filter_cnn", _build_glorot(shapes), predict, image_shape
    )


def build_lenet(
    image_shape: tuple[int, int, int], num_classes: int, *, hidden_sizes: Sequence[int]
) -> Model:
    """Returns the convolutional network of CENTAUR; its last layer is the head.

    Source: Shen et al. 2023: convolutions 5x5x64 without padding, each pooled, and
    dense layers. For 32x32x3 images: hidden sizes 384 and 32 and 10 classes have
    734,432 + 330 parameters (CIFAR10), 128 and 32 and 100 classes have 316,384 + 3,300
    (CIFAR100).
    """
    height, width, channels = image_shape
    flat = ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2) * 64
    shapes = [[5, 5, channels, 64], [64], [5, 5, 64, 64], [64]]
    shapes += _list_dense_shapes([flat, *hidden_sizes, num_classes])

    def predict(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        del seed
        for kernel, bias in (weights[0:2], weights[2:4]):
            x = _convolve(x, kernel, bias, "VALID")
            x = tf.nn.max_pool2d(x, 2, 2, "VALID")
        return _apply_dense_layers(tf.reshape(x, [-1, flat]), weights[4:])

    return _build_image_classifier(
        "lenet", _build_glorot(shapes), predict, image_shape, num_head_weights=2
    )


def _convolve(
    x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor, padding: str
) -> tf.Tensor:
    """Returns a convolution with bias and ReLU."""
    # Not `+`: this op has a faster gradient.
    return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, padding), bias))


def _apply_dense_layers(
    x: tf.Tensor,
    weights: Weights,
    seed: tf.Tensor | None = None,
    dropout_rate: float | None = None,
) -> tf.Tensor:
    """Returns dense layers of `weights` (kernel, bias, ...), ReLU between them."""
    x = x @ weights[0] + weights[1]
    for layer in range(2, len(weights), 2):
        x = tf.nn.relu(x)
        if dropout_rate is not None:
            x = apply_dropout(x, dropout_rate, fold_seed(seed, layer // 2 - 1))
        x = x @ weights[layer] + weights[layer + 1]
    return x


def _list_dense_shapes(sizes: Sequence[int]) -> list[list[int]]:
    """Returns the shapes of the kernels and biases between layers of these sizes."""
    return [
        shape
        for inputs, outputs in itertools.pairwise(sizes)
        for shape in ([inputs, outputs], [outputs])
    ]


def _build_glorot(shapes: Sequence[Sequence[int]]) -> Initialize:
    """Returns an initializer: Glorot uniform for kernels, zero for biases."""

    def initialize(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return tuple(draw_glorot(rng, shape) for shape in shapes)

    return initialize


def _build_image_classifier(
    name: str,
    initialize: Initialize,
    predict: Predict,
    image_shape: tuple[int, int, int],
    **kwargs: Any,
) -> Model:
    x_spec = tf.TensorSpec([None, *image_shape], tf.float32)
    return build_classifier(name, initialize, predict, x_spec, **kwargs)
