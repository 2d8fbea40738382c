"""What the contexts of our engines share: compiling, checking, and keeping programs."""

import abc
import collections
import enum
from collections.abc import Callable
from typing import Any

import tensorflow_federated as tff

from simulation.engine import arguments, lockstep, plan
from simulation.engine.client_pass import PassInputs, PassResult, Watch
from simulation.engine.cohort_run import ClientError
from simulation.engine.program import Program

_KEPT_PROGRAMS = 64
# Runs the pass that follows a level of one computation.
WatchedRunner = Callable[[int, PassInputs, Watch], PassResult]


class ClientFailure(enum.Enum):
    """What happens when a client's work fails.

    RAISE: the computation fails with an error that names the client.
    DROP: the client takes no part in what is aggregated from then on, and is counted.
        Where a computation asks the clients several times, what it gave before stays.
    """

    RAISE = "raise"
    DROP = "drop"


class EngineContext(tff.framework.SyncContext):
    """Runs TFF computations: the server's work in this process's TensorFlow.

    Computations are compiled by TFF. Secure sums become plain sums: no cryptography is
    run. Every computation runs as soon as it is called; one thread may call at a time.

    Attributes:
        on_client_done: Told how many clients of how many are done, or None.
        failures: Clients of the last computation whose failure was not raised.
    """

    def __init__(
        self,
        *,
        device: str | None,
        default_num_clients: int,
        client_failure: ClientFailure,
    ) -> None:
        """Prepares.

        Args:
            device: TensorFlow's name of the server's device, None for its choice.
            default_num_clients: The number of clients of a computation whose argument
                does not tell.
            client_failure: What to do about a client whose work fails.

        Raises:
            ValueError: If a number is out of range.
        """
        if default_num_clients < 0:
            raise ValueError(
                f"`default_num_clients` must be >= 0. Found {default_num_clients!r}."
            )
        self._device = device
        self._default_num_clients = default_num_clients
        self._client_failure = client_failure
        self.on_client_done: Callable[[int, int], None] | None = None
        self.failures: list[ClientError] = []
        self._programs: collections.OrderedDict[
            int, tuple[Any, Program, WatchedRunner]
        ] = collections.OrderedDict()

    def invoke(self, comp: tff.framework.ConcreteComputation, arg: Any) -> Any:
        """Runs a computation. Called by TFF.

        Raises:
            UnsupportedError: If the computation holds what this engine cannot run.
            ClientError: If a client's work fails.
            TypeError: If the argument does not fit the computation's parameter.
        """
        self.failures = []
        program, run_pass = self._get_program(comp)
        parameter_type = comp.type_signature.parameter
        count = None
        if parameter_type is not None:
            count = arguments.count_clients(arg, parameter_type)
        watch = Watch(on_failure=self._take_failure, on_done=self.on_client_done)
        return program.run(
            arg,
            parameter_type,
            num_clients=self._default_num_clients if count is None else count,
            run_pass=lambda level, given: run_pass(level, given, watch),
        )

    def close(self) -> None:
        """Ends what the context started, and forgets what was compiled."""
        self._programs.clear()
        lockstep.forget_shared()

    @abc.abstractmethod
    def _prepare_passes(
        self, compiled: tff.framework.ConcreteComputation, program: Program
    ) -> WatchedRunner:
        """Returns what runs the passes of a compiled computation."""

    def _take_failure(self, failure: ClientError) -> None:
        if self._client_failure is ClientFailure.RAISE:
            raise failure
        known = {former.client_index for former in self.failures}
        # In a later pass it fails again, for want of what it gave before.
        if failure.client_index not in known:
            self.failures.append(failure)

    def _get_program(
        self, comp: tff.framework.ConcreteComputation
    ) -> tuple[Program, WatchedRunner]:
        """Returns the compiled computation, kept for the next call."""
        key = id(comp)
        if key not in self._programs:
            compiled = _compile(comp)
            program = Program(
                plan.build_plan(compiled),
                comp.type_signature.result,
                device=self._device,
            )
            # The computation is kept as well: no other one gets its id.
            runner = self._prepare_passes(compiled, program)
            self._programs[key] = (comp, program, runner)
            while len(self._programs) > _KEPT_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        _, program, runner = self._programs[key]
        return program, runner


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
