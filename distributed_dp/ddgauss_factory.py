"""Aggregation under the distributed discrete Gaussian mechanism."""

from __future__ import annotations

from distributed_dp.accounting import (
    CohortBounds,
    DDGaussParameters,
    DistributedParameters,
)
from distributed_dp.distributed_factory import DistributedFactory
from distributed_dp.noise import DiscreteGaussianShares, NoiseShares


class DDGaussFactory(DistributedFactory):
    """Distributed discrete Gaussian (Kairouz, Liu, Steinke 2021, algorithms 1 and 2).

    Guarantees: with the parameters of `accounting.calibrate` and cohorts drawn by the
    scheme, the released means have the privacy that `accounting.compute_privacy`
    states, under its assumptions.
    """

    def _build_noise(
        self, parameters: DistributedParameters, bounds: CohortBounds
    ) -> NoiseShares:
        if not isinstance(parameters, DDGaussParameters):
            raise ValueError(
                f"`parameters` must be DDGaussParameters. Found {parameters!r}."
            )
        return DiscreteGaussianShares(
            parameters.central_scale, low=bounds.low, high=bounds.high
        )
