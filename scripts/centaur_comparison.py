"""One run of run_centaur_comparison: settings chosen, runs made, what they say.

Settings are chosen by the clients' validation parts on a seed that is not reported; of
those runs nothing else is read.
"""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tqdm

from scripts import (
    centaur_comparison_diagnosis,
    centaur_comparison_report,
    centaur_comparison_runs,
)
from scripts.centaur_comparison_config import ComparisonConfig, Point, Run
from scripts.centaur_comparison_runs import Outcome, Stamp
from scripts.centaur_comparison_worker import Execute, run_in_workers
from scripts.centaur_config import Method
from scripts.paired_difference import Interval, Verdict, compute_interval, judge
from simulation import process, progress, run_folder, table

_RUNS_NAME = "comparison.csv"
_SUMMARY_NAME = "comparison.json"
_PLOT_NAME = "comparison.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen for a method.

    Attributes:
        method: The method.
        epsilon: Where; inf without noise, None where nothing is sent.
        validation: The criterion, of each point of the grid: the mean metric over
            clients on their validation parts.
        point: The chosen point.
        edges: Of the axes with several values, those on whose edge the point lies, with
            which of the two.
    """

    method: Method
    epsilon: float | None
    validation: tuple[tuple[Point, float], ...]
    point: Point
    edges: Mapping[str, str]

    @property
    def best(self) -> float:
        """The criterion at the chosen point."""
        return max(score for _, score in self.validation if not math.isnan(score))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """CENTAUR minus another method at one epsilon, paired by seed.

    Attributes:
        opponent: The other method.
        epsilon: CENTAUR's, and the other's where it sends anything.
        difference: Of the test metric, over seeds.
        verdict: What the interval says of CENTAUR.
    """

    opponent: Method
    epsilon: float
    difference: Interval
    verdict: Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What a comparison found.

    Attributes:
        config: The configuration.
        stamp: What the runs have in common.
        choices: What was chosen for each method.
        outcomes: What the reported runs came to.
        comparisons: CENTAUR minus each other method, at each epsilon.
        diagnoses: What was measured of one run each; empty unless asked for.
    """

    config: ComparisonConfig
    stamp: Stamp
    choices: tuple[Choice, ...]
    outcomes: tuple[Outcome, ...]
    comparisons: tuple[Comparison, ...]
    diagnoses: tuple[centaur_comparison_diagnosis.Diagnosis, ...] = ()


def run(config: ComparisonConfig, *, execute: Execute | None = None) -> Findings:
    """Makes all runs, prints what they say, and writes it down.

    Args:
        config: The configuration.
        execute: Makes the runs that are not finished; unset, processes do.

    Raises:
        UserError: For anything the user can mend.
    """
    stamp = centaur_comparison_runs.build_stamp(config)
    settings = centaur_comparison_runs.describe_settings(config, stamp)
    if execute is None:
        execute = functools.partial(run_in_workers, parallel_runs=config.parallel_runs)
    print(centaur_comparison_report.describe_start(config, stamp), flush=True)
    with process.user_errors(OSError, run_folder.RunFolderError):
        with run_folder.open_run_folder(config.folder, settings), _hint_at_resuming():
            findings = _find(config, stamp, execute)
            files = _write(findings)
    print(centaur_comparison_report.describe(findings, files), flush=True)
    return findings


def _find(config: ComparisonConfig, stamp: Stamp, execute: Execute) -> Findings:
    """Makes all runs, and compares them."""
    with progress.show_progress("comparison", 0, count_runs(config), unit="run") as bar:

        def make(runs: Sequence[Run]) -> None:
            _make_all(config, runs, stamp, bar, execute)

        choices = _choose_all(config, make)
        outcomes = _report_all(config, choices, make)
        diagnoses = _diagnose_all(config, choices, make)
    return Findings(
        config=config,
        stamp=stamp,
        choices=tuple(choices.values()),
        outcomes=tuple(outcomes),
        comparisons=tuple(compare_all(config, outcomes)),
        diagnoses=tuple(diagnoses),
    )


@contextlib.contextmanager
def _hint_at_resuming() -> Iterator[None]:
    try:
        yield
    except process.Terminated as error:
        error.hint = "the same command goes on from the runs that are finished"
        raise


def _write(findings: Findings) -> list[pathlib.Path]:
    """Writes the tables and the plot. Returns the files."""
    folder = findings.config.folder
    files = [folder / name for name in (_RUNS_NAME, _SUMMARY_NAME, _PLOT_NAME)]
    run_folder.write_text(files[0], tabulate(findings.outcomes).to_csv())
    run_folder.write_json(files[1], summarize(findings))
    centaur_comparison_report.save_plot(files[2], findings)
    if findings.diagnoses:
        files += centaur_comparison_diagnosis.write(folder, findings.diagnoses)
    return files


