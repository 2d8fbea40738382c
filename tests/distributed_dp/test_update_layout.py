"""Flattening updates: order, inverse, and containers."""

import collections
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp.update_layout import NoiseSeeds, UpdateLayout


class _Pair(NamedTuple):
    y: tf.Tensor
    x: tf.Tensor


_UPDATES = {
    "tensor": np.float32([[1, 2], [3, 4]]),
    "list": [np.float32([1, 2]), np.float32(3)],
    "tuple": (np.float32([1, 2]), np.float32(3)),
    "ordered": collections.OrderedDict(
        z=np.float32([1]), a=np.float32([2, 3]), m=np.float32([[4]])
    ),
    "named": _Pair(y=np.float32([1]), x=np.float32([2, 3])),
    "nested": collections.OrderedDict(
        z=[np.float32([1]), (np.float32([2]),)],
        a=collections.OrderedDict(k=np.float32([3, 4]), b=np.float32(5)),
    ),
    "empty_leaf": [np.zeros([0, 3], np.float32), np.float32([1])],
}


def _get_type(update) -> tff.Type:
    specs = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), update
    )
    return tff.types.tensorflow_to_type(specs)


@pytest.mark.parametrize("name", _UPDATES)
class TestRoundTrip:
    def test_of_values(self, name: str) -> None:
        update = _UPDATES[name]
        layout = UpdateLayout(_get_type(update), NoiseSeeds.ENTROPY)
        vector = layout.flatten(tf.nest.map_structure(tf.constant, update))
        assert vector.shape == [layout.dim]
        leaves = [leaf.reshape(-1) for leaf in tf.nest.flatten(update)]
        assert sorted(vector.numpy()) == sorted(np.concatenate(leaves))
        back = layout.unflatten(vector)
        tf.nest.assert_same_structure(update, back)
        for found, expected in zip(
            tf.nest.flatten(back), tf.nest.flatten(update), strict=True
        ):
            np.testing.assert_array_equal(found, expected)
            assert found.shape == expected.shape

    def test_of_types(self, name: str) -> None:
        value_type = _get_type(_UPDATES[name])
        layout = UpdateLayout(value_type, NoiseSeeds.ENTROPY)

        @tff.tensorflow.computation(value_type)
        def go_and_come(update):
            return layout.unflatten(layout.flatten(update))

        assert go_and_come.type_signature.result == value_type

    def test_carried(self, name: str) -> None:
        value_type = _get_type(_UPDATES[name])
        carried = tff.to_type((value_type, (np.int32, [2]), np.int32))
        layout = UpdateLayout(carried, NoiseSeeds.CARRIED)
        assert layout.update_type == value_type
        assert layout.dim == UpdateLayout(value_type, NoiseSeeds.ENTROPY).dim
