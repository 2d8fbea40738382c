"""From a compiled TFF computation to what must be computed, where, and in which pass.

TFF's compiler gives call-dominant form: a list of intrinsics. Here it becomes a graph
of nodes, each a value at the server or at every client. Levels order them: an aggregate
lies one above the clients' values that it sums, and whatever needs it lies at least
there. The server's nodes of a level are computed together, then the clients' values
that the next level's aggregates need, in one pass over the cohort.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow_federated as tff

from simulation.engine import local_evaluation
from simulation.engine.local_evaluation import (
    Block,
    Closure,
    Function,
    UnsupportedError,
    describe,
)


class Place(enum.Enum):
    """Where a value is. What TFF does not place is at the server."""

    SERVER = "server"
    CLIENTS = "clients"


class Kind(enum.Enum):
    """How a node's value comes about."""

    PARAMETER = "parameter"
    LITERAL = "literal"
    STRUCT = "struct"
    SELECT = "select"
    APPLY = "apply"
    BROADCAST = "broadcast"
    AGGREGATE = "aggregate"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """A value at the server, or one at every client.

    Attributes:
        kind: How it comes about.
        place: Where it is.
        type_spec: Its type, at one client where it is at the clients.
        inputs: What it is made of.
        payload: SELECT: the index. APPLY: the function. AGGREGATE: accumulate, merge
            and report. LITERAL: the block. PARAMETER: the path in the argument.
        all_equal: Whether all clients hold the same value.
    """

    kind: Kind
    place: Place
    type_spec: tff.Type
    inputs: tuple["Node", ...] = ()
    payload: Any = None
    all_equal: bool = False

    @property
    def is_costly(self) -> bool:
        """Whether a second evaluation would cost time or draw other random numbers."""
        return self.kind is Kind.APPLY


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a computation does.

    Attributes:
        parameters: The leaves of the argument that are placed or whole.
        result: A node, or a tuple of results.
        levels: The level of every node.
        num_levels: The largest level of all, plus one.
    """

    parameters: tuple[Node, ...]
    result: Any
    levels: Mapping[Node, int]
    num_levels: int


def build_plan(computation: tff.framework.ConcreteComputation) -> Plan:
    """Builds the plan of a compiled computation.

    Raises:
        UnsupportedError: If it holds what this engine cannot run.
    """
    block = computation.to_building_block()
    builder = _Builder()
    if isinstance(block, tff.framework.Lambda):
        scope = {}
        if block.parameter_name is not None:
            scope[block.parameter_name] = builder.build_parameter(block.parameter_type)
        result = builder.evaluate(block.result, scope)
    elif isinstance(block, tff.framework.CompiledComputation):
        parameter = block.type_signature.parameter
        argument = None if parameter is None else builder.build_parameter(parameter)
        result = builder.apply(block, argument, Place.SERVER, block.type_signature)
    else:
        raise UnsupportedError(f"{describe(block)} is not supported")
    levels: dict[Node, int] = {}
    for node in list_nodes(result):
        _compute_level(node, levels)
    return Plan(
        parameters=tuple(builder.parameters),
        result=result,
        levels=levels,
        num_levels=1 + max(levels.values(), default=0),
    )


def list_nodes(result: Any) -> list[Node]:
    """Returns the nodes of a result, in order."""
    if isinstance(result, tuple):
        return [node for element in result for node in list_nodes(element)]
    return [result]


def walk(
    roots: Iterable[Node], is_known: Callable[[Node], bool]
) -> tuple[list[Node], list[Node]]:
    """Returns what roots are made of.

    Args:
        roots: The nodes to make.
        is_known: Whether a node's value is given: what it is made of is not walked.

    Returns:
        The nodes to compute, and the known ones that they need.
    """
    passed: dict[Node, None] = {}
    known: dict[Node, None] = {}
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in passed or node in known:
            continue
        if is_known(node):
            known[node] = None
        else:
            passed[node] = None
            pending.extend(node.inputs)
    return list(passed), list(known)


def _compute_level(node: Node, levels: dict[Node, int]) -> int:
    if node not in levels:
        inputs = [_compute_level(source, levels) for source in node.inputs]
        above = node.kind is Kind.AGGREGATE
        levels[node] = max(inputs, default=0) + above
    return levels[node]


class _Builder:
    """Evaluates the outer block, with nodes for values."""

    def __init__(self) -> None:
        self.parameters: list[Node] = []

    def build_parameter(self, type_spec: tff.Type, path: tuple[int, ...] = ()) -> Any:
        """Returns a node for each placed part and each tensor of the argument."""
        if isinstance(type_spec, tff.StructType):
            return tuple(
                self.build_parameter(kind, (*path, index))
                for index, (_, kind) in enumerate(tff.structure.to_elements(type_spec))
            )
        node = Node(
            kind=Kind.PARAMETER,
            place=_get_place(type_spec),
            type_spec=_get_member(type_spec),
            payload=path,
            all_equal=isinstance(type_spec, tff.FederatedType) and type_spec.all_equal,
        )
        self.parameters.append(node)
        return node

    def evaluate(self, block: Block, scope: Mapping[str, Any]) -> Any:
        """Returns a node, a tuple of values, or a function."""
        if isinstance(block, tff.framework.Reference):
            return scope[block.name]
        if isinstance(block, tff.framework.Selection):
            return self._select(block, scope)
        if isinstance(block, tff.framework.Struct):
            return tuple(
                self.evaluate(part, scope)
                for _, part in tff.structure.to_elements(block)
            )
        if isinstance(block, tff.framework.Literal):
            return Node(
                kind=Kind.LITERAL,
                place=Place.SERVER,
                type_spec=block.type_signature,
                payload=block,
            )
        if isinstance(block, tff.framework.Lambda):
            return Closure(block, dict(scope))
        if isinstance(block, tff.framework.Block):
            inner = dict(scope)
            for name, local in block.locals:
                inner[name] = self.evaluate(local, inner)
            return self.evaluate(block.result, inner)
        if isinstance(block, tff.framework.Call):
            return self._call(block, scope)
        if isinstance(
            block, tff.framework.CompiledComputation | tff.framework.Intrinsic
        ):
            return block
        raise UnsupportedError(f"{describe(block)} is not supported")

    def apply(
        self,
        function: Function,
        argument: Any,
        place: Place,
        signature: tff.FunctionType,
        *,
        all_equal: bool = False,
    ) -> Node:
        """Returns the node of a local function's result."""
        _check_local(function)
        inputs: tuple[Node, ...] = ()
        if signature.parameter is not None:
            inputs = (self._as_node(argument, _get_member(signature.parameter), place),)
        return Node(
            kind=Kind.APPLY,
            place=place,
            type_spec=signature.result,
            inputs=inputs,
            payload=function,
            all_equal=all_equal,
        )

    def _select(self, block: tff.framework.Selection, scope: Mapping[str, Any]) -> Any:
        source = self.evaluate(block.source, scope)
        index = local_evaluation.get_index(block)
        if isinstance(source, tuple):
            return source[index]
        return self._select_element(source, index)

    def _select_element(self, source: Node, index: int) -> Node:
        if source.kind is Kind.STRUCT:
            return source.inputs[index]
        return Node(
            kind=Kind.SELECT,
            place=source.place,
            type_spec=source.type_spec[index],
            inputs=(source,),
            payload=index,
            all_equal=source.all_equal,
        )

    def _call(self, block: tff.framework.Call, scope: Mapping[str, Any]) -> Any:
        function = self.evaluate(block.function, scope)
        argument = None
        if block.argument is not None:
            argument = self.evaluate(block.argument, scope)
        if isinstance(function, tff.framework.Intrinsic):
            return self._call_intrinsic(function, argument, block)
        if isinstance(function, Closure):
            return self.evaluate(function.block.result, function.bind(argument))
        if isinstance(function, tff.framework.CompiledComputation):
            return self.apply(function, argument, Place.SERVER, function.type_signature)
        raise UnsupportedError(f"{describe(block)} is not supported")

    def _call_intrinsic(
        self, intrinsic: tff.framework.Intrinsic, argument: Any, block: Block
    ) -> Node:
        uri = intrinsic.uri
        result = block.type_signature
        if uri in _APPLYING:
            function, value = argument
            place = _APPLYING[uri]
            parameter = intrinsic.type_signature.parameter
            return self.apply(
                function, value, place, parameter[0], all_equal=result.all_equal
            )
        if uri in _EVALUATING:
            signature = tff.FunctionType(None, result.member)
            return self.apply(argument, None, _EVALUATING[uri], signature)
        if uri == tff.framework.FEDERATED_VALUE_AT_SERVER.uri:
            return self._as_node(argument, result.member, Place.SERVER)
        if uri in _BROADCASTING:
            source = self._as_node(argument, result.member, Place.SERVER)
            return Node(
                kind=Kind.BROADCAST,
                place=Place.CLIENTS,
                type_spec=result.member,
                inputs=(source,),
                all_equal=True,
            )
        if uri in _ZIPPING:
            return self._as_node(argument, result.member, _ZIPPING[uri])
        if uri == tff.framework.FEDERATED_AGGREGATE.uri:
            return self._aggregate(argument, intrinsic.type_signature.parameter, result)
        raise UnsupportedError(
            f"`{uri}` is not supported by the local engine; use --engine=tff"
        )

    def _aggregate(
        self, argument: Any, parameter: tff.StructType, result: tff.FederatedType
    ) -> Node:
        value, zero, *functions = argument
        for function in functions:
            _check_local(function)
        return Node(
            kind=Kind.AGGREGATE,
            place=Place.SERVER,
            type_spec=result.member,
            inputs=(
                self._as_node(value, _get_member(parameter[0]), Place.CLIENTS),
                self._as_node(zero, parameter[1], Place.SERVER),
            ),
            payload=tuple(functions),
        )

    def _as_node(self, value: Any, type_spec: tff.Type, place: Place) -> Node:
        """Returns one node for a structure of nodes."""
        if isinstance(value, Node):
            return value
        if not isinstance(value, tuple):
            raise UnsupportedError(f"a function as a value at the {place.value}")
        kinds = [kind for _, kind in tff.structure.to_elements(type_spec)]
        inputs = tuple(
            self._as_node(part, _get_member(kind), place)
            for part, kind in zip(value, kinds, strict=True)
        )
        return Node(
            kind=Kind.STRUCT,
            place=place,
            type_spec=type_spec,
            inputs=inputs,
            all_equal=all(node.all_equal for node in inputs),
        )


