"""Tests of fit at one stated false-failure rate."""

import numpy as np
from scipy import stats

FALSE_FAILURE = 1e-6
"""Probability that a test of fit fails although the law is right."""

_MIN_EXPECTED = 25.0


def compute_p_value(values: np.ndarray, edges: np.ndarray, cdf: np.ndarray) -> float:
    """Returns the p-value of the pooled chi-square test.

    Args:
      values: Any shape; independent draws.
      edges: Increasing bounds of the cells: (-inf, e_0], (e_0, e_1], ..., (e_k, inf).
      cdf: P[Z <= e_i] under the law.

    Returns:
      The p-value, after pooling neighbours until each cell expects 25 draws.
    """
    size = values.size
    cells = np.searchsorted(edges, values.reshape(-1), side="left")
    observed = np.bincount(cells, minlength=len(edges) + 1)
    expected = np.diff(np.concatenate([[0.0], cdf, [1.0]])) * size
    pooled_observed, pooled_expected = [0.0], [0.0]
    for count, mean in zip(observed, expected, strict=True):
        if pooled_expected[-1] >= _MIN_EXPECTED:
            pooled_observed.append(0.0)
            pooled_expected.append(0.0)
        pooled_observed[-1] += count
        pooled_expected[-1] += mean
    if len(pooled_expected) > 1 and pooled_expected[-1] < _MIN_EXPECTED:
        last_observed, last_expected = pooled_observed.pop(), pooled_expected.pop()
        pooled_observed[-1] += last_observed
        pooled_expected[-1] += last_expected
    if len(pooled_expected) == 1:
        raise ValueError("`values` must be enough for two cells.")
    difference = np.subtract(pooled_observed, pooled_expected)
    statistic = float(np.sum(difference**2 / np.array(pooled_expected)))
    return float(stats.chi2.sf(statistic, len(pooled_expected) - 1))


def compute_variance_p_value(values: np.ndarray, variance: float) -> float:
    """Returns the two-sided p-value of the variance of Gaussian-like draws, mean 0."""
    statistic = float(np.sum(np.square(values, dtype=np.float64))) / variance
    tail = stats.chi2(values.size)
    return 2 * min(float(tail.cdf(statistic)), float(tail.sf(statistic)))


def compute_mean_p_value(values: np.ndarray, mean: float, stddev: float) -> float:
    """Returns the two-sided p-value of the mean of draws with a known stddev."""
    score = (np.mean(values, dtype=np.float64) - mean) / stddev * np.sqrt(values.size)
    return float(2 * stats.norm.sf(abs(score)))
