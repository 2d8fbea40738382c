"""Tests for run_linear_representation: a run of tiny sweeps, and what is refused."""

import csv
import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from absl import flags

from centaur import linear
from scripts import flags as run_flags
from scripts import run_linear_representation
from scripts.linear_config import LinearConfig
from simulation import process

ROOT = pathlib.Path(__file__).parents[2]
TINY = (
    "--num_users=600",
    "--users_per_block=100",
    "--dim=6",
    "--dims=4,5,6",
    "--epsilons=8,64",
    "--dim_epsilon=64",
    "--examples_per_user=250",
    "--start_examples=20",
    "--rounds=6",
    "--comparison_rounds=2",
    "--floor_rounds=2",
    "--steps=4",
    "--trials=3",
    "--repeats=2",
    "--boost_starts=2",
    "--boost_group=2",
    "--boost_users=100",
    "--boost_dim=4",
    "--boost_start_examples=10",
    "--boost_trials=3",
    "--boost_steps=3",
)


def build(*arguments: str) -> LinearConfig:
    values = flags.FlagValues()
    run_linear_representation.define_flags(values)
    values(["run_linear_representation", *TINY, *arguments])
    return run_flags.build_config(LinearConfig, values)


def run(folder: pathlib.Path, *arguments: str) -> pathlib.Path:
    from scripts import linear_study

    return linear_study.run(build(f"--output_root={folder}", *arguments))


def read(file: pathlib.Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """The folder of a run with --seed=7."""
    return run(tmp_path_factory.mktemp("linear"), "--seed=7")


class TestRun:
    def test_it_leaves_all_files(self, folder):
        names = {path.name for path in folder.iterdir()} - {".lock"}
        assert names == {
            "config.json",
            "curves.csv",
            "floors.csv",
            "starts.csv",
            "plot.png",
            "results.json",
        }
        assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")

    def test_every_run_is_in_the_tables(self, folder):
        floors = read(folder / "floors.csv")
        # 1 + 2 x 2 x 2 against epsilon; 3 methods x 3 dimensions x (2 + 1).
        assert len(floors) == 9 + 27
        curves = read(folder / "curves.csv")
        own = [
            float(row["distance"])
            for row in curves
            if (row["method"], row["epsilon"], row["repeat"]) == ("CENTAUR", "8.0", "1")
        ]
        assert len(own) == 7
        (row,) = [
            row
            for row in floors
            if (row["method"], row["epsilon"], row["repeat"]) == ("CENTAUR", "8.0", "1")
        ]
        assert float(row["floor"]) == pytest.approx(np.mean(own[-2:]))
        assert len(read(folder / "starts.csv")) == 2

    def test_fits_are_those_of_the_table(self, folder):
        summary = json.loads((folder / "results.json").read_text())
        floors = [
            row
            for row in read(folder / "floors.csv")
            if (row["sweep"], row["method"]) == ("dim", "normal equations")
            and row["epsilon"] != "inf"
            and row["started"] == "True"
        ]
        found = summary["floor_against_dim"]["normal equations"]["fit"]
        logs = {}
        for row in floors:
            logs.setdefault(math.log(float(row["dim"])), []).append(
                math.log(float(row["floor"]))
            )
        x, y = list(logs), [np.mean(values) for values in logs.values()]
        assert found["num_points"] == len(x) == 3 < len(floors)
        assert found["exponent"] == pytest.approx(np.polyfit(x, y, 1)[0])
        assert not summary["enough_dims"]

    def test_without_noise_the_distance_falls(self, folder):
        summary = json.loads((folder / "results.json").read_text())
        assert summary["no_privacy"]["epsilon"] == "inf"
        free = [
            row
            for row in read(folder / "floors.csv")
            if row["method"] in ("CENTAUR", "no privacy") and row["epsilon"] == "inf"
        ]
        # Against epsilon, and at each of three dimensions.
        assert len(free) == 4
        for row in free:
            assert float(row["noise_multiplier"]) == 0
            # Six rounds at 0.6 each: 0.06 after the last, 0.08 on average of two.
            assert float(row["floor"]) < 0.2 * float(row["start_distance"])

    def test_privacy_is_stated_whole(self, folder):
        summary = json.loads((folder / "results.json").read_text())
        assert len(summary["privacy"]) == 4
        for statement in summary["privacy"]:
            assert 0 < statement["epsilon"] <= 64
            assert statement["adjacency"] == linear.Adjacency.ZERO_OUT.value
            text = " ".join(statement["not_covered"])
            assert "seed" in text and "distances to B*" in text
        first = summary["privacy"][0]
        assert first["num_rounds"] == 3 * 4 + 6
        assert first["epsilon"] == pytest.approx(64, rel=1e-6)
        assert any("exact functions" in note for note in summary["notes"])
        assert any("seed" in note for note in summary["notes"])

    def test_configuration_decides_the_result(self, folder):
        config = json.loads((folder / "config.json").read_text())
        assert config["seed"] == 7 and config["reproducible"]
        assert config["flags"]["dims"] == [4, 5, 6]
        assert "engine" not in config["flags"]

    def test_the_same_seed_gives_the_same_tables(self, folder, tmp_path, capsys):
        again = run(tmp_path, "--seed=7")
        for name in ("curves.csv", "floors.csv", "starts.csv"):
            assert (again / name).read_bytes() == (folder / name).read_bytes()
        printed = capsys.readouterr().out
        assert "--seed=7; no epsilon holds" in printed
        assert "no claim is tested" in printed
        assert "Floor against epsilon: exponent" in printed

    @pytest.mark.slow
    def test_entropy_gives_others_and_says_so(self, folder, tmp_path, capsys):
        other = run(tmp_path)
        assert (other / "floors.csv").read_text() != (folder / "floors.csv").read_text()
        summary = json.loads((other / "results.json").read_text())
        assert not any("seed" in note for note in summary["notes"])
        assert "not reproducible" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--rank=5", r"`rank` must be at most every dimension .* \(4\). Found 5"),
        ("--epsilons=1,0", "`epsilons` must be positive and finite. Found 0.0"),
        ("--epsilons=1", "`epsilons` must hold at least two values"),
        ("--dims=4,4", "`dims` must hold each value once"),
        ("--dim_epsilon=-1", "`dim_epsilon` must be positive"),
        ("--boost_epsilon=nan", "`boost_epsilon` must be positive"),
        ("--delta=0", r"`delta` must be in \(0, 1\). Found 0.0"),
        ("--delta=1", r"`delta` must be in \(0, 1\)"),
        ("--clip_scale=0", "`clip_scale` must be positive"),
        ("--start_clip_scale=-2", "`start_clip_scale` must be positive"),
        ("--matrix_clip_scale=inf", "`matrix_clip_scale` must be positive"),
        ("--start_share=1", r"`start_share` must be in \(0, 1\)"),
        ("--trial_distance=0.5", r"`trial_distance` must be in \(0, 1/2\)"),
        ("--examples_per_user=199", "`examples_per_user` must be at least 200"),
        ("--head_examples=1", "`head_examples` must be at least `rank`"),
        ("--users_per_block=7", "`users_per_block` must divide `num_users`"),
        ("--boost_users=150", "`users_per_block` must divide `boost_users`"),
        ("--boost_group=3", "`boost_starts` must be a multiple of `boost_group`"),
        ("--floor_rounds=7", r"`floor_rounds` must be at most `rounds` \(6\)"),
        ("--repeats=0", "`repeats` must be at least 1"),
        ("--learning_rate=0", "`learning_rate` must be positive"),
        ("--experiment=a/b", "`experiment` must be a name"),
        ("--output_root=", "`output_root` must not be empty"),
    ],
)
def test_reject(argument, message):
    with pytest.raises(ValueError, match=message):
        build(argument)


