"""A model in two parts: a representation that clients share, and a head of their own.

Source: Shen et al. 2023 (CENTAUR), algorithm 1: the model is b, the representation, and
w_i, client i's head. Only b is ever sent.
"""

import dataclasses
import math

import numpy as np
import tensorflow as tf

from simulation.model import LayerChain, Model, Predict, Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitModel:
    """A model that is split at a layer: `build_split_model` builds it.

    Guarantees: for all weights, x and seeds, `apply_head` of `compute_features` is
    `model.predict`, bit for bit: they are the same operations in the same order.

    Dropout between the last layer of the representation and the head is part of the
    features: features that are computed without a seed, once for all steps of a head,
    have none.

    Attributes:
        model: The whole model: its weights are the representation's, then the head's.
        split_layer: The name of the head's first layer.
        num_representation_weights: How many of the first arrays of the weights are the
            representation.
        num_head_weights: How many of the last are the head.
        num_representation_parameters: The numbers in the representation.
        num_head_parameters: The numbers in the head.
        compute_features: (the representation's weights, x, seed) -> what the head
            takes for its inputs, [batch, ...].
        apply_head: (the head's weights, features, seed) -> the model's outputs.
    """

    model: Model
    split_layer: str
    num_representation_weights: int
    num_head_weights: int
    num_representation_parameters: int
    num_head_parameters: int
    compute_features: Predict
    apply_head: Predict

    def split(
        self, weights: Weights
    ) -> tuple[tuple[tf.Tensor, ...], tuple[tf.Tensor, ...]]:
        """Returns the weights of the representation and those of the head.

        Args:
            weights: Those of the whole model, or as many arrays that go with them.

        Raises:
            ValueError: If they are not as many arrays as the model has.
        """
        expected = self.num_representation_weights + self.num_head_weights
        if len(weights) != expected:
            raise ValueError(
                f"`weights` must be {expected} arrays. Found {len(weights)}."
            )
        number = self.num_representation_weights
        return tuple(weights[:number]), tuple(weights[number:])


def build_split_model(model: Model, split_layer: str | None = None) -> SplitModel:
    """Returns the model, split at a layer.

    Args:
        model: The model, with layers.
        split_layer: The name of the head's first layer; None: the last layer.

    Raises:
        ValueError: If the model has no layers, none of this name, or none before it:
            then there is nothing to share.
    """
    if not model.layers:
        raise ValueError(
            f"`model` must have layers to be split. Found model {model.name!r}, which "
            "cannot be taken apart."
        )
    names = [layer.name for layer in model.layers]
    name = names[-1] if split_layer is None else split_layer
    if name not in names:
        raise ValueError(
            f"`split_layer` must be a layer of model {model.name!r}: one of {names}. "
            f"Found {name!r}."
        )
    place = names.index(name)
    if not place:
        raise ValueError(
            "`split_layer` must have a layer before it, which is the representation. "
            f"Found {name!r}, the first of the layers {names} of model {model.name!r}: "
            "choose a later layer, or a model with more of them."
        )
    representation = LayerChain(layers=model.layers[:place])
    head = LayerChain(layers=model.layers[place:])
    number = representation.num_weights
    sizes = _list_sizes(model, number + head.num_weights)
    return SplitModel(
        model=model,
        split_layer=name,
        num_representation_weights=number,
        num_head_weights=head.num_weights,
        num_representation_parameters=sum(sizes[:number]),
        num_head_parameters=sum(sizes[number:]),
        compute_features=representation,
        apply_head=head,
    )


def _list_sizes(model: Model, num_weights: int) -> list[int]:
    """Returns the number of parameters in each array of the weights."""
    weights = model.initialize(np.random.default_rng(0))
    if len(weights) != num_weights:
        raise ValueError(
            f"`layers` of model {model.name!r} must have as many arrays of weights as "
            f"the model: {len(weights)}. Found {num_weights}."
        )
    return [math.prod(weight.shape) for weight in weights]
