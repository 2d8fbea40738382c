"""The runs of a comparison, read back from their folders: what is finished there.

A run that is finished is not trained again where its folder says that it is the same.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from centaur import personal_data
from scripts import centaur_training
from scripts import flags as run_flags
from scripts.centaur_comparison_config import ComparisonConfig, Run
from scripts.centaur_comparison_worker import RESULTS_NAME
from scripts.centaur_config import CentaurConfig
from simulation import process, run_folder, table
from simulation.population.federated_data import DataError
from simulation.tasks import load_task

PROGRAM = "run_centaur_comparison"
_METRICS_NAME = "metrics.csv"
# A run's config.json has what was chosen where the flag was unset, and of the model the
# name that it has itself; the comparison's has the flags.
_RESOLVED = ("delta", "central_accountant")
# What its identity says of the data beside theirs.
_DERIVED = ("users", "evaluated")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stamp:
    """What all runs of a comparison have in common in their config.json.

    Attributes:
        program: The program that they are runs of.
        versions: Of the packages.
        sources: The digest of the sources.
        identity: What tells the clients' data from others.
        num_clients: N, the clients.
        description: The data, in words.
    """

    program: str
    versions: Mapping[str, str]
    sources: str
    identity: Mapping[str, Any]
    num_clients: int
    description: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a reported run came to.

    Attributes:
        run: What was run.
        metric: The name of what is measured.
        test: Its mean over clients on their test parts.
        test_stddev: Its standard deviation over clients.
        worst_tenth: Its mean over the tenth of clients with the least.
        validation: Its mean over clients on their validation parts.
        epsilon: What was spent: inf without noise, None where nothing is sent.
        standing: "proven" or "as published"; None without an epsilon.
        delta: At which delta; None without an epsilon.
        rounds: Rounds that were completed.
        fraction_clipped: The mean over rounds; None where nothing is clipped.
        mean_norm: Likewise of the norm of what clients send, before the clip.
        curve: The mean on the validation parts, by round.
    """

    run: Run
    metric: str
    test: float
    test_stddev: float
    worst_tenth: float
    validation: float
    epsilon: float | None
    standing: str | None
    delta: float | None
    rounds: int
    fraction_clipped: float | None
    mean_norm: float | None
    curve: tuple[tuple[int, float], ...]


def build_stamp(config: ComparisonConfig) -> Stamp:
    """Returns what the runs have in common, of the data as they are now.

    Raises:
        UserError: If the data cannot be read, or not be divided so.
    """
    with process.user_input(OSError, DataError):
        task = load_task(config.task, run_flags.build_task_options(config))
        data = personal_data.split_personal_data(
            task,
            validation_fraction=config.validation_fraction,
            seed=config.data_seed,
            hold_mb=config.hold_mb,
        )
    return Stamp(
        program=centaur_training.PROGRAM.name,
        versions=run_flags.read_versions(),
        sources=run_flags.read_sources(),
        identity=data.identity,
        num_clients=task.num_clients,
        description=task.description,
    )


def describe_settings(config: ComparisonConfig, stamp: Stamp) -> dict[str, Any]:
    """Returns the content of the comparison's config.json: what all runs share."""
    return {
        "program": PROGRAM,
        "flags": config.list_common(),
        "data": {"users": stamp.num_clients, **stamp.identity},
        "versions": dict(stamp.versions),
        "sources": stamp.sources,
    }


def is_finished(folder: pathlib.Path, config: CentaurConfig, stamp: Stamp) -> bool:
    """Returns whether a folder holds this very run, with its results.

    It does where everything agrees that decides the result: flags, seed, data, versions
    and sources; the model is that of the comparison, whose folder has no other. Where
    anything differs the answer is no, and training there is what tells the user.

    Raises:
        UserError: If the folder cannot be read.
    """
    with process.user_errors(run_folder.RunFolderError):
        found = run_folder.read_config(folder)
    if found is None or not (folder / RESULTS_NAME).exists():
        return False
    wanted = json.loads(json.dumps(config.to_dict()))
    flags_, data = found.get("flags", {}), found.get("data", {})
    wanted["model"] = flags_.get("model")
    for name in _RESOLVED:
        if wanted[name] is None:
            wanted[name] = flags_.get(name)
    return (
        found.get("program") == stamp.program
        and found.get("seed") == config.seed
        and flags_ == wanted
        and found.get("versions") == stamp.versions
        and found.get("sources") == stamp.sources
        and {name: data[name] for name in data if name not in _DERIVED}
        == json.loads(json.dumps(stamp.identity))
    )


def read_validation(folder: pathlib.Path, run: Run) -> float:
    """Returns the mean metric over clients on their validation parts, at the end.

    That is all that is read of a run that settings are chosen by. NaN for none.
    """
    results = _read_results(folder)
    found = _get_summary(results, run)["validation_users_own_models"]
    return _get_mean(found[results["metric"]])


def read_outcome(folder: pathlib.Path, run: Run) -> Outcome:
    """Returns what a finished run came to."""
    results = _read_results(folder)
    metric, summary = results["metric"], _get_summary(results, run)
    test = summary["test_users_own_models"][metric]
    statement = summary["privacy"][0] if summary["privacy"] else None
    rows = read_metrics(folder)
    epsilon = None if run.epsilon is None else math.inf
    return Outcome(
        run=run,
        metric=metric,
        test=test["mean"],
        test_stddev=test["stddev"],
        worst_tenth=test["worst_10_percent"],
        validation=_get_mean(summary["validation_users_own_models"][metric]),
        epsilon=epsilon if statement is None else float(statement["epsilon"]),
        standing=None if statement is None else _name_standing(statement),
        delta=None if statement is None else statement["delta"],
        rounds=summary["rounds_completed"],
        fraction_clipped=_average(rows, "fraction_clipped") if run.is_private else None,
        mean_norm=None if run.epsilon is None else _average(rows, "mean_norm"),
        curve=_read_curve(rows, f"validation_{metric}"),
    )


def read_metrics(folder: pathlib.Path) -> table.Table:
    """Returns the table of a run's rounds.

    Raises:
        UserError: If it cannot be read.
    """
    with process.user_errors(OSError):
        text = (folder / _METRICS_NAME).read_text(encoding="utf-8")
    return table.Table.from_csv(text)


def _read_results(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / RESULTS_NAME
    with process.user_errors(OSError, run_folder.RunFolderError):
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise run_folder.RunFolderError(
                f"{path} is damaged; remove its folder to train again: {error}"
            ) from None


def _get_summary(results: Mapping[str, Any], run: Run) -> Mapping[str, Any]:
    """Returns the part that is about the mechanism, the only one of the run."""
    if not run.is_private:
        return results["none"]
    (summary,) = (
        value
        for value in results.values()
        if isinstance(value, Mapping) and "privacy" in value
    )
    return summary


def _get_mean(spread: Mapping[str, Any] | None) -> float:
    return math.nan if spread is None else float(spread["mean"])


def _name_standing(statement: Mapping[str, Any]) -> str:
    return "as published" if statement["as_published"] else "proven"


def _average(rows: table.Table, column: str) -> float | None:
    """Returns the mean of a column over the rounds; None where there is none."""
    if column not in rows.columns:
        return None
    values = [float(value) for value in rows.read_column(column) if value]
    return float(np.mean(values)) if values else None


def _read_curve(rows: table.Table, column: str) -> tuple[tuple[int, float], ...]:
    pairs = zip(rows.read_column("round"), rows.read_column(column), strict=True)
    return tuple((int(number), float(value)) for number, value in pairs if value)
