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
class Layer:
    """A named part of a model: operations that have weights, and some that follow them.

    Attributes:
        name: Its name, by which a model is split.
        num_weights: How many arrays its weights are, at least one.
        apply: (its own weights, its inputs, seed) -> its outputs, [batch, ...]. `seed`
            is that of the whole model, of which a layer with dropout makes its own.
    """

    name: str
    num_weights: int
    apply: Predict

    def __post_init__(self) -> None:
        if self.num_weights < 1:
            raise ValueError(
                f"`num_weights` of layer {self.name!r} must be positive. Found "
                f"{self.num_weights}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerChain:
    """The function that layers in a row are: a `predict` of their weights in a row.

    Two of the same layers are equal.

    Attributes:
        layers: In order. No two may have one name.
    """

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            raise ValueError(f"`layers` must have names that differ. Found {names}.")

    @property
    def num_weights(self) -> int:
        """How many arrays the weights are."""
        return sum(layer.num_weights for layer in self.layers)

    def __call__(
        self, weights: Weights, x: tf.Tensor, seed: tf.Tensor | None
    ) -> tf.Tensor:
        """Returns the outputs of the last layer, [batch, ...]; x where there is none.

        Args:
            weights: Those of all layers.
            x: The first layer's inputs, [batch, ...].
            seed: As `Model.predict` takes it.

        Raises:
            ValueError: If the number of weights is not that of the layers.
        """
        if len(weights) != self.num_weights:
            raise ValueError(
                f"`weights` must be {self.num_weights} arrays. Found {len(weights)}."
            )
        start = 0
        for layer in self.layers:
            own = weights[start : start + layer.num_weights]
            x = layer.apply(own, x, seed)
            start += layer.num_weights
        return x


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
        layers: What `predict` is made of, in order: it is then their `LayerChain`. The
            head, the part that a client may keep to itself, begins at one of them. ():
            the model cannot be taken apart.
    """

    name: str
    initialize: Initialize
    predict: Predict
    compute_loss: PerExample
    metrics: Mapping[str, PerExample]
    example_spec: Mapping[str, tf.TensorSpec]
    stackable: bool = False
    metric_weights: PerExample | None = None
    layers: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        if self.layers and self.predict != LayerChain(layers=self.layers):
            raise ValueError(
                "`predict` must be the `LayerChain` of `layers`; without `layers` it "
                f"may be any function. Found {self.predict!r} in model {self.name!r}."
            )

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
    layers: Sequence[Layer],
    x_spec: tf.TensorSpec,
    *,
    stackable: bool = False,
) -> Model:
    """Returns the model of logits: cross entropy from int32 labels, and accuracy.

    Args:
        name: The model's.
        initialize: Draws the initial weights.
        layers: They return the logits, [batch, classes].
        x_spec: The spec of "x" of a batch.
        stackable: Whether many clients may train as one stack.
    """
    return Model(
        name=name,
        initialize=initialize,
        predict=LayerChain(layers=tuple(layers)),
        compute_loss=compute_cross_entropy,
        metrics={"accuracy": compute_accuracy},
        example_spec=collections.OrderedDict(
            x=x_spec, y=tf.TensorSpec([None], tf.int32)
        ),
        stackable=stackable,
        layers=tuple(layers),
    )
