"""`make` builds its environment from a fitting Python, wholly or not at all."""

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# An interpreter that answers like Python 3.11 and builds environments without pip.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
  *version_info*) exit {version_status} ;;
  *ensurepip*) exit {ensurepip_status} ;;
  "-m venv .venv") mkdir -p .venv/bin && cp {pip} .venv/bin/python && touch .venv/new ;;
  *) exit 99 ;;
esac
"""
FAKE_PIP = """#!/bin/sh
echo "$*" >> installs
exit $(cat pip_status)
"""


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "tools" / "build_environment.sh", tmp_path / "tools")
    (tmp_path / "requirements.txt").write_text("first==1\n")
    (tmp_path / "pip_status").write_text("0")
    return tmp_path


def write_python(
    tree: pathlib.Path, name: str, *, version_status: int = 0, ensurepip_status: int = 0
) -> None:
    pip = tree / "fake_pip"
    pip.write_text(FAKE_PIP)
    pip.chmod(0o755)
    path = tree / name
    path.write_text(
        FAKE_PYTHON.format(
            version_status=version_status, ensurepip_status=ensurepip_status, pip=pip
        )
    )
    path.chmod(0o755)


def run_make(tree: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True
    )


def get_message(result: subprocess.CompletedProcess[str]) -> str:
    """Returns the one line that is not make's own."""
    lines = result.stderr.splitlines()
    [line] = [line for line in lines if not line.startswith("make")]
    return line


def test_another_python_is_named_with_the_remedy(tree: pathlib.Path) -> None:
    write_python(tree, "python3.12", version_status=1)
    result = run_make(tree, "env", "PYTHON=./python3.12 ./absent")
    assert result.returncode == 2
    assert "Python 3.11 is needed" in get_message(result)
    assert "apt-get install python3.11" in get_message(result)
    assert not (tree / ".venv").exists()


def test_missing_venv_module_is_named_with_the_remedy(tree: pathlib.Path) -> None:
    write_python(tree, "python3.11", ensurepip_status=1)
    result = run_make(tree, "env", "PYTHON=./python3.11")
    assert result.returncode == 2
    assert "apt-get install python3.11-venv" in get_message(result)


def test_first_fitting_python_installs_the_lock_once(tree: pathlib.Path) -> None:
    write_python(tree, "old", version_status=1)
    write_python(tree, "fitting")
    for _ in range(2):
        result = run_make(tree, "env", "PYTHON=./absent ./old ./fitting")
        assert result.returncode == 0, result.stderr
    [install] = (tree / "installs").read_text().splitlines()
    assert install.startswith("-m pip install ")
    for option in ("--no-deps", "--require-hashes", "--requirement requirements.txt"):
        assert option in install


def test_interrupted_install_is_begun_anew(tree: pathlib.Path) -> None:
    write_python(tree, "fitting")
    (tree / "pip_status").write_text("1")
    assert run_make(tree, "env", "PYTHON=./fitting").returncode == 2
    (tree / ".venv" / "half").touch()
    (tree / "pip_status").write_text("0")
    assert run_make(tree, "env", "PYTHON=./fitting").returncode == 0
    assert not (tree / ".venv" / "half").exists()
    assert len((tree / "installs").read_text().splitlines()) == 2


def test_changed_lock_is_installed_anew(tree: pathlib.Path) -> None:
    write_python(tree, "fitting")
    for text, installs in (("first==1", 1), ("first==2", 2), ("first==2", 2)):
        (tree / "requirements.txt").write_text(f"{text}\n")
        assert run_make(tree, "env", "PYTHON=./fitting").returncode == 0
        assert len((tree / "installs").read_text().splitlines()) == installs


@pytest.mark.parametrize("target", ["run", "test", "lint", "bench", "build-files"])
def test_target_builds_the_environment_first(target: str, tree: pathlib.Path) -> None:
    result = run_make(tree, "--dry-run", target)
    assert result.returncode == 0, result.stderr
    first = result.stdout.splitlines()[0]
    assert first.startswith("sh tools/build_environment.sh .venv/.installed-")


def test_test_target_stops_at_the_first_failing_tool(tree: pathlib.Path) -> None:
    write_python(tree, "fitting")
    assert run_make(tree, "env", "PYTHON=./fitting").returncode == 0
    ruff = tree / ".venv" / "bin" / "ruff"
    ruff.write_text("#!/bin/sh\nexit 1\n")
    ruff.chmod(0o755)
    result = run_make(tree, "test", "PYTHON=./fitting")
    assert result.returncode == 2
    assert "pytest" not in result.stdout


def test_help_lists_every_target() -> None:
    result = run_make(ROOT, "help")
    for target in ("run", "test", "lint", "bench", "env", "lock", "clean"):
        assert f"make {target} " in result.stdout


def test_pytest_runs_in_the_environment_of_make() -> None:
    assert sys.version_info[:2] == (3, 11)
