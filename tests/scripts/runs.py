"""How the tests of run_distributed_dp call it."""

import csv
import io
import pathlib
import sys

from absl import flags

from scripts import run_distributed_dp
from scripts.flags import build_config
from scripts.training_config import TrainingConfig

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "scripts.run_distributed_dp"]
# Small enough for a test, unless something later on the line says otherwise.
TINY = ("--total_rounds=2", "--clients_per_round=20", "--nocompare_central")


def parse(*arguments: str) -> TrainingConfig:
    values = flags.FlagValues()
    run_distributed_dp.define_flags(values)
    values(["run_distributed_dp", *arguments])
    return build_config(TrainingConfig, values)


def read_rows(folder: pathlib.Path) -> list[dict[str, str]]:
    text = (folder / "metrics.csv").read_text()
    return list(csv.DictReader(io.StringIO(text)))