_APPLYING = {
    tff.framework.FEDERATED_APPLY.uri: Place.SERVER,
    tff.framework.FEDERATED_MAP.uri: Place.CLIENTS,
    tff.framework.FEDERATED_MAP_ALL_EQUAL.uri: Place.CLIENTS,
}
_EVALUATING = {
    tff.framework.FEDERATED_EVAL_AT_SERVER.uri: Place.SERVER,
    tff.framework.FEDERATED_EVAL_AT_CLIENTS.uri: Place.CLIENTS,
}
_BROADCASTING = {
    tff.framework.FEDERATED_BROADCAST.uri,
    tff.framework.FEDERATED_VALUE_AT_CLIENTS.uri,
}
_ZIPPING = {
    tff.framework.FEDERATED_ZIP_AT_SERVER.uri: Place.SERVER,
    tff.framework.FEDERATED_ZIP_AT_CLIENTS.uri: Place.CLIENTS,
}


def _get_place(type_spec: tff.Type) -> Place:
    if isinstance(type_spec, tff.FederatedType) and type_spec.placement is tff.CLIENTS:
        return Place.CLIENTS
    return Place.SERVER


def _get_member(type_spec: tff.Type) -> tff.Type:
    return type_spec.member if isinstance(type_spec, tff.FederatedType) else type_spec


def _check_local(function: Function) -> None:
    """Raises UnsupportedError where a function cannot be part of a graph."""
    if isinstance(function, Closure):
        local_evaluation.check(function.block)
        for name, value in function.scope.items():
            # What is in scope but not used is no matter; a use of it would be.
            if isinstance(value, Node | tuple) and _refers_to(function.block, name):
                raise UnsupportedError(
                    f"a function that takes {name!r} from around it is not supported"
                )
    elif isinstance(function, tff.framework.CompiledComputation):
        local_evaluation.check(function)
    else:
        raise UnsupportedError(f"{describe(function)} as a function is not supported")


def _refers_to(block: Block, name: str) -> bool:
    return local_evaluation.holds(
        block,
        lambda inner: isinstance(inner, tff.framework.Reference) and inner.name == name,
    )
