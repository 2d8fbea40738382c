"""The codec: round trips, bounds, wrap-around, and the law of what is sent."""

import math
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf

from distributed_dp import xla
from distributed_dp.accounting import Mechanism
from distributed_dp.modular import center
from distributed_dp.rotation import RotationKind
from tests.distributed_dp import goodness_of_fit, integer_law
from tests.distributed_dp.codecs import build_codec, decode, encode

_MECHANISMS = [Mechanism.DDGAUSS, Mechanism.SKELLAM]
_DIM = 200


def _seed_of(seed: np.ndarray, client: int) -> tf.Tensor:
    return tf.constant(seed + np.int32([client, 0]))


def _clip(x: np.ndarray, l2_clip: float) -> np.ndarray:
    norm = np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True)
    return x * np.minimum(1.0, l2_clip / np.maximum(norm, 1e-300))


def _sum_residues(codec, vectors: np.ndarray, seed: np.ndarray) -> np.ndarray:
    residues = [
        encode(codec, x, _seed_of(seed, i)).residues.numpy().astype(np.int64)
        for i, x in enumerate(vectors)
    ]
    return np.sum(residues, axis=0)


@pytest.mark.parametrize("rotation", RotationKind)
class TestWithoutNoise:
    def test_the_sum_comes_back(
        self, rotation: RotationKind, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        num_clients, granularity = 5, 2.0**-10
        codec = build_codec(dim=_DIM, rotation=rotation, granularity=granularity)
        vectors = rng.normal(size=[num_clients, _DIM]).astype(np.float32)
        vectors *= np.float32([[0.01], [0.05], [1.0], [30.0], [0.0]])
        total = _sum_residues(codec, vectors, seed)
        error = decode(codec, total).numpy() - _clip(vectors, 1.0)[:4].sum(axis=0)
        padded_dim = codec.parameters.padded_dim
        # A coordinate of a client is off by less than a step, with variance at most a
        # quarter of its square; the squared norm of the sum is within 8 standard
        # deviations, of which one is at most n step^2 sqrt(d) / 2.
        limit = num_clients * padded_dim / 4 + 4 * num_clients * math.sqrt(padded_dim)
        assert np.sum(error**2) <= limit * granularity**2
        # Nothing is that close by chance: another seed's rotation, another clip.
        other = decode(codec, total, l2_clip=1.01).numpy()
        assert np.sum((other - decode(codec, total).numpy()) ** 2) > 0
        if rotation is not RotationKind.IDENTITY:
            other = decode(codec, total, rotation_seed=(5, 7)).numpy()
            wrong = other - _clip(vectors, 1.0)[:4].sum(axis=0)
            assert np.sum(wrong**2) > limit * granularity**2

    def test_integers_are_the_neighbours_of_the_rotated_vector(
        self, rotation: RotationKind, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        codec = build_codec(dim=_DIM, rotation=rotation, beta=0.0)
        x = _clip(rng.normal(size=_DIM), 0.9).astype(np.float32)
        rotated = codec.rotation.rotate(tf.constant(x), tf.constant([5, 6])).numpy()
        sent = encode(codec, x, tf.constant(seed))
        integers = center(tf.cast(sent.residues, tf.int64), 20).numpy()
        assert np.abs(integers - rotated * 64).max() < 1
        assert float(sent.num_redraws) == 0

    @pytest.mark.parametrize("pieces", [False, True])
    def test_the_norm_is_bounded_whatever_comes(
        self,
        rotation: RotationKind,
        pieces: bool,
        seed: np.ndarray,
        rng: np.random.Generator,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        codec = build_codec(dim=_DIM, rotation=rotation, granularity=0.09)

        def run(x: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            sent = encode(codec, x, seed)
            return sent.residues, sent.rounded_norm

        if pieces:
            monkeypatch.setattr(xla, "MIN_SIZE", 1)
            run = tf.function(run)
        normal = rng.normal(size=_DIM)
        for x in (
            normal,
            normal * 1e-3,
            normal * 1e30,
            np.full(_DIM, np.finfo(np.float32).max),
            np.eye(1, _DIM, 3)[0] * 7,
            np.ones(_DIM),
            np.zeros(_DIM),
            np.where(np.arange(_DIM) == 3, np.nan, normal),
            np.where(np.arange(_DIM) == 3, np.inf, normal),
            np.full(_DIM, -np.inf),
        ):
            residues, rounded_norm = run(tf.constant(x, tf.float32), tf.constant(seed))
            integers = center(tf.cast(residues, tf.int64), 20).numpy()
            squared_norm = int(np.sum(integers**2))
            assert squared_norm <= codec.parameters.max_squared_norm
            norm = math.sqrt(squared_norm) * 0.09
            assert float(rounded_norm) == pytest.approx(norm, rel=1e-6)
            if not np.isfinite(x).all() or not x.any():
                assert squared_norm == 0

    def test_measurements(
        self, rotation: RotationKind, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        codec = build_codec(dim=_DIM, rotation=rotation)
        x = rng.normal(size=_DIM).astype(np.float32)
        x /= np.linalg.norm(x)
        for factor, is_clipped in ((0.5, 0), (2.0, 1)):
            sent = encode(codec, x * factor, tf.constant(seed))
            assert float(sent.norm) == pytest.approx(factor, rel=1e-6)
            assert float(sent.is_clipped) == is_clipped
            assert float(sent.is_finite) == 1
        sent = encode(codec, x * np.float32(np.nan), tf.constant(seed))
        assert [float(sent.norm), float(sent.is_clipped), float(sent.is_finite)] == [
            0
        ] * 3


@pytest.mark.parametrize("rotation", [RotationKind.HADAMARD, RotationKind.DFT])
@pytest.mark.parametrize("l2_clip", [0.0, 1e-45, 1e-30, 1e30, 3e38, math.inf])
def test_the_norm_is_bounded_whatever_the_clip(
    rotation: RotationKind, l2_clip: float, seed: np.ndarray, rng: np.random.Generator
) -> None:
    # An adaptive clip has no bounds of its own.
    codec = build_codec(dim=_DIM, rotation=rotation, granularity=0.09)
    normal = rng.normal(size=_DIM)
    for x in (normal, normal * 1e30, normal * 0, normal * math.nan):
        sent = encode(codec, x, tf.constant(seed), l2_clip=l2_clip)
        integers = center(tf.cast(sent.residues, tf.int64), 20).numpy()
        assert np.sum(integers**2) <= codec.parameters.max_squared_norm


class TestWrapAround:
    def test_sums_out_of_range_come_back_modulo_m(self, seed: np.ndarray) -> None:
        codec = build_codec(dim=4, bits=8, l2_clip=100.0, granularity=1.0, beta=0.0)
        vectors = np.float32([[60, -60, 3, 0], [60, -60, 4, 0], [60, -9, 1, 0]])
        decoded = decode(codec, _sum_residues(codec, vectors, seed)).numpy()
        assert decoded.tolist() == [180 - 256, -129 + 256, 8, 0]
        # Any representatives of the residues decode to the same.
        shifted = _sum_residues(codec, vectors, seed) % 256 + 256 * 12345
        assert decode(codec, shifted).numpy().tolist() == decoded.tolist()

    @pytest.mark.parametrize("bits", [1, 2, 16, 31, 32])
    def test_every_width(self, bits: int, seed: np.ndarray) -> None:
        codec = build_codec(
            dim=64, bits=bits, local_scale=3.0, l2_clip=8.0, granularity=1.0
        )
        residues = encode(codec, np.ones(64), tf.constant(seed)).residues
        assert residues.dtype == tf.uint32
        assert int(np.max(residues)) < 2**bits
        decoded = decode(codec, residues).numpy()
        assert decoded.min() >= -(2 ** (bits - 1))
        assert decoded.max() <= 2 ** (bits - 1) - 1


class TestLaw:
    """All coordinates alike: one encode is many draws of the law of one residue."""

    _DIM, _CELL = 1 << 17, 0.3

    def _build(self, mechanism: Mechanism, bits: int, local_scale: float):
        return build_codec(
            mechanism,
            dim=self._DIM,
            l2_clip=2.0 * math.sqrt(self._DIM),
            granularity=1.0,
            beta=0.0,
            bits=bits,
            local_scale=local_scale,
        )

    def _compute_law(
        self, mechanism: Mechanism, bits: int, variance: float, fraction: float
    ) -> np.ndarray:
        """The law of (1 + Bernoulli + noise) mod 2^bits, by brute force."""
        radius = 60
        if mechanism is Mechanism.DDGAUSS:
            cdf = integer_law.compute_gaussian_cdf(math.sqrt(variance), radius)
        else:
            cdf = integer_law.compute_skellam_cdf(variance, radius)
        noise = np.diff(np.concatenate([[0.0], cdf]))
        law = np.zeros(2**bits)
        for z, p in zip(range(-radius, radius + 1), noise, strict=True):
            law[(1 + z) % 2**bits] += p * (1 - fraction)
            law[(2 + z) % 2**bits] += p * fraction
        return law

    @pytest.mark.parametrize("mechanism", _MECHANISMS)
    def test_of_one_client(self, mechanism: Mechanism, seed: np.ndarray) -> None:
        bits, scale = 4, 3.0
        codec = self._build(mechanism, bits, scale)
        x = np.full(self._DIM, 1 + self._CELL, np.float32)
        residues = encode(codec, x, tf.constant(seed)).residues.numpy().astype(int)

        def fits(variance: float, fraction: float, roll: int = 0) -> bool:
            law = np.roll(self._compute_law(mechanism, bits, variance, fraction), roll)
            edges = np.arange(2**bits - 1)
            cdf = np.cumsum(law)[:-1]
            p_value = goodness_of_fit.compute_p_value(residues, edges, cdf)
            return p_value > goodness_of_fit.FALSE_FAILURE

        assert fits(scale**2, self._CELL)
        assert not fits(scale**2 * 1.05**2, self._CELL)
        assert not fits(scale**2 / 1.05**2, self._CELL)
        assert not fits(scale**2, 0.0)
        assert not fits(scale**2, 0.5)
        assert not fits(scale**2, self._CELL, roll=1)
        if mechanism is Mechanism.SKELLAM:
            assert not fits(scale**2, 1.0 - self._CELL)

    def test_of_a_sum_of_clients_decoded(self, seed: np.ndarray) -> None:
        # Three clients, as a loop over NumPy's own draws would do it.
        codec = self._build(Mechanism.DDGAUSS, 8, 2.0)
        values = np.float32([1.3, -0.4, 1.5])
        vectors = np.tile(values[:, np.newaxis], [1, self._DIM])
        decoded = decode(codec, _sum_residues(codec, vectors, seed)).numpy()
        law: dict = {0: 1.0}
        share = integer_law.compute_discrete_gaussian(Fraction(4), 30)
        for value in values.astype(np.float64):
            up = value - math.floor(value)
            rounded = {math.floor(value): 1 - up, math.floor(value) + 1: up}
            for part in (rounded, share):
                total: dict = {}
                for a, p in law.items():
                    for b, q in part.items():
                        total[a + b] = total.get(a + b, 0.0) + p * float(q)
                law = total
        support = np.array(sorted(law))
        cdf = np.cumsum([law[z] for z in support])
        edges = np.arange(-10, 17)
        for shift, expected in ((0, True), (1, False), (-1, False)):
            chosen = np.interp(edges - shift, support, cdf)
            p_value = goodness_of_fit.compute_p_value(decoded, edges, chosen)
            assert (p_value > goodness_of_fit.FALSE_FAILURE) == expected
        # The mean is the sum; rounding toward zero or to nearest would miss it.
        stddev = math.sqrt(3 * 4 + sum(v % 1 * (1 - v % 1) for v in values))
        mean = float(values.astype(np.float64).sum())
        p_value = goodness_of_fit.compute_mean_p_value(decoded, mean, stddev)
        assert p_value > goodness_of_fit.FALSE_FAILURE
        for wrong in (2.0, 3.0):
            p_value = goodness_of_fit.compute_mean_p_value(decoded, wrong, stddev)
            assert p_value < goodness_of_fit.FALSE_FAILURE

    @pytest.mark.parametrize("mechanism", _MECHANISMS)
    def test_the_cohort_sets_the_share(
        self, mechanism: Mechanism, seed: np.ndarray
    ) -> None:
        codec = build_codec(
            mechanism,
            dim=1 << 14,
            granularity=1.0,
            local_scale=6.0,
            clients_per_round=9,
            cohorts=(4, 16),
        )
        central_variance = 9 * 6.0**2
        for joined in (4, 9, 16):
            sent = encode(codec, np.zeros(1 << 14), tf.constant(seed), joined=joined)
            noise = center(tf.cast(sent.residues, tf.int64), 20).numpy()
            fraction = codec.noise.compute_variance_fraction(joined, 1)
            assert fraction == pytest.approx(1 / joined, rel=0.1)
            right = central_variance * fraction
            for variance in (right, right * 9 / joined):
                p_value = goodness_of_fit.compute_variance_p_value(noise, variance)
                is_right = p_value > goodness_of_fit.FALSE_FAILURE
                assert is_right == (variance == right)


class TestSeeds:
    def test_each_seed_matters(self, seed: np.ndarray, rng) -> None:
        codec = build_codec(
            dim=_DIM, rotation=RotationKind.HADAMARD, local_scale=5.0, beta=0.0
        )
        x = rng.normal(size=_DIM) / 30

        def send(noise_seed: np.ndarray, rotation_seed=(5, 6)) -> np.ndarray:
            sent = encode(
                codec, x, tf.constant(noise_seed), rotation_seed=rotation_seed
            )
            return sent.residues.numpy()

        first = send(seed)
        assert np.array_equal(first, send(seed))
        assert not np.array_equal(first, send(seed ^ 1))
        assert not np.array_equal(first, send(seed, (5, 7)))

    def test_rounding_and_noise_do_not_share_a_stream(self, seed: np.ndarray) -> None:
        # With x = 1/2 the rounding is a coin; it must not follow the noise's sign.
        dim = 1 << 16
        both = build_codec(
            dim=dim, l2_clip=float(dim), granularity=1.0, beta=0.0, local_scale=5.0
        )
        coin = build_codec(dim=dim, l2_clip=float(dim), granularity=1.0, beta=0.0)
        half = np.full(dim, 0.5)
        sums = encode(both, half, tf.constant(seed)).residues.numpy().astype(np.int32)
        coins = encode(coin, half, tf.constant(seed)).residues.numpy().astype(np.int32)
        noise = center(tf.constant((sums - coins).astype(np.int64)), 20).numpy()
        product = (coins - 0.5) * 2 * noise / 5.0
        p_value = goodness_of_fit.compute_mean_p_value(product, 0.0, 1.0)
        assert p_value > goodness_of_fit.FALSE_FAILURE
        p_value = goodness_of_fit.compute_variance_p_value(noise, 25.0)
        assert p_value > goodness_of_fit.FALSE_FAILURE


@pytest.mark.parametrize("mechanism", _MECHANISMS)
class TestCompiled:
    """Below the clip nothing depends on the order of a sum: bits are the same."""

    @pytest.mark.parametrize("mode", ["graph", "pieces", "xla"])
    def test_same_bits(
        self,
        mechanism: Mechanism,
        mode: str,
        seed: np.ndarray,
        rng: np.random.Generator,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if mode == "pieces":
            monkeypatch.setattr(xla, "MIN_SIZE", 1)
        codec = build_codec(mechanism, dim=3000, local_scale=4.0)
        x = (rng.normal(size=3000) / 100).astype(np.float32)
        send = tf.function(
            lambda x, seed: encode(codec, x, seed).residues, jit_compile=mode == "xla"
        )
        eager = encode(codec, x, tf.constant(seed)).residues
        assert np.array_equal(eager, send(tf.constant(x), tf.constant(seed)))

    def test_whole_codec_compiles(
        self, mechanism: Mechanism, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        # XLA's matrix product rounds otherwise, so that a coordinate in a thousand may
        # cross a threshold of the rounding.
        codec = build_codec(
            mechanism, dim=3000, rotation=RotationKind.HADAMARD, local_scale=4.0
        )
        x = (rng.normal(size=3000) / 100).astype(np.float32)

        @tf.function(jit_compile=True)
        def run(x: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            residues = encode(codec, x, seed).residues
            return residues, decode(codec, residues)

        residues, decoded = run(tf.constant(x), tf.constant(seed))
        eager = encode(codec, x, tf.constant(seed)).residues
        assert np.mean(residues != eager) < 1e-3
        np.testing.assert_allclose(
            decoded, decode(codec, residues), rtol=0, atol=2.0**-18
        )


def test_the_grid_scales_with_the_clip(seed: np.ndarray, rng) -> None:
    # Powers of two, so that float32 is exact: the integers are the same.
    codec = build_codec(dim=_DIM, rotation=RotationKind.HADAMARD, local_scale=2.0)
    x = (rng.normal(size=_DIM) / 20).astype(np.float32)
    small = encode(codec, x, tf.constant(seed)).residues
    large = encode(codec, x * 4, tf.constant(seed), l2_clip=4.0).residues
    assert np.array_equal(small, large)
    np.testing.assert_array_equal(
        decode(codec, large, l2_clip=4.0), decode(codec, small) * 4
    )


class TestValidation:
    @pytest.mark.parametrize("bits", [33, 53])
    def test_too_many_bits_are_refused(self, bits: int) -> None:
        with pytest.raises(ValueError, match="`bits` must be in"):
            build_codec(dim=8, bits=bits)

    def test_another_length_is_refused(self) -> None:
        codec = build_codec(dim=8)
        other = build_codec(dim=9)
        with pytest.raises(ValueError, match="`parameters.padded_dim` must equal"):
            type(codec)(
                parameters=codec.parameters,
                rotation=other.rotation,
                noise=codec.noise,
            )

    def test_a_grid_that_leaves_int32_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`granularity` must keep"):
            build_codec(dim=8, bits=32, granularity=2.0**-31)
        build_codec(dim=8, bits=32, granularity=2.0**-30)
