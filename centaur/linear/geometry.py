"""Column-orthonormal matrices: orthonormalisation with fixed signs, and distance."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import tensorflow as tf

FloatArray = npt.NDArray[np.float64]

# How far from orthonormal columns may be: float32 rounding is far below.
_TOLERANCE = 1e-3


def orthonormalize(matrices: tf.Tensor) -> tf.Tensor:
    """Returns the Q factor of each matrix, for the R whose diagonal is not negative.

    Source: CENTAUR, section 5, the aggregation QR(.), "only returns the Q matrix". Q is
    unique only up to the signs of its columns: here those of R's diagonal decide.

    Guarantees: a matrix of full rank with orthonormal columns is returned as it is, up
    to rounding, so that a step of size 0 changes nothing.

    Args:
        matrices: [..., d, k] float, k <= d.

    Returns:
        [..., d, k], orthonormal columns.
    """
    q, r = tf.linalg.qr(matrices)
    diagonal = tf.linalg.diag_part(r)
    # A column that is 0 keeps whatever Q has: a sign of 0 would erase it.
    signs = tf.where(diagonal < 0, -tf.ones_like(diagonal), tf.ones_like(diagonal))
    return q * signs[..., tf.newaxis, :]


def compute_distance(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Returns ||(I - B B^T) B*||_2: the sine of the largest principal angle.

    Source: the distance of CENTAUR's section 5 (Collins et al. 2021).

    Args:
        first: B, [d, k] with orthonormal columns.
        second: B*, the same shape, with orthonormal columns.

    Returns:
        A number in [0, 1], in float64.

    Raises:
        ValueError: If shapes differ or columns are not orthonormal.
    """
    left, right = check_orthonormal("first", first), check_orthonormal("second", second)
    if left.shape != right.shape:
        raise ValueError(
            f"`second` must have the shape of `first`, {left.shape}. "
            f"Found {right.shape}."
        )
    residual = right - left @ (left.T @ right)
    return float(np.linalg.norm(residual, 2))


def sample_orthonormal(rng: np.random.Generator, dim: int, rank: int) -> FloatArray:
    """Draws a uniform (Haar) [dim, rank] matrix with orthonormal columns."""
    q, r = np.linalg.qr(rng.standard_normal((dim, rank)))
    # NumPy's signs are LAPACK's choice, which is not uniform.
    return np.asarray(q * np.where(np.diagonal(r) < 0, -1.0, 1.0))


def check_orthonormal(name: str, matrix: npt.ArrayLike) -> FloatArray:
    """Returns a matrix as float64; raises unless its columns are orthonormal."""
    array = np.asarray(matrix, np.float64)
    if array.ndim != 2 or not 1 <= array.shape[1] <= array.shape[0]:
        raise ValueError(
            f"`{name}` must be a matrix [d, k] with 1 <= k <= d. Found shape "
            f"{array.shape}."
        )
    error = float(np.max(np.abs(array.T @ array - np.eye(array.shape[1]))))
    if not error <= _TOLERANCE:
        raise ValueError(
            f"`{name}` must have orthonormal columns, up to {_TOLERANCE:g}. Found an "
            f"error of {error:.3g}."
        )
    return array
