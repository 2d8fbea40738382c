"""The distributed mechanisms as TensorFlow Privacy queries.

Thin: the same codec and noise shares as the aggregation factories, in the interface of
`tensorflow_privacy.SumAggregationDPQuery`. A query knows neither the round's cohort nor
who dropped out, so shares are scaled for exactly `parameters.clients_per_round`
clients, and the privacy of the sum is that of the clients that were really summed
(`accounting.compute_server_privacy` with that number of shares). The aggregation
factories, which add missing shares, are to be preferred.
"""

from __future__ import annotations

import collections
from typing import Any

import dp_accounting
import tensorflow as tf
import tensorflow_privacy as tfp

from distributed_dp.accounting import (
    DDGaussParameters,
    DistributedParameters,
    SkellamParameters,
)
from distributed_dp.encoding import Codec
from distributed_dp.entropy import draw_entropy_seed
from distributed_dp.noise import DiscreteGaussianShares, NoiseShares, SkellamShares
from distributed_dp.random_bits import check_seed, fold_in, split_seed
from distributed_dp.rotation import RotationKind, build_rotation


class _DistributedSumQuery(tfp.SumAggregationDPQuery):
    """Encodes records to residues, decodes their sum.

    Preprocessed records are int64 vectors in [0, 2**bits); any sum of them, modular or
    not, decodes to the same result.
    """

    def __init__(
        self,
        parameters: DistributedParameters,
        record_template: Any,
        noise: NoiseShares,
        rotation: RotationKind,
        rotation_seed: tuple[int, int] | None,
    ):
        check_seed("rotation_seed", rotation_seed)
        self._parameters = parameters
        self._template = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape, tf.float32), record_template
        )
        leaves = tf.nest.flatten(self._template)
        dim = sum(leaf.shape.num_elements() for leaf in leaves)
        self._codec = Codec(
            parameters=parameters, rotation=build_rotation(rotation, dim), noise=noise
        )
        self._rotation_seed = rotation_seed

    def initial_global_state(self) -> Any:
        """Round counter and root of the public rotation seeds."""
        seed = self._rotation_seed
        return collections.OrderedDict(
            round_number=tf.constant(0, tf.int64),
            rotation_seed=draw_entropy_seed() if seed is None else tf.constant(seed),
        )

    def initial_sample_state(self, template: Any = None) -> tf.Tensor:
        """Zeros of the shape of preprocessed records, whatever the template."""
        del template
        return tf.zeros([self._parameters.padded_dim], tf.int64)

    def derive_sample_params(self, global_state: Any) -> Any:
        """The round's public rotation seed, int32[2]."""
        return self._compute_rotation_seed(global_state)

    def preprocess_record(self, params: Any, record: Any) -> tf.Tensor:
        """Returns the record's [padded_dim] int64 residues, noise share included."""
        leaves = [tf.reshape(leaf, [-1]) for leaf in tf.nest.flatten(record)]
        encoded = self._codec.encode(
            tf.concat(leaves, axis=0),
            l2_clip=self._parameters.l2_clip,
            joined=tf.constant(self._parameters.clients_per_round, tf.int64),
            rotation_seed=params,
            noise_seed=draw_entropy_seed(),
        )
        return tf.cast(encoded.residues, tf.int64)

    def get_noised_result(self, sample_state: Any, global_state: Any) -> Any:
        """Returns (sum estimate, next global state, DpEvent).

        The event is unsupported by dp_accounting on purpose: use `accounting`.
        """
        vector = self._codec.decode(
            sample_state,
            l2_clip=self._parameters.l2_clip,
            rotation_seed=self._compute_rotation_seed(global_state),
        )
        leaves = tf.nest.flatten(self._template)
        parts = tf.split(vector, [leaf.shape.num_elements() for leaf in leaves])
        shaped = [
            tf.reshape(part, leaf.shape)
            for part, leaf in zip(parts, leaves, strict=True)
        ]
        next_state = collections.OrderedDict(global_state)
        next_state["round_number"] = global_state["round_number"] + 1
        result = tf.nest.pack_sequence_as(self._template, shaped)
        return result, next_state, dp_accounting.UnsupportedDpEvent()

    def _compute_rotation_seed(self, global_state: Any) -> tf.Tensor:
        root, number = global_state["rotation_seed"], global_state["round_number"]
        return split_seed(fold_in(root, number), 1)[0]


class DDGaussSumQuery(_DistributedSumQuery):
    """The distributed discrete Gaussian as a sum query."""

    def __init__(
        self,
        parameters: DDGaussParameters,
        record_template: Any,
        *,
        rotation: RotationKind = RotationKind.HADAMARD,
        rotation_seed: tuple[int, int] | None = None,
    ):
        """Initialises the query.

        Args:
          parameters: The calibrated mechanism.
          record_template: A structure of tensors or specs with the records' shapes.
          rotation: Public rotation.
          rotation_seed: int32 pair; None draws one with the initial global state.
        """
        num_clients = parameters.clients_per_round
        noise = DiscreteGaussianShares(
            parameters.central_scale, low=num_clients, high=num_clients
        )
        super().__init__(parameters, record_template, noise, rotation, rotation_seed)


class SkellamSumQuery(_DistributedSumQuery):
    """The distributed Skellam mechanism as a sum query."""

    def __init__(
        self,
        parameters: SkellamParameters,
        record_template: Any,
        *,
        rotation: RotationKind = RotationKind.HADAMARD,
        rotation_seed: tuple[int, int] | None = None,
    ):
        """Initialises the query; see `DDGaussSumQuery`."""
        num_clients = parameters.clients_per_round
        noise = SkellamShares(
            parameters.central_scale, low=num_clients, high=num_clients
        )
        super().__init__(parameters, record_template, noise, rotation, rotation_seed)
