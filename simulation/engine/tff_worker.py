"""TFF's own runtime: a CPU-only helper process of TFF's package.

It is started here rather than by TFF's `set_sync_test_cpp_execution_context`, from the
same public parts, for three reasons: the process ends with this one; it does not hold
the standard output open; and the executors of past cohort sizes are released, which TFF
keeps for ever (7 MB a round under Poisson sampling).
"""

import atexit
import pathlib
import socket
import time
from typing import Any

import grpc
import tensorflow_federated as tff

from simulation import process
from simulation.engine.client_value import make_values
from simulation.engine.errors import EngineError

_WORKER = pathlib.Path(tff.__file__).parent / "data" / "worker_binary"
_START_SECONDS = 60.0
_MAX_MESSAGE_BYTES = 2_000_000_000
_WORKER_ENVIRONMENT = {
    # Only its errors are for the user.
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # What one cohort size needed is given back before the next one asks for it: with
    # glibc's defaults the process grows by some 3 MB a round, with these it stays.
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
# One cohort's executor and that of computations without clients.
_KEPT_EXECUTORS = 2


def build_worker_context(
    factory: "WorkerExecutorFactory",
) -> tff.framework.SyncExecutionContext:
    """Returns TFF's context over a helper process, with secure sums as plain sums."""
    return tff.framework.SyncExecutionContext(
        factory,
        _compile,
        transform_args=_transform_args,
        transform_result=tff.tensorflow.transform_result,
    )


def _transform_args(argument: Any) -> Any:
    """Returns an argument as TFF's runtime takes it."""
    return tff.tensorflow.transform_args(make_values(argument))


def _compile(computation: tff.Computation) -> tff.Computation:
    """Compiles for TFF's runtime, which has no secure sums."""
    return tff.backends.native.desugar_and_transform_to_native(
        tff.backends.test.replace_secure_intrinsics_with_bodies(computation)
    )


class WorkerExecutorFactory(tff.framework.ExecutorFactory):
    """Executors in one helper process, at most `_KEPT_EXECUTORS` at a time."""

    def __init__(self, max_concurrent_clients: int) -> None:
        """Starts the process.

        Args:
            max_concurrent_clients: How many clients work at the same time. The worker
                keeps a session for each, which it sets up anew for every cohort size:
                many cost a multiple of the time.

        Raises:
            EngineError: If it does not start.
        """
        port = _find_free_port()
        self._worker = process.start_child(
            [
                str(_WORKER),
                f"--port={port}",
                f"--max_concurrent_computation_calls={max_concurrent_clients}",
            ],
            environment=_WORKER_ENVIRONMENT,
        )
        atexit.register(self.close)
        self._executors: dict[int, tff.framework.RemoteExecutor] = {}
        channel = grpc.insecure_channel(
            f"localhost:{port}",
            [
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ],
        )
        self._stub = tff.framework.RemoteExecutorGrpcStub(channel)
        self._wait_until_ready()

    def create_executor(
        self, cardinalities: tff.framework.CardinalitiesType
    ) -> tff.framework.RemoteExecutor:
        """Returns the executor for a number of clients."""
        self._check_alive()
        num_clients = cardinalities.get(tff.CLIENTS, 0)
        executor = self._executors.pop(num_clients, None)
        if executor is None:
            while len(self._executors) >= _KEPT_EXECUTORS:
                self._executors.pop(next(iter(self._executors))).close()
            executor = tff.framework.RemoteExecutor(self._stub)
            executor.set_cardinalities({tff.CLIENTS: num_clients})
        # The last one used goes to the end.
        self._executors[num_clients] = executor
        return executor

    def clean_up_executor(self, cardinalities: tff.framework.CardinalitiesType) -> None:
        """Releases the executor for a number of clients."""
        executor = self._executors.pop(cardinalities.get(tff.CLIENTS, 0), None)
        if executor is not None:
            executor.close()

    def close(self) -> None:
        """Ends the helper process."""
        atexit.unregister(self.close)
        process.end_child(self._worker)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self._stub.is_ready:
            self._check_alive()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"TFF's helper process did not answer in {_START_SECONDS:.0f} s"
                )
            time.sleep(0.02)

    def _check_alive(self) -> None:
        code = self._worker.poll()
        if code is not None:
            hint = " (out of memory?)" if code == -9 else ""
            raise EngineError(f"TFF's helper process ended with code {code}{hint}")


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
