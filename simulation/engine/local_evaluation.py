"""TFF's local building blocks (no placements), evaluated in a graph being built."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from simulation.engine import graph_import
from simulation.engine.graph_import import Value

Block: TypeAlias = tff.framework.ComputationBuildingBlock


class UnsupportedError(NotImplementedError):
    """The engine cannot run a computation."""


@dataclasses.dataclass(frozen=True)
class Closure:
    """A lambda with the values that were in scope.

    Attributes:
        block: The lambda.
        scope: Values by name.
    """

    block: tff.framework.Lambda
    scope: Mapping[str, Any]

    def bind(self, argument: Any) -> dict[str, Any]:
        """Returns the values that are in scope in a call."""
        if self.block.parameter_name is None:
            return dict(self.scope)
        return {**self.scope, self.block.parameter_name: argument}


Function: TypeAlias = (
    Closure | tff.framework.CompiledComputation | tff.framework.Intrinsic
)


def call(function: Function, argument: Value | None) -> Value:
    """Adds a call of a function to the graph that is being built."""
    if isinstance(function, tff.framework.CompiledComputation):
        return graph_import.import_computation(function, argument)
    if isinstance(function, Closure):
        return evaluate(function.block.result, function.bind(argument))
    raise UnsupportedError(f"a call of {describe(function)} is not supported")


def evaluate(block: Block, scope: Mapping[str, Any]) -> Any:
    """Adds a block to the graph that is being built, and returns its value."""
    if isinstance(block, tff.framework.Reference):
        return scope[block.name]
    if isinstance(block, tff.framework.Selection):
        return evaluate(block.source, scope)[get_index(block)]
    if isinstance(block, tff.framework.Struct):
        return tuple(
            evaluate(element, scope) for _, element in tff.structure.to_elements(block)
        )
    if isinstance(block, tff.framework.Literal):
        return build_constant(block)
    if isinstance(block, tff.framework.Lambda):
        return Closure(block, dict(scope))
    if isinstance(block, tff.framework.Block):
        inner = dict(scope)
        for name, local in block.locals:
            inner[name] = evaluate(local, inner)
        return evaluate(block.result, inner)
    if isinstance(block, tff.framework.Call):
        argument = block.argument
        return call(
            evaluate(block.function, scope),
            None if argument is None else evaluate(argument, scope),
        )
    if isinstance(block, tff.framework.CompiledComputation | tff.framework.Intrinsic):
        return block
    raise UnsupportedError(f"{describe(block)} is not supported")


def check(block: Block) -> None:
    """Raises UnsupportedError if a local block holds what `evaluate` cannot do."""

    def look(inner: Block) -> tuple[Block, bool]:
        is_foreign = isinstance(
            inner,
            tff.framework.Intrinsic | tff.framework.Data | tff.framework.Placement,
        )
        if is_foreign or (
            isinstance(inner, tff.framework.CompiledComputation)
            and inner.proto.WhichOneof("computation") != "tensorflow"
        ):
            raise UnsupportedError(f"{describe(inner)} is not supported")
        return inner, False

    tff.framework.transform_postorder(block, look)


def holds(block: Block, is_sought: Callable[[Block], bool]) -> bool:
    """Returns whether a block, or one inside it, is sought."""
    found = False

    def look(inner: Block) -> tuple[Block, bool]:
        nonlocal found
        found = found or is_sought(inner)
        return inner, False

    tff.framework.transform_postorder(block, look)
    return found


def has_state(function: Function) -> bool:
    """Whether it has variables or tables: a call must not overlap with another one."""
    return holds(
        function.block if isinstance(function, Closure) else function,
        lambda block: (
            isinstance(block, tff.framework.CompiledComputation)
            and graph_import.has_state(block)
        ),
    )


def get_index(selection: tff.framework.Selection) -> int:
    """Returns which element a selection selects."""
    if selection.index is not None:
        return selection.index
    names = [
        name for name, _ in tff.structure.to_elements(selection.source.type_signature)
    ]
    return names.index(selection.name)


def build_constant(literal: tff.framework.Literal) -> tf.Tensor:
    """Returns the tensor of a literal."""
    spec = graph_import.build_tensor_spec(literal.type_signature)
    return tf.constant(literal.value, dtype=spec.dtype)


def describe(block: Block) -> str:
    """Returns a block's name for messages."""
    if isinstance(block, tff.framework.Intrinsic):
        return f"`{block.uri}`"
    return f"{type(block).__name__} {block.compact_representation()[:80]}"
