"""Noise on a client's model, and on its objective.

Source: Yin et al. 2024 (Upcycled-FL), algorithm 2: output perturbation, section 5 and
theorem C.1; objective perturbation, theorem C.2.

What noise costs is in `upcycled_fl.accounting`. Not guaranteed: the theorems are about
real numbers, and noise here is floating point, Gaussian or Gamma up to rounding. Seeds
are integer[2] tensors; a draw is a function of its seed, up to rounding also where XLA
compiles it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import tensorflow as tf

from distributed_dp.random_bits import draw_normal, draw_open_uniform, fold_in
from simulation.model import Weights

_NORM_STREAM, _DIRECTION_STREAM = 0, 1


def clip_to_norm(weights: Weights, l2_clip: float) -> tuple[tf.Tensor, ...]:
    """Projects weights on the ball of radius `l2_clip`.

    Source: algorithm 2 and theorem C.1: ||w|| <= tau.

    Guarantees: the result's joint L2 norm is at most `l2_clip`, whatever the weights:
    weights with a NaN or an infinity become zero, all of them, and the projection's
    coordinates are rounded towards zero. Weights that are in the ball are unchanged.
    The norm is computed in float64, so "at most" and "in" are up to 1e-13 of it.

    Args:
        weights: float32 tensors of any shape.
        l2_clip: tau, positive.

    Returns:
        float32 tensors of the same shapes.

    Raises:
        ValueError: If `l2_clip` is not positive and finite.
    """
    if not 0 < l2_clip < math.inf:
        raise ValueError(f"`l2_clip` must be positive and finite. Found {l2_clip!r}.")
    # float64 holds the square of every float32.
    exact = [tf.cast(weight, tf.float64) for weight in weights]
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(weight)) for weight in exact]))
    is_finite = tf.math.is_finite(norm)
    limit = tf.constant(l2_clip, tf.float64)

    def clip(weight: tf.Tensor, exact: tf.Tensor) -> tf.Tensor:
        projected = _round_towards_zero(exact * (limit / norm))
        inside = tf.where(norm <= limit, weight, projected)
        return tf.where(is_finite, inside, tf.zeros_like(weight))

    return tuple(map(clip, weights, exact))


def add_gaussian_noise(
    weights: Weights, stddev: float, seed: tf.Tensor
) -> tuple[tf.Tensor, ...]:
    """Adds N(0, stddev^2) to each coordinate, independently.

    Source: algorithm 2, output perturbation: N(0, sigma^2 I) on the clipped model.

    Args:
        weights: float32 tensors of any static shape.
        stddev: sigma, the standard deviation, in the weights' units. With 0 the weights
            are returned as they are.
        seed: Integer[2], of this use alone.

    Returns:
        float32 tensors of the same shapes.

    Raises:
        ValueError: If `stddev` is negative or not finite.
    """
    if not 0 <= stddev < math.inf:
        raise ValueError(f"`stddev` must be finite and >= 0. Found {stddev!r}.")
    if stddev == 0:
        return tuple(weights)

    def add(index: int, weight: tf.Tensor) -> tf.Tensor:
        stream = fold_in(seed, tf.constant(index, tf.int64))
        noise = stddev * draw_normal(stream, weight.shape.num_elements())
        return weight + tf.cast(tf.reshape(noise, weight.shape), tf.float32)

    return tuple(add(index, weight) for index, weight in enumerate(weights))


def draw_spherical_noise(
    shapes: Iterable[Sequence[int]], rate: float, seed: tf.Tensor
) -> tuple[tf.Tensor, ...]:
    """Draws n of density proportional to exp(-rate ||n||), over all tensors jointly.

    Source: theorem C.2. In polar coordinates the density is that of a norm r times
    r**(dim - 1) exp(-rate r): the norm is Gamma(shape = dim, rate), a sum of dim
    exponentials, and the direction is uniform, a normalised Gaussian.

    Args:
        shapes: The tensors' shapes.
        rate: alpha of the objective's noise, beta of the noise on its solution; a
            larger rate is less noise. The mean norm is dim / rate.
        seed: Integer[2], of this use alone.

    Returns:
        float32 tensors of these shapes.

    Raises:
        ValueError: If `rate` is not positive and finite, or there is no coordinate.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"`rate` must be positive and finite. Found {rate!r}.")
    shapes = [tuple(shape) for shape in shapes]
    sizes = [math.prod(shape) for shape in shapes]
    dim = sum(sizes)
    if not dim:
        raise ValueError(f"`shapes` must have coordinates. Found {shapes!r}.")
    norm = _draw_gamma(dim, fold_in(seed, tf.constant(_NORM_STREAM, tf.int64))) / rate
    direction = _draw_direction(
        dim, fold_in(seed, tf.constant(_DIRECTION_STREAM, tf.int64))
    )
    noise = tf.cast(norm * direction, tf.float32)
    return tuple(
        tf.reshape(part, shape)
        for part, shape in zip(tf.split(noise, sizes), shapes, strict=True)
    )


def _draw_gamma(shape: int, seed: tf.Tensor) -> tf.Tensor:
    """Returns a float64 Gamma(shape, rate = 1) draw, the shape an integer."""
    return -tf.reduce_sum(tf.math.log(draw_open_uniform(seed, shape)))


def _draw_direction(dim: int, seed: tf.Tensor) -> tf.Tensor:
    """Returns a float64 point of the unit sphere, uniform."""
    # No coordinate is 0.
    gaussian = draw_normal(seed, dim)
    return gaussian / tf.norm(gaussian)


def _round_towards_zero(x: tf.Tensor) -> tf.Tensor:
    """Casts float64 to the float32 that is nearest among those not longer."""
    rounded = tf.cast(x, tf.float32)
    is_longer = tf.abs(tf.cast(rounded, tf.float64)) > tf.abs(x)
    shorter = tf.math.nextafter(rounded, tf.zeros_like(rounded))
    return tf.where(is_longer, shorter, rounded)
