"""Parts of a graph as functions of their own."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Flat = list[tf.Tensor]
# An op of these has a state only where a function that it calls has an op with one.
CALLS = frozenset(
    {
        *("PartitionedCall", "StatefulPartitionedCall"),
        *("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile"),
    }
)
# Has a state in TensorFlow's words alone, so that nobody leaves it out.
_CHECK = "Assert"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a graph.

    Attributes:
        content: The nodes, and the functions that they call.
        feeds: The names of the tensors that are given, which have no node.
        fetches: The names of the tensors that are wanted.
    """

    content: tf.compat.v1.GraphDef
    feeds: tuple[str, ...]
    fetches: tuple[str, ...]


def cut(
    graph: tf.Graph, feeds: Sequence[tf.Tensor], fetches: Sequence[tf.Tensor]
) -> Callable[..., Flat]:
    """Returns a function that computes `fetches` from `feeds`, for use in a graph.

    Unlike `WrappedFunction.prune` it leaves out every op before the feeds, those with a
    state too, and it does not keep the feeds' shapes.
    """
    return build(extract(graph, feeds, fetches))


def extract(
    graph: tf.Graph, feeds: Sequence[tf.Tensor], fetches: Sequence[tf.Tensor]
) -> Part:
    """Returns what computes `fetches` from `feeds`, apart from its graph."""
    needed, content = {op.name for op in list_ops(fetches, feeds)}, graph.as_graph_def()
    part = tf.compat.v1.GraphDef(versions=content.versions, library=content.library)
    part.node.extend(node for node in content.node if node.name in needed)
    for node in part.node:
        kept = [s for s in node.input if not s.startswith("^") or s[1:] in needed]
        if len(kept) < len(node.input):
            del node.input[:]
            node.input.extend(kept)
    return Part(
        content=part,
        feeds=tuple(tensor.name for tensor in feeds),
        fetches=tuple(tensor.name for tensor in fetches),
    )


def build(part: Part) -> Callable[..., Flat]:
    """Returns a function that computes the fetches of a part, for use in a graph."""
    used = {source for node in part.content.node for source in node.input}
    # What is fed has no node here: the map alone says what it is.
    read = [index for index, name in enumerate(part.feeds) if _is_used(name, used)]

    def compute(*tensors: tf.Tensor) -> Flat:
        given = dict(zip(part.feeds, tensors, strict=True))
        computed = [name for name in part.fetches if name not in given]
        imported = tf.graph_util.import_graph_def(
            part.content,
            input_map={part.feeds[index]: tensors[index] for index in read},
            return_elements=computed,
            name="",
        )
        given |= dict(zip(computed, imported, strict=True))
        return [given[name] for name in part.fetches]

    return compute


def register(part: Part) -> None:
    """Makes this process's TensorFlow know the functions of a part, for good.

    Whoever calls a function that was built in a graph needs it: of imported functions
    `tf.function` does not tell those that run it, `wrap_function` does.
    """
    functions = tf.compat.v1.GraphDef(
        versions=part.content.versions, library=part.content.library
    )
    tf.compat.v1.wrap_function(
        lambda: tf.graph_util.import_graph_def(functions, name=""), []
    )


def wrap(
    compute: Callable[..., Flat], feeds: Sequence[tf.Tensor]
) -> tf.types.experimental.ConcreteFunction:
    """Returns a function that `cut` made as one that can be called."""
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in feeds]
    return tf.compat.v1.wrap_function(compute, specs)


def list_ops(
    fetches: Sequence[tf.Tensor], feeds: Sequence[tf.Tensor]
) -> list[tf.Operation]:
    """Returns the ops that compute `fetches` from `feeds`.

    To wait for an op whose output is fed is to wait for nothing.
    """
    known = {tensor.ref() for tensor in feeds}
    found: dict[str, tf.Operation] = {}
    pending = [tensor.op for tensor in fetches if tensor.ref() not in known]
    while pending:
        op = pending.pop()
        if op.name not in found:
            found[op.name] = op
            pending += [s.op for s in op.inputs if s.ref() not in known]
            pending += [
                source
                for source in op.control_inputs
                if not any(output.ref() in known for output in source.outputs)
            ]
    return list(found.values())


def find_used(fetches: Sequence[tf.Tensor], feeds: Sequence[tf.Tensor]) -> list[int]:
    """Returns which of the feeds are needed to compute `fetches` from them."""
    used = {tensor.ref() for tensor in fetches}
    for op in list_ops(fetches, feeds):
        used |= {source.ref() for source in op.inputs}
    return [index for index, tensor in enumerate(feeds) if tensor.ref() in used]


def has_state(part: Part) -> bool:
    """Whether to compute a part twice is something else than to compute it once.

    What checks its inputs alone has no state.
    """
    functions = {f.signature.name: f for f in part.content.library.function}
    known_ops = tf.Graph()
    pending, seen = list(part.content.node), set[str]()

    def look_into(attributes: Any) -> None:
        for attribute in attributes.values():
            for function in (attribute.func, *attribute.list.func):
                look_into(function.attr)
                if function.name in functions and function.name not in seen:
                    seen.add(function.name)
                    pending.extend(functions[function.name].node_def)

    while pending:
        node = pending.pop()
        try:
            is_stateful = known_ops.op_def_for_type(node.op).is_stateful
        except RuntimeError:
            return True
        if is_stateful and node.op not in CALLS and node.op != _CHECK:
            return True
        look_into(node.attr)
    return False


def _is_used(name: str, sources: set[str]) -> bool:
    return name in sources or name.removesuffix(":0") in sources
