"""TFF's serialised TensorFlow computations as parts of a graph that is being built.

Values are tensors, or tuples of values for TFF's structures; a sequence is the variant
tensor of its data set.
"""

import collections
import functools
import hashlib
import uuid
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from simulation.engine import modulus, reduction

Value = Any
"""A tensor, or a tuple of values."""


def flatten(value: Value) -> list[tf.Tensor]:
    """Returns the tensors of a value, in order."""
    if not isinstance(value, tuple):
        return [value]
    return [tensor for element in value for tensor in flatten(element)]


def list_leaf_types(type_spec: tff.Type) -> list[tff.Type]:
    """Returns the types of the tensors and sequences of a type, in order."""
    if isinstance(type_spec, tff.StructType):
        return [
            leaf
            for _, kind in tff.structure.to_elements(type_spec)
            for leaf in list_leaf_types(kind)
        ]
    return [type_spec]


def unflatten(type_spec: tff.Type, tensors: list[tf.Tensor]) -> Value:
    """Returns the value of a type with these tensors; the inverse of `flatten`."""
    remaining = iter(tensors)

    def build(kind: tff.Type) -> Value:
        if isinstance(kind, tff.StructType):
            return tuple(
                build(element) for _, element in tff.structure.to_elements(kind)
            )
        return next(remaining)

    return build(type_spec)


def build_tensor_spec(leaf_type: tff.Type) -> tf.TensorSpec:
    """Returns what a graph sees of a leaf: its tensor, or a sequence's variant."""
    if isinstance(leaf_type, tff.SequenceType):
        return tf.TensorSpec([], tf.variant)
    return tf.TensorSpec(leaf_type.shape, tf.as_dtype(leaf_type.dtype.type))


def pack_element(type_spec: tff.Type, leaves: Iterator[Any]) -> Any:
    """Returns leaves in the containers of a data set's element.

    A data set has them in the order of `tf.nest.flatten`, by names, not in TFF's.
    """
    if isinstance(type_spec, tff.StructType):
        pairs = [
            (name, pack_element(kind, leaves))
            for name, kind in tff.structure.to_elements(type_spec)
        ]
        if pairs and pairs[0][0] is not None:
            return collections.OrderedDict(pairs)
        return tuple(part for _, part in pairs)
    return next(leaves)


def build_element_spec(type_spec: tff.Type) -> Any:
    """Returns the structure of a sequence's elements, as a data set describes it."""
    return pack_element(type_spec, map(build_tensor_spec, list_leaf_types(type_spec)))


