"""Reductions of data sets as loops of the graph itself.

`tf.data.Dataset.reduce` sets its function up anew at every call, which takes 10 to 20
ms and happens under a lock; a client with little data takes less than that to train. A
loop over an iterator computes the same: the function of the state and each element in
turn.
"""

import copy
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_REDUCE = "ReduceDataset"
_CALL = "StatefulPartitionedCall"
_FOREIGN = (tf.variant.as_datatype_enum, tf.resource.as_datatype_enum)


def replace_reductions(graph_def: tf.compat.v1.GraphDef, suffix: str) -> None:
    """Replaces each reduction in a graph and its functions by a call of a loop.

    Args:
        graph_def: The graph, changed in place.
        suffix: Ends the names of new functions.
    """
    functions = {f.signature.name: f for f in graph_def.library.function}
    library = tf.compat.v1.GraphDef()
    library.CopyFrom(graph_def)
    del library.node[:]
    added: dict[str, list[Any]] = {}

    def replace(node: Any) -> bool:
        if node.op != _REDUCE:
            return False
        element_types = _list_element_types(node, functions)
        if any(kind in _FOREIGN for kind in element_types):
            return False
        name = f"loop_{len(added)}{suffix}"
        added[name] = _build_loop(node, element_types, library, name)
        types = [tf.variant.as_datatype_enum, *node.attr["Tstate"].list.type]
        types += node.attr["Targuments"].list.type
        results = list(node.attr["output_types"].list.type)
        node.op = _CALL
        for attribute in list(node.attr):
            if not attribute.startswith("_"):
                del node.attr[attribute]
        node.attr["Tin"].list.type.extend(types)
        node.attr["Tout"].list.type.extend(results)
        node.attr["f"].func.name = name
        return True

    for node in graph_def.node:
        replace(node)
    for function in graph_def.library.function:
        replaced = {node.name for node in function.node_def if replace(node)}
        if replaced:
            _rename_outputs(function, replaced)
    known = set(functions)
    for definitions in added.values():
        for definition in definitions:
            if definition.signature.name not in known:
                known.add(definition.signature.name)
                graph_def.library.function.add().CopyFrom(definition)


def _list_element_types(node: Any, functions: dict[str, Any]) -> list[int]:
    """Returns the types of an element's parts: the function's that are not others'."""
    arguments = functions[node.attr["f"].func.name].signature.input_arg
    start = len(node.attr["Tstate"].list.type)
    stop = len(arguments) - len(node.attr["Targuments"].list.type)
    return [argument.type for argument in arguments[start:stop]]


def _build_loop(
    node: Any,
    element_types: Sequence[int],
    library: tf.compat.v1.GraphDef,
    name: str,
) -> list[Any]:
    """Returns the function that replaces a reduction, and those that it calls."""
    state_types = list(node.attr["Tstate"].list.type)
    state_shapes = [
        tf.TensorShape(shape) for shape in node.attr["output_shapes"].list.shape
    ]
    other_types = list(node.attr["Targuments"].list.type)
    step = _build_step(node, [*state_types, *element_types, *other_types], library)
    element_spec = tuple(tf.TensorSpec(None, kind) for kind in element_types)

    def loop(variant: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
        state, others = tensors[: len(state_types)], tensors[len(state_types) :]
        dataset = tf.data.experimental.from_variant(variant, element_spec)
        iterator = iter(dataset)

        def has_element(element: tf.experimental.Optional, *_: tf.Tensor) -> tf.Tensor:
            return element.has_value()

        def take(element: tf.experimental.Optional, *state: tf.Tensor) -> tuple:
            # The identity lets the body see what is around it.
            around = [tf.identity(tensor) for tensor in others]
            found = step(*state, *element.get_value(), *around)
            for tensor, shape in zip(found, state_shapes, strict=True):
                tensor.set_shape(shape)
            return iterator.get_next_as_optional(), *found

        _, *result = tf.while_loop(
            has_element,
            take,
            (iterator.get_next_as_optional(), *state),
            shape_invariants=(
                tf.OptionalSpec(element_spec),
                *state_shapes,
            ),
        )
        return result

    specs = [tf.TensorSpec([], tf.variant)]
    specs += [
        tf.TensorSpec(shape, kind)
        for shape, kind in zip(state_shapes, state_types, strict=True)
    ]
    specs += [tf.TensorSpec(None, kind) for kind in other_types]
    traced = tf.function(loop, autograph=False, input_signature=specs)
    concrete = traced.get_concrete_function()
    definition = copy.deepcopy(concrete.function_def)
    definition.signature.name = name
    return [definition, *concrete.graph.as_graph_def().library.function]


def _build_step(node: Any, types: Sequence[int], library: tf.compat.v1.GraphDef) -> Any:
    """Returns a Python function that adds a call of the reduction's function."""

    def step(*tensors: tf.Tensor) -> list[tf.Tensor]:
        graph_def = tf.compat.v1.GraphDef()
        graph_def.CopyFrom(library)
        names = [f"argument_{index}" for index in range(len(types))]
        for name, kind in zip(names, types, strict=True):
            placeholder = graph_def.node.add(name=name, op="Placeholder")
            placeholder.attr["dtype"].type = kind
        call = graph_def.node.add(name="step", op=_CALL, input=names)
        call.attr["f"].func.CopyFrom(node.attr["f"].func)
        call.attr["Tin"].list.type.extend(types)
        results = node.attr["output_types"].list.type
        call.attr["Tout"].list.type.extend(results)
        return tf.graph_util.import_graph_def(
            graph_def,
            input_map=dict(zip(names, tensors, strict=True)),
            return_elements=[f"step:{index}" for index in range(len(results))],
            name="",
        )

    return step


def _rename_outputs(function: Any, replaced: set[str]) -> None:
    """A function's graph names outputs by the op's word for them."""

    def rename(source: str) -> str:
        node, *rest = source.split(":")
        if node in replaced and rest[:1] == ["components"]:
            return ":".join([node, "output", *rest[1:]])
        return source

    for node in function.node_def:
        for index, source in enumerate(node.input):
            node.input[index] = rename(source)
    for key, source in function.ret.items():
        function.ret[key] = rename(source)
