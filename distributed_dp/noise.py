"""Who adds which noise: shares whose sum has one law, whatever the cohort's size.

The analyst's guarantee needs noise whose law does not depend on who takes part. Two
mechanisms, one interface:

* discrete Gaussian: with K joined clients a share has scale central_scale /
  sqrt(clamp(K, low, high)); sums of equal shares resemble one discrete Gaussian of
  scale central_scale (the accountant charges the distance).
* Skellam: the central variance is cut into equal units; with K joined clients a share
  is num_units // clamp(K, low, high) units. Variances add exactly.

What the shares of the clients that arrived leave missing (dropouts, a cohort below
`low`, units that did not divide) is drawn by the server and added inside the modular
sum, before centring and decoding. A cohort above `high` adds more than the full noise;
the accountant charges that event's probability.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from fractions import Fraction

import tensorflow as tf

from distributed_dp.discrete_gaussian import build_discrete_gaussian_sampler
from distributed_dp.random_bits import fold_in
from distributed_dp.skellam import (
    MAX_VARIANCE,
    build_skellam_sampler,
    compute_half_width,
)

SKELLAM_UNITS_PER_CLIENT = (4, 2, 1)
"""Units of variance per client of the largest cohort; the first whose tables fit."""

SKELLAM_COHORT_RATIO = 4
"""Shares are scaled for cohorts down to this fraction of the largest."""

MAX_TABLE_ENTRIES = 1 << 20


class NoiseShares(abc.ABC):
    """Integer noise in shares, in grid units.

    Attributes:
      low: Least cohort size that shares are scaled for.
      high: Largest one.
    """

    def __init__(self, central_scale: float, low: int, high: int):
        if not 0 <= central_scale < math.inf:
            raise ValueError(
                f"`central_scale` must be finite and >= 0. Found {central_scale!r}."
            )
        if not 1 <= low <= high:
            raise ValueError(f"`low` must be in [1, high={high!r}]. Found {low!r}.")
        self.low = low
        self.high = high

    @abc.abstractmethod
    def sample_share(self, dim: int, seed: tf.Tensor, joined: tf.Tensor) -> tf.Tensor:
        """Draws one client's share.

        Args:
          dim: Number of coordinates.
          seed: Integer[2], the client's own stream.
          joined: Scalar int64, number of clients that joined the round.

        Returns:
          [dim] int32; where the noise can leave its range, modulo 2**32.
        """

    @abc.abstractmethod
    def sample_missing(
        self, dim: int, seed: tf.Tensor, joined: tf.Tensor, arrived: tf.Tensor
    ) -> tf.Tensor:
        """Draws what the shares of `arrived` clients leave missing.

        Args:
          dim: Number of coordinates.
          seed: Integer[2], the server's stream of the round.
          joined: Scalar int64, the size that the clients were told.
          arrived: Scalar int64, clients whose share is in the sum.

        Returns:
          [dim] int64.
        """

    @abc.abstractmethod
    def compute_variance_fraction(self, joined: int, arrived: int) -> float:
        """Part of the central variance in the arrived clients' shares.

        Above 1 where more than `high` clients arrived.
        """

    def _clamp(self, joined: tf.Tensor) -> tf.Tensor:
        joined = tf.cast(joined, tf.int64)
        low, high = tf.constant(self.low, tf.int64), tf.constant(self.high, tf.int64)
        return tf.minimum(tf.maximum(joined, low), high)


class DiscreteGaussianShares(NoiseShares):
    """Shares of a discrete Gaussian of scale `central_scale`."""

    def __init__(self, central_scale: float, *, low: int, high: int):
        super().__init__(central_scale, low, high)
        variance = Fraction(float(central_scale)) ** 2
        self.sampler = build_discrete_gaussian_sampler(
            [variance / size for size in range(low, high + 1)]
        )

    def sample_share(self, dim: int, seed: tf.Tensor, joined: tf.Tensor) -> tf.Tensor:
        row = self._clamp(joined) - tf.constant(self.low, tf.int64)
        share = self.sampler.sample([dim], seed, row=row)
        if self.sampler.wide:
            share = tf.bitcast(tf.bitcast(share, tf.uint32)[..., 0], tf.int32)
        return share

    def sample_missing(
        self, dim: int, seed: tf.Tensor, joined: tf.Tensor, arrived: tf.Tensor
    ) -> tf.Tensor:
        size = self._clamp(joined)
        row = size - tf.constant(self.low, tf.int64)

        def draw(stream: tf.Tensor) -> tf.Tensor:
            return self.sampler.sample([dim], stream, row=row)

        return _sum_draws(draw, dim, seed, size - tf.cast(arrived, tf.int64))

    def compute_variance_fraction(self, joined: int, arrived: int) -> float:
        return arrived / min(max(joined, self.low), self.high)


class SkellamShares(NoiseShares):
    """Shares of a Skellam of standard deviation `central_scale`."""

    def __init__(self, central_scale: float, *, low: int, high: int):
        super().__init__(central_scale, low, high)
        self.low = max(low, -(-high // SKELLAM_COHORT_RATIO))
        per_client = _choose_units(central_scale, self.low, high)
        self.num_units = per_client * high
        self.max_units = self.num_units // self.low
        unit = Fraction(float(central_scale)) ** 2 / self.num_units
        self.sampler = build_skellam_sampler(
            [units * unit for units in range(self.max_units + 1)]
        )

    def sample_share(self, dim: int, seed: tf.Tensor, joined: tf.Tensor) -> tf.Tensor:
        return self.sampler.sample([dim], seed, row=self._compute_units(joined))

    def sample_missing(
        self, dim: int, seed: tf.Tensor, joined: tf.Tensor, arrived: tf.Tensor
    ) -> tf.Tensor:
        present = self._compute_units(joined) * tf.cast(arrived, tf.int64)
        total = tf.constant(self.num_units, tf.int64)
        missing = tf.maximum(total - present, tf.constant(0, tf.int64))
        full = missing // self.max_units

        def draw(stream: tf.Tensor) -> tf.Tensor:
            return self.sampler.sample([dim], stream, row=self.max_units)

        rest = self.sampler.sample(
            [dim],
            fold_in(seed, tf.constant(-1, tf.int64)),
            row=missing % self.max_units,
        )
        return _sum_draws(draw, dim, seed, full) + tf.cast(rest, tf.int64)

    def compute_variance_fraction(self, joined: int, arrived: int) -> float:
        units = self.num_units // min(max(joined, self.low), self.high)
        return units * arrived / self.num_units

    def _compute_units(self, joined: tf.Tensor) -> tf.Tensor:
        return tf.constant(self.num_units, tf.int64) // self._clamp(joined)


def _choose_units(central_scale: float, low: int, high: int) -> int:
    """Returns the finest division whose tables fit; 1 where K is fixed."""
    for per_client in (1,) if low == high else SKELLAM_UNITS_PER_CLIENT:
        max_units = per_client * high // low
        variance = central_scale**2 * max_units / (per_client * high)
        if variance > MAX_VARIANCE:
            continue
        if (max_units + 1) * 2 * compute_half_width(variance) <= MAX_TABLE_ENTRIES:
            return per_client
    raise ValueError(
        "`central_scale` must be small enough for the Skellam sampler's tables; use "
        f"fewer bits or a larger cohort. Found {central_scale!r} for {low} to {high} "
        "clients."
    )


def _sum_draws(
    draw: Callable[[tf.Tensor], tf.Tensor],
    dim: int,
    seed: tf.Tensor,
    count: tf.Tensor,
) -> tf.Tensor:
    """Sums `count` independent draws; none for a count <= 0."""

    def add(index: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        drawn = draw(fold_in(seed, index))
        return index + 1, total + tf.cast(drawn, tf.int64)

    _, total = tf.while_loop(
        lambda index, _: index < count,
        add,
        (tf.constant(0, tf.int64), tf.zeros([dim], tf.int64)),
    )
    return total
