"""Entropy seeds: new at every execution, and not from TensorFlow's own generator."""

import numpy as np
import tensorflow as tf

from distributed_dp.entropy import draw_entropy_seed

_WORD = (1 << 64) - 1
_STATE_SIZE = 312


def _undo_xor_shift(word: int, shift: int, mask: int) -> int:
    """Inverts x ^= (x << shift) & mask, or x ^= (x >> -shift) & mask."""
    result = word
    for _ in range(6):
        moved = result << shift if shift > 0 else result >> -shift
        result = word ^ (moved & mask & _WORD)
    return result


class _MersenneTwister:
    """MT19937-64 (Nishimura 2000), with its state read off 312 outputs."""

    def __init__(self, outputs: list[int]):
        self._state = [self._untemper(word) for word in outputs]

    def draw(self, num: int) -> list[int]:
        words = []
        for index in range(num):
            i = index % _STATE_SIZE
            upper = self._state[i] & 0xFFFFFFFF80000000
            mixed = upper | (self._state[(i + 1) % _STATE_SIZE] & 0x7FFFFFFF)
            twist = 0xB5026F5AA96619E9 if mixed & 1 else 0
            far = self._state[(i + 156) % _STATE_SIZE]
            self._state[i] = far ^ (mixed >> 1) ^ twist
            words.append(self._temper(self._state[i]))
        return words

    @staticmethod
    def _temper(word: int) -> int:
        word ^= (word >> 29) & 0x5555555555555555
        word ^= (word << 17) & 0x71D67FFFEDA60000
        word ^= (word << 37) & 0xFFF7EEE000000000
        return word ^ (word >> 43)

    @staticmethod
    def _untemper(word: int) -> int:
        word = _undo_xor_shift(word, -43, _WORD)
        word = _undo_xor_shift(word, 37, 0xFFF7EEE000000000)
        word = _undo_xor_shift(word, 17, 0x71D67FFFEDA60000)
        return _undo_xor_shift(word, -29, 0x5555555555555555)


def _draw_generator_words(num: int) -> list[int]:
    words = tf.raw_ops.NonDeterministicInts(
        shape=tf.constant([num], tf.int64), dtype=tf.uint64
    )
    return [int(word) for word in words.numpy()]


def test_seed_is_an_int32_pair() -> None:
    seed = draw_entropy_seed()
    assert seed.dtype == tf.int32
    assert seed.shape == [2]
    traced = tf.function(draw_entropy_seed).get_concrete_function()
    assert traced.structured_outputs.shape == [2]


def test_every_execution_draws_anew() -> None:
    @tf.function
    def draw_two() -> tf.Tensor:
        return tf.stack([draw_entropy_seed(), draw_entropy_seed()])

    seeds = np.concatenate([draw_two().numpy() for _ in range(50)])
    assert len({tuple(seed) for seed in seeds}) == 100
    # 200 words of 32 bits repeat one with probability 5e-6; both halves vary.
    assert min(len(set(seeds[:, 0])), len(set(seeds[:, 1]))) > 95


def test_is_not_the_generator_that_starts_from_32_bits() -> None:
    # What `tf.random.*` and NonDeterministicInts give is a function of 32 bits a
    # process: the control predicts it from what came before.
    words = _draw_generator_words(2 * _STATE_SIZE)
    predicted = _MersenneTwister(words[:_STATE_SIZE]).draw(_STATE_SIZE)
    assert predicted == words[_STATE_SIZE:]
    low_words = {
        word & 0xFFFFFFFF
        for word in _MersenneTwister(_draw_generator_words(_STATE_SIZE)).draw(2000)
    }
    draw = tf.function(draw_entropy_seed)
    seeds = np.stack([draw().numpy() for _ in range(20)]).view(np.uint32)
    # 40 words hit one of 2000 by chance with probability 2e-5.
    assert len(low_words & {int(word) for word in seeds.reshape(-1)}) <= 1
    control = tf.function(
        lambda: tf.raw_ops.NonDeterministicInts(
            shape=tf.constant([2], tf.int64), dtype=tf.uint32
        )
    )
    drawn = {int(word) for _ in range(20) for word in control().numpy()}
    assert len(low_words & drawn) == len(drawn)
