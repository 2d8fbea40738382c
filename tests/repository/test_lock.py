"""The lock is complete, names no place, and agrees with setup.py and its inputs."""

import ast
import importlib.metadata
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("centaur", "distributed_dp", "simulation", "scripts", "upcycled_fl")


def read_lock() -> dict[str, tuple[str, str]]:
    """Returns the version and the rest of each entry of the lock by its name."""
    text = (ROOT / "requirements.txt").read_text("utf-8")
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    entries = text.replace("\\\n", " ").splitlines()
    matches = [re.fullmatch(r"([\w.-]+)==(\S+)((?: .*)?)", entry) for entry in entries]
    assert all(matches), [
        e for e, match in zip(entries, matches, strict=True) if not match
    ]
    return {canonicalize_name(m[1]): (m[2], m[3].strip()) for m in matches}


def read_setup() -> dict:
    """Returns what setup.py hands to setuptools."""
    with mock.patch("setuptools.setup") as setup, pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "setup.py"))
    return setup.call_args.kwargs


def read_inputs(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    stripped = (line.partition("#")[0].strip() for line in lines)
    return [Requirement(line) for line in stripped if line]


LOCK = read_lock()
SETUP = read_setup()
SETUP_REQUIREMENTS = [
    Requirement(line)
    for lines in (SETUP["install_requires"], *SETUP["extras_require"].values())
    for line in lines
]


@pytest.mark.parametrize("name", LOCK)
def test_entry_is_hashed_and_installed(name: str) -> None:
    version, rest = LOCK[name]
    assert re.fullmatch(r"(--hash=sha256:[0-9a-f]{64}\s*)+", rest)
    assert importlib.metadata.version(name) == version


def test_lock_names_no_index_and_no_path() -> None:
    text = (ROOT / "requirements.txt").read_text("utf-8")
    # Only the comments say where an entry comes from: "via" a package or an input.
    place = r".*(?:://|--index|--extra|--find|--trusted|^-| /).*"
    assert not re.findall(place, text, re.MULTILINE)
    header = re.match(r"(?:#.*\n)*", text)[0]
    assert "make lock" in header


@pytest.mark.parametrize(
    "requirement",
    SETUP_REQUIREMENTS + read_inputs("requirements.in") + read_inputs("overrides.txt"),
    ids=str,
)
def test_lock_satisfies(requirement: Requirement) -> None:
    version, _ = LOCK[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version)


@pytest.mark.parametrize(
    "requirement", SETUP_REQUIREMENTS, ids=lambda requirement: requirement.name
)
def test_setup_states_a_range(requirement: Requirement) -> None:
    operators = {specifier.operator for specifier in requirement.specifier}
    assert operators == {">=", "<"}


def test_setup_asks_for_the_python_of_the_lock() -> None:
    python_requires = SpecifierSet(SETUP["python_requires"])
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "--python-version 3.11 " in makefile
    assert python_requires.contains("3.11.0")
    assert not python_requires.contains("3.10.0")
    assert not python_requires.contains("3.12.0")


def test_tff_is_in_the_extra_alone() -> None:
    assert SETUP["name"] == "discreet"
    extra = {Requirement(line).name for line in SETUP["extras_require"]["tff"]}
    assert "tensorflow-federated" in extra
    assert "tensorflow-federated" not in " ".join(SETUP["install_requires"])


def test_setup_names_what_the_packages_import() -> None:
    distributions = importlib.metadata.packages_distributions()
    named = {canonicalize_name(requirement.name) for requirement in SETUP_REQUIREMENTS}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for module in find_imported_packages(path) - set(sys.stdlib_module_names):
                if (ROOT / module).is_dir():
                    continue
                names = {canonicalize_name(name) for name in distributions[module]}
                assert names & named, f"{path} imports {module}: not in setup.py."


def find_imported_packages(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


def test_wheel_holds_every_module(tmp_path: pathlib.Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tree)
    for package in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tree / package, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(tree)]
    subprocess.run(command, check=True)
    [wheel] = tmp_path.glob("discreet-*.whl")
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert modules <= names
    assert not {name for name in names if name.startswith(("tests/", "tools/"))}
