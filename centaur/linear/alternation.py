"""CENTAUR's rounds on the linear problem: heads by least squares, one step in B."""

from __future__ import annotations

import tensorflow as tf
import tensorflow_federated as tff

from centaur.linear import client_work
from centaur.linear.geometry import orthonormalize
from centaur.linear.mechanism import StackedGaussianFactory
from centaur.linear.process import build_process
from centaur.linear.users import Block, Users
from distributed_dp.accounting import validation


def build_alternation(
    users: Users, factory: StackedGaussianFactory, *, learning_rate: float
) -> tff.templates.IterativeProcess:
    """Builds the process whose every call is one round.

    Source: CENTAUR, section 5: w_i by least squares on S_i^{t,1}; G_i the gradient in B
    on S_i^{t,2}, clipped to zeta_g; B <- QR(B - eta_g GM(G_i)).

    Guarantees: a round is one Gaussian release, see `StackedGaussianFactory`. Heads
    never leave the client's computation. Drawing other examples of the same user every
    round does not lower the cost: it is that of the whole user.

    Args:
        users: The users.
        factory: The mechanism; a member of the stack is an independent repetition.
        learning_rate: eta_g.

    Returns:
        A process for `process.run_releases`.

    Raises:
        ValueError: If the rate is not positive.
    """
    validation.check_positive("learning_rate", learning_rate)

    def work(
        block: Block, stack: tf.Tensor, number: tf.Tensor
    ) -> client_work.ClippedSum:
        first, second = users.read_round(block, number)
        heads = client_work.solve_heads(stack, first)
        gradients = client_work.compute_gradients(stack, heads, second)
        return client_work.sum_clipped(gradients, factory.l2_clip)

    def update(stack: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
        return orthonormalize(stack - learning_rate * mean)

    return build_process(users, factory, work=work, update=update)
