"""One run of run_linear_representation: from a configuration to a run folder."""

import importlib.metadata
import pathlib
import platform
import time
from typing import Any

from scripts import linear_plot, linear_report, linear_results, linear_sweeps
from scripts.linear_config import LinearConfig
from simulation import process, progress, run_folder, seeds
from simulation.execution import Engine, EngineError, set_execution_context

SUMMARY_NAME = "results.json"
CURVES_NAME, FLOORS_NAME, STARTS_NAME = "curves.csv", "floors.csv", "starts.csv"
PLOT_NAME = "plot.png"
_PROGRAM = "run_linear_representation"
_ENTROPY = "from the operating system"
_PACKAGES = ("dp-accounting", "numpy", "scipy", "tensorflow", "tensorflow-federated")


def run(config: LinearConfig) -> pathlib.Path:
    """Measures, prints what came out, and writes the run folder.

    A run that was interrupted is measured from the beginning: no part is taken up.

    Returns:
        The folder.

    Raises:
        UserError: For anything the user can mend.
    """
    started = time.monotonic()
    with process.user_input():
        root = seeds.build_root_seed(config.seed)
        settings = _describe_settings(config, root)
        study = linear_sweeps.Study(config, root)
    path = run_folder.choose_folder(
        config, settings, name="linear_representation", finished=SUMMARY_NAME
    )
    with (
        process.user_errors(run_folder.RunFolderError, EngineError),
        run_folder.open_run_folder(path, settings),
    ):
        execution = set_execution_context(Engine(config.engine), device="cpu")
        print(
            linear_report.describe_run(
                config, root=root, folder=path, device=execution.device
            ),
            flush=True,
        )
        results = _measure(study)
        files = [
            path / name
            for name in (CURVES_NAME, FLOORS_NAME, STARTS_NAME, PLOT_NAME, SUMMARY_NAME)
        ]
        summary = linear_report.summarize(config, results, root)
        run_folder.write_text(files[0], linear_report.tabulate_curves(results).to_csv())
        run_folder.write_text(files[1], linear_report.tabulate_floors(results).to_csv())
        run_folder.write_text(files[2], linear_report.tabulate_starts(results).to_csv())
        linear_plot.save_plot(files[3], config, results, summary)
        # Last: it marks the run as finished.
        run_folder.write_json(files[4], summary)
    print()
    print(
        linear_report.describe_results(
            config,
            results,
            summary,
            files=files,
            seconds=time.monotonic() - started,
        ),
        flush=True,
    )
    return path


def _measure(study: linear_sweeps.Study) -> linear_results.Results:
    """Runs the sweeps under one bar."""
    with progress.show_progress(
        "linear representation", 0, study.num_parts, unit="part"
    ) as bar:
        bar.set_postfix_str("epsilon")
        runs = list(study.measure_epsilons())
        bar.update()
        for dim in study.config.dims:
            bar.set_postfix_str(f"d = {dim}")
            runs += study.measure_dim(dim)
            bar.update()
        starts = []
        for group in range(study.num_groups):
            bar.set_postfix_str("starts")
            starts += study.measure_starts(group)
            bar.update()
    return linear_results.Results(runs=tuple(runs), starts=tuple(starts))


def _describe_settings(config: LinearConfig, root: seeds.RootSeed) -> dict[str, Any]:
    """Returns the content of config.json: all that decides the result."""
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "program": _PROGRAM,
        "flags": config.to_dict(),
        "seed": config.seed if root.reproducible else _ENTROPY,
        "reproducible": root.reproducible,
        "versions": versions,
    }
