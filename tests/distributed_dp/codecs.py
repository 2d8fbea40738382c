"""Codecs for tests: small, with every parameter at hand."""

import math

import tensorflow as tf

from distributed_dp.accounting import DDGaussParameters, Mechanism, SkellamParameters
from distributed_dp.encoding import Codec, EncodedUpdate
from distributed_dp.noise import DiscreteGaussianShares, SkellamShares
from distributed_dp.rotation import RotationKind, build_rotation


def build_codec(
    mechanism: Mechanism = Mechanism.DDGAUSS,
    *,
    dim: int,
    rotation: RotationKind = RotationKind.IDENTITY,
    l2_clip: float = 1.0,
    granularity: float = 2.0**-6,
    local_scale: float = 0.0,
    beta: float = math.exp(-0.5),
    bits: int = 20,
    clients_per_round: int = 4,
    cohorts: tuple[int, int] | None = None,
) -> Codec:
    """Builds a codec whose shares have `local_scale` grid units.

    Args:
      mechanism: DDGAUSS or SKELLAM.
      cohorts: Smallest and largest cohort, both `clients_per_round` if None.
    """
    turned = build_rotation(rotation, dim)
    parameter_type, share_type = {
        Mechanism.DDGAUSS: (DDGaussParameters, DiscreteGaussianShares),
        Mechanism.SKELLAM: (SkellamParameters, SkellamShares),
    }[mechanism]
    parameters = parameter_type(
        l2_clip=l2_clip,
        granularity=granularity,
        local_stddev=local_scale * granularity,
        beta=beta,
        bits=bits,
        padded_dim=turned.padded_dim,
        clients_per_round=clients_per_round,
    )
    low, high = cohorts or (clients_per_round, clients_per_round)
    noise = share_type(parameters.central_scale, low=low, high=high)
    return Codec(parameters=parameters, rotation=turned, noise=noise)


def encode(
    codec: Codec,
    x: tf.Tensor,
    seed: tf.Tensor,
    *,
    rotation_seed: tuple[int, int] = (5, 6),
    l2_clip: float | None = None,
    joined: int | None = None,
) -> EncodedUpdate:
    """Encodes with the codec's own clip and cohort unless told otherwise."""
    parameters = codec.parameters
    return codec.encode(
        tf.convert_to_tensor(x, tf.float32),
        l2_clip=parameters.l2_clip if l2_clip is None else l2_clip,
        joined=tf.constant(joined or parameters.clients_per_round, tf.int64),
        rotation_seed=tf.constant(rotation_seed),
        noise_seed=tf.convert_to_tensor(seed),
    )


def decode(
    codec: Codec,
    total: tf.Tensor,
    *,
    rotation_seed: tuple[int, int] = (5, 6),
    l2_clip: float | None = None,
) -> tf.Tensor:
    """Decodes with the codec's own clip unless told otherwise."""
    return codec.decode(
        tf.cast(total, tf.int64),
        l2_clip=codec.parameters.l2_clip if l2_clip is None else l2_clip,
        rotation_seed=tf.constant(rotation_seed),
    )
