"""Tests for run_mean_estimation: in this process where that is enough, else outside."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from absl import flags

from scripts import flags as run_flags
from scripts import mean_estimation_rows, mean_estimation_study, run_mean_estimation
from scripts.mean_estimation_config import StudyConfig
from simulation import process

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "scripts.run_mean_estimation"]
# A grid of two cells, small enough not to be compiled.
TINY = (
    "--num_clients=8",
    "--dim=30",
    "--num_stddevs=4",
    "--bits=12,16",
    "--epsilon=2",
    "--norm_bound=worst_case",
    "--repeats=2",
)
RESULTS = ("config.json", "plot.png", "results.csv", "results.json")
# In a new interpreter: TensorFlow is there, TFF and TF-Privacy are not, and what XLA
# compiled is freed after every cell.
WITHOUT_TFF = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow_federated", "tensorflow_privacy"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
from scripts import run_mean_estimation
from simulation import process

import_quietly = process.import_quietly


def import_and_patch(name):
    import_quietly(name)
    from scripts import mean_estimation_study

    mean_estimation_study._CELLS_A_BATCH = 1


process.import_quietly = import_and_patch
run_mean_estimation.define_flags()
process.run_program(run_mean_estimation.main, name="run_mean_estimation")
"""


def run(folder: pathlib.Path, *arguments: str) -> mean_estimation_study.StudyOutcome:
    values = flags.FlagValues()
    run_mean_estimation.define_flags(values)
    defaults = (*TINY, f"--output_root={folder}", "--experiment=run")
    values(["run_mean_estimation", *defaults, *arguments])
    return mean_estimation_study.run(run_flags.build_config(StudyConfig, values))


def run_outside(
    *arguments: str, code: str | None = None
) -> subprocess.CompletedProcess:
    command = COMMAND if code is None else [sys.executable, "-c", code]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"},
    )