def tame_sequence(variant: tf.Tensor, leaf_type: tff.SequenceType) -> tf.Tensor:
    """Returns a data set that is not tuned: for a short one that costs 20 ms."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    with tf.device("CPU:0"):
        dataset = tf.data.experimental.from_variant(
            variant, build_element_spec(leaf_type.element)
        )
        return tf.data.experimental.to_variant(dataset.with_options(options))


def has_state(computation: tff.framework.CompiledComputation) -> bool:
    """Whether it has variables or tables: a call must not overlap with another one."""
    return bool(computation.proto.tensorflow.initialize_op)


def import_computation(
    computation: tff.framework.CompiledComputation, argument: Value | None
) -> Value:
    """Adds a computation to the graph that is being built.

    Args:
        computation: A TensorFlow computation.
        argument: Its argument, None for a computation without one.

    Returns:
        Its result.
    """
    proto = computation.proto.tensorflow
    names: dict[str, tf.Tensor] = {}
    if proto.HasField("parameter"):
        _bind(proto.parameter, argument, names)
    if proto.session_token_tensor_name:
        names[proto.session_token_tensor_name] = tf.constant("")
    graph_def = _unpack(proto.graph_def.value)
    if proto.initialize_op:
        # Not one place for a graph: the same computation called twice in it runs both
        # calls at once.
        place = uuid.uuid4().hex
        graph_def = _place_variables(graph_def, proto.initialize_op, place)
    found = {node.name for node in graph_def.node}
    results = _list_names(proto.result)
    imported = tf.graph_util.import_graph_def(
        graph_def,
        input_map={
            name: tensor
            for name, tensor in names.items()
            if name.split(":")[0] in found
        },
        return_elements=[name for name in results if name not in names],
        name="",
    )
    names |= dict(zip([n for n in results if n not in names], imported, strict=True))
    return _collect(proto.result, names)


@functools.lru_cache(maxsize=256)
def _unpack(content: bytes) -> tf.compat.v1.GraphDef:
    """Returns the graph, its functions with names of their own.

    TFF's compiler rewrites functions and leaves their names; this process still knows
    the originals under them.
    """
    graph_def = tf.compat.v1.GraphDef.FromString(content)
    suffix = f"_{hashlib.sha256(content).hexdigest()[:16]}"
    functions = {function.signature.name for function in graph_def.library.function}

    def rename(node: Any) -> None:
        if node.op in functions:
            node.op += suffix
        for attribute in node.attr.values():
            for function in (attribute.func, *attribute.list.func):
                if function.name in functions:
                    function.name += suffix

    parameters = {
        f"^{node.name}" for node in graph_def.node if node.op == "Placeholder"
    }
    for node in graph_def.node:
        rename(node)
        # To wait for a parameter says nothing, and would be for one that is not fed.
        kept = [source for source in node.input if source not in parameters]
        if len(kept) < len(node.input):
            del node.input[:]
            node.input.extend(kept)
    for function in graph_def.library.function:
        function.signature.name += suffix
        for node in function.node_def:
            rename(node)
    for gradient in graph_def.library.gradient:
        gradient.function_name += suffix
        gradient.gradient_func += suffix
    reduction.replace_reductions(graph_def, suffix)
    modulus.replace_remainders(graph_def)
    return graph_def


def _bind(binding: Any, value: Value, names: dict[str, tf.Tensor]) -> None:
    kind = binding.WhichOneof("binding")
    if kind == "struct":
        for element, part in zip(binding.struct.element, value, strict=True):
            _bind(element, part, names)
    elif kind == "sequence":
        names[binding.sequence.variant_tensor_name] = value
    else:
        names[binding.tensor.tensor_name] = value


def _list_names(binding: Any) -> list[str]:
    kind = binding.WhichOneof("binding")
    if kind == "struct":
        return [name for part in binding.struct.element for name in _list_names(part)]
    if kind == "sequence":
        return [binding.sequence.variant_tensor_name]
    return [binding.tensor.tensor_name]


def _collect(binding: Any, names: dict[str, tf.Tensor]) -> Value:
    kind = binding.WhichOneof("binding")
    if kind == "struct":
        return tuple(_collect(part, names) for part in binding.struct.element)
    [name] = _list_names(binding)
    return names[name]


def _place_variables(
    graph_def: tf.compat.v1.GraphDef, initialize_op: str, place: str
) -> tf.compat.v1.GraphDef:
    """Gives variables a place of their own, and lets their use wait for their values.

    TFF's graphs name an op that must run before each call.
    """
    placed = tf.compat.v1.GraphDef()
    placed.CopyFrom(graph_def)
    initialize = initialize_op.split(":")[0].removeprefix("^")
    nodes = {node.name: node for node in placed.node}
    before, pending = set(), [initialize]
    while pending:
        name = pending.pop()
        if name not in before:
            before.add(name)
            pending += [_get_node_name(source) for source in nodes[name].input]
    for index, node in enumerate(placed.node):
        if "shared_name" in node.attr:
            shared = node.attr["shared_name"].s or f"{node.name}_{index}".encode()
            node.attr["shared_name"].s = shared + b"/" + place.encode()
        data = [source for source in node.input if not source.startswith("^")]
        if node.name not in before and any(_get_node_name(s) in before for s in data):
            node.input.append(f"^{initialize}")
    return placed


def _get_node_name(source: str) -> str:
    return source.removeprefix("^").split(":")[0]
