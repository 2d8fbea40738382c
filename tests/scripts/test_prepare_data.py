"""Tests for prepare_data: formats end to end, refusals, and what a kill leaves."""

import contextlib
import csv
import dataclasses
import gzip
import json
import pathlib
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest
from absl import flags
from PIL import Image

from scripts import distributed_training, preparation, prepare_data
from scripts.flags import build_config
from scripts.preparation_config import PreparationConfig
from simulation import process
from simulation.population.manifest import read_manifest
from tests.scripts import runs
from tests.simulation.sources import idx_files

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "scripts.prepare_data"]


def parse(*arguments: str) -> PreparationConfig:
    values = flags.FlagValues()
    prepare_data.define_flags(values)
    values(["prepare_data", *arguments])
    return build_config(PreparationConfig, values)


@pytest.fixture
def prepare(tmp_path):
    """Imports into a folder of the test's own."""

    def run(*arguments: str):
        return preparation.run(parse(f"--data_dir={tmp_path / 'data'}", *arguments))

    return run


def write_csv(path: pathlib.Path, *, users: int = 12, rows: int = 10) -> pathlib.Path:
    """Writes a table whose label is the sign of its first column."""
    rng = np.random.default_rng(3)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "a", "b", "label"])
        for user in range(users):
            for a, b in rng.normal(size=[rows, 2]).round(3):
                writer.writerow([f"u{user:02d}", a, b, "up" if a > 0 else "down"])
    return path


def read_rows(path: pathlib.Path) -> list[tuple]:
    with contextlib.closing(sqlite3.connect(path)) as file:
        return file.execute("SELECT * FROM examples ORDER BY rowid").fetchall()


NPZ = ("--format=npz", "--input=.", "--name=x")
IMAGES = ("--format=images", "--input=.", "--name=x")
TABLE = ("--user_column=user", "--label_column=label", "--name=mine")


