"""The examples in Python run as they stand, the README's for fewer rounds."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def _read_example(name: str = "README.md") -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return example


def _run(example: str) -> str:
    """Returns what an example prints, in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", example],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_example_trains_two_rounds():
    example = _read_example()
    shortened = example.replace('range(terms["num_rounds"])', "range(2)")
    assert shortened != example
    shortened += "\nprint(dict(metrics))\n"
    printed = _run(shortened)
    assert "add or remove one user" in printed
    assert "bits_per_client" in printed


def test_centaurs_example_ends_with_a_representation():
    shapes = "[(784, 64), (64,), (64, 32), (32,), (32, 16), (16,)]"
    assert _run(_read_example("docs/centaur.md")).splitlines()[-1] == shapes


def test_example_is_short():
    lines = [line for line in _read_example().splitlines() if line.strip()]
    assert len(lines) <= 26


def test_named_files_exist():
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"\((docs/[\w./]+)\)|flagfile=([\w./]+)", text):
        assert (ROOT / (path[0] or path[1])).exists(), path
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
