"""Tests for run_distributed_dp: in this process where that is enough, else outside."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from absl import flags

from distributed_dp import accounting
from distributed_dp.rotation import RotationKind
from scripts import distributed_training, run_distributed_dp
from scripts import flags as run_flags
from scripts.training_config import TrainingConfig
from simulation import execution, process, tasks
from tests.scripts.runs import COMMAND, ROOT, TINY, parse, read_rows


def find_descendants(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def are_gone(pids: list[int]) -> bool:
    for _ in range(100):
        if not any(psutil.pid_exists(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def wait_for_rows(folder: pathlib.Path, count: int, running: subprocess.Popen) -> None:
    """Waits until a run has written `count` rounds."""
    for _ in range(2400):
        if (folder / "metrics.csv").exists() and len(read_rows(folder)) >= count:
            return
        assert running.poll() is None, running.communicate()
        time.sleep(0.05)
    raise AssertionError("the run does not get on")


@pytest.fixture(scope="module")
def piped(tmp_path_factory):
    """One run of the whole program, through a pipe."""
    folder = tmp_path_factory.mktemp("piped")
    arguments = (*TINY[:2], "--seed=5", f"--output_root={folder}")
    line = " ".join([*COMMAND, *arguments, "--experiment=run"])
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "TF_CPP_MIN_LOG_LEVEL"
    }
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line} | cat"],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done, folder / "run"


@pytest.fixture
def copied(piped, tmp_path) -> pathlib.Path:
    """A copy of that run's folder, where `run` looks for --experiment=copied."""
    return pathlib.Path(shutil.copytree(piped[1], tmp_path / "copied"))


class TestFlags:
    def test_choices_are_those_of_the_library(self):
        values = flags.FlagValues()
        run_distributed_dp.define_flags(values)

        def read(name: str) -> set[str]:
            return set(values[name].parser.enum_values)

        def list_values(kind) -> set[str]:
            return {member.value for member in kind}

        assert read("mechanism") == list_values(accounting.Mechanism) | {"none"}
        assert read("sampling") == list_values(accounting.Sampling)
        assert read("accounting") == list_values(accounting.Accounting)
        assert read("bound") == list_values(accounting.AmplificationBound)
        assert read("central_accountant") == list_values(accounting.Accountant)
        assert read("rotation") == list_values(RotationKind)
        assert read("engine") == list_values(execution.Engine)
        assert read("task") == set(tasks.TASK_NAMES)

    def test_every_field_is_a_flag_and_the_other_way_round(self):
        values = flags.FlagValues()
        run_distributed_dp.define_flags(values)
        fields = {field.name for field in dataclasses.fields(TrainingConfig)}
        assert set(values) == fields

    def test_help_answers_at_once(self):
        started = time.monotonic()
        out = subprocess.run(
            [*COMMAND, "--help"], capture_output=True, text=True, cwd=ROOT, check=True
        )
        # It takes 0.1 s; TensorFlow alone would take 3.
        assert time.monotonic() - started < 2
        assert out.stderr == ""
        for name in ("mechanism", "seed", "flagfile", "dropout_rate"):
            assert f"--{name}:" in out.stdout


