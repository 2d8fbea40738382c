"""What the clients of a stack computed: a list of tensors for each output."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from simulation.engine.graph_cut import Flat

_ANY_SHAPE = -1


class StackOutputs:
    """The outputs of some clients.

    Attributes:
        handles: For each output the clients' tensors, as TensorFlow's list ops take
            them.
        dtypes: The outputs' types.
        num_clients: How many clients they are.
    """

    def __init__(
        self, handles: Flat, dtypes: Sequence[tf.DType], num_clients: int
    ) -> None:
        self.handles, self.dtypes = tuple(handles), tuple(dtypes)
        self.num_clients = num_clients
        self._columns: dict[int, Sequence[np.ndarray]] = {}

    def get(self, output: int, place: int) -> Any:
        """Returns one client's output as an array that nobody else has."""
        if output not in self._columns:
            self._columns[output] = self._read(output)
        value = self._columns[output][place]
        # A number of a scalar's type, as of a tensor's own `numpy`.
        return value.copy() if isinstance(value, np.ndarray) else value

    def _read(self, output: int) -> Sequence[np.ndarray]:
        """Returns all clients' values of an output."""
        handle, dtype = self.handles[output], self.dtypes[output]
        choices = {"element_shape": _ANY_SHAPE, "element_dtype": dtype}
        try:
            return tf.raw_ops.TensorListStack(
                input_handle=handle, num_elements=self.num_clients, **choices
            ).numpy()
        except tf.errors.InvalidArgumentError:
            # Their shapes differ.
            return [
                tf.raw_ops.TensorListGetItem(
                    input_handle=handle, index=place, **choices
                ).numpy()
                for place in range(self.num_clients)
            ]


class Row(Sequence[Any]):
    """One client's outputs.

    Attributes:
        stack: All clients'.
        place: Which of them the client is.
    """

    def __init__(self, stack: StackOutputs, place: int) -> None:
        self.stack, self.place = stack, place

    def __len__(self) -> int:
        return len(self.stack.handles)

    def __getitem__(self, output: Any) -> Any:
        if isinstance(output, slice):
            return [self[number] for number in range(len(self))[output]]
        return self.stack.get(range(len(self))[output], self.place)


def join_rows(rows: Sequence[Row], num_outputs: int) -> tuple[Flat, np.ndarray]:
    """Returns the first outputs as lists of tensors, and where in them each client is.

    Args:
        rows: The clients' outputs, which may come from several stacks.
        num_outputs: How many of the outputs.
    """
    starts: dict[StackOutputs, int] = {}
    length = 0
    for row in rows:
        if row.stack not in starts:
            starts[row.stack] = length
            length += row.stack.num_clients
    handles: list[tf.Tensor] = []
    for number, dtype in enumerate(rows[0].stack.dtypes[:num_outputs]):
        first, *others = (stack.handles[number] for stack in starts)
        for other in others:
            first = tf.raw_ops.TensorListConcatLists(
                input_a=first, input_b=other, element_dtype=dtype
            )
        handles.append(first)
    places = [starts[row.stack] + row.place for row in rows]
    return handles, np.array(places, np.int32)


def reserve(dtypes: Sequence[tf.DType], size: tf.Tensor) -> Flat:
    """Returns an empty list of tensors for each type, for use in a graph."""
    return [
        tf.raw_ops.TensorListReserve(
            element_shape=_ANY_SHAPE, num_elements=size, element_dtype=dtype
        )
        for dtype in dtypes
    ]


def write(handles: Sequence[tf.Tensor], place: tf.Tensor, items: Flat) -> Flat:
    """Returns the lists with one client's tensors in them, for use in a graph."""
    return [
        tf.raw_ops.TensorListSetItem(input_handle=handle, index=place, item=item)
        for handle, item in zip(handles, items, strict=True)
    ]


def read(
    handles: Sequence[tf.Tensor], place: tf.Tensor, specs: Sequence[tf.TensorSpec]
) -> Flat:
    """Returns one client's tensors of the lists, for use in a graph."""
    items = [
        tf.raw_ops.TensorListGetItem(
            input_handle=handle,
            index=place,
            element_shape=_ANY_SHAPE,
            element_dtype=spec.dtype,
        )
        for handle, spec in zip(handles, specs, strict=True)
    ]
    for item, spec in zip(items, specs, strict=True):
        item.set_shape(spec.shape)
    return items
