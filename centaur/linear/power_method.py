"""The private power method: the trials of the start, side by side."""

from __future__ import annotations

import tensorflow as tf
import tensorflow_federated as tff

from centaur.linear import client_work
from centaur.linear.geometry import orthonormalize
from centaur.linear.mechanism import StackedGaussianFactory
from centaur.linear.process import build_process
from centaur.linear.users import Block, Users


def build_power_method(
    users: Users, factory: StackedGaussianFactory
) -> tff.templates.IterativeProcess:
    """Builds the process whose every call is one step of every trial.

    Source: CENTAUR, algorithm 3, after Hardt and Price 2014 (the noisy power method):
    X <- QR(GM_{zeta_0, sigma_0}(M_i X)). For x ~ N(0, I) the mean of M_i is
    (mean ||w||^2) I + 2 B* (mean w w^T) B*^T, whose first k eigenvectors span B*.

    Guarantees: a step of one trial is one Gaussian release, see
    `StackedGaussianFactory`: T_0 trials of L steps are T_0 L releases. All steps use
    the same examples, those of the start, as the power method is one of one matrix.
    Not guaranteed: success. One trial fails with constant probability (the paper's
    lemma F.1), which `selection` mends.

    Args:
        users: The users.
        factory: The mechanism; a member of the stack is a trial.

    Returns:
        A process for `process.run_releases`.
    """

    def work(
        block: Block, stack: tf.Tensor, number: tf.Tensor
    ) -> client_work.ClippedSum:
        del number
        products = client_work.apply_moments(stack, users.read_start(block))
        return client_work.sum_clipped(products, factory.l2_clip)

    def update(stack: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
        del stack
        return orthonormalize(mean)

    return build_process(users, factory, work=work, update=update)
