"""Every benchmark runs, small, and leaves the ratios that it prints."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {
    "ops": ["--dim=4096", "--update_dim=4000", "--repeats=1"],
    "engine": ["--model=linear", "--clients=2", "--repeats=1", "--notff"],
}
TIMED = {
    "ops": {"encode", "rotation, ours", "sampler, discrete Gaussian"},
    "engine": {"bare loop", "local, no privacy", "local, DDGauss 16 bits"},
}


@pytest.mark.parametrize("name", SMALL)
def test_it_runs_and_writes_what_it_timed(name, tmp_path):
    path = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *SMALL[name], f"--output={path}"],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(path.read_text())
    seconds = figures.get("linear", figures)["median_seconds"]
    assert set(seconds) >= TIMED[name]
    assert all(0 < value < 180 for value in seconds.values())
    for timed in TIMED[name]:
        assert timed in done.stdout
