"""Many clients' work as one call, with their tensors stacked along the first axis.

A client's computation may call a function of stacked tensors through `call_stacked`, as
a stack of one. The engine finds that call in the client's graph, cuts the graph there,
and runs the call for clients whose tensors have equal shapes together, compiled by XLA
for each shape. What comes before and after runs in one go for the stack (`stack`), or,
where that does not work, client by client. The function travels in the computation's
own graph: TFF's runtime, which knows nothing of this, runs the stack of one.

What is compiled is shared in the process, by all computations whose calls are the same:
of many trainings of one model by one optimizer the first alone waits for XLA.
"""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from absl import logging

from simulation.engine import canonical_graph, graph_cut
from simulation.engine.graph_cut import Flat
from simulation.engine.leaf_function import Leaves
from simulation.engine.stack import StackWork, build_stack_work
from simulation.engine.stack_output import Row

_NAME = "discreet_lockstep"
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# Clients that are looked at together. Reproducible results need a fixed number.
_MAX_GROUP = 16
# Clients in one call. Every number is compiled for itself.
_STACK_SIZES = (16, 4, 1)
# Bytes of what is stacked for one call, at most, as far as shapes are known.
_MAX_BYTES = 2**26
# Calls whose programs are kept for the next computation, at most.
_MAX_SHARED = 32

# By digest and device, the last used last.
_shared: collections.OrderedDict[tuple[bytes, str | None], Callable[..., Flat]] = (
    collections.OrderedDict()
)
_shared_lock = threading.Lock()


def call_stacked(function: Callable[..., Flat], tensors: Sequence[tf.Tensor]) -> Flat:
    """Calls a function of stacked clients on one client's tensors.

    Args:
        function: Of tensors whose first axis counts clients, with results of the same
            kind. It must treat clients independently, and be made of what XLA compiles.
        tensors: The client's. Where few shapes occur among the clients, few programs
            are compiled.

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
        before: From the graph's inputs to the call's, and what else crosses the cut.
        together: The call, of any number of clients.
        after: From the graph's inputs, the call's outputs and what else crosses the cut
            to the graph's outputs.
        num_stacked: How many of the first outputs of `before` are the call's inputs.
        group_size: How many clients one call may take.
        stack_work: Does all of it for a stack, None where it must be done one by one.
    """

    before: Callable[..., Flat]
    together: Callable[..., Flat]
    after: Callable[..., Flat]
    num_stacked: int
    group_size: int
    stack_work: StackWork | None = None

    def run(self, clients: Sequence[Leaves]) -> list[Leaves | None]:
        """Returns the outputs of each client from its inputs.

        None stands for a client that must be run alone: its work failed, its stack
        failed, or its results are not finite. XLA does not say which number was wrong,
        and may go on where TensorFlow raises an error.
        """
        outputs: list[Leaves | None] = [None for _ in clients]
        apart = list(range(len(clients)))
        work = self.stack_work
        if work is not None and clients and work.takes(clients):
            apart = []
            alike: dict[Any, list[int]] = collections.defaultdict(list)
            for index, inputs in enumerate(clients):
                alike[work.list_shapes(inputs)].append(index)
            for indices in alike.values():
                try:
                    found = self._run_stacks(work, indices, clients)
                # Whatever it is, it may be about one of them.
                except Exception as error:
                    logging.info("%d clients one by one: %s", len(indices), error)
                    apart += indices
                else:
                    for index, row in found.items():
                        outputs[index] = row
        for index, flat in self._run_apart(apart, clients).items():
            outputs[index] = flat
        return outputs

    def _run_stacks(
        self,
        work: StackWork,
        indices: Sequence[int],
        clients: Sequence[Leaves],
    ) -> dict[int, Row]:
        """Returns the outputs of clients of equal shapes whose results are finite."""
        found = {}
        for stack in _split_stack(indices):
            members = [clients[index] for index in stack]
            outputs, places = work.run(members, self.together)
            for row, place in enumerate(places):
                found[stack[place]] = Row(outputs, row)
        return found

    def _run_apart(
        self, indices: Sequence[int], clients: Sequence[Leaves]
    ) -> dict[int, Flat]:
        """Returns the outputs of clients who share the call alone, where it worked."""
        outputs: dict[int, Flat] = {}
        prepared: dict[int, Flat] = {}
        alike: dict[Any, list[int]] = collections.defaultdict(list)
        for index in indices:
            # The client's own run will raise it again.
            with contextlib.suppress(Exception):
                tensors = prepared[index] = self.before(*clients[index])
                alike[tuple(t.shape for t in tensors[: self.num_stacked])].append(index)
        for members in alike.values():
            for stack in _split_stack(members):
                trained = self._train([prepared[index] for index in stack])
                for index, results in zip(stack, trained, strict=True):
                    if results is None:
                        continue
                    crossing = prepared[index][self.num_stacked :]
                    with contextlib.suppress(Exception):
                        outputs[index] = self.after(
                            *clients[index], *results, *crossing
                        )
        return outputs

    def _train(self, prepared: Sequence[Flat]) -> list[Flat | None]:
        """Returns each client's results of the call, None for those to be run alone."""
        size = len(prepared)
        columns = [list(column) for column in zip(*prepared, strict=True)]
        stacked = [tf.concat(column, 0) for column in columns[: self.num_stacked]]
        try:
            results = self.together(*stacked)
        except tf.errors.OpError as error:
            logging.warning("%d clients run one by one: %s", size, error.message[:300])
            return [None] * size
        finite = np.ones([size], bool)
        for result in results:
            if result.dtype.is_floating:
                flat = tf.reshape(tf.math.is_finite(result), [size, -1])
                finite &= tf.reduce_all(flat, axis=1).numpy()
        split = [tf.split(result, size) for result in results]
        return [
            [column[position] for column in split] if finite[position] else None
            for position in range(size)
        ]


