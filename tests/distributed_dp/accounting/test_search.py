"""The root search ends where the function is at most 0."""

import math

import pytest

from distributed_dp.accounting.search import find_safe_root


@pytest.mark.parametrize("root", [0.1, 1.0, 7.3])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-7, 1e-13])
def test_ends_on_the_safe_side(root, tolerance):
    def compute_excess(x):
        return math.exp(root - x) - 1

    found = find_safe_root(compute_excess, 0.0, 20.0, tolerance=tolerance)
    assert compute_excess(found) <= 0
    assert found - root <= 10 * tolerance * max(1.0, root)


def test_an_infinite_part_is_crossed():
    def compute_excess(x):
        return math.inf if x < 2.0 else 3.0 - x

    found = find_safe_root(compute_excess, 0.0, 10.0, tolerance=1e-9)
    assert 3.0 <= found <= 3.0 + 1e-7


def test_a_jump_from_infinity_ends_beyond_it():
    def compute_excess(x):
        return math.inf if x < 2.0 else -1.0

    found = find_safe_root(compute_excess, 0.0, 10.0, tolerance=1e-6)
    assert 2.0 <= found <= 2.0 + 1e-5