class TestBadInput:
    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ("--clip=0", "`clip` must be positive"),
            ("--clip=nan", "`clip` must be finite"),
            ("--epsilon=0", "`epsilon` must be positive"),
            ("--epsilon=-1", "`epsilon` must be positive"),
            ("--delta=0", r"`delta` must be in \(0, 1\)"),
            ("--delta=1", r"`delta` must be in \(0, 1\)"),
            ("--clients_per_round=0", "`clients_per_round` must be positive"),
            ("--total_rounds=0", "`total_rounds` must be positive"),
            ("--client_lr=inf", "`client_lr` must be finite"),
            ("--server_momentum=1", "`server_momentum` must be in"),
            ("--dropout_rate=1", "`dropout_rate` must be in"),
            ("--beta=1", "`beta` must be in"),
            ("--bits=0", "`bits` must be between 1 and 32"),
            ("--bits=33", "`bits` must be between 1 and 32"),
            ("--target_quantile=2", "`target_quantile` must be"),
            ("--quantile_noise_multiplier=0", "`quantile_noise_multiplier` must be"),
            ("--experiment=", "`experiment` must be a name"),
            ("--experiment=../up", "`experiment` must be a name"),
            ("--output_root=", "`output_root` must not be empty"),
            ("--clip=1e30", "`clip` must be between"),
            ("--test_fraction=1", r"`test_fraction` must be in \(0, 1\). Found 1.0"),
        ],
    )
    def test_values_out_of_range_are_refused_by_the_flags(self, argument, message):
        with pytest.raises(ValueError, match=message):
            parse(argument)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--bits=3"], r"`bits` must .* n = 20 and k = 4"),
            (["--clients_per_round=801"], r"`num_clients` \(800\). Found 801"),
            (["--model=transformer"], "`model` must be one of logistic_regression"),
            (["--accounting=as_published"], "`accounting` must be 'proven'"),
            (["--sampling=fixed", "--bound=symmetric"], "`bound` must be None"),
            (["--delta=1e-15"], "`delta` must exceed"),
            (["--mechanism=skellam", "--bits=32"], "use fewer bits"),
            (["--output_root=/dev/null/runs"], "/dev/null/runs"),
            (["--output_root=/proc/runs"], "cannot write to /proc/runs"),
        ],
    )
    def test_the_rest_is_refused_before_anything_is_written(
        self, run, tmp_path, arguments, message
    ):
        with pytest.raises(process.UserError, match=message):
            run(*arguments)
        assert not list(tmp_path.iterdir())

    def test_data_that_are_not_finite_are_refused(self, run, monkeypatch):
        task = tasks.load_task("digits")
        broken = dataclasses.replace(
            task.train,
            make=lambda _: (np.full([5, 28, 28, 1], np.nan), np.zeros([5], np.int32)),
        )
        monkeypatch.setattr(
            distributed_training,
            "load_task",
            lambda *_: dataclasses.replace(task, train=broken),
        )
        with pytest.raises(
            process.UserError, match="of client user_...` must be finite"
        ):
            run("--mechanism=none")

    def test_it_is_one_line_and_exit_code_2(self, tmp_path):
        arguments = {
            "light": ["--clip=0"],
            "unknown": ["--mechanism=magic"],
            "nowhere": ["--output_root=/dev/null/runs"],
            "endless": [f"--output_root=/tmp/{'a' * 300}"],
            "heavy": ["--bits=3", f"--output_root={tmp_path / 'runs'}"],
        }
        running = {
            name: subprocess.Popen(
                [*COMMAND, *extra],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for name, extra in arguments.items()
        }
        for name, child in running.items():
            out, error = child.communicate(timeout=120)
            assert (child.returncode, out) == (2, ""), name
            assert error.count("\n") == 1, name
            assert error.startswith("run_distributed_dp: error: "), name
        assert not (tmp_path / "runs").exists()


class TestOutputs:
    def test_a_pipe_ends_and_nothing_is_left(self, piped):
        # That `run` returned shows that no process holds the pipe.
        assert not [
            child
            for child in psutil.process_iter(["cmdline"])
            if str(piped[1].parent) in " ".join(child.info["cmdline"] or [])
        ]

    def test_start_up_is_quiet(self, piped):
        lines = piped[0].stderr.replace("\r", "\n").splitlines()
        strange = [
            line
            for line in lines
            if line and not line.startswith(("ddgauss:", "gauss"))
        ]
        assert not strange

    def test_the_first_lines_say_what_will_be_done(self, piped):
        head = piped[0].stdout.split("\n\n")[0]
        for text in (
            "real handwritten digits",
            "800; 20 a round, poisson sampling (q = 0.025); 2 rounds",
            "logistic_regression, 7,850 parameters",
            "distributed discrete Gaussian, 16 bits: epsilon <= 6 at delta = 0.00125",
            "beside it   central Gaussian",
            "no cryptography is run",
            "local on CPU:0, ",
            "reproducible: all randomness follows from --seed=5",
            str(piped[1]),
        ):
            assert text in head

    def test_the_last_lines_say_what_it_cost_and_where_it_lies(self, piped):
        out = piped[0].stdout
        for text in (
            "Privacy, analyst of the released models: epsilon = ",
            "(delta * N = 1)",
            "the same at delta = 1e-05 (delta * N = 0.008): epsilon = ",
            "Privacy, the server itself: epsilon = ",
            "Privacy, the server itself: none (epsilon = inf)",
            "does not cover: this run has a root seed, which stands in config.json",
            "does not cover: other runs on the same data",
            "does not cover: whoever sees both models of this run",
            "131,072",
            "wall time",
        ):
            assert text in out
        for name in ("config.json", "metrics.csv", "results.json", "plot.png"):
            assert str(piped[1] / name) in out
            assert (piped[1] / name).stat().st_size > 0

    def test_both_mechanisms_meet_the_same_clients(self, piped):
        ours, central = read_rows(piped[1]), read_rows(piped[1] / "gaussian")
        assert [row["mechanism"] for row in ours + central] == ["ddgauss"] * 2 + [
            "gaussian"
        ] * 2
        assert [row["clients_joined"] for row in ours] == [
            row["clients_joined"] for row in central
        ]

    def test_every_epsilon_comes_with_what_it_rests_on(self, piped):
        rows = read_rows(piped[1])
        epsilons = [float(row["epsilon"]) for row in rows]
        assert 0 < epsilons[0] < epsilons[1] <= 6
        for row in rows:
            assert float(row["delta"]) == 1 / 800
            assert float(row["sampling_rate"]) == 20 / 800
            assert row["sampler"] == "poisson"
            assert row["reproducible"] == "True"
            assert float(row["central_stddev"]) == pytest.approx(
                float(row["noise_multiplier"]) * 0.1
            )

    def test_the_configuration_is_complete(self, piped):
        config = json.loads((piped[1] / "config.json").read_text())
        assert config["flags"]["delta"] == 1 / 800
        assert config["flags"]["model"] == "logistic_regression"
        assert config["seed"] == 5 and config["reproducible"] is True
        assert config["mechanisms"]["ddgauss"]["bits"] == 16
        assert "tensorflow-federated" in config["versions"]

    def test_the_same_seed_gives_the_same_file(self, piped, run, tmp_path):
        run("--seed=5", "--experiment=again")
        again = tmp_path / "again" / "metrics.csv"
        assert again.read_bytes() == (piped[1] / "metrics.csv").read_bytes()


class TestResuming:
    ARGUMENTS = ("--seed=3", "--total_rounds=6", "--checkpoint_every=2")

    def test_kill_9_and_resume_equals_uninterrupted(self, run, tmp_path, capsys):
        run(*self.ARGUMENTS, "--experiment=whole")
        arguments = [*TINY, *self.ARGUMENTS, f"--output_root={tmp_path}"]
        running = subprocess.Popen(
            [*COMMAND, *arguments, "--experiment=killed"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        wait_for_rows(tmp_path / "killed", 3, running)
        children = find_descendants(running.pid)
        running.kill()
        running.communicate()
        assert not children
        capsys.readouterr()
        run(*self.ARGUMENTS, "--experiment=killed")
        assert "going on" in capsys.readouterr().out
        for name in ("metrics.csv", "ledger.json", "results.json"):
            whole, resumed = (
                (tmp_path / folder / name).read_bytes()
                for folder in ("whole", "killed")
            )
            assert whole == resumed, name

    FINISHED = ("--seed=5", "--compare_central", "--experiment=copied")

    def test_other_flags_are_refused_with_the_difference(self, run, copied):
        before = {
            file: file.read_bytes() for file in copied.rglob("*") if file.is_file()
        }
        with pytest.raises(process.UserError) as caught:
            run(*self.FINISHED, "--clip=0.25")
        assert "flags.clip: 0.1 -> 0.25" in str(caught.value)
        assert "flags.bits" not in str(caught.value)
        assert before == {file: file.read_bytes() for file in before}

    def test_other_sources_cannot_repeat_a_seeded_run(self, run, copied, monkeypatch):
        monkeypatch.setattr(run_flags, "read_sources", lambda: "changed")
        with pytest.raises(process.UserError, match="sources: [0-9a-f]{64} -> changed"):
            run(*self.FINISHED)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("ledger.json", b'{"rounds_spent": 1e400}', "is damaged"),
            ("ledger.json", b"\xff", "is damaged"),
            ("config.json", b"\xff", "cannot read"),
        ],
    )
    def test_damaged_files_are_refused(self, run, copied, name, content, message):
        (copied / name).write_bytes(content)
        with pytest.raises(process.UserError, match=message):
            run(*self.FINISHED)

    @pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
    def test_a_file_in_a_folder_s_place_is_refused(self, run, copied, name):
        shutil.rmtree(copied / name)
        (copied / name).write_text("")
        if name == "tensorboard":
            # There is a round left to write about.
            shutil.rmtree(copied / "checkpoints" / "round_2")
        with pytest.raises(process.UserError, match=name.capitalize() + f"|{name}"):
            run(*self.FINISHED)

    def test_times_that_are_damaged_are_left_alone(self, run, copied):
        (copied / "timing.csv").write_bytes(b"round,seconds\n1,\xff\n")
        before = (copied / "metrics.csv").read_bytes()
        run(*self.FINISHED)
        assert (copied / "metrics.csv").read_bytes() == before

    def test_a_damaged_checkpoint_is_refused(self, run, copied):
        (file,) = (copied / "checkpoints" / "round_2").rglob("*.data-*")
        file.write_bytes(file.read_bytes()[:-100])
        message = "round_2 is damaged.* Remove that folder"
        with pytest.raises(process.UserError, match=message):
            run(*self.FINISHED)

    def test_a_folder_named_by_the_flags_is_taken_up_until_it_is_finished(self, run):
        first = run("--mechanism=none").folder
        (first / "results.json").unlink()
        assert run("--mechanism=none").folder == first

        def choose(*arguments: str) -> pathlib.Path:
            config = parse(f"--output_root={first.parent}", *TINY, *arguments)
            settings = json.loads((first / "config.json").read_text())
            settings["flags"]["clip"] = config.clip
            return distributed_training.choose_folder(config, settings)

        assert choose("--mechanism=none") == first.with_name(f"{first.name}-2")
        assert choose("--mechanism=none", "--clip=3") != first
        assert choose("--experiment=mine") == first.parent / "mine"


class TestEnding:
    @pytest.mark.slow
    def test_signals_leave_no_process_and_keep_the_last_round(self, tmp_path):
        cases = {
            "one": (signal.SIGINT, "tff"),
            "two": (signal.SIGINT, "local"),
            "three": (signal.SIGTERM, "local"),
        }
        arguments = [*TINY, "--total_rounds=500", f"--output_root={tmp_path}"]
        programs = [
            subprocess.Popen(
                [*COMMAND, *arguments, f"--experiment={name}", f"--engine={engine}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for name, (_, engine) in cases.items()
        ]
        for (name, (number, engine)), running in zip(
            cases.items(), programs, strict=True
        ):
            folder = tmp_path / name
            wait_for_rows(folder, 2, running)
            children = find_descendants(running.pid)
            assert bool(children) == (engine == "tff")
            running.send_signal(number)
            _, error = running.communicate(timeout=60)
            assert running.returncode == 128 + number
            assert are_gone(children)
            rounds = len(read_rows(folder))
            assert error.strip().splitlines()[-1] == (
                f"run_distributed_dp: ended by {number.name}: round {rounds} of 500 is "
                f"saved in {folder}; the same command goes on from there"
            )
            assert "Traceback" not in error
            assert (folder / "checkpoints" / f"round_{rounds}").is_dir()

    @pytest.mark.slow
    def test_a_terminals_ctrl_c_ends_a_run_on_ray_with_all_its_processes(
        self, tmp_path
    ):
        folder = tmp_path / "run"
        running = subprocess.Popen(
            [
                *COMMAND,
                *TINY,
                "--total_rounds=500",
                "--engine=ray",
                f"--output_root={tmp_path}",
                "--experiment=run",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        wait_for_rows(folder, 2, running)
        children = find_descendants(running.pid)
        assert children
        # To the whole group, Ray's processes included, as a terminal does it.
        os.killpg(running.pid, signal.SIGINT)
        _, error = running.communicate(timeout=60)
        assert running.returncode == 128 + signal.SIGINT, error
        rounds = len(read_rows(folder))
        last = error.strip().splitlines()[-1]
        assert f"ended by SIGINT: round {rounds} of 500 is saved" in last
        assert "Traceback" not in error
        assert are_gone(children)

    def test_a_defect_leaves_no_process_and_a_traceback(self, tmp_path):
        program = (
            "import sys\n"
            "from scripts import run_distributed_dp\n"
            "from simulation import process\n"
            "def main():\n"
            "    process.import_quietly('tensorflow_federated')\n"
            "    from simulation import training\n"
            "    def fail(*args):\n"
            "        print(*process._find_children())\n"
            "        raise RuntimeError('a defect')\n"
            "    training.run_training = fail\n"
            "    run_distributed_dp.main()\n"
            "run_distributed_dp.define_flags()\n"
            "process.run_program(main, name='program', argv=sys.argv)\n"
        )
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                program,
                f"--output_root={tmp_path}",
                *TINY,
                "--engine=tff",
            ],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=ROOT,
        )
        assert done.returncode == 1
        assert "RuntimeError: a defect" in done.stderr
        assert are_gone([int(pid) for pid in done.stdout.splitlines()[-1].split()])
