"""The runs of run_upcycled_comparison, and what they say of Upcycled-FL."""

import contextlib
import dataclasses
import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tqdm

from scripts import upcycled_training
from scripts.field_list import format_fields
from scripts.paired_difference import choose_least, compute_interval, judge
from scripts.upcycled_comparison_config import (
    PAIRS,
    ComparisonConfig,
    Variant,
)
from simulation import plot, process, progress, run_folder, table

_RUNS_NAME = "comparison.csv"
_SUMMARY_NAME = "comparison.json"
_PLOT_NAME = "comparison.png"
# The training loss of a run is the mean over its last rounds, of which each has other
# clients.
_LAST_ROUNDS = 10
_SEEDED = (
    "All runs are seeded: no epsilon holds against those who know the seeds, or see "
    "several of these models."
)
_TUNED = (
    "The server's rates were chosen on training losses, which epsilon does not cover, "
    "of a seed that is not reported"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run came to.

    Attributes:
        variant: What was trained.
        seed: Its root seed.
        server_lr: The server's learning rate.
        rounds: Rounds with clients.
        metric: The test metric of the final model.
        test_loss: Its test loss.
        train_loss: The clients' mean loss in the last rounds, before they train.
        epsilon: What it spent: of whole users under a mechanism, else the largest of a
            client's examples; inf without either.
        epsilon_name: Which of the two, and what it rests on.
        curve: The test metric by round with clients.
    """

    variant: Variant
    seed: int
    server_lr: float
    rounds: int
    metric: float
    test_loss: float
    train_loss: float
    epsilon: float
    epsilon_name: str
    curve: tuple[tuple[int, float], ...]


def run(config: ComparisonConfig) -> list[Outcome]:
    """Trains all variants, prints what they say, and writes it down.

    Raises:
        UserError: For anything the user can mend.
    """
    folder = config.folder
    tuned = [variant for variant in Variant if variant.is_tuned]
    total = len(tuned) * len(config.server_lrs) + len(Variant) * len(config.seeds)
    with progress.show_progress("comparison", 0, total, unit="run") as bar:
        trials = {
            variant: [
                _train(config, variant, config.tuning_seed, rate, bar)
                for rate in config.server_lrs
            ]
            for variant in tuned
        }
        with process.user_input():
            rates = {variant: choose_rate(found) for variant, found in trials.items()}
        outcomes = [
            _train(config, variant, seed, rates.get(variant), bar)
            for variant in Variant
            for seed in config.seeds
        ]
    files = [folder / name for name in (_RUNS_NAME, _SUMMARY_NAME, _PLOT_NAME)]
    summary = summarize(config, outcomes, rates)
    with process.user_errors(OSError, run_folder.RunFolderError):
        run_folder.write_text(files[0], _tabulate(outcomes).to_csv())
        run_folder.write_json(files[1], summary)
        _save_plot(files[2], outcomes)
    print(describe(config, summary, files), flush=True)
    return outcomes


def choose_rate(trials: Sequence[Outcome]) -> float:
    """Returns the server learning rate of the least training loss.

    Raises:
        ValueError: If no loss is finite.
    """
    return choose_least(
        {trial.server_lr: trial.train_loss for trial in trials}, "`server_lrs`"
    )


def compare(
    outcomes: Sequence[Outcome], first: Variant, second: Variant
) -> tuple[str, str]:
    """Returns the difference of the test metric with its interval, and the verdict.

    Runs are paired by their seeds, which decide cohorts and batches.
    """
    found = {(outcome.variant, outcome.seed): outcome.metric for outcome in outcomes}
    seeds = sorted({outcome.seed for outcome in outcomes})
    interval = compute_interval(
        [found[first, seed] - found[second, seed] for seed in seeds]
    )
    text = f"{interval.mean:+.4f} ({interval.low:+.4f} to {interval.high:+.4f})"
    return text, judge(interval, larger_is_better=True).value


def summarize(
    config: ComparisonConfig,
    outcomes: Sequence[Outcome],
    rates: Mapping[Variant, float],
) -> dict[str, Any]:
    """Returns everything that is printed, as JSON values."""
    comparisons = []
    for first, second, budget in PAIRS:
        difference, verdict = compare(outcomes, first, second)
        comparisons.append(
            {
                "first": first.value,
                "second": second.value,
                "at": budget,
                "difference": difference,
                "verdict": verdict,
            }
        )
    return {
        "flags": json.loads(json.dumps(config.to_dict(), default=str)),
        "epsilon_is": outcomes[0].epsilon_name,
        "notes": [_SEEDED, _TUNED],
        "chosen_server_lr": {variant.value: rate for variant, rate in rates.items()},
        "variants": {variant.value: _average(outcomes, variant) for variant in Variant},
        "comparisons": comparisons,
    }


def describe(
    config: ComparisonConfig,
    summary: Mapping[str, Any],
    files: Sequence[pathlib.Path],
) -> str:
    """Returns the tables that are printed.

    Args:
        config: The configuration.
        summary: What `summarize` returned.
        files: What was written.
    """
    lines = [
        "",
        f"T = {config.total_rounds} rounds with clients; seeds "
        f"{', '.join(map(str, config.seeds))}; mean +- standard deviation over them; "
        f"epsilon is {summary['epsilon_is']}",
        f"{'':<31}{'server rate':>12}{'test metric':>20}{'test loss':>11}"
        f"{'epsilon':>10}{'releases':>10}",
    ]
    lines += [
        f"{title:<31}{found['server_lr']:>12g}"
        f"{found['metric']:>10.4f} +- {found['metric_stddev']:.4f}"
        f"{found['test_loss']:>11.4f}{found['epsilon']:>10.4g}"
        f"{found['rounds']:>10g}"
        for title, found in summary["variants"].items()
    ]
    lines += ["", "Difference of the test metric, paired by seed, 95 % t interval:"]
    lines += [
        f"  {one['first']} - {one['second']}, {one['at']}: {one['difference']}, "
        f"{one['verdict']}"
        for one in summary["comparisons"]
    ]
    rates = summary["chosen_server_lr"]
    lines += [
        "",
        f"{_TUNED}, {config.tuning_seed}: "
        + ", ".join(f"{rate:g} ({title})" for title, rate in rates.items()),
        "With a constant coefficient c Upcycled-FL is the baseline at a server rate "
        "1 + c times as large.",
        "An even step is not charged: releases are rounds with clients.",
        _SEEDED,
        "",
        format_fields({"files": "\n".join(map(str, files))}),
    ]
    return "\n".join(lines)


def _train(
    config: ComparisonConfig,
    variant: Variant,
    seed: int,
    server_lr: float | None,
    bar: tqdm.tqdm,
) -> Outcome:
    """Trains one variant, in a folder of its own, without a word."""
    run_config = config.build_run(variant, seed, server_lr=server_lr)
    bar.set_postfix_str(f"{variant.value}, seed {seed}")
    with contextlib.redirect_stdout(io.StringIO()), progress.hide_progress():
        outcome = upcycled_training.run(run_config)
    bar.update()
    (result,) = outcome.results.values()
    rows = result.metrics
    metric = next(n for n in rows.columns if n.startswith("test_") and n != "test_loss")
    curve = [
        (int(number), float(value))
        for number, value in zip(
            rows.read_column("round"), rows.read_column(metric), strict=True
        )
        if value
    ]
    losses = [float(value) for value in rows.read_column("train_loss") if value]
    assert result.final is not None
    epsilon, name = _read_epsilon(rows)
    return Outcome(
        variant=variant,
        seed=seed,
        server_lr=run_config.server_lr,
        rounds=result.ledger_state.rounds_spent,
        metric=result.final[metric.removeprefix("test_")],
        test_loss=result.final["loss"],
        train_loss=float(np.mean(losses[-_LAST_ROUNDS:])) if losses else np.inf,
        epsilon=epsilon,
        epsilon_name=name,
        curve=tuple(curve),
    )


def _read_epsilon(rows: table.Table) -> tuple[float, str]:
    """Returns what the last row says was spent, and what that is."""
    if "client_epsilon_max" in rows.columns:
        accountant = rows.read_column("client_accountant")[-1]
        standing = rows.read_column("client_standing")[-1]
        return (
            float(rows.read_column("client_epsilon_max")[-1]),
            f"the largest of a client's examples ({accountant}: {standing})",
        )
    epsilon = float(rows.read_column("epsilon")[-1])
    if not np.isfinite(epsilon):
        return epsilon, "inf: no noise"
    published = rows.read_column("as_published")[-1] == "True"
    return epsilon, f"of whole users ({'as published' if published else 'proven'})"


def _average(outcomes: Sequence[Outcome], variant: Variant) -> dict[str, float]:
    own = [outcome for outcome in outcomes if outcome.variant is variant]
    names = ("metric", "test_loss", "train_loss", "epsilon", "rounds", "server_lr")
    means = {
        name: float(np.mean([getattr(outcome, name) for outcome in own]))
        for name in names
    }
    spread = float(np.std([outcome.metric for outcome in own], ddof=1))
    return {**means, "metric_stddev": spread}


def _tabulate(outcomes: Sequence[Outcome]) -> table.Table:
    rows = table.Table()
    for outcome in outcomes:
        values = dataclasses.asdict(outcome)
        del values["curve"]
        rows = rows.append({**values, "variant": outcome.variant.value})
    return rows


def _save_plot(path: pathlib.Path, outcomes: Sequence[Outcome]) -> None:
    """Draws the mean test metric against rounds with clients and server steps."""
    figure = plot.start_figure(9, 3.6)
    axes = figure.subplots(1, 2, sharey=True)
    for variant in Variant:
        curves = [dict(o.curve) for o in outcomes if o.variant is variant]
        rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
        means = [np.mean([curve[number] for curve in curves]) for number in rounds]
        style = {"linestyle": "--" if variant.is_half else "-", "label": variant.value}
        axes[0].plot(rounds, means, **style)
        steps = [number * (1 + variant.is_upcycled) for number in rounds]
        axes[1].plot(steps, means, **style)
    axes[0].set(xlabel="rounds with clients", ylabel="test metric, mean over seeds")
    axes[1].set(xlabel="server steps")
    axes[1].legend(loc="lower right", fontsize=7)
    for axis in axes:
        axis.grid(alpha=0.3)
    plot.save_figure(figure, path)
