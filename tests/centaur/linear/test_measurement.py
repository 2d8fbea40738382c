"""Fitted laws against exact ones and NumPy's."""

import numpy as np
import pytest
from scipy import stats

from centaur import linear


class TestPowerLaw:
    def test_an_exact_law_is_found(self):
        x = np.array([16.0, 24, 32, 48, 64])
        found = linear.fit_power_law(x, 3 * x**1.5)
        assert found.exponent == pytest.approx(1.5)
        assert found.scale == pytest.approx(3)
        assert found.stderr == pytest.approx(0, abs=1e-7)

    def test_error_and_interval_equal_least_squares(self, rng):
        x = np.repeat([1.0, 2, 4, 8], 5)
        y = x**-1 * np.exp(0.1 * rng.standard_normal(20))
        found = linear.fit_power_law(x, y)
        design = np.stack([np.log(x), np.ones(20)], axis=1)
        coefficients, residual, *_ = np.linalg.lstsq(design, np.log(y), rcond=None)
        variance = residual[0] / 18 * np.linalg.inv(design.T @ design)[0, 0]
        assert found.exponent == pytest.approx(coefficients[0])
        assert found.stderr == pytest.approx(variance**0.5)
        half = stats.t.ppf(0.975, 18) * variance**0.5
        assert found.high - found.exponent == pytest.approx(half)
        assert found.exponent - found.low == pytest.approx(half)

    @pytest.mark.parametrize(
        ("x", "y", "message"),
        [
            ([1, 2, 0], [1, 2, 3], "`x` must be positive"),
            ([1, 2, 3], [1, np.inf, 3], "`y` must be positive"),
            ([1, 2], [1, 2], "at least 3"),
            ([2, 2, 2], [1, 2, 3], "two values of x"),
            ([1, 2, 3], [1, 2], "equally many"),
        ],
    )
    def test_reject(self, x, y, message):
        with pytest.raises(ValueError, match=message):
            linear.fit_power_law(x, y)


def test_floor_is_the_mean_of_the_last_rounds():
    assert linear.compute_floor([[8.0, 2, 1, 3], [8, 0, 5, 7]], last=2).tolist() == [
        2.0,
        6.0,
    ]
    with pytest.raises(ValueError, match=r"`last` must be in \[1, 2\].* Found 3"):
        linear.compute_floor([1.0, 2.0], last=3)


def test_contraction_stops_before_the_floor():
    values = 0.5 ** np.arange(6.0)
    values[4:] = 0.1
    assert linear.compute_contraction(values, least=0.11) == pytest.approx(0.5)
    assert linear.compute_contraction(values, least=0.9) is None
    assert linear.compute_contraction(0.8 ** np.arange(4.0), least=1e-9) == (
        pytest.approx(0.8)
    )


def test_rate_has_the_exact_interval():
    found = linear.compute_rate([True] * 150 + [False] * 50)
    assert (found.successes, found.count, found.rate) == (150, 200, 0.75)
    assert found.low == pytest.approx(stats.beta.ppf(0.025, 150, 51))
    assert found.high == pytest.approx(stats.beta.ppf(0.975, 151, 50))
    with pytest.raises(ValueError, match="at least one"):
        linear.compute_rate([])
