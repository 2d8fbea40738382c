"""Aggregation under a distributed mechanism: what DDGauss and Skellam share.

One client computation (flatten, clip, rotate, scale, round, add a noise share, wrap),
one modular secure sum, one server computation (add missing noise inside Z_m, centre,
scale, rotate back, divide by the expected number of clients).
"""

from __future__ import annotations

import abc
import collections
import math
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp.accounting import (
    CohortBounds,
    CohortScheme,
    DistributedParameters,
    Sampling,
    compute_cohort_bounds,
)
from distributed_dp.adaptive_clip import AdaptiveClip, build_indicator_noise
from distributed_dp.encoding import Codec
from distributed_dp.entropy import draw_entropy_seed
from distributed_dp.modular import center, wrap
from distributed_dp.noise import NoiseShares
from distributed_dp.random_bits import check_seed, fold_in, split_seed
from distributed_dp.rotation import RotationKind, build_rotation
from distributed_dp.update_layout import NoiseSeeds, UpdateLayout


class DistributedFactory(tff.aggregators.UnweightedAggregationFactory):
    """Base of the factories of distributed mechanisms.

    The result of a created process is the noisy sum of the clipped updates divided by
    `scheme.clients_per_round`, the expected number of clients, never the true one.

    Not guaranteed: no cryptography is run. The modular sum is
    `tff.backends.mapreduce.federated_secure_modular_sum`, which needs an execution
    context that can run it. With `diagnostics`, measurements are exact functions of the
    clients' data: for the simulation alone, not covered by any epsilon.
    """

    def __init__(
        self,
        parameters: DistributedParameters,
        scheme: CohortScheme,
        *,
        rotation: RotationKind = RotationKind.HADAMARD,
        noise_seeds: NoiseSeeds = NoiseSeeds.ENTROPY,
        rotation_seed: tuple[int, int] | None = None,
        server_noise_seed: tuple[int, int] | None = None,
        adaptive_clip: AdaptiveClip | None = None,
        diagnostics: bool = True,
    ):
        """Initialises the factory.

        Args:
          parameters: The calibrated mechanism.
          scheme: How cohorts are drawn; fixes the range of sizes that the noise shares
            are scaled for. With Sampling.FIXED shares are scaled for exactly
            clients_per_round; with Sampling.POISSON for the number that joined, which
            is counted in the computation (ENTROPY) or carried (CARRIED).
          rotation: Public rotation.
          noise_seeds: Where the clients' noise seeds come from.
          rotation_seed: int32 pair, root of the public rotation seeds. None draws one
            when the process is initialised.
          server_noise_seed: int32 pair, root of the seeds of the noise that the server
            adds for missing shares. None takes the operating system's entropy.
          adaptive_clip: Adaptive clipping; None keeps the clip fixed.
          diagnostics: Whether to measure norms, clipping and redraws.

        Raises:
          ValueError: If parameters and scheme disagree, a seed is no int32 pair, both
            seeds are the same (one of them is public), or the noise cannot be drawn.
        """
        if parameters.clients_per_round != scheme.clients_per_round:
            raise ValueError(
                "`parameters.clients_per_round` must equal the scheme's "
                f"{scheme.clients_per_round}. Found {parameters.clients_per_round!r}."
            )
        check_seed("rotation_seed", rotation_seed)
        check_seed("server_noise_seed", server_noise_seed)
        if server_noise_seed is not None and rotation_seed is not None:
            if tuple(server_noise_seed) == tuple(rotation_seed):
                raise ValueError(
                    "`server_noise_seed` must differ from `rotation_seed`, which is "
                    f"public. Found {server_noise_seed!r} for both."
                )
        self._parameters = parameters
        self._scheme = scheme
        self._bounds = compute_cohort_bounds(scheme)
        self._noise = self._build_noise(parameters, self._bounds)
        self._rotation = rotation
        self._noise_seeds = noise_seeds
        self._rotation_seed = rotation_seed
        self._server_noise_seed = server_noise_seed
        self._adaptive_clip = adaptive_clip
        self._diagnostics = diagnostics

    def build_codec(self, dim: int) -> Codec:
        """Returns what encodes an update of `dim` coordinates and decodes a sum.

        Raises:
          ValueError: If `parameters.padded_dim` is not the rotated update's length.
        """
        return Codec(
            parameters=self._parameters,
            rotation=build_rotation(self._rotation, dim),
            noise=self._noise,
        )

    def compute_variance_fraction(self, joined: int, arrived: int) -> float:
        """Part of the noise's variance that arrived clients carry.

        With adaptive clipping that of the vector or of the quantile, whichever is less.
        """
        noises = [self._noise]
        if self._adaptive_clip is not None:
            noises.append(build_indicator_noise(self._adaptive_clip, self._noise))
        return min(noise.compute_variance_fraction(joined, arrived) for noise in noises)

    @abc.abstractmethod
    def _build_noise(
        self, parameters: DistributedParameters, bounds: CohortBounds
    ) -> NoiseShares:
        """Returns the mechanism's noise shares in grid units."""

    def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
        """Builds the process.

        Args:
          value_type: Structure of float32 tensors, or with NoiseSeeds.CARRIED the type
            <update, int32[2], int32>.

        Raises:
          ValueError: For other types, or if `parameters.padded_dim` is not the length
            of the rotated update.
        """
        layout = UpdateLayout(value_type, self._noise_seeds)
        round_ops = _RoundOps(
            codec=self.build_codec(layout.dim),
            layout=layout,
            expected_clients=self._scheme.clients_per_round,
            max_clients=self._bounds.high,
            adaptive_clip=self._adaptive_clip,
            diagnostics=self._diagnostics,
            rotation_seed=self._rotation_seed,
            server_noise_seed=self._server_noise_seed,
        )
        counts_cohort = (
            self._noise_seeds is NoiseSeeds.ENTROPY
            and self._scheme.sampling is Sampling.POISSON
        )
        return _build_process(round_ops, value_type, counts_cohort=counts_cohort)


