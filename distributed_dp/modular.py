"""Arithmetic modulo 2**bits, as a secure sum does it."""

from __future__ import annotations

import tensorflow as tf

MAX_BITS = 32


def check_bits(bits: int) -> None:
    """Raises ValueError unless 1 <= bits <= MAX_BITS."""
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"`bits` must be in [1, {MAX_BITS}]. Found {bits!r}.")


def wrap(values: tf.Tensor, bits: int) -> tf.Tensor:
    """Reduces integers to {0, ..., 2**bits - 1}.

    Args:
      values: uint32 or int32 tensor, two's complement (arithmetic modulo 2**32 keeps
        every residue modulo 2**bits).
      bits: In [1, 32].

    Returns:
      uint32 tensor of the same shape.

    Raises:
      ValueError: If `bits` is out of range or `values` are of another type.
    """
    check_bits(bits)
    if values.dtype not in (tf.int32, tf.uint32):
        raise ValueError(
            f"`values` must be int32 or uint32. Found {values.dtype.name!r}."
        )
    words = tf.bitcast(values, tf.uint32)
    return words & tf.constant((1 << bits) - 1, tf.uint32)


def center(residues: tf.Tensor, bits: int) -> tf.Tensor:
    """Maps residues to representatives in [-2**(bits - 1), 2**(bits - 1)).

    Args:
      residues: int64 tensor, any integers.
      bits: In [1, 32].

    Returns:
      int64 tensor of the same shape.
    """
    check_bits(bits)
    half = tf.constant(1 << (bits - 1), tf.int64)
    mask = tf.constant((1 << bits) - 1, tf.int64)
    return ((residues + half) & mask) - half
