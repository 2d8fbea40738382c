"""What run_upcycled_study prints, and its results as JSON values."""

import dataclasses
import enum
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from scripts import (
    upcycled_study_paper,
    upcycled_study_private,
    upcycled_study_private_report,
)
from scripts.field_list import format_fields
from scripts.paired_difference import CONFIDENCE, Verdict
from scripts.upcycled_study_claims import (
    Budget,
    Comparison,
    Opponent,
    count_verdicts,
)
from scripts.upcycled_study_config import Loss, Run, Study, StudyConfig
from scripts.upcycled_study_curve import METRICS
from scripts.upcycled_study_data import StudyData
from scripts.upcycled_study_findings import (
    GENERATED,
    Findings,
    Gap,
    TableRow,
    build_lambda_table,
    build_table,
    find_largest_gap,
)

_LABEL_WIDTH = 24
_FIELD_WIDTH = 18
_LOSSES = {
    Loss.CROSS_ENTROPY: "cross entropy",
    Loss.DOUBLE_SOFTMAX: "DOUBLE SOFTMAX, the authors' program's: the cross entropy of "
    "the softmax of a softmax",
}
_IDENTITY = (
    "With a constant lambda Upcycled-FL is FedProx with the server learning rate\n"
    "1 + mu / (mu + lambda), bit for bit (tests/upcycled_fl/test_finalizer.py)"
)


def describe_run(
    config: StudyConfig, data: Mapping[str, StudyData], *, folder: pathlib.Path
) -> str:
    """Returns the first lines: what the study will do."""
    if config.client_lr is None:
        rate = (
            "chosen for each data set: least final training loss of FedProx, averaged "
            f"over mu,\non seed {config.selection_seed}, among "
            f"{join(config.client_lr_grid)}"
        )
    else:
        rate = f"{config.client_lr:g}"
    lambdas = [f"{config.lambdas[mu]:g}" for mu in config.mu]
    lines = {
        "study": config.study,
        "data": "\n".join(one.description for one in data.values()),
        "algorithms": f"mu = {join(config.mu)}; lambda = {', '.join(lambdas)}\n"
        f"{_IDENTITY}",
        "loss": describe_loss(config),
        "client lr": rate,
        "work": f"{config.total_rounds} rounds of {config.clients_per_round} clients, "
        f"{config.client_epochs} epochs, batches of {config.batch_size}, momentum "
        f"{config.client_momentum:g},\nstragglers {config.straggler_rate:g}; weights "
        f"by examples; initial weights {config.initial_weights}",
        "privacy": _describe_privacy(config),
        "randomness": f"reproducible: root seeds {join(config.seeds)}; at one seed "
        "all algorithms see\nthe same cohorts, stragglers and batches",
        "output": str(folder),
    }
    return format_fields(lines)


def _describe_privacy(config: StudyConfig) -> str:
    if config.kind is not Study.PRIVATE:
        return "none: no noise is added, nothing is clipped"
    levels = zip(
        config.noises, config.noise_levels, config.baseline_noise_levels, strict=True
    )
    text = "; ".join(f"{name}: {ours:g}, {theirs:g}" for name, ours, theirs in levels)
    return (
        f"clients' own noise, Upcycled-FL's and FedProx's in figure 3: {text};\n"
        f"models clipped to {config.model_clip:g} under output noise, delta "
        f"{config.client_delta:g}. The seeds are known: no epsilon holds against\n"
        "those who know them"
    )


def describe_loss(config: StudyConfig) -> str:
    """Returns the loss's name in every output."""
    return _LOSSES[Loss(config.loss)]


def describe_results(findings: Findings) -> str:
    """Returns what came out: the tables of the study."""
    config = findings.config
    rates = ", ".join(f"{data} {rate:g}" for data, rate in findings.rates.items())
    header = [f"Client learning rate: {rates}. Loss: {describe_loss(config)}."]
    if findings.is_generated:
        header.append(f"Trained on {GENERATED}.")
    blocks = ["\n".join(header)]
    if config.kind is Study.CLAIMS:
        blocks += _describe_claims(findings)
    elif config.kind is Study.PRIVATE:
        rows = findings.private_rows
        comparisons = upcycled_study_private.compare(config, rows)
        blocks += upcycled_study_private_report.describe(config, rows, comparisons)
    else:
        blocks += _describe_table(findings)
    if config.kind is Study.FIGURES:
        blocks += _describe_sweep(findings)
    return "\n\n".join(blocks)


