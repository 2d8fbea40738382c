"""A pass over the clients: what goes in and out, and its functions in this process."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from simulation.engine.client_value import ClientValue
from simulation.engine.cohort_run import ClientError, Workers, split_cohort
from simulation.engine.graph_cut import Flat
from simulation.engine.pass_plan import PassPlan
from simulation.engine.stage import Combination, Stage


class Reader(Protocol):
    """The clients' values of one node."""

    def read(self, index: int) -> Flat:
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
    kept: list[list[Flat | None]]


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

    def run_clients(
        self, group: range, given: PassInputs, slot: int
    ) -> list[list[Flat] | Exception]:
        """Returns each client's values of the plan's outputs, or what it raised."""

        def read(index: int) -> list[Flat]:
            return [
                given.shared[position]
                if position in given.shared
                else given.readers[position].read(index)
                for position in range(len(self.stage.inputs))
            ]

        readers = [lambda index=index: read(index) for index in group]
        return self.stage.run_clients(readers, slot=slot)

    def split_cohort(self, clients: range) -> list[range]:
        """Returns clients in groups that one call may take."""
        return split_cohort(clients, self.stage.group_size)

    def begin(self, given: PassInputs, num_clients: int) -> PassResult:
        """Returns the result of no client."""
        kept: list[list[Flat | None]] = [
            [None] * num_clients for _ in range(self._num_targets)
        ]
        return PassResult(totals=list(given.zeros), kept=kept)

    def add(self, result: PassResult, position: int, outputs: Sequence[Flat]) -> None:
        """Takes one client's outputs into a result."""
        if self._accumulation is not None:
            result.totals[:] = self._accumulation.combine(
                result.totals, outputs[: self._split]
            )
        for column, output in zip(result.kept, outputs[self._split :], strict=True):
            column[position] = output


def run_locally(
    current: ClientPass, given: PassInputs, workers: Workers, watch: Watch
) -> PassResult:
    """Runs a pass on this process's threads."""
    result = current.begin(given, given.num_clients)
    workers.run(
        lambda group, slot: current.run_clients(group, given, slot),
        lambda index, outputs: current.add(result, index, outputs),
        groups=current.split_cohort(range(given.num_clients)),
        on_failure=watch.on_failure,
        on_done=watch.on_done,
    )
    return result