class _RoundOps:
    """The TensorFlow side of one round."""

    def __init__(
        self,
        *,
        codec: Codec,
        layout: UpdateLayout,
        expected_clients: int,
        max_clients: int,
        adaptive_clip: AdaptiveClip | None,
        diagnostics: bool,
        rotation_seed: tuple[int, int] | None,
        server_noise_seed: tuple[int, int] | None,
    ):
        self.codec = codec
        self.layout = layout
        self.bits = codec.parameters.bits
        self.expected_clients = expected_clients
        self._adaptive_clip = adaptive_clip
        self._diagnostics = diagnostics
        self._rotation_seed = rotation_seed
        self._server_noise_seed = server_noise_seed
        self._indicator_noise = None
        if adaptive_clip is not None:
            adaptive_clip.check_fits(self.bits, max_clients)
            self._indicator_noise = build_indicator_noise(adaptive_clip, codec.noise)
        sum_bits = self.bits + math.ceil(math.log2(max(2, 2 * max_clients)))
        self.sent_dtype = tf.int32 if sum_bits <= 31 else tf.int64
        self.sent_dim = codec.rotation.padded_dim + (adaptive_clip is not None)

    def initialize(self) -> Any:
        """State before the first round."""
        seed = self._rotation_seed
        return collections.OrderedDict(
            round_number=tf.constant(0, tf.int64),
            rotation_seed=draw_entropy_seed() if seed is None else tf.constant(seed),
            l2_clip=tf.constant(self.codec.parameters.l2_clip, tf.float32),
        )

    def prepare(self, state: Any, joined: tf.Tensor) -> Any:
        """What every client is told at the round's start."""
        return collections.OrderedDict(
            rotation_seed=self._compute_rotation_seed(state),
            l2_clip=state["l2_clip"],
            joined=tf.cast(joined, tf.int32),
        )

    def encode(self, value: Any, told: Any) -> Any:
        """One client's residues and measurements."""
        if self.layout.noise_seeds is NoiseSeeds.CARRIED:
            update, noise_seed, joined = value
        else:
            update, noise_seed, joined = value, draw_entropy_seed(), told["joined"]
        vector_seed, indicator_seed = split_seed(noise_seed, 2)
        encoded = self.codec.encode(
            self.layout.flatten(update),
            l2_clip=told["l2_clip"],
            joined=joined,
            rotation_seed=told["rotation_seed"],
            noise_seed=vector_seed,
        )
        residues = encoded.residues
        if self._adaptive_clip is not None and self._indicator_noise is not None:
            u = self._adaptive_clip.contribution
            within = encoded.is_finite * (1.0 - 2.0 * encoded.is_clipped) * u
            share = self._indicator_noise.sample_share(
                1, indicator_seed, tf.cast(joined, tf.int64)
            )
            indicator = tf.cast(within, tf.int64) + tf.cast(share[0], tf.int64)
            indicator = wrap(tf.cast(indicator, tf.int32), self.bits)
            residues = tf.concat(
                [tf.cast(residues, tf.int64), [tf.cast(indicator, tf.int64)]], axis=0
            )
        counts = collections.OrderedDict(
            # int64: the sum over clients is the square of their number.
            arrived=tf.constant(1, tf.int32),
            joined=tf.cast(joined, tf.int64),
        )
        if self._diagnostics:
            counts["clipped"] = encoded.is_clipped
            counts["finite"] = encoded.is_finite
            counts["norm"] = encoded.norm
            counts["rounded_norm"] = encoded.rounded_norm
            counts["redraws"] = encoded.num_redraws
        if residues.dtype == tf.uint32 and self.sent_dtype == tf.int32:
            # Below 2**31: the same bits, without a pass over them.
            return tf.bitcast(residues, tf.int32), counts
        return tf.cast(residues, self.sent_dtype), counts

    def decode(self, state: Any, total: tf.Tensor, counts: Any) -> Any:
        """Next state, mean estimate and measurements."""
        arrived = tf.cast(counts["arrived"], tf.int64)
        joined = counts["joined"] // tf.maximum(arrived, tf.constant(1, tf.int64))
        vector_seed, indicator_seed = split_seed(self._compute_server_seed(state), 2)
        padded_dim = self.codec.rotation.padded_dim
        total = tf.cast(total, tf.int64)
        missing = self.codec.noise.sample_missing(
            padded_dim, vector_seed, joined, arrived
        )
        vector = total[:padded_dim] + missing
        decoded = self.codec.decode(
            vector,
            l2_clip=state["l2_clip"],
            rotation_seed=self._compute_rotation_seed(state),
        )
        next_state = collections.OrderedDict(state)
        next_state["round_number"] = state["round_number"] + 1
        if self._adaptive_clip is not None and self._indicator_noise is not None:
            noise = self._indicator_noise.sample_missing(
                1, indicator_seed, joined, arrived
            )
            indicator_sum = center(total[padded_dim] + noise[0], self.bits)
            next_state["l2_clip"] = self._adaptive_clip.update_clip(
                state["l2_clip"],
                indicator_sum,
                self.expected_clients,
                initial_clip=self.codec.parameters.l2_clip,
            )
        mean = self.layout.unflatten(decoded / float(self.expected_clients))
        measurements = self._measure(state, center(vector, self.bits), counts)
        return next_state, mean, measurements

    def _measure(self, state: Any, centered: tf.Tensor, counts: Any) -> Any:
        """Released quantities, then diagnostics if they are on."""
        parameters = self.codec.parameters
        ratio = state["l2_clip"] / parameters.l2_clip
        half_modulus = 2.0 ** (self.bits - 1)
        sizes = tf.abs(tf.cast(centered, tf.float32)) / half_modulus
        spread = tf.sqrt(tf.reduce_mean(tf.square(sizes)))
        measured = collections.OrderedDict(
            l2_clip=state["l2_clip"],
            granularity=ratio * parameters.granularity,
            local_stddev=ratio * parameters.local_stddev,
            bits=tf.constant(self.bits, tf.int32),
            bits_per_client=tf.constant(self.bits * self.sent_dim, tf.int64),
            max_sum_over_half_modulus=tf.reduce_max(sizes),
            # Of a Gaussian with the sum's spread, the part beyond half the modulus.
            wraparound_estimate=tf.math.erfc(1.0 / (math.sqrt(2.0) * spread)),
        )
        if self._diagnostics:
            arrived = tf.cast(counts["arrived"], tf.float32)
            divisor = tf.maximum(arrived, 1.0)
            measured["num_clients"] = counts["arrived"]
            measured["num_nonfinite"] = arrived - counts["finite"]
            measured["fraction_clipped"] = counts["clipped"] / divisor
            measured["mean_norm"] = counts["norm"] / divisor
            measured["mean_rounded_norm"] = counts["rounded_norm"] / divisor
            measured["num_redraws"] = counts["redraws"]
        return measured

    def _compute_rotation_seed(self, state: Any) -> tf.Tensor:
        return split_seed(fold_in(state["rotation_seed"], state["round_number"]), 1)[0]

    def _compute_server_seed(self, state: Any) -> tf.Tensor:
        if self._server_noise_seed is None:
            return draw_entropy_seed()
        root = tf.constant(self._server_noise_seed, tf.int32)
        return split_seed(fold_in(root, state["round_number"]), 1)[0]


