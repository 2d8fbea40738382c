"""One run of run_upcycled_study: from a configuration to a run folder."""

import contextlib
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts import (
    flags,
    upcycled_study_plot,
    upcycled_study_private,
    upcycled_study_report,
)
from scripts.upcycled_study_claims import (
    Comparison,
    choose_client_rates,
    choose_server_factors,
    compare,
)
from scripts.upcycled_study_config import (
    Run,
    Study,
    StudyConfig,
    list_claim_runs,
    list_factor_runs,
    list_lambda_runs,
    list_selection_runs,
    list_table_runs,
)
from scripts.upcycled_study_curve import Curve, build_row, read_curve, to_csv
from scripts.upcycled_study_data import StudyData, load_data
from scripts.upcycled_study_findings import Findings
from scripts.upcycled_study_training import train
from simulation import execution, process, run_folder
from simulation.progress import show_progress

RESULTS_NAME = "results.csv"
SUMMARY_NAME = "results.json"
CURVES_NAME = "curves"
_PROGRAM = "run_upcycled_study"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOutcome:
    """What a study left.

    Attributes:
        folder: Its folder.
        findings: What was trained and found.
    """

    folder: pathlib.Path
    findings: Findings


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Progress:
    """A study under way.

    Attributes:
        config: The configuration.
        data: The data sets.
        path: The run folder.
        runs: The runs so far, by their keys.
        curves: What they left, of those that are finished.
        seconds: How long those took that this process trained.
    """

    config: StudyConfig
    data: Mapping[str, StudyData]
    path: pathlib.Path
    runs: dict[str, Run] = dataclasses.field(default_factory=dict)
    curves: dict[str, Curve] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)


def run(config: StudyConfig) -> StudyOutcome:
    """Trains what the study needs, prints what it does, and writes the run folder.

    Raises:
        UserError: For anything the user can mend.
    """
    started = time.monotonic()
    # Everything that can be wrong is found before the first file is written.
    with process.user_input():
        data = load_data(config)
        if config.kind is Study.PRIVATE:
            upcycled_study_private.check(config, data)
    settings = _describe_settings(config, data)
    path = run_folder.choose_folder(
        config, settings, name=f"upcycled_{config.study}", finished=SUMMARY_NAME
    )
    with process.user_errors(run_folder.RunFolderError):
        with run_folder.open_run_folder(path, settings) as folder:
            print(
                upcycled_study_report.describe_run(config, data, folder=path),
                flush=True,
            )
            if folder.resumed:
                count = len(list((path / CURVES_NAME).glob("*.csv")))
                print(
                    "This folder holds a study with the same flags: going on after "
                    f"{count} runs."
                )
            progress = _Progress(config=config, data=data, path=path)
            with execution.use_execution_context(), _hint_at_resuming():
                findings = _measure(progress)
            files = _write_results(findings, path=path)
    print()
    print(upcycled_study_report.describe_results(findings))
    print()
    print(
        upcycled_study_report.describe_end(
            progress.runs,
            progress.seconds,
            seeds=config.seeds,
            files=files,
            seconds=time.monotonic() - started,
        ),
        flush=True,
    )
    return StudyOutcome(folder=path, findings=findings)