def describe_end(
    runs: Mapping[str, Run],
    run_seconds: Mapping[str, float],
    *,
    seeds: Sequence[int],
    files: Sequence[pathlib.Path],
    seconds: float,
) -> str:
    """Returns the last lines: how long it took, and where it lies.

    Args:
        runs: All runs, by their keys.
        run_seconds: The time of those that this process trained.
        seeds: The reported seeds.
        files: What was written.
        seconds: The time of the whole command.
    """
    times = []
    for seed in seeds:
        keys = [key for key, run in runs.items() if run.seed == seed]
        if all(key in run_seconds for key in keys):
            total = sum(run_seconds[key] for key in keys)
            times.append(f"seed {seed}: {total:.0f} s for {len(keys)} runs")
    lines = {
        "wall time": "\n".join([f"{seconds:.1f} s", *times]),
        "files": "\n".join(map(str, files)),
    }
    return format_fields(lines)


def summarize_results(findings: Findings) -> dict[str, Any]:
    """Returns the results as JSON values."""
    config = findings.config
    summary: dict[str, Any] = {
        "study": config.study,
        "data": {name: one.description for name, one in findings.data.items()},
        "generated": findings.is_generated,
        "loss": describe_loss(config),
        "initial_weights": config.initial_weights,
        "client_lr": dict(findings.rates),
        "note": _IDENTITY.replace("\n", " "),
        "privacy": _describe_privacy(config).replace("\n", " "),
        "runs": {
            key: {name: findings.curves[key].get(name) for name in METRICS}
            for key in findings.runs
        },
    }
    if config.kind is Study.CLAIMS:
        summary["server_lr"] = [
            {"data": data, "mu": mu, "factor": factor}
            for (data, mu), factor in findings.factors.items()
        ]
        summary["comparisons"] = [_to_json(one) for one in findings.comparisons]
        summary["verdicts"] = [
            {"opponent": opponent.value, "budget": budget.value, "metric": metric}
            | {verdict.value: count for verdict, count in counts.items()}
            for (opponent, budget, metric), counts in count_verdicts(
                findings.comparisons
            ).items()
        ]
    elif config.kind is Study.PRIVATE:
        rows = findings.private_rows
        found = upcycled_study_private.compare(config, rows)
        summary |= upcycled_study_private_report.summarize(rows, found)
    else:
        summary["table"] = [_to_json(row) for row in build_table(findings)]
    if config.kind is Study.FIGURES:
        summary["lambda"] = [_to_json(row) for row in build_lambda_table(findings)]
    return summary


def _describe_table(findings: Findings) -> list[str]:
    config, rows = findings.config, build_table(findings)
    seeds = f"{len(config.seeds)} seeds" if len(config.seeds) > 1 else "1 seed"
    blocks = [
        "Training accuracy (test accuracy), %. Paper: Table 1; program: the authors', "
        f"its seed {upcycled_study_paper.PROGRAM_SEED};\nours: mean +- standard "
        f"deviation over {seeds}"
    ]
    for data in config.data:
        found = [row for row in rows if row.data == data]
        header = [f"Synthetic({data})", "paper", "program", "ours"]
        lines = [_format_row(header[0], header[1:])]
        lines += [
            _format_row(
                f"  {row.title}",
                [_format_accuracy(row.paper), _format_accuracy(row.program)]
                + [_format_ours(row)],
            )
            for row in found
        ]
        blocks.append("\n".join(lines))
    blocks.append(_describe_gaps(findings, rows))
    return blocks


def _describe_gaps(findings: Findings, rows: Sequence[TableRow]) -> str:
    iid = [row for row in rows if row.data == "iid"]
    others = [row for row in rows if row.data != "iid"]
    lines = [
        f"Largest difference to the {reference}, {name}: {_format_gap(gap)}"
        for name, reference, found in (
            ("iid", "paper", iid),
            ("iid", "program", iid),
            ("other data", "paper", others),
            ("other data", "program", others),
        )
        if (gap := find_largest_gap(found, reference)) is not None
    ]
    if findings.is_generated:
        lines.append(f"These differences mean nothing: trained on {GENERATED}.")
    elif not findings.config.is_authors_setting:
        lines.append("Loss, learning rate or work are not those of the authors' table.")
    return "\n".join(lines)


