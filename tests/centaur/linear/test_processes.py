"""Start, rounds and baselines on the engine, without noise, against NumPy loops."""

import numpy as np
import pytest
from scipy import linalg

from centaur import linear
from tests.centaur.linear import oracle

WIDE, RATE = 1e3, 0.3


def build_factory(users, members=1, clip=WIDE):
    return linear.StackedGaussianFactory(
        [0.0] * members, l2_clip=clip, num_users=users.problem.num_users
    )


def sample_stack(rng, members, dim=6, rank=2):
    return np.stack(
        [linear.sample_orthonormal(rng, dim, rank) for _ in range(members)]
    ).astype(np.float32)


class TestAlternation:
    @pytest.mark.parametrize("limit", [WIDE, 0.8])
    def test_equals_a_loop(self, rng, limit):
        users, blocks, truth, *_ = oracle.make_users(rng)
        process = linear.build_alternation(
            users, build_factory(users, 2, limit), learning_rate=RATE
        )
        stack = sample_stack(rng, 2)
        steps = list(linear.run_releases(process, blocks, stack=stack, num_releases=4))
        expected = [b.astype(np.float64) for b in stack]
        clipped = 0
        for number, step in enumerate(steps):
            subsets = oracle.read_subsets(users, blocks, number)
            expected = [oracle.take_round(b, subsets, limit, RATE) for b in expected]
            np.testing.assert_allclose(step.stack, expected, atol=2e-5)
            clipped += step.clipped.sum()
            is_reached = step.largest > limit
            assert np.array_equal(step.clipped > 0, is_reached)
        assert (clipped > 0) == (limit < WIDE)
        distances = [
            linear.compute_distance(step.stack[0], truth)
            for step in (steps[0], steps[-1])
        ]
        assert distances[1] < distances[0]

    def test_blocks_of_other_sizes_give_the_same(self, rng):
        users, blocks, _, x, y = oracle.make_users(rng, users_per_block=12)
        whole, _, _, _, _ = oracle.make_users(rng, users_per_block=1)
        # The start's examples are fixed: the power method sees the same.
        stack = sample_stack(rng, 1)
        many = whole.build_blocks(x, y, np.zeros((12, 2), np.int32))
        results = [
            next(
                linear.run_releases(
                    linear.build_power_method(kind, build_factory(kind, clip=2.0)),
                    values,
                    stack=stack,
                    num_releases=1,
                )
            )
            for kind, values in ((users, blocks), (whole, many))
        ]
        np.testing.assert_allclose(results[0].stack, results[1].stack, atol=1e-5)
        assert results[0].clipped == results[1].clipped > 0

    def test_reject_the_rate(self, rng):
        users, *_ = oracle.make_users(rng)
        with pytest.raises(ValueError, match="`learning_rate` must be positive"):
            linear.build_alternation(users, build_factory(users), learning_rate=0.0)


def test_power_method_without_noise_ends_at_the_eigenvectors(rng):
    # Many users: the mean of M_i has a gap, near 1 : 2, after its second eigenvalue.
    users, blocks, _, x, y = oracle.make_users(rng, num_users=400, users_per_block=100)
    matrix = oracle.build_moments(x[:, :8], y[:, :8]).mean(0)
    values, vectors = np.linalg.eigh(matrix)
    assert values[-3] / values[-2] < 0.85
    stack = sample_stack(rng, 3)
    process = linear.build_power_method(users, build_factory(users, 3))
    *_, last = linear.run_releases(process, blocks, stack=stack, num_releases=100)
    for found in last.stack:
        assert linear.compute_distance(found, vectors[:, -2:]) < 1e-5


def test_one_power_step_is_the_definition(rng):
    users, blocks, _, x, y = oracle.make_users(rng)
    stack = sample_stack(rng, 1)
    limit = 1.5
    process = linear.build_power_method(users, build_factory(users, clip=limit))
    step = next(linear.run_releases(process, blocks, stack=stack, num_releases=1))
    matrices = oracle.build_moments(x[:, :8], y[:, :8])
    products = [oracle.clip(m @ stack[0].astype(np.float64), limit) for m in matrices]
    expected = oracle.fix_signs(np.mean(products, axis=0))
    np.testing.assert_allclose(step.stack[0], expected, atol=1e-5)


class TestBaselines:
    def test_normal_equations_minimise_exactly(self, rng):
        users, blocks, *_ = oracle.make_users(rng)
        stack = sample_stack(rng, 2)
        process = linear.build_normal_equations(users, build_factory(users, 2))
        step = next(linear.run_releases(process, blocks, stack=stack, num_releases=1))
        for member, b in enumerate(stack.astype(np.float64)):
            rows, targets = [], []
            for x1, y1, x2, y2 in oracle.read_subsets(users, blocks, 0):
                head = np.linalg.lstsq(x1 @ b, y1, rcond=None)[0]
                rows += [np.outer(inputs, head).reshape(-1) for inputs in x2]
                targets += list(y2)
            solved = np.linalg.lstsq(np.array(rows), np.array(targets), rcond=None)[0]
            expected = oracle.fix_signs(solved.reshape(6, 2))
            np.testing.assert_allclose(step.stack[member], expected, atol=1e-3)

    def test_whole_matrix_gives_the_eigenvectors(self, rng):
        users, blocks, _, x, y = oracle.make_users(rng)
        process = linear.build_whole_matrix(users, build_factory(users, 2))
        step = next(
            linear.run_releases(
                process, blocks, stack=sample_stack(rng, 2), num_releases=1
            )
        )
        matrix = oracle.build_moments(x[:, :8], y[:, :8]).mean(0)
        expected = np.linalg.eigh(matrix)[1][:, -2:]
        for found in step.stack:
            assert np.sin(linalg.subspace_angles(found, expected)).max() < 1e-4
        norms = [np.linalg.norm(m) for m in oracle.build_moments(x[:, :8], y[:, :8])]
        np.testing.assert_allclose(step.largest, max(norms), rtol=1e-4)


def test_noise_reaches_the_release(rng):
    """Two members that differ in noise alone part; equal ones without it do not."""
    users, blocks, *_ = oracle.make_users(rng)
    factory = linear.StackedGaussianFactory(
        [0.0, 0.0, 5.0], l2_clip=1.0, num_users=12, noise_seed=(3, 4)
    )
    process = linear.build_alternation(users, factory, learning_rate=RATE)
    stack = np.repeat(sample_stack(rng, 1), 3, axis=0)
    step = next(linear.run_releases(process, blocks, stack=stack, num_releases=1))
    np.testing.assert_allclose(step.stack[0], step.stack[1], atol=1e-6)
    assert linear.compute_distance(step.stack[0], step.stack[2]) > 0.01
