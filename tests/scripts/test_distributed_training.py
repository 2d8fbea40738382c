"""Tests for what the flags choose: mechanisms, samplers, presets, calibration."""

import json

import numpy as np
import pytest

from scripts import distributed_training
from simulation import process
from tests.scripts.runs import ROOT, TINY, parse, read_rows
from tests.simulation.tasks import files

# Other programs have presets there too.
PRESETS = [
    path
    for path in sorted((ROOT / "configs" / "distributed_dp").glob("*.flags"))
    if "scripts.run_distributed_dp" in path.read_text()
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> distributed_training.RunOutcome:
    """A run in this process that others are compared with."""
    folder = tmp_path_factory.mktemp("plain")
    return distributed_training.run(parse(f"--output_root={folder}", *TINY, "--seed=1"))


class TestModes:
    def test_fixed_cohorts_are_accounted_by_replacing_one(self, run, capsys):
        outcome = run("--sampling=fixed", "--bits=20")
        rows = read_rows(outcome.folder)
        assert [row["clients_joined"] for row in rows] == ["20", "20"]
        assert "adjacency: replace one user" in capsys.readouterr().out

    def test_as_published_is_said(self, run, capsys):
        run("--sampling=fixed", "--accounting=as_published")
        out = capsys.readouterr().out
        assert "as published, not a proven bound for this sampler" in out

    def test_no_privacy_has_an_infinite_epsilon(self, run, capsys):
        outcome = run("--mechanism=none")
        assert {row["epsilon"] for row in read_rows(outcome.folder)} == {"inf"}
        assert "no privacy: epsilon = inf" in capsys.readouterr().out

    def test_dropout_weakens_the_servers_view_alone(self, run, plain):
        def read(outcome, view):
            results = json.loads((outcome.folder / "results.json").read_text())
            found = results["ddgauss"][view]
            return (found[0] if isinstance(found, list) else found)["epsilon"]

        half = run("--seed=1", "--dropout_rate=0.5")
        assert read(half, "privacy") == read(plain, "privacy")
        assert read(half, "server_privacy") > 1.2 * read(plain, "server_privacy")
        rows = read_rows(half.folder)
        assert all(
            int(row["clients_reporting"]) < int(row["clients_joined"]) for row in rows
        )

    def test_the_clip_adapts_and_is_paid_for(self, run, plain):
        adaptive = run("--seed=1", "--adaptive_clip", "--clip=0.01", "--clip_lr=1")
        clips = [float(row["l2_clip"]) for row in read_rows(adaptive.folder)]
        # Nearly all updates are longer than the clip that it starts with.
        assert clips[1] > 1.2 * clips[0]
        multipliers = [
            float(read_rows(outcome.folder)[0]["noise_multiplier"])
            for outcome in (plain, adaptive)
        ]
        assert multipliers[1] > multipliers[0]

    def test_without_diagnostics_released_quantities_alone_are_left(self, run, capsys):
        outcome = run("--diagnostics=off", "--compare_central")
        for folder in (outcome.folder, outcome.folder / "gaussian"):
            columns = list(read_rows(folder)[0])
            for part in ("train_", "test_", "clients", "norm", "clipped", "redraws"):
                assert not [name for name in columns if part in name]
        assert not (outcome.folder / "plot.png").exists()
        results = json.loads((outcome.folder / "results.json").read_text())
        assert results["ddgauss"]["test"] is None
        assert "Privacy, the server itself: epsilon = " in capsys.readouterr().out

    def test_an_unseeded_run_says_so_everywhere(self, run, capsys):
        outcome = run("--mechanism=none")
        assert "not reproducible" in capsys.readouterr().out
        config = json.loads((outcome.folder / "config.json").read_text())
        assert config["seed"] == "from the operating system"
        assert {row["reproducible"] for row in read_rows(outcome.folder)} == {"False"}


class TestPartition:
    """Arrays of one's own, divided anew with a part of each client's for the test."""

    FLAGS = (
        "--task=own",
        "--data_name=mine",
        "--partition=shards",
        "--num_clients=4",
        "--classes_per_client=2",
        "--mechanism=none",
        "--clients_per_round=3",
        "--seed=1",
    )

    @pytest.fixture(scope="class")
    def data(self, tmp_path_factory) -> str:
        folder = tmp_path_factory.mktemp("data")
        x = np.random.default_rng(0).normal(size=[48, 3]).astype(np.float32)
        files.write_own(folder, list(x))
        return f"--data_dir={folder}"

    def test_a_run_has_one_test_part(self, run, data, capsys):
        flags = (*self.FLAGS, data, "--experiment=one")
        outcome = run(*flags, "--test_fraction=0.25")
        config = json.loads((outcome.folder / "config.json").read_text())
        assert config["flags"]["test_fraction"] == 0.25
        assert config["data"]["test_fraction"] == 0.25
        assert "0.25 held out for the test" in capsys.readouterr().out
        results = json.loads((outcome.folder / "results.json").read_text())
        # Of ten examples a client, two shards of five.
        assert results["evaluated"]["examples"] == 4 * 2
        assert any("from their labels" in x for x in results["not_covered_by_epsilon"])
        with pytest.raises(process.UserError, match="test_fraction"):
            run(*flags, "--test_fraction=0.5")


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
class TestPresets:
    def test_two_rounds(self, run, preset):
        size = 20 if "digits" in preset.stem else 3
        outcome = run(f"--flagfile={preset}", *TINY, f"--clients_per_round={size}")
        result = next(iter(outcome.results.values()))
        assert result.ledger_state.rounds_completed == 2

    def test_the_header_says_how_and_what(self, preset):
        head = [
            line for line in preset.read_text().splitlines() if line.startswith("#")
        ]
        text = "\n".join(head)
        assert "python -m scripts.run_distributed_dp" in text
        assert f"--flagfile=configs/distributed_dp/{preset.name}" in text
        for word in ("Expected", "Runtime"):
            assert word in text


class TestPublishedSettings:
    """Noise multipliers of the EMNIST settings, as their presets say."""

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("emnist", 0.8492),
            ("emnist_epsilon3", 1.6221),
            ("emnist_as_published", 0.8938),
            ("emnist_gaussian", 0.8479),
        ],
    )
    def test_calibration(self, monkeypatch, name, expected):
        from scripts.mechanism_plan import build_plans
        from simulation import seeds

        monkeypatch.chdir(ROOT)
        preset = f"--flagfile=configs/distributed_dp/{name}.flags"
        (plan,) = build_plans(
            parse(preset),
            num_clients=3_400,
            dim=1_018_174,
            root=seeds.build_root_seed(0),
        )
        assert plan.parameters.noise_multiplier == pytest.approx(expected, rel=5e-3)


@pytest.mark.slow
def test_accuracy_of_the_default(tmp_path, monkeypatch):
    """Three seeds: at least 85 %, and within a point of the central Gaussian."""
    monkeypatch.chdir(ROOT)
    accuracies = {"ddgauss": [], "gaussian": []}
    for seed in (1, 2, 3):
        outcome = distributed_training.run(
            parse(f"--output_root={tmp_path}", f"--seed={seed}", "--eval_every=100")
        )
        for name, result in outcome.results.items():
            accuracies[name].append(result.final["accuracy"])
    means = {name: np.mean(values) for name, values in accuracies.items()}
    assert means["ddgauss"] >= 0.85
    assert abs(means["gaussian"] - means["ddgauss"]) <= 0.01
