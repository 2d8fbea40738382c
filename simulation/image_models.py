"""Models of images.

Their layers are named conv_1, conv_2, ..., dense_1, dense_2, ... and, the last, logits.
What a layer returns is what the next one multiplies: behind its weights a layer has its
ReLU, pooling, flattening and dropout.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from simulation.model import (
    Initialize,
    Layer,
    Model,
    Weights,
    apply_dropout,
    build_classifier,
    draw_glorot,
    fold_seed,
)

# Operations without weights: (x, seed of the model) -> outputs.
_Operation = Callable[[tf.Tensor, tf.Tensor | None], tf.Tensor]


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

    layers = _flatten_images(_list_dense_layers(0), image_shape)
    return _build_image_classifier(
        "logistic_regression", initialize, layers, image_shape, stackable=True
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
    16 (Shen et al. 2023 for EMNIST: 235,920, and 170 of the head, "logits").

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
    layers = _list_dense_layers(len(hidden_sizes), dropout_rate)
    return _build_image_classifier(
        "mlp",
        _build_glorot(_list_dense_shapes(sizes)),
        _flatten_images(layers, image_shape),
        image_shape,
        stackable=dropout_rate is None,
    )


def build_small_cnn(image_shape: tuple[int, int, int], num_classes: int) -> Model:
    """Returns two 3x3 convolutions (16 and 32 filters, each pooled) and a dense layer.

    20,490 parameters for 28x28x1 images and 10 classes.
    """
    height, width, channels = image_shape
    flat = (height // 4) * (width // 4) * 32
    shapes = ([3, 3, channels, 16], [16], [3, 3, 16, 32], [32], [flat, num_classes])
    layers = (
        _build_convolution("conv_1", "SAME", _pool("VALID")),
        _build_convolution("conv_2", "SAME", _pool("VALID"), _flatten(flat)),
        _build_dense("logits"),
    )
    return _build_image_classifier(
        "small_cnn", _build_glorot([*shapes, [num_classes]]), layers, image_shape
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
    layers = (
        _build_convolution("conv_1", "VALID", _pool("VALID")),
        _build_convolution("conv_2", "VALID", _flatten(flat), _drop(0.25, 0)),
        _build_dense("dense_1", _rectify, _drop(0.5, 1)),
        _build_dense("logits"),
    )
    return _build_image_classifier(
        "emnist_cnn", _build_glorot(shapes), layers, image_shape
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
    layers = (
        _build_convolution("conv_1", "VALID"),
        _build_convolution(
            "conv_2", "VALID", _pool("VALID"), _flatten(flat), _drop(0.25, 0)
        ),
        _build_dense("dense_1", _rectify, _drop(0.5, 1)),
        _build_dense("logits"),
    )
    return _build_image_classifier(
        "conv_dropout_cnn", _build_glorot(shapes), layers, image_shape
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
    layers = (
        _build_convolution("conv_1", "SAME", _pool("SAME")),
        _build_convolution("conv_2", "SAME", _pool("SAME"), _flatten(flat)),
        *_list_dense_layers(1),
    )
    return _build_image_classifier(
        "fedavg_cnn", _build_glorot(shapes), layers, image_shape
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
    layers = (
        _build_convolution("conv_1", "VALID", _flatten(flat)),
        *_list_dense_layers(2, 0.5),
    )
    return _build_image_classifier(
        "three_filter_cnn", _build_glorot(shapes), layers, image_shape
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
    layers = (
        _build_convolution("conv_1", "VALID", _pool("VALID")),
        _build_convolution("conv_2", "VALID", _pool("VALID"), _flatten(flat)),
        *_list_dense_layers(len(hidden_sizes)),
    )
    return _build_image_classifier("lenet", _build_glorot(shapes), layers, image_shape)


def _build_convolution(name: str, padding: str, *operations: _Operation) -> Layer:
    """Returns a convolution with bias and ReLU, then `operations`."""

    def apply(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        kernel, bias = weights
        # Not `+`: this op has a faster gradient.
        x = tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, padding), bias)
        return _apply_operations((_rectify, *operations), x, seed)

    return Layer(name=name, num_weights=2, apply=apply)


def _build_dense(name: str, *operations: _Operation) -> Layer:
    """Returns a dense layer with bias, then `operations`."""

    def apply(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        kernel, bias = weights
        return _apply_operations(operations, x @ kernel + bias, seed)

    return Layer(name=name, num_weights=2, apply=apply)


def _list_dense_layers(
    num_hidden: int, dropout_rate: float | None = None
) -> list[Layer]:
    """Returns hidden layers with ReLU, and dropout if there is a rate, and logits."""
    hidden = []
    for index in range(num_hidden):
        dropout = [] if dropout_rate is None else [_drop(dropout_rate, index)]
        hidden.append(_build_dense(f"dense_{index + 1}", _rectify, *dropout))
    return [*hidden, _build_dense("logits")]


def _flatten_images(
    layers: Sequence[Layer], image_shape: tuple[int, int, int]
) -> list[Layer]:
    """Returns the layers, the first of which flattens its inputs."""
    first, *others = layers
    flatten = _flatten(math.prod(image_shape))

    def apply(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        return first.apply(weights, flatten(x, seed), seed)

    return [dataclasses.replace(first, apply=apply), *others]


def _apply_operations(
    operations: Sequence[_Operation], x: tf.Tensor, seed: tf.Tensor | None
) -> tf.Tensor:
    for operation in operations:
        x = operation(x, seed)
    return x


def _rectify(x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
    del seed
    return tf.nn.relu(x)


def _pool(padding: str) -> _Operation:
    """Returns max pooling of 2x2 pixels."""
    return lambda x, seed: tf.nn.max_pool2d(x, 2, 2, padding)


def _flatten(size: int) -> _Operation:
    """Returns what makes of each example a vector of this size."""
    return lambda x, seed: tf.reshape(x, [-1, size])


def _drop(rate: float, number: int) -> _Operation:
    """Returns dropout with a number of its own in the model."""
    return lambda x, seed: apply_dropout(x, rate, fold_seed(seed, number))


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
    layers: Sequence[Layer],
    image_shape: tuple[int, int, int],
    **kwargs: Any,
) -> Model:
    x_spec = tf.TensorSpec([None, *image_shape], tf.float32)
    return build_classifier(name, initialize, layers, x_spec, **kwargs)
