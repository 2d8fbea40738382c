"""One step of a pass's aggregates: clients' values, or other totals, are added."""

import threading
from collections.abc import Callable, Sequence

import tensorflow as tf

from simulation.engine import (
    graph_import,
    leaf_function,
    local_evaluation,
    stack_output,
)
from simulation.engine.graph_cut import Flat
from simulation.engine.leaf_function import Leaves
from simulation.engine.plan import Node
from simulation.engine.stack_output import Row


class Combination:
    """One step of several aggregates.

    Attributes:
        can_fold: Whether many clients may be added in one call.
    """

    def __init__(
        self, aggregates: Sequence[Node], *, device: str | None, merges: bool
    ) -> None:
        """Builds the graph.

        Args:
            aggregates: The aggregates.
            device: The device, None for TensorFlow's choice.
            merges: Whether totals are added, not a client's values.
        """
        self._steps = [node.payload[merges] for node in aggregates]
        self._sizes = [
            len(graph_import.list_leaf_types(node.inputs[1].type_spec))
            for node in aggregates
        ]
        total_types = [node.inputs[1].type_spec for node in aggregates]
        value_types = [node.inputs[0].type_spec for node in aggregates]
        self._types = [*total_types, *(total_types if merges else value_types)]
        self._device = device
        self._function = leaf_function.build(self._combine, self._types, device)
        specs = leaf_function.list_specs(self._types)
        self._total_specs = specs[: sum(self._sizes)]
        self._value_specs = specs[sum(self._sizes) :]
        # What is drawn, or kept, once for each client would be so once for all.
        self.can_fold = not any(map(local_evaluation.has_state, self._steps)) and all(
            spec.dtype != tf.variant for spec in specs
        )
        self._lock = threading.Lock()
        self._fold: Callable[..., Flat] | None = None

    def combine(self, totals: Sequence[Leaves], values: Sequence[Leaves]) -> list[Flat]:
        """Returns the totals with values added."""
        tensors = map(tf.convert_to_tensor, leaf_function.join([*totals, *values]))
        return leaf_function.split(self._function(*tensors), self._sizes)

    def fold(self, totals: Sequence[Flat], rows: Sequence[Row]) -> list[Flat]:
        """Returns the totals with clients' values added, one client after the other.

        The same sums as by `combine`, in the same order, in one call.

        Args:
            totals: The totals.
            rows: The clients' outputs: first the values, then others.
        """
        with self._lock:
            if self._fold is None:
                self._fold = self._build_fold()
        handles, places = stack_output.join_rows(rows, len(self._value_specs))
        tensors = [*leaf_function.join(totals), *handles, tf.convert_to_tensor(places)]
        return leaf_function.split(self._fold(*tensors), self._sizes)

    def _combine(self, *tensors: tf.Tensor) -> Flat:
        values = leaf_function.unflatten(self._types, tensors)
        pairs = zip(values[: len(self._steps)], values[len(self._steps) :], strict=True)
        results = [
            local_evaluation.call(step, pair)
            for step, pair in zip(self._steps, pairs, strict=True)
        ]
        return [t for result in results for t in graph_import.flatten(result)]

    def _build_fold(self) -> Callable[..., Flat]:
        """Returns the function of totals, lists of values, and places in the lists."""
        num_totals = len(self._total_specs)

        def fold(*tensors: tf.Tensor) -> Flat:
            *handles, places = tensors[num_totals:]

            def step(number: tf.Tensor, *totals: tf.Tensor) -> Flat:
                values = stack_output.read(handles, places[number], self._value_specs)
                added = self._combine(*totals, *values)
                for tensor, spec in zip(added, self._total_specs, strict=True):
                    tensor.set_shape(spec.shape)
                return [number + 1, *added]

            _, *totals = tf.while_loop(
                lambda number, *_: number < tf.size(places),
                step,
                [tf.constant(0), *tensors[:num_totals]],
                parallel_iterations=1,
            )
            return totals

        specs = [
            *self._total_specs,
            *(tf.TensorSpec([], tf.variant) for _ in self._value_specs),
            tf.TensorSpec([None], tf.int32),
        ]
        return leaf_function.build_of_specs(fold, specs, self._device)
