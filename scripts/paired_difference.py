"""Differences of runs that are paired by their seeds: intervals, verdicts, choices."""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


class Verdict(enum.Enum):
    """What an interval says: whether it leaves 0 out, and on which side."""

    LEADS = "leads"
    TRAILS = "trails"
    UNDECIDED = "undecided"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean difference with the ends of its confidence interval."""

    mean: float
    low: float
    high: float


def compute_interval(differences: Sequence[float]) -> Interval:
    """Returns the mean of paired differences and its t interval.

    Args:
        differences: One a seed, at least 2.
    """
    values = np.asarray(differences, np.float64)
    if len(values) < 2:
        raise ValueError(
            f"`differences` must be at least 2. Found {len(values)} of them."
        )
    mean = float(np.mean(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    return Interval(mean=mean, low=mean - half, high=mean + half)


def judge(interval: Interval, *, larger_is_better: bool) -> Verdict:
    """Returns the verdict of an interval of Upcycled-FL minus its opponent."""
    if interval.low > 0:
        return Verdict.LEADS if larger_is_better else Verdict.TRAILS
    if interval.high < 0:
        return Verdict.TRAILS if larger_is_better else Verdict.LEADS
    return Verdict.UNDECIDED


def choose_least(scores: Mapping[float, float], name: str) -> float:
    """Returns the value with the least score, the first of equals."""
    finite = {value: score for value, score in scores.items() if np.isfinite(score)}
    if not finite:
        raise ValueError(
            f"{name} must hold a value whose training ends with a finite loss. Found "
            f"{tuple(scores)!r}."
        )
    return min(finite, key=finite.__getitem__)
