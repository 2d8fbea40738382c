"""How the tests of run_upcycled_fl call it."""

import contextlib
import csv
import io
import json
import pathlib
import sys
from typing import Any

import numpy as np
from absl import flags

from scripts import distributed_training, run_upcycled_fl, upcycled_training
from scripts.flags import build_config
from scripts.upcycled_config import UpcycledConfig
from tests.scripts import runs

COMMAND = [sys.executable, "-m", "scripts.run_upcycled_fl"]
# Small enough for a test, unless something later on the line says otherwise: most
# clients have one batch.
TINY = ("--total_rounds=2", "--client_epochs=2", "--batch_size=256", "--seed=1")
# Clients' own noise, on few features.
OUTPUT = ("--task=synthetic_20", "--perturbation=output")
OBJECTIVE = ("--task=synthetic_20", "--perturbation=objective", "--unmet_assumptions")
PROVEN = (
    "--task=synthetic_20_binary",
    "--model=one_output_logistic_regression",
    "--perturbation=objective",
    "--client_accountant=proven",
    "--local_solver=exact",
    "--straggler_rate=0",
)
# Below what float32 has of a weight.
NO_NOISE = "--client_stddev=1e-30"


def define() -> flags.FlagValues:
    values = flags.FlagValues()
    run_upcycled_fl.define_flags(values)
    return values


def parse(*arguments: str) -> UpcycledConfig:
    values = define()
    values(["run_upcycled_fl", *arguments])
    return build_config(UpcycledConfig, values)


def run(folder: pathlib.Path, *arguments: str) -> distributed_training.RunOutcome:
    """Runs the program in this process, tiny, in a folder of its own in `folder`."""
    return upcycled_training.run(
        parse(*TINY, f"--output_root={folder}", "--experiment=run", *arguments)
    )


class Runner:
    """Runs the program in this process, the same flags once for all tests."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._finished: dict[tuple[str, ...], Any] = {}

    def __call__(self, *arguments: str) -> tuple[distributed_training.RunOutcome, str]:
        """Returns the outcome and what was printed."""
        if arguments not in self._finished:
            root, out = self._folder / str(len(self._finished)), io.StringIO()
            with contextlib.redirect_stdout(out):
                outcome = run(root, *arguments)
            self._finished[arguments] = outcome, out.getvalue()
        return self._finished[arguments]


def read_rows(outcome: distributed_training.RunOutcome) -> list[dict[str, str]]:
    return runs.read_rows(outcome.folder)


def read_metrics(outcome: distributed_training.RunOutcome) -> bytes:
    return (outcome.folder / "metrics.csv").read_bytes()


def read_weights(outcome: distributed_training.RunOutcome) -> list[bytes]:
    (result,) = outcome.results.values()
    return [np.asarray(weight).tobytes() for weight in result.weights]


def read_summary(outcome: distributed_training.RunOutcome) -> dict[str, Any]:
    """Returns the part of results.json that is about the only mechanism."""
    (name,) = outcome.results
    return json.loads((outcome.folder / "results.json").read_text())[name]


def read_clients(path: pathlib.Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))
