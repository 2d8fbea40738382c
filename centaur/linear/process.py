"""A release as a TFF process: broadcast a stack, clip and sum, add noise, update.

The start, the rounds and the baselines differ in what users compute and in what the
server makes of the noisy mean; all else is here.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import tensorflow_federated as tff

from centaur.linear.client_work import ClippedSum
from centaur.linear.mechanism import StackedGaussianFactory
from centaur.linear.users import Block, Users

# From a block, the stack and the number of the release to the clipped sum.
Work = Callable[[Block, tf.Tensor, tf.Tensor], ClippedSum]
# From the stack and the noisy mean to the next stack.
Update = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One release.

    Attributes:
        stack: float32[R, d, k] after it.
        clipped: int64[R], how many users' contributions were clipped. With `largest` an
            exact function of the users' data, which epsilon does not cover.
        largest: float64[R], the largest norm before clipping.
    """

    stack: npt.NDArray[np.float32]
    clipped: npt.NDArray[np.int64]
    largest: npt.NDArray[np.float64]


def build_process(
    users: Users, factory: StackedGaussianFactory, *, work: Work, update: Update
) -> tff.templates.IterativeProcess:
    """Builds the process whose every call is one release.

    Args:
        users: The users.
        factory: The mechanism; its number of members is the stack's.
        work: What a client computes.
        update: What the server does.

    Returns:
        Its state holds the stack and the mechanism's state; its result the measurements
        `clipped` and `largest`.
    """
    shape = [factory.num_members, users.problem.dim, users.problem.rank]
    stack_type = tff.TensorType(np.float32, shape)
    number_type = tff.TensorType(np.int64)

    @tff.tensorflow.computation(users.block_type, stack_type, number_type)
    def work_fn(block: Any, stack: Any, number: Any) -> Any:
        total, clipped, largest = work(block, stack, number)
        return total, clipped, largest

    aggregator = factory.create(work_fn.type_signature.result[0])
    noise_type = aggregator.initialize.type_signature.result.member

    @tff.tensorflow.computation
    def build_stack() -> Any:
        return tf.eye(shape[1], shape[2], batch_shape=[shape[0]])

    @tff.tensorflow.computation(
        stack_type, work_fn.type_signature.result[0], noise_type
    )
    def update_fn(stack: Any, mean: Any, noise_state: Any) -> Any:
        following = tf.ensure_shape(update(stack, mean), shape)
        return collections.OrderedDict(stack=following, noise=noise_state)

    @tff.tensorflow.computation(noise_type)
    def get_number(noise_state: Any) -> Any:
        return noise_state["releases"]

    @tff.federated_computation
    def initialize() -> Any:
        return tff.federated_zip(
            collections.OrderedDict(
                stack=tff.federated_eval(build_stack, tff.SERVER),
                noise=aggregator.initialize(),
            )
        )

    largest_type = work_fn.type_signature.result[2]

    @tff.tensorflow.computation
    def build_zero() -> Any:
        return tf.zeros(shape[:1], tf.float32)

    @tff.tensorflow.computation(largest_type, largest_type)
    def take_larger(first: Any, second: Any) -> Any:
        return tf.maximum(first, second)

    @tff.tensorflow.computation(largest_type)
    def keep(value: Any) -> Any:
        return value

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(users.block_type, tff.CLIENTS),
    )
    def next_fn(state: Any, blocks: Any) -> Any:
        number = tff.federated_map(get_number, state["noise"])
        total, clipped, largest = tff.federated_map(
            work_fn,
            (
                blocks,
                tff.federated_broadcast(state["stack"]),
                tff.federated_broadcast(number),
            ),
        )
        released = aggregator.next(state["noise"], total)
        following = tff.federated_map(
            update_fn, (state["stack"], released.result, released.state)
        )
        measured = tff.federated_zip(
            collections.OrderedDict(
                clipped=tff.federated_sum(clipped),
                largest=tff.federated_aggregate(
                    largest, build_zero(), take_larger, take_larger, keep
                ),
            )
        )
        return following, measured

    return tff.templates.IterativeProcess(initialize, next_fn)


def run_releases(
    process: tff.templates.IterativeProcess,
    blocks: Sequence[Block],
    *,
    stack: npt.ArrayLike,
    num_releases: int,
    run: int = 0,
) -> Iterator[Step]:
    """Runs releases one after another, on the execution engine that is set.

    Args:
        process: What `build_process` returned.
        blocks: The client values; all take part in every release.
        stack: [R, d, k], where to begin.
        num_releases: How many.
        run: Its number, for the noise of seeded factories.

    Yields:
        A step after each.
    """
    state = process.initialize()
    noise = collections.OrderedDict(run=np.int64(run), releases=np.int64(0))
    state = collections.OrderedDict(
        stack=np.asarray(stack, np.float32).reshape(np.shape(state["stack"])),
        noise=noise,
    )
    for _ in range(num_releases):
        state, measured = process.next(state, list(blocks))
        yield Step(
            stack=np.asarray(state["stack"]),
            clipped=np.asarray(measured["clipped"], np.int64),
            largest=np.asarray(measured["largest"], np.float64),
        )
