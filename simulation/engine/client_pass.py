"""A pass over the clients: what goes in and out, and its functions in this process."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from simulation.engine.client_value import ClientValue
from simulation.engine.cohort_run import ClientError, Workers, split_cohort
from simulation.engine.combination import Combination
from simulation.engine.graph_cut import Flat
from simulation.engine.leaf_function import Leaves
from simulation.engine.pass_plan import PassPlan
from simulation.engine.stack_output import Row
from simulation.engine.stage import Stage


class Reader(Protocol):
    """The clients' values of one node."""

    def read(self, index: int) -> Leaves:
        """Returns one client's value."""

    def get_maker(self, index: int) -> ClientValue | None:
        """Returns what makes a client's value, if nobody has made it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassInputs:
    """What a pass is given.

    Attributes:
        num_clients: The number of clients.
        shared: The values of those of the plan's inputs that all clients share, by
            their position among the inputs.
        readers: The clients' own values of the others.
        zeros: What each aggregate starts from.
    """

    num_clients: int
    shared: Mapping[int, Flat]
    readers: Mapping[int, Reader]
    zeros: Sequence[Flat]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassResult:
    """What a pass brings back.

    Attributes:
        totals: What was accumulated for each aggregate.
        kept: For each target, the value of each client, None where its work failed.
    """

    totals: list[Flat]
    kept: list[list[Leaves | None]]


# Runs the pass that follows a level.
PassRunner = Callable[[int, PassInputs], PassResult]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watch:
    """Whom a pass tells what.

    Attributes:
        on_failure: What to do about a client that failed: raise, or not.
        on_done: Told how many clients of how many are done, or None.
    """

    on_failure: Callable[[ClientError], None]
    on_done: Callable[[int, int], None] | None


class Run:
    """Clients in a row whose outputs are those of stacks: they are added in one call.

    Attributes:
        rows: Their outputs.
        is_added: Whether they have been added; None before it was tried.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.is_added: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientOutputs:
    """What a client's work brought.

    Attributes:
        leaves: Those of all outputs of the plan.
        kept: The targets' values.
        run: The clients with which it is added, None where it is added alone.
    """

    leaves: Leaves
    kept: Sequence[Leaves]
    run: Run | None


class ClientPass:
    """The functions of a pass."""

    def __init__(self, plan: PassPlan, *, slots: Sequence[str | None]) -> None:
        """Builds them.

        Args:
            plan: What the pass is to do.
            slots: The devices of the clients that work at the same time.
        """
        self._split = len(plan.aggregates)
        self._num_targets = len(plan.targets)
        self.stage = Stage(plan.inputs, (), plan.outputs, slots=slots)
        self._accumulation = None
        if plan.aggregates:
            self._accumulation = Combination(
                plan.aggregates, device=slots[0], merges=False
            )
        self._folds = self._accumulation is not None and self._accumulation.can_fold

    def read_clients(self, group: range, given: PassInputs) -> list[Leaves | Exception]:
        """Returns what each client's work is given, or what it raised."""

        def read(index: int) -> list[Leaves]:
            return [
                given.shared[position]
                if position in given.shared
                else given.readers[position].read(index)
                for position in range(len(self.stage.inputs))
            ]

        return [self.stage.read(functools.partial(read, index)) for index in group]

    def run_clients(
        self, inputs: Sequence[Leaves | Exception], slot: int
    ) -> list[ClientOutputs | Exception]:
        """Returns what the work of those clients brought, or what it raised."""
        results: list[ClientOutputs | Exception] = []
        run = None
        for leaves in self.stage.run_clients(inputs, slot=slot):
            if isinstance(leaves, Exception):
                results.append(leaves)
                run = None
                continue
            if not isinstance(leaves, Row) or not self._folds:
                run = None
            else:
                run = run or Run()
                run.rows.append(leaves)
            kept = self.stage.split(leaves, first=self._split)
            results.append(ClientOutputs(leaves=leaves, kept=kept, run=run))
        return results

    def split_cohort(self, clients: range) -> list[range]:
        """Returns clients in groups that one call may take."""
        return split_cohort(clients, self.stage.group_size)

    def begin(self, given: PassInputs, num_clients: int) -> PassResult:
        """Returns the result of no client."""
        kept: list[list[Leaves | None]] = [
            [None] * num_clients for _ in range(self._num_targets)
        ]
        return PassResult(totals=list(given.zeros), kept=kept)

    def add(self, result: PassResult, position: int, outputs: ClientOutputs) -> None:
        """Takes one client's outputs into a result.

        With the first client of a run all of them are added: none that is not of the
        run lies between them.
        """
        accumulation = self._accumulation
        if accumulation is not None and not self._add_run(result, outputs.run):
            values = self.stage.split(outputs.leaves)[: self._split]
            result.totals[:] = accumulation.combine(result.totals, values)
        for column, output in zip(result.kept, outputs.kept, strict=True):
            column[position] = output

    def _add_run(self, result: PassResult, run: Run | None) -> bool:
        """Adds the clients of a run, once. Returns whether they are added."""
        if run is None or self._accumulation is None:
            return False
        if run.is_added is None:
            try:
                result.totals[:] = self._accumulation.fold(result.totals, run.rows)
                run.is_added = True
            # Each alone shows whose values it was.
            except Exception:
                run.is_added = False
        return run.is_added


def run_locally(
    current: ClientPass, given: PassInputs, workers: Workers, watch: Watch
) -> PassResult:
    """Runs a pass on this process's threads."""
    result = current.begin(given, given.num_clients)
    workers.run(
        current.run_clients,
        lambda index, outputs: current.add(result, index, outputs),
        groups=current.split_cohort(range(given.num_clients)),
        on_failure=watch.on_failure,
        on_done=watch.on_done,
        read=lambda group: current.read_clients(group, given),
    )
    return result
