"""Seeds from the operating system's entropy, drawn inside a graph.

TensorFlow's own sources will not do for noise that must be unpredictable: its unseeded
random ops, and NonDeterministicInts too, follow one Mersenne Twister that starts from
32 bits of entropy a process (random::New64). The ops here read the system's random
device, at every execution. They run on the CPU and are stateful, so that no two of them
are merged or computed ahead of time.
"""

from __future__ import annotations

import tensorflow as tf

_DEVICE = "/dev/urandom"
_NUM_BYTES = 8
_NUM_LINES = 16
"""Lines of random bytes; 16 hold fewer than 8 bytes with probability 2**-100."""


def draw_entropy_seed() -> tf.Tensor:
    """Returns an int32[2] seed; a new one at every execution of the graph.

    No byte of it is a line feed or a carriage return, which TensorFlow's reader takes
    away: 254**8 seeds, not 2**64, are equally likely.
    """
    lines = tf.data.TextLineDataset(_DEVICE, buffer_size=64).batch(_NUM_LINES)
    data = tf.strings.reduce_join(lines.take(1).get_single_element())
    words = tf.io.decode_raw(tf.strings.substr(data, 0, _NUM_BYTES), tf.int32)
    return tf.reshape(words, [2])
