"""Why one method leads: what its clients send, over the rounds of one run.

The run is one of those that are reported, its rounds repeated with the same streams
under an aggregator that measures, too. All of it is exact functions of private data.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_federated as tff

from centaur import algorithms
from centaur.diagnosis import MeasuringFactory, PartRow, Row, compute_row
from scripts import centaur_training, distributed_training, mechanism_plan
from scripts import flags as run_flags
from scripts.centaur_comparison_config import ComparisonConfig, Point, Run
from scripts.centaur_config import CentaurConfig, Method
from scripts.server_optimizer import build_server_optimizer
from simulation import (
    client_data,
    client_states,
    client_training,
    cohort,
    execution,
    learning,
    process,
    progress,
    run_folder,
    seeds,
    table,
    training,
)
from simulation.population.federated_data import DataError
from simulation.tasks import load_task
from simulation.tasks.task import Task

METHODS = (Method.CENTAUR, Method.FEDAVG_FB, Method.PPSGD_AUTHORS)
_NAME = "diagnosis.csv"
_USER_ERRORS = (
    OSError,
    DataError,
    execution.ClientError,
    execution.EngineError,
    execution.UnsupportedError,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was measured of a run.

    Attributes:
        run: The run.
        rows: Of each round.
        weights: What the server holds at the end.
    """

    run: Run
    rows: tuple[Row, ...]
    weights: tuple[np.ndarray, ...] = dataclasses.field(repr=False)

    def average(self) -> dict[str, float]:
        """Returns the means over rounds, by name; NaN where nothing was measured."""
        flat = [flatten(row) for row in self.rows]
        return {name: float(np.mean([row[name] for row in flat])) for name in flat[0]}

    def to_dict(self) -> dict[str, Any]:
        """Returns the run, and the means over rounds, as JSON values."""
        return {
            "method": self.run.method.value,
            "epsilon": self.run.epsilon,
            "seed": self.run.seed,
            **self.run.point,
            "means_over_rounds": self.average(),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Measured:
    """A run that is ready to be repeated.

    Attributes:
        config: Its configuration.
        task: The clients' data.
        algorithm: What is trained.
        plan: The mechanism.
        learning_process: The learning process, which measures.
        cohorts: Who joins which round.
        root: The root of the streams.
        padded: Whether clients of similar size get equal shapes.
    """

    config: CentaurConfig
    task: Task
    algorithm: algorithms.PersonalAlgorithm
    plan: mechanism_plan.MechanismPlan
    learning_process: Any
    cohorts: cohort.CohortSampler
    root: seeds.RootSeed
    padded: bool


def diagnose_all(
    config: ComparisonConfig, points: Mapping[Method, Point]
) -> list[Diagnosis]:
    """Returns what was measured of one run of each method that is diagnosed.

    It is the run of the first seed, at the epsilon that is shown of all.

    Args:
        config: The comparison.
        points: The settings of each method.
    """
    methods = [method for method in METHODS if method in config.method_kinds]
    total = len(methods) * config.total_rounds
    found = []
    with progress.show_progress("diagnosis", 0, total, unit="round") as bar:
        for method in methods:
            run = config.plan_run(
                method, config.shown_epsilon, config.seeds[0], points[method]
            )
            bar.set_postfix_str(run.name)
            found.append(diagnose(config, run, on_round=bar.update))
    return found


def diagnose(config: ComparisonConfig, run: Run, *, on_round: Any = None) -> Diagnosis:
    """Repeats the rounds of a run, and returns what was measured of them.

    Args:
        config: The comparison.
        run: One of its runs, in which something is sent.
        on_round: Called after every round.

    Raises:
        UserError: For anything the user can mend.
    """
    with process.user_input(*_USER_ERRORS):
        made = _prepare(config.build_run(run))
    options, kept = (
        made.config,
        client_states.ClientStates(
            initial=getattr(made.learning_process, "initial_client_state", ())
        ),
    )
    load = client_data.ClientLoader(
        data=made.task.train,
        batch_size=options.batch_size,
        num_epochs=made.algorithm.count_epochs(options.client_epochs),
        padded=made.padded,
    )
    state, rows = made.learning_process.initialize(), []
    for number in range(options.total_rounds):
        joined = made.cohorts.select(number)
        reporting = cohort.select_survivors(
            joined, root=made.root, round_number=number, rate=options.dropout_rate
        )
        keys = [
            client_data.derive_key(
                client_id,
                root=made.root,
                noise_root=made.plan.noise_root,
                round_number=number,
                num_joined=len(joined),
                client_state=kept.get(client_id),
                straggler_rate=options.straggler_rate,
            )
            for client_id in reporting
        ]
        with process.user_errors(*_USER_ERRORS):
            output = made.learning_process.next(
                state, [execution.ClientValue(load, key) for key in keys]
            )
        state = output.state
        if kept.initial:
            kept = kept.replace(reporting, output.client_states)
        rows.append(_build_row(made, output.metrics["aggregator"]))
        if on_round is not None:
            on_round()
    weights = tuple(np.asarray(part) for part in state.global_model_weights.trainable)
    return Diagnosis(run=run, rows=tuple(rows), weights=weights)


def write(folder: pathlib.Path, diagnoses: Sequence[Diagnosis]) -> list[pathlib.Path]:
    """Writes a row a round and method. Returns the file."""
    rows = table.Table()
    for one in diagnoses:
        for number, row in enumerate(one.rows):
            rows = rows.append(
                {
                    "method": one.run.method.value,
                    "epsilon": one.run.epsilon,
                    "seed": one.run.seed,
                    "round": number + 1,
                    **{
                        name: None if math.isnan(value) else value
                        for name, value in flatten(row).items()
                    },
                }
            )
    run_folder.write_text(folder / _NAME, rows.to_csv())
    return [folder / _NAME]


def flatten(row: Row) -> dict[str, float]:
    """Returns the numbers of a row, by name; NaN for a head that is not sent."""
    found = {"num_clients": row.num_clients, "fraction_clipped": row.fraction_clipped}
    for name in ("whole", "representation", "head"):
        part: PartRow | None = getattr(row, name)
        for field in dataclasses.fields(PartRow):
            value = math.nan if part is None else getattr(part, field.name)
            found[f"{name}_{field.name}"] = value
    return found


def _prepare(config: CentaurConfig) -> _Measured:
    """Makes what scripts/distributed_training makes of the same configuration."""
    root = seeds.build_root_seed(config.seed)
    execution.set_execution_context(
        execution.Engine(config.engine),
        device=config.device,
        ray_address=config.ray_address,
    )
    task = load_task(config.task, run_flags.build_task_options(config))
    model = client_training.choose_stacking(
        task.build_model(config.model),
        task.train,
        batch_size=config.batch_size,
        num_epochs=config.epochs_per_round,
    )
    cohorts = distributed_training.build_cohorts(config, task, root)
    parts = centaur_training.PROGRAM.build_parts(config, task, model, cohorts, root)
    algorithm, task = parts.algorithm, parts.task or task
    assert isinstance(algorithm, algorithms.PersonalAlgorithm)
    (plan,) = mechanism_plan.build_plans(
        config,
        num_clients=task.num_clients,
        dim=algorithm.count_sent(model.num_parameters),
        root=root,
        identity=task.identity,
    )
    factory = MeasuringFactory(
        plan.factory,
        l2_clip=None if plan.parameters is None else plan.parameters.l2_clip,
        num_representation_weights=algorithm.split.num_representation_weights,
    )
    made = learning.build_learning_process(
        model,
        factory,
        algorithm,
        client_optimizer=tff.learning.optimizers.build_sgdm(
            config.client_lr, momentum=config.client_momentum or None
        ),
        server_optimizer=build_server_optimizer(config),
        initial_weights=training.build_initial_weights(model, root),
        measure_clients=False,
    )
    return _Measured(
        config=config,
        task=task,
        algorithm=algorithm,
        plan=plan,
        learning_process=made,
        cohorts=cohorts,
        root=root,
        padded=model.stackable,
    )


def _build_row(made: _Measured, measurements: Mapping[str, Any]) -> Row:
    split, parameters = made.algorithm.split, made.plan.parameters
    sent = made.algorithm.count_sent(split.model.num_parameters)
    return compute_row(
        measurements,
        central_stddev=0.0 if parameters is None else parameters.central_stddev,
        num_representation=split.num_representation_parameters,
        num_head=sent - split.num_representation_parameters,
    )
