"""The README's example runs as it stands, for fewer rounds."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def _read_example() -> str:
    text = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return example


def test_example_trains_two_rounds():
    example = _read_example()
    shortened = example.replace('range(terms["num_rounds"])', "range(2)")
    assert shortened != example
    shortened += "\nprint(dict(metrics))\n"
    result = subprocess.run(
        [sys.executable, "-c", shortened],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "add or remove one user" in result.stdout
    assert "bits_per_client" in result.stdout


def test_example_is_short():
    lines = [line for line in _read_example().splitlines() if line.strip()]
    assert len(lines) <= 26


def test_named_files_exist():
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"\((docs/[\w./]+)\)|flagfile=([\w./]+)", text):
        assert (ROOT / (path[0] or path[1])).exists(), path
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