def count_runs(config: ComparisonConfig) -> int:
    """Returns how many runs a comparison has."""
    count = len(centaur_comparison_diagnosis.list_methods(config))
    for method in config.method_kinds:
        epsilons = _list_epsilons(config, method)
        count += len(epsilons) * len(config.seeds)
        count += sum(
            len(config.list_points(method, tuned))
            for tuned in _list_tuned(config, method)
        )
    return count


def choose(
    method: Method,
    epsilon: float | None,
    axes: Mapping[str, Sequence[float]],
    scores: Sequence[tuple[Point, float]],
) -> Choice:
    """Returns the point with the greatest mean on the validation parts.

    Of equal ones it is the first.

    Raises:
        ValueError: If there is no number for any point.
    """
    known = [(point, score) for point, score in scores if not math.isnan(score)]
    if not known:
        raise ValueError(
            f"The grid of {method.title} must hold a point with a validation metric: "
            "choose another `validation_fraction`. Found none."
        )
    point, _ = max(known, key=lambda pair: pair[1])
    edges = {}
    for name, values in axes.items():
        if len(values) > 1 and point[name] in (min(values), max(values)):
            edges[name] = "least" if point[name] == min(values) else "largest"
    return Choice(
        method=method,
        epsilon=epsilon,
        validation=tuple(scores),
        point=point,
        edges=edges,
    )


def compare_all(
    config: ComparisonConfig, outcomes: Sequence[Outcome]
) -> list[Comparison]:
    """Returns CENTAUR minus each other method, at each epsilon."""
    found = {
        (one.run.method, one.run.epsilon, one.run.seed): one.test for one in outcomes
    }
    comparisons = []
    for epsilon in config.epsilons:
        for other in config.method_kinds:
            if other is Method.CENTAUR or Method.CENTAUR not in config.method_kinds:
                continue
            theirs = None if other is Method.STAND_ALONE else epsilon
            interval = compute_interval(
                [
                    found[Method.CENTAUR, epsilon, seed] - found[other, theirs, seed]
                    for seed in config.seeds
                ]
            )
            comparisons.append(
                Comparison(
                    opponent=other,
                    epsilon=epsilon,
                    difference=interval,
                    verdict=judge(interval, larger_is_better=True),
                )
            )
    return comparisons


def tabulate(outcomes: Sequence[Outcome]) -> table.Table:
    """Returns a row for each reported run."""
    rows = table.Table()
    for one in outcomes:
        point = one.run.point
        names = ("client_lr", "head_lr", "clip", "stand_alone_epochs")
        rows = rows.append(
            {
                "method": one.run.method.value,
                "budget_epsilon": one.run.epsilon,
                "seed": one.run.seed,
                **{name: point.get(name) for name in names},
                "rounds": one.rounds,
                f"test_{one.metric}": one.test,
                f"test_{one.metric}_stddev_over_clients": one.test_stddev,
                f"test_{one.metric}_worst_tenth": one.worst_tenth,
                f"validation_{one.metric}": one.validation,
                "epsilon": one.epsilon,
                "delta": one.delta,
                "standing": one.standing,
                "fraction_clipped": one.fraction_clipped,
                "mean_norm": one.mean_norm,
                "folder": one.run.name,
            }
        )
    return rows


def summarize(findings: Findings) -> dict[str, Any]:
    """Returns everything that is printed, as JSON values."""
    config = findings.config
    return {
        "flags": json.loads(json.dumps(config.to_dict())),
        "data": dict(findings.stamp.identity),
        "metric": findings.outcomes[0].metric,
        "notes": list(centaur_comparison_report.list_notes(config)),
        "tuning": [
            {
                "method": choice.method.value,
                "epsilon": choice.epsilon,
                "seed": config.tuning_seed,
                "points": [
                    {**point, "validation": score} for point, score in choice.validation
                ],
                "chosen": dict(choice.point),
                "on_the_edge": dict(choice.edges),
            }
            for choice in findings.choices
        ],
        "results": [
            {
                "method": method.value,
                "budget_epsilon": epsilon,
                "epsilon_covers": centaur_comparison_report.name_covered(
                    method, epsilon
                ),
                **average(findings.outcomes, method, epsilon),
            }
            for method in config.method_kinds
            for epsilon in _list_epsilons(config, method)
        ],
        "comparisons": [
            {
                "first": Method.CENTAUR.value,
                "second": one.opponent.value,
                "epsilon": one.epsilon,
                **dataclasses.asdict(one.difference),
                "verdict": one.verdict.value,
            }
            for one in findings.comparisons
        ],
        "diagnoses": [one.to_dict() for one in findings.diagnoses],
    }


