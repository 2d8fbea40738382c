"""Functions of this process's TensorFlow, one for each stage of a plan.

A stage takes values that are known and gives values that are needed; everything between
is one graph. TFF's semantics hold: what no output needs is not computed.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf
import tensorflow_federated as tff

from simulation.engine import (
    devices,
    graph_import,
    local_evaluation,
    single_element,
)
from simulation.engine.graph_cut import Flat
from simulation.engine.graph_import import Value
from simulation.engine.local_evaluation import Closure
from simulation.engine.lockstep import find_lockstep
from simulation.engine.plan import Kind, Node, walk

T = TypeVar("T")


class Stage:
    """A function from the values of some nodes to the values of others."""

    def __init__(
        self,
        inputs: Sequence[Node],
        totals: Sequence[Node],
        outputs: Sequence[Node],
        *,
        slots: Sequence[str | None],
    ) -> None:
        """Builds the graphs.

        Args:
            inputs: The nodes whose values are given.
            totals: The aggregates for which the accumulated totals are given.
            outputs: The nodes whose values are wanted.
            slots: For each call that may overlap others, the device of its ops, None
                for TensorFlow's choice. A graph with variables is built for each.
        """
        devices.keep_sums_in_order()
        self.inputs = tuple(inputs)
        self.totals = tuple(totals)
        self.outputs = tuple(outputs)
        self._sizes = [
            len(graph_import.list_leaf_types(node.type_spec)) for node in self.outputs
        ]
        types = [node.type_spec for node in self.inputs]
        types += [node.inputs[1].type_spec for node in self.totals]
        self._types = types
        self._leaf_types = [
            leaf for kind in types for leaf in graph_import.list_leaf_types(kind)
        ]
        known = {*inputs, *totals}
        computed, _ = walk(outputs, known.__contains__)
        if any(map(_has_state, computed)):
            self._functions = [self._trace(device) for device in slots]
        else:
            built = {device: self._trace(device) for device in dict.fromkeys(slots)}
            self._functions = [built[device] for device in slots]
        opened = {
            f: single_element.open_sequences(f) for f in dict.fromkeys(self._functions)
        }
        # All come from the same nodes.
        self._opened = next(iter(opened.values()))[1]
        self._functions = [opened[function][0] for function in self._functions]
        placed = dict(zip(self._functions, slots, strict=True))
        found = {f: find_lockstep(f, device) for f, device in placed.items()}
        self._lockstep = [found[function] for function in self._functions]

    @property
    def group_size(self) -> int:
        """How many clients' work may be one call."""
        first = self._lockstep[0]
        return 1 if first is None else first.group_size

    def run(self, values: Sequence[Flat], *, slot: int = 0) -> list[Flat]:
        """Returns the values of the outputs.

        Args:
            values: Those of the inputs, then the totals.
            slot: Which of the calls that may overlap this one is.
        """
        return _split(self._functions[slot](*self._flatten(values)), self._sizes)

    def run_clients(
        self, readers: Sequence[Callable[[], Sequence[Flat]]], *, slot: int
    ) -> list[list[Flat] | Exception]:
        """Returns the values of the outputs for each client, or what it raised.

        Args:
            readers: For each client, what returns the values of the inputs.
            slot: Which of the calls that may overlap this one is.
        """
        inputs = [self._read(read) for read in readers]
        lockstep = self._lockstep[slot]
        together: dict[int, Flat | None] = {}
        if lockstep is not None:
            good = {n: f for n, f in enumerate(inputs) if not isinstance(f, Exception)}
            outputs = lockstep.run(list(good.values()))
            together = dict(zip(good, outputs, strict=True))
        found: list[list[Flat] | Exception] = []
        for number, flat in enumerate(inputs):
            result: Flat | Exception | None = together.get(number)
            if result is None and not isinstance(flat, Exception):
                result = self._run_one(flat, slot)
            elif result is None:
                result = flat
            if not isinstance(result, Exception):
                result = _split(result, self._sizes)
            found.append(result)
        return found

    def _flatten(self, values: Sequence[Flat]) -> Flat:
        """Returns what the functions take."""
        return single_element.flatten_inputs(
            _join(values), self._leaf_types, self._opened
        )

    def _read(self, read: Callable[[], Sequence[Flat]]) -> Flat | Exception:
        """Returns what the functions take of a client."""

        def flatten() -> Flat:
            return self._flatten(read())

        return _attempt(flatten)

    def _run_one(self, flat: Flat, slot: int) -> Flat | Exception:
        """Runs a client alone."""

        def run() -> Flat:
            return self._functions[slot](*flat)

        return _attempt(run)

    def _trace(self, device: str | None) -> Callable[..., Flat]:
        types = self._types

        def compute(*tensors: tf.Tensor) -> Flat:
            values = _unflatten_all(types, tensors)
            split = len(self.inputs)
            known = dict(zip(self.inputs, values[:split], strict=True))
            totals = dict(zip(self.totals, values[split:], strict=True))
            evaluator = _Evaluator(known, totals)
            return [
                tensor
                for node in self.outputs
                for tensor in graph_import.flatten(evaluator.compute(node))
            ]

        return _build_function(compute, types, device)