def list_files(folder: pathlib.Path) -> set[str]:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    return names - {".lock"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
    """The folder of a finished run with --seed=7."""
    return run(tmp_path_factory.mktemp("finished"), "--seed=7").folder


@pytest.fixture
def copied(finished, tmp_path) -> pathlib.Path:
    """A copy of it, where `run` in `tmp_path` goes on."""
    return pathlib.Path(shutil.copytree(finished, tmp_path / "run"))


class TestRun:
    @pytest.fixture(scope="class")
    def outcome(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("study")
        # 4 bits are too few for any noise.
        return run(folder, "--seed=3", "--bits=4,12", "--mechanism=ddgauss,gaussian")

    def test_it_leaves_all_files(self, outcome):
        assert list_files(outcome.folder) == set(RESULTS)
        assert (outcome.folder / "plot.png").read_bytes().startswith(b"\x89PNG")

    def test_configuration_has_flags_seed_and_versions(self, outcome):
        config = json.loads((outcome.folder / "config.json").read_text())
        assert config["flags"]["bits"] == [4, 12]
        assert config["seed"] == 3 and config["reproducible"]
        assert "tensorflow" in config["versions"]
        assert "workers" not in config["flags"]

    def test_csv_json_and_rows_agree(self, outcome):
        text = (outcome.folder / "results.csv").read_text()
        assert mean_estimation_rows.from_csv(text) == list(outcome.rows)
        summary = json.loads((outcome.folder / "results.json").read_text())
        assert summary["cells"] == [dict(row) for row in outcome.rows]
        views = [
            [statement["view"] for statement in entry["statements"]]
            for entry in summary["privacy"]
        ]
        analyst = "analyst of the released models"
        assert views == [[analyst, "the server itself"], [analyst]]
        assert summary["metric"].startswith("MSE = ||estimate - mean||^2 / d")

    def test_every_cell_is_there_with_its_privacy(self, outcome):
        infeasible, measured, central = outcome.rows
        assert [row["mechanism"] for row in outcome.rows] == [
            "ddgauss",
            "ddgauss",
            "gaussian",
        ]
        for row in (measured, central):
            assert row["status"] == "measured"
            assert 1.9 < row["epsilon_spent"] <= 2
            assert (row["delta"], row["num_rounds"]) == (1e-5, 1)
            assert row["sampling_rate"] == 1
            assert row["adjacency"] == "add or remove one user"
            assert row["ratio_low"] < row["ratio"] < row["ratio_high"]
            assert row["order"] > 1 and row["bound"] and row["accountant"]
        assert infeasible["status"] == "infeasible"
        assert "bits" in infeasible["problem"] and infeasible["mse"] is None
        assert infeasible["central_mse"] == measured["central_mse"]

    def test_infeasible_cells_and_bounds_are_printed(self, tmp_path, capsys):
        _, row = run(tmp_path, "--bits=4,12", "--beta=0").rows
        out = capsys.readouterr().out
        # Theorem 36 says something at beta = 0, and it holds.
        assert row["mse"] < row["theorem_36_mse"] < 50 * row["mse"]
        assert re.search(r"  at most \(thm. 36\) +\d", out)
        assert "cells       2, 1 of them infeasible" in out
        assert re.search(r"k = 4, B = 4 +infeasible\n", out)
        assert "infeasible: ddgauss, hadamard" in out
        assert "not reproducible" in out
        assert "The whole statement of one cell (n = " in out
        for view in ("analyst of the released models", "the server itself"):
            assert re.search(rf"Privacy, {view}: epsilon = \d", out)


class TestRepetition:
    def test_same_seed_gives_the_same_bytes_whatever_the_threads(
        self, finished, tmp_path
    ):
        folder = run(tmp_path, "--seed=7", "--workers=1").folder
        text = (folder / "results.csv").read_bytes()
        assert text == (finished / "results.csv").read_bytes()

    def test_resumed_equals_uninterrupted(self, finished, copied, tmp_path):
        whole = (finished / "results.csv").read_bytes()
        (copied / "results.json").unlink()
        header, _, second = whole.decode().splitlines(keepends=True)
        (copied / "results.csv").write_text(header + second)
        run(tmp_path, "--seed=7")
        for name in ("results.csv", "results.json"):
            assert (copied / name).read_bytes() == (finished / name).read_bytes()

    def test_default_name_never_meets_a_finished_run(self, tmp_path):
        values = flags.FlagValues()
        run_mean_estimation.define_flags(values)
        values(["program", *TINY, "--bits=16", f"--output_root={tmp_path}"])
        config = run_flags.build_config(StudyConfig, values)
        folders = [mean_estimation_study.run(config).folder for _ in range(2)]
        assert folders[1].name == f"{folders[0].name}-2"
        texts = [(folder / "results.csv").read_text() for folder in folders]
        assert texts[0] != texts[1]


class TestBadInput:
    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ("--clip=0", "`clip` must be positive and finite. Found 0.0."),
            ("--epsilon=-1", "`epsilon` must be positive and finite. Found -1.0."),
            ("--rotation=spiral", "`rotation` must be one of hadamard"),
            ("--bits=ten", "flag --bits=ten: invalid literal"),
        ],
    )
    def test_program_ends_with_one_message_and_code_2(
        self, argument, message, tmp_path
    ):
        done = run_outside(argument, f"--output_root={tmp_path / 'runs'}")
        assert done.returncode == 2, done.stderr
        [line] = done.stderr.splitlines()
        assert line.startswith("run_mean_estimation: error: ") and message in line
        assert not done.stdout
        assert not list_files(tmp_path)

    def test_bits_too_small_for_every_cell(self, tmp_path):
        with pytest.raises(
            process.UserError, match="no cell .*`bits` .* n = 8 and k = 4"
        ):
            run(tmp_path, "--bits=2")
        assert not list_files(tmp_path)

    def test_bits_too_many_for_the_arithmetic(self, tmp_path):
        with pytest.raises(process.UserError, match="use fewer bits"):
            run(tmp_path, "--bits=32", "--mechanism=skellam")
        assert not list_files(tmp_path)

    def test_folder_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(process.UserError, match="cannot use|cannot write"):
            run(tmp_path / "file")
        assert list_files(tmp_path) == {"file"}

    def test_folder_of_a_run_with_other_flags(self, copied, tmp_path):
        before = {name: (copied / name).read_bytes() for name in RESULTS}
        with pytest.raises(process.UserError, match=r"flags.beta: 0.60\d+ -> 0.0"):
            run(tmp_path, "--seed=7", "--beta=0")
        with pytest.raises(process.UserError, match="seed: 7 -> 2"):
            run(tmp_path, "--seed=2")
        assert {name: (copied / name).read_bytes() for name in RESULTS} == before

    @pytest.mark.parametrize("text", ["mse\n0.1\n", "mse,mse_low\n0.1\n", "\0"])
    def test_damaged_results_are_not_taken_up(self, text, copied, tmp_path):
        (copied / "results.csv").write_text(text)
        with pytest.raises(process.UserError, match="results.csv is damaged"):
            run(tmp_path, "--seed=7")
        assert (copied / "results.csv").read_text() == text


class TestProcess:
    def test_it_needs_no_tff_and_starts_quietly(self, tmp_path):
        # So many repeats that XLA compiles the cells.
        arguments = (*TINY, "--repeats=750", f"--output_root={tmp_path}")
        done = run_outside(*arguments, code=WITHOUT_TFF)
        assert done.returncode == 0, done.stderr
        assert "ratio = MSE / MSE of the central Gaussian" in done.stdout
        # The progress bars, and nothing else.
        lines = done.stderr.replace("\r", "\n").splitlines()
        assert all(line.startswith(("central Gau", "cells:")) for line in lines if line)

    def test_an_interrupt_ends_it_and_keeps_what_is_measured(self, tmp_path):
        arguments = (*TINY, "--bits=12,13,14,15,16", f"--output_root={tmp_path}")
        command = [*COMMAND, *arguments, "--experiment=run", "--repeats=100"]
        running = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        results = tmp_path / "run" / "results.csv"
        for _ in range(1200):
            if results.exists() or running.poll() is not None:
                break
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=60)
        assert running.returncode == 128 + signal.SIGINT, error
        assert "Traceback" not in error
        assert error.strip().endswith("goes on from the cells that are measured")
        assert list_files(tmp_path / "run") == {"config.json", "results.csv"}
        assert mean_estimation_rows.from_csv(results.read_text())

    def test_help_answers_at_once(self):
        done = run_outside("--help")
        assert done.returncode == 0
        assert "--norm_bound" in done.stdout and not done.stderr

    def test_no_process_of_these_tests_is_left(self):
        children = psutil.Process(os.getpid()).children(recursive=True)
        assert not [c for c in children if "run_mean_estimation" in c.cmdline()]