def _build_process(
    ops: _RoundOps, value_type: tff.Type, *, counts_cohort: bool
) -> tff.templates.AggregationProcess:
    """Wires the round: count, tell, encode, modular sum, decode."""

    @tff.tensorflow.computation
    def initialize_fn() -> Any:
        return ops.initialize()

    state_type = initialize_fn.type_signature.result

    @tff.tensorflow.computation(state_type, np.int32)
    def prepare_fn(state: Any, joined: Any) -> Any:
        return ops.prepare(state, joined)

    @tff.tensorflow.computation(value_type, prepare_fn.type_signature.result)
    def encode_fn(value: Any, told: Any) -> Any:
        return ops.encode(value, told)

    residues_type, counts_type = encode_fn.type_signature.result

    @tff.tensorflow.computation(state_type, residues_type, counts_type)
    def decode_fn(state: Any, total: Any, counts: Any) -> Any:
        return ops.decode(state, total, counts)

    @tff.federated_computation
    def initialize() -> Any:
        return tff.federated_eval(initialize_fn, tff.SERVER)

    @tff.federated_computation(
        initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
    )
    def next_fn(state: Any, value: Any) -> Any:
        if counts_cohort:
            joined = tff.federated_sum(tff.federated_value(1, tff.CLIENTS))
        else:
            joined = tff.federated_value(ops.expected_clients, tff.SERVER)
        told = tff.federated_broadcast(tff.federated_map(prepare_fn, (state, joined)))
        residues, counts = tff.federated_map(encode_fn, (value, told))
        total = tff.backends.mapreduce.federated_secure_modular_sum(
            residues, 2**ops.bits
        )
        next_state, mean, measurements = tff.federated_map(
            decode_fn, (state, total, tff.federated_sum(counts))
        )
        return tff.templates.MeasuredProcessOutput(next_state, mean, measurements)

    return tff.templates.AggregationProcess(initialize, next_fn)
