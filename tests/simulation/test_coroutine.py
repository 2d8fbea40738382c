"""Tests for running coroutines from plain code."""

import asyncio

import pytest

from simulation import coroutine


async def double(x: int) -> int:
    await asyncio.sleep(0)
    if x < 0:
        raise ValueError("`x` must be >= 0.")
    return 2 * x


def test_without_a_loop():
    assert coroutine.run(double(3)) == 6


def test_inside_a_loop():
    """As in a notebook's cell, where asyncio.run itself is refused."""

    async def main() -> int:
        return coroutine.run(double(4))

    assert asyncio.run(main()) == 8


@pytest.mark.parametrize("inside", [False, True])
def test_errors_come_through(inside):
    async def main() -> None:
        coroutine.run(double(-1))

    with pytest.raises(ValueError, match="must be >= 0"):
        asyncio.run(main()) if inside else coroutine.run(double(-1))
