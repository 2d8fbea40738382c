"""Adaptive clipping: settings, the geometric update, and rounds toward a quantile."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp.accounting import (
    CohortScheme,
    DDGaussParameters,
    Sampling,
    SkellamParameters,
)
from distributed_dp.adaptive_clip import (
    AdaptiveClip,
    build_adaptive_clip,
    build_indicator_noise,
)
from distributed_dp.ddgauss_factory import DDGaussFactory
from distributed_dp.noise import DiscreteGaussianShares, SkellamShares
from distributed_dp.skellam_factory import DistributedSkellamFactory
from distributed_dp.update_layout import NoiseSeeds
from tests.distributed_dp import goodness_of_fit
from tests.distributed_dp.factories import build_parameters


class TestSettings:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("noise_multiplier", 0.0),
            ("noise_multiplier", -1.0),
            ("noise_multiplier", math.nan),
            ("noise_multiplier", math.inf),
            ("contribution", 0),
            ("contribution", -3),
            ("contribution", 2.5),
            ("target_quantile", -0.1),
            ("target_quantile", 1.1),
            ("target_quantile", math.nan),
            ("learning_rate", -0.1),
            ("learning_rate", math.inf),
            ("learning_rate", math.nan),
        ],
    )
    def test_bad_settings_are_refused(self, name: str, value: float) -> None:
        good = {"noise_multiplier": 2.0, "contribution": 3}
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            AdaptiveClip(**(good | {name: value}))

    def test_fit(self) -> None:
        # 100 clients of 3 and 8 standard deviations of 6 stay below 2^9, not 2^8.
        adaptive_clip = AdaptiveClip(noise_multiplier=2.0, contribution=3)
        adaptive_clip.check_fits(10, 100)
        with pytest.raises(ValueError, match="`bits` must hold the sum"):
            adaptive_clip.check_fits(9, 100)

    @pytest.mark.parametrize(
        ("expected", "largest"), [(1, 1), (10, 40), (100, 171), (1000, 1200)]
    )
    @pytest.mark.parametrize("noise_multiplier", [None, 0.3, 20.0])
    def test_shares_are_never_too_small(
        self, expected: int, largest: int, noise_multiplier: float | None
    ) -> None:
        built = build_adaptive_clip(
            clients_per_round=expected,
            max_clients=largest,
            noise_multiplier=noise_multiplier,
        )
        assert built.central_scale / math.sqrt(largest) >= 4
        assert built.noise_multiplier == (noise_multiplier or 0.1 * expected)
        # The least such contribution.
        if built.contribution > 1:
            smaller = built.noise_multiplier * (built.contribution - 1)
            assert smaller / math.sqrt(largest) < 4

    def test_indicator_noise_is_split_like_the_main_one(self) -> None:
        adaptive_clip = AdaptiveClip(noise_multiplier=5.0, contribution=4)
        for kind in (DiscreteGaussianShares, SkellamShares):
            main = kind(30.0, low=6, high=10)
            noise = build_indicator_noise(adaptive_clip, main)
            assert isinstance(noise, kind)
            assert (noise.low, noise.high) == (main.low, main.high)
            share = noise.sample_share(1 << 14, (1, 2), tf.constant(8, tf.int64))
            fraction = noise.compute_variance_fraction(8, 1)
            p_value = goodness_of_fit.compute_variance_p_value(
                share.numpy(), 20.0**2 * fraction
            )
            assert p_value > goodness_of_fit.FALSE_FAILURE


class TestUpdate:
    @pytest.mark.parametrize("target", [0.0, 0.3, 1.0])
    @pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
    def test_is_geometric(self, target: float, fraction: float) -> None:
        adaptive_clip = AdaptiveClip(
            noise_multiplier=1.0,
            contribution=4,
            target_quantile=target,
            learning_rate=0.2,
        )
        # Of 8 clients the fraction is within the clip: +4 each, -4 of the others.
        indicator_sum = tf.constant(round((2 * fraction - 1) * 4 * 8), tf.int64)
        updated = adaptive_clip.update_clip(
            tf.constant(3.0), indicator_sum, 8, initial_clip=1.0
        )
        expected = 3.0 * math.exp(-0.2 * (fraction - target))
        assert float(updated) == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("indicator_sum", [-(2**40), 2**40])
    def test_a_step_is_bounded_whatever_the_noise(self, indicator_sum: int) -> None:
        adaptive_clip = AdaptiveClip(noise_multiplier=1.0, contribution=1)
        updated = adaptive_clip.update_clip(
            tf.constant(1.0), tf.constant(indicator_sum, tf.int64), 8, initial_clip=1.0
        )
        assert abs(math.log(float(updated))) == pytest.approx(0.1, rel=1e-5)

    @pytest.mark.parametrize("sign", [-1, 1])
    def test_many_steps_one_way_stay_within_float32(self, sign: int) -> None:
        adaptive_clip = AdaptiveClip(
            noise_multiplier=1.0, contribution=1, learning_rate=3.0
        )
        clip = tf.constant(0.5)
        for _ in range(100):
            indicator_sum = tf.constant(sign * 8, tf.int64)
            clip = adaptive_clip.update_clip(clip, indicator_sum, 8, initial_clip=0.5)
        assert float(clip) == 0.5 * 2.0 ** (-20 * sign)


_DIM, _CLIENTS = 8, 20
_SCHEME = CohortScheme(Sampling.POISSON, 100, _CLIENTS)
_KINDS = {
    "ddgauss": (DDGaussFactory, DDGaussParameters),
    "skellam": (DistributedSkellamFactory, SkellamParameters),
}


@functools.cache
def _build_process(name: str, noise_seeds: NoiseSeeds):
    factory, kind = _KINDS[name]
    value_type = tff.to_type((np.float32, [_DIM]))
    seeds = {}
    if noise_seeds is NoiseSeeds.CARRIED:
        value_type = tff.to_type((value_type, (np.int32, [2]), np.int32))
        seeds = {"rotation_seed": (1, 2), "server_noise_seed": (3, 4)}
    parameters = build_parameters(
        kind, padded_dim=_DIM, clients_per_round=_CLIENTS, local_stddev=0.01
    )
    adaptive_clip = AdaptiveClip(
        noise_multiplier=1.0, contribution=16, target_quantile=0.7, learning_rate=0.5
    )
    built = factory(
        parameters,
        _SCHEME,
        noise_seeds=noise_seeds,
        adaptive_clip=adaptive_clip,
        **seeds,
    )
    return built.create(value_type)


def _run_rounds(
    name: str, noise_seeds: NoiseSeeds, norms: np.ndarray, num: int, seed: np.ndarray
) -> list[float]:
    """Returns the clips of `num` rounds in which clients have these norms."""
    process = _build_process(name, noise_seeds)
    state = process.initialize()
    updates = (np.eye(1, _DIM)[0] * norms[:, np.newaxis]).astype(np.float32)
    clips = []
    for number in range(num):
        clients = list(updates)
        if noise_seeds is NoiseSeeds.CARRIED:
            clients = [
                (update, seed + np.int32([i, number]), np.int32(len(updates)))
                for i, update in enumerate(updates)
            ]
        output = process.next(state, clients)
        assert output.measurements["l2_clip"] == state["l2_clip"]
        state = output.state
        clips.append(float(state["l2_clip"]))
    return clips


@pytest.mark.usefixtures("tff_context")
@pytest.mark.parametrize(
    ("name", "noise_seeds"),
    [("ddgauss", NoiseSeeds.CARRIED), ("skellam", NoiseSeeds.ENTROPY)],
)
class TestRounds:
    def test_the_clip_comes_to_the_quantile(
        self, name: str, noise_seeds: NoiseSeeds, seed: np.ndarray
    ) -> None:
        norms = np.linspace(0.2, 6.0, _CLIENTS)
        clips = _run_rounds(name, noise_seeds, norms, 25, seed)
        # 70 % of the norms are below 4.2; the noise of the quantile is 1 / 40.
        assert np.mean(clips[-5:]) == pytest.approx(4.26, rel=0.2)
        assert clips[0] > 2.0

    def test_it_moves_toward_the_norms(
        self, name: str, noise_seeds: NoiseSeeds, seed: np.ndarray
    ) -> None:
        large = _run_rounds(name, noise_seeds, np.full(_CLIENTS, 50.0), 3, seed)
        small = _run_rounds(name, noise_seeds, np.full(_CLIENTS, 0.01), 3, seed)
        assert 2.0 < large[0] < large[1] < large[2]
        assert 2.0 > small[0] > small[1] > small[2]
        # All or none within the clip, give or take the noise.
        assert math.log(large[0] / 2) == pytest.approx(0.5 * 0.7, abs=0.08)
        assert math.log(small[0] / 2) == pytest.approx(-0.5 * 0.3, abs=0.08)

    def test_a_client_that_is_not_finite_says_nothing(
        self, name: str, noise_seeds: NoiseSeeds, seed: np.ndarray
    ) -> None:
        norms = np.full(_CLIENTS, math.nan)
        clip = _run_rounds(name, noise_seeds, norms, 1, seed)[0]
        # Neither within nor beyond: one half.
        assert math.log(clip / 2) == pytest.approx(-0.5 * (0.5 - 0.7), abs=0.08)

    def test_an_empty_cohort_moves_it_by_noise_alone(
        self, name: str, noise_seeds: NoiseSeeds, seed: np.ndarray
    ) -> None:
        clip = _run_rounds(name, noise_seeds, np.zeros([0]), 1, seed)[0]
        assert math.log(clip / 2) == pytest.approx(-0.5 * (0.5 - 0.7), abs=0.08)
        assert clip != np.float32(2.0 * math.exp(0.1))
