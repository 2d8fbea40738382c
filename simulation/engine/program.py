"""A plan with its compiled stages, ready to run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow_federated as tff

from simulation.engine import arguments
from simulation.engine.client_value import ClientValue
from simulation.engine.cohort_run import ClientError, Workers, split_cohort
from simulation.engine.plan import Kind, Node, Place, Plan, list_nodes, walk
from simulation.engine.stage import Accumulation, Flat, Stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohort:
    """How the clients of one call are run.

    Attributes:
        num_clients: Their number.
        workers: The threads.
        on_failure: What to do about a client that failed: raise, or not.
        on_done: Told how many clients of how many are done in this pass.
    """

    num_clients: int
    workers: Workers
    on_failure: Callable[[ClientError], None]
    on_done: Callable[[int, int], None] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pass:
    """One pass over the clients.

    Attributes:
        aggregates: What is accumulated.
        targets: Nodes whose values at every client are kept: results, and what a later
            pass needs and must not compute again.
        stage: The clients' function; its outputs are the aggregates' values, then the
            targets.
        accumulation: Adds one client's values.
    """

    aggregates: tuple[Node, ...]
    targets: tuple[Node, ...]
    stage: Stage
    accumulation: Accumulation | None


class Program:
    """Runs one computation."""

    def __init__(
        self, plan: Plan, result_type: tff.Type, *, slots: Sequence[str | None]
    ) -> None:
        """Compiles.

        Args:
            plan: What to do.
            result_type: The type of the result, with its Python containers.
            slots: The devices of the clients that work at the same time. The server
                works on the first one's.
        """
        self._plan = plan
        self._result_type = result_type
        self._slots = slots
        self._server_results = [
            node for node in list_nodes(plan.result) if _is_one_value(node)
        ]
        self._client_results = [
            node for node in list_nodes(plan.result) if not _is_one_value(node)
        ]
        self._passes = self._build_passes()
        self._stages = self._build_stages()

    def run(
        self, argument: Any, parameter_type: tff.Type | None, cohort: Cohort
    ) -> Any:
        """Returns the result for an argument."""
        values, client_values = self._take_argument(argument, parameter_type, cohort)
        totals: dict[Node, Flat] = {}
        for level in range(self._plan.num_levels):
            stage = self._stages[level]
            if stage is not None:
                inputs = [values[node] for node in stage.inputs]
                inputs += [totals[node] for node in stage.totals]
                values.update(zip(stage.outputs, stage.run(inputs), strict=True))
            current = self._passes[level]
            if current is not None:
                totals.update(self._run_pass(current, values, client_values, cohort))
        return self._build_result(
            self._plan.result, self._result_type, values, client_values
        )

    def _run_pass(
        self,
        current: _Pass,
        values: Mapping[Node, Flat],
        client_values: dict[Node, Any],
        cohort: Cohort,
    ) -> dict[Node, Flat]:
        """Runs the clients once. Returns the totals of the aggregates."""
        stage = current.stage
        totals = [values[node.inputs[1]] for node in current.aggregates]
        kept: list[list[Flat | None]] = [
            [None] * cohort.num_clients for _ in current.targets
        ]
        split = len(current.aggregates)

        def read(node: Node, index: int) -> Flat:
            if node in client_values:
                return client_values[node](index)
            source = node.inputs[0] if node.kind is Kind.BROADCAST else node
            return values[source]

        def work(group: range, slot: int) -> list[list[Flat] | Exception]:
            readers = [
                lambda index=index: [read(node, index) for node in stage.inputs]
                for index in group
            ]
            return stage.run_clients(readers, slot=slot)

        def consume(index: int, outputs: list[Flat]) -> None:
            nonlocal totals
            if current.accumulation is not None:
                totals = current.accumulation.add(totals, outputs[:split])
            for column, output in zip(kept, outputs[split:], strict=True):
                column[index] = output

        cohort.workers.run(
            work,
            consume,
            groups=split_cohort(cohort.num_clients, stage.group_size),
            on_failure=cohort.on_failure,
            on_done=cohort.on_done,
        )
        for node, column in zip(current.targets, kept, strict=True):
            client_values[node] = _Reader(column)
        return dict(zip(current.aggregates, totals, strict=True))

    def _take_argument(
        self, argument: Any, parameter_type: tff.Type | None, cohort: Cohort
    ) -> tuple[dict[Node, Flat], dict[Node, Any]]:
        """Returns the values of the parameters: whole ones, and readers by client."""
        values: dict[Node, Flat] = {}
        client_values: dict[Node, Any] = {}
        for node in self._plan.parameters:
            part, name = _find_part(argument, parameter_type, node.payload)
            if node.place is Place.CLIENTS and not node.all_equal:
                client_values[node] = _Converter(part, node.type_spec, name)
            else:
                values[node] = arguments.flatten_value(part, node.type_spec, name)
        return values, client_values

    def _build_result(
        self,
        result: Any,
        type_spec: tff.Type,
        values: Mapping[Node, Flat],
        client_values: Mapping[Node, Any],
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
        if _is_one_value(result):
            return arguments.build_result(values[result], member)
        read = client_values[result]
        found = [read(index) for index in range(read.num_clients)]
        return [arguments.build_result(flat, member) for flat in found if flat]

    def _build_passes(self) -> list[_Pass | None]:
        """Returns the pass that follows each level, None where clients do nothing."""
        plan = self._plan
        wanted: list[list[Node]] = []
        for level in range(plan.num_levels):
            wanted.append(
                [
                    node
                    for node in self._client_results
                    if plan.levels[node] == level and node.kind is not Kind.PARAMETER
                ]
            )
        evaluated: dict[Node, int] = {}
        inputs: list[list[Node]] = []
        aggregates: list[list[Node]] = []
        for level in range(plan.num_levels):
            aggregates.append(
                [
                    node
                    for node, found in plan.levels.items()
                    if node.kind is Kind.AGGREGATE and found == level + 1
                ]
            )
            roots = [node.inputs[0] for node in aggregates[level]] + wanted[level]
            needed = _find_client_inputs(roots, level, evaluated)
            inputs.append(needed)
            for node in needed:
                if node in evaluated and node not in wanted[evaluated[node]]:
                    wanted[evaluated[node]].append(node)
        passes: list[_Pass | None] = []
        for level in range(plan.num_levels):
            if not aggregates[level] and not wanted[level]:
                passes.append(None)
                continue
            outputs = [node.inputs[0] for node in aggregates[level]] + wanted[level]
            passes.append(
                _Pass(
                    aggregates=tuple(aggregates[level]),
                    targets=tuple(wanted[level]),
                    stage=Stage(
                        inputs[level],
                        (),
                        outputs,
                        slots=self._slots,
                    ),
                    accumulation=Accumulation(aggregates[level], device=self._slots[0])
                    if aggregates[level]
                    else None,
                )
            )
        return passes

    def _build_stages(self) -> list[Stage | None]:
        """Returns the server's function of each level, None where it has none."""
        levels = self._plan.levels
        needed: list[dict[Node, None]] = [{} for _ in range(self._plan.num_levels)]

        def need(node: Node) -> None:
            if node.kind is not Kind.PARAMETER:
                needed[levels[node]][node] = None

        for node in self._server_results:
            need(node)
        for current in filter(None, self._passes):
            for node in current.aggregates:
                need(node.inputs[1])
            for node in current.stage.inputs:
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
                stage = Stage(inputs, totals, outputs, slots=self._slots[:1])
            stages.append(stage)
        return stages[::-1]


