"""Rotations: orthonormal, inverted by `unrotate`, minimally padded, flattening."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf

from distributed_dp import rotation
from distributed_dp.rotation import RotationKind, build_rotation

# For each kind lengths with and without padding; 94 and 202 are DFTs of prime length
# above 40 (one direct, one by chirps), 74 = 2 * 37 a prime below 64.
_CASES = [
    *((kind, dim) for kind in RotationKind for dim in (1, 2, 3, 11, 12, 20, 37, 64)),
    *((RotationKind.HADAMARD, dim) for dim in (40, 96, 160, 192, 257)),
    *((kind, dim) for kind in RotationKind for dim in (94, 202)),
    (RotationKind.HADAMARD_POWER_OF_TWO, 1 << 11),
]
_HADAMARD_KINDS = (RotationKind.HADAMARD, RotationKind.HADAMARD_POWER_OF_TWO)
_DFT_KINDS = (RotationKind.DFT, RotationKind.DFT_UNIFORM_PHASE)


def _compute_matrix(kind: RotationKind, dim: int, seed: np.ndarray) -> np.ndarray:
    """Returns the [dim, padded_dim] matrix whose row i is the image of vector i."""
    return build_rotation(kind, dim).rotate(tf.eye(dim), tf.constant(seed)).numpy()


@pytest.mark.parametrize(
    ("kind", "dim"), _CASES, ids=[f"{kind.value}-{dim}" for kind, dim in _CASES]
)
class TestEveryKind:
    def test_is_orthonormal(
        self, kind: RotationKind, dim: int, seed: np.ndarray
    ) -> None:
        matrix = _compute_matrix(kind, dim, seed).astype(np.float64)
        gram = matrix @ matrix.T
        assert np.abs(gram - np.eye(dim)).max() < 2.0**-19

    def test_round_trip(
        self, kind: RotationKind, dim: int, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        turned = build_rotation(kind, dim)
        x = rng.normal(size=dim).astype(np.float32)
        y = turned.rotate(tf.constant(x), tf.constant(seed))
        assert y.shape == [turned.padded_dim]
        back = turned.unrotate(y, tf.constant(seed)).numpy()
        assert np.linalg.norm(back - x) <= 2.0**-20 * np.linalg.norm(x)
        norm = np.linalg.norm(y.numpy().astype(np.float64))
        assert norm == pytest.approx(np.linalg.norm(x.astype(np.float64)), rel=2**-20)

    def test_is_linear_and_the_same_for_a_batch(
        self, kind: RotationKind, dim: int, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        turned, seed = build_rotation(kind, dim), tf.constant(seed)
        x = tf.constant(rng.normal(size=[3, dim]), tf.float32)
        together = turned.rotate(x, seed)
        assert together.shape == [3, turned.padded_dim]
        alone = np.stack([turned.rotate(row, seed) for row in tf.unstack(x)])
        tolerance = 2.0**-20 * np.linalg.norm(x)
        np.testing.assert_allclose(together, alone, rtol=0, atol=tolerance)
        back = turned.unrotate(together, seed)
        assert back.shape == [3, dim]
        np.testing.assert_allclose(back, x, rtol=0, atol=tolerance)
        matrix = _compute_matrix(kind, dim, seed)
        np.testing.assert_allclose(x @ matrix, together, rtol=0, atol=tolerance)

    def test_padded_coordinates_are_used(
        self, kind: RotationKind, dim: int, seed: np.ndarray
    ) -> None:
        # `unrotate` is the transpose of the whole square matrix, then a cut.
        turned = build_rotation(kind, dim)
        columns = turned.unrotate(tf.eye(turned.padded_dim), tf.constant(seed)).numpy()
        matrix = _compute_matrix(kind, dim, seed)
        np.testing.assert_allclose(columns, matrix.T, rtol=0, atol=2.0**-20)


def _compute_least_padding(dim: int, bases: tuple[int, ...]) -> int:
    return min(base << k for base in bases for k in range(12) if base << k >= dim)


class TestPadding:
    @pytest.mark.parametrize(
        ("kind", "bases"),
        [
            (RotationKind.HADAMARD, (1, 12, 20)),
            (RotationKind.HADAMARD_POWER_OF_TWO, (1,)),
        ],
    )
    def test_is_the_least(self, kind: RotationKind, bases: tuple[int, ...]) -> None:
        for dim in [*range(1, 400), *range(1000, 1050)]:
            expected = _compute_least_padding(dim, bases)
            assert build_rotation(kind, dim).padded_dim == expected

    @pytest.mark.parametrize("dim", [1, 2, 37, 94])
    def test_is_at_most_one_zero(self, dim: int) -> None:
        for kind in _DFT_KINDS:
            assert build_rotation(kind, dim).padded_dim == dim + dim % 2
        assert build_rotation(RotationKind.IDENTITY, dim).padded_dim == dim

    @pytest.mark.parametrize(
        ("dim", "padded"),
        [
            (1_018_174, 1 << 20),
            (5_000_500, 20 << 18),
            (4_050_748, 1 << 22),
            ((1 << 24) + 1, 20 << 20),
            ((12 << 20) + 1, 1 << 24),
            ((20 << 20) + 1, 12 << 21),
        ],
    )
    def test_large_lengths(self, dim: int, padded: int) -> None:
        assert build_rotation(RotationKind.HADAMARD, dim).padded_dim == padded

    def test_zeros_are_appended(self, seed: np.ndarray) -> None:
        short = _compute_matrix(RotationKind.HADAMARD, 37, seed)
        whole = _compute_matrix(RotationKind.HADAMARD, 40, seed)
        np.testing.assert_array_equal(short, whole[:37])


class TestHadamard:
    @pytest.mark.parametrize("order", [4, 8, 12, 20, 24])
    def test_paley_matrices(self, order: int) -> None:
        matrix = rotation.build_paley_matrix(order)
        assert set(np.unique(matrix)) == {-1, 1}
        assert np.array_equal(matrix @ matrix.T, order * np.eye(order))

    @pytest.mark.parametrize("order", [6, 10, 16, 18])
    def test_other_orders_give_no_hadamard_matrix(self, order: int) -> None:
        # The control: 5, 9, 15 and 17 are no primes that are 3 modulo 4.
        matrix = rotation.build_paley_matrix(order)
        assert not np.array_equal(matrix @ matrix.T, order * np.eye(order))

    @pytest.mark.parametrize("kind", _HADAMARD_KINDS)
    @pytest.mark.parametrize("dim", [1, 12, 20, 37, 64, 192, 512])
    def test_a_spike_becomes_flat(
        self, kind: RotationKind, dim: int, seed: np.ndarray
    ) -> None:
        matrix = np.abs(_compute_matrix(kind, dim, seed))
        flat = 1 / math.sqrt(build_rotation(kind, dim).padded_dim)
        np.testing.assert_allclose(matrix, flat, rtol=2.0**-20)

    @pytest.mark.parametrize("power", range(13))
    def test_powers_of_two_are_the_walsh_transform(
        self, power: int, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        dim = 1 << power
        x = rng.normal(size=dim).astype(np.float32)
        y = build_rotation(RotationKind.HADAMARD, dim).rotate(
            tf.constant(x), tf.constant(seed)
        )
        signs = np.sign(self._recover_signs(dim, seed))
        expected = functools.reduce(self._apply_butterfly, range(power), x * signs)
        np.testing.assert_allclose(y, expected, rtol=0, atol=2.0**-20 * 4 * dim**0.5)

    @staticmethod
    def _apply_butterfly(x: np.ndarray, level: int) -> np.ndarray:
        pairs = x.astype(np.float64).reshape(-1, 2, 1 << level)
        both = [pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]]
        return np.stack(both, axis=1).reshape(-1) / math.sqrt(2)

    @staticmethod
    def _recover_signs(dim: int, seed: np.ndarray) -> np.ndarray:
        # The first row of a Sylvester matrix is all ones, so that U^T e_0 has them.
        turned = build_rotation(RotationKind.HADAMARD, dim)
        return turned.unrotate(tf.eye(dim)[0], tf.constant(seed)).numpy()


class TestDft:
    @pytest.mark.parametrize("kind", _DFT_KINDS)
    @pytest.mark.parametrize("dim", [2, 12, 37, 94, 202, 1018])
    def test_is_numpys_after_a_phase(
        self, kind: RotationKind, dim: int, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        half = (dim + 1) // 2
        turned = build_rotation(kind, dim)
        x = rng.normal(size=dim).astype(np.float32)
        padded = np.concatenate([x, np.zeros(2 * half - dim)])
        numbers = padded[:half] + 1j * padded[half:]
        phases = self._recover_phases(kind, 2 * half, seed)
        expected = np.fft.fft(numbers * phases) / math.sqrt(half)
        y = turned.rotate(tf.constant(x), tf.constant(seed)).numpy()
        found = y[:half] + 1j * y[half:]
        tolerance = 2.0**-20 * np.linalg.norm(x)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)

    @staticmethod
    def _recover_phases(kind: RotationKind, dim: int, seed: np.ndarray) -> np.ndarray:
        # Of e_k only coefficient 0 is read: it is the phase of k.
        rows = _compute_matrix(kind, dim, seed)[: dim // 2].astype(np.float64)
        return (rows[:, 0] + 1j * rows[:, dim // 2]) * math.sqrt(dim // 2)

    def test_phases(self, seed: np.ndarray) -> None:
        quarter = self._recover_phases(RotationKind.DFT, 512, seed)
        rounded = np.rint(quarter)
        assert np.abs(quarter - rounded).max() < 1e-5
        assert set(rounded) == {1, 1j, -1, -1j}
        uniform = self._recover_phases(RotationKind.DFT_UNIFORM_PHASE, 512, seed)
        assert np.abs(np.abs(uniform) - 1).max() < 1e-5
        assert len(np.unique(np.round(np.angle(uniform), 4))) > 250

    def test_long_transforms_are_accurate(
        self, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        # A complex64 transform is off by 0.6 % at length 2^20.
        dim = 1 << 18
        turned = build_rotation(RotationKind.DFT, dim)
        x = tf.constant(rng.normal(size=dim), tf.float32)
        back = turned.unrotate(turned.rotate(x, seed), seed)
        assert np.linalg.norm(back - x) < 1e-6 * np.linalg.norm(x)


@pytest.mark.parametrize("kind", [*_HADAMARD_KINDS, *_DFT_KINDS])
class TestSeeds:
    def test_another_seed_is_another_rotation(
        self, kind: RotationKind, seed: np.ndarray
    ) -> None:
        first = _compute_matrix(kind, 64, seed)
        assert np.array_equal(first, _compute_matrix(kind, 64, seed))
        assert not np.allclose(first, _compute_matrix(kind, 64, seed ^ 1), atol=1e-3)

    def test_random_signs_flatten_a_bad_vector(
        self, kind: RotationKind, seed: np.ndarray
    ) -> None:
        # Without them a row of the transform would come back as one spike.
        dim = 4096
        spread = build_rotation(kind, dim).rotate(tf.ones([dim]), tf.constant(seed))
        # Sub-Gaussian: max |y| > 6.5 with probability below 4096 * 2 exp(-6.5^2 / 2).
        assert np.abs(spread).max() < 6.5

    @pytest.mark.parametrize("mode", ["graph", "xla"])
    def test_same_compiled(
        self, kind: RotationKind, mode: str, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        turned = build_rotation(kind, 202)
        x = tf.constant(rng.normal(size=202), tf.float32)
        rotate = tf.function(turned.rotate, jit_compile=mode == "xla")
        eager = turned.rotate(x, tf.constant(seed))
        np.testing.assert_allclose(
            rotate(x, tf.constant(seed)), eager, rtol=0, atol=2.0**-17
        )


def test_identity_changes_nothing(seed: np.ndarray, rng: np.random.Generator) -> None:
    x = tf.constant(rng.normal(size=7), tf.float32)
    turned = build_rotation(RotationKind.IDENTITY, 7)
    assert np.array_equal(turned.rotate(x, seed), x)
    assert np.array_equal(turned.unrotate(x, seed), x)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("kind", RotationKind)
def test_lengths_below_one_are_refused(kind: RotationKind, dim: int) -> None:
    with pytest.raises(ValueError, match="`dim` must be positive"):
        build_rotation(kind, dim)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="`kind` must be a RotationKind"):
        build_rotation("hadamard", 8)


@pytest.mark.parametrize("kind", RotationKind)
def test_other_shapes_are_refused(kind: RotationKind, seed: np.ndarray) -> None:
    turned = build_rotation(kind, 37)
    for shape in ([36], [38], [2, 36], [1, 2, 37], []):
        with pytest.raises(ValueError, match="`x` must have shape"):
            turned.rotate(tf.zeros(shape), seed)
    with pytest.raises(ValueError, match="`x` must have shape"):
        turned.unrotate(tf.zeros([turned.padded_dim + 1]), seed)
