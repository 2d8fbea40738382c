"""Every benchmark runs, small, and leaves the ratios that it prints."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {
    "ops": ["--dim=4096", "--update_dim=4000", "--repeats=1"],
    "engine": ["--model=linear", "--clients=2", "--repeats=1", "--notff"],
    "centaur": ["--clients=3", "--hidden_sizes=8,4", "--examples=5", "--repeats=1"],
}
TIMED = {
    "ops": {"encode", "rotation, ours", "sampler, discrete Gaussian"},
    "engine": {"bare loop", "local, no privacy", "local, DDGauss 16 bits"},
    "centaur": {"round", "bare arithmetic"},
}


def run(name: str, tmp_path: pathlib.Path, *options: str) -> tuple[dict, str]:
    path = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options, f"--output={path}"],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "ops")) for name in SMALL],
)
def test_it_runs_and_writes_what_it_timed(name, tmp_path):
    figures, printed = run(name, tmp_path, *SMALL[name])
    seconds = figures.get("linear", figures)["median_seconds"]
    assert set(seconds) >= TIMED[name]
    assert all(0 < value < 180 for value in seconds.values())
    for timed in TIMED[name]:
        assert timed in printed


@pytest.mark.slow
def test_the_ratio_of_a_round_is_that_of_what_was_timed(tmp_path):
    figures, printed = run("centaur", tmp_path, *SMALL["centaur"], "--repeats=3")
    seconds, medians = figures["seconds"], figures["median_seconds"]
    assert {name: len(values) for name, values in seconds.items()} == {
        "round": 3,
        "bare arithmetic": 3,
    }
    assert medians == {name: sorted(values)[1] for name, values in seconds.items()}
    ratio = medians["round"] / medians["bare arithmetic"]
    assert figures["round_over_bare"] == pytest.approx(ratio)
    assert f"round over bare arithmetic {ratio:.2f}" in printed


@pytest.mark.slow
def test_the_cost_of_clients_and_memory_are_written(tmp_path):
    figures, printed = run(
        "scale", tmp_path, "--sizes=1,3", "--repeats=1", "--rounds=4"
    )
    assert set(figures) == {"small_cnn", "logistic_regression"}
    for name, found in figures.items():
        assert name in printed
        costs = found["milliseconds_per_client"]
        assert set(costs) == {"1", "3"} and min(costs.values()) > 0
        assert found["largest_over_smallest_cohort"] == costs["3"] / costs["1"]
        assert len(found["memory_mib"]) == 4


@pytest.mark.slow
def test_peers_that_are_not_installed_are_left_out(tmp_path):
    # The figures' keys are the systems; a peer's has its version.
    figures, _ = run(
        "engine",
        tmp_path,
        "--model=cnn",
        "--clients=1",
        "--examples=2",
        "--repeats=1",
        "--notff",
    )
    found = {name.split()[0] for name in figures["cnn"]["median_seconds"]}
    installed = {
        package
        for package, module in (("pfl", "pfl"), ("FedJAX", "fedjax"))
        if importlib.util.find_spec(module)
    }
    assert {"pfl", "FedJAX"} & found == installed
