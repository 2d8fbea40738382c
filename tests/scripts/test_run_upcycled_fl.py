"""Tests for run_upcycled_fl: its flags, its even steps, and what they cost."""

import contextlib
import dataclasses
import io
import json
import subprocess
import sys
import time

import numpy as np
import pytest
from absl import flags

from scripts import run_distributed_dp, run_upcycled_fl, upcycled_training
from scripts.flags import build_config
from scripts.upcycled_config import UpcycledConfig
from tests.scripts import runs
from upcycled_fl import schedule

COMMAND = [sys.executable, "-m", "scripts.run_upcycled_fl"]
# Small enough for a test, unless something later on the line says otherwise.
TINY = ("--total_rounds=2", "--client_epochs=2", "--seed=1")
PRIVATE = ("--mechanism=ddgauss", "--client_weighting=uniform", "--bits=20")


def define() -> flags.FlagValues:
    values = flags.FlagValues()
    run_upcycled_fl.define_flags(values)
    return values


def parse(*arguments: str) -> UpcycledConfig:
    values = define()
    values(["run_upcycled_fl", *arguments])
    return build_config(UpcycledConfig, values)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs the program in this process, the same flags once for all tests.

    Returns the outcome and what was printed.
    """
    folder, finished = tmp_path_factory.mktemp("upcycled"), {}

    def run_once(*arguments: str):
        if arguments not in finished:
            root, out = folder / str(len(finished)), io.StringIO()
            with contextlib.redirect_stdout(out):
                outcome = upcycled_training.run(
                    parse(*TINY, f"--output_root={root}", *arguments)
                )
            finished[arguments] = outcome, out.getvalue()
        return finished[arguments]

    return run_once


def read_weights(outcome) -> list[bytes]:
    (result,) = outcome.results.values()
    return [np.asarray(weight).tobytes() for weight in result.weights]


def read_metrics(outcome) -> bytes:
    return (outcome.folder / "metrics.csv").read_bytes()


class TestFlags:
    def test_every_field_is_a_flag_and_the_other_way_round(self):
        fields = {field.name for field in dataclasses.fields(UpcycledConfig)}
        assert set(define()) == fields

    def test_all_flags_of_run_distributed_dp_are_taken(self):
        theirs = flags.FlagValues()
        run_distributed_dp.define_flags(theirs)
        assert set(define()) - set(theirs) == {
            "upcycled",
            "upcycled_lambda",
            "lambda_schedule",
            "upcycled_coefficient",
        }
        assert set(theirs) < set(define())

    def test_the_bare_command_is_the_papers_setting(self):
        config = parse()
        assert (config.task, config.mechanism) == ("synthetic", "none")
        assert config.client_weighting == "examples" and config.straggler_rate == 0.5
        assert config.upcycled and not config.compare_central
        assert config.build_schedule() == schedule.ConstantLambda(
            mu=0.3, lambda_value=0.12
        )

    def test_help_answers_at_once(self):
        started = time.monotonic()
        out = subprocess.run(
            [*COMMAND, "--help"],
            capture_output=True,
            text=True,
            cwd=runs.ROOT,
            check=True,
        )
        # TensorFlow alone would take 3 s.
        assert time.monotonic() - started < 2
        assert out.stderr == ""
        for name in ("[no]upcycled", "upcycled_lambda", "proximal_mu", "flagfile"):
            assert f"--{name}:" in out.stdout


class TestSchedules:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["--noupcycled"], None),
            (["--noupcycled", "--proximal_mu=0"], None),
            (
                ["--upcycled_lambda=0"],
                schedule.ConstantLambda(mu=0.3, lambda_value=0.0),
            ),
            (
                ["--proximal_mu=1", "--upcycled_lambda=3"],
                schedule.ConstantLambda(mu=1.0, lambda_value=3.0),
            ),
            (
                ["--lambda_schedule=increasing"],
                schedule.IncreasingLambda(mu=0.3, initial_lambda=0.12),
            ),
            (
                ["--proximal_mu=0", "--upcycled_coefficient=0.25"],
                schedule.ConstantCoefficient(coefficient=0.25),
            ),
            (
                ["--upcycled_coefficient=0"],
                schedule.ConstantCoefficient(coefficient=0.0),
            ),
        ],
    )
    def test_flags_choose_it(self, arguments, expected):
        assert parse(*arguments).build_schedule() == expected

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--proximal_mu=0"], "`proximal_mu` must be positive: .* Found 0.0"),
            (["--proximal_mu=-1"], "`proximal_mu` must be >= 0. Found -1.0"),
            (["--upcycled_lambda=-0.1"], "lambda.*Found -0.1"),
            (
                ["--upcycled_lambda=-0.1", "--lambda_schedule=increasing"],
                "lambda.*Found -0.1",
            ),
            (["--upcycled_lambda=nan"], "`upcycled_lambda` must be finite"),
            (["--upcycled_coefficient=1"], r"must be in \[0, 1\). Found 1.0"),
            (["--upcycled_coefficient=-0.5"], "coefficient.*Found -0.5"),
            (
                ["--upcycled_coefficient=0.5", "--upcycled_lambda=1"],
                "`upcycled_coefficient` must be unset where `upcycled_lambda` is given",
            ),
            (
                ["--upcycled_coefficient=0.5", "--lambda_schedule=increasing"],
                "`lambda_schedule` must be constant with `upcycled_coefficient`",
            ),
            (
                ["--noupcycled", "--upcycled_lambda=1"],
                "`upcycled_lambda` must be unset with --noupcycled. Found 1.0",
            ),
            (
                ["--noupcycled", "--upcycled_lambda=0"],
                "`upcycled_lambda` must be unset with --noupcycled. Found 0.0",
            ),
            (
                ["--noupcycled", "--upcycled_coefficient=0"],
                "`upcycled_coefficient` must be unset with --noupcycled. Found 0.0",
            ),
            (
                ["--mechanism=ddgauss"],
                "`client_weighting` must be uniform under a mechanism.*'examples'",
            ),
            (
                ["--mechanism=gaussian", "--client_weighting=examples"],
                "`client_weighting` must be uniform under a mechanism.*'examples'",
            ),
            (["--straggler_rate=1.5"], r"`straggler_rate` must be in \[0, 1\]"),
            (["--client_momentum=1"], r"`client_momentum` must be in \[0, 1\)"),
        ],
    )
    def test_bad_values_are_named(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            parse(*arguments)

    def test_the_user_is_told_in_one_line(self, tmp_path):
        done = subprocess.run(
            [*COMMAND, "--proximal_mu=0", f"--output_root={tmp_path / 'runs'}"],
            capture_output=True,
            text=True,
            cwd=runs.ROOT,
            timeout=60,
        )
        assert done.returncode == 2
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("run_upcycled_fl: error: `proximal_mu` must be positive")
        assert not (tmp_path / "runs").exists()


class TestEvenSteps:
    @pytest.mark.parametrize(
        ("flag", "text"),
        [
            ("--upcycled_coefficient=0.5", "after every round, coefficient 0.5\n"),
            ("--upcycled_lambda=0.3", "after every round, coefficient 0.5\n"),
            # 0.3 / (0.3 + 0.12), and that divided by the root of 2.
            ("--lambda_schedule=increasing", "coefficient 0.7143 to 0.5051\n"),
            ("--noupcycled", "no even steps: the baseline alone\n"),
        ],
    )
    def test_a_run_prints_the_coefficient(self, run, flag, text):
        _, out = run(flag)
        assert text in out
        # There is no privacy that something could cost.
        assert "not charged" not in out

    def test_the_configuration_says_what_was_run(self, run):
        outcome, _ = run("--noupcycled")
        config = json.loads((outcome.folder / "config.json").read_text())
        assert config["program"] == "run_upcycled_fl"
        assert config["flags"]["upcycled"] is False
        assert config["flags"]["straggler_rate"] == 0.5

    def test_coefficient_0_is_the_baseline_bit_for_bit(self, run):
        baseline, zero, some = (
            run(flag)[0]
            for flag in (
                "--noupcycled",
                "--upcycled_coefficient=0",
                "--upcycled_coefficient=0.5",
            )
        )
        assert read_metrics(zero) == read_metrics(baseline)
        assert read_weights(zero) == read_weights(baseline)
        # Both would differ.
        assert read_metrics(some) != read_metrics(baseline)
        assert read_weights(some) != read_weights(baseline)

    def test_a_coefficient_is_what_lambda_makes_of_it(self, run):
        given, _ = run("--upcycled_coefficient=0.5")
        # 0.3 / (0.3 + 0.3).
        of_lambda, _ = run("--upcycled_lambda=0.3")
        assert read_metrics(given) == read_metrics(of_lambda)
        assert read_weights(given) == read_weights(of_lambda)
        other, _ = run("--lambda_schedule=increasing")
        assert read_metrics(given) != read_metrics(other)
        assert read_weights(given) != read_weights(other)


class TestPrivacy:
    def test_even_steps_are_not_charged(self, run):
        runs_by_flag = {
            flag: run(*PRIVATE, flag)
            for flag in ("--noupcycled", "--upcycled_coefficient=0.5")
        }
        (baseline, plain), (upcycled, told) = (
            (runs.read_rows(outcome.folder), out)
            for outcome, out in runs_by_flag.values()
        )
        epsilons = [row["epsilon"] for row in baseline]
        assert [row["epsilon"] for row in upcycled] == epsilons
        assert 0 < float(epsilons[0]) < float(epsilons[1]) <= 6
        for rows in (baseline, upcycled):
            assert [row["rounds_spent"] for row in rows] == ["1", "2"]
            assert {row["mechanism"] for row in rows} == {"ddgauss"}
        assert upcycled != baseline
        text = "it uses released results alone and is not charged"
        assert text in told and text not in plain