def average(
    outcomes: Sequence[Outcome], method: Method, epsilon: float | None
) -> dict[str, Any]:
    """Returns means over seeds, and the standard deviation of the test metric."""
    own = [
        one
        for one in outcomes
        if one.run.method is method and one.run.epsilon == epsilon
    ]
    tests = [one.test for one in own]
    clipped = [x.fraction_clipped for x in own if x.fraction_clipped is not None]
    return {
        "test": float(np.mean(tests)),
        "test_stddev_over_seeds": float(np.std(tests, ddof=1)),
        "test_stddev_over_clients": float(np.mean([one.test_stddev for one in own])),
        "worst_tenth": float(np.mean([one.worst_tenth for one in own])),
        "validation": float(np.mean([one.validation for one in own])),
        "epsilon": own[0].epsilon,
        "delta": own[0].delta,
        "standing": own[0].standing,
        "fraction_clipped": float(np.mean(clipped)) if clipped else None,
    }


def _make_all(
    config: ComparisonConfig,
    runs: Sequence[Run],
    stamp: Stamp,
    bar: tqdm.tqdm,
    execute: Execute,
) -> None:
    """Makes the runs that are not finished."""
    made = {one.name: config.build_run(one) for one in runs}
    with process.user_errors(run_folder.RunFolderError):
        left = {
            name: its
            for name, its in made.items()
            if not centaur_comparison_runs.is_finished(config.folder / name, its, stamp)
        }
    bar.update(len(made) - len(left))
    names = iter(left)

    def show_next() -> None:
        bar.update()
        bar.set_postfix_str(next(names, ""))

    bar.set_postfix_str(next(names, ""))
    execute(list(left.values()), show_next)


def _choose_all(
    config: ComparisonConfig, make: Callable[[Sequence[Run]], None]
) -> dict[tuple[Method, float | None], Choice]:
    """Returns what is chosen, by method and where."""
    grids: dict[tuple[Method, float | None], list[tuple[Point, Run]]] = {
        (method, tuned): [
            (
                point,
                config.plan_run(
                    method,
                    math.inf if tuned is None else tuned,
                    config.tuning_seed,
                    point,
                    is_trial=True,
                ),
            )
            for point in config.list_points(method, tuned)
        ]
        for method in config.method_kinds
        for tuned in _list_tuned(config, method)
    }
    make([one for grid in grids.values() for _, one in grid])
    choices = {}
    for (method, tuned), grid in grids.items():
        scores = [
            (
                point,
                centaur_comparison_runs.read_validation(config.folder / one.name, one),
            )
            for point, one in grid
        ]
        with process.user_input():
            axes = config.list_axes(method, tuned)
            choices[method, tuned] = choose(method, tuned, axes, scores)
    return choices


def _report_all(
    config: ComparisonConfig,
    choices: Mapping[tuple[Method, float | None], Choice],
    make: Callable[[Sequence[Run]], None],
) -> list[Outcome]:
    """Returns what the runs of the chosen settings come to."""
    runs = []
    for method in config.method_kinds:
        for epsilon in _list_epsilons(config, method):
            given = math.inf if epsilon is None else epsilon
            point = choices[method, config.get_tuned_epsilon(method, given)].point
            runs += [
                config.plan_run(method, given, seed, point) for seed in config.seeds
            ]
    make(runs)
    return [
        centaur_comparison_runs.read_outcome(config.folder / one.name, one)
        for one in runs
    ]


def _diagnose_all(
    config: ComparisonConfig,
    choices: Mapping[tuple[Method, float | None], Choice],
    make: Callable[[Sequence[Run]], None],
) -> list[centaur_comparison_diagnosis.Diagnosis]:
    """Returns what was measured of one run of each method that is measured."""
    epsilon = config.shown_epsilon
    points = {
        method: choices[method, config.get_tuned_epsilon(method, epsilon)].point
        for method in centaur_comparison_diagnosis.list_methods(config)
    }
    runs = centaur_comparison_diagnosis.plan_runs(config, points)
    make(runs)
    return [centaur_comparison_diagnosis.read(config.folder, one) for one in runs]


def _list_epsilons(config: ComparisonConfig, method: Method) -> Sequence[float | None]:
    """Returns the epsilons that a method has runs at."""
    return (None,) if method is Method.STAND_ALONE else config.epsilons


def _list_tuned(config: ComparisonConfig, method: Method) -> Sequence[float | None]:
    """Returns the epsilons that a method is tuned at."""
    return (None,) if method is Method.STAND_ALONE else config.tuned_epsilons