def test_every_field_that_decides_is_written():
    config = build()
    left_out = {"output_root", "experiment", "engine", "seed"}
    names = {field.name for field in dataclasses.fields(LinearConfig)}
    assert set(config.to_dict()) == names - left_out


def test_the_preset_is_a_configuration():
    preset = ROOT / "configs" / "centaur" / "linear.flags"
    values = flags.FlagValues()
    run_linear_representation.define_flags(values)
    values(["run_linear_representation", f"--flagfile={preset}"])
    config = run_flags.build_config(LinearConfig, values)
    assert len(config.dims) >= 5 and config.seed == 1


def test_noise_is_shared_with_no_other_setting():
    from scripts import linear_sweeps
    from simulation import seeds

    root = seeds.build_root_seed(3)

    def derive(*arguments):
        study = linear_sweeps.Study(build(*arguments), root)
        population = study._build_population("epsilon", 6, 600)
        return population.derive_noise("start"), population.derive_noise("rounds")

    pairs = [*derive(), *derive("--clip_scale=0.5"), *derive("--epsilons=8,63")]
    assert len(set(pairs)) == 6


def test_without_a_seed_noise_comes_from_entropy():
    from scripts import linear_sweeps
    from simulation import seeds

    populations = [
        linear_sweeps.Study(build(), seeds.build_root_seed(None))._build_population(
            "epsilon", 6, 600
        )
        for _ in range(2)
    ]
    assert [one.derive_noise("start") for one in populations] == [None, None]
    assert not np.allclose(populations[0].truth, populations[1].truth)


def test_bad_input_is_one_line():
    command = [sys.executable, "-m", "scripts.run_linear_representation", "--delta=2"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == process.EXIT_BAD_INPUT
    assert found.stderr.strip() == (
        "run_linear_representation: error: `delta` must be in (0, 1). Found 2.0."
    )


@pytest.mark.slow
def test_the_claims_hold_at_the_bare_command(tmp_path):
    """Minutes: the default sweeps, seeded."""
    from scripts import linear_study

    values = flags.FlagValues()
    run_linear_representation.define_flags(values)
    values(["run_linear_representation", "--seed=1", f"--output_root={tmp_path}"])
    folder = linear_study.run(run_flags.build_config(LinearConfig, values))
    summary = json.loads((folder / "results.json").read_text())
    found = summary["floor_against_dim"]
    assert found["CENTAUR"]["inside"]
    assert summary["floor_against_epsilon"]["inside"]
    # The comparison fails the very claim that CENTAUR meets.
    assert found["normal equations"]["inside"] is False
    rates = summary["starts"]["rates"]
    boosted, single = (rates[way]["trial_distance"] for way in ("boosted", "one trial"))
    assert boosted["low"] > single["rate"]
