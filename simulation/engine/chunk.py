"""Chunks of a cohort: a worker's part in a pass, in any process.

A chunk's clients are added up in their order, from the aggregates' zeros. Which clients
make up a chunk depends on the cohort's size alone, never on who works: so neither the
number of workers nor the loss of one changes a result.
"""

import dataclasses
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow_federated as tff

from simulation.engine import arguments, plan, portable
from simulation.engine.client_pass import ClientPass, PassInputs
from simulation.engine.client_value import ClientValue
from simulation.engine.cohort_run import consume, describe_error
from simulation.engine.graph_cut import Flat
from simulation.engine.pass_plan import PassPlan, plan_passes

_KEPT_COMPUTATIONS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """A client's value that is made by the worker.

    Attributes:
        loader: Which of the pass's loaders makes it.
        key: What it is made from.
    """

    loader: int
    key: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedInputs:
    """What all chunks of a pass are given.

    Attributes:
        values: Packed values by position among the pass's inputs.
        zeros: Packed zeros of the aggregates.
    """

    values: Mapping[int, Any]
    zeros: Sequence[Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkInputs:
    """What one chunk is given.

    Attributes:
        groups: The clients in groups whose work may be one call: for each client, by
            position, its packed value or how to make it.
    """

    groups: Sequence[Sequence[Mapping[int, Any]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkResult:
    """What a chunk brings back.

    Attributes:
        totals: The packed totals of the aggregates.
        kept: For each target, each client's packed value, None where it failed.
        failures: Why a client's work failed, by its position in the chunk.
    """

    totals: Sequence[Any]
    kept: Sequence[Sequence[Any]]
    failures: Mapping[int, str]


class ChunkWorker:
    """Runs chunks of any computation that it was given."""

    def __init__(self, slots: Sequence[str | None]) -> None:
        """Prepares.

        Args:
            slots: The devices of the chunks that run at the same time.
        """
        self._devices = tuple(slots)
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(len(slots)):
            self._slots.put(slot)
        self._lock = threading.Lock()
        self._computations: dict[str, _Computation] = {}
        self._loaders: dict[str, Callable[[Any], Any]] = {}
        self._shared: tuple[str, PassInputs] | None = None

    def run(
        self,
        computation: tuple[str, Callable[[], Any]],
        level: int,
        shared: tuple[str, Callable[[], SharedInputs]],
        loaders: Sequence[tuple[str, Callable[[], Callable[[Any], Any]]]],
        chunk: ChunkInputs,
    ) -> ChunkResult:
        """Runs one chunk.

        What many chunks need comes as a name and a function that fetches it, which is
        called where the name is new here.

        Args:
            computation: The compiled computation, as TFF's message.
            level: The level whose pass it is.
            shared: What all chunks of the pass are given.
            loaders: What makes clients' values.
            chunk: What this chunk is given.
        """
        with self._lock:
            current = self._get_computation(*computation).get_pass(level)
            given = self._get_shared(*shared)
            found = [self._get_loader(*loader) for loader in loaders]
        slot = self._slots.get()
        try:
            return _run_chunk(current, given, found, chunk, slot)
        finally:
            self._slots.put(slot)

    def _get_computation(self, name: str, fetch: Callable[[], Any]) -> "_Computation":
        if name not in self._computations:
            while len(self._computations) >= _KEPT_COMPUTATIONS:
                self._computations.pop(next(iter(self._computations)))
            self._computations[name] = _Computation(fetch(), self._devices)
        return self._computations[name]

    def _get_shared(self, name: str, fetch: Callable[[], SharedInputs]) -> PassInputs:
        if self._shared is None or self._shared[0] != name:
            packed = fetch()
            given = PassInputs(
                num_clients=0,
                shared={
                    position: portable.unpack(value)
                    for position, value in packed.values.items()
                },
                readers={},
                zeros=[portable.unpack(zero) for zero in packed.zeros],
            )
            self._shared = (name, given)
        return self._shared[1]

    def _get_loader(
        self, name: str, fetch: Callable[[], Callable[[Any], Any]]
    ) -> Callable[[Any], Any]:
        if name not in self._loaders:
            while len(self._loaders) >= _KEPT_COMPUTATIONS:
                self._loaders.pop(next(iter(self._loaders)))
            self._loaders[name] = fetch()
        return self._loaders[name]


class _Computation:
    """A computation's passes, built when they are first run."""

    def __init__(self, proto: Any, slots: Sequence[str | None]) -> None:
        self._plans = plan_passes(
            plan.build_plan(tff.framework.deserialize_computation(proto))
        )
        self._slots = slots
        self._passes: dict[int, tuple[PassPlan, ClientPass]] = {}

    def get_pass(self, level: int) -> tuple[PassPlan, ClientPass]:
        """Returns the pass that follows a level."""
        if level not in self._passes:
            current = self._plans[level]
            if current is None:
                raise ValueError(f"`level` must have a pass. Found {level!r}.")
            self._passes[level] = current, ClientPass(current, slots=self._slots)
        return self._passes[level]


def _run_chunk(
    current: tuple[PassPlan, ClientPass],
    given: PassInputs,
    loaders: Sequence[Callable[[Any], Any]],
    chunk: ChunkInputs,
    slot: int,
) -> ChunkResult:
    pass_plan, client_pass = current
    clients = [client for group in chunk.groups for client in group]
    own = clients[0] if clients else {}
    inputs = dataclasses.replace(
        given,
        num_clients=len(clients),
        readers={
            position: _ChunkReader(position, pass_plan, loaders, clients)
            for position in own
        },
    )
    result = client_pass.begin(inputs, len(clients))
    failures = {}
    start = 0
    for members in chunk.groups:
        group = range(start, start + len(members))
        start = group.stop
        members_inputs = client_pass.read_clients(group, inputs)
        outputs = client_pass.run_clients(members_inputs, slot)
        for position, output in zip(group, outputs, strict=True):
            error = consume(
                lambda at, values: client_pass.add(result, at, values), position, output
            )
            if error is not None:
                failures[position] = describe_error(error)
    return ChunkResult(
        totals=[portable.pack(total) for total in result.totals],
        kept=[
            [None if flat is None else portable.pack(flat) for flat in column]
            for column in result.kept
        ],
        failures=failures,
    )


class _ChunkReader:
    """Reads one input of a chunk's clients."""

    def __init__(
        self,
        position: int,
        pass_plan: PassPlan,
        loaders: Sequence[Callable[[Any], Any]],
        clients: Sequence[Mapping[int, Any]],
    ) -> None:
        self._position, self._loaders, self._clients = position, loaders, clients
        self._type_spec = pass_plan.inputs[position].type_spec

    def read(self, index: int) -> Flat:
        """Returns one client's value."""
        packed = self._clients[index][self._position]
        if not isinstance(packed, Made):
            return portable.unpack(packed)
        value = self._loaders[packed.loader](packed.key)
        return arguments.flatten_leaves(value, self._type_spec, "argument")

    def get_maker(self, index: int) -> ClientValue | None:
        """Returns None: a chunk's values are made here."""
        del index
        return None
