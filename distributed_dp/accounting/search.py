"""A root search that ends on the safe side."""

import math
from collections.abc import Callable

from scipy import optimize

_MAX_STEPS = 200


def find_safe_root(
    compute_excess: Callable[[float], float],
    low: float,
    high: float,
    *,
    tolerance: float = 1e-13,
) -> float:
    """Returns a point at or just above the root of a decreasing function.

    Guarantees: the function at the result is at most 0.

    Args:
      compute_excess: decreasing; +inf is allowed.
      low: where the function is positive.
      high: where the function is at most 0 (finite).
      tolerance: how far above the root the result may lie, absolute plus relative.

    Returns:
      The point, in (low, high].
    """
    # Brent's method needs finite values at both ends.
    value_low = compute_excess(low)
    for _ in range(_MAX_STEPS):
        if math.isfinite(value_low) or high - low <= tolerance:
            break
        middle = (low + high) / 2
        value = compute_excess(middle)
        if value > 0:
            low, value_low = middle, value
        else:
            high = middle
    if not math.isfinite(value_low):
        return high
    root = float(
        optimize.brentq(
            compute_excess, low, high, xtol=tolerance, rtol=max(tolerance, 1e-15)
        )
    )
    step = tolerance * max(1.0, abs(root))
    while compute_excess(root) > 0:
        root = min(high, root + step)
        step *= 2
    return root
