"""The trusted server's aggregation: its clip, and its query's noise."""

import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp
from scipy import stats

from distributed_dp import central_aggregation
from distributed_dp.central_aggregation import SeededGaussianSumQuery
from distributed_dp.no_privacy_factory import NoPrivacyFactory
from tests.distributed_dp import goodness_of_fit
from tests.distributed_dp.factories import EXPECTED_CLIENTS, POISSON

_STDDEV = 3.0


class TestQuery:
    def _run(self, seed: np.ndarray, total):
        query = SeededGaussianSumQuery(1.0, _STDDEV, tf.constant(seed))
        return query.get_noised_result(total, query.initial_global_state())

    def test_noise_is_gaussian(self, seed: np.ndarray) -> None:
        total = tf.fill([1 << 17], 10.0)
        noised, _, _ = self._run(seed, total)
        noise = noised.numpy() - 10.0
        edges = np.linspace(-3, 3, 61) * _STDDEV
        for scale, shift, is_right in (
            (1, 0, True),
            (1.05, 0, False),
            (1 / 1.05, 0, False),
            (1, 0.1, False),
        ):
            law = stats.norm(scale=_STDDEV * scale, loc=shift)
            p_value = goodness_of_fit.compute_p_value(noise, edges, law.cdf(edges))
            assert (p_value > goodness_of_fit.FALSE_FAILURE) == is_right

    def test_leaves_have_their_own_noise(self, seed: np.ndarray) -> None:
        total = [tf.zeros([1000]), tf.zeros([1000])]
        (first, second), _, _ = self._run(seed, total)
        (again, _), _, _ = self._run(seed, total)
        (other, _), _, _ = self._run(seed ^ 1, total)
        assert np.array_equal(first, again)
        assert not np.any(np.isclose(first, other, rtol=0, atol=1e-6)[:10])
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.2

    def test_the_event_is_that_of_tensorflow_privacy(self, seed: np.ndarray) -> None:
        _, _, event = self._run(seed, tf.zeros([3]))
        base = tfp.GaussianSumQuery(1.0, _STDDEV)
        state = base.initial_global_state()
        _, _, expected = base.get_noised_result(tf.zeros([3]), state)
        assert float(event.noise_multiplier) == float(expected.noise_multiplier)


class TestClip:
    @pytest.mark.parametrize("norm", [1e-20, 0.5, 1.0, 2.0, 1e18, 1e20, 1e30, 1e37])
    def test_norm_is_within_the_clip(self, norm: float, rng) -> None:
        direction = rng.normal(size=500)
        x = (direction / np.linalg.norm(direction) * norm).astype(np.float32)
        clipped, counts = central_aggregation._clip(tf.constant(x), 1.0)
        found = np.linalg.norm(clipped.numpy().astype(np.float64))
        assert found == pytest.approx(min(norm, 1.0), rel=1e-6)
        assert float(counts["finite"]) == 1
        assert float(counts["norm"]) == pytest.approx(norm, rel=1e-6)
        if norm != 1:
            assert float(counts["clipped"]) == (norm > 1)

    @pytest.mark.parametrize("l2_clip", [None, 1.0])
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_what_is_not_finite_is_dropped(self, l2_clip: float | None, bad) -> None:
        x = tf.constant([1.0, bad, 2.0])
        clipped, counts = central_aggregation._clip(x, l2_clip)
        assert not np.any(clipped)
        assert float(counts["finite"]) == 0
        assert float(counts["norm"]) == 0
        assert float(counts["clipped"]) == 0


@pytest.mark.parametrize("l2_clip", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_clip_without_privacy_is_refused(l2_clip: float) -> None:
    with pytest.raises(ValueError, match="`l2_clip` must be positive"):
        NoPrivacyFactory(POISSON, l2_clip=l2_clip)


@pytest.mark.usefixtures("tff_context")
def test_without_privacy_but_with_a_clip() -> None:
    factory = NoPrivacyFactory(POISSON, l2_clip=5.0)
    process = factory.create(tff.to_type((np.float32, [2])))
    updates = [np.float32([3, 4]), np.float32([30, 40]), np.float32([0, 1])]
    output = process.next(process.initialize(), updates)
    expected = np.float32([6, 9]) / EXPECTED_CLIENTS
    np.testing.assert_allclose(output.result, expected, rtol=1e-6)
    assert output.measurements["fraction_clipped"] == pytest.approx(1 / 3)
    assert output.measurements["l2_clip"] == 5.0
