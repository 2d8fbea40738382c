"""Tests for run_upcycled_fl: flags, even steps, algorithms, resuming, mechanisms."""

import contextlib
import dataclasses
import json
import subprocess
import time

import numpy as np
import pytest
from absl import flags

from distributed_dp.rotation import RotationKind, build_rotation
from scripts import run_distributed_dp
from scripts.training_config import TrainingConfig
from scripts.upcycled_config import ALGORITHMS, UpcycledConfig
from simulation import client_data, client_states, ledger, process
from tests.scripts import runs, upcycled_runs
from tests.scripts.upcycled_runs import (
    COMMAND,
    define,
    parse,
    read_metrics,
    read_rows,
    read_summary,
    read_weights,
)
from upcycled_fl import accounting, baselines, schedule

PRIVATE = (
    "--task=synthetic_20",
    "--client_weighting=uniform",
    "--bits=16",
    "--clients_per_round=30",
    "--client_epochs=1",
)
# What an algorithm needs beside its name.
EXTRA = {"pfedme": ("--proximal_mu=0", "--upcycled_coefficient=0.5")}
TITLES = {
    "fedavg": "FedProx",
    "fednova": "FedNova",
    "scaffold": "SCAFFOLD",
    "feddyn": "FedDyn",
    "pfedme": "pFedMe",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return upcycled_runs.Runner(tmp_path_factory.mktemp("upcycled"))


class TestFlags:
    def test_every_field_is_a_flag_and_the_other_way_round(self):
        fields = {field.name for field in dataclasses.fields(UpcycledConfig)}
        assert set(define()) == fields

    def test_all_flags_of_run_distributed_dp_are_taken(self):
        theirs = flags.FlagValues()
        run_distributed_dp.define_flags(theirs)
        assert set(theirs) < set(define())
        ours = {field.name for field in dataclasses.fields(UpcycledConfig)}
        shared = {field.name for field in dataclasses.fields(TrainingConfig)}
        assert set(define()) - set(theirs) == ours - shared != set()

    def test_choices_are_those_of_the_library(self):
        def read(name: str) -> list[str]:
            return list(define()[name].parser.enum_values)

        def list_values(kind) -> list[str]:
            return [member.value for member in kind]

        assert read("algorithm") == list(ALGORITHMS) == list(TITLES)
        assert read("client_accountant") == list_values(accounting.Accountant)
        assert sorted(read("client_epsilon_target")) == sorted(
            list_values(accounting.EpsilonTarget)
        )
        assert read("perturbation") == ["none", *list_values(accounting.Perturbation)]

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


@pytest.fixture(scope="module")
def recorded(run):
    """Runs with an algorithm once. Returns the outcome, what was printed, and whom the
    program asked to work in which round: client, order of its examples, epochs."""
    found = {}

    def run_once(name: str, *arguments: str):
        if (name, *arguments) not in found:
            asked, load = [], client_data.ClientLoader.__call__

            def watch(loader, key):
                epochs = client_data.count_epochs(key, loader.num_epochs)
                asked.append((key.client_id, key.batch_seed.tobytes(), epochs))
                return load(loader, key)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(client_data.ClientLoader, "__call__", watch)
                outcome, out = run(
                    f"--algorithm={name}",
                    "--task=synthetic_20_iid",
                    "--client_epochs=3",
                    "--client_lr=0.1",
                    *EXTRA.get(name, ()),
                    *arguments,
                )
            found[(name, *arguments)] = outcome, out, sorted(asked)
        return found[(name, *arguments)]

    return run_once


class TestAlgorithms:
    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_two_rounds(self, recorded, name):
        outcome, out, _ = recorded(name)
        assert f"algorithm   {TITLES[name]}\n" in out
        assert [row["round"] for row in read_rows(outcome)] == ["1", "2"]
        assert (
            json.loads((outcome.folder / "config.json").read_text())["flags"][
                "algorithm"
            ]
            == name
        )
        (result,) = outcome.results.values()
        # It learns: 10 classes, zero at first; the largest has 0.22 of the examples.
        assert result.final["loss"] < np.log(10)
        assert result.final["accuracy"] > 0.35
        # Nobody's model but its own.
        others = [recorded(other)[0] for other in ALGORITHMS if other != name]
        assert read_weights(outcome) not in [read_weights(other) for other in others]

    def test_all_meet_the_same_clients_and_stragglers(self, recorded):
        _, _, wanted = recorded("fedavg")
        for name in ALGORITHMS:
            outcome, _, asked = recorded(name)
            assert asked == wanted
            (result,) = outcome.results.values()
            joined = result.ledger_state.join_counts
            assert joined.sum() == len(asked) == 2 * 9
            for index, count in enumerate(joined):
                clients = [client for client, *_ in asked]
                assert clients.count(f"device_{index:03d}") == count
        # Half are stragglers, of one or two epochs; another seed has others.
        assert {epochs for *_, epochs in wanted} == {1, 2, 3}
        assert recorded("fedavg", "--seed=2")[2] != wanted

    def test_own_models_are_written_where_there_are_some(self, recorded):
        name = "test_users_own_models"
        for algorithm in ALGORITHMS:
            outcome, out, _ = recorded(algorithm)
            has_own = algorithm == "pfedme"
            assert (outcome.folder / f"{name}.csv").exists() is has_own
            assert (read_summary(outcome)[name] is not None) is has_own
            assert ("each with its own model" in out) is has_own
        outcome, out, asked = recorded("pfedme")
        own, common = (
            {row["client_id"]: row for row in upcycled_runs.read_clients(path)}
            for path in (
                outcome.folder / f"{name}.csv",
                outcome.folder / "test_users.csv",
            )
        )
        assert str(outcome.folder / f"{name}.csv") in out
        assert set(own) == set(common) and len(own) == 30
        # Who never took part has the common model.
        took_part = {client_id for client_id, *_ in asked}
        for client_id in own:
            assert (own[client_id] != common[client_id]) is (client_id in took_part)

    @pytest.mark.parametrize(
        ("name", "arguments", "expected"),
        [
            ("FedNova", ["--algorithm=fednova"], {"proximal_strength": 0.3}),
            (
                "Scaffold",
                ["--algorithm=scaffold"],
                {"proximal_strength": 0.3, "participation": 9 / 30},
            ),
            (
                "FedDyn",
                ["--algorithm=feddyn", "--clients_per_round=12"],
                {"proximal_strength": 0.3, "participation": 12 / 30},
            ),
            (
                "PFedMe",
                ["--algorithm=pfedme", *EXTRA["pfedme"]]
                + ["--pfedme_penalty=2", "--pfedme_steps=3", "--pfedme_lr=0.25"],
                {"penalty": 2.0, "personal_steps": 3, "local_lr": 0.25},
            ),
        ],
    )
    def test_they_are_told_what_the_flags_say(
        self, tmp_path, monkeypatch, name, arguments, expected
    ):
        told = []

        def stop(**fields):
            told.append(fields)
            raise ValueError("told")

        monkeypatch.setattr(baselines, name, stop)
        with pytest.raises(process.UserError, match="told"):
            upcycled_runs.run(tmp_path, *arguments)
        assert told == [expected]


class Killed(BaseException):
    """Stands for kill -9: nothing may run afterwards."""


class TestResuming:
    ARGUMENTS = ("--total_rounds=4", "--task=synthetic_20", "--client_epochs=3")

    def run_killed(self, folder, *arguments: str) -> None:
        """Ends in the third round, after the clients' work and before it counts."""
        close = ledger.PrivacyLedger.close_round

        def fail(self, *args, **kwargs):
            if self.state.rounds_completed == 2:
                raise Killed
            return close(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(ledger.PrivacyLedger, "close_round", fail)
            upcycled_runs.run(folder, *arguments)
        assert len(runs.read_rows(folder / "run")) == 2

    @pytest.mark.parametrize(
        "name", ["scaffold", pytest.param("pfedme", marks=pytest.mark.slow)]
    )
    def test_what_clients_keep_outlives_a_kill(self, run, tmp_path, monkeypatch, name):
        arguments = (f"--algorithm={name}", *EXTRA.get(name, ()), *self.ARGUMENTS)
        whole, _ = run(*arguments)
        self.run_killed(tmp_path, *arguments)
        resumed = upcycled_runs.run(tmp_path, *arguments)
        assert read_metrics(resumed) == read_metrics(whole)
        assert read_weights(resumed) == read_weights(whole)
        for file in ("results.json", "test_users.csv", "ledger.json"):
            expected = (whole.folder / file).read_bytes()
            assert (resumed.folder / file).read_bytes() == expected

    @pytest.mark.slow
    def test_clients_that_forget_are_noticed(self, run, tmp_path, monkeypatch):
        """What the test above would see."""
        arguments = ("--algorithm=scaffold", *self.ARGUMENTS)
        whole, _ = run(*arguments)
        self.run_killed(tmp_path, *arguments)
        monkeypatch.setattr(
            client_states.ClientStates, "unpack", lambda states, arrays: states
        )
        resumed = upcycled_runs.run(tmp_path, *arguments)
        assert read_metrics(resumed) != read_metrics(whole)
        assert read_weights(resumed) != read_weights(whole)


class TestMechanisms:
    UPCYCLED = "--upcycled_coefficient=0.5"

    @pytest.mark.parametrize(
        "mechanism",
        [
            "ddgauss",
            pytest.param("skellam", marks=pytest.mark.slow),
            pytest.param("gaussian", marks=pytest.mark.slow),
        ],
    )
    def test_even_steps_are_not_charged(self, run, mechanism):
        private = (f"--mechanism={mechanism}", *PRIVATE)
        (baseline, plain), (upcycled, told) = (
            run(*private, flag) for flag in ("--noupcycled", self.UPCYCLED)
        )
        epsilons = [row["epsilon"] for row in read_rows(baseline)]
        assert [row["epsilon"] for row in read_rows(upcycled)] == epsilons
        assert 0 < float(epsilons[0]) < float(epsilons[1]) <= 6
        for outcome in (baseline, upcycled):
            rows = read_rows(outcome)
            assert [row["rounds_spent"] for row in rows] == ["1", "2"]
            assert {row["mechanism"] for row in rows} == {mechanism}
        one, two = (read_summary(outcome) for outcome in (baseline, upcycled))
        assert one["privacy"] == two["privacy"] and one["privacy"]
        assert one["server_privacy"] == two["server_privacy"]
        assert read_metrics(upcycled) != read_metrics(baseline)
        text = "it uses released results alone and is not charged"
        assert text in told and text not in plain
        # Clients add no noise of their own.
        assert one["client_privacy"] is None and "client_epsilon_max" not in rows[0]

    @pytest.mark.slow
    def test_all_that_scaffold_sends_is_paid_for(self, run):
        private = ("--mechanism=ddgauss", *PRIVATE, self.UPCYCLED)
        average, _ = run(*private)
        scaffold, out = run(*private, "--algorithm=scaffold")
        # 20 features and a bias for 10 classes; control variates as many.
        for outcome, dim, padded_dim in ((average, 210, 256), (scaffold, 420, 512)):
            assert build_rotation(RotationKind.HADAMARD, dim).padded_dim == padded_dim
            assert read_summary(outcome)["bits_per_client"] == 16 * padded_dim
        (statement, *_) = read_summary(scaffold)["privacy"]
        assert 0 < statement["epsilon"] <= 6
        assert "Privacy, analyst of the released models: epsilon = 6 at delta = " in out
        assert "512 coordinates" in out and "8,192" in out
        keeps = "does not cover: what clients keep to themselves"
        assert keeps in out and keeps not in run(*private)[1]
