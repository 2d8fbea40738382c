"""Pieces of a graph that XLA compiles, so that their elementwise steps fuse.

A piece's results are stored: random words drawn in one piece and used in another are
drawn once, where one large XLA program would draw them again for every use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

MIN_SIZE = 1 << 17
"""Below this many elements compiling costs more than it saves."""


def compile_piece(function: Callable[..., Any], *, size: int) -> Callable[..., Any]:
    """Lets XLA compile `function` where it is a large part of a graph for the CPU.

    Eager calls and graphs built where a GPU is visible run op by op: a GPU's own
    kernels are fast, and its XLA needs tools that the TensorFlow wheel does not ship.
    The bits drawn are the same either way.

    Args:
      function: Of tensors (nested) to tensors (nested).
      size: Number of elements that it works on.

    Returns:
      A function of the same arguments.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if size < MIN_SIZE or tf.executing_eagerly():
            return function(*args)
        if tf.config.list_physical_devices("GPU"):
            return function(*args)
        return tf.function(function, autograph=False, jit_compile=True)(*args)

    return call
