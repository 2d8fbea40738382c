"""The central Gaussian by privacy loss distributions."""

import math

import dp_accounting
import numpy as np
from dp_accounting import pld

from distributed_dp.accounting import validation

# The grid of privacy losses: this many steps up to the loss at a 7-sigma outcome. A
# pessimistic estimate is valid on any grid; a finer one is tighter and slower.
_GRID_STEPS = 2500
_MIN_INTERVAL = 1e-7


def compute_epsilon_pld(
    noise_multiplier: float, sampling_rate: float, *, num_rounds: int, delta: float
) -> float:
    """Returns epsilon of the Poisson-sampled Gaussian, by dp_accounting's PLD.

    Source: dp_accounting's PLDAccountant (add or remove one), pessimistic estimate.

    Args:
      noise_multiplier: z, standard deviation over sensitivity.
      sampling_rate: q in (0, 1].
      num_rounds: T.
      delta: in (0, 1).

    Returns:
      An upper bound on epsilon at delta; inf for z = 0.
    """
    validation.check_non_negative("noise_multiplier", noise_multiplier)
    validation.check_sampling_rate(sampling_rate)
    validation.check_integer("num_rounds", num_rounds, low=1)
    validation.check_delta(delta)
    if noise_multiplier == 0:
        return math.inf
    accountant = pld.PLDAccountant(
        value_discretization_interval=_compute_interval(noise_multiplier, sampling_rate)
    )
    event = dp_accounting.PoissonSampledDpEvent(
        sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    accountant.compose(event, num_rounds)
    return float(accountant.get_epsilon(delta))


def _compute_interval(noise_multiplier: float, sampling_rate: float) -> float:
    exponent = 7 / noise_multiplier + 0.5 / noise_multiplier**2
    # log(1 + q (e^x - 1)), without overflow.
    largest = float(
        np.logaddexp(np.log1p(-sampling_rate), np.log(sampling_rate) + exponent)
        if sampling_rate < 1
        else exponent
    )
    return max(_MIN_INTERVAL, largest / _GRID_STEPS)
