"""Functions of this process's TensorFlow between flat lists of the leaves of types."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from simulation.engine import graph_import
from simulation.engine.graph_cut import Flat
from simulation.engine.graph_import import Value

# Tensors, and where a client's values were given so, arrays.
Leaves: TypeAlias = Sequence[Any]


def join(values: Sequence[Leaves]) -> Flat:
    """Returns the leaves of all values."""
    return [leaf for value in values for leaf in value]


def split(leaves: Leaves, sizes: Sequence[int]) -> list[Flat]:
    """Returns the leaves in runs of these sizes."""
    remaining = iter(leaves)
    return [[next(remaining) for _ in range(size)] for size in sizes]


def list_specs(types: Sequence[tff.Type]) -> list[tf.TensorSpec]:
    """Returns what a graph sees of the leaves of types."""
    return [
        graph_import.build_tensor_spec(leaf)
        for type_spec in types
        for leaf in graph_import.list_leaf_types(type_spec)
    ]


def unflatten(types: Sequence[tff.Type], tensors: Sequence[tf.Tensor]) -> list[Value]:
    """Returns the values of types with these leaves, for use in a graph."""
    remaining = iter(tensors)

    def take(leaf: tff.Type) -> tf.Tensor:
        tensor = next(remaining)
        if isinstance(leaf, tff.SequenceType):
            return graph_import.tame_sequence(tensor, leaf)
        return tensor

    return [
        graph_import.unflatten(
            kind, [take(leaf) for leaf in graph_import.list_leaf_types(kind)]
        )
        for kind in types
    ]


def build(
    compute: Callable[..., Flat], types: Sequence[tff.Type], device: str | None
) -> Callable[..., Flat]:
    """Returns a compiled function of the leaves of these types."""
    return build_of_specs(compute, list_specs(types), device)


def build_of_specs(
    compute: Callable[..., Flat], specs: Sequence[tf.TensorSpec], device: str | None
) -> Callable[..., Flat]:
    """Returns a compiled function of tensors."""

    def place(*tensors: tf.Tensor) -> Flat:
        with tf.device(device):
            return compute(*tensors)

    # Not tf.function: it would run stateful ops that no output needs, and order them.
    return tf.compat.v1.wrap_function(place, list(specs))
