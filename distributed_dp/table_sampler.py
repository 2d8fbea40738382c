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

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from distributed_dp.alias_table import AliasTable
from distributed_dp.random_bits import draw_uint32, draw_uint64, fold_in, split_seed
from distributed_dp.xla import compile_piece

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
    block = min(BLOCK, max(num + num % 2, 2))
    draw = _BlockDraw(
        tables=tuple(tables),
        strides=tuple(strides),
        wide=wide,
        num_blocks=max(1, -(-num // block)),
        block=block,
    )
    word_seed, tie_seed = split_seed(seed, 2)
    selected = [_select_row(table, row) for table in tables]
    words = compile_piece(draw.draw_words, size=num)(word_seed)
    value, tied = compile_piece(draw.look_up, size=num)(words, selected)
    value = draw.complete_ties(words, selected, value, tied, tie_seed)
    value = tf.reshape(tf.reshape(value, [-1])[:num], shape)
    return tf.bitcast(value, tf.int64 if wide else tf.int32)


def _select_row(table: AliasTable, row: tf.Tensor | int) -> tuple[tf.Tensor, tf.Tensor]:
    packed, low = tf.constant(table.packed), tf.constant(table.low)
    index = row if table.packed.shape[0] > 1 else 0
    return tf.gather(packed, index), tf.gather(low, index)


Rows = Sequence[tuple[tf.Tensor, tf.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _BlockDraw:
    """Draws of [num_blocks, block] outcomes from fixed tables.

    Random words are stored as drawn: uint64 words that serve a pair of tables of 32-bit
    words, or one table of 64-bit words; for a single table of 32-bit words, uint32.
    """

    tables: tuple[AliasTable, ...]
    strides: tuple[int, ...]
    wide: bool
    num_blocks: int
    block: int

    @property
    def unsigned(self) -> tf.DType:
        return tf.uint64 if self.wide else tf.uint32

    def draw_words(self, seed: tf.Tensor) -> list[tf.Tensor]:
        """Returns the first words of all draws, each [num_blocks, block]."""
        num, shape = self.num_blocks * self.block, [self.num_blocks, self.block]
        tables_a_word = 64 // self.tables[0].word_bits
        if len(self.tables) == 1 and tables_a_word == 2:
            return [tf.reshape(draw_uint32(seed, num), shape)]
        num_words = -(-len(self.tables) // tables_a_word)
        return [draw_uint64(stream, shape) for stream in split_seed(seed, num_words)]

    def look_up(self, words: Sequence[tf.Tensor], rows: Rows) -> Sequence[tf.Tensor]:
        """Returns the outcomes of the words, and which blocks had a tie."""
        value, tied = self._look_up(self._split(words), rows, None)
        return value, tf.reduce_any(tied, axis=1)

    def complete_ties(
        self,
        words: Sequence[tf.Tensor],
        rows: Rows,
        value: tf.Tensor,
        tied: tf.Tensor,
        seed: tf.Tensor,
    ) -> tf.Tensor:
        """Recomputes each block with a tie, with 64 further bits a table and draw.

        Inside the loop values and words are int64: that has GPU kernels where int32
        stays in host memory and unsigned integers have none.
        """
        stored = [_to_int64(word) for word in words]

        def complete(value: tf.Tensor, pending: tf.Tensor) -> Sequence[tf.Tensor]:
            current = tf.argmax(tf.cast(pending, tf.float32))
            block_words = [
                _from_int64(tf.gather(word, current), words[0].dtype) for word in stored
            ]
            shape = [len(self.tables), self.block]
            extra = draw_uint64(fold_in(seed, current), shape)
            extras = [extra[index] for index in range(len(self.tables))]
            fixed, _ = self._look_up(self._split(block_words), rows, extras)
            value = tf.tensor_scatter_nd_update(value, [[current]], [_to_int64(fixed)])
            index = tf.constant(np.arange(self.num_blocks))
            return value, pending & tf.not_equal(index, current)

        stored_value, _ = tf.while_loop(
            lambda _, pending: tf.reduce_any(pending),
            complete,
            (_to_int64(value), tied),
        )
        return _from_int64(stored_value, self.unsigned)

    def _split(self, words: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns one word of its own width a table."""
        if self.tables[0].word_bits == 64 or words[0].dtype == tf.uint32:
            return list(words)
        halves = []
        for word in words:
            halves.append(tf.cast(word & tf.constant(0xFFFFFFFF, tf.uint64), tf.uint32))
            high = tf.bitwise.right_shift(word, tf.constant(32, tf.uint64))
            halves.append(tf.cast(high, tf.uint32))
        return halves[: len(self.tables)]

    def _look_up(
        self,
        words: Sequence[tf.Tensor],
        rows: Rows,
        tie_words: Sequence[tf.Tensor] | None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Outcomes of the given words, and which draws tied in some table.

        With `tie_words` (uint64, one a table) ties are decided by the low bits.
        """
        total, tied = tf.constant(0, self.unsigned), tf.constant(False)
        for index, table in enumerate(self.tables):
            tie_word = None if tie_words is None else tie_words[index]
            outcome, tie = _look_up_one(table, rows[index], words[index], tie_word)
            if outcome.dtype != self.unsigned:
                outcome = tf.cast(outcome, self.unsigned)
            if self.strides[index] != 1:
                outcome = outcome * tf.constant(self.strides[index], self.unsigned)
            total = total + outcome if index else outcome
            tied = tied | tie if index else tie
        pairs = zip(self.tables, self.strides, strict=True)
        offset = sum(table.offset * stride for table, stride in pairs)
        return total - tf.constant(offset, self.unsigned), tied


def _look_up_one(
    table: AliasTable,
    row: tuple[tf.Tensor, tf.Tensor],
    word: tf.Tensor,
    tie_word: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Outcomes (columns) of one table.

    `word` and an entry both hold leading bits above the lowest `index_bits`. With the
    low bits of the word set, it is less than the entry exactly if its leading bits are
    less than the threshold's.
    """
    packed, low = row
    mask = tf.constant(table.num_columns - 1, word.dtype)
    position = tf.bitcast(word & mask, packed.dtype)
    entry = tf.bitcast(tf.gather(packed, position), word.dtype)
    keep = (word | mask) < entry
    tie = tf.bitwise.bitwise_xor(word, entry) <= mask
    if tie_word is not None:
        rest = tf.bitcast(tf.gather(low, position), tf.uint64)
        keep = tf.where(tie, tie_word < rest, keep)
    return tf.where(keep, word, entry) & mask, tie


def _to_int64(words: tf.Tensor) -> tf.Tensor:
    """Views unsigned words as int64, two uint32 at a time."""
    if words.dtype == tf.uint32:
        words = tf.reshape(words, [*words.shape[:-1], words.shape[-1] // 2, 2])
    return tf.bitcast(words, tf.int64)


def _from_int64(words: tf.Tensor, unsigned: tf.DType) -> tf.Tensor:
    """Inverts `_to_int64`."""
    words = tf.bitcast(words, unsigned)
    if unsigned == tf.uint32:
        words = tf.reshape(words, [*words.shape[:-2], -1])
    return words
