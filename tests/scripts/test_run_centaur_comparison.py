"""Tests for run_centaur_comparison: budgets, choices, verdicts, and a tiny one."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from absl import flags

from scripts import (
    centaur_comparison,
    centaur_comparison_runs,
    centaur_comparison_worker,
    distributed_training,
    run_centaur_comparison,
)
from scripts import flags as run_flags
from scripts.centaur_comparison_config import ComparisonConfig, Run
from scripts.centaur_comparison_runs import Outcome
from scripts.centaur_config import Method
from scripts.flags import build_config
from simulation import process
from tests.scripts import centaur_runs, runs

COMMAND = [sys.executable, "-m", "scripts.run_centaur_comparison"]
# On the toy task, whose five clients learn in no time.
TOY = (
    "--model=toy",
    "--validation_fraction=0.2",
    "--total_rounds=2",
    "--eval_every=1",
    "--batch_size=20",
    "--client_epochs=1",
    "--head_epochs=2",
    "--stand_alone_epochs=3",
    "--methods=centaur,fedavg_fb,stand_alone",
    "--epsilons=20",
    "--grid_client_lrs=0.1,0.3",
    "--grid_clips=0.5",
    "--seeds=1,2",
    "--experiment=toy",
)


def parse(*arguments: str) -> ComparisonConfig:
    values = flags.FlagValues()
    run_centaur_comparison.define_flags(values)
    values(["run_centaur_comparison", *arguments])
    run_centaur_comparison.drop_default_grids(values)
    return build_config(ComparisonConfig, values)


def build_outcome(method, seed, test, epsilon=8.0) -> Outcome:
    return Outcome(
        run=Run(method=method, epsilon=epsilon, seed=seed, point={}),
        metric="accuracy",
        test=test,
        test_stddev=0.1,
        worst_tenth=0.2,
        validation=0.5,
        epsilon=epsilon,
        standing=None,
        delta=None,
        rounds=2,
        fraction_clipped=None,
        mean_norm=None,
        curve=(),
    )


class TestConfig:
    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--methods=", "must be values"),
            ("--methods=centaur,other", "other"),
            ("--methods=centaur,centaur", "`methods` must hold each value once"),
            ("--seeds=1", "`seeds` must be at least 2"),
            ("--seeds=0,1", "`tuning_seed` must not be among"),
            ("--epsilons=0", "`epsilons` must be positive"),
            ("--epsilons=nan", "`epsilons` must be positive"),
            ("--tuning_epsilon=0", "`tuning_epsilon` must be positive"),
            ("--mechanism=none", "`mechanism` must add noise"),
            ("--parallel_runs=1000000", "`parallel_runs` must be at most the number"),
            ("--diagnose --methods=pmtl_ft", "`diagnose` must be off without any"),
            ("--diagnostics=off", "`diagnostics` must be on"),
            ("--compare_central", "`compare_central` off"),
            ("--grid_clips=0", "`grid_clips` must hold positive"),
            ("--grid_clips=1e30", "`clip` must be between"),
            ("--grid_head_lrs=0.1,0.1", "`grid_head_lrs` must hold each value once"),
            ("--pmtl_lambda=-1", "`pmtl_lambda` must be >= 0"),
        ],
    )
    def test_what_is_refused(self, flag, message):
        with pytest.raises((ValueError, flags.IllegalFlagValueError), match=message):
            parse(*flag.split())

    def test_one_way_of_tuning(self):
        with pytest.raises(ValueError, match="^`tuning_epsilon` must be unset"):
            parse("--tune_each_epsilon", "--tuning_epsilon=8")

    def test_an_adaptive_clip_is_not_diagnosed(self):
        with pytest.raises(ValueError, match="^`diagnose` must be off"):
            parse("--diagnose", "--adaptive_clip", "--mechanism=ddgauss", "--bits=20")

    @pytest.mark.parametrize("name", ["seed", "method", "epsilon"])
    def test_flags_of_single_runs_are_gone(self, name):
        values = flags.FlagValues()
        run_centaur_comparison.define_flags(values)
        assert name not in values

    def test_a_run_has_what_its_method_takes(self):
        config = parse("--pmtl_lambda=3", "--ppsgd_head_lr=0.2", "--head_state=refit")
        names = set()
        for method in Method:
            tuned = config.get_tuned_epsilon(method, 8.0)
            for point in config.list_points(method, tuned):
                one = config.plan_run(method, 8.0, 3, point)
                made = config.build_run(one)
                assert (made.method, made.seed) == (method.value, 3)
                assert made.pmtl_lambda == (3 if method is Method.PMTL_FT else 1)
                is_ppsgd = method.value.startswith("ppsgd")
                assert made.ppsgd_head_lr == (0.2 if is_ppsgd else None)
                for name, value in point.items():
                    assert getattr(made, name) == value
                is_private = method is not Method.STAND_ALONE
                assert made.mechanism == ("gaussian" if is_private else "none")
                assert made.total_rounds == (40 if is_private else 1)
                assert not is_private or made.epsilon == 8.0
                names.add(made.experiment)
        assert len(names) == len(Method) * config.budget

    def test_without_noise_there_is_no_clip(self):
        config = parse()
        point = {"client_lr": 0.3, "head_lr": 0.1, "clip": 0.5}
        one = config.plan_run(Method.CENTAUR, math.inf, 1, point)
        assert "clip" not in one.name and not one.is_private
        assert config.build_run(one).mechanism == "none"

    def test_a_trial_is_looked_at_once(self):
        config = parse("--eval_every=3")
        point = config.list_points(Method.CENTAUR, 8.0)[0]
        for is_trial, every in ((True, 40), (False, 3)):
            one = config.plan_run(Method.CENTAUR, 8.0, 0, point, is_trial=is_trial)
            made = config.build_run(one)
            assert made.eval_every == every
            assert made.evaluate_test is not is_trial


class TestBudget:
    def test_all_methods_have_as_many_points(self):
        config = parse(
            "--grid_client_lrs=0.1,0.2,0.4", "--grid_head_lrs=1,2", "--grid_clips=3,4"
        )
        assert config.budget == 12
        for method in Method:
            tuned = config.get_tuned_epsilon(method, 8.0)
            points = config.list_points(method, tuned)
            assert len(points) == 12
            assert len({tuple(point.items()) for point in points}) == 12
        axes = config.list_axes(Method.STAND_ALONE, None)
        assert axes == {
            "client_lr": (0.1, 0.2, 0.4),
            "stand_alone_epochs": (200, 100, 50, 25),
        }

    def test_a_grid_that_is_not_given_is_the_flag(self):
        config = parse("--head_lr=0.7", "--clip=0.3", "--client_lr=0.2")
        assert config.list_axes(Method.CENTAUR, 8.0) == {
            "client_lr": (0.2,),
            "head_lr": (0.7,),
            "clip": (0.3,),
        }
        both = parse("--clip=0.3", "--grid_clips=0.4,0.6")
        assert both.list_axes(Method.CENTAUR, 8.0)["clip"] == (0.4, 0.6)

    def test_settings_are_chosen_where_there_is_a_clip(self):
        config = parse("--epsilons=inf,4,1")
        assert config.tuned_epsilons == (4.0,)
        assert "clip" in config.list_axes(Method.CENTAUR, 4.0)
        assert parse("--epsilons=inf").tuned_epsilons == (math.inf,)
        with pytest.raises(ValueError, match="^`tuning_epsilon` must be finite"):
            parse("--epsilons=inf,1", "--tuning_epsilon=inf")

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--grid_stand_alone_epochs=10"],
            ["--grid_stand_alone_lrs=0.1,0.2,0.3,0.4"],
            ["--stand_alone_epochs=1"],
        ],
    )
    def test_unequal_budgets_are_refused(self, arguments):
        with pytest.raises(ValueError, match="^`grid_stand_alone_epochs` must make"):
            parse(*arguments)
        # Where it is not compared nobody asks.
        parse(*arguments, "--methods=centaur,fedavg_fb")

    def test_where_settings_are_chosen(self):
        assert parse().tuned_epsilons == (8,)
        other = parse("--epsilons=2,4", "--tuning_epsilon=3")
        assert (other.tuned_epsilons, other.shown_epsilon) == ((3,), 2)
        config = dataclasses.replace(other, tuning_epsilon=None)
        assert (config.tuned_epsilons, config.shown_epsilon) == ((2,), 2)
        each = dataclasses.replace(config, tune_each_epsilon=True)
        assert each.tuned_epsilons == (2, 4)
        assert each.get_tuned_epsilon(Method.CENTAUR, 4) == 4
        assert each.get_tuned_epsilon(Method.STAND_ALONE, 4) is None


class TestChoices:
    AXES = {"client_lr": (0.1, 0.2, 0.3), "clip": (1.0,)}

    def choose(self, *scores):
        points = [{"client_lr": rate, "clip": 1.0} for rate in self.AXES["client_lr"]]
        return centaur_comparison.choose(
            Method.CENTAUR, 8.0, self.AXES, list(zip(points, scores, strict=True))
        )

    def test_the_greatest_and_the_first_of_equals(self):
        choice = self.choose(0.1, 0.5, 0.5)
        assert choice.point["client_lr"] == 0.2 and choice.edges == {}
        assert choice.best == 0.5

    @pytest.mark.parametrize(
        ("scores", "edge"),
        [((0.5, 0.4, 0.3), "least"), ((math.nan, 0.4, 0.5), "largest")],
    )
    def test_an_edge_is_told_but_not_of_a_single_value(self, scores, edge):
        assert self.choose(*scores).edges == {"client_lr": edge}

    def test_nothing_to_choose_by(self):
        with pytest.raises(ValueError, match="^The grid of CENTAUR must hold"):
            self.choose(math.nan, math.nan, math.nan)

    def test_differences_are_paired_by_seed(self):
        """(.1, .1) is certain; (.2, 0) is not: its half width is 1.27."""
        outcomes = [
            build_outcome(Method.CENTAUR, 1, 0.6),
            build_outcome(Method.CENTAUR, 2, 0.4),
            build_outcome(Method.FEDAVG_FB, 2, 0.3),
            build_outcome(Method.FEDAVG_FB, 1, 0.5),
            build_outcome(Method.STAND_ALONE, 1, 0.4, epsilon=None),
            build_outcome(Method.STAND_ALONE, 2, 0.4, epsilon=None),
        ]
        config = parse(
            "--methods=stand_alone,centaur,fedavg_fb", "--seeds=1,2", "--epsilons=8"
        )
        alone, fedavg = centaur_comparison.compare_all(config, outcomes)
        assert fedavg.opponent is Method.FEDAVG_FB
        assert fedavg.difference.low == pytest.approx(0.1)
        assert fedavg.verdict.value == "leads"
        assert alone.difference.high == pytest.approx(0.1 + 1.2706, abs=1e-4)
        assert alone.verdict.value == "undecided"


@pytest.fixture(scope="class")
def toy(tmp_path_factory):
    """A comparison on the toy task: its configuration, findings and output."""
    patch = pytest.MonkeyPatch()
    for module in (distributed_training, centaur_comparison_runs):
        patch.setattr(module, "load_task", lambda *_: centaur_runs.build_task())
    # Who edits a file meanwhile would make other runs of them.
    patch.setattr(run_flags, "read_sources", lambda: "these")
    folder = tmp_path_factory.mktemp("comparison")
    config = parse(*TOY, f"--output_root={folder}", "--diagnose")
    yield config, centaur_comparison.run(config, execute=run_here)
    patch.undo()


run_here = centaur_comparison_worker.run_here


def refuse(configs, on_done):
    assert not configs


class TestToy:
    def test_the_runs(self, toy):
        config, findings = toy
        assert len(findings.choices) == 3
        assert all(len(choice.validation) == 2 for choice in findings.choices)
        assert len(findings.outcomes) == 2 * 2 + 2
        count = 3 * 2 + len(findings.outcomes) + len(findings.diagnoses)
        assert centaur_comparison.count_runs(config) == count
        for one in findings.outcomes:
            if one.run.is_private:
                assert one.epsilon == pytest.approx(20, rel=0.05)
                assert one.epsilon <= 20 and one.standing == "proven"
                assert 0 <= one.fraction_clipped <= 1
            else:
                assert one.run.method is Method.STAND_ALONE
                assert one.epsilon is one.standing is one.fraction_clipped is None
        assert len({one.test for one in findings.outcomes}) > 2

    def test_a_mean_over_clients(self, toy):
        config, findings = toy
        one = findings.outcomes[0]
        path = config.folder / one.run.name / "test_users_own_models.csv"
        rows = centaur_runs.read_table(path)
        values = np.array([float(row["accuracy"]) for row in rows])
        assert len(values) == len(centaur_runs.SIZES)
        assert one.test == pytest.approx(values.mean(), rel=1e-12)
        assert one.test_stddev == pytest.approx(values.std(), rel=1e-12)
        assert one.worst_tenth == pytest.approx(values.min(), rel=1e-12)
        assert [number for number, _ in one.curve] == [1, 2]
        assert one.curve[-1][1] == pytest.approx(one.validation, rel=1e-6)

    def test_the_files(self, toy):
        config, findings = toy
        rows = centaur_runs.read_table(config.folder / "comparison.csv")
        assert len(rows) == len(findings.outcomes)
        assert [float(row["test_accuracy"]) for row in rows] == [
            one.test for one in findings.outcomes
        ]
        summary = json.loads((config.folder / "comparison.json").read_text())
        assert len(summary["comparisons"]) == 2
        assert len(summary["results"]) == 3
        for found in summary["results"]:
            assert found["epsilon_covers"].endswith("not the tuning")
        for found in summary["tuning"]:
            assert found["on_the_edge"]["client_lr"] in ("least", "largest")
        assert (config.folder / "comparison.png").stat().st_size > 1000
        measured = centaur_runs.read_table(config.folder / "diagnosis.csv")
        assert len(measured) == 2 * 2

    def test_once_more_nothing_is_trained(self, toy, capsys):
        config, findings = toy
        again = centaur_comparison.run(
            dataclasses.replace(config, diagnose=False), execute=refuse
        )
        assert again.outcomes == findings.outcomes
        assert again.choices == findings.choices
        out = capsys.readouterr().out
        for line in out.splitlines():
            if "+-" in line and "seeds" not in line or "epsilon 20 covers" in line:
                assert "not the tuning" in line
        assert "(proven)" in out and "the representation sent" in out
        assert "on the edge of its grid: client_lr" in out
        assert "CENTAUR 2, DP-FedAvg-fb 2, stand-alone 2" in out

    def test_the_test_parts_have_no_part_in_choices(self, toy, tmp_path):
        config, findings = toy
        copied = dataclasses.replace(
            config, diagnose=False, output_root=str(tmp_path), experiment="copy"
        )
        shutil.copytree(config.folder, copied.folder)
        trials = sorted(copied.folder.glob("tuning-*"))
        assert len(trials) == 6
        for trial in trials:
            results = json.loads((trial / "results.json").read_text())
            (found,) = (
                value
                for value in results.values()
                if isinstance(value, dict) and "privacy" in value
            )
            assert found["test"] is found["test_users_own_models"] is None
            assert found["validation_users_own_models"] is not None
            assert not list(trial.glob("test_*"))
        # A reported run has them.
        assert list((copied.folder / findings.outcomes[0].run.name).glob("test_*"))
        again = centaur_comparison.run(copied, execute=refuse)
        assert again.choices == findings.choices

    @pytest.mark.parametrize(
        "change",
        [
            {"seed": 9},
            {"sources": "other"},
            {"versions": {}},
            {"program": "other"},
            {"data": {"users": 5, "partition": "another"}},
            {"flags": {"clip": 0.25}},
        ],
    )
    def test_another_run_is_not_read_back(self, toy, tmp_path, change):
        config, findings = toy
        stamp, one = findings.stamp, findings.outcomes[0].run
        made, folder = config.build_run(one), tmp_path / "run"
        shutil.copytree(config.folder / one.name, folder)
        assert centaur_comparison_runs.is_finished(folder, made, stamp)
        found = json.loads((folder / "config.json").read_text())
        if "flags" in change:
            change = {"flags": found["flags"] | change["flags"]}
        (folder / "config.json").write_text(json.dumps(found | change))
        assert not centaur_comparison_runs.is_finished(folder, made, stamp)

    def test_a_folder_has_one_model(self, toy):
        """Two models may have one name; config.json of a run tells it, not the flag."""
        config = dataclasses.replace(toy[0], model="other", diagnose=False)
        with pytest.raises(process.UserError, match="flags.model: toy -> other"):
            centaur_comparison.run(config, execute=refuse)

    def test_what_is_not_finished_is_not_read_back(self, toy, tmp_path):
        config, findings = toy
        stamp, one = findings.stamp, findings.outcomes[0].run
        made, folder = config.build_run(one), tmp_path / "run"
        assert not centaur_comparison_runs.is_finished(folder, made, stamp)
        shutil.copytree(config.folder / one.name, folder)
        (folder / "results.json").unlink()
        assert not centaur_comparison_runs.is_finished(folder, made, stamp)

    def test_damaged_results(self, toy, tmp_path):
        one = toy[1].outcomes[0].run
        (tmp_path / "results.json").write_text("{")
        with pytest.raises(process.UserError, match="results.json is damaged"):
            centaur_comparison_runs.read_outcome(tmp_path, one)

    def test_the_diagnosed_run_is_the_reported_one(self, toy):
        config, findings = toy
        centaur, fedavg = findings.diagnoses
        reported = dataclasses.replace(centaur.run, measures=False)
        assert reported == findings.outcomes[0].run
        for one, has_head in ((centaur, False), (fedavg, True)):
            reported = dataclasses.replace(one.run, measures=False)
            held = centaur_runs.read_model(config.folder / reported.name)
            again = centaur_runs.read_model(config.folder / one.run.name)
            for ours, theirs in zip(again, held, strict=True):
                # Bit for bit: their noise is the same.
                np.testing.assert_array_equal(ours, theirs)
            measured = runs.read_rows(config.folder / reported.name)
            assert len(one.rows) == len(measured) == 2
            for row, their in zip(one.rows, measured, strict=True):
                assert ("head/mean_norm" in row) is has_head
                norm = float(their["mean_norm"])
                assert row["whole/mean_norm"] == pytest.approx(norm, rel=1e-5)
                share = float(their["fraction_clipped"])
                assert row["fraction_clipped"] == pytest.approx(share, rel=1e-6)
                ratio = row["whole/signal_to_noise"]
                assert 0 < ratio < 100
                # The mean has n equal parts at most.
                signal = ratio * float(their["central_stddev"])
                dim = sum(part.size for part in held)
                most = 0.5 * row["num_clients"]
                assert signal * math.sqrt(dim) <= most * (1 + 1e-5)


class TestProgram:
    def test_help_answers_at_once(self):
        done = subprocess.run(
            [*COMMAND, "--help"],
            capture_output=True,
            text=True,
            cwd=runs.ROOT,
            check=True,
        )
        for name in ("--epsilons", "--grid_clips", "--[no]diagnose", "--head_lr"):
            assert name in done.stdout
        assert "\n  --method:" not in done.stdout

    @pytest.mark.slow
    def test_runs_in_processes_of_their_own(self, tmp_path, monkeypatch):
        monkeypatch.chdir(runs.ROOT)
        given = (
            "--model=small_mlp",
            "--methods=stand_alone",
            "--stand_alone_epochs=2",
            "--num_clients=50",
            "--grid_client_lrs=0.1,0.2",
            "--grid_clips=1",
            "--seeds=1,2",
            "--device=cpu",
        )
        config = parse(*given, f"--output_root={tmp_path / 'one'}")
        assert config.folder.name == "centaur_comparison"
        findings = centaur_comparison.run(config)
        assert len(findings.outcomes) == 2
        centaur_comparison.run(config, execute=refuse)
        beside = parse(
            *given,
            f"--parallel_runs={min(2, os.cpu_count() or 1)}",
            f"--output_root={tmp_path / 'beside'}",
        )
        assert centaur_comparison.run(beside).outcomes == findings.outcomes

    @pytest.mark.slow
    def test_a_run_that_fails_ends_the_comparison(self, tmp_path, monkeypatch, capfd):
        monkeypatch.chdir(runs.ROOT)
        made = centaur_runs.parse("--task=digits", "--model=none", "--seed=1")
        made = dataclasses.replace(made, output_root=str(tmp_path), experiment="one")
        with pytest.raises(process.UserError, match="exit code 2"):
            centaur_comparison_worker.run_in_workers([made], lambda: None)
        assert "run_centaur_comparison: error: `model`" in capfd.readouterr().err
