"""Whether every op of a graph can stay on a GPU, by TensorFlow's kernel registry.

The registry lists the GPU kernels of the wheel on machines without a GPU too. A "GPU"
kernel can keep its data in host memory (`host_memory_arg`): for a tensor of the
update's length that means a copy to the host and back.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import tensorflow as tf
from tensorflow.core.framework import kernel_def_pb2
from tensorflow.python.framework import kernels
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

# What a functional loop or branch becomes when it is executed: its tensors go through
# these, of which some keep int32 and bool in host memory.
_LOWERED = {
    "While": ("Enter", "Merge", "Switch", "NextIteration", "Exit"),
    "If": ("Switch", "Merge"),
}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_ARGUMENTS = {"Placeholder", "_Arg", "_Retval"}


@dataclasses.dataclass(frozen=True)
class Offence:
    """An op that cannot keep a tensor of the update's length on a GPU."""

    op_type: str
    name: str
    reason: str


def find_offences(graph: tf.Graph, min_elements: int) -> list[Offence]:
    """Returns what keeps tensors of at least `min_elements` off a GPU, or any op off.

    Args:
      graph: Of a concrete function; functions that it calls are walked too.
      min_elements: Smaller tensors may be in host memory.
    """
    return [
        offence
        for op in walk_ops(graph)
        for offence in _check_op(op, min_elements)
        if op.type not in _ARGUMENTS
    ]


def walk_ops(
    graph: tf.Graph, library: tf.Graph | None = None
) -> Iterator[tf.Operation]:
    """Yields every op of the graph and of the functions that it calls."""
    library = graph if library is None else library
    for op in graph.get_operations():
        yield op
        for attribute in op.node_def.attr.values():
            if attribute.HasField("func"):
                body = _build_body(library, op, attribute.func.name)
                yield from walk_ops(body, library)


def _build_body(library: tf.Graph, op: tf.Operation, name: str) -> tf.Graph:
    """Rebuilds a called function with the static shapes of its call."""
    definition = library._get_function(name).cached_definition
    inputs = list(op.inputs)
    if op.type in ("If", "StatelessIf"):
        inputs = inputs[1:]
    return function_def_to_graph(
        definition, input_shapes=[tensor.shape for tensor in inputs]
    )


def _check_op(op: tf.Operation, min_elements: int) -> Iterator[Offence]:
    kind = op.type.removeprefix("Stateless")
    if op.type in _CALLS:
        return
    if kind in _LOWERED:
        for lowered in _LOWERED[kind]:
            for tensor in _list_long(op.outputs, min_elements):
                reason = _find_host_kernel(lowered, tensor.dtype)
                if reason:
                    yield Offence(op.type, op.name, f"{lowered}: {reason}")
        return
    matching = _select_kernels(op.type, functools.partial(_matches, op=op))
    if not matching:
        yield Offence(op.type, op.name, "no GPU kernel")
        return
    for kernel in matching:
        for name in kernel.host_memory_arg:
            for tensor in _list_long(_get_tensors(op, name), min_elements):
                reason = f"{name} {tensor.dtype.name} {tensor.shape} in host memory"
                yield Offence(op.type, op.name, reason)


def _select_kernels(
    op_type: str, matches: Callable[[kernel_def_pb2.KernelDef], bool]
) -> list[kernel_def_pb2.KernelDef]:
    """Returns the matching kernels of a GPU; those for any device if there are none."""
    for device in ("GPU", "DEFAULT"):
        found = [kernel for kernel in _list_kernels(op_type, device) if matches(kernel)]
        if found:
            return found
    return []


@functools.cache
def _list_kernels(op_type: str, device: str) -> list[kernel_def_pb2.KernelDef]:
    registered = kernels.get_registered_kernels_for_op(op_type).kernel
    return [kernel for kernel in registered if kernel.device_type == device]


def _matches(kernel: kernel_def_pb2.KernelDef, op: tf.Operation) -> bool:
    for constraint in kernel.constraint:
        allowed = set(constraint.allowed_values.list.type)
        attribute = op.node_def.attr[constraint.name]
        if not set(attribute.list.type or [attribute.type]) <= allowed:
            return False
    return True


def _find_host_kernel(op_type: str, dtype: tf.DType) -> str | None:
    def matches(kernel: kernel_def_pb2.KernelDef) -> bool:
        return all(
            dtype.as_datatype_enum in constraint.allowed_values.list.type
            for constraint in kernel.constraint
            if constraint.name == "T"
        )

    matching = _select_kernels(op_type, matches)
    if not matching:
        return f"no GPU kernel for {dtype.name}"
    data = {"data", "inputs", "output", "output_false", "output_true"}
    if any(data & set(kernel.host_memory_arg) for kernel in matching):
        return f"{dtype.name} in host memory"
    return None


def _get_tensors(op: tf.Operation, name: str) -> list[tf.Tensor]:
    """Returns the tensors of an input or output argument."""
    definition = op.op_def
    for arguments, tensors in (
        (definition.input_arg, list(op.inputs)),
        (definition.output_arg, list(op.outputs)),
    ):
        start = 0
        for argument in arguments:
            size = 1
            if argument.number_attr:
                size = op.node_def.attr[argument.number_attr].i
            elif argument.type_list_attr:
                types = op.node_def.attr[argument.type_list_attr].list.type
                size = len(types)
            if argument.name == name:
                return tensors[start : start + size]
            start += size
    raise ValueError(f"`name` must be an argument of {op.type}. Found {name!r}.")


def _list_long(tensors: list[tf.Tensor], min_elements: int) -> list[tf.Tensor]:
    """Returns the tensors that are long, or whose length is not known."""
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    return [
        tensor
        for tensor, size in zip(tensors, sizes, strict=True)
        if size is None or size >= min_elements
    ]
