"""Aggregation by a trusted server: clipped sum, noise once, division.

The clip and the sum query are TensorFlow Privacy's `GaussianSumQuery`. Its noise comes
from an unseeded TensorFlow op, which starts from 32 bits of entropy a process; the
query here draws the same law from a 64-bit seed, of the operating system's entropy or
of the caller's.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp

from distributed_dp.clipping import clip_by_l2_norm, compute_l2_norm
from distributed_dp.entropy import draw_entropy_seed
from distributed_dp.random_bits import draw_normal, fold_in
from distributed_dp.update_layout import NoiseSeeds, UpdateLayout


class SeededGaussianSumQuery(tfp.GaussianSumQuery):
    """TensorFlow Privacy's Gaussian sum, with noise from a named seed.

    Guarantees: clips records to `l2_norm_clip` and adds N(0, stddev^2) noise, as its
    base. Not guaranteed: the noise is float32, so it is Gaussian up to rounding; the
    distributed mechanisms have no such gap.
    """

    def __init__(self, l2_norm_clip: float, stddev: float, seed: tf.Tensor):
        super().__init__(l2_norm_clip, stddev)
        self._seed = seed

    def get_noised_result(self, sample_state: Any, global_state: Any) -> Any:
        """Adds noise; returns (result, global_state, DpEvent) as its base does."""
        leaves = []
        for index, leaf in enumerate(tf.nest.flatten(sample_state)):
            stream = fold_in(self._seed, tf.constant(index, tf.int64))
            normal = draw_normal(stream, leaf.shape.num_elements())
            noise = tf.cast(normal, leaf.dtype)
            leaves.append(leaf + global_state.stddev * tf.reshape(noise, leaf.shape))
        noised = tf.nest.pack_sequence_as(sample_state, leaves)
        # The base adds its own noise to zeros of no size, for its event alone.
        _, _, event = super().get_noised_result(tf.zeros([0]), global_state)
        return noised, global_state, event


def build_central_process(
    value_type: tff.Type,
    layout: UpdateLayout,
    *,
    l2_clip: float | None,
    stddev: float,
    divisor: int,
    server_noise_seed: tuple[int, int] | None,
    diagnostics: bool,
) -> tff.templates.AggregationProcess:
    """Builds the process: clip and sum on the clients, noise and divide on the server.

    Args:
      value_type: Type of the clients' values.
      layout: Their layout.
      l2_clip: None does not clip.
      stddev: Of the noise of the sum, per coordinate; 0 adds none.
      divisor: The expected number of clients.
      server_noise_seed: int32 pair, root of the rounds' seeds; None takes the operating
        system's entropy.
      diagnostics: Whether to measure norms and clipping.
    """

    @tff.tensorflow.computation
    def initialize_fn() -> Any:
        return collections.OrderedDict(round_number=tf.constant(0, tf.int64))

    state_type = initialize_fn.type_signature.result

    @tff.tensorflow.computation(value_type)
    def clip_fn(value: Any) -> Any:
        update = value[0] if layout.noise_seeds is NoiseSeeds.CARRIED else value
        return _clip(layout.flatten(update), l2_clip)

    vector_type, counts_type = clip_fn.type_signature.result

    @tff.tensorflow.computation(state_type, vector_type, counts_type)
    def finish_fn(state: Any, total: Any, counts: Any) -> Any:
        if stddev > 0 and l2_clip is not None:
            if server_noise_seed is None:
                seed = draw_entropy_seed()
            else:
                root = tf.constant(server_noise_seed, tf.int32)
                seed = fold_in(root, state["round_number"])
            query = SeededGaussianSumQuery(l2_clip, stddev, seed)
            total, _, _ = query.get_noised_result(total, query.initial_global_state())
        mean = layout.unflatten(total / float(divisor))
        next_state = collections.OrderedDict(round_number=state["round_number"] + 1)
        measured = collections.OrderedDict(
            l2_clip=tf.constant(l2_clip or np.inf, tf.float32),
            central_stddev=tf.constant(stddev, tf.float32),
            bits_per_client=tf.constant(32 * layout.dim, tf.int64),
        )
        if diagnostics:
            measured.update(_measure(counts))
        return next_state, mean, measured

    @tff.federated_computation
    def initialize() -> Any:
        return tff.federated_eval(initialize_fn, tff.SERVER)

    @tff.federated_computation(
        initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
    )
    def next_fn(state: Any, value: Any) -> Any:
        vector, counts = tff.federated_map(clip_fn, value)
        next_state, mean, measurements = tff.federated_map(
            finish_fn, (state, tff.federated_sum(vector), tff.federated_sum(counts))
        )
        return tff.templates.MeasuredProcessOutput(next_state, mean, measurements)

    return tff.templates.AggregationProcess(initialize, next_fn)


def _clip(vector: tf.Tensor, l2_clip: float | None) -> tuple[tf.Tensor, Any]:
    """Drops a non-finite update, clips, and measures."""
    if l2_clip is None:
        norm = compute_l2_norm(vector)
        vector = tf.where(tf.math.is_finite(norm), vector, tf.zeros_like(vector))
    else:
        # The query squares in float32 and makes a norm above 1.8e19 a NaN.
        vector, norm = clip_by_l2_norm(vector, l2_clip)
        query = tfp.GaussianSumQuery(l2_clip, 0.0)
        vector = query.preprocess_record(tf.constant(l2_clip, tf.float32), vector)
    norm = tf.squeeze(norm, -1)
    is_finite = tf.math.is_finite(norm)
    norm = tf.where(is_finite, norm, tf.zeros_like(norm))
    is_clipped = tf.constant(False) if l2_clip is None else norm > l2_clip
    counts = collections.OrderedDict(
        arrived=tf.constant(1, tf.int32),
        clipped=tf.cast(is_clipped, tf.float32),
        finite=tf.cast(is_finite, tf.float32),
        norm=tf.cast(norm, tf.float32),
    )
    return vector, counts


def _measure(counts: Any) -> Any:
    arrived = tf.cast(counts["arrived"], tf.float32)
    divisor = tf.maximum(arrived, 1.0)
    return collections.OrderedDict(
        num_clients=counts["arrived"],
        num_nonfinite=arrived - counts["finite"],
        fraction_clipped=counts["clipped"] / divisor,
        mean_norm=counts["norm"] / divisor,
    )
