"""Wrapping and centring against Python's integers, for every width."""

import numpy as np
import pytest
import tensorflow as tf

from distributed_dp import modular


def _center_slowly(number: int, bits: int) -> int:
    residue = number % 2**bits
    return residue - 2**bits if residue >= 2 ** (bits - 1) else residue


def _build_numbers(bits: int, rng: np.random.Generator) -> list[int]:
    half = 2 ** (bits - 1)
    near = [0, half, -half, 2 * half, -2 * half, 2**31 - 1, -(2**31)]
    numbers = [n + step for n in near for step in range(-3, 4)]
    return numbers + [int(n) for n in rng.integers(-(2**31), 2**31, size=500)]


@pytest.mark.parametrize("bits", range(1, 33))
class TestEveryWidth:
    def test_wrap(self, bits: int, rng: np.random.Generator) -> None:
        numbers = [n for n in _build_numbers(bits, rng) if -(2**31) <= n < 2**31]
        wrapped = modular.wrap(tf.constant(numbers, tf.int32), bits)
        assert wrapped.dtype == tf.uint32
        assert [int(n) for n in wrapped.numpy()] == [n % 2**bits for n in numbers]
        same = modular.wrap(tf.constant([n % 2**32 for n in numbers], tf.uint32), bits)
        assert np.array_equal(wrapped, same)

    def test_center(self, bits: int, rng: np.random.Generator) -> None:
        numbers = _build_numbers(bits, rng)
        numbers += [int(n) for n in rng.integers(-(2**61), 2**61, size=500)]
        centered = modular.center(tf.constant(numbers, tf.int64), bits)
        assert centered.dtype == tf.int64
        expected = [_center_slowly(n, bits) for n in numbers]
        assert [int(n) for n in centered.numpy()] == expected

    def test_boundaries(self, bits: int, rng: np.random.Generator) -> None:
        del rng
        half = 2 ** (bits - 1)
        ends = tf.constant([half - 1, half, -half, -half - 1], tf.int64)
        centered = modular.center(ends, bits).numpy()
        assert centered.tolist() == [half - 1, -half, -half, half - 1]

    def test_sums_past_int32_come_back(
        self, bits: int, rng: np.random.Generator
    ) -> None:
        half = 2 ** (bits - 1)
        parts = rng.integers(-half // 8, half // 8 + 1, size=[6, 50])
        residues = modular.wrap(tf.constant(parts, tf.int32), bits)
        total = tf.reduce_sum(tf.cast(residues, tf.int64), axis=0)
        expected = [_center_slowly(int(n), bits) for n in parts.sum(axis=0)]
        assert modular.center(total, bits).numpy().tolist() == expected
        if bits == 32:
            assert np.max(total) > 2**32


def test_the_open_end_is_the_upper_one() -> None:
    # A centring to (-m/2, m/2] would give +128 here.
    assert int(modular.center(tf.constant(128, tf.int64), 8)) == -128


@pytest.mark.parametrize("bits", [0, -1, 33, 64])
def test_other_widths_are_refused(bits: int) -> None:
    for function in (modular.wrap, modular.center):
        with pytest.raises(ValueError, match="`bits` must be in"):
            function(tf.constant([1], tf.int64), bits)


def test_wrap_refuses_other_types() -> None:
    # A bit-cast of int64 would silently give two words for each number.
    for dtype in (tf.int64, tf.float32):
        with pytest.raises(ValueError, match="`values` must be int32 or uint32"):
            modular.wrap(tf.constant([1], dtype), 8)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_same_compiled(jit_compile: bool, rng: np.random.Generator) -> None:
    numbers = tf.constant(rng.integers(-(2**31), 2**31, size=100), tf.int64)

    @tf.function(jit_compile=jit_compile)
    def compute(numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        wrapped = modular.wrap(tf.cast(numbers, tf.int32), 13)
        return wrapped, modular.center(numbers, 13)

    wrapped, centered = compute(numbers)
    assert np.array_equal(wrapped, numbers.numpy() % 2**13)
    assert np.array_equal(centered, modular.center(numbers, 13))
