"""Which examples each phase sees, and what generated examples are."""

import dataclasses

import numpy as np
import pytest

from centaur import linear
from tests.centaur.linear import oracle


def build_generated(**changes):
    fields = {
        "problem": linear.LinearProblem(num_users=400, dim=5, rank=2),
        "subsets": linear.Subsets(start=4, head=3, gradient=2),
        "examples_per_user": 14,
        "num_rounds": 2,
        "users_per_block": 200,
    }
    return linear.GeneratedUsers(**{**fields, **changes})


class TestStoredUsers:
    def test_subsets_are_disjoint_and_leave_the_start_alone(self, rng):
        users, blocks, *_ = oracle.make_users(rng)
        for block in blocks:
            # An example is known by its number.
            shape = block["y"].shape
            numbers = np.broadcast_to(np.arange(shape[1], dtype=np.float32), shape)
            marked = {**block, "y": numbers}
            start = users.read_start(marked).y
            assert np.array_equal(start, numbers[:, :8])
            rounds = [users.read_round(marked, np.int64(n)) for n in range(3)]
            for first, second in rounds:
                assert (first.y.shape[1], second.y.shape[1]) == (6, 5)
                for user in range(shape[0]):
                    both = {*first.y.numpy()[user], *second.y.numpy()[user]}
                    assert len(both) == 11
                    assert min(both) >= 8
            orders = {tuple(first.y.numpy().reshape(-1)) for first, _ in rounds}
            assert len(orders) == 3

    def test_inputs_go_with_outputs(self, rng):
        users, blocks, truth, x, y = oracle.make_users(rng)
        pairs = {
            tuple(inputs): output
            for inputs, output in zip(x.reshape(-1, 6), y.reshape(-1), strict=True)
        }
        first, _ = users.read_round(blocks[1], np.int64(0))
        for inputs, output in zip(
            first.x.numpy().reshape(-1, 6), first.y.numpy().reshape(-1), strict=True
        ):
            assert pairs[tuple(inputs)] == output

    def test_every_example_is_chosen_equally_often(self, rng):
        users, blocks, *_ = oracle.make_users(rng)
        numbers = np.broadcast_to(np.arange(30, dtype=np.float32), (3, 30))
        marked = {**blocks[0], "y": numbers}
        counts = np.zeros(30)
        for number in range(100):
            first, _ = users.read_round(marked, np.int64(number))
            counts += np.bincount(first.y.numpy().astype(int).reshape(-1), minlength=30)
        assert not counts[:8].any()
        expected = 100 * 3 * 6 / 22
        assert np.all(abs(counts[8:] - expected) < 6 * np.sqrt(expected))

    def test_reject_shapes(self, rng):
        users, _, _, x, y = oracle.make_users(rng)
        seeds = np.zeros((4, 2), np.int32)
        with pytest.raises(ValueError, match="`x` must have the shape"):
            users.build_blocks(x[:, 1:], y, seeds)
        with pytest.raises(ValueError, match="`seeds` must have the shape"):
            users.build_blocks(x, y, seeds[1:])

    def test_reject_too_few_examples(self, rng):
        with pytest.raises(ValueError, match="`examples_per_user` must be at least 19"):
            oracle.make_users(rng, examples=18)


class TestGeneratedUsers:
    def build(self, rng):
        users = build_generated()
        truth = linear.sample_orthonormal(rng, 5, 2)
        return users, users.build_blocks(truth, linear.build_block_seeds(rng, 2)), truth

    def test_outputs_are_exact(self, rng):
        users, blocks, truth = self.build(rng)
        heads = users.draw_heads(blocks[0]).numpy()
        np.testing.assert_allclose(np.linalg.norm(heads, axis=1), 2**0.5, rtol=1e-6)
        for examples in (
            users.read_start(blocks[0]),
            *users.read_round(blocks[0], np.int64(1)),
        ):
            expected = np.einsum("nmd,dk,nk->nm", examples.x, truth, heads)
            np.testing.assert_allclose(examples.y, expected, atol=1e-5)

    def test_phases_rounds_and_blocks_have_other_examples(self, rng):
        users, blocks, _ = self.build(rng)
        seen = [
            examples.x.numpy().reshape(-1)
            for block in blocks
            for examples in (
                users.read_start(block),
                *users.read_round(block, np.int64(0)),
                *users.read_round(block, np.int64(1)),
            )
        ]
        values = np.concatenate(seen)
        # Few of 28,000 float32 draws coincide by chance.
        assert len(np.unique(values)) > 0.99 * len(values)
        again = users.read_round(blocks[0], np.int64(0))[0].x.numpy()
        assert np.array_equal(again.reshape(-1), seen[1])

    def test_inputs_are_standard_and_heads_isotropic(self, rng):
        users, blocks, _ = self.build(rng)
        x = users.read_start(blocks[0]).x.numpy().reshape(-1)
        assert abs(x.mean()) < 5 / len(x) ** 0.5
        assert abs(x.var() - 1) < 5 * (2 / len(x)) ** 0.5
        heads = np.concatenate([users.draw_heads(block).numpy() for block in blocks])
        np.testing.assert_allclose(heads.T @ heads / len(heads), np.eye(2), atol=0.25)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"examples_per_user": 13}, r"`examples_per_user` must be at least 14"),
            ({"users_per_block": 300}, r"`users_per_block` must divide `num_users`"),
            ({"users_per_block": 0}, r"`users_per_block` must be an integer"),
            ({"num_rounds": 0}, r"`num_rounds` must be an integer at least 1"),
            (
                {"subsets": linear.Subsets(start=4, head=1, gradient=2)},
                r"`head_examples` must be at least `rank` \(2\).* Found 1",
            ),
        ],
    )
    def test_reject(self, changes, message):
        with pytest.raises(ValueError, match=message):
            build_generated(**changes)

    def test_reject_a_truth_of_another_shape(self):
        with pytest.raises(ValueError, match="`truth` must have the shape"):
            build_generated().build_blocks(np.eye(5)[:, :1], np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 6}, r"`rank` must be at most `dim` \(5\). Found 6"),
        ({"rank": 0}, "`rank` must be an integer at least 1"),
        ({"num_users": 0}, "`num_users` must be"),
        ({"dim": 2.5}, "`dim` must be an integer"),
    ],
)
def test_reject_problems(changes, message):
    problem = linear.LinearProblem(num_users=4, dim=5, rank=2)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(problem, **changes)


@pytest.mark.parametrize("name", ["start", "head", "gradient"])
def test_reject_empty_subsets(name):
    sizes = {"start": 1, "head": 1, "gradient": 1, name: 0}
    with pytest.raises(ValueError, match=f"`{name}_examples` must be"):
        linear.Subsets(**sizes)
