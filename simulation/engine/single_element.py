"""Sequences that a graph reads as one element: the element is fed, without a data set.

A data set costs more time to make and to read than a small client takes to train.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from simulation.engine import graph_cut, graph_import


class Element(tuple):
    """The tensors of a sequence's only element, in place of the sequence's variant.

    Their order is that of `tf.nest.flatten` of the element, as in a data set.
    """


def open_sequences(
    function: tf.types.experimental.ConcreteFunction,
) -> tuple[tf.types.experimental.ConcreteFunction, frozenset[int]]:
    """Lets a graph take elements where it asks sequences for their only one.

    Returns:
        The function, and which of its former inputs are now given as elements.
    """
    graph = function.graph
    inputs, outputs = list(graph.inputs), list(graph.outputs)
    feeds: list[tf.Tensor] = []
    opened = set()
    for index, tensor in enumerate(inputs):
        reader = _find_reader(tensor)
        if reader is None or any(tensor is output for output in outputs):
            feeds.append(tensor)
        else:
            opened.add(index)
            feeds.extend(reader.outputs)
    needed = graph_cut.list_ops(outputs, feeds)
    # Something waits for the data set itself: it must be there.
    if not opened or any(inputs[index].op in needed for index in opened):
        return function, frozenset()
    return graph_cut.wrap(graph_cut.cut(graph, feeds, outputs), feeds), frozenset(
        opened
    )


def to_variant(element: Element, leaf_type: tff.SequenceType) -> tf.Tensor:
    """Returns the sequence of one element as a data set's variant."""
    spec = graph_import.build_element_spec(leaf_type.element)
    structure = tf.nest.pack_sequence_as(spec, element)
    return tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(structure))


def to_element(variant: tf.Tensor, leaf_type: tff.SequenceType) -> Element:
    """Returns the only element of a data set.

    Raises:
        InvalidArgumentError: If it has another number of elements.
    """
    spec = graph_import.build_element_spec(leaf_type.element)
    dataset = tf.data.experimental.from_variant(variant, spec)
    return Element(tf.nest.flatten(dataset.get_single_element()))


def flatten_inputs(
    values: Sequence[Any], leaf_types: Sequence[tff.Type], opened: frozenset[int]
) -> list[tf.Tensor]:
    """Returns the tensors that an opened graph takes."""
    tensors = []
    for index, (value, leaf_type) in enumerate(zip(values, leaf_types, strict=True)):
        if index in opened:
            if not isinstance(value, Element):
                value = to_element(value, leaf_type)
            tensors.extend(value)
        elif isinstance(value, Element):
            tensors.append(to_variant(value, leaf_type))
        else:
            tensors.append(value)
    return tensors


def _find_reader(tensor: tf.Tensor) -> tf.Operation | None:
    """Returns the op that reads a sequence's only element, if nothing else reads it."""
    while tensor.dtype == tf.variant and len(tensor.consumers()) == 1:
        [op] = tensor.consumers()
        if op.type == "DatasetToSingleElement":
            return op
        if op.type not in ("OptionsDataset", "Identity"):
            return None
        tensor = op.outputs[0]
    return None
