"""What the text of the repository's files must hold and must not."""

import ast
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MAX_LINES = 500
# Put together from parts, so that this file does not hold what it looks for.
FORBIDDEN = [
    *(
        re.escape(".".join(parts))
        for parts in (
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("npmjs", "org"),
            ("deb", "debian", "org"),
            ("snapshot", "debian", "org"),
            ("conda", "anaconda", "org"),
            ("proxy", "golang", "org"),
        )
    ),
    # Folders of one machine: nothing that runs elsewhere may name them.
    r"(?<![\w./~])/(?:" + "|".join(["home", "mnt", "opt", "root", "srv"]) + r")/\w",
    r"(?<![\w./~])/(?:" + "|".join(["Users", "work", "workspace"]) + r")/\w",
]


def find_forbidden(text: str) -> list[str]:
    return [match for pattern in FORBIDDEN for match in re.findall(pattern, text)]


def find_tracked_files() -> list[pathlib.Path]:
    """Returns the files under version control, or all that are not ignored if none."""
    command = ["git", "ls-files", "-z"]
    try:
        output = subprocess.run(
            command, cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git lists no files here: {error}")
    paths = [ROOT / name for name in output.split("\0") if name]
    return [path for path in paths if path.is_file()]


def find_modules() -> list[pathlib.Path]:
    folders = (
        "benchmarks",
        "centaur",
        "distributed_dp",
        "scripts",
        "simulation",
        "tools",
        "upcycled_fl",
    )
    return sorted(path for name in folders for path in (ROOT / name).rglob("*.py"))


def find_tests() -> list[pathlib.Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def get_id(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", find_modules() + find_tests(), ids=get_id)
def test_module_has_a_docstring_and_a_limit(path: pathlib.Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(text))


def test_no_file_names_a_registry_or_a_machine() -> None:
    found = {}
    for path in find_tracked_files():
        content = path.read_bytes()
        if b"\0" not in content:
            matches = find_forbidden(content.decode("utf-8"))
            if matches:
                found[get_id(path)] = matches
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "https://files.pythonhosted" + ".org/packages",
        "--index-url=" + "https://pypi" + ".org/simple",
        "open('" + "/home" + "/someone/data')",
        "cd " + "/work" + "/main",
    ],
)
def test_forbidden_text_is_found(text: str) -> None:
    assert find_forbidden(text)


@pytest.mark.parametrize(
    "text",
    ["#!/usr/bin/env python", "/tmp/run", "https://example.com/home/page", "a/b"],
)
def test_other_text_is_not(text: str) -> None:
    assert not find_forbidden(text)
