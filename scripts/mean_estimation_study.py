"""One run of run_mean_estimation: from a configuration to a run folder."""

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distributed_dp import accounting
from scripts import (
    flags,
    mean_estimation,
    mean_estimation_report,
    mean_estimation_rows,
)
from scripts.mean_estimation_config import (
    Setting,
    StudyConfig,
    build_cells,
)
from scripts.mean_estimation_plan import Baseline, Plan, build_baseline, build_plan
from scripts.mean_estimation_rows import Central, Row
from simulation import process, progress, run_folder, seeds

RESULTS_NAME = "results.csv"
SUMMARY_NAME = "results.json"
PLOT_NAME = "plot.png"
_PROGRAM = "run_mean_estimation"
_ENTROPY = "from the operating system"
_PACKAGES = ("dp-accounting", "numpy", "scipy", "tensorflow")
# After so many cells, while no thread is at work, memory is freed.
_CELLS_A_BATCH = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOutcome:
    """What a study left.

    Attributes:
        folder: Its folder.
        rows: The rows of results.csv, in the order of the grid.
    """

    folder: pathlib.Path
    rows: tuple[Row, ...]


class _Stopped(Exception):
    """Another thread failed, or a signal came."""


def run(config: StudyConfig) -> StudyOutcome:
    """Measures the grid, prints what it does, and writes the run folder.

    Raises:
        UserError: For anything the user can mend.
    """
    started = time.monotonic()
    # Everything that can be wrong is found before the first file is written.
    with process.user_input():
        root = seeds.build_root_seed(config.seed)
        plans = build_plans(config)
        settings = _describe_settings(config, root)
    path = run_folder.choose_folder(
        config, settings, name="mean_estimation", finished=SUMMARY_NAME
    )
    with process.user_errors(run_folder.RunFolderError):
        with run_folder.open_run_folder(path, settings) as folder:
            print(
                mean_estimation_report.describe_run(
                    config, plans, root=root, folder=path
                ),
                flush=True,
            )
            done = _read_rows(path, plans) if folder.resumed else {}
            if folder.resumed:
                print(
                    "This folder holds a run with the same flags: going on after "
                    f"{len(done)} of {len(plans)} cells."
                )
            rows = _measure(config, plans, done, root=root, path=path)
            files = _write_results(config, plans, rows, path=path)
    print()
    print(
        mean_estimation_report.describe_results(
            config, plans, rows, files=files, seconds=time.monotonic() - started
        ),
        flush=True,
    )
    return StudyOutcome(folder=path, rows=tuple(rows))


def build_plans(config: StudyConfig) -> list[Plan]:
    """Returns the plan of each cell.

    Raises:
        ValueError: If no cell is feasible, with the first one's reason.
    """
    plans = [
        build_plan(cell, delta=config.delta, beta=config.beta)
        for cell in build_cells(config)
    ]
    problems = [plan.problem for plan in plans if plan.problem is not None]
    if len(problems) == len(plans):
        raise ValueError(f"no cell of the grid is feasible: {problems[0]}")
    return plans


def _measure(
    config: StudyConfig,
    plans: Sequence[Plan],
    done: Mapping[str, Row],
    *,
    root: seeds.RootSeed,
    path: pathlib.Path,
) -> list[Row]:
    """Measures what is not done, keeping results.csv up to date. Returns all rows."""
    rows = dict(done)
    pending = [plan for plan in plans if plan.cell.key not in rows]
    if not pending:
        return [rows[plan.cell.key] for plan in plans]
    stop = threading.Event()

    def check_stop() -> None:
        if stop.is_set():
            raise _Stopped

    workers = config.workers or len(os.sched_getaffinity(0))
    with _start_pool(workers, stop) as pool, _hint_at_resuming():
        central = _measure_central(
            config, pending, root=root, pool=pool, check_stop=check_stop
        )

        def measure(plan: Plan) -> Row:
            check_stop()
            return _measure_cell(
                plan,
                central[plan.cell.setting],
                config=config,
                root=root,
                check_stop=check_stop,
            )

        with progress.show_progress("cells", len(done), len(plans), unit="cell") as bar:
            for start in range(0, len(pending), _CELLS_A_BATCH):
                batch = pending[start : start + _CELLS_A_BATCH]
                futures = {pool.submit(measure, plan): plan for plan in batch}
                for future in concurrent.futures.as_completed(futures):
                    rows[futures[future].cell.key] = future.result()
                    _write_rows(path, [rows.get(plan.cell.key) for plan in plans])
                    bar.update()
                if len(batch) == _CELLS_A_BATCH:
                    mean_estimation.free_compiled()
    return [rows[plan.cell.key] for plan in plans]


