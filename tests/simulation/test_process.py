"""Tests for process hygiene, with small programs that need no TensorFlow."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

PRELUDE = """
import os, pathlib, subprocess, sys, time
from simulation import process

def start():
    child = process.start_child(["/bin/sleep", "600"])
    print(child.pid, flush=True)
    return child
"""


def launch(body: str, *arguments: str) -> subprocess.Popen:
    """Starts a program whose `main` has the body given."""
    program = (
        PRELUDE
        + "def main():\n"
        + textwrap.indent(textwrap.dedent(body), "    ")
        + "\nprocess.run_program(main, name='program', argv=sys.argv)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(running: subprocess.Popen) -> tuple[int, str, str]:
    out, error = running.communicate(timeout=30)
    return running.returncode, out, error


def is_gone(pid: int) -> bool:
    for _ in range(100):
        if not psutil.pid_exists(pid):
            return True
        time.sleep(0.05)
    return False


class TestExit:
    def test_normal_end(self):
        code, out, error = finish(launch("start()"))
        assert (code, error) == (0, "")
        assert is_gone(int(out))

    def test_result_is_the_exit_code(self):
        assert finish(launch("return 7"))[0] == 7

    def test_user_error_is_one_line_and_code_2(self):
        code, out, error = finish(launch("start(); raise process.UserError('no')"))
        assert (code, error) == (2, "program: error: no\n")
        assert is_gone(int(out))

    def test_other_errors_keep_their_traceback(self):
        code, out, error = finish(launch("start(); raise ValueError('a defect')"))
        assert code == 1
        assert "Traceback" in error and "ValueError: a defect" in error
        assert is_gone(int(out))

    @pytest.mark.parametrize(
        "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name
    )
    def test_signals_end_it_with_one_line(self, number):
        running = launch("start(); time.sleep(60)")
        pid = int(running.stdout.readline())
        running.send_signal(number)
        code, _, error = finish(running)
        assert code == 128 + number
        assert error.strip() == f"program: ended by {number.name}"
        assert is_gone(pid)

    def test_kill_9_takes_the_child_along(self):
        running = launch("start(); time.sleep(60)")
        pid = int(running.stdout.readline())
        running.kill()
        running.wait()
        assert is_gone(pid)

    def test_children_of_libraries_end_too(self):
        body = "print(subprocess.Popen(['/bin/sleep', '600']).pid)"
        code, out, _ = finish(launch(body))
        assert code == 0
        assert is_gone(int(out))

    def test_a_child_does_not_hold_the_output_open(self):
        # `finish` returns at the end of both streams, as `program | cat` does.
        started = time.monotonic()
        finish(launch("start()"))
        assert time.monotonic() - started < 20

    def test_a_reader_that_leaves_ends_it_quietly(self):
        running = launch("print('x' * 100000, flush=True); time.sleep(.2); print(1)")
        running.stdout.close()
        assert running.wait(timeout=30) == 128 + signal.SIGPIPE
        assert "Traceback" not in running.stderr.read()
        running.stderr.close()


class TestSignals:
    def test_a_signal_waits_for_the_end_of_a_deferring_block(self):
        running = launch(
            """
            with process.defer_signals():
                with process.defer_signals():
                    print("in", flush=True)
                    time.sleep(1)
                print("still in", flush=True)
            print("never")
            """
        )
        running.stdout.readline()
        running.terminate()
        code, out, _ = finish(running)
        assert (code, out) == (128 + signal.SIGTERM, "still in\n")

    def test_the_hint_is_on_the_last_line(self):
        running = launch(
            """
            try:
                print("in", flush=True)
                time.sleep(60)
            except process.Terminated as error:
                error.hint = "all is saved"
                raise
            """
        )
        running.stdout.readline()
        running.send_signal(signal.SIGINT)
        assert finish(running)[2].endswith("ended by SIGINT: all is saved\n")


class TestFlags:
    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ("--unknown=1", "Unknown command line flag"),
            ("word", "unexpected argument 'word'"),
            ("--flagfile=/missing", "Unable to open flagfile"),
        ],
    )
    def test_bad_command_lines(self, argument, message):
        code, _, error = finish(launch("print('never')", argument))
        assert code == 2
        assert message in error and "Traceback" not in error

    @pytest.mark.parametrize("argument", ["--help", "-help", "--helpshort"])
    def test_help_is_no_error(self, argument):
        code, out, error = finish(launch("print('never')", argument))
        assert (code, error) == (0, "")
        assert "USAGE:" in out and "never" not in out


class TestImport:
    def test_noise_is_left_out_and_warnings_are_passed_on(self, tmp_path):
        (tmp_path / "noisy.py").write_text(
            "import os\n"
            "os.write(2, b'E0000 Unable to register cuDNN factory: twice\\n')\n"
            "os.write(2, b'W0000 the disk is nearly full\\n')\n"
        )
        code, _, error = finish(
            launch(
                f"sys.path.append({str(tmp_path)!r}); process.import_quietly('noisy')"
            )
        )
        assert code == 0
        assert error == "W0000 the disk is nearly full\n"

    def test_a_failing_import_raises_and_restores_the_stream(self):
        code, _, error = finish(
            launch(
                """
                try:
                    process.import_quietly("no_such_module")
                except ImportError:
                    print("seen", file=sys.stderr)
                """
            )
        )
        assert (code, error) == (0, "seen\n")


def test_user_input_turns_value_errors_into_user_errors():
    from simulation import process

    with pytest.raises(process.UserError, match="mend me"), process.user_input():
        raise ValueError("mend me")
    with pytest.raises(process.UserError), process.user_input(OSError):
        raise FileNotFoundError
    with pytest.raises(KeyError), process.user_input():
        raise KeyError


def test_no_process_of_these_tests_is_left():
    assert not [
        child
        for child in psutil.Process(os.getpid()).children(recursive=True)
        if child.name() == "sleep"
    ]
