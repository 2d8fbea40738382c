"""One run of run_distributed_dp: from a configuration to a run folder."""

import dataclasses
import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow_federated as tff

from distributed_dp import accounting
from scripts import flags, report
from scripts.mechanism_plan import MechanismPlan, build_plans
from scripts.training_config import TrainingConfig
from simulation import (
    checkpoint,
    client_training,
    cohort,
    evaluation,
    execution,
    learning,
    ledger,
    plot,
    process,
    run_folder,
    seeds,
    training,
)
from simulation.model import Model
from simulation.population.federated_data import DataError
from simulation.tasks import load_task
from simulation.tasks.task import Task

_RESULTS_NAME = "results.json"
_PLOT_NAME = "plot.png"
_CLIENTS_NAME = "test_users.csv"
_SYNTHETIC_CLIENTS_NAME = "test_users_synthetic_data.csv"
_ENTROPY = "from the operating system"
_USER_ERRORS = (
    # A full disk, a folder in a file's place.
    OSError,
    DataError,
    checkpoint.CheckpointError,
    execution.ClientError,
    execution.EngineError,
    execution.UnsupportedError,
    ledger.LedgerError,
    run_folder.RunFolderError,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What a run left.

    Attributes:
        folder: Its folder.
        results: The result of each mechanism, by name.
    """

    folder: pathlib.Path
    results: Mapping[str, training.TrainingResult]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What tells one training program from another.

    Attributes:
        name: Its name, in config.json.
        wrap_finalizer: Of a configuration, what goes around the server's optimizer.
        describe: Of a configuration, more of the first lines, by their names.
    """

    name: str
    wrap_finalizer: Callable[[TrainingConfig], learning.WrapFinalizer | None]
    describe: Callable[[TrainingConfig], Mapping[str, str]]


DISTRIBUTED_DP = Program(
    name="run_distributed_dp",
    wrap_finalizer=lambda _: None,
    describe=lambda _: {},
)


def run(config: TrainingConfig, program: Program = DISTRIBUTED_DP) -> RunOutcome:
    """Trains as configured, prints what it does, and writes the run folder.

    Args:
        config: The configuration.
        program: The program that it is one of.

    Raises:
        UserError: For anything the user can mend.
    """
    started = time.monotonic()
    # Everything that can be wrong is found before the first file is written.
    with process.user_input(*_USER_ERRORS):
        root = seeds.build_root_seed(config.seed)
        # Before anything uses TensorFlow: it sets how many threads an op may take.
        engine = execution.set_execution_context(
            execution.Engine(config.engine),
            device=config.device,
            client_failure=execution.ClientFailure(config.client_failure),
            ray_address=config.ray_address,
        )
        options = flags.build_task_options(config)
        task = load_task(config.task, options)
        evaluated = evaluation.select_evaluation_set(
            task.test,
            max_examples=options.eval_examples or task.eval_examples,
            seed=options.data_seed,
            source={"task": task.name, **task.identity},
        )
        model = client_training.choose_stacking(
            task.build_model(config.model),
            task.train,
            batch_size=config.batch_size,
            num_epochs=config.client_epochs,
        )
        plans = build_plans(
            config,
            num_clients=task.num_clients,
            dim=model.num_parameters,
            root=root,
            identity=task.identity,
            caveats=task.caveats,
        )
        settings = _describe_settings(
            config, program, task, model, plans, root, evaluated
        )
        path = choose_folder(config, settings)
        trainings = _build_trainings(
            config, program, task, model, plans, root, engine, evaluated
        )
    with process.user_errors(*_USER_ERRORS):
        with run_folder.open_run_folder(path, settings) as folder:
            print(
                report.describe_run(
                    config,
                    task,
                    model,
                    plans,
                    engine=engine,
                    root=root,
                    folder=path,
                    evaluated=evaluated,
                    more=program.describe(config),
                ),
                flush=True,
            )
            if (path / _RESULTS_NAME).exists():
                print("This folder holds this run, finished: its results once more.")
            elif folder.resumed:
                print("This folder holds a run with the same flags: going on.")
            results = {
                plan.name: training.run_training(
                    planned, path if index == 0 else path / plan.name
                )
                for index, (plan, planned) in enumerate(
                    zip(plans, trainings, strict=True)
                )
            }
            files = _write_results(config, task, path, plans, results, evaluated)
    print()
    print(
        report.describe_results(
            task,
            results,
            plans,
            dropout_rate=config.dropout_rate,
            files=files,
            seconds=time.monotonic() - started,
        ),
        flush=True,
    )
    return RunOutcome(folder=path, results=results)


def _build_trainings(
    config: TrainingConfig,
    program: Program,
    task: Task,
    model: Model,
    plans: Sequence[MechanismPlan],
    root: seeds.RootSeed,
    engine: execution.Execution,
    evaluated: evaluation.EvaluationSet,
) -> list[training.Training]:
    """Returns a training for each mechanism, all on the same cohorts."""
    cohorts = _build_cohorts(task, plans[0].scheme, root)
    options = _build_options(config)
    return [
        training.Training(
            label=plan.name,
            learning_process=_build_process(
                config, model, plan, root, program.wrap_finalizer(config)
            ),
            model=model,
            task=task,
            cohorts=cohorts,
            root=root,
            noise_root=plan.noise_root,
            privacy=_build_terms(plan),
            options=options,
            engine=engine,
            evaluated=evaluated,
        )
        for plan in plans
    ]


def _build_process(
    config: TrainingConfig,
    model: Model,
    plan: MechanismPlan,
    root: seeds.RootSeed,
    wrap_finalizer: learning.WrapFinalizer | None,
) -> tff.learning.templates.LearningProcess:
    factory = plan.factory
    if config.client_weighting == "examples":
        factory = tff.aggregators.MeanFactory()
    return learning.build_federated_averaging(
        model,
        factory,
        client_optimizer=tff.learning.optimizers.build_sgdm(
            config.client_lr, momentum=config.client_momentum or None
        ),
        server_optimizer=_build_server_optimizer(config),
        initial_weights=training.build_initial_weights(model, root),
        measure_clients=config.keeps_diagnostics,
        proximal_strength=config.proximal_mu,
        wrap_finalizer=wrap_finalizer,
    )


def _build_server_optimizer(
    config: TrainingConfig,
) -> tff.learning.optimizers.Optimizer:
    optimizers, momentum = tff.learning.optimizers, config.server_momentum
    if config.server_optimizer == "sgd":
        return optimizers.build_sgdm(config.server_lr, momentum=momentum or None)
    adaptive = {"learning_rate": config.server_lr, "epsilon": config.server_epsilon}
    if config.server_optimizer == "adagrad":
        return optimizers.build_adagrad(**adaptive)
    build = {"adam": optimizers.build_adam, "yogi": optimizers.build_yogi}
    return build[config.server_optimizer](beta_1=momentum, **adaptive)


def _build_cohorts(
    task: Task, scheme: accounting.CohortScheme, root: seeds.RootSeed
) -> cohort.CohortSampler:
    client_ids = task.train.client_ids
    if scheme.sampling is accounting.Sampling.POISSON:
        return cohort.PoissonCohort(
            client_ids=client_ids, sampling_rate=scheme.sampling_rate, root=root
        )
    return cohort.FixedCohort(
        client_ids=client_ids, clients_per_round=scheme.clients_per_round, root=root
    )


def _build_options(config: TrainingConfig) -> training.TrainingOptions:
    return training.TrainingOptions(
        total_rounds=config.total_rounds,
        batch_size=config.batch_size,
        client_epochs=config.client_epochs,
        dropout_rate=config.dropout_rate,
        straggler_rate=config.straggler_rate,
        eval_every=config.eval_every,
        checkpoint_every=config.checkpoint_every,
        diagnostics=config.keeps_diagnostics,
    )


def _build_terms(plan: MechanismPlan) -> training.PrivacyTerms:
    return training.PrivacyTerms(
        compute_epsilon=plan.compute_epsilon,
        budget=None if plan.parameters is None else plan.epsilon,
        epsilon_name=plan.epsilon_name,
        describe=plan.describe_columns,
    )


def _describe_settings(
    config: TrainingConfig,
    program: Program,
    task: Task,
    model: Model,
    plans: Sequence[MechanismPlan],
    root: seeds.RootSeed,
    evaluated: evaluation.EvaluationSet,
) -> dict[str, Any]:
    """Returns the content of config.json: all that decides the result."""
    resolved = {
        "model": model.name,
        "delta": config.resolve_delta(task.num_clients),
        "central_accountant": config.central_accountant_kind.value,
    }
    return {
        "program": program.name,
        "flags": {**config.to_dict(), **resolved},
        "seed": config.seed if root.reproducible else _ENTROPY,
        "reproducible": root.reproducible,
        "mechanisms": {
            plan.name: None
            if plan.parameters is None
            else dataclasses.asdict(plan.parameters)
            for plan in plans
        },
        "data": {
            "users": task.num_clients,
            **task.identity,
            **({"evaluated": evaluated.identify()} if config.keeps_diagnostics else {}),
        },
        "versions": flags.read_versions(),
        # Other sources would not repeat the rounds that a crash took away.
        "sources": flags.read_sources() if root.reproducible else None,
    }


def choose_folder(config: TrainingConfig, settings: Mapping[str, Any]) -> pathlib.Path:
    """Returns the folder named by the flags, or one whose name follows from them.

    In the latter case a finished run is left alone: the next free number is taken.
    """
    root = pathlib.Path(config.output_root)
    if config.experiment is not None:
        return root / config.experiment
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    name = f"{config.task}-{config.mechanism}-{digest[:8]}"
    path, number = root / name, 1
    while (path / _RESULTS_NAME).exists():
        number += 1
        path = root / f"{name}-{number}"
    return path


def _write_results(
    config: TrainingConfig,
    task: Task,
    path: pathlib.Path,
    plans: Sequence[MechanismPlan],
    results: Mapping[str, training.TrainingResult],
    evaluated: evaluation.EvaluationSet,
) -> list[pathlib.Path]:
    """Writes results.json and the plot. Returns what to show of the folder."""
    files = [path / run_folder.CONFIG_NAME, path / training.METRICS_NAME]
    files += [path / plan.name / training.METRICS_NAME for plan in plans[1:]]
    if config.keeps_diagnostics:
        plot.save_training_plot(
            path / _PLOT_NAME,
            {plan.title: results[plan.name].metrics for plan in plans},
            metric=task.metric,
            title=f"{task.name}, {plans[0].scheme.clients_per_round} clients a round",
            epsilon_name=plans[0].epsilon_name,
        )
        files.append(path / _PLOT_NAME)
    for plan in plans:
        clients = results[plan.name].clients
        if clients is not None:
            own = path if plan is plans[0] else path / plan.name
            name = _SYNTHETIC_CLIENTS_NAME if task.is_synthetic else _CLIENTS_NAME
            run_folder.write_text(own / name, clients.to_csv())
            files.append(own / name)
    # Last: it marks the run as finished.
    summary = report.summarize_results(
        task,
        results,
        plans,
        dropout_rate=config.dropout_rate,
        evaluated=evaluated if config.keeps_diagnostics else None,
    )
    run_folder.write_json(path / _RESULTS_NAME, summary)
    return [*files, path / _RESULTS_NAME, path / "tensorboard"]
