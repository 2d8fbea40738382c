"""Tests of run_centaur's flags: what they mean, and bad values in one line."""

import dataclasses
import re
import subprocess
import time

import pytest
from absl import flags

from centaur.algorithms import HeadState
from scripts import run_distributed_dp
from scripts.centaur_config import CentaurConfig, Method
from simulation import process
from tests.scripts import centaur_runs, runs
from tests.scripts.centaur_runs import COMMAND, define, parse


class TestFlags:
    def test_every_field_is_a_flag_and_the_other_way_round(self):
        fields = {field.name for field in dataclasses.fields(CentaurConfig)}
        assert set(define()) == fields - {"clients_per_round"}

    def test_all_flags_of_run_distributed_dp_are_taken(self):
        theirs = flags.FlagValues()
        run_distributed_dp.define_flags(theirs)
        assert set(theirs) - set(define()) == {"clients_per_round"}

    def test_choices_are_those_of_the_library(self):
        values = define()
        assert tuple(values["method"].parser.enum_values) == tuple(
            method.value for method in Method
        )
        assert values["head_state"].parser.enum_values == [s.value for s in HeadState]

    def test_the_bare_command(self):
        config = parse()
        assert config.method_kind is Method.CENTAUR
        assert config.mechanism == "gaussian" and config.participation == 1.0
        assert config.build_scheme(50).sampling_rate == 1.0
        assert config.partition == "shards" and config.classes_per_client == 3

    @pytest.mark.parametrize(
        ("participation", "num_clients", "expected"),
        [(1.0, 7, 7), (0.5, 8, 4), (0.05, 20, 1), (0.34, 100, 34)],
    )
    def test_participation_is_the_expected_part(
        self, participation, num_clients, expected
    ):
        config = parse(f"--participation={participation}")
        scheme = config.build_scheme(num_clients)
        assert (scheme.num_clients, scheme.clients_per_round) == (num_clients, expected)

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
        for name in ("method", "participation", "head_state", "split_layer"):
            assert f"--{name}:" in out.stdout


# What is found by the flags alone, with the first words of the message.
BAD_FLAGS = [
    (["--participation=0"], r"`participation` must be in \(0, 1\].*Found 0.0"),
    (["--participation=-0.5"], r"`participation` must be in \(0, 1\].*Found -0.5"),
    (["--participation=1.01"], r"`participation` must be in \(0, 1\].*Found 1.01"),
    (["--participation=nan"], "`participation` must be finite. Found nan"),
    (
        ["--sampling=fixed", "--central_accountant=pld"],
        "`central_accountant` must be rdp for fixed sampling.*Found 'pld'",
    ),
    (
        ["--method=fedavg_fb", "--head_state=refit"],
        "`head_state` must be client for the method fedavg_fb. Found 'refit'",
    ),
    (
        ["--method=ppsgd_paper", "--head_state=refit"],
        "`head_state` must be client for the method ppsgd_paper. Found 'refit'",
    ),
    (
        ["--pmtl_lambda=0.5"],
        "`pmtl_lambda` must be 1.0 for the method centaur. Found 0.5",
    ),
    (
        ["--method=pmtl_ft", "--ppsgd_head_lr=0.1"],
        "`ppsgd_head_lr` must be unset for the method pmtl_ft. Found 0.1",
    ),
    (
        ["--method=ppsgd_authors", "--stand_alone_epochs=3"],
        "`stand_alone_epochs` must be 200 for the method ppsgd_authors. Found 3",
    ),
    (["--method=stand_alone"], "`mechanism` must be none for the method stand_alone"),
    (
        ["--method=stand_alone", "--mechanism=none"],
        "`total_rounds` must be 1 for the method stand_alone.*Found 40",
    ),
    (["--head_epochs=0"], "`head_epochs` must be .*Found 0"),
    (["--head_lr=0"], "`head_lr` must be .*Found 0"),
    (["--head_momentum=1"], r"`head_momentum` must be in \[0, 1\). Found 1.0"),
    (["--weight_decay=-1"], "`weight_decay` must be >= 0. Found -1.0"),
    (["--method=pmtl_ft", "--pmtl_lambda=-1"], "`pmtl_lambda` must be >= 0"),
    (["--method=ppsgd_paper", "--ppsgd_head_lr=0"], "`ppsgd_head_lr` must be"),
    (["--validation_fraction=0"], r"`validation_fraction` must be in \(0, 1\)"),
    (["--validation_fraction=1"], r"`validation_fraction` must be in \(0, 1\)"),
    (["--proximal_mu=0.1"], "`proximal_mu` must be 0: .*`pmtl_lambda`. Found 0.1"),
    (
        ["--mechanism=none", "--client_weighting=examples"],
        "`client_weighting` must be uniform. Found 'examples'",
    ),
    (["--eval_examples=10"], "`eval_examples` must be unset.*Found 10"),
    (["--measure_updates", "--diagnostics=off"], "`measure_updates` must be off"),
    (
        ["--measure_updates", "--mechanism=ddgauss", "--bits=20", "--adaptive_clip"],
        "`measure_updates` must be off with `adaptive_clip`",
    ),
]
# What is found when the data and the model are there.
BAD_DATA = [
    (
        ["--split_layer=dense_9"],
        r"`split_layer` must be a layer of model 'mlp': .*Found 'dense_9'",
    ),
    (["--split_layer=dense_1"], "`split_layer` must have a layer before it"),
    (["--classes_per_client=11"], "`classes_per_client` must be at most .*Found 11"),
    (["--participation=0.001"], "`participation` must be of one client in a round"),
]


class TestBadInput:
    @pytest.mark.parametrize(("arguments", "message"), BAD_FLAGS)
    def test_of_flags(self, arguments, message):
        with pytest.raises(ValueError, match=message) as caught:
            parse(*arguments)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            BAD_FLAGS[0],
            BAD_FLAGS[10],
            *(pytest.param(*case, marks=pytest.mark.slow) for case in BAD_DATA),
        ],
    )
    def test_the_user_is_told_in_one_line(self, tmp_path, arguments, message):
        done = subprocess.run(
            [*COMMAND, *arguments, f"--output_root={tmp_path / 'runs'}"],
            capture_output=True,
            text=True,
            cwd=runs.ROOT,
            timeout=120,
        )
        assert done.returncode == 2
        (line,) = done.stderr.strip().splitlines()
        assert re.match(f"run_centaur: error: {message}", line)
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize("part", ["train", "test"])
    def test_a_client_without_examples(self, tmp_path, part):
        task = centaur_runs.build_task()
        whole = getattr(task, part)

        def make(client_id):
            x, y = whole.load(client_id)
            return (x[:0], y[:0]) if client_id == "cy" else (x, y)

        data = dataclasses.replace(whole, make=make)
        task = dataclasses.replace(task, **{part: data})
        word = {"train": "training", "test": "test"}[part]
        with pytest.raises(
            process.UserError,
            match=f"must have {word} examples.*Found none of client 'cy'",
        ) as caught:
            centaur_runs.run(tmp_path, task=task)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("arguments", "message"), [BAD_DATA[0], BAD_DATA[1], BAD_DATA[3]]
    )
    def test_of_the_model_and_the_clients(self, tmp_path, arguments, message):
        with pytest.raises(process.UserError, match=message) as caught:
            centaur_runs.run(tmp_path, *arguments)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()
