"""What aggregation makes of the clients' updates: norms by part, clips, signal, noise.

A factory goes around another one and measures the same updates. What it measures is an
exact function of private data, which no epsilon covers: it is for the simulation alone.
"""

from __future__ import annotations

import collections
import math
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp.clipping import clip_by_l2_norm, compute_l2_norm
from distributed_dp.update_layout import NoiseSeeds, UpdateLayout

MEASURED = "updates"
PARTS = ("whole", "representation", "head")
"""A part of an update, as measured; no head where none is sent."""


class MeasuringFactory(tff.aggregators.UnweightedAggregationFactory):
    """Another factory, with measurements of the updates that go into it.

    Guarantees: state and result are the other factory's, and so are the measurements,
    beside which there are under "updates":

    - num_clients: those that reported;
    - fraction_clipped: the part of them whose update was clipped;
    - for each of PARTS a structure of
        - mean_norm: the mean norm over clients, before the clip;
        - clipped_norm: the same after the clip of whole updates;
        - agreement: the norm of the sum of clipped updates over the sum of their norms:
          1 where all clients want the same, about 1 / sqrt(clients) where they want
          unrelated things;
        - signal_to_noise: the norm of the mean clipped update over the root mean square
          norm of the noise in the mean; inf without noise.

    What is divided by a number of clients, or by their norms, is NaN where it is 0.
    """

    def __init__(
        self,
        inner: tff.aggregators.UnweightedAggregationFactory,
        *,
        l2_clip: float | None,
        central_stddev: float,
        num_representation_weights: int,
    ):
        """Initialises the factory.

        Args:
            inner: The other factory, for values with carried seeds.
            l2_clip: Its clip; None for none.
            central_stddev: The standard deviation of the noise in the sum, per
                coordinate; 0 without noise.
            num_representation_weights: How many of the first arrays of an update are
                the representation; the others are a head.
        """
        if l2_clip is not None and not 0 < l2_clip < math.inf:
            raise ValueError(f"`l2_clip` must be positive. Found {l2_clip!r}.")
        if not 0 <= central_stddev < math.inf:
            raise ValueError(
                f"`central_stddev` must be finite and >= 0. Found {central_stddev!r}."
            )
        if num_representation_weights < 1:
            raise ValueError(
                "`num_representation_weights` must be >= 1. Found "
                f"{num_representation_weights!r}."
            )
        self._inner = inner
        self._l2_clip = l2_clip
        self._central_stddev = central_stddev
        self._num_representation_weights = num_representation_weights

    def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
        """Builds the process for <update, int32[2], int32>."""
        inner = self._inner.create(value_type)
        layout = UpdateLayout(value_type, NoiseSeeds.CARRIED)
        leaves = tff.structure.flatten(layout.update_type)
        size = sum(
            math.prod(leaf.shape) for leaf in leaves[: self._num_representation_weights]
        )

        @tff.tensorflow.computation(value_type)
        def measure_fn(value: Any) -> Any:
            return _measure(layout.flatten(value[0]), size, self._l2_clip)

        @tff.tensorflow.computation(
            inner.next.type_signature.result.measurements.member,
            measure_fn.type_signature.result,
        )
        def finish_fn(measurements: Any, sums: Any) -> Any:
            found = collections.OrderedDict(measurements)
            found[MEASURED] = _finish(sums, size, self._central_stddev)
            return found

        @tff.federated_computation(
            inner.initialize.type_signature.result,
            tff.FederatedType(value_type, tff.CLIENTS),
        )
        def next_fn(state: Any, value: Any) -> Any:
            output = inner.next(state, value)
            sums = tff.federated_sum(tff.federated_map(measure_fn, value))
            measured = tff.federated_map(finish_fn, (output.measurements, sums))
            return tff.templates.MeasuredProcessOutput(
                output.state, output.result, measured
            )

        return tff.templates.AggregationProcess(inner.initialize, next_fn)


def _measure(vector: tf.Tensor, size: int, l2_clip: float | None) -> Any:
    """Returns what is summed over clients; an update that is not finite is 0."""
    is_finite = tf.reduce_all(tf.math.is_finite(vector))
    vector = tf.where(is_finite, vector, tf.zeros_like(vector))
    clipped, is_clipped = vector, tf.constant(0.0)
    if l2_clip is not None:
        clipped, norm = clip_by_l2_norm(vector, l2_clip)
        is_clipped = tf.cast(tf.squeeze(norm, -1) > l2_clip, tf.float32)
    return collections.OrderedDict(
        count=tf.constant(1.0),
        num_clipped=is_clipped,
        norms=_compute_norms(vector, size),
        clipped_norms=_compute_norms(clipped, size),
        clipped=clipped,
    )


def _finish(sums: Any, size: int, central_stddev: float) -> Any:
    """Returns the measurements, of the sums over clients."""
    found: Any = collections.OrderedDict(
        num_clients=sums["count"],
        fraction_clipped=sums["num_clipped"] / sums["count"],
    )
    for name, part in _divide(sums["clipped"], size).items():
        signal, clipped = _compute_norm(part), sums["clipped_norms"][name]
        noise = central_stddev * math.sqrt(part.shape[-1])
        found[name] = collections.OrderedDict(
            mean_norm=sums["norms"][name] / sums["count"],
            clipped_norm=clipped / sums["count"],
            agreement=signal / clipped,
            # Both are divided by the expected cohort to make a mean.
            signal_to_noise=signal / noise if noise else tf.constant(math.inf),
        )
    return found


def _compute_norms(vector: tf.Tensor, size: int) -> Any:
    """Returns the norms of the parts, by name."""
    parts = _divide(vector, size)
    return collections.OrderedDict((n, _compute_norm(p)) for n, p in parts.items())


def _compute_norm(vector: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.squeeze(compute_l2_norm(vector), -1), tf.float32)


def _divide(vector: tf.Tensor, size: int) -> dict[str, tf.Tensor]:
    """Returns the whole vector, its representation, and the head if there is one."""
    parts = dict(zip(PARTS, (vector, vector[:size], vector[size:]), strict=True))
    return parts if vector.shape[-1] > size else {n: parts[n] for n in PARTS[:2]}
