"""Workers on a Ray cluster, and chunks of work that survive them."""

import collections
import contextlib
import dataclasses
import importlib
import os
import pathlib
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from simulation import process
from simulation.engine.chunk import ChunkInputs, ChunkResult
from simulation.engine.errors import EngineError

# A worker shares a process's lock of Python among its threads: more do not help.
_MAX_CPUS_PER_WORKER = 4
_START_SECONDS = 180.0
_CONNECT_SECONDS = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A chunk that outlives this many workers is what kills them.
_MAX_ATTEMPTS = 4
# Chunks that are sent, or wait for an earlier one's result, for each slot.
_WINDOW_PER_SLOT = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """A worker to start.

    Attributes:
        node_id: Ray's name of its node.
        num_cpus: The CPUs it takes: so many clients work at the same time.
        num_gpus: The GPUs it takes.
    """

    node_id: str
    num_cpus: int
    num_gpus: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shipment:
    """What the chunks of a pass have in common, as references into Ray's store.

    Attributes:
        computation: The compiled computation: a name, and the reference.
        level: The level whose pass it is.
        shared: What all clients are given.
        loaders: What makes clients' values: a name, and the reference, for each.
    """

    computation: tuple[str, Any]
    level: int
    shared: tuple[str, Any]
    loaders: Sequence[tuple[str, Any]]


