"""Process hygiene: quiet start, one line per error, and no child left behind.

`run_program` is the outermost frame of every script. It imports nothing heavy, so that
`--help` answers at once.
"""

import contextlib
import ctypes
import importlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

EXIT_BAD_INPUT = 2

# What the libraries print at import on every machine, and what it would take to mean
# something: a CUDA installation that the user asked to use.
_IMPORT_NOISE = re.compile(
    r"Unable to register cu(DNN|FFT|BLAS) factory"
    r"|Could not find (cuda drivers|TensorRT)"
    r"|TF-TRT Warning"
    r"|This TensorFlow binary is optimized to use available CPU instructions"
    r"|To enable the following instructions"
    r"|oneDNN custom operations are on"
    r"|All log messages before absl::InitializeLog"
)
_HELP_FLAGS = frozenset({"help", "helpshort", "helpfull", "helpxml", "only_check_args"})

# How deep the trees of processes are that end_children ends.
_GENERATIONS = 4
# From <linux/prctl.h>.
_SET_CHILD_SUBREAPER = 36

_children: list[subprocess.Popen[bytes]] = []
_at_end: list[Callable[[], None]] = []
_defer_signals = 0
_deferred_signal: int | None = None
_last_signal: int | None = None


class UserError(Exception):
    """What the user can mend: printed as one message, without a traceback."""


class Terminated(KeyboardInterrupt):
    """A signal asks the program to end.

    Attributes:
        signal_number: The signal.
        hint: What whoever catches it on the way adds to the last line.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number
        self.hint = ""


@contextlib.contextmanager
def user_errors(*errors: type[Exception]) -> Iterator[None]:
    """Turns the errors named into UserError inside the block."""
    try:
        yield
    except errors as error:
        raise UserError(str(error)) from error


def user_input(
    *errors: type[Exception],
) -> contextlib.AbstractContextManager[None]:
    """Turns ValueError, and the errors named, into UserError inside the block.

    For the part of a program that reads and checks what the user gave. A ValueError
    that arises later is a defect and keeps its traceback.
    """
    return user_errors(ValueError, *errors)


def run_program(
    main: Callable[[], int | None], *, name: str, argv: Sequence[str] | None = None
) -> NoReturn:
    """Parses the flags, runs `main`, and ends the process with no child left.

    Exit codes: 0; 2 for bad input; 128 + signal after a signal; 1 with a traceback for
    anything else.

    Args:
        main: The program. Its result is the exit code, None for 0.
        name: The program's name in messages.
        argv: The command line, the process's own by default.
    """
    logging.use_absl_handler()
    logging.set_verbosity(logging.WARNING)
    code = 1
    try:
        _install_signal_handlers()
        parse_flags(sys.argv if argv is None else argv)
        code = main() or 0
        sys.stdout.flush()
    except UserError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        code = EXIT_BAD_INPUT
    except Terminated as error:
        signal_name = signal.Signals(error.signal_number).name
        hint = f": {error.hint}" if error.hint else ""
        print(f"\n{name}: ended by {signal_name}{hint}", file=sys.stderr)
        code = 128 + error.signal_number
    except BrokenPipeError:
        # Whoever read the output is gone; so is the reason to go on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except Exception:
        logging.exception("%s: failed", name)
        code = 1
    finally:
        _ignore_signals()
        _finish()
        end_children()
    sys.exit(code)


def call_at_end(function: Callable[[], None]) -> None:
    """Lets `run_program` call a function before it kills the children that are left."""
    _at_end.append(function)


def _finish() -> None:
    while _at_end:
        try:
            _at_end.pop()()
        # Whatever it is, the process ends.
        except Exception:
            logging.exception("clean-up failed")


def parse_flags(argv: Sequence[str]) -> None:
    """Parses the command line into `absl.flags.FLAGS`.

    Raises:
        UserError: For an unknown flag, a value outside its range, or an argument that
            is no flag.
        SystemExit: With code 0, after the help was printed.
    """
    app.define_help_flags()
    try:
        rest = flags.FLAGS(list(argv))
    except flags.Error as error:
        raise UserError(f"{error} (--help lists the flags)") from None
    except SystemExit:
        if any(_is_help(argument) for argument in argv[1:]):
            raise SystemExit(0) from None
        raise
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r} (--help lists the flags)")


def import_quietly(name: str) -> types.ModuleType:
    """Imports a module, without the lines that say nothing on a machine without CUDA.

    Everything else that the import prints to the standard error is passed on.
    """
    # What TensorFlow logs as an error and matters is raised as well; XLA logs one for
    # every stream on a CPU.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    with tempfile.TemporaryFile() as captured:
        original = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            module = importlib.import_module(name)
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)
            captured.seek(0)
            for line in captured.read().decode(errors="replace").splitlines():
                if not _IMPORT_NOISE.search(line):
                    print(line, file=sys.stderr)
    return module


def start_child(
    command: Sequence[str], *, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a child that ends with this process, however this process ends.

    On Linux the kernel kills the child when its parent dies, kill -9 included. The
    child has no terminal, does not read the standard input, and does not hold the
    standard output open.
    """
    if sys.platform == "linux":
        # Set in between, because code run between fork and exec can deadlock in a
        # process with threads. The setting survives exec, and so does the process id.
        command = [sys.executable, "-ISc", _LAUNCHER, str(os.getpid()), *command]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    _children.append(child)
    return child


_LAUNCHER = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))\n"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)


def end_child(child: subprocess.Popen[bytes]) -> None:
    """Kills a child that `start_child` started, and waits for its end."""
    if child in _children:
        _children.remove(child)
    child.kill()
    child.wait()


def end_children() -> None:
    """Kills all children, those that libraries started included, and theirs if adopted.

    See `adopt_orphans`.
    """
    while _children:
        end_child(_children[-1])
    for _ in range(_GENERATIONS):
        for child in _find_children():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def adopt_orphans() -> None:
    """Makes processes whose parent ends before this one its children, on Linux.

    A library's helper may start helpers of its own, which would outlive it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Lets a block end before a signal takes effect."""
    global _defer_signals, _deferred_signal
    _defer_signals += 1
    try:
        yield
    finally:
        _defer_signals -= 1
    if _deferred_signal is not None and not _defer_signals:
        number, _deferred_signal = _deferred_signal, None
        raise Terminated(number)


@contextlib.contextmanager
def keep_termination() -> Iterator[None]:
    """Restores Terminated where a library made a plain KeyboardInterrupt of it."""
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error, Terminated) or _last_signal is None:
            raise
        raise Terminated(_last_signal) from None


def _handle_signal(number: int, frame: Any) -> None:
    del frame
    global _deferred_signal, _last_signal
    _last_signal = number
    if _defer_signals:
        _deferred_signal = number
    else:
        raise Terminated(number)


def _install_signal_handlers() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _handle_signal)


def _ignore_signals() -> None:
    """Lets the clean-up end: a second Ctrl-C would leave it half done."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _find_children() -> list[int]:
    """Returns the direct children of this process, where the system lists them."""
    children: list[int] = []
    for file in pathlib.Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children.extend(int(word) for word in file.read_text().split())
    return children


def _is_help(argument: str) -> bool:
    name = argument.lstrip("-").partition("=")[0]
    return argument.startswith("-") and name in _HELP_FLAGS | {"h", "?"}
