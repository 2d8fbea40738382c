"""Between what callers give and get, and flat lists of tensors.

Of a client's value, an array that is of its type already stays an array: many clients'
arrays are made tensors at once, which costs little more than one client's.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulation.engine import array_layout, graph_import
from simulation.engine.single_element import Element


def split_elements(value: Any, type_spec: tff.StructType, name: str) -> list[Any]:
    """Returns the elements of a structure in the order of its type.

    Raises:
        TypeError: If their number or names do not match.
    """
    wanted = [element for element, _ in tff.structure.to_elements(type_spec)]
    try:
        struct = tff.structure.from_container(value)
    except TypeError:
        raise TypeError(
            f"`{name}` must be a structure of type {type_spec}. "
            f"Found {type(value).__name__}."
        ) from None
    pairs = list(tff.structure.to_elements(struct))
    names = [element for element, _ in pairs]
    named = dict(pairs)
    if None not in wanted and None not in names and set(names) == set(wanted):
        return [named[element] for element in wanted]
    is_compatible = len(names) == len(wanted) and all(
        found is None or kind is None or found == kind
        for found, kind in zip(names, wanted, strict=True)
    )
    if not is_compatible:
        raise TypeError(f"`{name}` must have the elements {wanted}. Found {names}.")
    return [element for _, element in pairs]


def flatten_value(value: Any, type_spec: tff.Type, name: str) -> list[tf.Tensor]:
    """Returns the tensors of a value of a type without placements.

    Raises:
        TypeError: If it does not match the type.
    """
    return [convert_leaf(leaf) for leaf in flatten_leaves(value, type_spec, name)]


def flatten_leaves(value: Any, type_spec: tff.Type, name: str) -> list[Any]:
    """Returns the tensors of a value, or arrays that are of their types.

    Raises:
        TypeError: If it does not match the type.
    """
    arrays = array_layout.take_arrays(value, type_spec)
    if arrays is not None:
        return arrays
    if isinstance(type_spec, tff.StructType):
        parts = split_elements(value, type_spec, name)
        leaves = []
        for index, (part, (element, kind)) in enumerate(
            zip(parts, tff.structure.to_elements(type_spec), strict=True)
        ):
            label = f"{name}.{element}" if element else f"{name}[{index}]"
            leaves += flatten_leaves(part, kind, label)
        return leaves
    if isinstance(type_spec, tff.SequenceType):
        return [_to_variant(value, type_spec, name)]
    return [_to_tensor(value, type_spec, name)]


def convert_leaf(leaf: Any) -> Any:
    """Returns a leaf with its array, or those of its element, as tensors."""
    if isinstance(leaf, Element):
        return Element(map(convert_leaf, leaf))
    return tf.convert_to_tensor(leaf)


def build_result(leaves: Sequence[Any], type_spec: tff.Type) -> Any:
    """Returns arrays in Python's containers, as TFF's own contexts do."""
    [result] = build_results([leaves], type_spec)
    return result


def build_results(clients: Sequence[Sequence[Any]], type_spec: tff.Type) -> list[Any]:
    """Returns `build_result` of each client's leaves."""
    if _is_plain(type_spec):
        return [_build_plain(iter(leaves), type_spec) for leaves in clients]
    return [
        tff.types.type_to_py_container(
            _build_struct(iter(leaves), type_spec), type_spec
        )
        for leaves in clients
    ]


def _build_struct(leaves: Iterator[Any], type_spec: tff.Type) -> Any:
    """Returns the arrays in TFF's containers."""
    if isinstance(type_spec, tff.StructType):
        return tff.structure.Struct(
            [
                (name, _build_struct(leaves, element))
                for name, element in tff.structure.to_elements(type_spec)
            ]
        )
    leaf = next(leaves)
    if isinstance(type_spec, tff.SequenceType):
        spec = graph_import.build_element_spec(type_spec.element)
        return tf.data.experimental.from_variant(leaf, spec)
    return _to_array(leaf)


def _is_plain(type_spec: tff.Type) -> bool:
    """Whether values are arrays, or tuples of them, in tuples."""
    if not isinstance(type_spec, tff.StructType):
        return isinstance(type_spec, tff.TensorType)
    return type_spec.python_container in (None, tuple) and all(
        name is None and _is_plain(element)
        for name, element in tff.structure.to_elements(type_spec)
    )


def _build_plain(leaves: Iterator[Any], type_spec: tff.Type) -> Any:
    """Does what TFF does for values that are plain, for many of them in little time."""
    if not isinstance(type_spec, tff.StructType):
        return _to_array(next(leaves))
    return tuple(
        _build_plain(leaves, element)
        for _, element in tff.structure.to_elements(type_spec)
    )


