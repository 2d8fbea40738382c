"""Clipping to an L2 ball."""

from __future__ import annotations

import tensorflow as tf


def compute_l2_norm(x: tf.Tensor) -> tf.Tensor:
    """Returns the float64 L2 norm along the last axis, kept as an axis of size 1."""
    squares = tf.square(tf.cast(x, tf.float64))
    return tf.sqrt(tf.reduce_sum(squares, axis=-1, keepdims=True))


def clip_by_l2_norm(
    x: tf.Tensor, l2_clip: tf.Tensor | float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Scales each vector to norm at most `l2_clip`; drops non-finite vectors.

    Source: Kairouz, Liu, Steinke 2021, algorithm 1, step 1.

    The scaling is float32 arithmetic: the result's norm can exceed `l2_clip` by a
    relative 2**-22, and vectors more than 2**126 times too long become zero on a CPU,
    which has no smaller float32 factors. Nothing downstream relies on more (the integer
    vector's norm is checked exactly).

    Args:
      x: [..., d] float32.
      l2_clip: Positive scalar, in the units of x.

    Returns:
      Clipped vectors [..., d], and their norms before clipping [..., 1] float64 (not
      finite where a vector had a NaN or infinity; that vector becomes zero).
    """
    norm = compute_l2_norm(x)
    limit = tf.cast(l2_clip, tf.float64)
    factor = tf.where(tf.math.is_finite(norm), limit / tf.maximum(norm, limit), 0.0)
    # A factor of 0 gives 0, also times NaN or infinity.
    return tf.math.multiply_no_nan(x, tf.cast(factor, tf.float32)), norm
