"""A plan with the server's compiled stages, ready to run."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow_federated as tff

from simulation.engine import arguments, pass_plan
from simulation.engine.client_pass import PassInputs, PassRunner
from simulation.engine.client_value import ClientValue
from simulation.engine.graph_cut import Flat
from simulation.engine.leaf_function import Leaves
from simulation.engine.pass_plan import PassPlan
from simulation.engine.plan import Kind, Node, Place, Plan, list_nodes, walk
from simulation.engine.stage import Stage


class Program:
    """Runs one computation: the server's part here, the clients' in passes.

    Attributes:
        passes: The pass that follows each level, None where clients do nothing.
    """

    def __init__(
        self, plan: Plan, result_type: tff.Type, *, device: str | None
    ) -> None:
        """Compiles what the server does.

        Args:
            plan: What to do.
            result_type: The type of the result, with its Python containers.
            device: The server's device, None for TensorFlow's choice.
        """
        self._plan = plan
        self._result_type = result_type
        self.passes = pass_plan.plan_passes(plan)
        self._stages = self._build_stages(device)

    def run(
        self,
        argument: Any,
        parameter_type: tff.Type | None,
        *,
        num_clients: int,
        run_pass: PassRunner,
    ) -> Any:
        """Returns the result for an argument.

        Args:
            argument: The argument.
            parameter_type: Its type.
            num_clients: The number of clients.
            run_pass: Runs a pass over them.
        """
        values, client_values = self._take_argument(argument, parameter_type)
        totals: dict[Node, Flat] = {}
        for level in range(self._plan.num_levels):
            stage = self._stages[level]
            if stage is not None:
                inputs = [values[node] for node in stage.inputs]
                inputs += [totals[node] for node in stage.totals]
                values.update(zip(stage.outputs, stage.run(inputs), strict=True))
            current = self.passes[level]
            if current is not None:
                given = _give(current, num_clients, values, client_values)
                result = run_pass(level, given)
                totals.update(zip(current.aggregates, result.totals, strict=True))
                for node, column in zip(current.targets, result.kept, strict=True):
                    client_values[node] = _Kept(column)
        return self._build_result(
            self._plan.result, self._result_type, values, client_values
        )

    def _take_argument(
        self, argument: Any, parameter_type: tff.Type | None
    ) -> tuple[dict[Node, Flat], dict[Node, "_Given | _Kept"]]:
        """Returns the values of the parameters: whole ones, and readers by client."""
        values: dict[Node, Flat] = {}
        client_values: dict[Node, _Given | _Kept] = {}
        for node in self._plan.parameters:
            part, name = _find_part(argument, parameter_type, node.payload)
            if node.place is Place.CLIENTS and not node.all_equal:
                client_values[node] = _Given(part, node.type_spec, name)
            else:
                values[node] = arguments.flatten_value(part, node.type_spec, name)
        return values, client_values

    def _build_result(
        self,
        result: Any,
        type_spec: tff.Type,
        values: Mapping[Node, Flat],
        client_values: Mapping[Node, "_Given | _Kept"],
    ) -> Any:
        if isinstance(result, tuple):
            elements = [
                (name, self._build_result(part, kind, values, client_values))
                for part, (name, kind) in zip(
                    result, tff.structure.to_elements(type_spec), strict=True
                )
            ]
            return tff.types.type_to_py_container(
                tff.structure.Struct(elements), type_spec
            )
        member = (
            type_spec.member if isinstance(type_spec, tff.FederatedType) else type_spec
        )
        if pass_plan.is_one_value(result):
            return arguments.build_result(values[result], member)
        reader = client_values[result]
        found = [reader.get(index) for index in range(reader.num_clients)]
        return arguments.build_results([flat for flat in found if flat], member)

    def _build_stages(self, device: str | None) -> list[Stage | None]:
        """Returns the server's function of each level, None where it has none."""
        levels = self._plan.levels
        needed: list[dict[Node, None]] = [{} for _ in range(self._plan.num_levels)]

        def need(node: Node) -> None:
            if node.kind is not Kind.PARAMETER:
                needed[levels[node]][node] = None

        for node in list_nodes(self._plan.result):
            if pass_plan.is_one_value(node):
                need(node)
        for current in filter(None, self.passes):
            for node in current.aggregates:
                need(node.inputs[1])
            for node in current.inputs:
                if node.kind is Kind.BROADCAST:
                    need(node.inputs[0])
        stages: list[Stage | None] = []
        for level in reversed(range(self._plan.num_levels)):
            outputs = list(needed[level])
            inputs, totals = _find_server_inputs(outputs, level, levels)
            for node in inputs:
                need(node)
            stage = None
            if outputs:
                stage = Stage(inputs, totals, outputs, slots=[device])
            stages.append(stage)
        return stages[::-1]


