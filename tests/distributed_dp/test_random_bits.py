"""Seeded words: distinct streams, and the same bits however they are run."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from distributed_dp import random_bits
from tests.distributed_dp import goodness_of_fit

_DRAWS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "split_seed": lambda seed: tf.stack(random_bits.split_seed(seed, 3)),
    "fold_in": lambda seed: random_bits.fold_in(seed, tf.constant(7, tf.int64)),
    "draw_uint64": lambda seed: random_bits.draw_uint64(seed, [3, 5]),
    "draw_uint32": lambda seed: random_bits.draw_uint32(seed, 7),
    "draw_uniform": lambda seed: random_bits.draw_uniform(seed, 9),
    "draw_sign_words": lambda seed: random_bits.draw_sign_words(seed, 65),
}


@pytest.mark.parametrize("name", _DRAWS)
class TestEveryDraw:
    def test_is_a_function_of_its_seed(self, name: str, seed: np.ndarray) -> None:
        draw = _DRAWS[name]
        first, again = draw(tf.constant(seed)), draw(tf.constant(seed))
        other = draw(tf.constant(seed ^ np.int32(1)))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)

    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_is_the_same_compiled(
        self, name: str, jit_compile: bool, seed: np.ndarray
    ) -> None:
        draw = _DRAWS[name]
        compiled = tf.function(draw, jit_compile=jit_compile)
        assert np.array_equal(draw(tf.constant(seed)), compiled(tf.constant(seed)))


def test_streams_below_a_seed_are_distinct(seed: np.ndarray) -> None:
    root = tf.constant(seed)
    children = [*random_bits.split_seed(root, 8)]
    numbers = (-1, 0, 1, 2, 2**31, 2**32, 2**40)
    children += [random_bits.fold_in(root, tf.constant(n, tf.int64)) for n in numbers]
    nested = [
        random_bits.fold_in(children[0], tf.constant(n, tf.int64)) for n in (0, 1)
    ]
    draws = [
        random_bits.draw_uint64(s, [4]).numpy() for s in [root, *children, *nested]
    ]
    for first, second in itertools.combinations(draws, 2):
        assert not set(first) & set(second)


def test_children_do_not_repeat_a_seed_of_another_root(seed: np.ndarray) -> None:
    roots = [tf.constant(seed + np.int32([i, 0])) for i in range(50)]
    children = [tuple(c.numpy()) for r in roots for c in random_bits.split_seed(r, 4)]
    assert len(set(children)) == 200


def test_fold_in_takes_the_seeds_that_it_makes(seed: np.ndarray) -> None:
    child = random_bits.fold_in(tf.constant(seed), tf.constant(3, tf.int64))
    assert child.dtype == tf.int64
    grandchild = random_bits.fold_in(child, tf.constant(3, tf.int64))
    assert grandchild.dtype == tf.int64
    assert not np.array_equal(child, grandchild)


@pytest.mark.parametrize("num", [1, 2, 7, 64])
def test_lengths(num: int, seed: np.ndarray) -> None:
    assert random_bits.draw_uint32(seed, num).shape == [num]
    assert random_bits.draw_uniform(seed, num).shape == [num]
    words = random_bits.draw_sign_words(seed, num)
    assert words.shape == [-(-num // 32)]
    assert random_bits.expand_sign_masks(words).shape == [32, -(-num // 32)]
    assert random_bits.draw_normal(seed, num).shape == [num]


def test_uniform_is_a_multiple_below_one(seed: np.ndarray) -> None:
    uniform = random_bits.draw_uniform(seed, 1 << 18).numpy()
    steps = uniform.astype(np.float64) * 2**24
    assert np.array_equal(steps, np.floor(steps))
    assert uniform.min() >= 0
    assert uniform.max() < 1
    # All 24 bits are in use, each about half of the time.
    bits = steps.astype(np.int64)[:, np.newaxis] >> np.arange(24) & 1
    p_values = stats.binomtest
    for column in bits.T:
        p_value = p_values(int(column.sum()), column.size).pvalue
        assert p_value > goodness_of_fit.FALSE_FAILURE


def test_uniform_fits_and_a_wrong_law_does_not(seed: np.ndarray) -> None:
    uniform = random_bits.draw_uniform(seed, 1 << 18).numpy()
    edges = np.arange(1, 100) / 100
    right = goodness_of_fit.compute_p_value(uniform, edges, edges)
    wrong = goodness_of_fit.compute_p_value(uniform, edges, edges**1.05)
    assert right > goodness_of_fit.FALSE_FAILURE > wrong


def test_sign_masks_are_fair_and_independent(seed: np.ndarray) -> None:
    words = random_bits.draw_sign_words(seed, 1 << 18)
    masks = random_bits.expand_sign_masks(words).numpy()
    assert set(np.unique(masks)) == {0, 1 << 31}
    bits = (masks >> 31).astype(np.int64).ravel()
    for lag in (1, 2, 31, 32, 33, 64):
        agree = int(np.sum(bits[:-lag] == bits[lag:]))
        p_value = stats.binomtest(agree, bits.size - lag).pvalue
        assert p_value > goodness_of_fit.FALSE_FAILURE
    p_value = stats.binomtest(int(bits.sum()), bits.size).pvalue
    assert p_value > goodness_of_fit.FALSE_FAILURE


def test_normal_fits_and_wrong_laws_do_not(seed: np.ndarray) -> None:
    normal = random_bits.draw_normal(seed, 1 << 18).numpy()
    edges = np.linspace(-3, 3, 61)
    right = goodness_of_fit.compute_p_value(normal, edges, stats.norm.cdf(edges))
    assert right > goodness_of_fit.FALSE_FAILURE
    for wrong in (stats.norm(scale=1.05), stats.norm(loc=0.05)):
        p_value = goodness_of_fit.compute_p_value(normal, edges, wrong.cdf(edges))
        assert p_value < goodness_of_fit.FALSE_FAILURE


def test_normal_has_its_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow's own draws end at 5.68, whatever the words."""
    words = tf.constant([0, 2**63 - 1, 2**64 - 1], tf.uint64)
    monkeypatch.setattr(random_bits, "draw_uint64", lambda seed, shape: words)
    low, middle, high = random_bits.draw_normal(tf.constant([0, 0]), 3).numpy()
    np.testing.assert_allclose([low, -high], stats.norm.ppf(2.0**-53), rtol=1e-9)
    assert abs(middle) < 1e-9