class TestFlags:
    def test_every_field_is_a_flag_and_the_other_way_round(self):
        values = flags.FlagValues()
        prepare_data.define_flags(values)
        fields = {field.name for field in dataclasses.fields(PreparationConfig)}
        assert set(values) == fields

    def test_help_answers_at_once(self):
        started = time.monotonic()
        out = subprocess.run(
            [*COMMAND, "--help"], capture_output=True, text=True, cwd=ROOT, check=True
        )
        assert time.monotonic() - started < 2
        assert out.stderr == ""
        assert "--leaf_dataset:" in out.stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "`format` must be given"),
            (["--format=csv"], "`input` must be given"),
            (["--format=csv", "--input=/nowhere"], "Found none at '/nowhere'"),
            (["--format=leaf", "--input=."], "`leaf_dataset` must be given"),
            (["--format=npz", "--input=."], "`name` must be given for format npz"),
            (["--format=idx", "--input=."], "`name` must be given for format idx"),
            (
                ["--format=npz", "--input=.", "--name=x", "--user_column=u"],
                "`user_column` must be unset unless format is csv or parquet",
            ),
            (
                ["--format=idx", "--input=.", "--name=x", "--num_clients=3"],
                "`num_clients` must be unset for idx files without a `partition`",
            ),
            (
                ["--format=idx", "--input=.", "--name=x", "--partition=shards"]
                + ["--writers=w"],
                "`writers` must be unset for idx files with a `partition`",
            ),
            (
                ["--format=idx", "--input=.", "--name=x", "--test_fraction=1"],
                r"`test_fraction` must be in \[0, 1\). Found 1.0",
            ),
            (
                ["--format=cifar", "--input=.", "--partition=dirichlet"]
                + ["--data_alpha=0"],
                "`data_alpha` must be positive. Found 0.0",
            ),
            (
                ["--format=cifar", "--input=.", "--data_alpha=-1"],
                "`data_alpha` must be positive. Found -1.0",
            ),
            (
                ["--format=npz", "--input=.", "--name=x", "--data_seed=-1"],
                "`data_seed` must be >= 0. Found -1",
            ),
            (
                [*NPZ, "--test_fraction=0.6", "--validation_fraction=0.5"],
                "must leave something to train on. Found 0.6 and 0.5",
            ),
            (
                [*NPZ, "--split=source", "--test_fraction=0.2"],
                "`test_fraction` must be unset where the input itself says .* Found "
                "0.2; give --split=user",
            ),
            (
                [*NPZ, "--split=source", "--validation_fraction=0.2"],
                "`validation_fraction` must be unset where the input itself says",
            ),
            (
                [*NPZ, "--image_layout=class"],
                "`image_layout` must be unset unless format is images. Found 'class' "
                "for npz",
            ),
            (
                [*NPZ, "--image_size=64"],
                "`image_size` must be unset unless format is images. Found 64",
            ),
            (
                [*NPZ, "--grayscale"],
                "`grayscale` must be unset unless format is images. Found True",
            ),
            (
                [*IMAGES, "--partition=shards"],
                "`partition` must be unset for images of users. Found 'shards'; give "
                "--image_layout=class",
            ),
            (
                [*IMAGES, "--num_clients=3"],
                "`num_clients` must be unset for images of users. Found 3",
            ),
            (
                [*IMAGES, "--classes_per_client=2"],
                "`classes_per_client` must be unset for images of users. Found 2",
            ),
            (
                [*IMAGES, "--data_alpha=0.5"],
                "`data_alpha` must be unset for images of users. Found 0.5",
            ),
            (
                [*NPZ, f"--data_dir={__file__}"],
                "`data_dir` must be a folder. Found a file at .*test_prepare_data.py",
            ),
        ],
    )
    def test_bad_values_are_named(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            parse(*arguments)

    @pytest.mark.parametrize(
        "arguments",
        [
            [*NPZ, "--test_fraction=0.2", "--data_seed=0"],
            [*NPZ, "--split=user", "--test_fraction=0.2"],
            [*NPZ, "--split=example", "--validation_fraction=0.2"],
            [*NPZ, "--split=source"],
            [*NPZ, "--image_size=32", "--data_dir=/nowhere/yet"],
            [*IMAGES, "--image_size=64", "--grayscale"],
            [*IMAGES, "--image_layout=class", "--partition=shards"]
            + ["--num_clients=3", "--classes_per_client=2"],
            [*IMAGES, "--image_layout=class", "--data_alpha=0.5"],
        ],
    )
    def test_the_same_flags_where_they_have_an_effect(self, arguments):
        assert parse(*arguments).input == "."


class TestFormats:
    def test_a_table_becomes_a_task_that_trains(self, prepare, tmp_path, capsys):
        file = write_csv(tmp_path / "table.csv")
        outcome = prepare("--format=csv", f"--input={file}", *TABLE)
        assert outcome.manifest.classes == ("down", "up")
        assert outcome.manifest.splits == {
            "test": {"users": 12, "examples": 12},
            "train": {"users": 12, "examples": 108},
        }
        assert "mine.sqlite" in capsys.readouterr().out
        trained = distributed_training.run(
            runs.parse(
                *runs.TINY,
                "--task=own",
                "--data_name=mine",
                f"--data_dir={tmp_path / 'data'}",
                "--mechanism=none",
                "--clients_per_round=12",
                "--total_rounds=10",
                "--client_lr=1",
                f"--output_root={tmp_path / 'runs'}",
            )
        )
        out = capsys.readouterr().out
        assert "made of table.csv" in out
        # The sign of a column is learned at once; a guess would have half.
        assert trained.results["none"].final["accuracy"] >= 0.9
        users = (trained.folder / "test_users.csv").read_text().splitlines()
        assert len(users) == 1 + 12
        results = json.loads((trained.folder / "results.json").read_text())
        spread = results["none"]["test_users"]["accuracy"]
        assert spread["clients"] == 12
        assert spread["mean"] == pytest.approx(
            trained.results["none"].final["accuracy"]
        )
        settings = json.loads((trained.folder / "config.json").read_text())
        assert settings["data"]["file"] == "mine.sqlite"
        assert settings["data"]["evaluated"]["examples"] == 12

    def test_arrays(self, prepare, tmp_path):
        x = np.arange(40.0).reshape([10, 4])
        file = tmp_path / "a.npz"
        np.savez(file, x=x, y=np.arange(10) % 3, user=np.arange(10) // 5)
        manifest = prepare("--format=npz", f"--input={file}", "--name=a").manifest
        assert manifest.num_classes == 3
        assert manifest.splits["train"] == {"users": 2, "examples": 8}

    def test_fractions_have_no_effect_where_the_input_divides(self, prepare, tmp_path):
        x = np.arange(40.0).reshape([10, 4])
        half = {"x": x[:5], "y": np.arange(5), "user": np.arange(5)}
        parts = {
            f"{name}_{split}": values
            for name, values in half.items()
            for split in ("train", "test")
        }
        np.savez(tmp_path / "a.npz", **parts)
        arguments = ("--format=npz", f"--input={tmp_path / 'a.npz'}", "--name=a")
        # Only the file tells that it divides.
        for name in ("test_fraction", "validation_fraction"):
            with pytest.raises(process.UserError, match=f"`{name}` must be unset"):
                prepare(*arguments, f"--{name}=0.3")
        assert not (tmp_path / "data").exists()
        divided = prepare(*arguments).manifest.splits
        assert {name: counts["examples"] for name, counts in divided.items()} == {
            "train": 5,
            "test": 5,
        }
        by_user = ("--split=user", "--test_fraction=0.4", "--overwrite")
        splits = prepare(*arguments, *by_user).manifest.splits
        assert {name: counts["users"] for name, counts in splits.items()} == {
            "train": 3,
            "test": 2,
        }

    def test_nothing_for_the_test_is_refused(self, prepare, tmp_path):
        file = write_csv(tmp_path / "table.csv")
        arguments = ("--format=csv", f"--input={file}", *TABLE)
        with pytest.raises(process.UserError, match="none for test by --split=example"):
            prepare(*arguments, "--test_fraction=0")
        assert not list((tmp_path / "data").iterdir())

    def test_images_of_users_and_without(self, prepare, tmp_path):
        rng = np.random.default_rng(0)
        for user in ("ann", "bob"):
            for kind in ("cat", "dog"):
                folder = tmp_path / "by_user" / user / kind
                folder.mkdir(parents=True)
                for number in range(3):
                    pixels = rng.integers(256, size=[8, 8, 3]).astype(np.uint8)
                    Image.fromarray(pixels).save(folder / f"{number}.png")
        size = "--image_size=8"
        both = prepare(
            "--format=images", f"--input={tmp_path / 'by_user'}", "--name=a", size
        )
        assert both.manifest.classes == ("cat", "dog")
        assert both.manifest.splits["train"] == {"users": 2, "examples": 10}
        alone = prepare(
            "--format=images",
            f"--input={tmp_path / 'by_user' / 'ann'}",
            "--name=b",
            size,
            "--image_layout=class",
            "--partition=shards",
            "--num_clients=3",
            "--classes_per_client=2",
        )
        assert alone.manifest.splits["train"]["users"] == 3

    def test_leaf_and_the_same_again(self, prepare, tmp_path, capsys):
        data = {
            "users": ["a", "b"],
            "num_samples": [2, 3],
            "user_data": {
                "a": {"x": [[0.5, 1.0], [2.0, 3.0]], "y": [0, 1]},
                "b": {"x": [[0.0, 1.0]] * 3, "y": [1, 1, 0]},
            },
        }
        file = tmp_path / "all_data.json.gz"
        file.write_bytes(gzip.compress(json.dumps(data).encode()))
        arguments = ("--format=leaf", "--leaf_dataset=synthetic", f"--input={file}")
        first = prepare(*arguments)
        assert first.path.name == "synthetic_leaf.sqlite" and not first.was_there
        assert prepare(*arguments).was_there
        assert "Already there" in capsys.readouterr().out
        with pytest.raises(process.UserError, match="give --overwrite"):
            prepare(*arguments, "--split=user")
        changed = prepare(*arguments, "--split=user", "--overwrite").manifest
        assert changed.splits["train"]["users"] == 1

    def test_bad_records_end_it_or_are_listed(self, prepare, tmp_path, capsys):
        file = write_csv(tmp_path / "table.csv")
        lines = file.read_text().splitlines()
        lines[5] = "u00,1.0,two,up"
        file.write_text("\n".join(lines) + "\n")
        with pytest.raises(process.UserError, match=r"table.csv, line 6: .*'two'"):
            prepare("--format=csv", f"--input={file}", *TABLE)
        assert not list((tmp_path / "data").iterdir())
        outcome = prepare("--format=csv", f"--input={file}", *TABLE, "--skip_bad")
        assert outcome.manifest.num_skipped == 1
        assert "line 6" in outcome.manifest.skipped[0]
        assert sum(c["examples"] for c in outcome.manifest.splits.values()) == 119
        assert "1 bad records were left out" in capsys.readouterr().out


class TestProgram:
    def test_an_error_is_one_line(self, tmp_path):
        file = tmp_path / "table.csv"
        file.write_text("user,a,label\n")
        done = subprocess.run(
            [*COMMAND, "--format=csv", f"--input={file}", *TABLE]
            + [f"--data_dir={tmp_path / 'data'}"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=120,
        )
        assert done.returncode == 2
        last = done.stderr.replace("\r", "\n").strip().splitlines()[-1]
        assert last.startswith("prepare_data: error: ") and "table.csv" in last
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        "how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
    )
    def test_what_was_killed_goes_on(self, prepare, tmp_path, how):
        file = write_csv(tmp_path / "table.csv", users=200, rows=300)
        arguments = ["--format=csv", f"--input={file}", *TABLE]
        folder = tmp_path / "killed"
        child = subprocess.Popen(
            [*COMMAND, *arguments, f"--data_dir={folder}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        staging = folder / "mine.sqlite.staging"
        deadline = time.monotonic() + 60
        while not (staging.exists() and staging.stat().st_size > 400_000):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        child.send_signal(how)
        _, error = child.communicate(timeout=60)
        assert child.returncode != 0
        names = {path.name.split(".sqlite")[-1] for path in folder.iterdir()}
        assert ".staging" in names and "" not in names, "finished before the signal"
        if how is signal.SIGINT:
            assert "the same command goes on from there" in error
        again = preparation.run(parse(*arguments, f"--data_dir={folder}"))
        whole = prepare(*arguments)
        assert read_rows(again.path) == read_rows(whole.path)
        assert not staging.exists()
        manifest = read_manifest(folder / "mine.manifest.json")
        assert manifest == whole.manifest


def test_digits_without_writers_are_divided(tmp_path, prepare):
    """As EMNIST's files of digits are."""
    rng, folder = np.random.default_rng(0), tmp_path / "emnist"
    folder.mkdir()
    for split, count in (("train", 60), ("test", 30)):
        stem = folder / f"emnist-digits-{split}"
        images = rng.integers(256, size=[count, 28, 28])
        idx_files.write(stem.with_name(f"{stem.name}-images-idx3-ubyte"), images)
        labels = np.arange(count) % 6
        idx_files.write(stem.with_name(f"{stem.name}-labels-idx1-ubyte"), labels)
    common = ("--format=idx", f"--input={folder}", "--name=x")
    with pytest.raises(process.UserError, match="names no writers.*`partition`"):
        prepare(*common)
    options = ("--num_clients=5", "--classes_per_client=2")
    outcome = prepare(*common, "--partition=shards", *options)
    counts = outcome.manifest.splits
    train = counts["digits_only_train"]
    # Six classes of ten images are twelve shards of five, of which ten are dealt.
    assert (train["users"], train["examples"]) == (5, 50)
    assert counts["digits_only_test"]["users"] == 5
