"""Orthonormalisation and distance against independent computations."""

import numpy as np
import pytest
import tensorflow as tf
from scipy import linalg, stats

from centaur import linear
from tests.centaur.linear import oracle


class TestOrthonormalize:
    def test_equals_gram_schmidt(self, rng):
        matrices = rng.standard_normal((4, 7, 3))
        found = linear.orthonormalize(tf.constant(matrices)).numpy()
        expected = np.stack([oracle.fix_signs(matrix) for matrix in matrices])
        np.testing.assert_allclose(found, expected, atol=1e-12)

    def test_r_has_a_positive_diagonal(self, rng):
        matrix = rng.standard_normal((9, 4))
        q = linear.orthonormalize(tf.constant(matrix)).numpy()
        r = q.T @ matrix
        assert np.all(np.diagonal(r) > 0)
        np.testing.assert_allclose(np.tril(r, -1), 0, atol=1e-12)

    def test_orthonormal_columns_stay_with_their_signs(self, rng):
        b = linear.sample_orthonormal(rng, 8, 3)
        for signs in ([1, 1, 1], [-1, 1, -1]):
            found = linear.orthonormalize(tf.constant(b * signs)).numpy()
            np.testing.assert_allclose(found, b * signs, atol=1e-12)

    def test_the_bare_q_has_other_signs(self, rng):
        # What the test above would not notice were Q's signs right by themselves.
        b = linear.sample_orthonormal(rng, 8, 3)
        # Householder's reflection turns a positive first number into a negative one.
        b[:, 0] *= np.sign(b[0, 0])
        q, _ = tf.linalg.qr(tf.constant(b))
        assert not np.allclose(q.numpy(), b)

    def test_a_zero_column_gives_finite_ones(self):
        found = linear.orthonormalize(tf.constant([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))
        np.testing.assert_allclose(found.numpy().T @ found.numpy(), np.eye(2))


class TestComputeDistance:
    def test_is_the_sine_of_the_largest_angle(self, rng):
        for _ in range(20):
            first = linear.sample_orthonormal(rng, 7, 3)
            second = linear.sample_orthonormal(rng, 7, 3)
            expected = np.sin(linalg.subspace_angles(first, second).max())
            found = linear.compute_distance(first, second)
            assert found == pytest.approx(expected, rel=1e-9)

    def test_is_exact_where_it_is_small(self):
        angle = 1e-9
        first = np.array([[1.0], [0.0]])
        second = np.array([[np.cos(angle)], [np.sin(angle)]])
        assert linear.compute_distance(first, second) == pytest.approx(angle, rel=1e-6)

    def test_does_not_see_the_basis(self, rng):
        first, second = (linear.sample_orthonormal(rng, 6, 2) for _ in range(2))
        turned = second @ linear.sample_orthonormal(rng, 2, 2)
        expected = linear.compute_distance(first, second)
        assert linear.compute_distance(first, turned) == pytest.approx(expected)

    def test_ends_of_its_range(self):
        axes = np.eye(4)
        assert linear.compute_distance(axes[:, :2], axes[:, [1, 0]]) == 0
        assert linear.compute_distance(axes[:, :2], axes[:, [0, 2]]) == 1

    @pytest.mark.parametrize(
        ("first", "second", "message"),
        [
            (2 * np.eye(3)[:, :1], np.eye(3)[:, :1], "orthonormal columns"),
            (np.eye(3)[:, :1], np.eye(3)[:, :2], "must have the shape of `first`"),
            (np.eye(2, 3), np.eye(3), "1 <= k <= d"),
            (np.full((3, 1), np.nan), np.eye(3)[:, :1], "orthonormal columns"),
        ],
    )
    def test_reject(self, first, second, message):
        with pytest.raises(ValueError, match=message):
            linear.compute_distance(first, second)


def test_samples_are_uniform(rng):
    draws = np.stack([linear.sample_orthonormal(rng, 2, 1)[:, 0] for _ in range(4000)])
    angles = np.arctan2(draws[:, 1], draws[:, 0])
    law = stats.uniform(-np.pi, 2 * np.pi).cdf
    assert stats.kstest(angles, law).pvalue > 1e-6
    # LAPACK's signs fill half of the circle.
    halved = np.where(angles > 0, angles - np.pi, angles)
    assert stats.kstest(halved, law).pvalue < 1e-6