def _find_server_inputs(
    outputs: Sequence[Node], level: int, levels: Mapping[Node, int]
) -> tuple[list[Node], list[Node]]:
    """Returns what a level's stage is given: known nodes, and aggregates' totals."""

    def is_input(node: Node) -> bool:
        return node.kind is Kind.PARAMETER or levels[node] < level

    _, known = walk(outputs, lambda n: is_input(n) or n.kind is Kind.AGGREGATE)
    totals = [node for node in known if not is_input(node)]
    return [node for node in known if is_input(node)], totals


def _give(
    current: PassPlan,
    num_clients: int,
    values: Mapping[Node, Flat],
    client_values: Mapping[Node, "_Given | _Kept"],
) -> PassInputs:
    """Returns what a pass is given."""
    shared, readers = {}, {}
    for position, node in enumerate(current.inputs):
        if node in client_values:
            readers[position] = client_values[node]
        else:
            source = node.inputs[0] if node.kind is Kind.BROADCAST else node
            shared[position] = values[source]
    zeros = [values[node.inputs[1]] for node in current.aggregates]
    return PassInputs(
        num_clients=num_clients, shared=shared, readers=readers, zeros=zeros
    )


def _find_part(
    argument: Any, type_spec: tff.Type | None, path: Sequence[int]
) -> tuple[Any, str]:
    """Returns the part of an argument at a path, and its name for messages."""
    name = "argument"
    for index in path:
        if not isinstance(type_spec, tff.StructType):
            raise TypeError(f"`{name}` must be a structure. Found {type_spec}.")
        element, kind = list(tff.structure.to_elements(type_spec))[index]
        argument = arguments.split_elements(argument, type_spec, name)[index]
        name, type_spec = (f"{name}.{element}" if element else f"{name}[{index}]"), kind
    return argument, name


class _Given:
    """The clients' values in an argument, each taken when its turn comes."""

    def __init__(self, part: Sequence[Any], type_spec: tff.Type, name: str) -> None:
        self._part, self._type_spec, self._name = part, type_spec, name
        self.num_clients = len(part)

    def read(self, index: int) -> Leaves:
        """Returns one client's value."""
        value, name = self._part[index], f"{self._name}[{index}]"
        if isinstance(value, ClientValue):
            value = value.make()
        return arguments.flatten_leaves(value, self._type_spec, name)

    def get_maker(self, index: int) -> ClientValue | None:
        """Returns what makes a client's value, if nobody has made it."""
        value = self._part[index]
        return value if isinstance(value, ClientValue) else None

    def get(self, index: int) -> Leaves | None:
        """Returns one client's value as a result."""
        return self.read(index)


class _Kept:
    """The clients' values that an earlier pass computed."""

    def __init__(self, column: Sequence[Leaves | None]) -> None:
        self._column = column
        self.num_clients = len(column)

    def read(self, index: int) -> Leaves:
        """Returns one client's value."""
        flat = self._column[index]
        if flat is None:
            raise ValueError("its work failed in an earlier pass")
        return flat

    def get_maker(self, index: int) -> ClientValue | None:
        """Returns None: the values are there."""
        del index
        return None

    def get(self, index: int) -> Leaves | None:
        """Returns one client's value as a result, None where its work failed."""
        return self._column[index]
