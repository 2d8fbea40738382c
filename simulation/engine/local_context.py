"""The context of TFF that runs computations in this process."""

import collections
import enum
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow_federated as tff

from simulation.engine import arguments, plan
from simulation.engine.cohort_run import ClientError, Workers
from simulation.engine.program import Cohort, Program

_KEPT_PROGRAMS = 64


class ClientFailure(enum.Enum):
    """What happens when a client's work fails.

    RAISE: the computation fails with an error that names the client.
    DROP: the client takes no part in what is aggregated, and is counted.
    """

    RAISE = "raise"
    DROP = "drop"


class LocalContext(tff.framework.SyncContext):
    """Runs TFF computations with this process's TensorFlow.

    Computations are compiled by TFF. Secure sums become plain sums: no cryptography is
    run. Every computation runs as soon as it is called; one thread may call at a time.

    Attributes:
        on_client_done: Told how many clients of how many are done, or None.
        failures: Clients of the last computation whose failure was not raised.
    """

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
        if default_num_clients < 0:
            raise ValueError(
                f"`default_num_clients` must be >= 0. Found {default_num_clients!r}."
            )
        num_workers = max_concurrent_clients or len(os.sched_getaffinity(0))
        self._slots = [
            devices[number % len(devices)] if devices else None
            for number in range(num_workers)
        ]
        self._workers = Workers(num_workers)
        self._default_num_clients = default_num_clients
        self._client_failure = client_failure
        self.on_client_done: Callable[[int, int], None] | None = None
        self.failures: list[ClientError] = []
        self._programs: collections.OrderedDict[int, tuple[Any, Program]] = (
            collections.OrderedDict()
        )

    @property
    def num_workers(self) -> int:
        """How many clients work at the same time."""
        return self._workers.num_workers

    def invoke(self, comp: tff.framework.ConcreteComputation, arg: Any) -> Any:
        """Runs a computation. Called by TFF.

        Raises:
            UnsupportedError: If the computation holds what this engine cannot run.
            ClientError: If a client's work fails.
            TypeError: If the argument does not fit the computation's parameter.
        """
        self.failures = []
        program = self._get_program(comp)
        parameter_type = comp.type_signature.parameter
        count = None
        if parameter_type is not None:
            count = arguments.count_clients(arg, parameter_type)

        def fail(failure: ClientError) -> None:
            if self._client_failure is ClientFailure.RAISE:
                raise failure
            self.failures.append(failure)

        cohort = Cohort(
            num_clients=self._default_num_clients if count is None else count,
            workers=self._workers,
            on_failure=fail,
            on_done=self.on_client_done,
        )
        return program.run(arg, parameter_type, cohort)

    def close(self) -> None:
        """Ends the threads and forgets what was compiled."""
        self._workers.close()
        self._programs.clear()

    def _get_program(self, comp: tff.framework.ConcreteComputation) -> Program:
        """Returns the compiled computation, kept for the next call."""
        key = id(comp)
        if key not in self._programs:
            program = Program(
                plan.build_plan(_compile(comp)),
                comp.type_signature.result,
                slots=self._slots,
            )
            # The computation is kept as well: no other one gets its id.
            self._programs[key] = (comp, program)
            while len(self._programs) > _KEPT_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key][1]


def _compile(
    comp: tff.framework.ConcreteComputation,
) -> tff.framework.ConcreteComputation:
    """Returns the computation in TFF's native form.

    TFF's own contexts let its compiler optimise each graph on the way. Here TensorFlow
    does so later, when all of a stage is one graph; and what TFF's compiler inlines
    early can hold branches that are never taken but no longer pass as a graph.
    """
    plain = tff.backends.test.replace_secure_intrinsics_with_bodies(comp)
    block, _ = tff.tensorflow.replace_intrinsics_with_bodies(plain.to_building_block())
    return tff.backends.native.transform_to_native_form(
        tff.framework.ConcreteComputation.from_building_block(block)
    )
