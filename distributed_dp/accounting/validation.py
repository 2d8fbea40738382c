"""Checks shared by the accounting package: each raises, naming rule and value."""

import math
import numbers
from typing import Any


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_positive(name: str, value: Any) -> None:
    """Raises unless `value` is a finite real number above 0."""
    if not (_is_real(value) and math.isfinite(value) and value > 0):
        raise ValueError(f"`{name}` must be positive and finite. Found {value!r}.")


def check_non_negative(name: str, value: Any) -> None:
    """Raises unless `value` is a finite real number of at least 0."""
    if not (_is_real(value) and math.isfinite(value) and value >= 0):
        raise ValueError(f"`{name}` must be at least 0 and finite. Found {value!r}.")


def check_integer(name: str, value: Any, *, low: int, high: int | None = None) -> None:
    """Raises unless `value` is an integer in [low, high]."""
    valid = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if valid and value >= low and (high is None or value <= high):
        return
    rule = f"at least {low}" if high is None else f"between {low} and {high}"
    raise ValueError(f"`{name}` must be an integer {rule}. Found {value!r}.")


def check_delta(value: Any) -> None:
    """Raises unless `value` lies strictly between 0 and 1."""
    if not (_is_real(value) and 0 < value < 1):
        raise ValueError(f"`delta` must be in (0, 1). Found {value!r}.")


def check_beta(value: Any) -> None:
    """Raises unless `value` is a rejection probability in [0, 1)."""
    if not (_is_real(value) and 0 <= value < 1):
        raise ValueError(f"`beta` must be in [0, 1). Found {value!r}.")


def check_sampling_rate(value: Any) -> None:
    """Raises unless `value` is a probability in (0, 1]."""
    if not (_is_real(value) and 0 < value <= 1):
        raise ValueError(f"`sampling_rate` must be in (0, 1]. Found {value!r}.")


def check_choice(name: str, value: Any, *, kind: type) -> None:
    """Raises unless `value` is a member of the enum `kind`."""
    if not isinstance(value, kind):
        raise ValueError(
            f"`{name}` must be a member of {kind.__name__}. Found {value!r}."
        )
