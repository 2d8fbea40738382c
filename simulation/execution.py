"""Execution engines: what runs TFF computations, and where. All contexts are set here.

Secure sums are replaced by plain sums in every engine: no cryptography is run.
"""

import contextlib
import dataclasses
import enum
import os
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff
from absl import logging

from simulation import process
from simulation.engine import devices
from simulation.engine.client_value import ClientValue
from simulation.engine.cohort_run import ClientError
from simulation.engine.context import ClientFailure, EngineContext
from simulation.engine.errors import EngineError
from simulation.engine.local_context import LocalContext
from simulation.engine.local_evaluation import UnsupportedError
from simulation.engine.ray_context import RayContext
from simulation.engine.tff_worker import WorkerExecutorFactory, build_worker_context

__all__ = [
    "ClientError",
    "ClientFailure",
    "ClientValue",
    "Engine",
    "EngineError",
    "Execution",
    "UnsupportedError",
    "set_execution_context",
    "use_execution_context",
]


class Engine(enum.Enum):
    """What runs the computations.

    LOCAL: this process's TensorFlow, on the CPU or on GPUs.
    RAY: a Ray cluster, to which the clients' work is spread.
    TFF: the runtime that TFF ships, in a helper process, on the CPU.
    """

    LOCAL = "local"
    RAY = "ray"
    TFF = "tff"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """What `set_execution_context` set.

    Attributes:
        engine: The engine.
        device: Where client work runs, for the first lines of a run.
    """

    engine: Engine
    device: str
    _context: Any = dataclasses.field(repr=False)

    def watch_clients(self, on_done: Callable[[int, int], None] | None) -> None:
        """Tells `on_done` how many clients of how many are done, during each call.

        Not guaranteed: TFF's runtime does not tell.
        """
        if isinstance(self._context, EngineContext):
            self._context.on_client_done = on_done

    @property
    def failures(self) -> tuple[ClientError, ...]:
        """Clients of the last call that were dropped because their work failed."""
        if not isinstance(self._context, EngineContext):
            return ()
        return tuple(self._context.failures)


def set_execution_context(
    engine: Engine = Engine.LOCAL,
    *,
    device: str = "auto",
    max_concurrent_clients: int | None = None,
    client_failure: ClientFailure = ClientFailure.RAISE,
    ray_address: str | None = None,
) -> Execution:
    """Makes `engine` run every TFF computation that this process calls from now on.

    The engine that did so before is ended, unless the new one does not start.

    Args:
        engine: The engine.
        device: "auto" (all GPUs where there are any), "cpu" or "gpu:<number>"; with
            Ray "gpu" for the workers of nodes with GPUs alone.
        max_concurrent_clients: How many clients work at the same time, None for the
            number of cores (one more in TFF's runtime); with Ray always that of the
            cluster's CPUs.
        client_failure: What happens when a client's work fails.
        ray_address: The address of a running Ray cluster, None to start one here.

    Called before TensorFlow is first used, the local engine runs each op on one thread
    of the CPU, as the clients share the cores.

    Returns:
        What was set.

    Raises:
        EngineError: If the engine does not start, or does not have the device.
        ValueError: If an argument is out of range.
    """
    if max_concurrent_clients is not None and max_concurrent_clients < 1:
        raise ValueError(
            "`max_concurrent_clients` must be >= 1 or None. "
            f"Found {max_concurrent_clients!r}."
        )
    if ray_address is not None and engine is not Engine.RAY:
        raise ValueError(
            f"`ray_address` must be None without the ray engine. Found {ray_address!r}."
        )
    # One cluster's CPUs do not hold two engines' workers.
    if engine is Engine.RAY and isinstance(
        tff.framework.get_context_stack().current, RayContext
    ):
        _end_current()
    if engine is Engine.TFF:
        started = _start_tff(device, max_concurrent_clients, client_failure)
    elif engine is Engine.RAY:
        started = _start_ray(
            device, max_concurrent_clients, client_failure, ray_address
        )
    else:
        started = _start_local(device, max_concurrent_clients, client_failure)
    context, place, close = started
    _end_current()
    global _close
    _close = close
    tff.framework.set_default_context(context)
    logging.info("clients' work: %s", place)
    return Execution(engine=engine, device=place, _context=context)


