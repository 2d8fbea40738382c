"""What users compute, for a block of users and a stack of matrices B at once.

A stack holds R matrices, [R, d, k]: the trials of a start, or independent repetitions
of the rounds, which see the same examples. Each user's contribution to each of them is
clipped on its own.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from centaur.linear.users import Examples


class ClippedSum(NamedTuple):
    """A block's contributions, clipped user by user and added up.

    Attributes:
        total: [R, ...] float32.
        clipped: int32[R], how many contributions were longer than the threshold, or not
            finite and therefore dropped.
        largest: float32[R], the largest norm before clipping.
    """

    total: tf.Tensor
    clipped: tf.Tensor
    largest: tf.Tensor


def solve_heads(stack: tf.Tensor, examples: Examples) -> tf.Tensor:
    """Returns each user's least-squares head for each B of a stack.

    Source: CENTAUR, algorithm 2, phase 1: w_i = argmin_w l(B, w; S_i^{t,1}), exactly;
    the one of least norm where several are.

    Args:
        stack: [R, d, k] float32.
        examples: Of the block.

    Returns:
        [users, R, k] float32, solved in float64.
    """
    features = tf.cast(_project(stack, examples.x), tf.float64)
    members = stack.shape[0]
    y = tf.cast(examples.y, tf.float64)[:, tf.newaxis, :, tf.newaxis]
    outputs = tf.tile(y, [1, members, 1, 1])
    # Not the normal equations, which square the condition number.
    heads = tf.linalg.lstsq(features, outputs, fast=False)
    return tf.cast(tf.squeeze(heads, -1), tf.float32)


def compute_gradients(
    stack: tf.Tensor, heads: tf.Tensor, examples: Examples
) -> tf.Tensor:
    """Returns the gradients of l(B, w_i; S_i) in B.

    Source: CENTAUR, section 5, with l the mean of (1/2) (w^T B^T x - y)^2, so that the
    gradient is the mean of (w^T B^T x - y) x w^T.

    Args:
        stack: [R, d, k].
        heads: [users, R, k].
        examples: Of the block.

    Returns:
        [users, R, d, k] float32.
    """
    features = _project(stack, examples.x)
    predicted = tf.einsum("urmk,urk->urm", features, heads)
    residuals = predicted - examples.y[:, tf.newaxis, :]
    directions = tf.matmul(residuals, examples.x) / float(examples.x.shape[1])
    return directions[..., tf.newaxis] * heads[:, :, tf.newaxis, :]


def apply_moments(stack: tf.Tensor, examples: Examples) -> tf.Tensor:
    """Returns M_i X for each user and each X of a stack.

    Source: CENTAUR, algorithm 3: M_i = (1/m) sum_j y_ij^2 x_ij x_ij^T. The matrix is
    never formed.

    Args:
        stack: [R, d, k].
        examples: Of the block.

    Returns:
        [users, R, d, k] float32.
    """
    members, dim, rank = stack.shape
    flat = tf.reshape(tf.transpose(stack, [1, 0, 2]), [dim, members * rank])
    weights = tf.square(examples.y)[..., tf.newaxis] / float(examples.x.shape[1])
    products = tf.matmul(
        examples.x, weights * tf.tensordot(examples.x, flat, 1), transpose_a=True
    )
    products = tf.reshape(products, [-1, dim, members, rank])
    return tf.transpose(products, [0, 2, 1, 3])


def sum_clipped(contributions: tf.Tensor, l2_clip: float | None) -> ClippedSum:
    """Clips each user's contribution to each member of the stack, and adds users up.

    Args:
        contributions: [users, R, ...] float32.
        l2_clip: zeta, on the norm of all coordinates; None does not clip.
    """
    axes = list(range(2, contributions.shape.rank))
    squares = tf.reduce_sum(tf.square(tf.cast(contributions, tf.float64)), axis=axes)
    norms = tf.sqrt(squares)
    factors = compute_factors(norms, l2_clip)
    shape = [*factors.shape, *([1] * len(axes))]
    kept = tf.math.multiply_no_nan(contributions, tf.reshape(factors, shape))
    return count_clipped(tf.reduce_sum(kept, axis=0), norms, l2_clip)


def compute_factors(norms: tf.Tensor, l2_clip: float | None) -> tf.Tensor:
    """Returns what scales contributions to the threshold: min(1, zeta / norm).

    A contribution that is not finite gets 0. The factor is float32: a clipped norm can
    exceed the threshold by a relative 2**-22.

    Args:
        norms: float64, of any shape.
        l2_clip: zeta; None does not clip.
    """
    limit = tf.constant(float("inf") if l2_clip is None else l2_clip, tf.float64)
    factors = tf.where(norms > limit, limit / norms, tf.ones_like(norms))
    factors = tf.where(tf.math.is_finite(norms), factors, tf.zeros_like(norms))
    return tf.cast(factors, tf.float32)


def count_clipped(
    total: tf.Tensor, norms: tf.Tensor, l2_clip: float | None
) -> ClippedSum:
    """Returns a sum with what its contributions' norms, float64[users, R], tell."""
    is_kept = tf.math.is_finite(norms)
    if l2_clip is not None:
        is_kept &= norms <= l2_clip
    return ClippedSum(
        total=total,
        clipped=tf.reduce_sum(tf.cast(~is_kept, tf.int32), axis=0),
        largest=tf.cast(tf.reduce_max(norms, axis=0), tf.float32),
    )


def _project(stack: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Returns B^T x of each member, [users, R, count, k]."""
    members, dim, rank = stack.shape
    flat = tf.reshape(tf.transpose(stack, [1, 0, 2]), [dim, members * rank])
    features = tf.tensordot(x, flat, 1)
    features = tf.reshape(features, [-1, x.shape[1], members, rank])
    return tf.transpose(features, [0, 2, 1, 3])
