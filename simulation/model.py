"""Models as pure functions of their weights.

A model holds no variables: its weights are an argument, so that a client's work is a
plain loop without state, and dropout draws from a seed that is an argument too.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

Weights = Sequence[tf.Tensor]
# Draws initial weights, float32 arrays in a fixed order.
Initialize = Callable[[np.random.Generator], tuple[np.ndarray, ...]]
# (weights, x, seed) -> outputs of shape [batch, ...].
Predict = Callable[[Weights, tf.Tensor, tf.Tensor | None], tf.Tensor]
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
            the mean over examples, or with `metric_weights` the sum of the examples'
            values over the sum of their weights.
        example_spec: The specs of "x" and "y" of a batch.
        stackable: Whether many clients may train as one stack, which pays where
            `predict` is dense algebra without dropout and the weights are few. An
            example's outputs must not depend on the others in the batch, as with batch
            normalization: some are only there to fill a batch.
        metric_weights: (labels, outputs) -> the weight of each example in the metrics,
            such as the tokens of a sentence that count; a metric's value of an example
            is then a sum, such as the tokens that are right. None: 1 an example.
        num_head_weights: How many of the last weights are the head, the part that a
            client may keep to itself; the others are the representation. 0: no head.
    """

    name: str
    initialize: Initialize
    predict: Predict
    compute_loss: PerExample
    metrics: Mapping[str, PerExample]
    example_spec: Mapping[str, tf.TensorSpec]
    stackable: bool = False
    metric_weights: PerExample | None = None
    num_head_weights: int = 0

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


def compute_means(sums: Mapping[str, float]) -> dict[str, float | None]:
    """Returns the means of the loss and the metrics.

    Args:
        sums: "num_examples"; sums over the examples of the loss, of the metrics and,
            for a model that has them, of the "metric_weight"s.

    Returns:
        The loss over the examples and each metric over its weights, by name; None where
        there is nothing to divide by.
    """
    num_examples = float(sums["num_examples"])
    weight = float(sums.get("metric_weight", num_examples))
    means: dict[str, float | None] = {}
    for name, value in sums.items():
        if name not in ("num_examples", "metric_weight"):
            divisor = num_examples if name == "loss" else weight
            means[name] = float(value) / divisor if divisor else None
    return means


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


def fold_seed(seed: tf.Tensor | None, layer: int) -> tf.Tensor | None:
    """Returns the seed of one layer's dropout; None from None."""
    if seed is None:
        return None
    return tf.random.experimental.stateless_fold_in(seed, layer)


def draw_glorot(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Draws a kernel, Glorot uniform; a bias, which has one axis, is zero."""
    if len(shape) == 1:
        return np.zeros(shape, np.float32)
    receptive = math.prod(shape[:-2])
    limit = math.sqrt(6.0 / (receptive * (shape[-2] + shape[-1])))
    return rng.uniform(-limit, limit, shape).astype(np.float32)


def build_classifier(
    name: str,
    initialize: Initialize,
    predict: Predict,
    x_spec: tf.TensorSpec,
    *,
    stackable: bool = False,
    num_head_weights: int = 0,
) -> Model:
    """Returns the model of logits: cross entropy from int32 labels, and accuracy."""
    return Model(
        name=name,
        initialize=initialize,
        predict=predict,
        compute_loss=compute_cross_entropy,
        metrics={"accuracy": compute_accuracy},
        example_spec=collections.OrderedDict(
            x=x_spec, y=tf.TensorSpec([None], tf.int32)
        ),
        stackable=stackable,
        num_head_weights=num_head_weights,
    )
