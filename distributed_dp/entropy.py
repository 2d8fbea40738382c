"""Seeds from the operating system's entropy, drawn inside a graph.

TensorFlow's unseeded stateful random ops start from 32 bits of entropy a process; noise
that must be unpredictable is seeded from this op instead, which reads the operating
system's source at every execution.
"""

from __future__ import annotations

import tensorflow as tf


def draw_entropy_seed() -> tf.Tensor:
    """Returns an int32[2] seed; a new one at every execution of the graph."""
    return tf.raw_ops.NonDeterministicInts(
        shape=tf.constant([2], tf.int64), dtype=tf.int32
    )
