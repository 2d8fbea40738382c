"""One client's update from float vector to noisy residues, and the sum's way back.

Source: Kairouz, Liu, Steinke 2021, algorithms 1 and 2. Functions of tensors alone: all
randomness comes in as seeds, all parameters are fixed when the codec is built.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Protocol

import tensorflow as tf

from distributed_dp.clipping import clip_by_l2_norm, compute_l2_norm
from distributed_dp.modular import center, check_bits, wrap
from distributed_dp.noise import NoiseShares
from distributed_dp.random_bits import split_seed
from distributed_dp.rotation import Rotation
from distributed_dp.rounding import round_conditionally
from distributed_dp.xla import compile_piece

_MAX_INTEGER = 2.0**31


class GridParameters(Protocol):
    """What the codec reads of `accounting.DistributedParameters`."""

    @property
    def l2_clip(self) -> float: ...

    @property
    def granularity(self) -> float: ...

    @property
    def local_stddev(self) -> float: ...

    @property
    def bits(self) -> int: ...

    @property
    def padded_dim(self) -> int: ...

    @property
    def scaled_l2_clip(self) -> float: ...

    @property
    def max_squared_norm(self) -> float: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedUpdate:
    """What one client sends, and what only a simulation may look at.

    Attributes:
      residues: [padded_dim] uint32 in [0, 2**bits).
      norm: Scalar float32, L2 norm before clipping, in units of x (0 if not finite).
      is_clipped: Scalar float32, 1 if the norm exceeded the clip.
      is_finite: Scalar float32, 0 if the update had a NaN or infinity.
      rounded_norm: Scalar float32, L2 norm after rounding, in units of x.
      num_redraws: Scalar float32.
    """

    residues: tf.Tensor
    norm: tf.Tensor
    is_clipped: tf.Tensor
    is_finite: tf.Tensor
    rounded_norm: tf.Tensor
    num_redraws: tf.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
    """Encoder and decoder of one mechanism.

    `l2_clip` arguments may differ from the parameters' clip (adaptive clipping): the
    grid and the noise scale with it, so the integer side stays as calibrated.

    Attributes:
      parameters: Grid, clip and bits.
      rotation: Public rotation; its padded_dim is the parameters'.
      noise: The noise shares, in grid units.
    """

    parameters: GridParameters
    rotation: Rotation
    noise: NoiseShares

    def __post_init__(self) -> None:
        check_bits(self.parameters.bits)
        if self.rotation.padded_dim != self.parameters.padded_dim:
            raise ValueError(
                "`parameters.padded_dim` must equal the rotation's "
                f"{self.rotation.padded_dim}. Found {self.parameters.padded_dim!r}."
            )
        largest = self.parameters.scaled_l2_clip + math.sqrt(self.rotation.padded_dim)
        if largest >= _MAX_INTEGER:
            raise ValueError(
                "`granularity` must keep l2_clip / granularity below 2**31; use fewer "
                f"bits. Found {self.parameters.granularity!r}."
            )

    def encode(
        self,
        x: tf.Tensor,
        *,
        l2_clip: tf.Tensor | float,
        joined: tf.Tensor,
        rotation_seed: tf.Tensor,
        noise_seed: tf.Tensor,
    ) -> EncodedUpdate:
        """Clips, rotates, scales, rounds, adds noise, wraps.

        Guarantees: without the noise the integer vector's squared norm is at most
        parameters.max_squared_norm, whatever x is (non-finite included).

        Args:
          x: [dim] float32, units of the update.
          l2_clip: Scalar, the clip in force.
          joined: Scalar integer, the number of clients that joined the round.
          rotation_seed: int32[2], public, the round's.
          noise_seed: int32[2], secret, this client's and this round's alone.

        Returns:
          The residues and this client's measurements.
        """
        rounding_seed, share_seed = split_seed(noise_seed, 2)
        compiled = functools.partial(compile_piece, size=self.rotation.padded_dim)
        clip = tf.cast(l2_clip, tf.float32)
        clipped, norm = compiled(clip_by_l2_norm)(x, clip)
        rotated = self.rotation.rotate(clipped, rotation_seed)
        scaled = compiled(self._scale)(rotated, clip)
        rounded = round_conditionally(
            scaled, self.parameters.max_squared_norm, rounding_seed
        )
        share = self.noise.sample_share(
            self.rotation.padded_dim, share_seed, tf.cast(joined, tf.int64)
        )
        residues = compiled(self._add_share)(rounded.values, share)
        norm, limit = tf.squeeze(norm, -1), tf.cast(l2_clip, tf.float64)
        is_finite = tf.math.is_finite(norm)
        step = limit / self.parameters.scaled_l2_clip
        return EncodedUpdate(
            residues=residues,
            norm=tf.cast(tf.where(is_finite, norm, tf.zeros_like(norm)), tf.float32),
            is_clipped=tf.cast(is_finite & (norm > limit), tf.float32),
            is_finite=tf.cast(is_finite, tf.float32),
            rounded_norm=tf.cast(tf.sqrt(rounded.squared_norm) * step, tf.float32),
            num_redraws=tf.cast(rounded.num_redraws, tf.float32),
        )

    def decode(
        self,
        total: tf.Tensor,
        *,
        l2_clip: tf.Tensor | float,
        rotation_seed: tf.Tensor,
    ) -> tf.Tensor:
        """Maps a modular sum to the estimate of the clients' sum.

        Args:
          total: [padded_dim] int64, any representatives of the residues.
          l2_clip: Scalar, the clip that the clients used.
          rotation_seed: int32[2], the round's.

        Returns:
          [dim] float32, units of the update.
        """
        step = tf.cast(l2_clip, tf.float64) / self.parameters.scaled_l2_clip
        centered = tf.cast(center(total, self.parameters.bits), tf.float64) * step
        return self.rotation.unrotate(tf.cast(centered, tf.float32), rotation_seed)

    def _add_share(self, rounded: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
        integers = tf.bitcast(tf.cast(rounded, tf.int32), tf.uint32)
        return wrap(integers + tf.bitcast(share, tf.uint32), self.parameters.bits)

    def _scale(self, rotated: tf.Tensor, l2_clip: tf.Tensor | float) -> tf.Tensor:
        """Multiplies by 1 / granularity and clips what float32 rotation added."""
        limit = tf.constant(self.parameters.scaled_l2_clip, tf.float64)
        norm = compute_l2_norm(rotated)
        factor = tf.minimum(
            limit / tf.cast(l2_clip, tf.float64), limit / tf.maximum(norm, 1e-300)
        )
        return rotated * tf.cast(factor, tf.float32)
