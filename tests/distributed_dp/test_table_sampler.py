"""Draws from alias tables: the right outcome for every word, ties included."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from distributed_dp import alias_table, table_sampler
from distributed_dp.alias_table import AliasTable
from tests.distributed_dp import goodness_of_fit

_INDEX_BITS = 4
_LEADING = 0x5A5A5A5
"""Leading threshold bits of every column of the tables made for ties."""


def _build_table(stddev: float, word_bits: int) -> AliasTable:
    index_bits = alias_table.compute_index_bits(stddev)
    weights = alias_table.compute_discrete_gaussian_weights(
        Fraction(stddev) ** 2, 1 << (index_bits - 1)
    )
    return alias_table.build_alias_table([weights], word_bits=word_bits)


def _replace_words(
    monkeypatch: pytest.MonkeyPatch, words: np.ndarray, tie_words: np.ndarray
) -> None:
    """Makes a sampler of one table read these words and, after a tie, tie words."""
    calls = []

    def draw_uint64(seed: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        del seed
        first = words.dtype == np.uint64 and not calls
        calls.append(shape)
        chosen = words if first else tie_words
        padded = np.zeros(int(np.prod(shape)), np.uint64)
        padded[: chosen.size] = chosen
        return tf.constant(padded.reshape(shape))

    def draw_uint32(seed: tf.Tensor, num: int) -> tf.Tensor:
        del seed
        padded = np.zeros(num, np.uint32)
        padded[: words.size] = words
        return tf.constant(padded)

    monkeypatch.setattr(table_sampler, "draw_uint64", draw_uint64)
    monkeypatch.setattr(table_sampler, "draw_uint32", draw_uint32)


@pytest.mark.parametrize("word_bits", [32, 64])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_every_branch_of_every_column(
    word_bits: int, mode: str, monkeypatch: pytest.MonkeyPatch, seed: np.ndarray
) -> None:
    table = _build_table(1.5, word_bits)
    unsigned = np.uint32 if word_bits == 32 else np.uint64
    last_leading = (1 << (word_bits - table.index_bits)) - 1
    words, tie_words, expected = [], [], []
    for column in range(table.num_columns):
        entry = int(table.packed.view(unsigned)[0, column])
        threshold, alias = entry >> table.index_bits, entry % table.num_columns
        low = int(table.low.view(np.uint64)[0, column])
        for step in (-1, 0, 1):
            leading = threshold + step
            if not 0 <= leading <= last_leading:
                continue
            for tie_word in {max(low - 1, 0), low, min(low + 1, 2**64 - 1)}:
                is_kept = (leading, tie_word) < (threshold, low)
                words.append(leading << table.index_bits | column)
                tie_words.append(tie_word)
                expected.append((column if is_kept else alias) - table.offset)
    assert len(words) <= table_sampler.BLOCK
    _replace_words(
        monkeypatch, np.array(words, unsigned), np.array(tie_words, np.uint64)
    )

    def sample() -> tf.Tensor:
        return table_sampler.sample_tables(
            [table], [1], [len(words)], tf.constant(seed)
        )

    drawn = sample() if mode == "eager" else tf.function(sample)()
    assert drawn.numpy().tolist() == expected
    assert min(expected) < 0 < max(expected)


def _build_tied_table(rng: np.random.Generator) -> AliasTable:
    """A table in which a word whose leading bits are _LEADING ties in each column."""
    num_columns = 1 << _INDEX_BITS
    alias = (np.arange(num_columns) + 1 + rng.integers(4)) % num_columns
    packed = (_LEADING << _INDEX_BITS | alias).astype(np.uint32).view(np.int32)
    low = rng.integers(2**62, 2**63, size=[1, num_columns]).astype(np.int64) * 2
    return AliasTable(
        index_bits=_INDEX_BITS,
        word_bits=32,
        packed=packed[np.newaxis],
        low=low,
        offset=num_columns // 2,
    )


def _compute_tied_law(table: AliasTable) -> np.ndarray:
    """Returns the law of the columns, given a tie."""
    keep = table.low.view(np.uint64)[0] / 2.0**64
    alias = table.packed[0] & (table.num_columns - 1)
    law = keep / table.num_columns
    np.add.at(law, alias, (1 - keep) / table.num_columns)
    return law


class TestTiesOfTwoTables:
    """Every draw ties in both tables, in every block."""

    _NUM = 1 << 17

    def _sample(self, monkeypatch, tables, seed) -> np.ndarray:
        real = table_sampler.draw_uint64

        def draw_uint64(seed: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
            words = real(seed, shape)
            if shape[0] == len(tables):
                return words  # The further bits of one block.
            columns = tf.constant(0x0000000F_0000000F, tf.uint64)
            leading = _LEADING << 32 | _LEADING
            return words & columns | tf.constant(leading << _INDEX_BITS, tf.uint64)

        monkeypatch.setattr(table_sampler, "draw_uint64", draw_uint64)
        sample = tf.function(
            lambda seed: table_sampler.sample_tables(tables, [1, 16], [self._NUM], seed)
        )
        total = sample(tf.constant(seed)).numpy() + tables[0].offset
        return total + 16 * tables[1].offset

    def test_joint_law(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seed: np.ndarray,
        rng: np.random.Generator,
    ) -> None:
        tables = [_build_tied_table(rng), _build_tied_table(rng)]
        total = self._sample(monkeypatch, tables, seed)
        assert total.min() >= 0
        assert total.max() < 256
        laws = [_compute_tied_law(table) for table in tables]
        joint = np.cumsum(np.outer(laws[1], laws[0]).reshape(-1))
        edges = np.arange(256)
        right = goodness_of_fit.compute_p_value(total, edges[:-1], joint[:-1])
        assert right > goodness_of_fit.FALSE_FAILURE
        # Wrong: ties always kept, and the tables swapped.
        for wrong in (np.full(256, 1 / 256), np.outer(laws[0], laws[1]).reshape(-1)):
            cdf = np.cumsum(wrong)[:-1]
            p_value = goodness_of_fit.compute_p_value(total, edges[:-1], cdf)
            assert p_value < goodness_of_fit.FALSE_FAILURE

    def test_further_bits_are_not_shared(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seed: np.ndarray,
        rng: np.random.Generator,
    ) -> None:
        # Every column is kept with probability 1/2 and else becomes 8, so that a table
        # gives 8 with probability 1/2 + 1/32; both do with the square of that, but
        # with more than 1/2 if they shared their further bits.
        half = AliasTable(
            index_bits=_INDEX_BITS,
            word_bits=32,
            packed=np.full([1, 16], _LEADING << 4 | 8, np.int64).astype(np.int32),
            low=np.full([1, 16], -(2**63), np.int64),
            offset=8,
        )
        total = self._sample(monkeypatch, [half, half], seed)
        moved = np.stack([total % 16 == 8, total // 16 == 8]).astype(np.int64)
        count = int(np.sum(moved[0] & moved[1]))
        p_value = stats.binomtest(count, self._NUM, (17 / 32) ** 2).pvalue
        assert p_value > goodness_of_fit.FALSE_FAILURE
        blocks = moved[0].reshape(-1, table_sampler.BLOCK)
        agreement = np.mean(blocks[:1] == blocks[1:], axis=1)
        assert np.all(np.abs(agreement - 0.5) < 0.2)


def test_natural_ties_do_not_change_the_law(seed: np.ndarray) -> None:
    # 16 leading bits: of 2^20 draws about 16 tie.
    index_bits = 16
    weights = alias_table.compute_discrete_gaussian_weights(
        Fraction(1 << 24), 1 << (index_bits - 1)
    )
    table = alias_table.build_alias_table([weights])
    num = 1 << 20
    sample = tf.function(
        lambda seed: table_sampler.sample_tables([table], [1], [num], seed)
    )
    drawn = sample(tf.constant(seed)).numpy()
    law = np.array([float(p) for p in alias_table.compute_table_law(table)])
    cdf = np.cumsum(law)
    edges = np.arange(-4 * 4096, 4 * 4096, 256)
    right = goodness_of_fit.compute_p_value(drawn, edges, cdf[edges + table.offset])
    shifted = goodness_of_fit.compute_p_value(
        drawn, edges, cdf[edges + table.offset + 40]
    )
    assert right > goodness_of_fit.FALSE_FAILURE > shifted


@pytest.mark.parametrize(
    "shape", [[], [0], [1], [3, 5], [1023], [1024], [1025], [2, 0]]
)
def test_shapes(shape: list[int], seed: np.ndarray) -> None:
    table = _build_table(1.0, 32)
    drawn = table_sampler.sample_tables([table], [1], shape, tf.constant(seed))
    assert drawn.shape == shape
    assert drawn.dtype == tf.int32


def test_wide_values_are_int64(seed: np.ndarray) -> None:
    table = _build_table(1.0, 32)
    narrow = table_sampler.sample_tables([table], [3], [100], tf.constant(seed))
    wide = table_sampler.sample_tables(
        [table], [3 << 33], [100], tf.constant(seed), wide=True
    )
    assert wide.dtype == tf.int64
    assert np.array_equal(wide, narrow.numpy().astype(np.int64) << 33)