def _split_stack(indices: Sequence[int]) -> Iterator[Sequence[int]]:
    """Returns indices in runs whose lengths are among those that are compiled."""
    start = 0
    while start < len(indices):
        size = next(size for size in _STACK_SIZES if size <= len(indices) - start)
        yield indices[start : start + size]
        start += size


def find_lockstep(
    function: tf.types.experimental.ConcreteFunction,
    device: str | None,
    *,
    shared: Collection[int] = (),
) -> Lockstep | None:
    """Returns a client function cut at its call, None where there is no cut.

    Args:
        function: The client function, wrapped.
        device: The device of the call, None for TensorFlow's choice.
        shared: Which of the function's inputs are the same for all clients.

    A graph is left whole if it has no call, or several; and if something that has no
    output to hand over, such as an assignment, would run both before and after.
    """
    graph = function.graph
    calls = [op for op in graph.get_operations() if _is_call(op)]
    if len(calls) != 1:
        return None
    [call] = calls
    size = sum(_count_bytes(tensor) for tensor in (*call.inputs, *call.outputs))
    group_size = int(np.clip(_MAX_BYTES // max(size, 1), 1, _MAX_GROUP))
    if group_size == 1:
        return None
    inputs, outputs = list(graph.inputs), list(graph.outputs)
    stacked, results = list(call.inputs), list(call.outputs)
    # What is drawn or read before is not drawn or read again.
    again = _list_stateful(outputs, [*inputs, *results])
    both = [op for op in _list_stateful(stacked, inputs) if op in again]
    if not all(op.outputs for op in both):
        return None
    crossing = [tensor for op in both for tensor in op.outputs]

    return Lockstep(
        before=_Part(graph, inputs, [*stacked, *crossing]),
        together=_share(graph, stacked, results, device),
        after=_Part(graph, [*inputs, *results, *crossing], outputs),
        num_stacked=len(stacked),
        group_size=group_size,
        stack_work=build_stack_work(graph, call, frozenset(shared), device),
    )


class _Part:
    """A part of a graph as a function, which is built when it is first called."""

    def __init__(self, graph: tf.Graph, feeds: Flat, fetches: Flat) -> None:
        self._graph, self._feeds, self._fetches = graph, feeds, fetches
        self._lock = threading.Lock()
        self._function: Callable[..., Flat] | None = None

    def __call__(self, *leaves: Any) -> Flat:
        """Returns the fetches."""
        with self._lock:
            if self._function is None:
                compute = graph_cut.cut(self._graph, self._feeds, self._fetches)
                self._function = graph_cut.wrap(compute, self._feeds)
        return self._function(*map(tf.convert_to_tensor, leaves))


def may_hold_call(computation: tff.framework.CompiledComputation) -> bool:
    """Whether a client's computation may call a function of stacked clients."""
    return _NAME.encode() in computation.proto.tensorflow.graph_def.value


def forget_shared() -> None:
    """Lets go of what was compiled, but for what a computation still holds."""
    with _shared_lock:
        _shared.clear()


def _is_call(op: tf.Operation) -> bool:
    return op.type in _CALLS and f"_{_NAME}_" in op.get_attr("f").name


def _share(
    graph: tf.Graph,
    feeds: Sequence[tf.Tensor],
    fetches: Sequence[tf.Tensor],
    device: str | None,
) -> Callable[..., Flat]:
    """Returns the compiled part of a graph, the former one where there was its like."""
    part = graph_cut.extract(graph, feeds, fetches)
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in feeds]
    try:
        digest, part = canonical_graph.canonicalize(part, specs)
    except ValueError as error:
        logging.info("Compiled for one computation alone: %s", error)
        return _compile(graph_cut.build(part), device)
    key = (digest, device)
    with _shared_lock:
        if key not in _shared:
            graph_cut.register(part)
            _shared[key] = _compile(graph_cut.build(part), device)
            while len(_shared) > _MAX_SHARED:
                _shared.popitem(last=False)
        _shared.move_to_end(key)
        return _shared[key]


def _compile(compute: Callable[..., Flat], device: str | None) -> Callable[..., Flat]:
    """Returns a function of a graph as one that XLA compiles for each shape."""
    function = tf.function(compute, jit_compile=True, autograph=False)
    compiled: dict[Any, Callable[..., Flat]] = {}
    lock = threading.Lock()

    def build(stacked: Sequence[tf.Tensor]) -> Callable[..., Flat]:
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in stacked]
        concrete = function.get_concrete_function(*specs)

        def call(*tensors: tf.Tensor) -> Flat:
            with tf.device(device):
                return concrete(*tensors)

        # To call the function itself takes twice the time, in Python.
        return tf.compat.v1.wrap_function(call, specs)

    def run(*stacked: tf.Tensor) -> Flat:
        shapes = tuple(tensor.shape for tensor in stacked)
        with lock:
            if shapes not in compiled:
                compiled[shapes] = build(stacked)
        # Where it is called decides where XLA's program runs.
        with tf.device(device):
            return compiled[shapes](*stacked)

    return run


def _list_stateful(fetches: Flat, feeds: Flat) -> list[tf.Operation]:
    """Returns the ops with a state that compute `fetches` from `feeds`."""
    ops = graph_cut.list_ops(fetches, feeds)
    return [op for op in ops if op.op_def.is_stateful and op.type != "Placeholder"]


def _count_bytes(tensor: tf.Tensor) -> int:
    """Returns one client's bytes; dimensions that are not known count as one."""
    return tensor.dtype.size * int(np.prod([size or 1 for size in tensor.shape[1:]]))