def _measure_central(
    config: StudyConfig,
    plans: Sequence[Plan],
    *,
    root: seeds.RootSeed,
    pool: concurrent.futures.Executor,
    check_stop: Callable[[], None],
) -> dict[Setting, Central]:
    """Measures the central Gaussian at every setting of the plans."""
    baselines: dict[Setting, Baseline] = {}
    for plan in plans:
        setting = plan.cell.setting
        if setting not in baselines:
            baselines[setting] = build_baseline(setting, delta=config.delta)
    populations = list(dict.fromkeys(setting.population for setting in baselines))

    def measure(population: tuple[int, int, float]) -> dict[Setting, Central]:
        settings = [s for s in baselines if s.population == population]
        errors = mean_estimation.measure_central(
            [baselines[s].same_accountant.central_stddev for s in settings],
            population,
            keys=[f"central/{s.key}" for s in settings],
            root=root,
            repeats=config.repeats,
            check_stop=check_stop,
        )
        return {
            setting: Central(errors=found, baseline=baselines[setting])
            for setting, found in zip(settings, errors, strict=True)
        }

    futures = [pool.submit(measure, population) for population in populations]
    central: dict[Setting, Central] = {}
    label = "central Gaussian"
    with progress.show_progress(label, 0, len(futures), unit="population") as bar:
        for future in concurrent.futures.as_completed(futures):
            central.update(future.result())
            bar.update()
    return central


def _measure_cell(
    plan: Plan,
    central: Central,
    *,
    config: StudyConfig,
    root: seeds.RootSeed,
    check_stop: Callable[[], None],
) -> Row:
    cell, measurement = plan.cell, None
    if plan.codec is not None:
        measurement = mean_estimation.measure_codec(
            plan.codec,
            cell.setting.population,
            key=cell.key,
            root=root,
            repeats=config.repeats,
            check_stop=check_stop,
        )
    elif isinstance(plan.parameters, accounting.GaussianParameters):
        [errors] = mean_estimation.measure_central(
            [plan.parameters.central_stddev],
            cell.setting.population,
            keys=[cell.key],
            root=root,
            repeats=config.repeats,
            draws=1,
            check_stop=check_stop,
        )
        measurement = mean_estimation.Measurement(
            errors=errors, redraws_per_client=None
        )
    return mean_estimation_rows.build_row(
        plan, measurement, central, delta=config.delta, repeats=config.repeats
    )


@contextlib.contextmanager
def _start_pool(
    workers: int, stop: threading.Event
) -> Iterator[concurrent.futures.Executor]:
    """Gives threads; when the block fails, those that run end at their next repeat."""
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        yield pool
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _hint_at_resuming() -> Iterator[None]:
    try:
        yield
    except process.Terminated as error:
        error.hint = "the same command goes on from the cells that are measured"
        raise


def _read_rows(path: pathlib.Path, plans: Sequence[Plan]) -> dict[str, Row]:
    """Returns the rows that an interrupted run left, by the cell's key."""
    file = path / RESULTS_NAME
    try:
        rows = mean_estimation_rows.from_csv(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise run_folder.RunFolderError(
            f"{file} is damaged; remove it to measure again: {error}"
        ) from None
    keys = {mean_estimation_rows.get_cell_fields(p.cell): p.cell.key for p in plans}
    return {
        keys[fields]: row
        for row in rows
        if (fields := mean_estimation_rows.get_row_fields(row)) in keys
    }


def _write_rows(path: pathlib.Path, rows: Sequence[Row | None]) -> None:
    text = mean_estimation_rows.to_csv([row for row in rows if row is not None])
    run_folder.write_text(path / RESULTS_NAME, text)


def _describe_settings(config: StudyConfig, root: seeds.RootSeed) -> dict[str, Any]:
    """Returns the content of config.json: all that decides the result."""
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "program": _PROGRAM,
        "flags": config.to_dict(),
        "seed": config.seed if root.reproducible else _ENTROPY,
        "reproducible": root.reproducible,
        "versions": versions,
        "sources": flags.read_sources() if root.reproducible else None,
    }


def _write_results(
    config: StudyConfig,
    plans: Sequence[Plan],
    rows: Sequence[Row],
    *,
    path: pathlib.Path,
) -> list[pathlib.Path]:
    mean_estimation_report.save_plot(path / PLOT_NAME, rows)
    # Last: it marks the run as finished.
    run_folder.write_json(
        path / SUMMARY_NAME,
        mean_estimation_report.summarize_results(config, plans, rows),
    )
    names = (run_folder.CONFIG_NAME, RESULTS_NAME, SUMMARY_NAME, PLOT_NAME)
    return [path / name for name in names]
