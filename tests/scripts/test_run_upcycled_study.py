"""Tests for run_upcycled_study: choices and verdicts by hand, and tiny studies."""

import contextlib
import csv
import dataclasses
import io
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from absl import flags

from scripts import (
    run_upcycled_study,
    upcycled_study,
    upcycled_study_data,
    upcycled_study_paper,
    upcycled_study_training,
)
from scripts.upcycled_study_claims import Verdict
from scripts.upcycled_study_config import Algorithm, Loss, StudyConfig
from scripts.upcycled_study_curve import METRICS
from scripts.upcycled_study_findings import build_table, find_largest_gap
from scripts.upcycled_study_paper import Accuracy
from simulation import execution, process
from tests.scripts.upcycled_studies import TINY, make_arrays, parse, write_files

ROOT = pathlib.Path(__file__).parents[2]
PRESETS = [
    path
    for path in sorted((ROOT / "configs" / "upcycled_fl").glob("*.flags"))
    if "scripts.run_upcycled_study" in path.read_text()
]
# Where the study is not the preset's first word.
STUDIES = {"figure3": "private", "equal_epsilon": "private"}


@pytest.fixture(scope="module", autouse=True)
def engine():
    """One engine for all studies: what it compiled is kept."""
    with execution.use_execution_context(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution, "use_execution_context", contextlib.nullcontext)
        yield


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def run(data_folder):
    def run_once(folder: pathlib.Path, *arguments: str):
        given = (f"--output_root={folder}", "--experiment=run", *arguments)
        if "--study=claims" not in arguments:
            given = ("--client_lr=0.05", *given)
        return upcycled_study.run(parse(*TINY, f"--data_folder={data_folder}", *given))

    return run_once


