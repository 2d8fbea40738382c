"""Tests for the presets of CENTAUR: headers, flags, and two small rounds of each."""

import pathlib

import numpy as np
import pytest
from absl import flags

from scripts import (
    centaur_comparison,
    centaur_training,
    run_centaur_comparison,
)
from scripts.centaur_comparison_config import ComparisonConfig
from scripts.centaur_comparison_worker import run_here
from scripts.centaur_config import Method
from scripts.flags import build_config
from simulation.population import layout
from simulation.sources.source import TEST, TRAIN, Feature, Kind
from tests.scripts import centaur_runs, runs
from tests.simulation.tasks import files

FOLDER = runs.ROOT / "configs" / "centaur"
PROGRAM = "python -m scripts.run_centaur "
COMPARISON = "python -m scripts.run_centaur_comparison"


def read_header(preset: pathlib.Path) -> str:
    lines = preset.read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("#"))


ALL = sorted(FOLDER.glob("*.flags"))
PRESETS = [preset for preset in ALL if PROGRAM in read_header(preset)]
COMPARISONS = [preset for preset in ALL if COMPARISON in read_header(preset)]
# Enough for the programs to run; but for the embedded digits the data are toys.
SMALL = (
    "--total_rounds=2",
    "--num_clients=4",
    "--test_fraction=0.25",
    "--device=cpu",
    "--client_epochs=1",
    "--head_epochs=2",
)
SMALL_COMPARISON = (
    *SMALL,
    "--methods=centaur,stand_alone",
    "--stand_alone_epochs=2",
    "--epsilons=50,inf",
    "--tuning_epsilon=50",
    "--grid_client_lrs=0.1",
    "--grid_head_lrs=0.01",
    "--grid_stand_alone_lrs=0.1",
    "--grid_clips=0.1",
    "--seeds=1,2",
    "--diagnose",
)
# Clients, classes of a client, rounds, clip: the authors' table.
PAPER = {
    "cifar10_n500_s2": (500, 2, 200, 0.01),
    "cifar10_n500_s5": (500, 5, 200, 0.01),
    "cifar10_n1000_s2": (1000, 2, 400, 0.01),
    "cifar10_n1000_s5": (1000, 5, 400, 0.01),
    "cifar100_n500_s5": (500, 5, 200, 0.02),
    "cifar100_n500_s20": (500, 20, 200, 0.02),
    "cifar100_n1000_s5": (1000, 5, 400, 0.02),
    "cifar100_n1000_s20": (1000, 20, 400, 0.02),
    "emnist_n1000_s5": (1000, 5, 40, 0.25),
    "emnist_n2000_s5": (2000, 5, 40, 0.25),
}
# One of each kind of data in the default suite; the others have its shapes.
QUICK = {"cifar10_n500_s2", "cifar100_n1000_s20", "emnist_n1000_s5"}


def mark(presets, slow=()):
    return [
        pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem in slow))
        for p in presets
    ]


def parse_comparison(*arguments: str) -> ComparisonConfig:
    values = flags.FlagValues()
    run_centaur_comparison.define_flags(values)
    values(["run_centaur_comparison", *arguments])
    return build_config(ComparisonConfig, values)


def write_digits(folder: pathlib.Path, name: str) -> None:
    rng = np.random.default_rng(1)
    rows = [
        (
            f"w{index % 3}",
            TRAIN if index % 6 else TEST,
            {"pixels": rng.random([28, 28]).astype(np.float32), "label": index % 10},
        )
        for index in range(240)
    ]
    features = {
        "pixels": Feature(kind=Kind.FLOAT, shape=(28, 28)),
        "label": files.NUMBER,
    }
    files.write(folder, layout.rename(layout.EMNIST, name), rows, features)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data")
    for num_classes in (10, 100):
        files.write_cifar(folder, num_classes)
    for name in ("qmnist", "emnist_digits"):
        write_digits(folder, name)
    return folder


