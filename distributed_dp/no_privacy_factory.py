"""Aggregation without privacy, in the shape of the private factories."""

from __future__ import annotations

import math

import tensorflow_federated as tff

from distributed_dp.accounting import CohortScheme
from distributed_dp.central_aggregation import build_central_process
from distributed_dp.update_layout import NoiseSeeds, UpdateLayout


class NoPrivacyFactory(tff.aggregators.UnweightedAggregationFactory):
    """The sum divided by the expected cohort: no noise, no clip, no privacy.

    The same shape as the private factories, and what they tend to without noise and
    with a clip that no update reaches.
    """

    def __init__(
        self,
        scheme: CohortScheme,
        *,
        l2_clip: float | None = None,
        noise_seeds: NoiseSeeds = NoiseSeeds.ENTROPY,
        diagnostics: bool = True,
    ):
        """Initialises the factory; `l2_clip` None does not clip."""
        if l2_clip is not None and not 0 < l2_clip < math.inf:
            raise ValueError(f"`l2_clip` must be positive. Found {l2_clip!r}.")
        self._scheme = scheme
        self._l2_clip = l2_clip
        self._noise_seeds = noise_seeds
        self._diagnostics = diagnostics

    def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
        """Builds the process for structures of float32 tensors."""
        return build_central_process(
            value_type,
            UpdateLayout(value_type, self._noise_seeds),
            l2_clip=self._l2_clip,
            stddev=0.0,
            divisor=self._scheme.clients_per_round,
            server_noise_seed=None,
            diagnostics=self._diagnostics,
        )
