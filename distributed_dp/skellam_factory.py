"""Aggregation under the distributed Skellam mechanism."""

from __future__ import annotations

from distributed_dp.accounting import (
    CohortBounds,
    DistributedParameters,
    SkellamParameters,
)
from distributed_dp.distributed_factory import DistributedFactory
from distributed_dp.noise import NoiseShares, SkellamShares


class DistributedSkellamFactory(DistributedFactory):
    """Distributed Skellam (Agarwal, Kairouz, Liu 2021, algorithm 1).

    Guarantees: with the parameters of `accounting.calibrate` and cohorts drawn by the
    scheme, the released means have the privacy that `accounting.compute_privacy`
    states, under its assumptions.
    """

    def _build_noise(
        self, parameters: DistributedParameters, bounds: CohortBounds
    ) -> NoiseShares:
        if not isinstance(parameters, SkellamParameters):
            raise ValueError(
                f"`parameters` must be SkellamParameters. Found {parameters!r}."
            )
        return SkellamShares(parameters.central_scale, low=bounds.low, high=bounds.high)
