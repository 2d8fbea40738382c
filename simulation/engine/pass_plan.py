"""Passes over the clients: what each is given, and what it must bring back."""

import dataclasses
from collections.abc import Sequence

from simulation.engine.plan import Kind, Node, Place, Plan, list_nodes, walk


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassPlan:
    """One pass over the clients.

    Attributes:
        inputs: What the clients are given: parameters, broadcasts, and what an earlier
            pass brought back.
        aggregates: What is accumulated.
        targets: Nodes whose values at every client are kept: results, and what a later
            pass needs and must not compute again.
    """

    inputs: tuple[Node, ...]
    aggregates: tuple[Node, ...]
    targets: tuple[Node, ...]

    @property
    def outputs(self) -> tuple[Node, ...]:
        """What each client computes: the aggregates' values, then the targets."""
        return (*(node.inputs[0] for node in self.aggregates), *self.targets)


def plan_passes(plan: Plan) -> list[PassPlan | None]:
    """Returns the pass that follows each level, None where clients do nothing."""
    results = [node for node in list_nodes(plan.result) if not is_one_value(node)]
    wanted: list[list[Node]] = []
    for level in range(plan.num_levels):
        wanted.append(
            [
                node
                for node in results
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
        needed = _find_inputs(roots, level, evaluated)
        inputs.append(needed)
        for node in needed:
            if node in evaluated and node not in wanted[evaluated[node]]:
                wanted[evaluated[node]].append(node)
    return [
        PassPlan(
            inputs=tuple(inputs[level]),
            aggregates=tuple(aggregates[level]),
            targets=tuple(wanted[level]),
        )
        if aggregates[level] or wanted[level]
        else None
        for level in range(plan.num_levels)
    ]


def is_one_value(node: Node) -> bool:
    """Whether there is one value, not one for each client."""
    return node.place is Place.SERVER or node.all_equal


def _find_inputs(
    roots: Sequence[Node], level: int, evaluated: dict[Node, int]
) -> list[Node]:
    """Returns what a pass is given; notes in `evaluated` what it computes."""

    def is_known(node: Node) -> bool:
        before = evaluated.get(node, level) < level
        return before or node.kind in (Kind.PARAMETER, Kind.BROADCAST)

    computed, inputs = walk(roots, is_known)
    evaluated.update((node, level) for node in computed if node.is_costly)
    return inputs
