"""Randomised rounding to the integers, with a bound on the rounded norm.

Source: Kairouz, Liu, Steinke 2021, definitions 16 and 18 (randomised and conditional
randomised rounding).
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from distributed_dp.random_bits import draw_uint32, fold_in, to_uniform
from distributed_dp.xla import compile_piece

MAX_TRIES = 64
"""Draws before the fallback. Each is accepted with probability >= 1 - beta."""

_EXACT_LIMIT = 2.0**53


@dataclasses.dataclass(frozen=True)
class RoundedVector:
    """Result of `round_conditionally`.

    Attributes:
      values: [d] float32 integers whose squared norm is within the bound.
      squared_norm: Scalar float64.
      num_redraws: Scalar int64, rejected draws.
    """

    values: tf.Tensor
    squared_norm: tf.Tensor
    num_redraws: tf.Tensor


def round_randomly(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Rounds each coordinate to floor(x) or floor(x) + 1 with mean x.

    The probability of rounding up is the fraction of x, to a multiple of 2**-24.

    Args:
      x: [d] float32.
      seed: Seed of the stream, integer[2].

    Returns:
      [d] float32 integers.
    """
    return _draw(x, seed)[0]


def compute_squared_norm(y: tf.Tensor) -> tf.Tensor:
    """Returns sum y**2 in float64: exact for integers while below 2**53."""
    return tf.reduce_sum(tf.square(tf.cast(y, tf.float64)))


def round_conditionally(
    x: tf.Tensor,
    max_squared_norm: float,
    seed: tf.Tensor,
    *,
    max_tries: int = MAX_TRIES,
) -> RoundedVector:
    """Rounds randomly, again and again until the squared norm is within the bound.

    Guarantees: the result's squared norm is at most `max_squared_norm`, always. After
    `max_tries` draws the vector is rounded toward zero, which never lengthens it; were
    even that too long (x was not clipped, or not finite), zeros are returned. Norms are
    exact below 2**53; above, the comparison is tightened by the worst rounding error of
    the sum.

    Args:
      x: [d] float32, the clipped, rotated and scaled vector.
      max_squared_norm: Bound, in grid units squared.
      seed: Seed of the stream, integer[2].
      max_tries: Bound of the loop, at least 1.

    Returns:
      The rounded vector.
    """
    limit = max_squared_norm
    if limit >= _EXACT_LIMIT:
        limit /= 1 + (x.shape.num_elements() + 2) * 2.0**-52

    def is_too_long(squared_norm: tf.Tensor) -> tf.Tensor:
        # The norm of a vector with a NaN is within no limit. `~(norm <= limit)` would
        # not say so: TensorFlow's graph optimizer rewrites it to `norm > limit`.
        return (squared_norm > limit) | tf.math.is_nan(squared_norm)

    def is_rejected(
        tries: tf.Tensor, values: tf.Tensor, squared_norm: tf.Tensor
    ) -> tf.Tensor:
        del values
        return is_too_long(squared_norm) & (tries < max_tries)

    def redraw(
        tries: tf.Tensor, values: tf.Tensor, squared_norm: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        del values, squared_norm
        return tries + 1, *_draw(x, fold_in(seed, tries))

    first = _draw(x, fold_in(seed, tf.constant(0, tf.int64)))
    tries, values, squared_norm = tf.while_loop(
        is_rejected, redraw, (tf.constant(1, tf.int64), *first)
    )
    rejected = is_too_long(squared_norm)
    values, squared_norm = tf.cond(
        rejected,
        lambda: _round_toward_zero(x, limit),
        lambda: (values, squared_norm),
    )
    num_redraws = tries - 1 + tf.cast(rejected, tf.int64)
    return RoundedVector(values, squared_norm, num_redraws)


def _draw(x: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """One random rounding of x and its squared norm."""
    size = x.shape[0]
    draw_words = compile_piece(lambda stream: draw_uint32(stream, size), size=size)
    words = draw_words(seed)

    def round_up(x: tf.Tensor, words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        floor = tf.floor(x)
        rounded = floor + tf.cast(to_uniform(words) < x - floor, tf.float32)
        return rounded, compute_squared_norm(rounded)

    return compile_piece(round_up, size=size)(x, words)


def _round_toward_zero(x: tf.Tensor, limit: float) -> tuple[tf.Tensor, tf.Tensor]:
    values = tf.sign(x) * tf.floor(tf.abs(x))
    is_short = compute_squared_norm(values) <= limit
    values = tf.where(is_short, values, tf.zeros_like(values))
    return values, compute_squared_norm(values)
