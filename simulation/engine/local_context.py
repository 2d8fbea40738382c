"""The context of TFF that runs computations in this process."""

import os
from collections.abc import Sequence

import tensorflow_federated as tff

from simulation.engine.client_pass import (
    ClientPass,
    PassInputs,
    PassResult,
    Watch,
    run_locally,
)
from simulation.engine.cohort_run import Workers
from simulation.engine.context import ClientFailure, EngineContext, WatchedRunner
from simulation.engine.program import Program


class LocalContext(EngineContext):
    """Runs TFF computations with this process's TensorFlow."""

    def __init__(
        self,
        *,
        devices: Sequence[str] = (),
        max_concurrent_clients: int | None = None,
        default_num_clients: int = 0,
        client_failure: ClientFailure = ClientFailure.RAISE,
    ) -> None:
        """Starts the context.

        Args:
            devices: TensorFlow's names of the devices that share the clients; the
                server works on the first. Empty for TensorFlow's choice.
            max_concurrent_clients: How many clients work at the same time, None for
                the number of cores.
            default_num_clients: The number of clients of a computation whose argument
                does not tell.
            client_failure: What to do about a client whose work fails.

        Raises:
            ValueError: If a number is out of range.
        """
        if max_concurrent_clients is not None and max_concurrent_clients < 1:
            raise ValueError(
                "`max_concurrent_clients` must be >= 1 or None. "
                f"Found {max_concurrent_clients!r}."
            )
        super().__init__(
            device=devices[0] if devices else None,
            default_num_clients=default_num_clients,
            client_failure=client_failure,
        )
        num_workers = max_concurrent_clients or len(os.sched_getaffinity(0))
        self._slots = [
            devices[number % len(devices)] if devices else None
            for number in range(num_workers)
        ]
        self._workers = Workers(num_workers)

    @property
    def num_workers(self) -> int:
        """How many clients work at the same time."""
        return self._workers.num_workers

    def close(self) -> None:
        """Ends the threads and forgets what was compiled."""
        self._workers.close()
        super().close()

    def _prepare_passes(
        self, compiled: tff.framework.ConcreteComputation, program: Program
    ) -> WatchedRunner:
        """Returns what runs the passes of a compiled computation."""
        del compiled
        return _LocalPasses(program, self._slots, self._workers)


class _LocalPasses:
    """Runs the passes of one computation on threads.

    Attributes:
        passes: Their functions, by level.
    """

    def __init__(
        self, program: Program, slots: Sequence[str | None], workers: Workers
    ) -> None:
        self.passes = {
            level: ClientPass(current, slots=slots)
            for level, current in enumerate(program.passes)
            if current is not None
        }
        self._workers = workers

    def __call__(self, level: int, given: PassInputs, watch: Watch) -> PassResult:
        return run_locally(self.passes[level], given, self._workers, watch)
