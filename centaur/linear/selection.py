"""Which trial of the start to take: one that agrees with at least half of the others.

Only the released matrices are looked at: the choice is post-processing, and free.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import tensorflow_federated as tff


class NoMajorityError(RuntimeError):
    """No trial agrees with at least half of the others: the start failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The choice among the trials of one start.

    Attributes:
        index: The trial; None if there is no majority.
        agreements: With how many others each trial agrees, int[T_0].
    """

    index: int | None
    agreements: tuple[int, ...]

    def require(self) -> int:
        """Returns the trial.

        Raises:
            NoMajorityError: If there is none.
        """
        if self.index is None:
            raise NoMajorityError(
                "no trial agrees with at least half of the other "
                f"{len(self.agreements) - 1} (agreements: {self.agreements}): raise "
                "epsilon, the number of users or that of steps, or start again, which "
                "costs as much again"
            )
        return self.index


def compute_radius(trial_distance: float) -> float:
    """Returns the distance that a choice keeps if most trials keep `trial_distance`.

    If more than half of T_0 trials are within eps_0 of B*, each of them agrees with the
    others of them, at least half; and whatever trial is chosen agrees with one of them.
    Agreement is a largest principal angle of at most 2 asin(eps_0), so that the choice
    is within sin(3 asin(eps_0)).

    Args:
        trial_distance: eps_0, in (0, 1/2).

    Raises:
        ValueError: If it is out of range: at 1/2 the angle reaches 90 degrees.
    """
    if not 0 < trial_distance < 0.5:
        raise ValueError(
            f"`trial_distance` must be in (0, 1/2). Found {trial_distance!r}."
        )
    return math.sin(3 * math.asin(trial_distance))


def count_agreements(stack: tf.Tensor, trial_distance: float) -> tf.Tensor:
    """Returns with how many other trials each agrees.

    Source: CENTAUR, algorithm 3: all singular values of B_c^T B_c' are at least
    1 - 2 eps_0^2.

    Args:
        stack: [..., T_0, d, k], orthonormal columns.
        trial_distance: eps_0.

    Returns:
        int32[..., T_0].
    """
    trials = tf.cast(stack, tf.float64)
    products = tf.einsum("...adk,...bdl->...abkl", trials, trials)
    least = tf.reduce_min(tf.linalg.svd(products, compute_uv=False), axis=-1)
    agrees = least >= 1 - 2 * trial_distance**2
    # A trial does not vote for itself.
    others = tf.linalg.set_diag(agrees, tf.zeros_like(agrees[..., 0]))
    return tf.reduce_sum(tf.cast(others, tf.int32), axis=-1)


def build_selection(
    shape: tuple[int, int, int, int], *, trial_distance: float
) -> tff.Computation:
    """Builds the computation that counts agreements within groups of trials.

    Args:
        shape: Groups, trials, d and k.
        trial_distance: eps_0, in (0, 1/2).

    Returns:
        A server computation from float32[groups, T_0, d, k] to int32[groups, T_0].
    """
    compute_radius(trial_distance)
    if shape[1] < 1:
        raise ValueError(f"`trials` must be at least 1. Found {shape[1]!r}.")

    @tff.tensorflow.computation(tff.TensorType(np.float32, shape))
    def count(stack: tf.Tensor) -> tf.Tensor:
        return count_agreements(stack, trial_distance)

    @tff.federated_computation(
        tff.FederatedType(count.type_signature.parameter, tff.SERVER)
    )
    def select(stack: tff.Value) -> tff.Value:
        return tff.federated_map(count, stack)

    return select


def select_trials(
    trials: npt.ArrayLike, *, trial_distance: float
) -> tuple[Selection, ...]:
    """Chooses a trial of each start, on the execution engine that is set.

    The one with most agreements is taken, the first of equals; a start of one trial has
    no others, and is taken as it is.

    Args:
        trials: [groups, T_0, d, k].
        trial_distance: eps_0, in (0, 1/2).
    """
    stack = np.asarray(trials, np.float32)
    if stack.ndim != 4:
        raise ValueError(
            f"`trials` must be [groups, T_0, d, k]. Found shape {stack.shape}."
        )
    groups, count, dim, rank = stack.shape
    select = build_selection((groups, count, dim, rank), trial_distance=trial_distance)
    found = np.asarray(select(stack))
    return tuple(choose(row) for row in found)


def choose(agreements: npt.ArrayLike) -> Selection:
    """Returns the choice that follows from the trials' agreements, int[T_0]."""
    counts = tuple(int(value) for value in np.asarray(agreements))
    best = int(np.argmax(counts))
    is_majority = 2 * counts[best] >= len(counts) - 1
    return Selection(index=best if is_majority else None, agreements=counts)
