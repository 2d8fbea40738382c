"""What a training prints: its first lines, and its last."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from distributed_dp import accounting
from scripts.field_list import format_fields
from scripts.mechanism_plan import REFERENCE_DELTA, MechanismPlan
from scripts.training_config import TrainingConfig
from simulation import evaluation, execution, round_evaluation, seeds, training
from simulation.model import Model
from simulation.tasks.task import Task

_NO_SERVER_PRIVACY = (
    "Privacy, the server itself: none (epsilon = inf). It sees the exact sum of the "
    "clipped updates before it adds the noise"
)


def describe_run(
    config: TrainingConfig,
    task: Task,
    model: Model,
    plans: Sequence[MechanismPlan],
    *,
    engine: execution.Execution,
    root: seeds.RootSeed,
    folder: pathlib.Path,
    evaluated: evaluation.EvaluationSet,
    more: Mapping[str, str],
) -> str:
    """Returns the first lines: what the run will do."""
    scheme = plans[0].scheme
    cohort = f"{scheme.clients_per_round} a round, {scheme.sampling.value} sampling"
    lines = {
        "task": f"{task.name}: {task.description}",
        "users": f"{task.num_clients:,}; {cohort} (q = {scheme.sampling_rate:.4g}); "
        f"{config.total_rounds} rounds",
        "model": f"{model.name}, {model.num_parameters:,} parameters",
        "clients": _describe_client_work(config),
        "server": _describe_server(config),
        **more,
    }
    if config.keeps_diagnostics:
        lines.setdefault("evaluated", _describe_evaluated(evaluated, task))
    for index, plan in enumerate(plans):
        lines["mechanism" if index == 0 else "beside it"] = _describe_mechanism(plan)
    if config.dropout_rate:
        lines["dropout"] = f"{config.dropout_rate:g} of a cohort never report"
    if not config.keeps_diagnostics:
        lines["diagnostics"] = "off: neither measured nor written, no test accuracy"
    lines["engine"] = f"{engine.engine.value} on {engine.device}"
    lines["secrecy"] = "simulated: secure sums are plain sums, no cryptography is run"
    lines["randomness"] = root.description
    lines["output"] = str(folder)
    return format_fields(lines)


def describe_results(
    task: Task,
    results: Mapping[str, training.TrainingResult],
    plans: Sequence[MechanismPlan],
    *,
    dropout_rate: float,
    client_statements: Mapping[str, Any],
    files: Sequence[pathlib.Path],
    seconds: float,
) -> str:
    """Returns the last lines: what came out, what it cost, and where it lies."""
    blocks = [_format_results(task, results, plans)]
    for plan in plans:
        found = results[plan.name].evaluation
        if found is None:
            continue
        for title, clients in (
            (f"Test users, {plan.title}", found.clients),
            (f"Test users, {plan.title}, each with its own model", found.own_models),
            (f"The same on their validation parts, {plan.title}", found.validation),
        ):
            if clients is not None:
                blocks.append(f"{title}: {_describe_clients(task, clients)}")
    for plan in plans:
        whole = _describe_privacy(plan, results[plan.name], dropout_rate)
        if plan.name in client_statements:
            blocks.append(f"Whole users, {whole}\n\n{client_statements[plan.name]}")
        else:
            blocks.append(whole)
    lines = {
        "wall time": f"{seconds:.1f} s",
        "files": "\n".join(str(file) for file in files),
    }
    return "\n\n".join([*blocks, format_fields(lines)])


def summarize_results(
    task: Task,
    results: Mapping[str, training.TrainingResult],
    plans: Sequence[MechanismPlan],
    *,
    dropout_rate: float,
    client_statements: Mapping[str, Any],
    evaluated: evaluation.EvaluationSet | None,
) -> dict[str, object]:
    """Returns the same as JSON values, for results.json."""
    summary: dict[str, object] = {
        "task": task.name,
        "description": task.description,
        "metric": task.metric,
        "evaluated": None if evaluated is None else evaluated.identify(),
        "not_covered_by_epsilon": list(task.caveats),
    }
    for plan in plans:
        result = results[plan.name]
        state = result.ledger_state
        clients = client_statements.get(plan.name)
        server = plan.compute_server_statement(state, dropout_rate=dropout_rate)
        summary[plan.name] = {
            "title": plan.title,
            "test": None if result.final is None else dict(result.final),
            **_summarize_users(result.evaluation),
            "rounds_completed": state.rounds_completed,
            "rounds_spent": state.rounds_spent,
            "stopped": result.stopped,
            "bits_per_client": plan.bits_per_client,
            "privacy": [
                statement.to_dict() for statement in _compute_statements(plan, result)
            ],
            "server_privacy": None if server is None else server.to_dict(),
            "client_privacy": None if clients is None else clients.to_dict(),
        }
    return summary


def _summarize_users(
    found: round_evaluation.FinalEvaluation | None,
) -> dict[str, object]:
    """Returns how the metrics are spread over users, None where there are none."""
    names = {
        "test_users": "clients",
        "test_users_own_models": "own_models",
        "validation_users_own_models": "validation",
    }
    summary: dict[str, object] = {}
    for name, field in names.items():
        clients = getattr(found, field, None)
        summary[name] = None if clients is None else clients.summarize()
    return summary


def _describe_client_work(config: TrainingConfig) -> str:
    parts = [f"SGD at {config.client_lr:g}"]
    if config.client_momentum:
        parts.append(f"momentum {config.client_momentum:g}")
    parts.append(f"batch {config.batch_size}")
    parts.append(f"{config.client_epochs} local epoch(s)")
    if config.straggler_rate:
        parts.append(f"fewer for stragglers (rate {config.straggler_rate:g})")
    if config.proximal_mu:
        parts.append(f"proximal term of mu = {config.proximal_mu:g}")
    if config.client_weighting != "uniform":
        parts.append("weighted by examples")
    return ", ".join(parts)


def _describe_server(config: TrainingConfig) -> str:
    name, momentum = config.server_optimizer, config.server_momentum
    title = "SGD" if name == "sgd" else name.capitalize()
    text = f"{title} at {config.server_lr:g}"
    if name != "adagrad":
        text += f", {'momentum' if name == 'sgd' else 'beta_1'} {momentum:g}"
    return text if name == "sgd" else f"{text}, epsilon {config.server_epsilon:g}"


def _describe_evaluated(evaluated: evaluation.EvaluationSet, task: Task) -> str:
    identity = evaluated.identify()
    text = f"{evaluated.num_examples:,} test examples"
    if task.has_test_users:
        text += f" of {len(evaluated.client_ids):,} users"
    if not evaluated.is_whole:
        text += (
            f", a subset drawn with data seed {evaluated.seed} from "
            f"{identity['of_clients']:,} users"
        )
    return f"{text}; digest {identity['digest']}"


def _describe_clients(task: Task, clients: evaluation.ClientMetrics) -> str:
    """Returns how the task's metric is spread over the test users."""
    spread = clients.summarize()[task.metric]
    if spread is None:
        return f"no {task.metric}"
    deciles = " ".join(f"{value:.3f}" for value in spread["deciles"])
    return (
        f"{spread['clients']:,} with {task.metric} {spread['mean']:.4f} on average "
        f"(standard deviation {spread['stddev']:.4f}), worst tenth "
        f"{spread['worst_10_percent']:.4f}, deciles {deciles}"
    )


