"""Values that are arrays of their types already, told at once.

To check and convert a small client's value part by part, as TFF's types ask for, takes
as long as a part of its training.
"""

import collections
import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow_federated as tff

# Numbers that NumPy and TensorFlow hold alike.
_KINDS = "biuf"


class _Leaf(NamedTuple):
    """An array.

    Attributes:
        dtype: Its type.
        rank: The number of its dimensions.
        sizes: Those of its dimensions that must have a size, and the sizes.
    """

    dtype: np.dtype
    rank: int
    sizes: Sequence[tuple[int, int]]


class _Struct(NamedTuple):
    """A tuple, or a dictionary.

    Attributes:
        names: The keys, in order; None for a tuple.
        keys: The same as a set.
        parts: What the elements are.
    """

    names: Sequence[str] | None
    keys: Collection[str]
    parts: Sequence[Any]


def take_arrays(value: Any, type_spec: tff.Type) -> list[Any] | None:
    """Returns the arrays of a value in the order of its type.

    Returns None for what is anything else than arrays of the type in plain tuples,
    lists and dictionaries: it may still be of the type.
    """
    layout = _build_layout(type_spec)
    found: list[Any] = []
    return found if layout is not None and _collect(value, layout, found) else None


def _collect(value: Any, layout: Any, found: list[Any]) -> bool:
    """Adds a value's arrays to those found. Returns whether they are of the types."""
    if type(layout) is _Leaf:
        kind = type(value)
        if kind is not np.ndarray and not issubclass(kind, np.generic):
            return False
        shape = value.shape
        if value.dtype != layout.dtype or len(shape) != layout.rank:
            return False
        for dimension, size in layout.sizes:
            if shape[dimension] != size:
                return False
        found.append(value)
        return True
    names, keys, parts = layout
    if names is None:
        if type(value) not in (tuple, list) or len(value) != len(parts):
            return False
        elements = value
    else:
        if type(value) not in (dict, collections.OrderedDict) or value.keys() != keys:
            return False
        elements = [value[name] for name in names]
    for element, part in zip(elements, parts, strict=True):
        if not _collect(element, part, found):
            return False
    return True


@functools.lru_cache(maxsize=256)
def _build_layout(type_spec: tff.Type) -> Any:
    """Returns what values of a type look like, None for a type with other parts."""
    if isinstance(type_spec, tff.TensorType):
        dtype = np.dtype(type_spec.dtype)
        if type_spec.shape is None or dtype.kind not in _KINDS:
            return None
        sizes = [
            (dimension, size)
            for dimension, size in enumerate(type_spec.shape)
            if size is not None
        ]
        return _Leaf(dtype, len(type_spec.shape), sizes)
    if not isinstance(type_spec, tff.StructType):
        return None
    elements = list(tff.structure.to_elements(type_spec))
    names = [name for name, _ in elements if name is not None]
    parts = [_build_layout(kind) for _, kind in elements]
    if None in parts or 0 < len(names) < len(elements):
        return None
    return _Struct(names or None, frozenset(names), parts)
