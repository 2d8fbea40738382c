"""Adaptive clipping: the clip follows a quantile of the clients' norms.

Source: Andrew, Thakkar, McMahan, Ramaswamy 2021 (arXiv 1905.03871), algorithm 1 with
the geometric update, carried into the modular sum: every client adds one integer
coordinate, +u if its norm is within the clip and -u if not, with its own share of
integer noise.
"""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

from distributed_dp.noise import DiscreteGaussianShares, NoiseShares, SkellamShares

_MIN_LOCAL_SCALE = 4.0
_TAIL_STDDEVS = 8.0
# How far the clip may move from where it started, so that float32 holds all that is
# derived from it.
_MAX_CLIP_RATIO = 2.0**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """Settings of adaptive clipping; the initial clip is the mechanism's.

    Attributes:
      noise_multiplier: Standard deviation of the sum's noise over one client's
        contribution; `quantile_noise_multiplier` of the accountant.
      contribution: u, the integer that one client adds or subtracts;
        `quantile_contribution` of the accountant.
      target_quantile: Fraction of clients whose norm should be within the clip.
      learning_rate: Of the geometric update.
    """

    noise_multiplier: float
    contribution: int
    target_quantile: float = 0.5
    learning_rate: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise ValueError(
                f"`noise_multiplier` must be positive. Found {self.noise_multiplier!r}."
            )
        if self.contribution < 1 or self.contribution % 1:
            raise ValueError(
                "`contribution` must be an integer, at least 1. Found "
                f"{self.contribution!r}."
            )
        if not 0 <= self.target_quantile <= 1:
            raise ValueError(
                f"`target_quantile` must be in [0, 1]. Found {self.target_quantile!r}."
            )
        if not 0 <= self.learning_rate < math.inf:
            raise ValueError(
                f"`learning_rate` must be at least 0. Found {self.learning_rate!r}."
            )

    @property
    def central_scale(self) -> float:
        """Standard deviation of the noise of the summed coordinate, in its units."""
        return self.noise_multiplier * self.contribution

    def check_fits(self, bits: int, max_clients: int) -> None:
        """Raises ValueError if the summed coordinate could wrap around."""
        largest = self.contribution * max_clients + _TAIL_STDDEVS * self.central_scale
        if largest >= 2 ** (bits - 1):
            raise ValueError(
                "`bits` must hold the sum of the quantile indicators of "
                f"{max_clients} clients, below 2**(bits - 1) = {2 ** (bits - 1)}; use "
                f"more bits. Found a range of {largest:.0f} at bits={bits!r}."
            )

    def update_clip(
        self,
        l2_clip: tf.Tensor,
        indicator_sum: tf.Tensor,
        expected_clients: int,
        *,
        initial_clip: float,
    ) -> tf.Tensor:
        """Returns the next round's clip, within a factor of 2**20 of the initial one.

        Args:
          l2_clip: Scalar float32, the clip in force.
          indicator_sum: Scalar int64, noisy sum of the +-u.
          expected_clients: n; the true number is private.
          initial_clip: The clip of the first round.
        """
        scale = float(self.contribution * expected_clients)
        fraction = 0.5 + 0.5 * tf.cast(indicator_sum, tf.float32) / scale
        fraction = tf.clip_by_value(fraction, 0.0, 1.0)
        step = self.learning_rate * (fraction - self.target_quantile)
        low, high = initial_clip / _MAX_CLIP_RATIO, initial_clip * _MAX_CLIP_RATIO
        return tf.clip_by_value(l2_clip * tf.exp(-step), low, high)


def build_adaptive_clip(
    *,
    clients_per_round: int,
    max_clients: int,
    noise_multiplier: float | None = None,
    target_quantile: float = 0.5,
    learning_rate: float = 0.2,
) -> AdaptiveClip:
    """Chooses the integer contribution so that every share is fine enough.

    Args:
      clients_per_round: n, expected cohort.
      max_clients: Largest plausible cohort; its shares are the smallest.
      noise_multiplier: None for the published 0.05 n on indicators of sensitivity 1/2,
        which is 0.1 n.
      target_quantile: See `AdaptiveClip`.
      learning_rate: See `AdaptiveClip`.
    """
    multiplier = (
        0.1 * clients_per_round if noise_multiplier is None else noise_multiplier
    )
    needed = _MIN_LOCAL_SCALE * math.sqrt(max_clients) / multiplier
    return AdaptiveClip(
        noise_multiplier=multiplier,
        contribution=max(1, math.ceil(needed)),
        target_quantile=target_quantile,
        learning_rate=learning_rate,
    )


def build_indicator_noise(
    adaptive_clip: AdaptiveClip, main: NoiseShares
) -> NoiseShares:
    """Returns shares for the indicator coordinate, split like the main ones."""
    kind = SkellamShares if isinstance(main, SkellamShares) else DiscreteGaussianShares
    return kind(adaptive_clip.central_scale, low=main.low, high=main.high)
