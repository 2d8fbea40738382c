"""The context of TFF that spreads the clients over a Ray cluster."""

import contextlib
import uuid
from collections.abc import Callable, Generator, Sequence
from typing import Any

import tensorflow_federated as tff

from simulation.engine import lockstep, portable
from simulation.engine.chunk import ChunkInputs, ChunkResult, Made, SharedInputs
from simulation.engine.client_part import strip_server_functions
from simulation.engine.client_pass import (
    ClientPass,
    PassInputs,
    PassResult,
    Reader,
    Watch,
)
from simulation.engine.cohort_run import ClientError, describe_error, split_cohort
from simulation.engine.combination import Combination
from simulation.engine.context import ClientFailure, EngineContext, WatchedRunner
from simulation.engine.pass_plan import PassPlan
from simulation.engine.plan import Node, walk
from simulation.engine.program import Program
from simulation.engine.ray_cluster import RayCluster, Shipment

# A cohort is split in so many chunks at most, whatever the cluster: the order of
# summation, and with it the last bits of sums of floats, follow from the number of
# clients alone.
_NUM_CHUNKS = 32
_KEPT_LOADERS = 8


class RayContext(EngineContext):
    """Runs TFF computations, the clients' work on a Ray cluster.

    Guarantees: if the clients' randomness comes from seeds in their data, and all
    machines compute alike, the result depends neither on the cluster, nor on timing,
    nor on lost workers. Clients' values are those of the local engine, and sums of
    integers too, bit for bit; sums of floats are added in another order.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        device: str = "auto",
        server_device: str | None = None,
        default_num_clients: int = 0,
        client_failure: ClientFailure = ClientFailure.RAISE,
    ) -> None:
        """Connects to a cluster, or starts one on this machine.

        Args:
            address: The cluster's address, None for a local one.
            device: Where workers work: "auto", "cpu" or "gpu".
            server_device: TensorFlow's name of the server's device in this process.
            default_num_clients: The number of clients of a computation whose argument
                does not tell.
            client_failure: What to do about a client whose work fails.

        Raises:
            EngineError: If Ray is not installed, or there is no such cluster.
            ValueError: If a number is out of range.
        """
        super().__init__(
            device=server_device,
            default_num_clients=default_num_clients,
            client_failure=client_failure,
        )
        self.cluster = RayCluster(address=address, device=device)
        # By identity: a loader is sent once, and kept so that no other has its id.
        self._loaders: dict[int, tuple[Any, tuple[str, Any]]] = {}

    def close(self) -> None:
        """Ends the workers and forgets what was compiled."""
        super().close()
        self._loaders.clear()
        self.cluster.close()

    def _prepare_passes(
        self, compiled: tff.framework.ConcreteComputation, program: Program
    ) -> WatchedRunner:
        """Returns what runs the passes of a compiled computation."""
        passes = {n: p for n, p in enumerate(program.passes) if p is not None}
        merges = {
            level: Combination(current.aggregates, device=self._device, merges=True)
            for level, current in passes.items()
            if current.aggregates
        }
        computation = uuid.uuid4().hex, None
        if passes:
            part = strip_server_functions(compiled)
            proto = tff.framework.serialize_computation(part)
            computation = computation[0], self.cluster.put(proto)
        group_sizes = {
            level: _find_group_size(current, self._device)
            for level, current in passes.items()
        }

        def run_pass(level: int, given: PassInputs, watch: Watch) -> PassResult:
            kept: list[list[Any]] = [
                [None] * given.num_clients for _ in passes[level].targets
            ]
            result = PassResult(totals=list(given.zeros), kept=kept)
            merge = merges.get(level)
            chunks = _split_chunks(given.num_clients, group_sizes[level])
            # Closed at once where a client fails, not when its error is forgotten: by
            # then Ray may have ended, and would be started again to cancel the rest.
            with contextlib.closing(
                self._run_chunks(computation, level, chunks, given, watch)
            ) as done:
                for chunk in done:
                    _take_chunk(result, chunk, merge)
            return result

        return run_pass

    def _run_chunks(
        self,
        computation: tuple[str, Any],
        level: int,
        chunks: Sequence["_Chunk"],
        given: PassInputs,
        watch: Watch,
    ) -> Generator["_Chunk", None, None]:
        """Runs a pass on the cluster, chunk by chunk, in order."""
        total = given.num_clients
        loaders = _list_loaders(given)
        shared = SharedInputs(
            values={p: portable.pack(value) for p, value in given.shared.items()},
            zeros=[portable.pack(zero) for zero in given.zeros],
        )
        shipment = Shipment(
            computation=computation,
            level=level,
            shared=(uuid.uuid4().hex, self.cluster.put(shared)),
            loaders=[self._ship_loader(loader) for loader in loaders],
        )
        results = self.cluster.run_chunks(
            shipment, (chunk.pack(given, loaders) for chunk in chunks)
        )
        with contextlib.closing(results):
            for chunk, result in zip(chunks, results, strict=True):
                chunk.result = result
                for index, reason in sorted(chunk.list_failures()):
                    watch.on_failure(ClientError(index, total, reason))
                yield chunk
                if watch.on_done is not None:
                    watch.on_done(chunk.stop, total)

    def _ship_loader(self, loader: Callable[[Any], Any]) -> tuple[str, Any]:
        """Returns the name and the reference of a loader, sent at its first use."""
        key = id(loader)
        if key not in self._loaders:
            while len(self._loaders) >= _KEPT_LOADERS:
                self._loaders.pop(next(iter(self._loaders)))
            self._loaders[key] = loader, (uuid.uuid4().hex, self.cluster.put(loader))
        return self._loaders[key][1]


class _Chunk:
    """A part of the cohort on its way.

    Attributes:
        groups: The clients, in the groups whose work may be one call.
        result: What came back.
    """

    def __init__(self, groups: Sequence[range]) -> None:
        self.groups = groups
        self.result: ChunkResult | None = None
        self._sent: list[int] = []
        self._failures: dict[int, str] = {}

    def pack(
        self, given: PassInputs, loaders: Sequence[Callable[[Any], Any]]
    ) -> ChunkInputs:
        """Returns what is sent. A client whose value cannot be has failed."""
        groups = []
        for group in self.groups:
            clients = []
            for index in group:
                try:
                    packed = {
                        position: _pack_client(reader, index, loaders)
                        for position, reader in given.readers.items()
                    }
                # Whatever it is, it is about this client.
                except Exception as error:
                    self._failures[index] = describe_error(error)
                else:
                    self._sent.append(index)
                    clients.append(packed)
            groups.append(clients)
        return ChunkInputs(groups=groups)

    @property
    def start(self) -> int:
        """The first client."""
        return self.groups[0].start

    @property
    def stop(self) -> int:
        """The client after the last."""
        return self.groups[-1].stop

    def list_failures(self) -> list[tuple[int, str]]:
        """Returns the clients that failed, and why."""
        assert self.result is not None
        there = {self._sent[at]: why for at, why in self.result.failures.items()}
        return list({**self._failures, **there}.items())

    def list_kept(self, column: Sequence[Any]) -> list[tuple[int, Any]]:
        """Returns the values that one target's column brought back, by client."""
        return list(zip(self._sent, column, strict=True))


