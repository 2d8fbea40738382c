"""One setting that the tests of statements share: EMNIST, near epsilon = 3."""

import math

from distributed_dp.accounting import (
    CohortScheme,
    DDGaussParameters,
    GaussianParameters,
    Sampling,
    compute_privacy,
)

POISSON = CohortScheme(Sampling.POISSON, 3400, 100)
FIXED = CohortScheme(Sampling.FIXED, 3400, 100)
RUN = dict(num_rounds=1500, delta=1 / 3400)


def get_parameters(kind=DDGaussParameters, **changes):
    fields = dict(
        l2_clip=0.03,
        granularity=6e-6,
        local_stddev=0.005,
        beta=math.exp(-0.5),
        bits=16,
        padded_dim=2**20,
        clients_per_round=100,
    )
    return kind(**{**fields, **changes})


def get_gaussian(noise_multiplier=1.6, clients_per_round=100):
    return GaussianParameters(
        l2_clip=0.03,
        noise_multiplier=noise_multiplier,
        clients_per_round=clients_per_round,
    )


def compute_epsilon(parameters, scheme=POISSON, **keywords):
    return compute_privacy(parameters, scheme, **{**RUN, **keywords}).epsilon
