"""What the inexact noise sampler costs: a part of delta.

Every drawn coordinate is within total variation eta of its exact law. That changes what
may be claimed by more than the total variation of all draws: a sampler that never
reaches the tail turns outcomes of the tail into proof that the user took part. How much
more is bounded through the Renyi curve (docs/privacy.md, "The sampler").
"""

import dataclasses
import math

import numpy as np

from distributed_dp.accounting import validation
from distributed_dp.accounting.conversion import REAL_ORDERS
from distributed_dp.accounting.release import Release

# eta: total-variation distance of one drawn noise coordinate to its exact law.
SAMPLER_TOTAL_VARIATION = 2.0**-70


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draws:
    """How much noise is drawn, and who can tell where.

    Attributes:
      num_rounds: T.
      shares_per_round: the expected number of draws summed in a coordinate; the sizes
        of cohorts do not depend on any user's data.
      sampling_rate: q; 1 where the cohort is known.
      replace_one: whether neighbours differ by a replaced user.
    """

    num_rounds: int
    shares_per_round: float
    sampling_rate: float
    replace_one: bool = False

    def __post_init__(self) -> None:
        validation.check_integer("num_rounds", self.num_rounds, low=1)
        validation.check_positive("shares_per_round", self.shares_per_round)
        validation.check_sampling_rate(self.sampling_rate)


def compute_sampler_charge(
    release: Release,
    draws: Draws,
    *,
    total_variation: float = SAMPLER_TOTAL_VARIATION,
) -> float:
    """Returns the delta that the inexact noise sampler costs over all rounds.

    Source: docs/privacy.md, "The sampler". With p = n eta, the distance of one
    coordinate's sum to its exact law, and
    s = min_a p^(1 - 1/a) (d - 1 + e^{(1 - 1/a) e(a)}), what a shifted sum misses,
    q < 1, add/remove: T (p d + max{p d + min{s, p d q / (1-q)}, (1-q) p d + q s}),
    q < 1, replace-one: T (2 p d + 2 q s), and q = 1: T (p d + s).
    At a small rate this is little more than 2 T n d eta.

    Guarantees: (epsilon, delta') for exact noise implies (epsilon, delta' + charge) for
    noise drawn within total variation eta a coordinate, at every epsilon.

    Args:
      release: its base curve must hold for exact noise.
      draws: how much is drawn.
      total_variation: eta.

    Returns:
      The charge; 0 for continuous noise, at most 1. Where the base curve is infinite
      there is nothing to claim, and the least charge is returned.
    """
    dim = release.num_coordinates
    base = release.base_curve(REAL_ORDERS)
    if dim == 0 or not np.isfinite(base).any():
        return compute_least_sampler_charge(
            release, draws, total_variation=total_variation
        )
    distance = min(1.0, draws.shares_per_round * total_variation)
    keep = 1 - 1 / REAL_ORDERS
    log_rest = math.log(dim - 1) if dim > 1 else -math.inf
    log_shifted = keep * math.log(distance) + np.logaddexp(log_rest, keep * base)
    shifted = math.exp(min(0.0, float(np.min(log_shifted))))
    return _combine(draws, distance * dim, max(shifted, distance * dim))


def compute_least_sampler_charge(
    release: Release,
    draws: Draws,
    *,
    total_variation: float = SAMPLER_TOTAL_VARIATION,
) -> float:
    """Returns the charge in the limit of endless noise: s = p d."""
    missed = draws.shares_per_round * total_variation * release.num_coordinates
    return _combine(draws, missed, missed)


def _combine(draws: Draws, missed: float, shifted: float) -> float:
    rate = draws.sampling_rate
    if rate == 1:
        per_round = missed + shifted
    elif draws.replace_one:
        per_round = 2 * missed + 2 * rate * shifted
    else:
        joining = missed + min(shifted, missed * rate / (1 - rate))
        leaving = (1 - rate) * missed + rate * shifted
        per_round = missed + max(joining, leaving)
    return min(1.0, draws.num_rounds * per_round)