@pytest.fixture(scope="module")
def finished(run, tmp_path_factory):
    """Table 1 on two sets, with what was printed."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        outcome = run(tmp_path_factory.mktemp("table"), "--data=iid,0_0")
    return outcome, out.getvalue()


@pytest.fixture
def copied(finished, tmp_path) -> pathlib.Path:
    """A copy of its folder, where `run` in `tmp_path` goes on."""
    return pathlib.Path(shutil.copytree(finished[0].folder, tmp_path / "run"))


def read_rows(folder: pathlib.Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / "results.csv").read_text())))


class TestFlags:
    def test_every_field_is_a_flag_and_the_other_way_round(self):
        values = flags.FlagValues()
        run_upcycled_study.define_flags(values)
        assert set(values) == {f.name for f in dataclasses.fields(StudyConfig)}

    def test_defaults_are_the_papers_settings(self):
        config = parse()
        assert config.lambdas == upcycled_study_paper.LAMBDAS
        assert (config.total_rounds, config.clients_per_round) == (80, 9)
        assert not config.is_authors_setting
        theirs = ("--loss=double_softmax", "--client_lr=0.05")
        assert parse(*theirs).is_authors_setting
        lambdas = "--upcycled_lambda=0.04,0.12,0.21,0.43"
        assert parse(*theirs, lambdas).is_authors_setting
        assert not parse(*theirs, lambdas.replace("43", "42")).is_authors_setting

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--data=2_2"], "`data` must be one of iid"),
            (["--mu=0.1,0.1"], "`mu` must hold each value once"),
            (["--mu=0"], "`mu` must be positive"),
            (["--mu=0.2"], "`upcycled_lambda` must be given .* Found mu = 0.2"),
            (["--upcycled_lambda=0.1"], "a value for each of 4 mu"),
            (["--mu=1", "--upcycled_lambda=-1"], "`upcycled_lambda` must be finite"),
            (["--client_lr=0"], "`client_lr` must be positive"),
            (["--straggler_rate=1"], r"`straggler_rate` must be in \[0, 1\)"),
            (["--total_rounds=0"], "`total_rounds` must be positive"),
            (["--data_seed=-1"], "`data_seed` must be >= 0"),
            (["--seeds=100"], "`selection_seed` must not be among `seeds`"),
            (["--study=claims", "--seeds=1"], "`seeds` must be at least 2"),
            (["--study=claims", "--total_rounds=3"], "`total_rounds` must be even"),
            (["--experiment=a/b"], "`experiment` must be a name"),
        ],
    )
    def test_bad_input(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            parse(*arguments)

    def test_help_lists_every_flag(self):
        done = subprocess.run(
            [sys.executable, "-m", "scripts.run_upcycled_study", "--help"],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=ROOT,
        )
        for field in dataclasses.fields(StudyConfig):
            names = (f"--{field.name}:", f"--[no]{field.name}:")
            assert any(name in done.stdout for name in names), field.name

    def test_program_ends_with_one_message_and_code_2(self, tmp_path):
        done = subprocess.run(
            [sys.executable, "-m", "scripts.run_upcycled_study", "--mu=0.2"]
            + [f"--output_root={tmp_path}"],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=ROOT,
        )
        assert done.returncode == 2, done.stderr
        [line] = done.stderr.splitlines()
        assert line.startswith("run_upcycled_study: error: `upcycled_lambda` must")
        assert not done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
class TestPresets:
    def test_flags_and_header_agree(self, preset):
        config = parse(f"--flagfile={preset}")
        first = preset.stem.partition("_")[0]
        assert config.study == STUDIES.get(preset.stem, first)
        lines = preset.read_text().splitlines()
        text = "\n".join(line for line in lines if line.startswith("#"))
        assert f"--flagfile=configs/upcycled_fl/{preset.name}" in text
        for word in ("Setting", "Expected", "Runtime"):
            assert f"# {word}" in text
        if config.loss == "double_softmax":
            assert "authors'" in text

    @pytest.mark.slow
    def test_two_rounds(self, preset, data_folder, tmp_path):
        smaller = (
            "--upcycled_lambda=0.12",
            "--client_lr_grid=0.05",
            "--server_factor_grid=1",
            "--lambda_grid=0.1",
            f"--data_folder={data_folder}",
            f"--output_root={tmp_path}",
            "--experiment=run",
        )
        config = parse(f"--flagfile={preset}", *TINY, *smaller)
        outcome = upcycled_study.run(config)
        assert outcome.findings.config.study == config.study
        assert (tmp_path / "run" / "results.json").exists()
        assert {run.mu for run in outcome.findings.runs.values()} <= {0.0, 0.3}


def test_there_are_presets():
    assert len(PRESETS) == 6


class TestBadData:
    def test_errors_are_the_users_and_leave_no_folder(self, run, tmp_path):
        with pytest.raises(process.UserError, match="synthetic_iid.npz must be there"):
            run(tmp_path, f"--data_folder={tmp_path}")
        with pytest.raises(process.UserError, match="`clients_per_round` must be at"):
            run(tmp_path, "--clients_per_round=6")
        assert not list(tmp_path.iterdir())


class TestTraining:
    @pytest.fixture(scope="class")
    def train(self, data_folder):
        config = parse(*TINY, "--initial_weights=uniform")
        data = upcycled_study_data.read_file(data_folder, "iid")
        return lambda **choices: upcycled_study_training.train(
            config.build_run("iid", client_lr=0.05, **{"seed": 1, **choices}),
            data,
            config,
        )

    @pytest.mark.slow
    def test_upcycled_is_fedprox_with_a_server_rate_bit_for_bit(self, train):
        upcycled = train(algorithm=Algorithm.UPCYCLED, mu=0.3, lambda_value=0.3)
        scaled = train(algorithm=Algorithm.FEDPROX, mu=0.3, server_factor=1.5)
        plain = train(algorithm=Algorithm.FEDPROX, mu=0.3)
        for name in METRICS:
            assert np.array_equal(upcycled.values[name], scaled.values[name])
            # Before and after the first step with clients nothing is upcycled yet.
            odd = upcycled.odd_values[name]
            assert np.array_equal(odd[:2], plain.values[name][:2])
        assert not np.array_equal(
            upcycled.values["train_loss"], plain.values["train_loss"]
        )

    def test_the_seed_decides(self, train):
        first, again, other = (
            train(algorithm=Algorithm.FEDAVG, seed=seed) for seed in (1, 1, 2)
        )
        loss = first.values["train_loss"]
        assert np.array_equal(loss, again.values["train_loss"])
        # Initial weights, too.
        assert not np.any(loss == other.values["train_loss"])
        assert loss[-1] < loss[0]

    def test_the_loss_is_the_clients(self, data_folder):
        data = upcycled_study_data.read_file(data_folder, "iid")
        found = {}
        for loss in Loss:
            config = parse(*TINY, f"--loss={loss.value}", "--total_rounds=1")
            run = config.build_run("iid", Algorithm.FEDAVG, client_lr=0.05, seed=1)
            found[loss] = upcycled_study_training.train(run, data, config)
        proper, double = (found[loss].values["train_loss"] for loss in Loss)
        # At zero all is uniform, and the second softmax flattens the gradient.
        assert proper[0] == pytest.approx(np.log(2)) == double[0]
        assert proper[1] < double[1] < double[0]

    @pytest.mark.parametrize("loss", Loss)
    def test_evaluation_is_the_models(self, loss, data_folder):
        data = upcycled_study_data.read_file(data_folder, "iid")
        rng = np.random.default_rng(0)
        weights = tuple(
            3 * rng.normal(size=size).astype("f") for size in (data.shape, [2])
        )
        model = upcycled_study_training.build_model(loss, data.shape)
        found = upcycled_study_training.evaluate(weights, data, loss=loss)
        for part, (x, y) in data.examples.items():
            outputs = model.predict(weights, tf.constant(x[:, :, None, None]), None)
            expected = np.mean(model.compute_loss(tf.constant(y), outputs))
            assert found[f"{part}_loss"] == pytest.approx(expected, rel=1e-5)
            hits = model.metrics["accuracy"](tf.constant(y), outputs)
            assert found[f"{part}_accuracy"] == pytest.approx(np.mean(hits))

    def test_evaluation_far_out_is_finite(self, data_folder):
        data = upcycled_study_data.read_file(data_folder, "iid")
        weights = (np.full(data.shape, 1e4, "f"), np.float32([0, 1e6]))
        found = upcycled_study_training.evaluate(weights, data, loss=Loss.CROSS_ENTROPY)
        assert np.all(np.isfinite(list(found.values())))


class TestTable:
    def test_files_and_rows(self, finished):
        outcome, _ = finished
        names = {path.name for path in outcome.folder.iterdir()} - {".lock"}
        assert names == {
            "config.json",
            "results.csv",
            "results.json",
            "curves",
            "convergence_iid_mu0.3.png",
            "convergence_0_0_mu0.3.png",
        }
        rows = read_rows(outcome.folder)
        assert [row["algorithm"] for row in rows[:3]] == [
            "fedavg",
            "fedprox",
            "upcycled",
        ]
        assert (
            len(rows) == 2 * 2 * 3 == len(list((outcome.folder / "curves").iterdir()))
        )
        for row in rows:
            assert (row["odd_train_loss"] != "") is (row["algorithm"] == "upcycled")
            assert row["half_round"] == "1" and row["loss"] == "cross_entropy"
            assert row["source"] == f"synthetic_{row['data']}.npz"

    def test_table_is_of_the_curves(self, finished):
        outcome, out = finished
        table = build_table(outcome.findings)
        assert [row.title for row in table[:3]] == [
            "FedAvg",
            "FedProx, mu = 0.3",
            "Upcycled-FL, mu = 0.3",
        ]
        values = [
            100 * float(row["test_accuracy"])
            for row in read_rows(outcome.folder)
            if (row["data"], row["algorithm"]) == ("0_0", "upcycled")
        ]
        assert table[-1].test.mean == pytest.approx(np.mean(values))
        assert table[-1].test.stddev == pytest.approx(np.std(values, ddof=1))
        assert table[-1].paper == Accuracy(83.83, 81.58) and table[-1].program is None
        gap = find_largest_gap(table[:3], "paper")
        assert abs(gap.points) == pytest.approx(
            max(
                abs(getattr(row, part).mean - getattr(row.paper, part))
                for row in table[:3]
                for part in ("train", "test")
            )
        )
        assert (
            f"83.83 (81.58)       -                   {table[-1].train.mean:.2f}" in out
        )
        assert "Largest difference to the paper, iid: " in out
        assert "GENERATED" not in out and "SOFTMAX" not in out

    def test_summary_and_configuration(self, finished):
        outcome, _ = finished
        summary = json.loads((outcome.folder / "results.json").read_text())
        assert len(summary["table"]) == 6 and not summary["generated"]
        assert "server learning rate 1 + mu / (mu + lambda)" in summary["note"]
        config = json.loads((outcome.folder / "config.json").read_text())
        assert len(config["data"]["iid"]["sha256"]) == 64
        assert "data_folder" not in config["flags"]

    def test_one_seed_and_the_authors_loss(
        self, finished, run, tmp_path, capsys, monkeypatch
    ):
        curves = finished[0].findings.curves
        # What is printed counts here.
        monkeypatch.setattr(upcycled_study, "train", lambda one, *_: curves[one.key])
        run(tmp_path, "--seeds=1", "--loss=double_softmax")
        out = capsys.readouterr().out
        assert "over 1 seed" in out and "DOUBLE SOFTMAX" in out
        assert {row["loss"] for row in read_rows(tmp_path / "run")} == {
            "double_softmax"
        }
        summary = json.loads((tmp_path / "run" / "results.json").read_text())
        assert "DOUBLE SOFTMAX" in summary["loss"]
        assert summary["table"][0]["train"]["stddev"] is None

    def test_generated_data_say_so_everywhere(
        self, finished, tmp_path, capsys, monkeypatch
    ):
        curves = finished[0].findings.curves

        monkeypatch.setattr(
            upcycled_study,
            "train",
            lambda one, *_: curves[one.key.replace("0.5_0.5", "0_0")],
        )
        config = parse(
            *TINY,
            "--data=0.5_0.5",
            "--client_lr=0.05",
            f"--output_root={tmp_path}",
        )
        folder = upcycled_study.run(config).folder
        out = capsys.readouterr().out
        assert (
            "GENERATED by the task synthetic_20 (alpha = 0.5, beta = 0.5), not" in out
        )
        assert "Trained on GENERATED data, not the authors'" in out
        assert "These differences mean nothing" in out
        assert all("GENERATED" in row["source"] for row in read_rows(folder))
        assert json.loads((folder / "results.json").read_text())["generated"]


@pytest.mark.slow
class TestResuming:
    @pytest.mark.parametrize("damage", ["deleted", "truncated"])
    def test_resumed_equals_uninterrupted(
        self, damage, finished, copied, run, tmp_path, capsys
    ):
        (copied / "results.json").unlink()
        results = copied / "results.csv"
        if damage == "deleted":
            results.unlink()
        else:
            results.write_bytes(results.read_bytes()[:300])
        kept, lost, *_ = sorted((copied / "curves").iterdir())
        before = kept.stat().st_mtime_ns
        lost.unlink()
        run(tmp_path, "--data=iid,0_0")
        assert "going on after 11 runs" in capsys.readouterr().out
        for name in ("results.csv", "results.json", f"curves/{lost.name}"):
            expected = (finished[0].folder / name).read_bytes()
            assert (copied / name).read_bytes() == expected
        assert kept.stat().st_mtime_ns == before

    def test_damaged_curve_is_not_taken_up(self, copied, run, tmp_path):
        file = next((copied / "curves").iterdir())
        text = "".join(file.read_text().splitlines(keepends=True)[:-1])
        file.write_text(text)
        with pytest.raises(process.UserError, match=f"{file.name} is damaged; remove"):
            run(tmp_path, "--data=iid,0_0")
        assert file.read_text() == text

    def test_other_flags_and_other_data_are_refused(self, copied, run, tmp_path):
        with pytest.raises(process.UserError, match="flags.total_rounds: 2 -> 4"):
            run(tmp_path, "--data=iid,0_0", "--total_rounds=4")
        folder = tmp_path / "data"
        folder.mkdir()
        for name in ("iid", "0_0"):
            np.savez(folder / f"synthetic_{name}.npz", **make_arrays(9))
        with pytest.raises(process.UserError, match="data.iid.sha256: "):
            run(tmp_path, "--data=iid,0_0", f"--data_folder={folder}")

    def test_an_interrupted_study_keeps_its_runs(
        self, finished, run, tmp_path, monkeypatch
    ):
        train, calls = upcycled_study.train, []

        def fail_at_third(*arguments):
            calls.append(arguments)
            if len(calls) == 3:
                raise process.Terminated(15)
            return train(*arguments)

        monkeypatch.setattr(upcycled_study, "train", fail_at_third)
        with pytest.raises(process.Terminated) as caught:
            run(tmp_path, "--data=iid,0_0")
        assert caught.value.hint.startswith("the same command goes on")
        assert len(read_rows(tmp_path / "run")) == 2
        run(tmp_path, "--data=iid,0_0")
        assert len(calls) == 3 + 10
        text = (tmp_path / "run" / "results.csv").read_bytes()
        assert text == (finished[0].folder / "results.csv").read_bytes()


@pytest.mark.slow
class TestOtherStudies:
    def test_claims(self, run, tmp_path, capsys):
        outcome = run(
            tmp_path,
            "--study=claims",
            "--client_lr_grid=0.001,0.05",
            "--server_factor_grid=1,2",
        )
        out = capsys.readouterr().out
        assert outcome.findings.rates == {"iid": 0.05}
        assert (outcome.folder / "claims.png").read_bytes().startswith(b"\x89PNG")
        assert len(outcome.findings.comparisons) == 8
        assert "bit for bit" in out and "leads / trails / undecided" in out
        rows = read_rows(outcome.folder)
        assert {row["seed"] for row in rows} == {"100", "1", "2"}
        summary = json.loads((outcome.folder / "results.json").read_text())
        assert len(summary["comparisons"]) == len(summary["verdicts"]) == 8
        for counts in summary["verdicts"]:
            assert sum(counts[verdict.value] for verdict in Verdict) == 1

    def test_figures(self, run, tmp_path, capsys):
        folder = run(
            tmp_path, "--study=figures", "--seeds=1", "--lambda_grid=0.12,1"
        ).folder
        out = capsys.readouterr().out
        for name in ("lambda.png", "convergence_iid_mu0.3.png"):
            assert (folder / name).read_bytes().startswith(b"\x89PNG")
        # The paper's lambda is in the grid, and trained once.
        assert len(read_rows(folder)) == 4
        assert "Upcycled-FL over lambda" in out and "lambda 0.12" in out