def plan_workers(
    nodes: Sequence[Mapping[str, Any]], *, device: str
) -> list[WorkerSpec]:
    """Returns the workers of a cluster.

    Args:
        nodes: What `ray.nodes()` returns.
        device: "auto" (a worker for each GPU of the nodes that have some), "cpu", or
            "gpu" (only on nodes that have some).
    """
    specs = []
    for node in nodes:
        resources = node["Resources"]
        cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        if not node["Alive"] or not cpus:
            continue
        name = node["NodeID"]
        if gpus and device != "cpu":
            share = max(1, min(cpus // gpus, _MAX_CPUS_PER_WORKER))
            number = min(gpus, cpus // share)
            specs += [WorkerSpec(node_id=name, num_cpus=share, num_gpus=1)] * number
        elif device != "gpu":
            full, rest = divmod(cpus, _MAX_CPUS_PER_WORKER)
            sizes = [_MAX_CPUS_PER_WORKER] * full + [rest] * bool(rest)
            specs += [WorkerSpec(node_id=name, num_cpus=size) for size in sizes]
    return specs


def import_ray() -> Any:
    """Returns the module ray.

    Raises:
        EngineError: If it is not installed.
    """
    # Ray reads it when it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise it changes CUDA_VISIBLE_DEVICES of workers without GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise EngineError(
            "the ray engine needs the package ray, which is not installed: pip install "
            "'ray>=2.52,<3', or the project's extra 'ray'"
        ) from error


class RayCluster:
    """Workers, and what is sent to them."""

    def __init__(self, *, address: str | None, device: str) -> None:
        """Connects, or starts Ray on this machine, and starts workers.

        Args:
            address: A running cluster's, None for a local one of our own.
            device: "auto", "cpu" or "gpu".

        Raises:
            EngineError: If Ray is not installed, the cluster does not answer, or it has
                no CPUs, or no GPUs that were asked for.
        """
        self._ray = import_ray()
        self._owns_ray = not self._ray.is_initialized()
        self._device = device
        # A number for each worker that ever was: what is lost is not taken for another.
        self._specs: dict[int, WorkerSpec] = {}
        self._workers: dict[int, Any] = {}
        # Not ready yet: the worker, and the reference to its first answer.
        self._starting: dict[int, tuple[Any, Any]] = {}
        self._nodes: set[str] = set()
        if self._owns_ray:
            if address is not None:
                check_listening(address)
            self._start(address)
        self._remote = self._ray.remote(_Worker)
        self._look_for_nodes()
        if not self._starting:
            kind = "GPUs" if device == "gpu" else "CPUs"
            self.close()
            raise EngineError(f"the Ray cluster has no {kind} for workers")
        self._await_workers(len(self._starting))

    @property
    def num_slots(self) -> int:
        """How many clients work at the same time."""
        return sum(self._specs[number].num_cpus for number in self._workers)

    @property
    def num_nodes(self) -> int:
        """How many nodes have workers."""
        return len({self._specs[number].node_id for number in self._workers})

    @property
    def description(self) -> str:
        """Says what the workers work on."""
        gpus = sum(self._specs[number].num_gpus for number in self._workers)
        return f"{gpus} GPUs" if gpus else "CPU"

    def put(self, value: Any) -> Any:
        """Returns a reference to a value, which each node fetches once.

        Raises:
            EngineError: If the value cannot be sent.
        """
        with _sending():
            return self._ray.put(value)

    def run_chunks(
        self, shipment: Shipment, chunks: Iterator[ChunkInputs]
    ) -> Generator[ChunkResult, None, None]:
        """Runs chunks and yields their results, in the order of the chunks.

        Every chunk's result is taken once. A chunk whose worker was lost, with or
        before its result, goes to another worker. Close the generator before the
        cluster: it cancels what is still running.

        Raises:
            EngineError: If no worker is left, or a chunk loses one worker after the
                other.
        """
        self._look_for_nodes()
        ready: dict[int, ChunkResult] = {}
        waiting: dict[int, ChunkInputs] = {}
        running: dict[Any, tuple[int, int]] = {}
        again: collections.deque[int] = collections.deque()
        attempts: collections.Counter[int] = collections.Counter()
        taken = sent = 0
        exhausted = False
        try:
            while True:
                while taken in ready:
                    waiting.pop(taken)
                    yield ready.pop(taken)
                    taken += 1
                self._take_started(timeout=0.0)
                while len(running) < self.num_slots:
                    if again:
                        number = again.popleft()
                    elif not exhausted and (
                        sent - taken < _WINDOW_PER_SLOT * self.num_slots
                    ):
                        chunk = next(chunks, None)
                        if chunk is None:
                            exhausted = True
                            break
                        number, sent = sent, sent + 1
                        waiting[number] = chunk
                    else:
                        break
                    worker = self._find_free(running)
                    reference = self._send(worker, shipment, waiting[number])
                    running[reference] = number, worker
                if not running:
                    return
                with process.keep_termination():
                    done, _ = self._ray.wait(list(running), num_returns=1)
                for reference in done:
                    number, worker = running.pop(reference)
                    result = self._take(reference, worker)
                    if isinstance(result, ChunkResult):
                        ready[number] = result
                        continue
                    attempts[number] += 1
                    if attempts[number] >= _MAX_ATTEMPTS:
                        raise EngineError(
                            f"chunk {number} of a pass was lost {_MAX_ATTEMPTS} times, "
                            "with the worker at last: out of memory? Ray says: "
                            f"{result}"
                        )
                    again.append(number)
        finally:
            for reference in running:
                self._ray.cancel(reference, force=False)

    def close(self) -> None:
        """Ends the workers, and Ray where it was started here."""
        starting = [worker for worker, _ in self._starting.values()]
        for worker in (*self._workers.values(), *starting):
            self._ray.kill(worker)
        self._workers.clear()
        self._starting.clear()
        if self._owns_ray:
            self._ray.shutdown()
            self._owns_ray = False

    def _start(self, address: str | None) -> None:
        root = str(pathlib.Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment: dict[str, Any] = {
            "env_vars": {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": path}
        }
        # Not None, which takes a cluster that it finds.
        options: dict[str, Any] = {"address": "local", "include_dashboard": False}
        if address is None:
            process.adopt_orphans()
        else:
            # Other machines have the packages, perhaps, but not this project.
            names = (
                "centaur",
                "distributed_dp",
                "simulation",
                "scripts",
                "upcycled_fl",
            )
            modules = [str(pathlib.Path(root) / name) for name in names]
            environment = {
                "env_vars": {"TF_CPP_MIN_LOG_LEVEL": "2"},
                "py_modules": modules,
            }
            options = {"address": address}
        try:
            with _keep_signals():
                self._ray.init(
                    runtime_env=environment,
                    log_to_driver=False,
                    logging_level="ERROR",
                    **options,
                )
        # Ray raises several kinds, ConnectionError and RuntimeError among them.
        except Exception as error:
            where = "on this machine" if address is None else f"at {address!r}"
            raise EngineError(f"Ray did not start {where}: {error}") from error

    def _look_for_nodes(self) -> None:
        """Starts workers on nodes that have none yet."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        specs = plan_workers(
            [node for node in nodes if node["NodeID"] not in self._nodes],
            device=self._device,
        )
        self._nodes = {node["NodeID"] for node in nodes}
        for spec in specs:
            self._start_worker(spec)

    def _start_worker(self, spec: WorkerSpec) -> None:
        number = len(self._specs)
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        strategy = strategies.NodeAffinitySchedulingStrategy
        worker = self._remote.options(
            num_cpus=spec.num_cpus,
            num_gpus=spec.num_gpus,
            max_concurrency=spec.num_cpus,
            scheduling_strategy=strategy(spec.node_id, soft=False),
        ).remote(self._device if not spec.num_gpus else "auto", spec.num_cpus)
        self._specs[number] = spec
        self._starting[number] = worker, worker.ping.remote()

    def _await_workers(self, count: int) -> None:
        """Waits until there are as many workers.

        Raises:
            EngineError: If they do not start in time.
        """
        deadline = time.monotonic() + _START_SECONDS
        while len(self._workers) < count:
            self._take_started(timeout=1.0)
            is_late = time.monotonic() > deadline
            if is_late or len(self._workers) + len(self._starting) < count:
                self.close()
                raise EngineError(
                    f"{count - len(self._workers)} of {count} workers did not start on "
                    f"the Ray cluster in {_START_SECONDS:.0f} s: are its CPUs taken?"
                )

    def _take_started(self, *, timeout: float) -> None:
        """Puts workers to work that are ready by now."""
        pings = {ping: number for number, (_, ping) in self._starting.items()}
        if not pings:
            return
        with process.keep_termination():
            done, _ = self._ray.wait(list(pings), timeout=timeout)
        for ping in done:
            number = pings[ping]
            worker, _ = self._starting.pop(number)
            try:
                self._ray.get(ping)
            except self._ray.exceptions.RayError as error:
                logging.warning("a Ray worker did not start: %s", error)
            else:
                self._workers[number] = worker

    def _find_free(self, running: Mapping[Any, tuple[int, int]]) -> int:
        """Returns the worker with the largest share of free slots."""
        busy = collections.Counter(worker for _, worker in running.values())
        return min(self._workers, key=lambda n: busy[n] / self._specs[n].num_cpus)

    def _send(self, worker: int, shipment: Shipment, chunk: ChunkInputs) -> Any:
        # References in a list stay references: the worker fetches what it lacks.
        with _sending():
            return self._workers[worker].run.remote(
                [shipment.computation],
                shipment.level,
                [shipment.shared],
                list(shipment.loaders),
                chunk,
            )

    def _take(self, reference: Any, worker: int) -> ChunkResult | Exception:
        """Returns a chunk's result, or why it is lost."""
        errors = self._ray.exceptions
        try:
            with process.keep_termination():
                return self._ray.get(reference)
        except errors.RayTaskError as error:
            raise error.as_instanceof_cause() from error
        except errors.RayError as error:
            self._replace(worker)
            return error

    def _replace(self, number: int) -> None:
        """Starts a lost worker anew where its node still is.

        Raises:
            EngineError: If no worker is left.
        """
        worker = self._workers.get(number)
        if worker is None or self._is_alive(worker):
            return
        spec = self._specs[number]
        del self._workers[number]
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        if spec.node_id in alive:
            logging.warning("a Ray worker was lost; another one takes its place")
            self._start_worker(spec)
        else:
            logging.warning("a node of the Ray cluster was lost")
        if not self._workers:
            if not self._starting:
                raise EngineError("all nodes of the Ray cluster are lost")
            self._await_workers(1)

    def _is_alive(self, worker: Any) -> bool:
        try:
            self._ray.get(worker.ping.remote(), timeout=_START_SECONDS)
        except self._ray.exceptions.RayError:
            return False
        return True


@contextlib.contextmanager
def _sending() -> Iterator[None]:
    """Says what cannot be sent: clients' values, keys and loaders are pickled."""
    try:
        yield
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EngineError(
            f"what clients are given cannot be sent to Ray's workers: {reason}"
        ) from error


@contextlib.contextmanager
def _keep_signals() -> Iterator[None]:
    """Takes back the signals that Ray takes for itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_listening(address: str) -> None:
    """Raises EngineError if nothing listens there; Ray would try for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if not host or not port.isdigit():
        raise EngineError(
            f"`ray_address` must be of the form <host>:<port>. Found {address!r}."
        )
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise EngineError(f"no Ray cluster answers at {address!r}: {error}") from error


class _Worker:
    """What runs on the cluster: fetches what its chunk worker lacks."""

    def __init__(self, device: str, num_slots: int) -> None:
        # Here, on the worker: TensorFlow starts with the resources that Ray gave it.
        from simulation.engine import chunk, devices

        devices.give_clients_the_cores()
        names = devices.select_devices(device)
        slots = [names[number % len(names)] for number in range(num_slots)]
        self._chunks = chunk.ChunkWorker(slots)

    def ping(self) -> float:
        """Says that the worker is there."""
        return time.time()

    def run(
        self,
        computation: list[tuple[str, Any]],
        level: int,
        shared: list[tuple[str, Any]],
        loaders: list[tuple[str, Any]],
        chunk: ChunkInputs,
    ) -> ChunkResult:
        """Runs a chunk. See `ChunkWorker.run`."""
        import ray

        def fetch(named: tuple[str, Any]) -> tuple[str, Callable[[], Any]]:
            name, reference = named
            return name, lambda: ray.get(reference)

        return self._chunks.run(
            fetch(computation[0]),
            level,
            fetch(shared[0]),
            [fetch(loader) for loader in loaders],
            chunk,
        )
