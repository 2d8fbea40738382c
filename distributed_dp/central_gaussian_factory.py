"""Aggregation under the central Gaussian mechanism: the baseline."""

from __future__ import annotations

import tensorflow_federated as tff

from distributed_dp.accounting import CohortScheme, GaussianParameters
from distributed_dp.central_aggregation import build_central_process
from distributed_dp.random_bits import check_seed
from distributed_dp.update_layout import NoiseSeeds, UpdateLayout


class CentralGaussianFactory(tff.aggregators.UnweightedAggregationFactory):
    """Clipped sum plus Gaussian noise of the server, divided by the expected cohort.

    Guarantees: with the parameters of `accounting.calibrate`, the privacy that
    `accounting.compute_privacy` states, for an adversary who sees the results only.
    Not guaranteed: anything against the server, which sees every update's sum without
    noise. With `diagnostics`, measurements are exact functions of the clients' data.
    For adaptive clipping use `tff.aggregators.DifferentiallyPrivateFactory`.
    """

    def __init__(
        self,
        parameters: GaussianParameters,
        scheme: CohortScheme,
        *,
        noise_seeds: NoiseSeeds = NoiseSeeds.ENTROPY,
        server_noise_seed: tuple[int, int] | None = None,
        diagnostics: bool = True,
    ):
        """Initialises the factory.

        Args:
          parameters: Clip and noise multiplier.
          scheme: Its clients_per_round is the divisor.
          noise_seeds: The form of the value; carried client seeds are not used.
          server_noise_seed: int32 pair, root of the rounds' noise seeds. None takes the
            operating system's entropy every round.
          diagnostics: Whether to measure norms and clipping.

        Raises:
          ValueError: If parameters and scheme disagree, or the seed is no int32 pair.
        """
        if parameters.clients_per_round != scheme.clients_per_round:
            raise ValueError(
                "`parameters.clients_per_round` must equal the scheme's "
                f"{scheme.clients_per_round}. Found {parameters.clients_per_round!r}."
            )
        check_seed("server_noise_seed", server_noise_seed)
        self._parameters = parameters
        self._noise_seeds = noise_seeds
        self._server_noise_seed = server_noise_seed
        self._diagnostics = diagnostics

    def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
        """Builds the process for structures of float32 tensors."""
        return build_central_process(
            value_type,
            UpdateLayout(value_type, self._noise_seeds),
            l2_clip=self._parameters.l2_clip,
            stddev=self._parameters.central_stddev,
            divisor=self._parameters.clients_per_round,
            server_noise_seed=self._server_noise_seed,
            diagnostics=self._diagnostics,
        )
