"""The aggregation factories in the settings that the tests run them in."""

import collections
import dataclasses
import math
from collections.abc import Callable

import numpy as np
import tensorflow_federated as tff

from distributed_dp.accounting import (
    CohortScheme,
    DDGaussParameters,
    GaussianParameters,
    Sampling,
    SkellamParameters,
)
from distributed_dp.central_gaussian_factory import CentralGaussianFactory
from distributed_dp.ddgauss_factory import DDGaussFactory
from distributed_dp.no_privacy_factory import NoPrivacyFactory
from distributed_dp.skellam_factory import DistributedSkellamFactory
from distributed_dp.update_layout import NoiseSeeds

EXPECTED_CLIENTS = 4
L2_CLIP = 2.0
CENTRAL_STDDEV = 0.02
DIM = 2016
FIXED = CohortScheme(Sampling.FIXED, 20, EXPECTED_CLIENTS)
POISSON = CohortScheme(Sampling.POISSON, 20, EXPECTED_CLIENTS)

# The keys are not in alphabetical order, and a leaf is a scalar.
UPDATE_TYPE = tff.to_type(
    collections.OrderedDict(
        w=(np.float32, [40, 50]),
        a=[(np.float32, [5, 3]), np.float32],
    )
)
CARRIED_TYPE = tff.to_type((UPDATE_TYPE, (np.int32, [2]), np.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A factory to test.

    Attributes:
      build: Takes noise_seeds and diagnostics.
      stddev: Standard deviation of a coordinate of the mean.
      l2_clip: None where nothing is clipped.
      is_distributed: Whether clients add noise, from their own seeds.
    """

    build: Callable[..., tff.aggregators.UnweightedAggregationFactory]
    stddev: float
    l2_clip: float | None = L2_CLIP
    is_distributed: bool = False


def build_parameters(kind: type, **changes):
    """Parameters of a distributed mechanism with noise of CENTRAL_STDDEV in the sum."""
    values = {
        "l2_clip": L2_CLIP,
        "granularity": 2.0**-12,
        "local_stddev": CENTRAL_STDDEV / math.sqrt(EXPECTED_CLIENTS),
        "beta": math.exp(-0.5),
        "bits": 18,
        "padded_dim": 2048,
        "clients_per_round": EXPECTED_CLIENTS,
    }
    return kind(**(values | changes))


def _build_distributed(factory: type, kind: type, scheme: CohortScheme) -> Case:
    def build(*, noise_seeds: NoiseSeeds, **options):
        if noise_seeds is NoiseSeeds.CARRIED:
            options = {"rotation_seed": (1, 2), "server_noise_seed": (3, 4)} | options
        return factory(
            build_parameters(kind), scheme, noise_seeds=noise_seeds, **options
        )

    return Case(
        build=build, stddev=CENTRAL_STDDEV / EXPECTED_CLIENTS, is_distributed=True
    )


def _build_central() -> Case:
    parameters = GaussianParameters(
        l2_clip=L2_CLIP,
        noise_multiplier=CENTRAL_STDDEV / L2_CLIP,
        clients_per_round=EXPECTED_CLIENTS,
    )

    def build(*, noise_seeds: NoiseSeeds, **options):
        if noise_seeds is NoiseSeeds.CARRIED:
            options = {"server_noise_seed": (3, 4)} | options
        return CentralGaussianFactory(
            parameters, POISSON, noise_seeds=noise_seeds, **options
        )

    return Case(build=build, stddev=CENTRAL_STDDEV / EXPECTED_CLIENTS)


CASES = {
    "ddgauss": _build_distributed(DDGaussFactory, DDGaussParameters, POISSON),
    "skellam": _build_distributed(
        DistributedSkellamFactory, SkellamParameters, POISSON
    ),
    "central_gaussian": _build_central(),
    "no_privacy": Case(
        build=lambda **options: NoPrivacyFactory(POISSON, **options),
        stddev=0.0,
        l2_clip=None,
    ),
}


def to_update(vector: np.ndarray) -> collections.OrderedDict:
    """Returns the update of a [DIM] vector."""
    vector = vector.astype(np.float32)
    return collections.OrderedDict(
        w=vector[:2000].reshape(40, 50),
        a=[vector[2000:2015].reshape(5, 3), vector[2015]],
    )


def to_vector(update) -> np.ndarray:
    """Inverts `to_update`."""
    leaves = [update["w"], *update["a"]]
    return np.concatenate([np.reshape(leaf, [-1]) for leaf in leaves])
