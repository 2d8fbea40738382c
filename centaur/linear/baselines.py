"""What CENTAUR is compared with: mechanisms that release the whole quadratic.

Both clip and release a matrix of second moments of x, whose norm grows like d where a
gradient's grows like sqrt(d). With noise of spectral norm sqrt(d) that makes an error
of d^1.5 / n, the rate which CENTAUR's section 5 gives for Jain et al. 2021. They are
mechanisms of that kind, written from the definitions here; neither is the program of
those authors, and constants, logarithms and the handling of outliers are not theirs.
"""

from __future__ import annotations

import tensorflow as tf
import tensorflow_federated as tff

from centaur.linear import client_work
from centaur.linear.geometry import orthonormalize
from centaur.linear.mechanism import StackedGaussianFactory
from centaur.linear.process import build_process
from centaur.linear.users import Block, Examples, Users


def build_normal_equations(
    users: Users, factory: StackedGaussianFactory
) -> tff.templates.IterativeProcess:
    """Builds alternating minimisation whose every call releases a whole problem in B.

    With heads w_i as in CENTAUR, the users' objective in B is a quadratic of the dk
    numbers vec(B): its matrix is A_i = (1/m) sum_j phi phi^T with phi = vec(x w_i^T),
    its linear term b_i = (1/m) sum_j y phi. The pair (A_i, b_i) is clipped together and
    released by one Gaussian mechanism; the server solves (A + A^T)/2 vec(B) = b, and
    takes the Q factor. Without noise and clipping that is the exact minimiser in B.

    Guarantees: a call is one Gaussian release, see `StackedGaussianFactory`.

    Args:
        users: The users.
        factory: The mechanism; a member of the stack is an independent repetition.

    Returns:
        A process for `process.run_releases`.
    """
    dim, rank = users.problem.dim, users.problem.rank

    def work(
        block: Block, stack: tf.Tensor, number: tf.Tensor
    ) -> client_work.ClippedSum:
        first, second = users.read_round(block, number)
        heads = client_work.solve_heads(stack, first)
        return sum_normal_equations(heads, second, factory.l2_clip)

    def update(stack: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
        del stack
        size = dim * rank
        matrix = tf.reshape(
            tf.cast(mean[:, : size * size], tf.float64), [-1, size, size]
        )
        matrix = (matrix + tf.linalg.matrix_transpose(matrix)) / 2
        vector = tf.cast(mean[:, size * size :, tf.newaxis], tf.float64)
        solved = tf.reshape(tf.linalg.solve(matrix, vector), [-1, dim, rank])
        return tf.cast(orthonormalize(solved), tf.float32)

    return build_process(users, factory, work=work, update=update)


def sum_normal_equations(
    heads: tf.Tensor, examples: Examples, l2_clip: float | None
) -> client_work.ClippedSum:
    """Returns the clipped sum of the users' (A_i, b_i).

    A_i is the Kronecker product of (1/m) sum_j x x^T and w w^T: neither it nor its norm
    needs the [dk, dk] matrix of each user.

    Args:
        heads: [users, R, k].
        examples: Of the block.
        l2_clip: On the norm of the pair; None does not clip.

    Returns:
        Its total is [R, (dk)^2 + dk]: A in rows of the pairs (d, k), then b.
    """
    _, members, rank = heads.shape
    count, dim = examples.x.shape[1:]
    moments = tf.matmul(examples.x, examples.x, transpose_a=True) / float(count)
    cross = tf.einsum("um,umd->ud", examples.y, examples.x) / float(count)
    squares = tf.reduce_sum(tf.square(tf.cast(heads, tf.float64)), axis=2)
    first = tf.reduce_sum(tf.square(tf.cast(moments, tf.float64)), axis=[1, 2])
    second = tf.reduce_sum(tf.square(tf.cast(cross, tf.float64)), axis=1)
    norms = tf.sqrt(first[:, tf.newaxis] * squares**2 + second[:, tf.newaxis] * squares)
    factors = client_work.compute_factors(norms, l2_clip)
    is_kept = (factors > 0)[..., tf.newaxis]
    # Nothing of a user that adds nothing: 0 times what is not finite is not 0.
    is_used = tf.reduce_any(is_kept, axis=1)
    moments = tf.where(is_used[..., tf.newaxis], moments, tf.zeros_like(moments))
    cross = tf.where(is_used, cross, tf.zeros_like(cross))
    scaled = tf.where(is_kept, factors[..., tf.newaxis] * heads, tf.zeros_like(heads))
    safe = tf.where(is_kept, heads, tf.zeros_like(heads))
    outer = scaled[..., :, tf.newaxis] * safe[..., tf.newaxis, :]
    total = tf.einsum("urab,upq->rpaqb", outer, moments)
    linear = tf.einsum("ura,up->rpa", scaled, cross)
    size = dim * rank
    joined = tf.concat(
        [
            tf.reshape(total, [members, size * size]),
            tf.reshape(linear, [members, size]),
        ],
        axis=1,
    )
    return client_work.count_clipped(joined, norms, l2_clip)


def build_whole_matrix(
    users: Users, factory: StackedGaussianFactory
) -> tff.templates.IterativeProcess:
    """Builds the process whose one call releases the mean of M_i, whole.

    The server takes the k first eigenvectors of the noisy, symmetrised d x d matrix: no
    power method and no rounds. Even without noise the error is that of the sample, of
    the order of sqrt(d / (n m)).

    Guarantees: a call is one Gaussian release, see `StackedGaussianFactory`.

    Args:
        users: The users.
        factory: The mechanism; a member of the stack is an independent repetition.

    Returns:
        A process for `process.run_releases`.
    """

    def work(
        block: Block, stack: tf.Tensor, number: tf.Tensor
    ) -> client_work.ClippedSum:
        del number
        examples = users.read_start(block)
        weights = tf.square(examples.y)[..., tf.newaxis] / float(examples.x.shape[1])
        moments = tf.matmul(examples.x, weights * examples.x, transpose_a=True)
        axes = [1, 2]
        squares = tf.reduce_sum(tf.square(tf.cast(moments, tf.float64)), axis=axes)
        norms = tf.sqrt(squares)[:, tf.newaxis]
        factors = client_work.compute_factors(norms, factory.l2_clip)
        kept = tf.math.multiply_no_nan(moments, factors[..., tf.newaxis])
        members = stack.shape[0]
        # Every member has the same sum, and noise of its own.
        total = tf.tile(tf.reduce_sum(kept, 0, keepdims=True), [members, 1, 1])
        counted = client_work.count_clipped(total, norms, factory.l2_clip)
        return client_work.ClippedSum(
            total=total,
            clipped=tf.tile(counted.clipped, [members]),
            largest=tf.tile(counted.largest, [members]),
        )

    def update(stack: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
        symmetric = (mean + tf.linalg.matrix_transpose(mean)) / 2
        _, vectors = tf.linalg.eigh(tf.cast(symmetric, tf.float64))
        # Eigenvalues come in ascending order.
        rank = stack.shape[2]
        return tf.cast(tf.reverse(vectors[..., -rank:], [-1]), tf.float32)

    return build_process(users, factory, work=work, update=update)
