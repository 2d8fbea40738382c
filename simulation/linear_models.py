"""Linear models for Upcycled-FL: its authors' loss, and one for exact guarantees."""

import collections
import dataclasses
import math

import numpy as np
import tensorflow as tf

from simulation.image_models import build_logistic_regression
from simulation.model import Layer, LayerChain, Model, Weights

# The name of the model that has an exact solver.
ONE_OUTPUT = "one_output_logistic_regression"
# Shrinks scaled features by more than float32 rounds.
_SHRINKING = 1.0 - 2.0**-22


def build_double_softmax_regression(
    image_shape: tuple[int, int, int], num_classes: int
) -> Model:
    """Returns logistic regression whose loss applies a second softmax, zero at first.

    Source: the program of Yin et al. 2024 (Upcycled-FL): its model ends in a softmax,
    and its loss takes the probabilities for logits. The loss of an example lies between
    log(1 + (num_classes - 1) / e) and log(e + num_classes - 1), and its gradient
    vanishes also where the model is sure and wrong. It is kept to reproduce their
    table; `build_logistic_regression` has the proper loss.

    Args:
        image_shape: Height, width, channels; images are flattened.
        num_classes: The number of classes.
    """
    proper = build_logistic_regression(image_shape, num_classes)

    def apply(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        return tf.nn.softmax(proper.predict(weights, x, seed))

    layers = (Layer(name="logits", num_weights=2, apply=apply),)
    return dataclasses.replace(
        proper,
        name="double_softmax_regression",
        predict=LayerChain(layers=layers),
        layers=layers,
    )


def build_one_output_logistic_regression(image_shape: tuple[int, int, int]) -> Model:
    """Returns logistic regression of two classes with one output, zero at first.

    The weights are one vector w, the bias last. An example's output is s = <w, z> with
    z of `scale_features`, and its loss log(1 + exp(-(2 y - 1) s)).

    Guarantees: for every example, whatever its features, the loss is convex in w,
    1-Lipschitz and 1/4-smooth, as theorem C.2 of Yin et al. 2024 needs. Labels other
    than 1 count as 0.

    Args:
        image_shape: Height, width, channels; images are flattened.
    """
    dim = math.prod(image_shape)

    def initialize(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        del rng
        return (np.zeros([dim + 1], np.float32),)

    def apply(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        del seed
        (vector,) = weights
        features = scale_features(tf.reshape(x, [-1, dim]))
        return tf.linalg.matvec(features, vector)

    layers = (Layer(name="logits", num_weights=1, apply=apply),)
    return Model(
        name=ONE_OUTPUT,
        initialize=initialize,
        predict=LayerChain(layers=layers),
        compute_loss=compute_logistic_loss,
        metrics={"accuracy": compute_one_output_accuracy},
        example_spec=collections.OrderedDict(
            x=tf.TensorSpec([None, *image_shape], tf.float32),
            y=tf.TensorSpec([None], tf.int32),
        ),
        stackable=True,
        layers=layers,
    )


def scale_features(x: tf.Tensor) -> tf.Tensor:
    """Returns z / max(1, ||z||) of z = [x, 1], each example's own.

    Guarantees: ||z|| <= 1 also in exact arithmetic on the float32 numbers returned,
    for every x: they are shrunk by 2**-22 more, and an example that is not finite
    becomes 0.

    Args:
        x: [batch, ...] float32; flattened. Only the batch's size may be unknown.

    Returns:
        [batch, dim + 1] float32, the bias's feature last.
    """
    dim = math.prod(x.shape[1:])
    flat = tf.reshape(tf.cast(x, tf.float64), [-1, dim])
    # float64 holds the square of every float32.
    # `ones_like` cannot be vectorized over a stack of clients of unknown sizes.
    z = tf.concat([flat, tf.zeros_like(flat[:, :1]) + 1.0], axis=1)
    norm = tf.norm(z, axis=1, keepdims=True)
    factor = tf.where(tf.math.is_finite(norm), _SHRINKING / tf.maximum(norm, 1.0), 0.0)
    # 0 times NaN or infinity is 0 here.
    return tf.cast(tf.math.multiply_no_nan(z, factor), tf.float32)


def compute_logistic_loss(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns log(1 + exp(-(2 y - 1) s)) of each example, [batch]."""
    return tf.nn.softplus(tf.where(tf.equal(labels, 1), -outputs, outputs))


def compute_one_output_accuracy(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns 1 for each example whose output has its label's sign; 0 is label 0."""
    return tf.cast(tf.equal(outputs > 0, tf.equal(labels, 1)), tf.float32)