def test_there_are_presets():
    assert {preset.stem for preset in PRESETS} == set(PAPER)
    assert len(COMPARISONS) == 3
    for preset in set(ALL) - {*PRESETS, *COMPARISONS}:
        assert "python -m scripts.run_linear_representation" in read_header(preset)


@pytest.mark.parametrize("preset", mark(PRESETS + COMPARISONS))
def test_the_header_says_how_and_what(preset):
    text = read_header(preset)
    assert f"--flagfile=configs/centaur/{preset.name}" in text
    for word in ("Setting", "Expected", "Runtime"):
        assert f"# {word}" in text
    if preset.stem != "comparison_digits":
        assert "python -m scripts.prepare_data" in text
    assert "TODO" not in text


@pytest.mark.parametrize("preset", mark(PRESETS))
def test_the_settings_are_the_authors(preset):
    config = centaur_runs.parse(f"--flagfile={preset}")
    num_clients, num_classes, num_rounds, clip = PAPER[preset.stem]
    assert (config.num_clients, config.classes_per_client) == (num_clients, num_classes)
    assert (config.total_rounds, config.clip) == (num_rounds, clip)
    assert (config.epsilon, config.delta, config.participation) == (1, 1e-5, 1)
    assert (config.client_lr, config.client_momentum) == (0.01, 0.9)
    assert (config.head_lr, config.head_momentum) == (0.01, 0.9)
    assert (config.head_epochs, config.batch_size) == (15, 100)
    assert (config.weight_decay, config.validation_fraction) == (1e-4, 0.1)
    assert config.client_epochs == (2 if "emnist" in preset.stem else 1)
    assert (config.server_lr, config.server_momentum) == (1, 0)
    assert config.method == "centaur" and config.mechanism == "gaussian"


@pytest.mark.parametrize("preset", mark(COMPARISONS))
def test_a_comparison_counts_its_runs(preset):
    config = parse_comparison(f"--flagfile={preset}")
    assert len(config.methods) == 6 and config.seeds == (1, 2, 3)
    assert config.tuning_epsilon in config.epsilons
    text = read_header(preset)
    assert f"{centaur_comparison.count_runs(config)} runs" in text
    assert f"{config.budget} points of" in text.replace("\n#           ", " ")


@pytest.mark.parametrize("preset", mark(PRESETS, slow=set(PAPER) - QUICK))
def test_two_rounds(preset, data_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(runs.ROOT)
    config = centaur_runs.parse(
        f"--flagfile={preset}",
        f"--data_dir={data_dir}",
        f"--output_root={tmp_path}",
        "--seed=1",
        *SMALL,
    )
    outcome = centaur_training.run(config)
    (result,) = outcome.results.values()
    assert result.ledger_state.rounds_completed == 2
    summary = centaur_runs.read_summary(outcome)
    assert summary["privacy"][0]["epsilon"] == pytest.approx(1, rel=0.01)
    assert summary["privacy"][0]["delta"] == 1e-5


@pytest.mark.parametrize(
    "preset", mark(COMPARISONS, slow={preset.stem for preset in COMPARISONS})
)
def test_a_small_comparison(preset, data_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(runs.ROOT)
    config = parse_comparison(
        f"--flagfile={preset}",
        f"--data_dir={data_dir}",
        f"--output_root={tmp_path}",
        *SMALL_COMPARISON,
        # The embedded digits are no toys.
        f"--num_clients={40 if 'digits' in preset.stem else 4}",
    )
    findings = centaur_comparison.run(config, execute=run_here)
    assert len(findings.outcomes) == 2 * 2 + 2
    for one in findings.outcomes:
        if one.run.method is Method.STAND_ALONE:
            assert one.epsilon is None
        elif one.run.is_private:
            assert one.epsilon == pytest.approx(50, rel=0.05)
        else:
            assert one.epsilon == float("inf") and "clip" not in one.run.point
            assert one.standing is one.fraction_clipped is None
    assert len(findings.diagnoses[0].rows) == 2