def _describe_sweep(findings: Findings) -> list[str]:
    config, rows = findings.config, build_lambda_table(findings)
    lines = ["Upcycled-FL over lambda: training accuracy (test accuracy), %"]
    for data in config.data:
        names = [f"lambda {value:g}" for value in config.lambda_grid]
        lines.append(_format_row(f"Synthetic({data})", names))
        for mu in config.mu:
            found = [row for row in rows if (row.data, row.mu) == (data, mu)]
            fields = [f"{row.train.mean:.2f} ({row.test.mean:.2f})" for row in found]
            lines.append(_format_row(f"  mu = {mu:g}", fields))
    return ["\n".join(lines)]


def _describe_claims(findings: Findings) -> list[str]:
    config = findings.config
    blocks = [
        f"{_IDENTITY}.\nSo a lead over FedProx at equal client rounds is one of a "
        "larger server learning rate; whether there is more\nis what the comparison "
        "with FedProx at a server learning rate of its own says.",
        f"Upcycled-FL minus its opponent: mean [{CONFIDENCE:.0%} t interval] over "
        f"{len(config.seeds)} seeds, paired by seed. It leads, or trails, where\n"
        "the interval leaves out 0; of intervals around no difference one in twenty "
        "does.\nServer learning rates: least final training loss of FedProx on seed "
        f"{config.selection_seed}, among {join(config.server_factor_grid)}.",
    ]
    for opponent in Opponent:
        for budget in Budget:
            found = [
                one
                for one in findings.comparisons
                if (one.opponent, one.budget) == (opponent, budget)
            ]
            blocks.append(_format_comparisons(found, opponent, budget))
    lines = ["Verdicts over the pairs of data and mu: leads / trails / undecided"]
    for (opponent, budget, metric), counts in count_verdicts(
        findings.comparisons
    ).items():
        label = f"  {opponent.value}, {budget.value}, {metric.replace('_', ' ')}"
        fields = " / ".join(str(counts[verdict]) for verdict in Verdict)
        lines.append(f"{label:<76}{fields}")
    return [*blocks, "\n".join(lines)]


def _format_comparisons(
    found: Sequence[Comparison], opponent: Opponent, budget: Budget
) -> str:
    rounds = found[0].rounds
    lines = [
        f"Against {opponent.value}, {budget.value} ({rounds[0]} rounds of Upcycled-FL "
        f"and {rounds[1]} of FedProx)",
        f"  {'data':<9}{'mu':>5}{'server lr':>11}  {'test accuracy, points':<36}"
        "training loss",
    ]
    pairs: dict[tuple[str, float], dict[str, Comparison]] = {}
    for one in found:
        pairs.setdefault((one.data, one.mu), {})[one.metric] = one
    for (data, mu), by_metric in pairs.items():
        accuracy, loss = by_metric["test_accuracy"], by_metric["train_loss"]
        lines.append(
            f"  {data:<9}{mu:>5g}{accuracy.server_factor:>11g}  "
            f"{_format_difference(accuracy, scale=100, digits=2):<36}"
            f"{_format_difference(loss, scale=1, digits=4)}"
        )
    return "\n".join(lines)


def _format_difference(one: Comparison, *, scale: float, digits: int) -> str:
    mean, low, high = (
        f"{scale * value:+.{digits}f}"
        for value in (one.difference.mean, one.difference.low, one.difference.high)
    )
    return f"{mean} [{low}, {high}] {one.verdict.value}"


def _format_ours(row: TableRow) -> str:
    if row.train.stddev is None or row.test.stddev is None:
        return f"{row.train.mean:.2f} ({row.test.mean:.2f})"
    return (
        f"{row.train.mean:.2f} +- {row.train.stddev:.2f} ({row.test.mean:.2f} +- "
        f"{row.test.stddev:.2f})"
    )


def _format_accuracy(found: upcycled_study_paper.Accuracy | None) -> str:
    return "-" if found is None else f"{found.train:.2f} ({found.test:.2f})"


def _format_gap(gap: Gap) -> str:
    return f"{gap.points:+.2f} points ({gap.row.data}, {gap.row.title}, {gap.part})"


def _format_row(label: str, fields: Sequence[str]) -> str:
    columns = "".join(f"  {field:<{_FIELD_WIDTH}}" for field in fields)
    return f"{label:<{_LABEL_WIDTH}}{columns}".rstrip()


def _to_json(value: Any) -> Any:
    """Returns a dataclass as a dictionary, with the values of its enums."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: _to_json(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    return value.value if isinstance(value, enum.Enum) else value


def join(values: Sequence[float]) -> str:
    """Returns numbers separated by commas."""
    return ", ".join(f"{value:g}" for value in values)
