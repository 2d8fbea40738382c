"""Models from Keras: a Sequential or functional model as pure functions of weights.

`tff.learning.models.functional_model_from_keras` puts tensors in the place of a Keras
model's variables. Here it does so for each layer, so that the model can be split.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulation.model import Layer, Model, Weights, build_classifier

# Layers that many clients can train as one stack, as they do those of `build_mlp`.
_STACKABLE = (
    tf.keras.layers.Activation,
    tf.keras.layers.Dense,
    tf.keras.layers.Flatten,
    tf.keras.layers.InputLayer,
    tf.keras.layers.ReLU,
    tf.keras.layers.Reshape,
)


def build_keras_model(
    build: Callable[[], tf.keras.Model], *, name: str, x_spec: tf.TensorSpec
) -> Model:
    """Returns a classifier whose logits a Keras model computes.

    Its layers are the Keras layers with weights, by their names, each with those that
    follow it and have none; what precedes the first belongs to that. Name them: the
    names that Keras gives count up as long as a process lives.

    Guarantees: outputs and gradients are those of the Keras model. Initial weights are
    drawn by the initializers of its layers, with seeds from the generator; the values
    that `build` left in the variables are not used.

    Not guaranteed: a stack of clients is compiled anew, so that its sums may be rounded
    otherwise than a client's alone.

    Refused, since TFF's function has no argument for them: dropout and other layers
    that draw (it has no seed; `image_models.build_mlp` has dropout with one), weights
    that are not trained, as of batch normalization (use group normalization), and
    losses of layers, as of regularizers (use weight decay). Refused, since layers would
    not be what a model is made of: more than one tensor between them, as with residual
    connections, layers that are used twice, and masks.

    Args:
        build: Returns the Keras model, Sequential or functional; called once. What it
            ends in are logits: no softmax.
        name: The model's name in flags and outputs.
        x_spec: The spec of "x" of a batch, [None, ...].

    Raises:
        ValueError: If the Keras model is refused.
    """
    keras_model = _connect(build(), x_spec)
    chain = _list_chain(keras_model)
    for layer in chain:
        _check_weights(layer)
    parts = [_Part.from_layers(layers) for layers in _group(chain)]

    def initialize(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return tuple(weight for part in parts for weight in part.draw_weights(rng))

    one, two = (initialize(np.random.default_rng(0)) for _ in range(2))
    if not all(map(np.array_equal, one, two)):
        raise ValueError(
            "`build` must return a model whose initializers draw from their `seed`. "
            f"Found other weights from the same seeds in {name!r}."
        )
    return build_classifier(
        name,
        initialize,
        [part.build_layer() for part in parts],
        x_spec,
        stackable=all(type(layer) in _STACKABLE for layer in keras_model.layers),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """A layer with weights and those around it without, as a Keras model of its own."""

    name: str
    keras_model: tf.keras.Model

    @classmethod
    def from_layers(cls, layers: Sequence[tf.keras.layers.Layer]) -> "_Part":
        [name] = (layer.name for layer in layers if layer.weights)
        inputs, outputs = layers[0].get_input_at(0), layers[-1].get_output_at(0)
        return cls(name=name, keras_model=tf.keras.Model(inputs, outputs))

    def draw_weights(self, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Draws initial weights, in the order in which the layer creates them."""

        def clone(layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
            config = _fill_seeds(layer.get_config(), rng)
            return type(layer).from_config(config)

        seeded = tf.keras.models.clone_model(self.keras_model, clone_function=clone)
        trainable, _ = _use_tff(seeded, lambda functional: functional.initial_weights)
        return tuple(trainable)

    def build_layer(self) -> Layer:
        """Returns the layer, a pure function of its weights.

        Raises:
            ValueError: If it draws or keeps something in training.
        """
        training, plain = _use_tff(
            self.keras_model,
            lambda functional: [
                _trace(functional, self.keras_model.inputs[0], flag)
                for flag in (True, False)
            ],
        )
        if names := _list_impure(training):
            raise ValueError(
                f"`build` must return a model without layers that draw, such as "
                f"dropout, or that keep something: there is no seed for them. Found "
                f"the operations {names} behind layer {self.name!r}."
            )

        def apply(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
            function = plain if seed is None else training
            weights = [tf.convert_to_tensor(weight) for weight in weights]
            return function(weights, tf.convert_to_tensor(x))

        num_weights = len(self.keras_model.trainable_variables)
        return Layer(name=self.name, num_weights=num_weights, apply=apply)


def _connect(keras_model: tf.keras.Model, x_spec: tf.TensorSpec) -> tf.keras.Model:
    """Returns the model with an input of this spec, which a Sequential may lack."""
    if not isinstance(keras_model, tf.keras.Model):
        raise ValueError(f"`build` must return a Keras model. Found {keras_model!r}.")
    if isinstance(keras_model, tf.keras.Sequential):
        known = (keras_model.inputs or [x_spec])[0].shape
        if known.is_compatible_with(x_spec.shape):
            # Not on its own input, which may be made up: an embedding's is of floats.
            inputs = tf.keras.Input(x_spec.shape[1:], dtype=x_spec.dtype)
            layers = [type(n).from_config(n.get_config()) for n in keras_model.layers]
            keras_model = tf.keras.Sequential([inputs, *layers])
    inputs, outputs = keras_model.inputs or [], keras_model.outputs or []
    if (len(inputs), len(outputs)) != (1, 1):
        raise ValueError(
            "`build` must return a Sequential or functional model of one input and one "
            f"output. Found {len(inputs)} and {len(outputs)} in {keras_model.name!r}."
        )
    [found] = inputs
    if (found.dtype, found.shape.as_list()) != (x_spec.dtype, x_spec.shape.as_list()):
        raise ValueError(
            "`x_spec` must be that of the model's input, "
            f"{found.dtype.name}{found.shape.as_list()}. Found "
            f"{x_spec.dtype.name}{x_spec.shape.as_list()}."
        )
    return keras_model


def _list_chain(keras_model: tf.keras.Model) -> list[tf.keras.layers.Layer]:
    """Returns the layers, each of which has the one before it for its only input."""
    chain, [tensor] = [], keras_model.inputs
    for layer in keras_model.layers:
        if isinstance(layer, tf.keras.layers.InputLayer):
            continue
        if len(layer.inbound_nodes) != 1 or layer.get_input_at(0) is not tensor:
            raise ValueError(
                "`build` must return a model in which one tensor goes from each layer "
                f"to the next. Found layer {layer.name!r} of {keras_model.name!r}, "
                "which has other inputs or is used more than once."
            )
        chain.append(layer)
        tensor = layer.get_output_at(0)
    if not any(layer.weights for layer in chain):
        raise ValueError(
            f"`build` must return a model with weights. Found none in "
            f"{keras_model.name!r}."
        )
    return chain


def _check_weights(layer: tf.keras.layers.Layer) -> None:
    if layer.non_trainable_weights:
        raise ValueError(
            "`build` must return a model that trains all of its weights: batch "
            "normalization and frozen layers do not. Found weights in layer "
            f"{layer.name!r} that are not trained: "
            f"{[weight.name for weight in layer.non_trainable_weights]}."
        )
    if layer.losses:
        raise ValueError(
            "`build` must return a model whose layers add nothing to the loss, as "
            f"regularizers do. Found {len(layer.losses)} losses in layer "
            f"{layer.name!r}."
        )
    if wrong := [w.dtype.name for w in layer.weights if w.dtype != tf.float32]:
        raise ValueError(
            f"`build` must return a model of float32 weights. Found {wrong[0]} in "
            f"layer {layer.name!r}."
        )


def _group(
    chain: Sequence[tf.keras.layers.Layer],
) -> list[list[tf.keras.layers.Layer]]:
    """Returns groups of one layer with weights each; the first may begin without."""
    groups: list[list[tf.keras.layers.Layer]] = [[]]
    for layer in chain:
        if layer.weights and any(before.weights for before in groups[-1]):
            last = groups[-1][-1]
            if last.output_mask is not None:
                raise ValueError(
                    "`build` must return a model in which one tensor goes from each "
                    f"layer to the next. Found a mask behind layer {last.name!r}."
                )
            groups.append([])
        groups[-1].append(layer)
    return groups


def _fill_seeds(config: Any, rng: np.random.Generator) -> Any:
    """Returns a layer's config in which every seed that is None is drawn."""
    if isinstance(config, dict):
        return {
            key: int(rng.integers(2**31))
            if key == "seed" and value is None
            else _fill_seeds(value, rng)
            for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        return [_fill_seeds(value, rng) for value in config]
    return config


def _use_tff(
    keras_model: tf.keras.Model,
    function: Callable[[tff.learning.models.FunctionalModel], Any],
) -> Any:
    """Returns what a function makes of TFF's functional model of a Keras model."""
    [inputs], [outputs] = keras_model.inputs, keras_model.outputs
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in (inputs, outputs)]
    try:
        return function(
            tff.learning.models.functional_model_from_keras(
                keras_model,
                # Not used, and must be one.
                tf.keras.losses.MeanSquaredError(),
                collections.OrderedDict(zip("xy", specs, strict=True)),
            )
        )
    finally:
        # In the graphs of TFF, Keras turns its classes into those of TensorFlow 1, and
        # models made before do not work until the classes are used outside again.
        tf.keras.models.clone_model(keras_model)


def _trace(
    functional: tff.learning.models.FunctionalModel,
    inputs: tf.Tensor,
    is_training: bool,
) -> Callable[[Weights, tf.Tensor], tf.Tensor]:
    """Returns the prediction as a function that can be called outside graphs too."""

    def predict(weights: Weights, x: tf.Tensor) -> tf.Tensor:
        return functional.predict_on_batch((weights, ()), x, is_training)

    specs = [tf.TensorSpec(w.shape, w.dtype) for w in functional.initial_weights[0]]
    x_spec = tf.TensorSpec(inputs.shape, inputs.dtype)
    # TFF refuses to trace it elsewhere than in a graph.
    with tf.Graph().as_default():
        return tf.function(predict).get_concrete_function(specs, x_spec)


def _list_impure(function: Any) -> list[str]:
    """Returns the types of a traced function's operations that draw or have effects."""
    definition = function.graph.as_graph_def()
    nodes = [*definition.node]
    for inner in definition.library.function:
        nodes.extend(inner.node_def)
    drawing = {node.op for node in nodes if "Random" in node.op}
    if drawing:
        return sorted(drawing)
    operations = function.graph.get_operations()
    return sorted({one.type for one in operations if one.op_def.is_stateful})
