"""Tests for the presets of run_upcycled_fl: headers, and two small rounds of each."""

import pathlib

import pytest

from simulation.tasks import TASK_NAMES
from tests.scripts import runs, upcycled_runs
from tests.scripts.upcycled_runs import read_summary
from tests.simulation.tasks import files

FOLDER = runs.ROOT / "configs" / "upcycled_fl"
PROGRAM = "python -m scripts.run_upcycled_fl"


def read_header(preset: pathlib.Path) -> str:
    lines = preset.read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("#"))


# Those of run_upcycled_study are there too.
PRESETS = [
    preset
    for preset in sorted(FOLDER.glob("*.flags"))
    if PROGRAM in read_header(preset)
]
# Enough for the program to run; the data of FEMNIST and Sent140 are toys.
SMALL = ("--total_rounds=2", "--seed=1", "--device=cpu")
SMALLER = {
    "digits_ddgauss": ("--clients_per_round=20",),
    "femnist_cnn": ("--client_epochs=1", "--num_clients=4", "--clients_per_round=2"),
    "femnist_mlp": ("--client_epochs=1", "--num_clients=4", "--clients_per_round=2"),
    "femnist_output_perturbation": (
        "--client_epochs=1",
        "--num_clients=4",
        "--clients_per_round=4",
    ),
    "objective_perturbation": ("--client_epochs=1",),
    "output_perturbation": ("--client_epochs=1",),
    "sent140_lstm": ("--client_epochs=1", "--clients_per_round=2"),
}
# The rest, whose clients have batches enough for a stack of them.
OTHERWISE = ("--client_epochs=2",)
SLOW = {
    "digits_ddgauss",
    "femnist_cnn",
    "femnist_mlp",
    "femnist_output_perturbation",
    "objective_perturbation",
    "output_perturbation",
    "sent140_lstm",
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data")
    files.write_emnist(folder)
    files.write_tweets(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, data_dir):
    """Runs a preset, small. Returns the outcome and what was printed."""
    runner = upcycled_runs.Runner(tmp_path_factory.mktemp("presets"))

    def run_once(preset: pathlib.Path):
        return runner(
            f"--flagfile={preset}",
            f"--data_dir={data_dir}",
            *SMALLER.get(preset.stem, OTHERWISE),
            *SMALL,
        )

    return run_once


def test_there_are_presets():
    assert len(PRESETS) >= 9
    others = {path.stem for path in FOLDER.glob("*.flags")} - {p.stem for p in PRESETS}
    for name in others:
        assert "python -m scripts.run_upcycled_" in read_header(
            FOLDER / f"{name}.flags"
        )


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
class TestPresets:
    def test_the_flags_are_those_of_the_program(self, preset, monkeypatch):
        monkeypatch.chdir(runs.ROOT)
        config = upcycled_runs.parse(f"--flagfile={preset}")
        assert config.task in TASK_NAMES
        assert config.build_schedule() is not None

    def test_the_header_says_how_and_what(self, preset):
        text = read_header(preset)
        assert f"--flagfile=configs/upcycled_fl/{preset.name}" in text
        for word in ("Setting", "Expected", "Runtime"):
            assert f"# {word}" in text
        if "femnist" in preset.stem or "sent140" in preset.stem:
            assert "python -m scripts.prepare_data" in text
        assert "TODO" not in text


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem in SLOW))
        for p in PRESETS
    ],
)
def test_two_rounds(preset, run, monkeypatch):
    monkeypatch.chdir(runs.ROOT)
    outcome, out = run(preset)
    (result,) = outcome.results.values()
    assert result.ledger_state.rounds_completed == 2
    assert "an even step by the server alone after every round" in out
    summary = read_summary(outcome)
    config = upcycled_runs.parse(f"--flagfile={preset}")
    clients = summary["client_privacy"]
    assert (clients is None) is (config.perturbation == "none")
    if clients is not None:
        assert clients["accountant"] == config.client_accountant
        assert clients["is_proven"] is ("proven" in preset.stem)
        assert min(clients["num_releases"]) == 2
        assert clients["epsilon_max"] > 0
    assert bool(summary["privacy"]) is (config.mechanism != "none")
