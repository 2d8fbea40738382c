"""How the tests of run_upcycled_study call it, and their data."""

import pathlib

import numpy as np
from absl import flags

from scripts import flags as run_flags
from scripts import run_upcycled_study, upcycled_study_paper
from scripts.upcycled_study_config import StudyConfig

# Unless something later on the line says otherwise.
TINY = (
    "--data=iid",
    "--mu=0.3",
    "--seeds=1,2",
    "--total_rounds=2",
    "--clients_per_round=3",
    "--client_epochs=2",
    # All clients have one shape, which is compiled once.
    "--batch_size=16",
    "--straggler_rate=0",
)
NUM_USERS, NUM_FEATURES = 5, 4


def parse(*arguments: str) -> StudyConfig:
    values = flags.FlagValues()
    run_upcycled_study.define_flags(values)
    values(["run_upcycled_study", *arguments])
    return run_flags.build_config(StudyConfig, values)


def make_arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = {}
    weights = rng.normal(size=NUM_FEATURES)
    for part, count in (("train", 80), ("test", 20)):
        arrays[f"x_{part}"] = x = rng.normal(size=[count, NUM_FEATURES])
        arrays[f"y_{part}"] = (x @ weights > 0).astype(np.int32)
        arrays[f"user_{part}"] = np.arange(count, dtype=np.int32) % NUM_USERS
    return arrays


def write_files(folder: pathlib.Path) -> None:
    """Writes a file for every data set."""
    for seed, name in enumerate(upcycled_study_paper.DATA_NAMES):
        np.savez(folder / f"synthetic_{name}.npz", **make_arrays(seed))
