"""Functions of this process's TensorFlow, one for each stage of a plan.

A stage takes values that are known and gives values that are needed; everything between
is one graph. TFF's semantics hold: what no output needs is not computed.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

from simulation.engine import (
    devices,
    graph_import,
    leaf_function,
    local_evaluation,
    single_element,
)
from simulation.engine.graph_cut import Flat
from simulation.engine.graph_import import Value
from simulation.engine.leaf_function import Leaves
from simulation.engine.lockstep import find_lockstep
from simulation.engine.pass_plan import is_one_value
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
        shared = self._find_shared()
        found = {
            function: find_lockstep(function, device, shared=shared)
            for function, device in placed.items()
        }
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
        return self.split(self._functions[slot](*self._flatten(values)))

    def read(self, read: Callable[[], Sequence[Leaves]]) -> Leaves | Exception:
        """Returns what the functions take of a client, or what it raised.

        Args:
            read: Returns the values of the inputs.
        """

        def flatten() -> Leaves:
            return self._flatten(read())

        return _attempt(flatten)

    def run_clients(
        self, inputs: Sequence[Leaves | Exception], *, slot: int
    ) -> list[Leaves | Exception]:
        """Returns the outputs' leaves for each client, or what it raised.

        Args:
            inputs: For each client what `read` returns.
            slot: Which of the calls that may overlap this one is.
        """
        lockstep = self._lockstep[slot]
        together: dict[int, Leaves | None] = {}
        if lockstep is not None:
            good = {n: f for n, f in enumerate(inputs) if not isinstance(f, Exception)}
            ran = lockstep.run(list(good.values()))
            together = dict(zip(good, ran, strict=True))
        found: list[Leaves | Exception] = []
        for number, flat in enumerate(inputs):
            outputs = together.get(number)
            if outputs is not None:
                found.append(outputs)
            elif isinstance(flat, Exception):
                found.append(flat)
            else:
                found.append(self._run_one(flat, slot))
        return found

    def split(self, leaves: Leaves, *, first: int = 0) -> list[Flat]:
        """Returns the values of the outputs, from the `first` one on."""
        start = sum(self._sizes[:first])
        return leaf_function.split(leaves[start:], self._sizes[first:])

    def _find_shared(self) -> frozenset[int]:
        """Returns which inputs of the functions are the same for all clients."""
        nodes = [*self.inputs, *self.totals]
        is_shared = [
            node.kind is Kind.BROADCAST or is_one_value(node)
            for node, kind in zip(nodes, self._types, strict=True)
            for _ in graph_import.list_leaf_types(kind)
        ]
        found: list[bool] = []
        for index, (shared, leaf) in enumerate(
            zip(is_shared, self._leaf_types, strict=True)
        ):
            is_opened = index in self._opened
            parts = graph_import.list_leaf_types(leaf.element) if is_opened else [leaf]
            found += [shared] * len(parts)
        return frozenset(index for index, shared in enumerate(found) if shared)

    def _flatten(self, values: Sequence[Leaves]) -> Leaves:
        """Returns what the functions take."""
        return single_element.flatten_inputs(
            leaf_function.join(values), self._leaf_types, self._opened
        )

    def _run_one(self, flat: Leaves, slot: int) -> Flat | Exception:
        """Runs a client alone."""

        def run() -> Flat:
            return self._functions[slot](*map(tf.convert_to_tensor, flat))

        return _attempt(run)

    def _trace(self, device: str | None) -> Callable[..., Flat]:
        types = self._types

        def compute(*tensors: tf.Tensor) -> Flat:
            values = leaf_function.unflatten(types, tensors)
            split = len(self.inputs)
            known = dict(zip(self.inputs, values[:split], strict=True))
            totals = dict(zip(self.totals, values[split:], strict=True))
            evaluator = _Evaluator(known, totals)
            return [
                tensor
                for node in self.outputs
                for tensor in graph_import.flatten(evaluator.compute(node))
            ]

        return leaf_function.build(compute, types, device)


def _attempt(run: Callable[[], T]) -> T | Exception:
    """Returns the result, or what was raised: whatever that is, it is a client's."""
    try:
        return run()
    except Exception as error:
        return error
    except SystemExit as error:
        return RuntimeError(f"it asked to exit with {error.code!r}")


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
    return node.kind is Kind.APPLY and local_evaluation.has_state(node.payload)