def _to_array(leaf: Any) -> Any:
    """Returns a leaf as an array that nobody else has, or as a number."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()[()]
    return leaf if isinstance(leaf, np.generic) else leaf.numpy()


def _to_tensor(value: Any, type_spec: tff.TensorType, name: str) -> tf.Tensor:
    spec = graph_import.build_tensor_spec(type_spec)
    try:
        tensor = tf.convert_to_tensor(value)
        if tensor.dtype != spec.dtype:
            # What TFF accepts too: a Python number, or an array of a kind that fits.
            array = np.asarray(value)
            _check_range(array, spec.dtype)
            tensor = tf.convert_to_tensor(array.tolist(), spec.dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` must be of type {type_spec}. Found {type(value).__name__}."
        ) from error
    if not spec.shape.is_compatible_with(tensor.shape):
        raise TypeError(f"`{name}` must have shape {spec.shape}. Found {tensor.shape}.")
    return tensor


def _check_range(array: np.ndarray, dtype: tf.DType) -> None:
    """Raises ValueError for integers that TensorFlow would cut to fit."""
    if array.dtype.kind in "iu" and dtype.is_integer and array.size:
        low, high = int(array.min()), int(array.max())
        if low < dtype.min or high > dtype.max:
            raise ValueError(f"{low} to {high} is beyond {dtype.name}")


def _to_variant(
    value: Any, type_spec: tff.SequenceType, name: str
) -> tf.Tensor | Element:
    if isinstance(value, list) and len(value) == 1:
        leaves = flatten_leaves(value[0], type_spec.element, f"{name}[0]")
        return Element(leaves[place] for place in _list_places(type_spec.element))
    if isinstance(value, list | tuple):
        value = _build_dataset(value, type_spec, name)
    if not isinstance(value, tf.data.Dataset):
        raise TypeError(
            f"`{name}` must be a tf.data.Dataset or a list. "
            f"Found {type(value).__name__}."
        )
    found = _infer_type(_freeze(value.element_spec))
    if not type_spec.element.is_assignable_from(found):
        raise TypeError(
            f"`{name}` must have elements of type {type_spec.element}. Found {found}."
        )
    return tf.data.experimental.to_variant(value)


@functools.lru_cache(maxsize=256)
def _list_places(type_spec: tff.Type) -> tuple[int, ...]:
    """Returns where in TFF's order the tensors of a data set's element are."""
    places = range(len(graph_import.list_leaf_types(type_spec)))
    return tuple(tf.nest.flatten(graph_import.pack_element(type_spec, iter(places))))


def _freeze(spec: Any) -> Any:
    """Returns a structure of tensor specifications as a key."""
    if hasattr(spec, "_asdict"):
        spec = spec._asdict()
    if isinstance(spec, Mapping):
        return (True, *((name, _freeze(part)) for name, part in spec.items()))
    if isinstance(spec, tuple):
        return (False, *(_freeze(part) for part in spec))
    return spec


# A client's data set takes less time to train on than to infer its type.
@functools.lru_cache(maxsize=256)
def _infer_type(frozen: Any) -> tff.Type:
    if not isinstance(frozen, tuple):
        return tff.types.tensorflow_to_type(frozen)
    is_named, *parts = frozen
    if is_named:
        return tff.StructType([(name, _infer_type(part)) for name, part in parts])
    return tff.StructType([_infer_type(part) for part in parts])


def _build_dataset(
    elements: Sequence[Any], type_spec: tff.SequenceType, name: str
) -> tf.data.Dataset:
    """Returns a data set of given elements, whose shapes may differ."""
    packed = [
        graph_import.pack_element(
            type_spec.element,
            iter(flatten_value(element, type_spec.element, f"{name}[{index}]")),
        )
        for index, element in enumerate(elements)
    ]
    if not packed:
        spec = graph_import.build_element_spec(type_spec.element)
        # Not a Python generator: this data set can be sent elsewhere.
        nothing = tf.nest.map_structure(_build_zeros, spec)
        return tf.data.Dataset.from_tensors(nothing).take(0)
    dataset = tf.data.Dataset.from_tensors(packed[0])
    for element in packed[1:]:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(element))
    return dataset


def _build_zeros(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([size or 0 for size in spec.shape], spec.dtype)


def count_clients(value: Any, type_spec: tff.Type) -> int | None:
    """Returns the number of clients that a value has entries for, None without any.

    Raises:
        ValueError: If two parts disagree.
        TypeError: If a part is not a list.
    """
    if isinstance(type_spec, tff.FederatedType):
        if type_spec.all_equal or type_spec.placement is not tff.CLIENTS:
            return None
        if not isinstance(value, list | tuple):
            raise TypeError(
                f"a value of type {type_spec} must be a list with an entry for each "
                f"client. Found {type(value).__name__}."
            )
        return len(value)
    if not isinstance(type_spec, tff.StructType):
        return None
    counts = {
        count
        for part, (_, kind) in zip(
            split_elements(value, type_spec, "argument"),
            tff.structure.to_elements(type_spec),
            strict=True,
        )
        if (count := count_clients(part, kind)) is not None
    }
    if len(counts) > 1:
        raise ValueError(
            "all values at the clients must have one number of entries. Found "
            f"{sorted(counts)}."
        )
    return counts.pop() if counts else None