class Combination:
    """One step of several aggregates: a client's values, or other totals, are added."""

    def __init__(
        self, aggregates: Sequence[Node], *, device: str | None, merges: bool
    ) -> None:
        """Builds the graph.

        Args:
            aggregates: The aggregates.
            device: The device, None for TensorFlow's choice.
            merges: Whether totals are added, not a client's values.
        """
        self._sizes = [
            len(graph_import.list_leaf_types(node.inputs[1].type_spec))
            for node in aggregates
        ]
        total_types = [node.inputs[1].type_spec for node in aggregates]
        value_types = [node.inputs[0].type_spec for node in aggregates]
        types = [*total_types, *(total_types if merges else value_types)]

        def combine(*tensors: tf.Tensor) -> Flat:
            values = _unflatten_all(types, tensors)
            pairs = zip(
                values[: len(aggregates)], values[len(aggregates) :], strict=True
            )
            results = [
                local_evaluation.call(node.payload[merges], pair)
                for node, pair in zip(aggregates, pairs, strict=True)
            ]
            return [t for result in results for t in graph_import.flatten(result)]

        self._function = _build_function(combine, types, device)

    def combine(self, totals: Sequence[Flat], values: Sequence[Flat]) -> list[Flat]:
        """Returns the totals with values added."""
        return _split(self._function(*_join([*totals, *values])), self._sizes)


def _attempt(run: Callable[[], T]) -> T | Exception:
    """Returns the result, or what was raised: whatever that is, it is a client's."""
    try:
        return run()
    except Exception as error:
        return error
    except SystemExit as error:
        return RuntimeError(f"it asked to exit with {error.code!r}")


def _join(values: Sequence[Flat]) -> Flat:
    return [tensor for value in values for tensor in value]


def _split(tensors: Flat, sizes: Sequence[int]) -> list[Flat]:
    """Returns the tensors in runs of these sizes."""
    remaining = iter(tensors)
    return [[next(remaining) for _ in range(size)] for size in sizes]


def _unflatten_all(
    types: Sequence[tff.Type], tensors: Sequence[tf.Tensor]
) -> list[Value]:
    remaining = iter(tensors)

    def take(leaf: tff.Type) -> tf.Tensor:
        tensor = next(remaining)
        if isinstance(leaf, tff.SequenceType):
            return graph_import.tame_sequence(tensor, leaf)
        return tensor

    return [
        graph_import.unflatten(
            kind, [take(leaf) for leaf in graph_import.list_leaf_types(kind)]
        )
        for kind in types
    ]


def _build_function(
    compute: Callable[..., Flat], types: Sequence[tff.Type], device: str | None
) -> Callable[..., Flat]:
    """Returns a compiled function of the leaves of these types."""
    specs = [
        graph_import.build_tensor_spec(leaf)
        for type_spec in types
        for leaf in graph_import.list_leaf_types(type_spec)
    ]

    def place(*tensors: tf.Tensor) -> Flat:
        with tf.device(device):
            return compute(*tensors)

    # Not tf.function: it would run stateful ops that no output needs, and order them.
    return tf.compat.v1.wrap_function(place, specs)


class _Evaluator:
    """The values of nodes in a graph that is being built."""

    def __init__(self, known: dict[Node, Value], totals: dict[Node, Value]) -> None:
        self._values = dict(known)
        self._totals = totals

    def compute(self, node: Node) -> Value:
        """Returns the value of a node."""
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: Node) -> Value:
        if node.kind is Kind.LITERAL:
            return local_evaluation.build_constant(node.payload)
        if node.kind is Kind.STRUCT:
            return tuple(self.compute(source) for source in node.inputs)
        if node.kind is Kind.SELECT:
            return self.compute(node.inputs[0])[node.payload]
        if node.kind is Kind.BROADCAST:
            return self.compute(node.inputs[0])
        if node.kind is Kind.AGGREGATE:
            report = node.payload[2]
            return local_evaluation.call(report, self._totals[node])
        if node.kind is Kind.APPLY:
            argument = self.compute(node.inputs[0]) if node.inputs else None
            return local_evaluation.call(node.payload, argument)
        raise ValueError(f"`inputs` must hold every parameter. Found {node!r}.")


def _has_state(node: Node) -> bool:
    if node.kind is not Kind.APPLY:
        return False
    function = node.payload
    return local_evaluation.holds(
        function.block if isinstance(function, Closure) else function,
        lambda block: (
            isinstance(block, tff.framework.CompiledComputation)
            and graph_import.has_state(block)
        ),
    )
