"""Many clients' work as one call, with their tensors stacked along the first axis.

A client's computation may call a function of stacked tensors through `call_stacked`, as
a stack of one. The engine finds that call in the client's graph, cuts the graph there,
and runs what comes before and after client by client, but the call itself for a whole
group. The function travels in the computation's own graph: TFF's runtime, which knows
nothing of this, runs the stack of one.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

Flat = list[tf.Tensor]

_NAME = "discreet_lockstep"
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# Clients whose work is one call. Reproducible results need a fixed number.
_MAX_GROUP = 32
# Bytes of what is stacked for one call, at most, as far as shapes are known.
_MAX_BYTES = 2**26


def call_stacked(function: Callable[..., Flat], tensors: Sequence[tf.Tensor]) -> Flat:
    """Calls a function of stacked clients on one client's tensors.

    Args:
        function: Of tensors whose first axis counts clients, with results of the same
            kind. It must treat clients independently, and what follows the end of a
            shorter client's tensor along any other axis, where zeros are padded, must
            not change that client's results.
        tensors: The client's. The dimensions whose size is not known may differ between
            clients.

    Returns:
        The client's results.
    """
    specs = [tf.TensorSpec([None, *tensor.shape], tensor.dtype) for tensor in tensors]

    def compute(*stacked: tf.Tensor) -> Flat:
        return function(*stacked)

    # The engine knows the call by this name.
    compute.__name__ = _NAME
    call = tf.function(compute, input_signature=specs, autograph=False)
    results = call(*[tf.expand_dims(tensor, 0) for tensor in tensors])
    return [tf.squeeze(result, 0) for result in results]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lockstep:
    """A client's graph, cut at its call of stacked clients.

    Attributes:
        before: From the graph's inputs to the call's.
        together: The call, of any number of clients.
        after: From the graph's inputs and the call's outputs to the graph's outputs.
        group_size: How many clients one call may take.
    """

    before: Callable[..., Flat]
    together: Callable[..., Flat]
    after: Callable[..., Flat]
    group_size: int

    def run(self, clients: Sequence[Flat]) -> list[Flat]:
        """Returns the outputs of each client from its inputs."""
        prepared = [self.before(*inputs) for inputs in clients]
        stacked = [_stack(parts) for parts in zip(*prepared, strict=True)]
        results = [tf.split(result, len(clients)) for result in self.together(*stacked)]
        return [
            self.after(*inputs, *(result[index] for result in results))
            for index, inputs in enumerate(clients)
        ]


def find_lockstep(function: tf.types.experimental.ConcreteFunction) -> Lockstep | None:
    """Returns a wrapped client function cut at its call, None where there is no cut.

    A graph is left whole if it has no call, or several; and if an op with a state, such
    as a draw of random numbers, is needed both before and after: it would run twice.
    """
    graph = function.graph
    calls = [op for op in graph.get_operations() if _is_call(op)]
    if len(calls) != 1:
        return None
    [call] = calls
    inputs, outputs = list(graph.inputs), list(graph.outputs)
    before = _list_stateful(list(call.inputs), stop=inputs)
    after = _list_stateful(outputs, stop=[*inputs, *call.outputs])
    if before & after:
        return None
    size = sum(_count_bytes(tensor) for tensor in (*call.inputs, *call.outputs))
    group_size = int(np.clip(_MAX_BYTES // max(size, 1), 1, _MAX_GROUP))
    if group_size == 1:
        return None
    return Lockstep(
        before=function.prune(inputs, list(call.inputs)),
        together=_build_together(call),
        after=function.prune([*inputs, *call.outputs], outputs),
        group_size=group_size,
    )


def _is_call(op: tf.Operation) -> bool:
    return op.type in _CALLS and f"_{_NAME}_" in op.get_attr("f").name


def _build_together(call: tf.Operation) -> Callable[..., Flat]:
    """Returns the call as a function of any number of clients."""
    specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in call.inputs]
    content = tf.compat.v1.GraphDef()
    content.library.CopyFrom(call.graph.as_graph_def().library)
    node = content.node.add()
    node.CopyFrom(call.node_def)
    del node.input[:]
    for index, spec in enumerate(specs):
        source = content.node.add(name=f"stacked_{index}", op="Placeholder")
        source.attr["dtype"].type = spec.dtype.as_datatype_enum
        node.input.append(source.name)
    # The shapes that TensorFlow noted are those of one client.
    node.attr.pop("_output_shapes", None)

    def compute(*stacked: tf.Tensor) -> Flat:
        return tf.graph_util.import_graph_def(
            content,
            input_map={f"stacked_{index}:0": t for index, t in enumerate(stacked)},
            return_elements=[f"{node.name}:{n}" for n in range(len(call.outputs))],
            name="",
        )

    return tf.compat.v1.wrap_function(compute, specs)


def _list_stateful(
    tensors: Sequence[tf.Tensor], *, stop: Sequence[tf.Tensor]
) -> set[str]:
    """Returns the names of ops with a state that tensors need, up to some others."""
    known = {tensor.ref() for tensor in stop}
    found: set[str] = set()
    passed: set[str] = set()
    pending = [tensor.op for tensor in tensors if tensor.ref() not in known]
    while pending:
        op = pending.pop()
        if op.name in passed:
            continue
        passed.add(op.name)
        if op.op_def.is_stateful and op.type != "Placeholder":
            found.add(op.name)
        pending += [source.op for source in op.inputs if source.ref() not in known]
        pending += op.control_inputs
    return found


def _count_bytes(tensor: tf.Tensor) -> int:
    """Returns one client's bytes; dimensions that are not known count as one."""
    return tensor.dtype.size * int(np.prod([size or 1 for size in tensor.shape[1:]]))


def _stack(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns tensors of shape [1, ...] as one, zeros at the end of the shorter ones."""
    if all(part.shape == parts[0].shape for part in parts):
        return tf.concat(parts, 0)
    largest = np.max([part.shape.as_list() for part in parts], axis=0)
    stacked = np.zeros([len(parts), *largest[1:]], parts[0].dtype.as_numpy_dtype)
    for index, part in enumerate(parts):
        stacked[(index, *(slice(size) for size in part.shape[1:]))] = part[0]
    return tf.convert_to_tensor(stacked)
