"""One run of run_distributed_dp: from a configuration to a run folder."""

import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow_federated as tff

from distributed_dp import accounting
from scripts import flags, report
from scripts.mechanism_plan import MechanismPlan, build_plans
from scripts.server_optimizer import build_server_optimizer
from scripts.training_config import TrainingConfig
from scripts.training_program import Program, ProgramParts
from scripts.weight_files import write_heads, write_model
from simulation import (
    checkpoint,
    client_training,
    cohort,
    evaluation,
    execution,
    learning,
    ledger,
    open_seed,
    plot,
    process,
    round_evaluation,
    run_folder,
    seeds,
    training,
)
from simulation.algorithm import FederatedAveraging
from simulation.model import Model
from simulation.population.federated_data import DataError
from simulation.tasks import load_task
from simulation.tasks.task import Task

_RESULTS_NAME = "results.json"
_PLOT_NAME = "plot.png"
# Of each test user: the final model, and the user's own.
_CLIENTS_NAME = "test_users"
_OWN_MODELS_NAME = "test_users_own_models"
# Of each user, for choices between settings.
_VALIDATION_NAME = "validation_users_own_models"
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


DISTRIBUTED_DP = Program(
    name="run_distributed_dp",
    build_parts=lambda config, *_: ProgramParts(
        algorithm=FederatedAveraging(proximal_strength=config.proximal_mu)
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """A run, with everything that its flags say made.

    Attributes:
        config: The configuration.
        program: The program that it is one of.
        parts: What the program makes of it.
        given_task: The task as the flags say it.
        task: The same as the program has it.
        model: The model.
        cohorts: Who joins which round.
        plans: The mechanisms.
        root: The root of the streams.
        open_root: The root of what is no secret: see `simulation.open_seed`.
        engine: What runs the computations.
        evaluated: The test examples that are evaluated.
    """

    config: TrainingConfig
    program: Program
    parts: ProgramParts
    given_task: Task
    task: Task
    model: Model
    cohorts: cohort.CohortSampler
    plans: Sequence[MechanismPlan]
    root: seeds.RootSeed
    open_root: seeds.RootSeed
    engine: execution.Execution
    evaluated: evaluation.EvaluationSet


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
        planned = _plan_run(config, program)
        settings = _describe_settings(planned)
        path = choose_folder(config, settings)
        stored = None if planned.root.reproducible else open_seed.read(path)
        if stored is not None:
            planned = _use_open_root(planned, stored)
        trainings = [_build_training(planned, plan) for plan in planned.plans]
    with process.user_errors(*_USER_ERRORS):
        with run_folder.open_run_folder(path, settings) as folder:
            if not planned.root.reproducible and stored is None:
                open_seed.write(path, planned.open_root)
            print(_describe_run(planned, path), flush=True)
            if (path / _RESULTS_NAME).exists():
                print("This folder holds this run, finished: its results once more.")
            elif folder.resumed:
                print("This folder holds a run with the same flags: going on.")
            results = {
                plan.name: training.run_training(
                    made, path if index == 0 else path / plan.name
                )
                for index, (plan, made) in enumerate(
                    zip(planned.plans, trainings, strict=True)
                )
            }
            statements = _compute_client_statements(planned, results)
            files = _write_results(planned, path, results, statements)
    print()
    print(
        report.describe_results(
            planned.task,
            results,
            planned.plans,
            dropout_rate=config.dropout_rate,
            client_statements=statements,
            files=files,
            seconds=time.monotonic() - started,
        ),
        flush=True,
    )
    return RunOutcome(folder=path, results=results)


def _plan_run(config: TrainingConfig, program: Program) -> _Run:
    """Makes everything that a run needs, and touches no file of its own."""
    root = seeds.build_root_seed(config.seed)
    open_root = root if root.reproducible else seeds.build_root_seed(None)
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
        num_epochs=config.epochs_per_round,
    )
    cohorts = _build_cohorts(config, task, root)
    parts = program.build_parts(config, task, model, cohorts, open_root)
    given_task, task = task, parts.task or task
    plans = build_plans(
        config,
        num_clients=task.num_clients,
        dim=parts.algorithm.count_sent(model.num_parameters),
        root=root,
        identity=task.identity,
        caveats=(*task.caveats, *parts.caveats),
        clients_keep_state=parts.algorithm.keeps_state,
    )
    if parts.client_privacy is not None:
        plans = [_rename_plan(plan) for plan in plans]
    return _Run(
        config=config,
        program=program,
        parts=parts,
        given_task=given_task,
        task=task,
        model=model,
        cohorts=cohorts,
        plans=plans,
        root=root,
        open_root=open_root,
        engine=engine,
        evaluated=evaluated,
    )


def _use_open_root(planned: _Run, open_root: seeds.RootSeed) -> _Run:
    """Returns the run with another open root."""
    task = planned.given_task
    parts = planned.program.build_parts(
        planned.config, task, planned.model, planned.cohorts, open_root
    )
    return dataclasses.replace(
        planned, parts=parts, task=parts.task or task, open_root=open_root
    )


def _rename_plan(plan: MechanismPlan) -> MechanismPlan:
    """Returns the plan of no mechanism, where clients have noise of their own."""
    if plan.parameters is not None:
        return plan
    return dataclasses.replace(plan, title="clients' own noise alone")


def _describe_run(planned: _Run, path: pathlib.Path) -> str:
    parts = planned.parts
    more = dict(parts.lines)
    if parts.client_privacy is not None:
        more["noise"] = parts.client_privacy.describe_noise()
    return report.describe_run(
        planned.config,
        planned.task,
        planned.model,
        planned.plans,
        engine=planned.engine,
        root=planned.root,
        folder=path,
        evaluated=planned.evaluated,
        more=more,
    )


def _build_training(planned: _Run, plan: MechanismPlan) -> training.Training:
    """Returns the training under a mechanism; all are on the same cohorts."""
    made = _build_process(planned, plan)
    return training.Training(
        label=plan.name,
        learning_process=made,
        model=planned.model,
        task=planned.task,
        cohorts=planned.cohorts,
        root=planned.root,
        noise_root=plan.noise_root,
        privacy=training.PrivacyTerms(
            compute_epsilon=plan.compute_epsilon,
            budget=None if plan.parameters is None else plan.epsilon,
            epsilon_name=plan.epsilon_name,
            describe=plan.describe_columns,
            clients=planned.parts.client_privacy,
        ),
        options=_build_options(planned.config, planned.parts.algorithm),
        engine=planned.engine,
        evaluator=planned.parts.evaluator
        or round_evaluation.TestEvaluator(
            planned.model,
            planned.evaluated,
            has_test_users=planned.task.has_test_users,
            personalize=getattr(made, "personalize", None),
        ),
    )


def _build_process(planned: _Run, plan: MechanismPlan) -> Any:
    config, wrap = planned.config, planned.parts.wrap_factory
    factory = plan.factory if wrap is None else wrap(plan)
    if config.client_weighting == "examples":
        factory = tff.aggregators.MeanFactory()
    return learning.build_learning_process(
        planned.model,
        factory,
        planned.parts.algorithm,
        client_optimizer=tff.learning.optimizers.build_sgdm(
            config.client_lr, momentum=config.client_momentum or None
        ),
        server_optimizer=build_server_optimizer(config),
        initial_weights=training.build_initial_weights(
            planned.model, planned.open_root
        ),
        measure_clients=config.keeps_diagnostics,
        wrap_finalizer=planned.parts.wrap_finalizer,
    )


def _build_cohorts(
    config: TrainingConfig, task: Task, root: seeds.RootSeed
) -> cohort.CohortSampler:
    """Returns who joins which round: drawn by the sampler that is accounted for."""
    client_ids = task.train.client_ids
    scheme = config.build_scheme(task.num_clients)
    if scheme.sampling is accounting.Sampling.POISSON:
        return cohort.PoissonCohort(
            client_ids=client_ids, sampling_rate=scheme.sampling_rate, root=root
        )
    return cohort.FixedCohort(
        client_ids=client_ids, clients_per_round=scheme.clients_per_round, root=root
    )


def _build_options(
    config: TrainingConfig, algorithm: FederatedAveraging
) -> training.TrainingOptions:
    return training.TrainingOptions(
        total_rounds=config.total_rounds,
        batch_size=config.batch_size,
        client_epochs=algorithm.count_epochs(config.client_epochs),
        dropout_rate=config.dropout_rate,
        straggler_rate=config.straggler_rate,
        eval_every=config.eval_every,
        checkpoint_every=config.checkpoint_every,
        diagnostics=config.keeps_diagnostics,
    )


def _describe_settings(planned: _Run) -> dict[str, Any]:
    """Returns the content of config.json: all that decides the result."""
    config, task, root = planned.config, planned.task, planned.root
    noise = planned.parts.client_privacy
    resolved = {
        # A name of the task: models of several sizes have one name of their own.
        "model": config.model or next(iter(task.models)),
        "delta": config.resolve_delta(task.num_clients),
        "central_accountant": config.central_accountant_kind.value,
    }
    return {
        "program": planned.program.name,
        "flags": {**config.to_dict(), **resolved},
        "seed": config.seed if root.reproducible else _ENTROPY,
        "reproducible": root.reproducible,
        "mechanisms": {
            plan.name: None
            if plan.parameters is None
            else dataclasses.asdict(plan.parameters)
            for plan in planned.plans
        },
        "client_noise": None if noise is None else noise.describe_noise(),
        "data": {
            "users": task.num_clients,
            **task.identity,
            **(
                {"evaluated": planned.evaluated.identify()}
                if config.keeps_diagnostics
                else {}
            ),
        },
        "versions": flags.read_versions(),
        # Other sources would not repeat the rounds that a crash took away.
        "sources": flags.read_sources() if root.reproducible else None,
    }


def choose_folder(config: TrainingConfig, settings: Mapping[str, Any]) -> pathlib.Path:
    """Returns the folder of a run: see `run_folder.choose_folder`."""
    return run_folder.choose_folder(
        config,
        settings,
        name=config.label,
        finished=_RESULTS_NAME,
    )


def _compute_client_statements(
    planned: _Run, results: Mapping[str, training.TrainingResult]
) -> dict[str, Any]:
    """Returns what clients have by noise of their own, under each mechanism."""
    noise, recorded = planned.parts.client_privacy, planned.config.keeps_diagnostics
    if noise is None:
        return {}
    return {
        name: noise.compute_statement(
            ledger.count_client_releases(result.ledger_state, recorded=recorded)
        )
        for name, result in results.items()
    }


def _choose_epsilon_axis(planned: _Run) -> dict[str, str]:
    """Returns which epsilon a plot is over: whole users', or of a client's examples."""
    noise, plan = planned.parts.client_privacy, planned.plans[0]
    if noise is None or plan.parameters is not None:
        return {"epsilon_name": plan.epsilon_name}
    return {
        "epsilon_column": "client_epsilon_max",
        "epsilon_name": f"clients' largest epsilon, {noise.accountant_name},",
    }


def _write_results(
    planned: _Run,
    path: pathlib.Path,
    results: Mapping[str, training.TrainingResult],
    client_statements: Mapping[str, Any],
) -> list[pathlib.Path]:
    """Writes results.json and the plot. Returns what to show of the folder."""
    config, task, plans = planned.config, planned.task, planned.plans
    files = [path / run_folder.CONFIG_NAME, path / training.METRICS_NAME]
    files += [path / plan.name / training.METRICS_NAME for plan in plans[1:]]
    if config.keeps_diagnostics:
        plot.save_training_plot(
            path / _PLOT_NAME,
            {plan.title: results[plan.name].metrics for plan in plans},
            column=_choose_metric_column(planned),
            title=f"{task.name}, {plans[0].scheme.clients_per_round} clients a round",
            **_choose_epsilon_axis(planned),
        )
        files.append(path / _PLOT_NAME)
    for plan in plans:
        own = path if plan is plans[0] else path / plan.name
        result = results[plan.name]
        files.append(write_model(own, result.weights))
        found = result.evaluation
        if found is None:
            continue
        if found.heads:
            files.append(write_heads(own, found.heads))
        for name, clients in (
            (_CLIENTS_NAME, found.clients),
            (_OWN_MODELS_NAME, found.own_models),
            (_VALIDATION_NAME, found.validation),
        ):
            if clients is not None:
                stem = f"{name}_synthetic_data" if task.is_synthetic else name
                run_folder.write_text(own / f"{stem}.csv", clients.to_csv())
                files.append(own / f"{stem}.csv")
    # Last: it marks the run as finished.
    summary = report.summarize_results(
        task,
        results,
        plans,
        dropout_rate=config.dropout_rate,
        client_statements=client_statements,
        evaluated=planned.evaluated if config.keeps_diagnostics else None,
    )
    run_folder.write_json(path / _RESULTS_NAME, summary)
    return [*files, path / _RESULTS_NAME, path / "tensorboard"]


def _choose_metric_column(planned: _Run) -> str:
    """Returns the column of metrics.csv that the plot shows."""
    own, metric = planned.parts.evaluator, planned.task.metric
    columns = [f"test_{metric}"] if own is None else own.columns
    return next(name for name in columns if name.endswith(f"_{metric}"))
