"""The coefficient of the even step."""

import math

import numpy as np
import pytest

from upcycled_fl.schedule import (
    ConstantCoefficient,
    ConstantLambda,
    IncreasingLambda,
    compute_coefficient_table,
    compute_coefficients,
)


class TestConstantLambda:
    # The paper's table 1.
    @pytest.mark.parametrize(
        ("mu", "value"), [(0.1, 0.04), (0.3, 0.12), (0.5, 0.21), (1.0, 0.43)]
    )
    def test_by_hand(self, mu, value):
        found = compute_coefficients(ConstantLambda(mu=mu, lambda_value=value), [1, 80])
        np.testing.assert_allclose(found, mu / (mu + value), rtol=1e-15)
        assert np.all((0.69 < found) & (found < 0.72))

    def test_limits(self):
        none = ConstantLambda(mu=0.1, lambda_value=0)
        huge = ConstantLambda(mu=0.1, lambda_value=1e300)
        assert compute_coefficients(none, 1) == 1.0
        assert compute_coefficients(huge, 1) < 1e-300


class TestIncreasingLambda:
    def test_by_hand(self):
        schedule = IncreasingLambda(mu=0.5, initial_lambda=0.75)
        found = compute_coefficients(schedule, [[1, 4], [9, 100]])
        np.testing.assert_allclose(found, [[0.4, 0.2], [0.4 / 3, 0.04]], rtol=1e-15)

    def test_lambda_increases(self):
        mu = 0.1
        schedule = IncreasingLambda(mu=mu, initial_lambda=0.0)
        lambdas = mu / compute_coefficients(schedule, np.arange(1, 1000)) - mu
        assert lambdas[0] == pytest.approx(0.0, abs=1e-16)
        assert np.all(np.diff(lambdas) > 0)

    @pytest.mark.parametrize("count", [1, 10, 1000, 100_000])
    def test_the_rate_of_corollary_4_8(self, count):
        """What theorem 4.6 divides by M: O(1 / sqrt(M)); a constant's is not."""
        schedule = IncreasingLambda(mu=0.1, initial_lambda=0.04)
        steps = np.arange(1, count + 1)
        found = compute_coefficients(schedule, steps)
        first = found[0]
        assert found.sum() <= 2 * first * math.sqrt(count)
        assert (found**2).sum() <= first**2 * (1 + math.log(count))
        constant = compute_coefficients(
            ConstantLambda(mu=0.1, lambda_value=0.04), steps
        )
        assert (constant.sum() <= 2 * first * math.sqrt(count)) == (count == 1)


class TestConstantCoefficient:
    @pytest.mark.parametrize("coefficient", [0.0, 0.3, 0.9])
    def test_is_itself(self, coefficient):
        schedule = ConstantCoefficient(coefficient=coefficient)
        found = compute_coefficients(schedule, range(1, 4))
        np.testing.assert_array_equal(found, [coefficient] * 3)


@pytest.mark.parametrize(
    "schedule",
    [
        ConstantLambda(mu=0.3, lambda_value=0.12),
        IncreasingLambda(mu=0.3, initial_lambda=0.12),
        ConstantCoefficient(coefficient=0.7),
    ],
)
class TestEverySchedule:
    def test_scalars_lists_and_tables_agree(self, schedule):
        table = compute_coefficient_table(schedule, 50)
        assert table.dtype == np.float32 and table.shape == (50,)
        listed = compute_coefficients(schedule, list(range(1, 51)))
        assert listed.dtype == np.float64
        np.testing.assert_array_equal(table, listed.astype(np.float32))
        for step in (1, 2, 50):
            assert compute_coefficients(schedule, step) == listed[step - 1]
        assert compute_coefficients(schedule, []).shape == (0,)

    @pytest.mark.parametrize("steps", [0, [1, 0], [-1], [1.0], [True]])
    def test_bad_steps(self, schedule, steps):
        with pytest.raises(ValueError, match="`steps` must be integers of at least 1"):
            compute_coefficients(schedule, steps)

    @pytest.mark.parametrize("count", [0, -3, 2.0])
    def test_bad_tables(self, schedule, count):
        with pytest.raises(ValueError, match="`num_even_steps` must be an integer"):
            compute_coefficient_table(schedule, count)


class TestErrors:
    @pytest.mark.parametrize("value", [-0.01, math.inf, math.nan, "0.1", None])
    def test_lambda(self, value):
        with pytest.raises(ValueError, match="`lambda_value` must be at least 0"):
            ConstantLambda(mu=0.1, lambda_value=value)
        with pytest.raises(ValueError, match="`initial_lambda` must be at least 0"):
            IncreasingLambda(mu=0.1, initial_lambda=value)

    @pytest.mark.parametrize(
        ("kind", "name"),
        [(ConstantLambda, "lambda_value"), (IncreasingLambda, "initial_lambda")],
    )
    def test_mu(self, kind, name):
        with pytest.raises(ValueError, match="`mu` must be at least 0"):
            kind(mu=-0.1, **{name: 0.1})
        with pytest.raises(
            ValueError,
            match="`mu` must be positive: .* is 0 .* raise `mu`, or set the "
            r"coefficient itself \(ConstantCoefficient\). Found 0.0.",
        ):
            kind(mu=0.0, **{name: 0.1})

    @pytest.mark.parametrize("value", [1.0, 1.5])
    def test_coefficient(self, value):
        with pytest.raises(ValueError, match=r"`coefficient` must be in \[0, 1\)"):
            ConstantCoefficient(coefficient=value)
        with pytest.raises(ValueError, match="`coefficient` must be at least 0"):
            ConstantCoefficient(coefficient=-value)

    def test_schedule(self):
        with pytest.raises(ValueError, match="`schedule` must be ConstantLambda"):
            compute_coefficients(0.7, 1)
