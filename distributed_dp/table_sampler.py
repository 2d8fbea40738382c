"""Vectorised draws from alias tables, as TensorFlow ops for CPU and GPU.

A draw reads one random word: its low bits choose the column, the bits above them are
compared with the leading bits of the column's threshold. Only when those are equal
(probability 2**-(word_bits - index_bits) a draw) do the other 64 threshold bits
matter; the blocks in which that happened are then completed one by one with words of
their own stream. The composed law is exactly that of the table.

Arithmetic of dimension d uses uint32, uint64 and int64: TensorFlow's int32 arithmetic
runs in host memory even where a GPU is present.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from distributed_dp.alias_table import AliasTable
from distributed_dp.random_bits import draw_uint32, draw_uint64, fold_in, split_seed

BLOCK = 1024
"""Draws that are completed together after a tie."""


def sample_tables(
    tables: Sequence[AliasTable],
    strides: Sequence[int],
    shape: Sequence[int],
    seed: tf.Tensor,
    *,
    row: tf.Tensor | int = 0,
    wide: bool = False,
) -> tf.Tensor:
    """Draws sum_l strides[l] * Z_l with independent Z_l from the tables.

    Args:
      tables: One table a term, all of the same word width. A table of one row serves
        every `row`; of the others, row `row` is used.
      strides: Positive integer factor of each term.
      shape: Static shape of the result.
      seed: int32[2].
      row: Scalar integer, the row of the tables with several.
      wide: Whether values may leave int32.

    Returns:
      int32 (or int64 if `wide`) tensor of `shape`.
    """
    num = math.prod(shape)
    block = min(BLOCK, max(num, 1))
    num_blocks = max(1, -(-num // block))
    word_seed, tie_seed = split_seed(seed, 2)
    selected = [_select_row(table, row) for table in tables]
    words = _draw_words(word_seed, tables, num_blocks * block)
    words = [tf.reshape(word, [num_blocks, block]) for word in words]
    value, tied = _lookup(tables, strides, selected, words, None, wide)
    value = _complete_ties(
        tables, strides, selected, words, value, tied, tie_seed, wide
    )
    return tf.reshape(tf.reshape(value, [-1])[:num], shape)


def _select_row(table: AliasTable, row: tf.Tensor | int) -> tuple[tf.Tensor, tf.Tensor]:
    packed, low = tf.constant(table.packed), tf.constant(table.low)
    index = row if table.packed.shape[0] > 1 else 0
    return tf.gather(packed, index), tf.gather(low, index)


def _draw_words(
    seed: tf.Tensor, tables: Sequence[AliasTable], num: int
) -> list[tf.Tensor]:
    """One unsigned word of the tables' width for each table and draw."""
    if tables[0].word_bits == 64:
        seeds = split_seed(seed, len(tables))
        return [draw_uint64(table_seed, [num]) for table_seed in seeds]
    if len(tables) == 1:
        return [draw_uint32(seed, num)]
    words: list[tf.Tensor] = []
    for pair_seed in split_seed(seed, -(-len(tables) // 2)):
        pair = draw_uint64(pair_seed, [num])
        words.append(tf.cast(pair & tf.constant(0xFFFFFFFF, tf.uint64), tf.uint32))
        high = tf.bitwise.right_shift(pair, tf.constant(32, tf.uint64))
        words.append(tf.cast(high, tf.uint32))
    return words[: len(tables)]


def _lookup(
    tables: Sequence[AliasTable],
    strides: Sequence[int],
    selected: Sequence[tuple[tf.Tensor, tf.Tensor]],
    words: Sequence[tf.Tensor],
    tie_words: Sequence[tf.Tensor] | None,
    wide: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Outcomes of the given words, and which draws tied in some table.

    With `tie_words` (uint64, one a table) ties are decided by the low threshold bits.
    """
    unsigned = tf.uint64 if wide else tf.uint32
    total, tied = None, None
    for index, (table, stride) in enumerate(zip(tables, strides, strict=True)):
        packed, low = selected[index]
        outcome, tie = _lookup_one(
            table, packed, low, words[index], tie_words and tie_words[index]
        )
        term = outcome if outcome.dtype == unsigned else tf.cast(outcome, unsigned)
        if stride != 1:
            term = term * tf.constant(stride, unsigned)
        total = term if total is None else total + term
        tied = tie if tied is None else tied | tie
    offset = sum(t.offset * stride for t, stride in zip(tables, strides, strict=True))
    total = total - tf.constant(offset, unsigned)
    return tf.bitcast(total, tf.int64 if wide else tf.int32), tied


def _lookup_one(
    table: AliasTable,
    packed: tf.Tensor,
    low: tf.Tensor,
    word: tf.Tensor,
    tie_word: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Outcomes (columns) of one table.

    `word` and an entry both hold leading bits above the lowest `index_bits`. With the
    low bits of the word set, it is less than the entry exactly if its leading bits are
    less than the threshold's.
    """
    mask = tf.constant(table.num_columns - 1, word.dtype)
    position = tf.bitcast(word & mask, packed.dtype)
    entry = tf.bitcast(tf.gather(packed, position), word.dtype)
    keep = (word | mask) < entry
    tie = tf.bitwise.bitwise_xor(word, entry) <= mask
    if tie_word is not None:
        rest = tf.bitcast(tf.gather(low, position), tf.uint64)
        keep = tf.where(tie, tie_word < rest, keep)
    return tf.where(keep, word, entry) & mask, tie


def _complete_ties(
    tables: Sequence[AliasTable],
    strides: Sequence[int],
    selected: Sequence[tuple[tf.Tensor, tf.Tensor]],
    words: Sequence[tf.Tensor],
    value: tf.Tensor,
    tied: tf.Tensor,
    seed: tf.Tensor,
    wide: bool,
) -> tf.Tensor:
    """Recomputes each block with a tie, with 64 further bits a table and draw."""
    num_blocks, block = value.shape
    signed = tf.int32 if words[0].dtype == tf.uint32 else tf.int64
    stored = [tf.bitcast(word, signed) for word in words]

    def has_ties(value: tf.Tensor, pending: tf.Tensor) -> tf.Tensor:
        del value
        return tf.reduce_any(pending)

    def complete(value: tf.Tensor, pending: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        current = tf.argmax(tf.cast(pending, tf.float32))
        rows = [tf.bitcast(tf.gather(w, current), words[0].dtype) for w in stored]
        block_seed = fold_in(seed, current)
        extra = tf.unstack(draw_uint64(block_seed, [len(tables), block]))
        fixed, _ = _lookup(tables, strides, selected, rows, extra, wide)
        value = tf.tensor_scatter_nd_update(value, [[current]], [fixed])
        is_current = tf.equal(tf.constant(np.arange(num_blocks)), current)
        return value, pending & ~is_current

    value, _ = tf.while_loop(has_ties, complete, (value, tf.reduce_any(tied, axis=1)))
    return value