def _find_group_size(current: PassPlan, device: str | None) -> int:
    """Returns how many clients' work may be one call, as the local engine does it."""
    if not any(map(_may_stack, current.outputs)):
        return 1
    return ClientPass(current, slots=[device]).stage.group_size


def _may_stack(output: Node) -> bool:
    computed, _ = walk([output], lambda _: False)
    return any(
        isinstance(node.payload, tff.framework.CompiledComputation)
        and lockstep.may_hold_call(node.payload)
        for node in computed
    )


def _split_chunks(num_clients: int, group_size: int) -> list["_Chunk"]:
    """Returns the cohort in chunks of whole groups: the local engine's own groups."""
    groups = split_cohort(range(num_clients), group_size)
    size = max(1, -(-len(groups) // _NUM_CHUNKS))
    return [
        _Chunk([groups[number] for number in numbers])
        for numbers in split_cohort(range(len(groups)), size)
    ]


def _take_chunk(result: PassResult, chunk: _Chunk, merge: Combination | None) -> None:
    """Takes a chunk into a pass's result."""
    found = chunk.result
    assert found is not None
    totals = [portable.unpack(total) for total in found.totals]
    if merge is not None:
        is_first = chunk.start == 0
        result.totals[:] = totals if is_first else merge.combine(result.totals, totals)
    for column, values in zip(result.kept, found.kept, strict=True):
        for index, value in chunk.list_kept(values):
            column[index] = None if value is None else portable.unpack(value)


def _list_loaders(given: PassInputs) -> list[Callable[[Any], Any]]:
    """Returns the functions that make the clients' values, each once."""
    found: dict[int, Callable[[Any], Any]] = {}
    for reader in given.readers.values():
        for index in range(given.num_clients):
            maker = reader.get_maker(index)
            if maker is not None:
                found[id(maker.load)] = maker.load
    return list(found.values())


def _pack_client(
    reader: Reader, index: int, loaders: Sequence[Callable[[Any], Any]]
) -> Any:
    """Returns one client's value as it is sent: the value, or what makes it."""
    maker = reader.get_maker(index)
    if maker is None:
        return portable.pack(reader.read(index))
    number = next(n for n, load in enumerate(loaders) if load is maker.load)
    return Made(loader=number, key=maker.key)
