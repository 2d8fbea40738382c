"""Execution engines: what runs TFF computations, and where. All contexts are set here.

Secure sums are replaced by plain sums in every engine: no cryptography is run.
"""

import dataclasses
import enum
import os
from collections.abc import Callable

import tensorflow as tf
import tensorflow_federated as tff
from absl import logging

from simulation.engine import devices
from simulation.engine.client_value import ClientValue
from simulation.engine.cohort_run import ClientError
from simulation.engine.context import ClientFailure
from simulation.engine.errors import EngineError
from simulation.engine.local_context import LocalContext
from simulation.engine.local_evaluation import UnsupportedError
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
]


class Engine(enum.Enum):
    """What runs the computations.

    LOCAL: this process's TensorFlow, on the CPU or on GPUs.
    TFF: the runtime that TFF ships, in a helper process, on the CPU.
    """

    LOCAL = "local"
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
    _context: LocalContext | None = dataclasses.field(default=None, repr=False)

    def watch_clients(self, on_done: Callable[[int, int], None] | None) -> None:
        """Tells `on_done` how many clients of how many are done, during each call.

        Not guaranteed: TFF's runtime does not tell.
        """
        if self._context is not None:
            self._context.on_client_done = on_done

    @property
    def failures(self) -> tuple[ClientError, ...]:
        """Clients of the last call that were dropped because their work failed."""
        return () if self._context is None else tuple(self._context.failures)


def set_execution_context(
    engine: Engine = Engine.LOCAL,
    *,
    device: str = "auto",
    max_concurrent_clients: int | None = None,
    client_failure: ClientFailure = ClientFailure.RAISE,
) -> Execution:
    """Makes `engine` run every TFF computation that this process calls from now on.

    Args:
        engine: The engine.
        device: "auto" (all GPUs where there are any), "cpu" or "gpu:<number>".
        max_concurrent_clients: How many clients work at the same time, None for the
            number of cores (one more in TFF's runtime).
        client_failure: What happens when a client's work fails.

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
    global _close
    if engine is Engine.TFF:
        if device not in ("auto", "cpu"):
            raise EngineError(
                f"TFF's runtime works on the CPU alone. Found device={device!r}; use "
                "the local engine"
            )
        if client_failure is not ClientFailure.RAISE:
            raise EngineError("TFF's runtime cannot drop a client whose work fails")
        _leave_gpus_alone()
        _close()
        cores = os.cpu_count() or 1
        factory = WorkerExecutorFactory(max_concurrent_clients or cores + 1)
        _close = factory.close
        tff.framework.set_default_context(build_worker_context(factory))
        place = f"CPU, {cores} cores (TFF {tff.__version__} helper process)"
        return Execution(engine=engine, device=place)
    if max_concurrent_clients != 1:
        devices.give_clients_the_cores()
    names = devices.select_devices(device)
    _close()
    context = LocalContext(
        devices=names,
        max_concurrent_clients=max_concurrent_clients,
        client_failure=client_failure,
    )
    _close = context.close
    tff.framework.set_default_context(context)
    place = (
        f"{devices.describe_devices(names)}, {context.num_workers} clients at a time"
    )
    return Execution(engine=engine, device=place, _context=context)


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
