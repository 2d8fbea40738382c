"""Models as pure functions of their weights.

A model holds no variables: its weights are an argument, so that a client's work is a
plain loop without state, and dropout draws from a seed that is an argument too.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

Weights = Sequence[tf.Tensor]
# (labels, outputs) -> per-example values of shape [batch].
PerExample = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model as pure functions.

    Attributes:
        name: Its name in flags and outputs.
        initialize: Draws the initial weights, float32 arrays in a fixed order.
        predict: (weights, x, seed) -> outputs of shape [batch, ...]. `seed` is an
            int32[2] tensor in training, where dropout is on, and None elsewhere.
        compute_loss: (labels, outputs) -> the loss of each example.
        metrics: By name, (labels, outputs) -> the value of each example. A metric is
            the mean over examples.
        example_spec: The specs of "x" and "y" of a batch.
        stackable: Whether many clients may train as one stack, which pays where
            `predict` is dense algebra without dropout and the weights are few. An
            example's outputs must not depend on the others in the batch, as with batch
            normalization: some are only there to fill a batch.
    """

    name: str
    initialize: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    predict: Callable[[Weights, tf.Tensor, tf.Tensor | None], tf.Tensor]
    compute_loss: PerExample
    metrics: Mapping[str, PerExample]
    example_spec: Mapping[str, tf.TensorSpec]
    stackable: bool = False

    @property
    def num_parameters(self) -> int:
        """The number of trainable parameters."""
        weights = self.initialize(np.random.default_rng(0))
        return sum(weight.size for weight in weights)


def compute_cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the cross entropy of each example, [batch], from integer labels."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def compute_accuracy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns 1 for each example whose largest logit is the label's, else 0."""
    predicted = tf.argmax(logits, axis=-1, output_type=labels.dtype)
    # Not `==`: inside a TFF computation that would compare the objects.
    return tf.cast(tf.equal(predicted, labels), tf.float32)


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

    return _build_classifier(
        "logistic_regression", initialize, predict, image_shape, stackable=True
    )


def build_mlp(
    image_shape: tuple[int, int, int], num_classes: int, *, hidden_sizes: Sequence[int]
) -> Model:
    """Returns dense layers with ReLU between them, on flattened images.

    155,830 parameters for 28x28x1 images, one hidden layer of 196 and 10 classes.
    """
    sizes = [math.prod(image_shape), *hidden_sizes, num_classes]
    shapes = [
        shape
        for inputs, outputs in itertools.pairwise(sizes)
        for shape in ([inputs, outputs], [outputs])
    ]

    def predict(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        del seed
        x = tf.reshape(x, [-1, sizes[0]]) @ weights[0] + weights[1]
        for layer in range(2, len(weights), 2):
            x = tf.nn.relu(x) @ weights[layer] + weights[layer + 1]
        return x

    return _build_classifier(
        "mlp", _build_glorot(shapes), predict, image_shape, stackable=True
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

    return _build_classifier(
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
        x = apply_dropout(tf.reshape(x, [-1, flat]), 0.25, _fold(seed, 0))
        x = tf.nn.relu(x @ weights[4] + weights[5])
        x = apply_dropout(x, 0.5, _fold(seed, 1))
        return x @ weights[6] + weights[7]

    return _build_classifier("emnist_cnn", _build_glorot(shapes), predict, image_shape)


def apply_dropout(x: tf.Tensor, rate: float, seed: tf.Tensor | None) -> tf.Tensor:
    """Zeroes each entry with probability `rate` and rescales the others.

    Args:
        x: The activations.
        rate: The probability, in [0, 1).
        seed: An int32[2] seed, or None outside training, where x is returned.
    """
    if seed is None:
        return x
    kept = tf.random.stateless_uniform(tf.shape(x), seed) >= rate
    return tf.where(kept, x / (1.0 - rate), 0.0)


def _convolve(
    x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor, padding: str
) -> tf.Tensor:
    """Returns a convolution with bias and ReLU."""
    # Not `+`: this op has a faster gradient.
    return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, padding), bias))


def _fold(seed: tf.Tensor | None, layer: int) -> tf.Tensor | None:
    if seed is None:
        return None
    return tf.random.experimental.stateless_fold_in(seed, layer)


def _build_glorot(
    shapes: Sequence[Sequence[int]],
) -> Callable[[np.random.Generator], tuple[np.ndarray, ...]]:
    """Returns an initializer: Glorot uniform for kernels, zero for biases."""

    def initialize(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return tuple(_draw_glorot(rng, shape) for shape in shapes)

    return initialize


def _draw_glorot(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    if len(shape) == 1:
        return np.zeros(shape, np.float32)
    receptive = math.prod(shape[:-2])
    limit = math.sqrt(6.0 / (receptive * (shape[-2] + shape[-1])))
    return rng.uniform(-limit, limit, shape).astype(np.float32)


def _build_classifier(
    name: str,
    initialize: Callable[[np.random.Generator], tuple[np.ndarray, ...]],
    predict: Callable[[Weights, tf.Tensor, tf.Tensor | None], tf.Tensor],
    image_shape: tuple[int, int, int],
    *,
    stackable: bool = False,
) -> Model:
    return Model(
        name=name,
        initialize=initialize,
        predict=predict,
        compute_loss=compute_cross_entropy,
        metrics={"accuracy": compute_accuracy},
        example_spec=collections.OrderedDict(
            x=tf.TensorSpec([None, *image_shape], tf.float32),
            y=tf.TensorSpec([None], tf.int32),
        ),
        stackable=stackable,
    )
