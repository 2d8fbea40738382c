"""Server steps that use no client data: Upcycled-FL around any other finalizer.

Source: Yin et al. 2024 (Upcycled-FL), algorithm 1. With w the weights before the round
and odd the inner finalizer's weights, made from the clients' aggregate, the server goes
on by itself to

  even = odd + c (odd - w) = w + (1 + c) (odd - w),   c = mu / (mu + lambda_m),

computed in the second form: with a constant c it is then, bit for bit, a server that
multiplies the inner step by the float32 sum of 1 and c (`build_scaled_finalizer`).

Privacy: the even step is a function of what was released before, so that a mechanism
under the inner aggregate is charged once for the two steps.
"""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

_STEP = "upcycled_steps"
_ODD = "odd_weights"


def build_upcycled_finalizer(
    inner: tff.learning.templates.FinalizerProcess, coefficients: Sequence[float]
) -> tff.learning.templates.FinalizerProcess:
    """Returns the finalizer that adds an even step to each of the inner one's.

    The state is an OrderedDict of "inner", the inner finalizer's; "upcycled_steps", the
    number m of even steps made, int32; and "odd_weights", the trainable weights after
    the last odd step, zeros before the first. The weights of the learning process are
    those after the even step.

    Args:
        inner: Makes the odd step.
        coefficients: c_1, c_2, ...: the coefficient of each even step, in [0, 1]; the
            last one is used from there on.

    Raises:
        ValueError: If there is no coefficient, or one is out of range.
    """
    table = np.asarray(coefficients, np.float32)
    if table.ndim != 1 or not len(table):
        raise ValueError(
            "`coefficients` must be a sequence of at least one number. Found "
            f"{coefficients!r}."
        )
    wrong = table[~((table >= 0) & (table <= 1))]
    if len(wrong):
        raise ValueError(
            "`coefficients` must be in [0, 1]: they are mu / (mu + lambda) with "
            f"lambda >= 0. Found {float(wrong[0])!r}."
        )
    weights_type = get_weights_type(inner)
    zeros = build_zeros(weights_type.trainable)

    @tff.tensorflow.computation
    def start() -> Any:
        return tf.constant(0), zeros()

    @tff.federated_computation
    def initialize() -> Any:
        step, odd = tff.federated_eval(start, tff.SERVER)
        return tff.federated_zip(
            collections.OrderedDict([("inner", inner.initialize())])
            | {_STEP: step, _ODD: odd}
        )

    @tff.tensorflow.computation(weights_type, weights_type, np.int32)
    def extrapolate(before: Any, odd: Any, step: Any) -> Any:
        coefficient = tf.constant(table)[tf.minimum(step, len(table) - 1)]
        even = _scale_step(before, odd, 1.0 + coefficient)
        return even, odd.trainable, step + 1, coefficient

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(weights_type, tff.SERVER),
        inner.next.type_signature.parameter[2],
    )
    def next_fn(state: Any, weights: Any, update: Any) -> Any:
        output = inner.next(state["inner"], weights, update)
        even, odd, step, coefficient = tff.federated_map(
            extrapolate, (weights, output.result, state[_STEP])
        )
        next_state = tff.federated_zip(
            collections.OrderedDict([("inner", output.state)])
            | {_STEP: step, _ODD: odd}
        )
        measurements = tff.federated_zip(
            collections.OrderedDict(
                inner=output.measurements, upcycled_coefficient=coefficient
            )
        )
        return tff.templates.MeasuredProcessOutput(next_state, even, measurements)

    return tff.learning.templates.FinalizerProcess(initialize, next_fn)


def build_scaled_finalizer(
    inner: tff.learning.templates.FinalizerProcess, factor: float
) -> tff.learning.templates.FinalizerProcess:
    """Returns the inner finalizer with its step multiplied: a server learning rate.

    What Upcycled-FL with a constant coefficient c is equal to, at `factor` = 1 + c.

    Args:
        inner: Makes the step.
        factor: Its factor, positive.

    Raises:
        ValueError: If the factor is not positive and finite.
    """
    if not 0 < factor < np.inf:
        raise ValueError(f"`factor` must be positive and finite. Found {factor!r}.")
    weights_type = get_weights_type(inner)

    @tff.tensorflow.computation(weights_type, weights_type)
    def scale(before: Any, after: Any) -> Any:
        return _scale_step(before, after, tf.constant(factor, tf.float32))

    @tff.federated_computation(
        inner.initialize.type_signature.result,
        tff.FederatedType(weights_type, tff.SERVER),
        inner.next.type_signature.parameter[2],
    )
    def next_fn(state: Any, weights: Any, update: Any) -> Any:
        output = inner.next(state, weights, update)
        scaled = tff.federated_map(scale, (weights, output.result))
        return tff.templates.MeasuredProcessOutput(
            output.state, scaled, output.measurements
        )

    return tff.learning.templates.FinalizerProcess(inner.initialize, next_fn)


def _scale_step(before: Any, after: Any, factor: tf.Tensor) -> Any:
    """Returns before + factor (after - before); `after` itself for the factor 1."""

    def scale(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
        scaled = old + tf.cast(factor, old.dtype) * (new - old)
        return tf.where(tf.equal(factor, 1.0), new, scaled)

    trainable = tf.nest.map_structure(scale, before.trainable, after.trainable)
    return tff.learning.models.ModelWeights(trainable, after.non_trainable)


def get_weights_type(inner: tff.learning.templates.FinalizerProcess) -> Any:
    """Returns the type of the weights that a finalizer updates."""
    return inner.next.type_signature.parameter[1].member


def build_zeros(trainable_type: Any) -> Any:
    """Returns a function of nothing that makes zeros of a type, in its containers."""

    def zeros() -> Any:
        return tff.types.type_to_py_container(
            tff.structure.map_structure(
                lambda t: tf.zeros(t.shape, t.dtype), trainable_type
            ),
            trainable_type,
        )

    return zeros
