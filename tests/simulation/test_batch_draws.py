"""Tests for clients' batches: drawn in one call as if they were drawn one by one."""

import numpy as np
import pytest

from simulation import client_data, client_training


@pytest.mark.parametrize("num_examples", [0, 1, 2, 3, 22, 100, 1000])
@pytest.mark.parametrize("num_epochs", [1, 2, 17])
def test_the_order_of_each_epoch_is_the_next_permutation(num_examples, num_epochs):
    rng, same = (np.random.default_rng([num_examples, num_epochs]) for _ in range(2))
    batches = client_training.draw_batches(
        num_examples, batch_size=10, num_epochs=num_epochs, rng=rng
    )
    orders = batches.reshape([num_epochs, -1])[:, :num_examples]
    for order in orders:
        np.testing.assert_array_equal(order, same.permutation(num_examples) + 1)
    assert batches.dtype == np.int32
    # Whoever draws after it gets the same, too.
    assert rng.bit_generator.state == same.bit_generator.state


def test_padding_is_zeros_behind_what_there_was(rng):
    examples = {
        "x": rng.normal(size=[5, 2]).astype(np.float32),
        "y": np.arange(5, dtype=np.int32),
    }
    batches = np.ones([3, 4], np.int32)
    padded, rows = client_training.pad_client(examples, batches, num_batches=6)
    for name, part in examples.items():
        np.testing.assert_array_equal(padded[name][:5], part, strict=True)
        assert padded[name].shape[0] == 8 and not np.any(padded[name][5:])
        assert padded[name].dtype == part.dtype
    np.testing.assert_array_equal(rows[:3], batches, strict=True)
    assert rows.shape == (8, 4) and not np.any(rows[3:])


def test_the_generator_of_a_seed_is_numpys():
    rng = np.random.default_rng(0)
    for number in range(200):
        seed = rng.integers(2**64, size=4, dtype=np.uint64)
        # Numbers whose upper word is 0, and 0 itself, are fewer words.
        if number % 2:
            seed[number % 4] >>= np.uint64(32)
        if number % 3 == 0:
            seed[(number + 1) % 4] = 0
        built = client_data.build_batch_rng(seed)
        assert (
            built.bit_generator.state == np.random.default_rng(seed).bit_generator.state
        )