def _measure(progress: _Progress) -> Findings:
    """Trains the runs of the study, those first that later ones depend on."""
    config, curves = progress.config, progress.curves
    _train_all(progress, "choosing client rates", list_selection_runs(config))
    # A grid where nothing ends with a finite loss is the user's to mend.
    with process.user_input():
        rates = choose_client_rates(config, curves)
    factors: Mapping[tuple[str, float], float] = {}
    private_rows: Sequence[upcycled_study_private.PrivateRow] = ()
    comparisons: Sequence[Comparison] = ()
    if config.kind is Study.CLAIMS:
        _train_all(progress, "choosing server rates", list_factor_runs(config, rates))
        with process.user_input():
            factors = choose_server_factors(config, rates, curves)
        _train_all(progress, "runs", list_claim_runs(config, rates, factors))
        comparisons = compare(config, rates, factors, curves)
    elif config.kind is Study.PRIVATE:
        data = progress.data
        runs = upcycled_study_private.list_factor_runs(config, data, rates)
        _train_all(progress, "choosing server rates", runs)
        with process.user_input():
            chosen = upcycled_study_private.choose_factors(runs, curves)
        found = upcycled_study_private.list_runs(config, data, rates, chosen)
        _train_all(progress, "runs", list(itertools.chain(*found.values())))
        private_rows = upcycled_study_private.build_rows(config, data, found, curves)
    else:
        _train_all(progress, "runs", list_table_runs(config, rates))
    if config.kind is Study.FIGURES:
        _train_all(progress, "runs over lambda", list_lambda_runs(config, rates))
    return Findings(
        config=config,
        data=progress.data,
        rates=rates,
        factors=factors,
        runs=progress.runs,
        curves=curves,
        comparisons=comparisons,
        private_rows=private_rows,
    )


def _train_all(progress: _Progress, label: str, runs: Sequence[Run]) -> None:
    """Trains what the folder does not hold, keeping results.csv up to date."""
    (progress.path / CURVES_NAME).mkdir(exist_ok=True)
    for one in runs:
        if one.key not in progress.runs:
            progress.runs[one.key] = one
            curve = _read_curve(progress.path, one)
            if curve is not None:
                progress.curves[one.key] = curve
    _write_rows(progress)
    todo = [one for one in runs if one.key not in progress.curves]
    if not todo:
        return
    done = len(runs) - len(todo)
    with show_progress(label, done, len(runs), unit="run") as bar:
        for one in todo:
            bar.set_postfix_str(one.key)
            begun = time.monotonic()
            curve = train(one, progress.data[one.data], progress.config)
            progress.seconds[one.key] = time.monotonic() - begun
            # The curve comes first: a run that has one is not trained again.
            path = _get_curve_path(progress.path, one)
            run_folder.write_text(path, curve.to_csv())
            progress.curves[one.key] = curve
            _write_rows(progress)
            bar.update()


def _read_curve(path: pathlib.Path, one: Run) -> Curve | None:
    """Returns what an interrupted study left of a run, or None."""
    file = _get_curve_path(path, one)
    try:
        return read_curve(file.read_text(encoding="utf-8"), one)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise run_folder.RunFolderError(
            f"{file} is damaged; remove it to train again: {error}"
        ) from None


def _get_curve_path(path: pathlib.Path, one: Run) -> pathlib.Path:
    return path / CURVES_NAME / f"{one.key}.csv"


def _write_rows(progress: _Progress) -> None:
    """Writes results.csv: the runs that have a curve, in the order of the study."""
    rows = [
        build_row(
            one,
            progress.curves[key],
            loss=progress.config.loss,
            source=progress.data[one.data].source,
        )
        for key, one in progress.runs.items()
        if key in progress.curves
    ]
    run_folder.write_text(progress.path / RESULTS_NAME, to_csv(rows))


@contextlib.contextmanager
def _hint_at_resuming() -> Iterator[None]:
    try:
        yield
    except process.Terminated as error:
        error.hint = "the same command goes on from the runs that are finished"
        raise


def _describe_settings(
    config: StudyConfig, data: Mapping[str, StudyData]
) -> dict[str, Any]:
    """Returns the content of config.json: all that decides the result."""
    return {
        "program": _PROGRAM,
        "flags": config.to_dict(),
        "data": {name: dict(one.identity) for name, one in data.items()},
        "reproducible": True,
        "versions": flags.read_versions(),
        "sources": flags.read_sources(),
    }


def _write_results(findings: Findings, *, path: pathlib.Path) -> list[pathlib.Path]:
    plots = upcycled_study_plot.save_plots(path, findings)
    # Last: it marks the study as finished.
    summary = upcycled_study_report.summarize_results(findings)
    run_folder.write_json(path / SUMMARY_NAME, summary)
    names = (run_folder.CONFIG_NAME, RESULTS_NAME, SUMMARY_NAME, CURVES_NAME)
    return [*(path / name for name in names), *plots]
