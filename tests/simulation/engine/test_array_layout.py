"""Tests for values that are arrays already: what is taken as it is, and what is not."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from simulation.engine import arguments, array_layout

PAIR = tff.StructType([np.float32, tff.TensorType(np.int32, [None, 2])])
NAMED = tff.StructType([("b", np.float32), ("a", PAIR)])
ROWS = np.zeros([3, 2], np.int32)
VALUE = {"a": (np.float32(1), ROWS), "b": np.array(2, np.float32)}


def test_arrays_are_taken_in_the_order_of_the_type():
    for value in (VALUE, collections.OrderedDict(VALUE)):
        two, one, rows = array_layout.take_arrays(value, NAMED)
        assert float(two) == 2 and float(one) == 1 and rows is ROWS
    assert arguments.flatten_leaves(VALUE, NAMED, "value")[2] is ROWS


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1.0, np.float32),
        (np.float64(1), np.float32),
        (np.zeros([2], np.float32), np.float32),
        (np.zeros([3, 3], np.int32), tff.TensorType(np.int32, [None, 2])),
        (np.zeros([3], np.float32), tff.TensorType(np.float32, None)),
        (np.array("word"), np.str_),
        (tf.zeros([]), np.float32),
        ([np.float32(1), ROWS, ROWS], PAIR),
        ({"b": np.float32(1)}, NAMED),
        ((np.float32(1), (np.float32(1), ROWS)), NAMED),
        ([np.float32(1)], tff.SequenceType(np.float32)),
    ],
)
def test_all_else_is_left_to_the_slow_way(value, kind):
    type_spec = tff.types.to_type(kind)
    assert array_layout.take_arrays(value, type_spec) is None


def test_the_slow_way_gives_the_same():
    tensors = arguments.flatten_value(
        {"b": 2.0, "a": [1.0, ROWS.tolist()]}, NAMED, "value"
    )
    fast = arguments.flatten_value(VALUE, NAMED, "value")
    assert all(isinstance(tensor, tf.Tensor) for tensor in (*tensors, *fast))
    for one, two in zip(tensors, fast, strict=True):
        np.testing.assert_array_equal(one.numpy(), two.numpy(), strict=True)


def test_results_are_in_tffs_containers_and_belong_to_the_caller():
    leaves = [np.float32(1), np.array([2, 3], np.int32)]
    named = tff.types.to_type(collections.OrderedDict(a=np.float32, b=(np.int32,)))
    result = arguments.build_result([np.float32(1), np.int32(2)], named)
    assert type(result) is collections.OrderedDict
    assert result == {"a": 1.0, "b": (2,)}
    plain = tff.types.to_type((np.float32, tff.TensorType(np.int32, [2])))
    [one], [two] = (
        arguments.build_results([kind], plain)
        for kind in (leaves, [tf.constant(1.0), tf.constant([2, 3])])
    )
    for result in (one, two):
        assert type(result) is tuple and type(result[0]) is np.float32
        np.testing.assert_array_equal(result[1], [2, 3])
        result[1][:] = 0
    np.testing.assert_array_equal(leaves[1], [2, 3])
