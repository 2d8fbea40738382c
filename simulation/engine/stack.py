"""The work around a call of stacked clients, done for a whole stack.

Client by client, what comes before and after the call takes longer than small clients
take to train, most of it in Python. Here the clients' inputs are stacked as arrays.
What the call is given is, mostly, such a stack as it is, or the same for all clients;
for the rest, and for what comes after the call, a loop in one graph goes from client
to client. A client's values come from the same ops as alone, so they are the same, bit
for bit.
"""

import dataclasses
import operator
import threading
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from simulation.engine import graph_cut, stack_output
from simulation.engine.graph_cut import Flat
from simulation.engine.leaf_function import Leaves
from simulation.engine.stack_output import StackOutputs

# Bytes. TensorFlow's allocators align so; it ends the process where a tensor is not.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Functions:
    """What runs around the call.

    Attributes:
        common: From what all clients share to those inputs of the call that follow
            from it alone, of one client.
        before: From the stacks of `before_reads` to the inputs that must be computed;
            None without such.
        before_reads: Inputs of the client's graph.
        after: From the stacks of `after_reads` and the call's results to the outputs.
        after_reads: Inputs of the client's graph.
    """

    common: Callable[..., Flat]
    before: Callable[..., Flat] | None
    before_reads: Sequence[int]
    after: Callable[..., Flat]
    after_reads: Sequence[int]


