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
# Wider steps overflow. Losses are thousands there: no epsilon is worth a number.
_MAX_INTERVAL = 100.0
# What dp_accounting cuts off the tails, 1e-15 each time, must stay far below delta.
_MIN_DELTA = 1e-12


def compute_epsilon_pld(
    noise_multiplier: float, sampling_rate: float, *, num_rounds: int, delta: float
) -> float:
    """Returns epsilon of the Poisson-sampled Gaussian, by dp_accounting's PLD.

    Source: dp_accounting's PLDAccountant (add or remove one), pessimistic estimate.

    Args:
      noise_multiplier: z, standard deviation over sensitivity.
      sampling_rate: q in (0, 1].
      num_rounds: T.
      delta: in [1e-12, 1).

    Returns:
      An upper bound on epsilon at delta; inf where the noise is next to none.

    Raises:
      ValueError: If a value is out of its range.
    """
    validation.check_non_negative("noise_multiplier", noise_multiplier)
    validation.check_sampling_rate(sampling_rate)
    validation.check_integer("num_rounds", num_rounds, low=1)
    validation.check_delta(delta)
    if delta < _MIN_DELTA:
        raise ValueError(
            f"`delta` must be at least {_MIN_DELTA:g} for privacy loss distributions, "
            "which end their tails at 1e-15: choose another accountant, rdp, or "
            f"analytic where all join every round. Found {delta!r}."
        )
    if noise_multiplier == 0:
        return math.inf
    interval = _compute_interval(noise_multiplier, sampling_rate)
    if interval > _MAX_INTERVAL:
        return math.inf
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    event = dp_accounting.PoissonSampledDpEvent(
        sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    accountant.compose(event, num_rounds)
    return float(accountant.get_epsilon(delta))


def _compute_interval(noise_multiplier: float, sampling_rate: float) -> float:
    inverse = 1 / noise_multiplier
    exponent = 7 * inverse + 0.5 * inverse * inverse
    # log(1 + q (e^x - 1)), without overflow.
    largest = float(
        np.logaddexp(np.log1p(-sampling_rate), np.log(sampling_rate) + exponent)
        if sampling_rate < 1
        else exponent
    )
    return max(_MIN_INTERVAL, largest / _GRID_STEPS)
