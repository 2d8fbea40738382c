"""Public random rotations that flatten a vector before it is rounded.

Source: Kairouz, Liu, Steinke 2021, section 4.2 ("Flattening"). Privacy does not depend
on the rotation or on its seed being secret.
"""

from __future__ import annotations

import abc
import enum
import functools
import math

import numpy as np
import scipy.linalg
import tensorflow as tf

from distributed_dp.random_bits import (
    draw_sign_words,
    draw_uint32,
    draw_uniform,
    expand_sign_masks,
)
from distributed_dp.xla import compile_piece


class RotationKind(enum.Enum):
    """Which orthonormal matrix U is applied."""

    HADAMARD = "hadamard"
    HADAMARD_POWER_OF_TWO = "hadamard_power_of_two"
    DFT = "dft"
    DFT_UNIFORM_PHASE = "dft_uniform_phase"
    IDENTITY = "identity"


class Rotation(abc.ABC):
    """An orthonormal map of R**padded_dim, drawn from a public seed."""

    def __init__(self, dim: int, padded_dim: int):
        self._dim = dim
        self._padded_dim = padded_dim

    @property
    def dim(self) -> int:
        """Length of the vectors given to `rotate`."""
        return self._dim

    @property
    def padded_dim(self) -> int:
        """Length of the rotated vectors."""
        return self._padded_dim

    def rotate(self, x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Pads and rotates.

        Args:
          x: [dim] or [n, dim] float32.
          seed: int32[2], the same for everybody in a round.

        Returns:
          [padded_dim] or [n, padded_dim] float32.
        """
        self._check_last_axis(x, self._dim)
        if self._padded_dim > self._dim:
            widths = [[0, 0]] * (x.shape.rank - 1) + [[0, self._padded_dim - self._dim]]
            x = tf.pad(x, widths)
        return self._rotate(x, seed)

    def unrotate(self, y: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Inverts `rotate`, padding included: [..., padded_dim] to [..., dim]."""
        self._check_last_axis(y, self._padded_dim)
        x = self._unrotate(y, seed)
        return x if self._padded_dim == self._dim else x[..., : self._dim]

    def _check_last_axis(self, x: tf.Tensor, size: int) -> None:
        if x.shape.rank not in (1, 2) or x.shape[-1] != size:
            raise ValueError(
                f"`x` must have shape [{size}] or [n, {size}]. Found {x.shape}."
            )

    @abc.abstractmethod
    def _rotate(self, x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor: ...

    @abc.abstractmethod
    def _unrotate(self, y: tf.Tensor, seed: tf.Tensor) -> tf.Tensor: ...


def build_rotation(kind: RotationKind, dim: int) -> Rotation:
    """Builds the rotation of `kind` for vectors of length `dim`.

    Args:
      kind: HADAMARD pads to the least of 2**k, 12 * 2**k and 20 * 2**k; DFT kinds pad
        at most one zero; IDENTITY pads nothing.
      dim: Positive length.

    Raises:
      ValueError: If `dim` is not positive.
    """
    if dim < 1:
        raise ValueError(f"`dim` must be positive. Found {dim!r}.")
    if kind is RotationKind.HADAMARD:
        return _HadamardRotation(dim, (1, 12, 20))
    if kind is RotationKind.HADAMARD_POWER_OF_TWO:
        return _HadamardRotation(dim, (1,))
    if kind is RotationKind.DFT:
        return _DftRotation(dim, uniform_phase=False)
    if kind is RotationKind.DFT_UNIFORM_PHASE:
        return _DftRotation(dim, uniform_phase=True)
    if kind is RotationKind.IDENTITY:
        return _IdentityRotation(dim, dim)
    raise ValueError(f"`kind` must be a RotationKind. Found {kind!r}.")


def build_paley_matrix(order: int) -> np.ndarray:
    """Returns a Hadamard matrix of `order` = p + 1 for a prime p = 3 mod 4.

    Source: Paley 1933, construction I: I + S with the skew matrix S bordered from the
    quadratic characters of p.

    Returns:
      [order, order] float64 of entries +-1 with H H^T = order * I.
    """
    prime = order - 1
    residues = {(i * i) % prime for i in range(1, prime)}
    character = np.array([0] + [1 if i in residues else -1 for i in range(1, prime)])
    index = (np.arange(prime)[:, None] - np.arange(prime)[None, :]) % prime
    skew = np.zeros((order, order))
    skew[0, 1:], skew[1:, 0] = 1, -1
    skew[1:, 1:] = character[index]
    return skew + np.eye(order)


class _IdentityRotation(Rotation):
    """No rotation."""

    def _rotate(self, x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        del seed
        return x

    def _unrotate(self, y: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        del seed
        return y


class _HadamardRotation(Rotation):
    """U = H D / sqrt(padded_dim): random signs, then a Hadamard matrix.

    H is a Kronecker product of small Hadamard matrices, applied axis by axis: with the
    vector as [b, rest], one matrix product gives ([b, rest])^T H_b = [rest, b], which
    moves the finished axis to the end. After all factors the order is restored.
    """

    def __init__(self, dim: int, bases: tuple[int, ...]):
        sizes = [
            (base << max(0, math.ceil(math.log2(dim / base))), base) for base in bases
        ]
        padded_dim, base = min(size for size in sizes if size[0] >= dim)
        super().__init__(dim, padded_dim)
        power = (padded_dim // base).bit_length() - 1
        factors = [] if base == 1 else [build_paley_matrix(base)]
        factors += [scipy.linalg.hadamard(1 << k) for k in _split_power(power)]
        self._factors = [
            (factor / math.sqrt(len(factor))).astype(np.float32) for factor in factors
        ]

    def _rotate(self, x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return self._apply([f.T for f in self._factors], self._flip_signs(x, seed))

    def _unrotate(self, y: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return self._flip_signs(self._apply(self._factors, y), seed)

    def _flip_signs(self, x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        shape = [-1, self._padded_dim][-x.shape.rank :]
        is_split = self._padded_dim % 32 == 0

        def flip(x: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
            masks = expand_sign_masks(words)
            if not is_split:
                masks = tf.reshape(masks, [-1])[: self._padded_dim]
            flipped = tf.bitwise.bitwise_xor(tf.bitcast(x, tf.uint32), masks)
            return tf.bitcast(flipped, tf.float32)

        # Outside the piece: inside, XLA would draw a word for each of its bits, and
        # fused with a reshape it would divide for each index.
        words = draw_sign_words(seed, self._padded_dim)
        if is_split:
            x = tf.reshape(x, [*shape[:-1], 32, self._padded_dim // 32])
        x = compile_piece(flip, size=self._padded_dim)(x, words)
        return tf.reshape(x, shape)

    def _apply(self, factors: list[np.ndarray], x: tf.Tensor) -> tf.Tensor:
        shape = x.shape
        leading = [] if shape.rank == 1 else [-1]
        for factor in factors:
            block = tf.reshape(
                x, [*leading, len(factor), self._padded_dim // len(factor)]
            )
            x = tf.matmul(block, tf.constant(factor), transpose_a=True)
        return tf.reshape(x, [*leading, self._padded_dim])


def _split_power(power: int) -> list[int]:
    """Splits 2**power into factors of 16 and a last one of 2 to 32."""
    if power <= 5:
        return [power] if power else []
    num_sixteens, rest = divmod(power, 4)
    if rest == 0:
        return [4] * num_sixteens
    if rest == 1:
        return [4] * (num_sixteens - 1) + [5]
    return [4] * num_sixteens + [rest]


class _DftRotation(Rotation):
    """Unitary DFT of pairs of coordinates as complex numbers, with random phases.

    Phases are from {1, i, -1, -i}, or uniform on the circle. Computed in complex128:
    TensorFlow's CPU kernel in complex64 is off by 0.6 % at length 2**20.
    """

    def __init__(self, dim: int, *, uniform_phase: bool):
        super().__init__(dim, dim + dim % 2)
        self._half = self._padded_dim // 2
        self._uniform_phase = uniform_phase

    def _rotate(self, x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return self._split(self._dft(self._pair(x) * self._draw_phases(seed)))

    def _unrotate(self, y: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        conjugate = self._dft(tf.math.conj(self._pair(y)))
        return self._split(tf.math.conj(conjugate * self._draw_phases(seed)))

    def _pair(self, x: tf.Tensor) -> tf.Tensor:
        x = tf.cast(x, tf.float64)
        return tf.complex(x[..., : self._half], x[..., self._half :])

    def _split(self, numbers: tf.Tensor) -> tf.Tensor:
        parts = tf.concat([tf.math.real(numbers), tf.math.imag(numbers)], axis=-1)
        return tf.cast(parts / math.sqrt(self._half), tf.float32)

    def _draw_phases(self, seed: tf.Tensor) -> tf.Tensor:
        if self._uniform_phase:
            uniform = tf.cast(draw_uniform(seed, self._half), tf.float64)
            angle = uniform * (2 * math.pi)
            return tf.complex(tf.cos(angle), tf.sin(angle))
        quarter = draw_uint32(seed, self._half) & tf.constant(3, tf.uint32)
        is_quarter = [
            tf.cast(tf.equal(quarter, tf.constant(k, tf.uint32)), tf.float64)
            for k in range(4)
        ]
        return tf.complex(is_quarter[0] - is_quarter[2], is_quarter[1] - is_quarter[3])

    def _dft(self, numbers: tf.Tensor) -> tf.Tensor:
        if _compute_largest_prime(self._half) <= 64:
            return tf.signal.fft(numbers)
        return self._chirp_dft(numbers)

    def _chirp_dft(self, numbers: tf.Tensor) -> tf.Tensor:
        """Bluestein's algorithm: j k = (j**2 + k**2 - (k - j)**2) / 2.

        TensorFlow's CPU kernel takes time quadratic in a large prime factor of the
        length; here every transform has a power-of-two length.
        """
        chirp, response = _build_chirp(self._half)
        length = response.shape[0]
        padding = [[0, 0]] * (numbers.shape.rank - 1) + [[0, length - self._half]]
        product = tf.pad(numbers * tf.constant(chirp), padding)
        spectrum = tf.signal.fft(product) * tf.constant(response)
        # The inverse through the forward transform, which XLA has in complex128.
        convolved = tf.math.conj(tf.signal.fft(tf.math.conj(spectrum))) / length
        return convolved[..., : self._half] * tf.constant(chirp)


def _compute_largest_prime(number: int) -> int:
    largest, factor = 1, 2
    while factor * factor <= number:
        while number % factor == 0:
            largest, number = factor, number // factor
        factor += 1
    return max(largest, number)


@functools.lru_cache(maxsize=4)
def _build_chirp(length: int) -> tuple[np.ndarray, np.ndarray]:
    """exp(-i pi k**2 / n), and the spectrum of its conjugate as a filter."""
    index = np.arange(length, dtype=np.int64)
    chirp = np.exp(-1j * np.pi * ((index * index) % (2 * length)) / length)
    padded = 1 << (2 * length - 1).bit_length()
    kernel = np.zeros(padded, np.complex128)
    kernel[:length] = chirp.conj()
    kernel[padded - length + 1 :] = chirp.conj()[1:][::-1]
    return chirp, np.fft.fft(kernel)