class StackWork:
    """A client's graph, cut at its call, as a function of many clients."""

    def __init__(
        self,
        graph: tf.Graph,
        call: tf.Operation,
        shared: frozenset[int],
        device: str | None,
    ) -> None:
        """Divides the graph. What runs is built when it is first needed.

        Args:
            graph: The graph of one client's work.
            call: The call in it.
            shared: Which of the graph's inputs are the same for all clients.
            device: The device, None for TensorFlow's choice.
        """
        self._graph, self._call, self._device = graph, call, device
        self._inputs, self._outputs = list(graph.inputs), list(graph.outputs)
        self._dtypes = [tensor.dtype for tensor in self._outputs]
        self._shared = sorted(shared)
        self._own = sorted({*range(len(self._inputs))} - shared)
        # Where the inputs of the call come from.
        self._given: dict[int, int] = {}
        self._common: list[int] = []
        self._computed: list[int] = []
        for position, tensor in enumerate(call.inputs):
            source = _find_expanded(tensor, self._inputs)
            if source is not None and source in self._own:
                self._given[position] = source
            elif shared.issuperset(graph_cut.find_used([tensor], self._inputs)):
                self._common.append(position)
            else:
                self._computed.append(position)
        self._lock = threading.Lock()
        self._built: _Functions | None = None
        self._failure: Exception | None = None
        self._repeated: tuple[Flat, dict[int, Flat]] = [], {}

    def takes(self, clients: Sequence[Leaves]) -> bool:
        """Whether what clients ought to share is one object for all of them."""
        first = self._get_shared(clients[0])
        return all(
            all(map(operator.is_, self._get_shared(client), first))
            for client in clients[1:]
        )

    def list_shapes(self, client: Leaves) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes that the clients of a stack have in common."""
        return tuple(tuple(client[index].shape) for index in self._own)

    def run(
        self, clients: Sequence[Leaves], together: Callable[..., Flat]
    ) -> tuple[StackOutputs, list[int]]:
        """Returns the outputs of those clients whose results of the call are finite.

        Args:
            clients: Their inputs, of equal shapes.
            together: The call, compiled.

        Returns:
            The outputs, and which of the clients they are of, in order.

        Raises:
            Exception: If any client's work fails.
        """
        functions = self._get_functions()
        stacks: dict[int, tf.Tensor] = {}

        def get(index: int) -> tf.Tensor:
            if index not in self._own:
                return clients[0][index]
            if index not in stacks:
                stacks[index] = _stack([client[index] for client in clients])
            return stacks[index]

        given = {position: get(index) for position, index in self._given.items()}
        common = self._repeat(self._get_shared(clients[0]), len(clients))
        given |= zip(self._common, common, strict=True)
        if functions.before is not None:
            computed = functions.before(*map(get, functions.before_reads))
            given |= zip(self._computed, computed, strict=True)
        results = together(*(given[position] for position in range(len(given))))
        reads = map(get, functions.after_reads)
        *handles, finite = functions.after(*reads, *results)
        found = finite.numpy().tolist()
        return StackOutputs(handles, self._dtypes, len(found)), found

    def _get_shared(self, client: Leaves) -> Flat:
        return [client[index] for index in self._shared]

    def _repeat(self, shared: Flat, size: int) -> Flat:
        """Returns stacks of what follows from what is shared, made once a round."""
        former, stacks = self._repeated
        same = len(former) == len(shared) and all(map(operator.is_, former, shared))
        if not same or size not in stacks:
            parts = self._get_functions().common(*shared) if self._common else []
            added = {size: [tf.concat([part] * size, 0) for part in parts]}
            stacks = {**stacks, **added} if same else added
            # Where two threads do so at a time, each goes on with its own.
            self._repeated = shared, stacks
        return stacks[size]

    def _get_functions(self) -> _Functions:
        with self._lock:
            # Not tried again for every stack.
            if self._failure is not None:
                raise RuntimeError("it cannot be built") from self._failure
            if self._built is None:
                try:
                    self._built = self._build()
                except Exception as error:
                    self._failure = error
                    raise
            return self._built

    def _build(self) -> _Functions:
        stacked, results = list(self._call.inputs), list(self._call.outputs)
        shared = [self._inputs[index] for index in self._shared]
        common = graph_cut.cut(
            self._graph, shared, [stacked[position] for position in self._common]
        )
        computed = [stacked[position] for position in self._computed]
        before_reads = graph_cut.find_used(computed, self._inputs)
        feeds = [*self._inputs, *results]
        after_reads = [
            index
            for index in graph_cut.find_used(self._outputs, feeds)
            if index < len(self._inputs)
        ]
        return _Functions(
            common=graph_cut.wrap(common, shared),
            before=self._build_loop(before_reads, computed) if computed else None,
            before_reads=before_reads,
            after=self._build_loop(after_reads, self._outputs, results),
            after_reads=after_reads,
        )

    def _build_loop(
        self, reads: Sequence[int], fetches: Flat, results: Flat | None = None
    ) -> Callable[..., Flat]:
        """Returns a function of stacks that computes tensors for each client in turn.

        Args:
            reads: The inputs of the graph that are given, those of the clients' own
                as stacks.
            fetches: The tensors: with the call's results, what becomes of the outputs
                is lists, and after them which clients' results are finite; without,
                stacks.
            results: The call's results, or None.
        """
        feeds = [*self._inputs, *(results or [])]
        compute = graph_cut.cut(self._graph, feeds, fetches)
        dtypes = [tensor.dtype for tensor in fetches]

        def run(*tensors: tf.Tensor) -> Flat:
            given, found = tensors[: len(reads)], tensors[len(reads) :]
            own = [t for n, t in zip(reads, given, strict=True) if n in self._own]
            size = tf.shape([*found, *own][0])[0]
            chosen = tf.range(size)
            if results is not None:
                chosen = tf.boolean_mask(chosen, _find_finite(found, size))
            count = tf.size(chosen)

            def step(number: tf.Tensor, *handles: tf.Tensor) -> Flat:
                client = chosen[number]
                inputs: list[tf.Tensor | None] = [None] * len(self._inputs)
                for index, tensor in zip(reads, given, strict=True):
                    # The identity lets the loop see what is around it.
                    inputs[index] = (
                        tensor[client] if index in self._own else tf.identity(tensor)
                    )
                own_results = [tensor[client : client + 1] for tensor in found]
                computed = compute(*inputs, *own_results)
                return [number + 1, *stack_output.write(handles, number, computed)]

            # One after the other: the threads are taken by other stacks.
            _, *handles = tf.while_loop(
                lambda number, *_: number < count,
                step,
                [tf.constant(0), *stack_output.reserve(dtypes, count)],
                parallel_iterations=1,
            )
            if results is not None:
                return [*handles, chosen]
            return [_concatenate(h, t) for h, t in zip(handles, fetches, strict=True)]

        def place(*tensors: tf.Tensor) -> Flat:
            with tf.device(self._device):
                return run(*tensors)

        specs = [self._build_spec(index) for index in reads]
        # The graph may know its own call as one of a stack of one.
        specs += [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in results or []]
        return tf.compat.v1.wrap_function(place, specs)

    def _build_spec(self, index: int) -> tf.TensorSpec:
        tensor = self._inputs[index]
        if index in self._own:
            return tf.TensorSpec([None, *tensor.shape], tensor.dtype)
        return tf.TensorSpec(tensor.shape, tensor.dtype)


def build_stack_work(
    graph: tf.Graph,
    call: tf.Operation,
    shared: frozenset[int],
    device: str | None,
) -> StackWork | None:
    """Returns the work of stacks, None where clients must be done one by one.

    They must where something is drawn, or kept, around the call: two graphs, or one in
    a loop, would not draw as one graph does that is called again and again. And where
    what a client has of its own is no array; and, as it was not tried, on GPUs.

    Args:
        graph: The graph of one client's work.
        call: The call in it.
        shared: Which of the graph's inputs are the same for all clients.
        device: The device of the call, None for TensorFlow's choice.
    """
    if "GPU" in (device or "GPU") and tf.config.list_physical_devices("GPU"):
        return None
    inputs, outputs = list(graph.inputs), list(graph.outputs)
    own = [t for index, t in enumerate(inputs) if index not in shared]
    stacked, results = list(call.inputs), list(call.outputs)
    tensors = [*own, *stacked, *results]
    if not results or any(tensor.shape.rank is None for tensor in tensors):
        return None
    if not all(_is_number(tensor.dtype) for tensor in (*tensors, *outputs)):
        return None
    parts = [
        graph_cut.extract(graph, inputs, stacked),
        graph_cut.extract(graph, [*inputs, *results], outputs),
    ]
    if any(map(graph_cut.has_state, parts)):
        return None
    return StackWork(graph, call, shared, device)


def _stack(leaves: Leaves) -> tf.Tensor:
    """Returns the leaves of one shape, one for each client, as a stack."""
    first: np.ndarray = np.asarray(leaves[0])
    shape, size = (len(leaves), *first.shape), len(leaves) * first.nbytes
    # A tensor that begins where TensorFlow's own would is the array itself. Clients'
    # examples are too many to copy them twice more.
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    stack = memory[start : start + size].view(first.dtype).reshape(shape)
    for place, leaf in enumerate(leaves):
        stack[place] = leaf
    if not size or first.dtype == np.bool_:
        return tf.convert_to_tensor(stack)
    return tf.experimental.dlpack.from_dlpack(stack.__dlpack__())


def _is_number(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_integer or dtype.is_bool


def _find_expanded(tensor: tf.Tensor, inputs: Sequence[tf.Tensor]) -> int | None:
    """Returns which of a graph's inputs a tensor is, as a stack of one."""
    op = tensor.op
    if op.type != "ExpandDims" or op.control_inputs:
        return None
    if tf.get_static_value(op.inputs[1]) != 0:
        return None
    return next((n for n, given in enumerate(inputs) if given is op.inputs[0]), None)


def _find_finite(results: Sequence[tf.Tensor], size: tf.Tensor) -> tf.Tensor:
    """Returns for which clients of a stack all results are finite."""
    finite = tf.fill([size], True)
    for result in results:
        if result.dtype.is_floating:
            axes = list(range(1, result.shape.rank))
            finite &= tf.reduce_all(tf.math.is_finite(result), axis=axes)
    return finite


def _concatenate(handle: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Returns stacks of one as one stack."""
    stacks = tf.raw_ops.TensorListStack(
        input_handle=handle, element_shape=-1, element_dtype=tensor.dtype
    )
    stacks.set_shape([None, *tensor.shape])
    return tf.reshape(stacks, tf.concat([[-1], tf.shape(stacks)[2:]], 0))