def _find_client_inputs(
    roots: Sequence[Node], level: int, evaluated: dict[Node, int]
) -> list[Node]:
    """Returns what a pass is given; notes in `evaluated` what it computes."""

    def is_known(node: Node) -> bool:
        before = evaluated.get(node, level) < level
        return before or node.kind in (Kind.PARAMETER, Kind.BROADCAST)

    computed, inputs = walk(roots, is_known)
    evaluated.update((node, level) for node in computed if node.is_costly)
    return inputs


def _find_server_inputs(
    outputs: Sequence[Node], level: int, levels: Mapping[Node, int]
) -> tuple[list[Node], list[Node]]:
    """Returns what a level's stage is given: known nodes, and aggregates' totals."""

    def is_input(node: Node) -> bool:
        return node.kind is Kind.PARAMETER or levels[node] < level

    _, known = walk(outputs, lambda n: is_input(n) or n.kind is Kind.AGGREGATE)
    totals = [node for node in known if not is_input(node)]
    return [node for node in known if is_input(node)], totals


def _is_one_value(node: Node) -> bool:
    return node.place is Place.SERVER or node.all_equal


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


class _Converter:
    """Reads one client's value when its turn comes."""

    def __init__(self, part: Sequence[Any], type_spec: tff.Type, name: str) -> None:
        self._part, self._type_spec, self._name = part, type_spec, name
        self.num_clients = len(part)

    def __call__(self, index: int) -> Flat:
        value = self._part[index]
        if isinstance(value, ClientValue):
            value = value.make()
        name = f"{self._name}[{index}]"
        return arguments.flatten_value(value, self._type_spec, name)


class _Reader:
    """Reads one client's value that an earlier pass computed."""

    def __init__(self, column: Sequence[Flat | None]) -> None:
        self._column = column
        self.num_clients = len(column)

    def __call__(self, index: int) -> Flat:
        flat = self._column[index]
        if flat is None:
            raise ValueError("its work failed in an earlier pass")
        return flat