@contextlib.contextmanager
def use_execution_context(
    engine: Engine = Engine.LOCAL, **choices: Any
) -> Iterator[Execution]:
    """Makes `engine` run TFF computations inside the block.

    Afterwards the context of before runs them again.

    Args:
        engine: The engine.
        **choices: See `set_execution_context`.

    Raises:
        EngineError: If the engine does not start, or does not have the device; or for a
            Ray engine inside another one.
        ValueError: If an argument is out of range.
    """
    global _close
    before, close_before = tff.framework.get_context_stack().current, _close
    if engine is Engine.RAY and isinstance(before, RayContext):
        raise EngineError("a Ray engine cannot be used inside another one")
    _close = _do_nothing
    try:
        yield set_execution_context(engine, **choices)
    finally:
        _end_current()
        _close = close_before
        tff.framework.set_default_context(before)


_Started = tuple[Any, str, Callable[[], None]]


def _start_local(
    device: str, max_concurrent_clients: int | None, client_failure: ClientFailure
) -> _Started:
    if max_concurrent_clients != 1:
        devices.give_clients_the_cores()
    names = devices.select_devices(device)
    context = LocalContext(
        devices=names,
        max_concurrent_clients=max_concurrent_clients,
        client_failure=client_failure,
    )
    place = (
        f"{devices.describe_devices(names)}, {context.num_workers} clients at a time"
    )
    return context, place, context.close


def _start_ray(
    device: str,
    max_concurrent_clients: int | None,
    client_failure: ClientFailure,
    address: str | None,
) -> _Started:
    if device not in ("auto", "cpu", "gpu"):
        raise EngineError(
            "with the ray engine `device` must be 'auto', 'cpu' or 'gpu'. "
            f"Found {device!r}."
        )
    if max_concurrent_clients is not None:
        raise EngineError(
            "with the ray engine as many clients work at a time as the cluster has "
            f"CPUs: `max_concurrent_clients` must be None. "
            f"Found {max_concurrent_clients!r}."
        )
    context = RayContext(address=address, device=device, client_failure=client_failure)
    cluster = context.cluster
    place = (
        f"Ray, {cluster.num_nodes} nodes, {cluster.num_slots} clients at a time "
        f"({cluster.description})"
    )
    return context, place, context.close


def _start_tff(
    device: str, max_concurrent_clients: int | None, client_failure: ClientFailure
) -> _Started:
    if device not in ("auto", "cpu"):
        raise EngineError(
            f"TFF's runtime works on the CPU alone. Found device={device!r}; use "
            "the local engine"
        )
    if client_failure is not ClientFailure.RAISE:
        raise EngineError("TFF's runtime cannot drop a client whose work fails")
    _leave_gpus_alone()
    cores = os.cpu_count() or 1
    factory = WorkerExecutorFactory(max_concurrent_clients or cores + 1)
    place = f"CPU, {cores} cores (TFF {tff.__version__} helper process)"
    return build_worker_context(factory), place, factory.close


def _end_current() -> None:
    """Ends the engine in use."""
    global _close
    _close()
    _close = _do_nothing


def _leave_gpus_alone() -> None:
    """Keeps TensorFlow in this process on the CPU.

    It evaluates and writes summaries. A GPU would be taken whole for that, while the
    clients, in the helper process, cannot use it.
    """
    try:
        tf.config.set_visible_devices([], "GPU")
    except RuntimeError:
        logging.warning("TensorFlow is already using a GPU, which the clients cannot.")


def _do_nothing() -> None:
    pass


# Ends the engine in use, when another takes its place.
_close: Callable[[], None] = _do_nothing
# Before the program ends its children: Ray would wait for its own for a minute.
process.call_at_end(_end_current)
