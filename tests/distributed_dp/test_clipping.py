"""Clipping: norms, identity below the clip, and what is not finite."""

import numpy as np
import pytest
import tensorflow as tf

from distributed_dp.clipping import clip_by_l2_norm, compute_l2_norm

_SLACK = 1 + 2.0**-22


def _run(x: np.ndarray, l2_clip: float, mode: str) -> tuple[np.ndarray, np.ndarray]:
    function = {
        "eager": clip_by_l2_norm,
        "graph": tf.function(clip_by_l2_norm),
        "xla": tf.function(clip_by_l2_norm, jit_compile=True),
    }[mode]
    clipped, norm = function(tf.constant(x, tf.float32), tf.constant(l2_clip))
    return clipped.numpy(), norm.numpy()


def _compute_norm(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.sum(x.astype(np.float64) ** 2, axis=-1))


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
class TestClip:
    @pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e10, 1e25, 1e37])
    def test_norm_is_within_the_clip(
        self, mode: str, magnitude: float, rng: np.random.Generator
    ) -> None:
        x = (rng.normal(size=[20, 257]) * magnitude).astype(np.float32)
        clip = 0.5
        clipped, norm = _run(x, clip, mode)
        assert np.all(_compute_norm(clipped) <= clip * _SLACK)
        np.testing.assert_allclose(norm[:, 0], _compute_norm(x), rtol=1e-12)

    def test_direction_is_kept(self, mode: str, rng: np.random.Generator) -> None:
        x = rng.normal(size=[257]).astype(np.float32)
        clipped, _ = _run(x, 0.5, mode)
        expected = x * (0.5 / _compute_norm(x))
        np.testing.assert_allclose(clipped, expected, rtol=2.0**-22)

    def test_below_the_clip_nothing_changes(
        self, mode: str, rng: np.random.Generator
    ) -> None:
        x = rng.normal(size=[5, 31]).astype(np.float32)
        exact_norm = np.float32([3.0, 4.0] + [0.0] * 29)
        for vectors, clip in ((x, 100.0), (exact_norm, 5.0), (x * 0, 1.0)):
            clipped, _ = _run(vectors, clip, mode)
            assert clipped.tobytes() == vectors.tobytes()

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_vector_that_is_not_finite_becomes_zero(
        self, mode: str, bad: float, rng: np.random.Generator
    ) -> None:
        x = rng.normal(size=[3, 8]).astype(np.float32)
        x[1, 5] = bad
        clipped, norm = _run(x, 1e6, mode)
        assert np.array_equal(clipped[1], np.zeros(8))
        assert np.array_equal(clipped[[0, 2]], x[[0, 2]])
        assert np.isfinite(norm[:, 0]).tolist() == [True, False, True]

    def test_the_largest_floats_are_finite(self, mode: str) -> None:
        # Their squares are not, in float32.
        x = np.full([64], np.finfo(np.float32).max, np.float32)
        clipped, norm = _run(x, 1.0, mode)
        assert np.isfinite(norm).all()
        assert _compute_norm(clipped) <= _SLACK
        # Its factor is no float32 of full precision: it counts as zero.
        assert not clipped.any()


def test_norm_is_of_float64() -> None:
    x = tf.fill([2**20], 1e-3 + 0.0)
    expected = np.float64(np.float32(1e-3)) * 1024
    np.testing.assert_allclose(compute_l2_norm(x), [expected], rtol=1e-13)
