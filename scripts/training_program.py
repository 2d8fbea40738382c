"""What tells one training program from another."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from scripts.mechanism_plan import MechanismPlan
from scripts.training_config import TrainingConfig
from simulation import cohort, learning, round_evaluation, seeds, training
from simulation.algorithm import FederatedAveraging
from simulation.model import Model
from simulation.tasks.task import Task


class ClientPrivacy(training.ClientTerms, Protocol):
    """The privacy that clients have each for itself, by noise of their own."""

    def compute_statement(self, num_releases: np.ndarray) -> Any:
        """Returns what is claimed after each client's number of releases."""

    def describe_noise(self) -> str:
        """Returns the noise, for the first lines of a run."""

    @property
    def accountant_name(self) -> str:
        """The name of what its epsilons rest on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramParts:
    """What a training program makes of its own flags.

    Attributes:
        algorithm: What clients do, keep and send.
        wrap_finalizer: What goes around the server's step, or None.
        wrap_factory: Makes a plan's factory another one; None leaves it as it is.
        lines: More of the first lines, by their names.
        client_privacy: What clients have by noise of their own, or None.
        caveats: What a mechanism's epsilon does not cover, beyond what it says itself.
        task: The task, where the program changes it; None leaves it.
        evaluator: What looks at the model; None for the task's test data.
    """

    algorithm: FederatedAveraging
    wrap_finalizer: learning.WrapFinalizer | None = None
    wrap_factory: Callable[[MechanismPlan], learning.AggregationFactory] | None = None
    lines: Mapping[str, str] = dataclasses.field(default_factory=dict)
    client_privacy: ClientPrivacy | None = None
    caveats: Sequence[str] = ()
    task: Task | None = None
    evaluator: round_evaluation.Evaluator | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What tells one training program from another.

    Attributes:
        name: Its name, in config.json.
        build_parts: Of a configuration, its task, model, cohorts and the open root,
            its own parts.
    """

    name: str
    build_parts: Callable[
        [TrainingConfig, Task, Model, cohort.CohortSampler, seeds.RootSeed],
        ProgramParts,
    ]
