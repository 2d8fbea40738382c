"""The layout of a model update as one vector, for TFF value types."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff


class NoiseSeeds(enum.Enum):
    """Where a client's noise seed comes from.

    ENTROPY: The value is the update alone; each client draws its seed from the
      operating system inside its computation. Not reproducible.
    CARRIED: The value is (update, int32[2] noise seed, int32 joined): the seed of this
      client and round, and the number of clients that joined the round (dropouts
      included). Reproducible.
    """

    ENTROPY = "entropy"
    CARRIED = "carried"


class UpdateLayout:
    """Flattens a structure of float32 tensors to a vector and back.

    Attributes:
      update_type: Type of the update alone.
      dim: Number of coordinates.
    """

    def __init__(self, value_type: tff.Type, noise_seeds: NoiseSeeds):
        """Checks the type.

        Args:
          value_type: Update type, or the CARRIED struct around it.
          noise_seeds: Which of the two.

        Raises:
          ValueError: If the type is not what `noise_seeds` asks for, a tensor is not
            float32, or a shape is not fully defined.
        """
        self.noise_seeds = noise_seeds
        self.update_type = _extract_update_type(value_type, noise_seeds)
        leaves = _flatten_type(self.update_type)
        for leaf in leaves:
            if leaf.dtype != np.float32:
                raise ValueError(
                    "`value_type` must have float32 tensors only. Found "
                    f"{leaf!s} in {self.update_type!s}."
                )
            if leaf.shape is None or any(size is None for size in leaf.shape):
                raise ValueError(
                    "`value_type` must have fully defined shapes. Found "
                    f"{leaf!s} in {self.update_type!s}."
                )
        self.dim = sum(math.prod(leaf.shape) for leaf in leaves)
        if self.dim == 0:
            raise ValueError(
                f"`value_type` must have a coordinate. Found {self.update_type!s}."
            )
        self._structure = _build_specs(self.update_type)

    def flatten(self, update: Any) -> tf.Tensor:
        """Returns the [dim] float32 vector of an update."""
        leaves = [tf.reshape(leaf, [-1]) for leaf in tf.nest.flatten(update)]
        return leaves[0] if len(leaves) == 1 else tf.concat(leaves, axis=0)

    def unflatten(self, vector: tf.Tensor) -> Any:
        """Returns the update of a [dim] vector."""
        specs: Sequence[tf.TensorSpec] = tf.nest.flatten(self._structure)
        sizes = [spec.shape.num_elements() for spec in specs]
        parts = [vector] if len(sizes) == 1 else tf.split(vector, sizes)
        leaves = [
            tf.reshape(part, spec.shape)
            for part, spec in zip(parts, specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._structure, leaves)


def _extract_update_type(value_type: tff.Type, noise_seeds: NoiseSeeds) -> tff.Type:
    if noise_seeds is NoiseSeeds.ENTROPY:
        return value_type
    seed_type = tff.TensorType(np.int32, [2])
    joined_type = tff.TensorType(np.int32)
    if (
        not isinstance(value_type, tff.StructType)
        or len(value_type) != 3
        or value_type[1] != seed_type
        or value_type[2] != joined_type
    ):
        raise ValueError(
            "`value_type` must be <update, int32[2], int32> for carried noise seeds. "
            f"Found {value_type!s}."
        )
    return value_type[0]


def _flatten_type(update_type: tff.Type) -> list[tff.TensorType]:
    if isinstance(update_type, tff.TensorType):
        return [update_type]
    if not isinstance(
        update_type, tff.StructWithPythonType
    ) or not tff.types.is_structure_of_tensors(update_type):
        raise ValueError(
            "`value_type` must be a tensor or a structure of tensors with a Python "
            f"container. Found {update_type!s}."
        )
    return list(tff.structure.flatten(update_type))


def _build_specs(update_type: tff.Type) -> Any:
    if isinstance(update_type, tff.TensorType):
        return tf.TensorSpec(update_type.shape, update_type.dtype)
    return tff.types.structure_from_tensor_type_tree(
        lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), update_type
    )
