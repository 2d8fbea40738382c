"""The Gaussian mechanism GM of the paper, for a stack of releases of different noise.

The distributed_dp package has the mechanism for one update of one user a client. Here a
client value is the sum of a block's clipped contributions, and each member of the stack
may have a noise of its own.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp.accounting import validation
from distributed_dp.entropy import draw_entropy_seed
from distributed_dp.random_bits import check_seed, draw_normal, fold_in


class StackedGaussianFactory(tff.aggregators.UnweightedAggregationFactory):
    """The sum of clipped contributions, plus the server's noise, divided by n.

    Source: CENTAUR, notations: GM = (1/s) (sum_i clip(x_i; zeta) + sigma zeta W).

    Guarantees: where every user's contribution has a norm of at most zeta, member r of
    the stack is a Gaussian release of noise multiplier sigma_r: zeta is the sensitivity
    if one user's contribution is zeroed out (n being public and fixed), and 2 zeta if a
    user is replaced. Adaptive releases add up in `accounting`.
    Not guaranteed: the clipping, which the client computation does user by user
    (`client_work.sum_clipped`); anything against the server, which sees sums without
    noise; exactly Gaussian noise, as it is rounded to float32. Members of one stack are
    independent releases: whoever sees several pays for all of them.
    """

    def __init__(
        self,
        noise_multipliers: Sequence[float],
        *,
        l2_clip: float,
        num_users: int,
        noise_seed: tuple[int, int] | None = None,
    ) -> None:
        """Initialises the factory.

        Args:
            noise_multipliers: sigma of each member; 0 adds no noise.
            l2_clip: zeta, in the units of the contributions.
            num_users: n, the divisor.
            noise_seed: int32 pair, the root of all noise under this factory; None takes
                the operating system's entropy at every release.

        Raises:
            ValueError: If a value is out of range.
        """
        if not noise_multipliers:
            raise ValueError(
                "`noise_multipliers` must hold at least one value. Found none."
            )
        for value in noise_multipliers:
            validation.check_non_negative("noise_multiplier", value)
        validation.check_positive("l2_clip", l2_clip)
        validation.check_integer("num_users", num_users, low=1)
        check_seed("noise_seed", noise_seed)
        self._stddevs = [float(value) * l2_clip for value in noise_multipliers]
        self._l2_clip = l2_clip
        self._num_users = num_users
        self._noise_seed = noise_seed

    @property
    def num_members(self) -> int:
        """R, the length of the stack."""
        return len(self._stddevs)

    @property
    def l2_clip(self) -> float:
        """zeta."""
        return self._l2_clip

    def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
        """Builds the process for a float32 tensor whose first axis is the stack's.

        Its state counts runs and releases: with a seed, equal counts draw equal noise.

        Raises:
            ValueError: If the type is another one.
        """
        members = len(self._stddevs)
        if (
            not isinstance(value_type, tff.TensorType)
            or value_type.dtype != np.float32
            or not value_type.shape
            or value_type.shape[0] != members
        ):
            raise ValueError(
                f"`value_type` must be float32[{members}, ...]. Found {value_type!s}."
            )
        shape = tuple(int(size) for size in value_type.shape)

        @tff.tensorflow.computation
        def initialize_fn() -> Any:
            return build_noise_state(0)

        state_type = initialize_fn.type_signature.result

        @tff.tensorflow.computation(state_type, value_type)
        def finish_fn(state: Any, total: Any) -> Any:
            if any(self._stddevs):
                total += self._draw_noise(state, shape)
            next_state = collections.OrderedDict(
                run=state["run"], releases=state["releases"] + 1
            )
            return next_state, total / float(self._num_users)

        @tff.federated_computation
        def initialize() -> Any:
            return tff.federated_eval(initialize_fn, tff.SERVER)

        @tff.federated_computation(
            initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state: Any, value: Any) -> Any:
            next_state, mean = tff.federated_map(
                finish_fn, (state, tff.federated_sum(value))
            )
            nothing = tff.federated_value((), tff.SERVER)
            return tff.templates.MeasuredProcessOutput(next_state, mean, nothing)

        return tff.templates.AggregationProcess(initialize, next_fn)

    def _draw_noise(self, state: Any, shape: tuple[int, ...]) -> tf.Tensor:
        if self._noise_seed is None:
            seed = draw_entropy_seed()
        else:
            root = tf.constant(self._noise_seed, tf.int32)
            seed = fold_in(fold_in(root, state["run"]), state["releases"])
        normal = tf.reshape(draw_normal(seed, math.prod(shape)), shape)
        scale = tf.constant(self._stddevs, tf.float64)
        return tf.cast(
            normal * tf.reshape(scale, [-1] + [1] * (len(shape) - 1)), tf.float32
        )


def build_noise_state(run: int) -> Any:
    """Returns the aggregator's state before the first release of a run.

    Args:
        run: Its number among the runs of one noise seed; others draw other noise.
    """
    return collections.OrderedDict(
        run=tf.constant(run, tf.int64), releases=tf.constant(0, tf.int64)
    )