def _describe_mechanism(plan: MechanismPlan) -> str:
    parameters = plan.parameters
    if parameters is None:
        return f"{plan.title}, updates are not clipped"
    parts = [
        f"{plan.title}: {plan.epsilon_name} <= {plan.epsilon:g} at delta = "
        f"{plan.delta:.4g} ({plan.standing.value}, {plan.accountant.value.upper()}); "
        f"clip {parameters.l2_clip:g}{' (adaptive)' if plan.adaptive_clip else ''}, "
        f"noise multiplier {parameters.noise_multiplier:.4f}, standard deviation of "
        f"the sum {parameters.central_stddev:.4g}"
    ]
    if isinstance(parameters, accounting.DistributedParameters):
        parts.append(
            f"; shares of {parameters.local_stddev:.4g} at "
            f"{parameters.clients_per_round} clients, granularity "
            f"{parameters.granularity:.4g}, {parameters.padded_dim:,} coordinates"
        )
    return "".join(parts)


def _format_results(
    task: Task,
    results: Mapping[str, training.TrainingResult],
    plans: Sequence[MechanismPlan],
) -> str:
    rows = [
        (
            "mechanism",
            f"test {task.metric}",
            "test loss",
            plans[0].epsilon_name,
            "rounds",
            "bits/client/round",
            "seconds",
        )
    ]
    for plan in plans:
        result = results[plan.name]
        final = result.final
        state = result.ledger_state
        rows.append(
            (
                plan.title,
                "-" if final is None else f"{final[task.metric]:.4f}",
                "-" if final is None else f"{final['loss']:.4f}",
                f"{plan.compute_epsilon(state.rounds_spent):.4g}",
                str(state.rounds_completed),
                f"{plan.bits_per_client:,}",
                f"{result.seconds:.1f}",
            )
        )
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = [
        "  ".join(
            field.ljust(width) if index == 0 else field.rjust(width)
            for index, (field, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    for plan in plans:
        result = results[plan.name]
        if result.stopped is not None:
            lines.append(f"{plan.title} stopped early: {result.stopped}")
        dropped = _count_nonfinite(result)
        if dropped:
            lines.append(
                f"{plan.title}: {dropped:,} updates were not finite (NaN or infinity) "
                "and counted as zero: the clients' training diverged there"
            )
        if result.ledger_state.rounds_lost:
            lines.append(
                f"{plan.title}: {result.ledger_state.rounds_lost} rounds were lost in "
                "a crash, repeated with fresh noise, and counted twice"
            )
    return "\n".join(lines)


def _count_nonfinite(result: training.TrainingResult) -> int:
    """Returns how many updates were dropped, where that was measured."""
    if "num_nonfinite" not in result.metrics.columns:
        return 0
    found = result.metrics.read_column("num_nonfinite")
    return sum(int(float(number)) for number in found if number)


def _describe_privacy(
    plan: MechanismPlan, result: training.TrainingResult, dropout_rate: float
) -> str:
    statements = _compute_statements(plan, result)
    if not statements:
        return f"{plan.title}: epsilon = inf"
    blocks = [str(statements[0])]
    for other in statements[1:]:
        blocks.append(
            f"  the same at delta = {other.delta:g} (delta * N = "
            f"{other.delta * other.num_clients:.3g}): {plan.epsilon_name} = "
            f"{other.epsilon:.6g}"
        )
    state = result.ledger_state
    server = plan.compute_server_statement(state, dropout_rate=dropout_rate)
    if server is not None:
        blocks.append(str(server))
    elif not plan.is_distributed:
        blocks.append(_NO_SERVER_PRIVACY)
    else:
        blocks.append("Privacy, the server itself: epsilon = 0, no user joined a round")
    return "\n".join(blocks)


def _compute_statements(
    plan: MechanismPlan, result: training.TrainingResult
) -> list[accounting.PrivacyStatement]:
    """Returns the analyst's view at the run's delta and at the reference delta."""
    spent = result.ledger_state.rounds_spent
    if plan.parameters is None or spent == 0:
        return []
    deltas = [plan.delta]
    if not math.isclose(plan.delta, REFERENCE_DELTA):
        deltas.append(REFERENCE_DELTA)
    statements = [plan.compute_statement(spent, delta=delta) for delta in deltas]
    return [statement for statement in statements if statement is not None]
