"""The coefficient of the even step, c_m = mu / (mu + lambda_m), for m = 1, 2, ...

Odd step 2m-1 has the clients work; even step 2m is the server's alone,
w^{2m} = w^{2m-1} + c_m (w^{2m-1} - w^{2m-2}). Source: Upcycled-FL, algorithm 2.
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from distributed_dp.accounting import validation

FloatArray = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantLambda:
    """c_m = mu / (mu + lambda): the paper's experiments.

    Odd and even step together are one step of the baseline at the server's learning
    rate 1 + c.

    Attributes:
      mu: weight of the proximal term, positive.
      lambda_value: lambda, at least 0; 0 is c = 1.
    """

    mu: float
    lambda_value: float

    def __post_init__(self) -> None:
        _check_mu(self.mu)
        validation.check_non_negative("lambda_value", self.lambda_value)

    def _compute(self, steps: FloatArray) -> FloatArray:
        return np.full_like(steps, self.mu / (self.mu + self.lambda_value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class IncreasingLambda:
    """c_m = c_1 / sqrt(m): lambda_m = (mu + lambda_1) sqrt(m) - mu.

    Source: corollary 4.8, which asks for c_m = O(1 / sqrt(M)) with M, the number of
    even steps, known beforehand. Here M need not be known: the sums over m = 1..M in
    theorem 4.6 are sum c_m <= 2 c_1 sqrt(M) and sum c_m^2 <= c_1^2 (1 + log M), so
    that the bound is O(1 / sqrt(M)) all the same.

    Attributes:
      mu: weight of the proximal term, positive.
      initial_lambda: lambda_1, at least 0.
    """

    mu: float
    initial_lambda: float

    def __post_init__(self) -> None:
        _check_mu(self.mu)
        validation.check_non_negative("initial_lambda", self.initial_lambda)

    def _compute(self, steps: FloatArray) -> FloatArray:
        return self.mu / (self.mu + self.initial_lambda) / np.sqrt(steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantCoefficient:
    """c_m = coefficient, for baselines without a proximal term.

    Attributes:
      coefficient: c in [0, 1); 0 is the baseline itself.
    """

    coefficient: float

    def __post_init__(self) -> None:
        validation.check_non_negative("coefficient", self.coefficient)
        if not self.coefficient < 1:
            raise ValueError(
                f"`coefficient` must be in [0, 1). Found {self.coefficient!r}."
            )

    def _compute(self, steps: FloatArray) -> FloatArray:
        return np.full_like(steps, self.coefficient)


Schedule = ConstantLambda | IncreasingLambda | ConstantCoefficient


def check_schedule(schedule: Any) -> None:
    """Raises unless `schedule` is one of this module's."""
    kinds = (ConstantLambda, IncreasingLambda, ConstantCoefficient)
    if not isinstance(schedule, kinds):
        raise ValueError(
            "`schedule` must be ConstantLambda, IncreasingLambda or "
            f"ConstantCoefficient. Found {schedule!r}."
        )


def compute_coefficients(schedule: Schedule, steps: npt.ArrayLike) -> FloatArray:
    """Returns c_m.

    Args:
      schedule: of lambda, or of the coefficient itself.
      steps: m, integers from 1, of any shape.

    Returns:
      float64 of the shape of `steps`, in [0, 1].

    Raises:
      ValueError: for a step below 1 or not an integer.
    """
    check_schedule(schedule)
    array = np.asarray(steps)
    if array.size and not (
        np.issubdtype(array.dtype, np.integer) and np.all(array >= 1)
    ):
        raise ValueError(f"`steps` must be integers of at least 1. Found {steps!r}.")
    return schedule._compute(array.astype(np.float64))


def compute_coefficient_table(
    schedule: Schedule, num_even_steps: int
) -> npt.NDArray[np.float32]:
    """Returns c_1, ..., c_M as float32[M], for a lookup at index m - 1.

    Args:
      schedule: of lambda, or of the coefficient itself.
      num_even_steps: M, at least 1.
    """
    validation.check_integer("num_even_steps", num_even_steps, low=1)
    steps = np.arange(1, num_even_steps + 1)
    return compute_coefficients(schedule, steps).astype(np.float32)


def _check_mu(mu: Any) -> None:
    validation.check_non_negative("mu", mu)
    if mu == 0:
        raise ValueError(
            "`mu` must be positive: at 0 the coefficient mu / (mu + lambda) is 0 and "
            "the even step does nothing; raise `mu`, or set the coefficient itself "
            f"(ConstantCoefficient). Found {mu!r}."
        )
