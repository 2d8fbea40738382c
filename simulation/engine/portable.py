"""Values of an engine's nodes as what other processes can be sent."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from simulation.engine.graph_cut import Flat
from simulation.engine.single_element import Element


@dataclasses.dataclass(frozen=True)
class _PackedDataset:
    """A data set as its serialized graph."""

    graph: bytes


def pack(flat: Sequence[Any]) -> list[Any]:
    """Returns a value's tensors as arrays, and its data sets as graphs.

    Raises:
        InvalidArgumentError, FailedPreconditionError: If a data set has a state outside
            its graph, such as a Python generator: it cannot leave this process.
    """
    return [_pack_leaf(leaf) for leaf in flat]


def unpack(packed: Sequence[Any]) -> Flat:
    """Returns the value; the inverse of `pack`."""
    return [_unpack_leaf(leaf) for leaf in packed]


def _pack_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Element):
        return tuple(pack(leaf))
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf
    if leaf.dtype == tf.variant:
        # 2: fail where the graph does not hold all of the data set.
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=leaf, external_state_policy=2, strip_device_assignment=True
        )
        return _PackedDataset(graph.numpy())
    return leaf.numpy()


def _unpack_leaf(leaf: Any) -> Any:
    if isinstance(leaf, tuple):
        return Element(unpack(leaf))
    if isinstance(leaf, _PackedDataset):
        return tf.raw_ops.DatasetFromGraph(graph_def=tf.constant(leaf.graph))
    return tf.convert_to_tensor(np.asarray(leaf))
