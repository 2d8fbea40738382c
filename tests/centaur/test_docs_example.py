"""The example of docs/centaur.md does what is said there."""

import re
import subprocess
import sys

from tests.scripts.runs import ROOT


def test_it_runs_and_ends_with_a_representation():
    text = (ROOT / "docs" / "centaur.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    # In a process of its own: it sets the execution context of its process.
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    shapes = "[(784, 64), (64,), (64, 32), (32,), (32, 16), (16,)]"
    assert done.stdout.splitlines()[-1] == shapes
