"""Laws fitted to measured distances: exponents, floors and success rates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """y = scale * x ** exponent, fitted to logarithms by least squares.

    Attributes:
        exponent: The slope.
        stderr: Its standard error.
        low: Lower end of its t interval, at CONFIDENCE.
        high: Upper end.
        scale: y at x = 1.
        num_points: How many pairs.
    """

    exponent: float
    stderr: float
    low: float
    high: float
    scale: float
    num_points: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """A share of successes with its Clopper-Pearson interval, at CONFIDENCE."""

    successes: int
    count: int
    rate: float
    low: float
    high: float


def fit_power_law(x: npt.ArrayLike, y: npt.ArrayLike) -> PowerLaw:
    """Fits a power law.

    Args:
        x: [points], positive, at least two values.
        y: [points], positive; at least three points.

    Raises:
        ValueError: If there are too few points, or one is not positive and finite.
    """
    columns = {"x": np.asarray(x, np.float64), "y": np.asarray(y, np.float64)}
    for name, values in columns.items():
        if not np.all(np.isfinite(values) & (values > 0)):
            raise ValueError(f"`{name}` must be positive and finite. Found {values!r}.")
    count = len(columns["x"])
    if count < 3 or len(np.unique(columns["x"])) < 2 or len(columns["y"]) != count:
        raise ValueError(
            "`x` and `y` must be equally many, at least 3, at two values of x or more. "
            f"Found {count} and {len(columns['y'])}."
        )
    fit = stats.linregress(np.log(columns["x"]), np.log(columns["y"]))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 2)) * float(fit.stderr)
    return PowerLaw(
        exponent=float(fit.slope),
        stderr=float(fit.stderr),
        low=float(fit.slope) - half,
        high=float(fit.slope) + half,
        scale=math.exp(float(fit.intercept)),
        num_points=count,
    )


def compute_floor(distances: npt.ArrayLike, *, last: int) -> npt.NDArray[np.float64]:
    """Returns the mean distance over the last rounds.

    Args:
        distances: [..., T], by round.
        last: How many of the last rounds, at least 1 and at most T.
    """
    values = np.asarray(distances, np.float64)
    if not 1 <= last <= values.shape[-1]:
        raise ValueError(
            f"`last` must be in [1, {values.shape[-1]}], the rounds. Found {last!r}."
        )
    return np.asarray(values[..., -last:].mean(axis=-1))


def compute_contraction(distances: npt.ArrayLike, *, least: float) -> float | None:
    """Returns the geometric mean factor of the distance a round, before the floor.

    Args:
        distances: [T + 1], from the start on.
        least: Rounds count while the distance at their end is at least this.

    Returns:
        The factor, or None if no round counts.
    """
    values = np.asarray(distances, np.float64)
    below = np.flatnonzero(values < least)
    end = int(below[0]) - 1 if len(below) else len(values) - 1
    if end < 1:
        return None
    return float((values[end] / values[0]) ** (1 / end))


def compute_rate(outcomes: Sequence[bool]) -> Rate:
    """Returns the share of successes and its interval."""
    count, successes = len(outcomes), int(sum(outcomes))
    if count == 0:
        raise ValueError("`outcomes` must hold at least one. Found none.")
    found = stats.binomtest(successes, count).proportion_ci(CONFIDENCE, "exact")
    return Rate(
        successes=successes,
        count=count,
        rate=successes / count,
        low=float(found.low),
        high=float(found.high),
    )
