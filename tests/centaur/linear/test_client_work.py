"""What users compute, against loops, normal equations and finite differences."""

import numpy as np
import pytest
import tensorflow as tf

from centaur import linear
from centaur.linear import baselines, client_work
from tests.centaur.linear import oracle

USERS, COUNT, DIM, RANK, MEMBERS = 4, 9, 6, 2, 3


@pytest.fixture
def examples(rng):
    return linear.Examples(
        tf.constant(rng.standard_normal((USERS, COUNT, DIM)), tf.float32),
        tf.constant(rng.standard_normal((USERS, COUNT)), tf.float32),
    )


@pytest.fixture
def stack(rng):
    drawn = [linear.sample_orthonormal(rng, DIM, RANK) for _ in range(MEMBERS)]
    return tf.constant(np.stack(drawn), tf.float32)


@pytest.fixture
def heads(rng):
    return tf.constant(rng.standard_normal((USERS, MEMBERS, RANK)), tf.float32)


def compute_loss(b, w, x, y) -> float:
    return float(np.mean(0.5 * (x @ b @ w - y) ** 2))


def test_heads_solve_the_normal_equations(stack, examples):
    found = client_work.solve_heads(stack, examples).numpy()
    for user in range(USERS):
        for member in range(MEMBERS):
            design = examples.x[user].numpy() @ stack[member].numpy()
            expected = np.linalg.solve(
                design.T @ design, design.T @ examples.y[user].numpy()
            )
            np.testing.assert_allclose(found[user, member], expected, rtol=1e-4)


def test_heads_recover_the_truth_where_b_is_it(stack, examples, rng):
    truth = rng.standard_normal((USERS, RANK))
    y = np.einsum("umd,dk,uk->um", examples.x, stack[1], truth)
    exact = linear.Examples(examples.x, tf.constant(y, tf.float32))
    found = client_work.solve_heads(stack, exact).numpy()
    np.testing.assert_allclose(found[:, 1], truth, atol=1e-5)
    assert abs(found[:, 0] - truth).max() > 0.1


def test_heads_of_singular_examples_are_finite(stack):
    zeros = linear.Examples(tf.zeros([USERS, COUNT, DIM]), tf.ones([USERS, COUNT]))
    assert not client_work.solve_heads(stack, zeros).numpy().any()


def test_gradients_equal_loops_and_differences(stack, heads, examples):
    found = client_work.compute_gradients(stack, heads, examples).numpy()
    assert found.shape == (USERS, MEMBERS, DIM, RANK)
    for user in range(USERS):
        x = examples.x[user].numpy().astype(np.float64)
        y = examples.y[user].numpy().astype(np.float64)
        for member in range(MEMBERS):
            b = stack[member].numpy().astype(np.float64)
            w = heads[user, member].numpy().astype(np.float64)
            gradient = oracle.compute_gradient(b, w, x, y)
            np.testing.assert_allclose(
                found[user, member], gradient, rtol=1e-4, atol=1e-5
            )
            step = np.zeros_like(b)
            step[2, 1] = 1e-4
            slope = (
                compute_loss(b + step, w, x, y) - compute_loss(b - step, w, x, y)
            ) / 2e-4
            assert gradient[2, 1] == pytest.approx(slope, rel=1e-6)


def test_moments_equal_the_matrix(stack, examples):
    found = client_work.apply_moments(stack, examples).numpy()
    matrices = oracle.build_moments(examples.x.numpy(), examples.y.numpy())
    expected = np.einsum("upq,rqk->urpk", matrices, stack.numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


class TestSumClipped:
    def test_equals_a_loop(self, rng):
        rows = rng.standard_normal((USERS, MEMBERS, DIM, RANK))
        rows[0] *= 0.1
        limit = 2.0
        found = client_work.sum_clipped(tf.constant(rows, tf.float32), limit)
        norms = np.sqrt((rows**2).sum((2, 3)))
        expected = [
            sum(oracle.clip(rows[user, member], limit) for user in range(USERS))
            for member in range(MEMBERS)
        ]
        np.testing.assert_allclose(found.total, expected, rtol=1e-5, atol=1e-6)
        assert np.array_equal(found.clipped, (norms > limit).sum(0))
        assert 0 < found.clipped.numpy()[0] < USERS
        np.testing.assert_allclose(found.largest, norms.max(0), rtol=1e-6)

    def test_no_user_counts_more_than_the_threshold(self, rng):
        rows = 10.0 ** rng.uniform(-20, 20, (1, 300, 5))
        found = client_work.sum_clipped(tf.constant(rows, tf.float32), 0.7)
        norms = np.linalg.norm(found.total.numpy().astype(np.float64), axis=1)
        assert norms.max() <= 0.7 * (1 + 2**-21)

    def test_without_threshold_nothing_is_clipped(self, rng):
        rows = rng.standard_normal((USERS, 1, DIM)).astype(np.float32)
        found = client_work.sum_clipped(tf.constant(rows), None)
        np.testing.assert_allclose(found.total, rows.sum(0), rtol=1e-5)
        assert not found.clipped.numpy().any()

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_is_not_finite_is_dropped_and_counted(self, bad):
        rows = np.ones((2, 1, 3), np.float32)
        rows[0, 0, 1] = bad
        found = client_work.sum_clipped(tf.constant(rows), 10.0)
        assert np.array_equal(found.total, np.ones((1, 3)))
        assert found.clipped.numpy() == [1]


@pytest.mark.parametrize("bad", [1e20, np.inf, np.nan])
def test_normal_equations_of_a_strange_user_add_nothing(heads, examples, bad):
    """1e20 is finite, and its square is not."""
    own = np.array(examples.x)
    own[1] = bad
    strange = examples._replace(x=tf.constant(own))
    found = baselines.sum_normal_equations(heads, strange, 8.0)
    others = [user for user in range(USERS) if user != 1]
    expected = baselines.sum_normal_equations(
        tf.gather(heads, others),
        examples._replace(
            x=tf.gather(examples.x, others), y=tf.gather(examples.y, others)
        ),
        8.0,
    )
    np.testing.assert_allclose(found.total, expected.total, rtol=1e-5, atol=1e-6)
    assert np.array_equal(found.clipped, expected.clipped + 1)


def test_normal_equations_equal_explicit_matrices(heads, examples):
    limit = 8.0
    found = baselines.sum_normal_equations(heads, examples, limit)
    size = DIM * RANK
    expected = np.zeros((MEMBERS, size * size + size))
    clipped = np.zeros(MEMBERS)
    for user in range(USERS):
        for member in range(MEMBERS):
            w = heads[user, member].numpy().astype(np.float64)
            phi = np.stack([np.outer(x, w).reshape(-1) for x in examples.x[user]])
            pair = np.concatenate(
                [
                    (phi.T @ phi / COUNT).reshape(-1),
                    phi.T @ examples.y[user].numpy() / COUNT,
                ]
            )
            clipped[member] += np.linalg.norm(pair) > limit
            expected[member] += oracle.clip(pair, limit)
    np.testing.assert_allclose(found.total, expected, rtol=1e-4, atol=1e-5)
    assert np.array_equal(found.clipped, clipped)
    assert 0 < clipped.sum() < USERS * MEMBERS
