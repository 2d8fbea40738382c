"""Tests for the private study: equal epsilons, settings, and a tiny study."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import sys

import numpy as np
import pytest

from scripts import upcycled_study, upcycled_study_data, upcycled_study_private
from scripts.paired_difference import Verdict
from scripts.upcycled_study_config import Algorithm, Noise
from scripts.upcycled_study_private import Epsilons, PrivateRow, Role
from simulation import execution
from tests.scripts.upcycled_studies import TINY, parse, write_files

STUDY = (*TINY, "--study=private", "--client_lr=0.05", "--server_factor_grid=1,2")
LABELS = {
    "output": "as published, not proven for clipped SGD models",
    "objective": "as published, not proven for models trained by SGD",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A tiny study, with what was printed."""
    folder = tmp_path_factory.mktemp("private")
    write_files(folder)
    out = io.StringIO()
    with execution.use_execution_context(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution, "use_execution_context", contextlib.nullcontext)
        patch.setattr(sys, "stdout", out)
        outcome = upcycled_study.run(
            parse(
                *STUDY,
                "--clients_per_round=5",
                f"--data_folder={folder}",
                f"--output_root={folder}",
                "--experiment=run",
            )
        )
    return outcome, out.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_files(folder)
    config = parse(*STUDY, f"--data_folder={folder}")
    return upcycled_study_data.load_data(config)["iid"]


def build_runs(data, role, *arguments, noise=Noise.OUTPUT, mu=0.3, factor=1.0):
    config = parse(*STUDY, "--total_rounds=12", "--noise_levels=0.8,200", *arguments)
    runs = [
        upcycled_study_private.build_run(
            config, data, noise, mu, role, client_lr=0.1, seed=seed, factor=factor
        )
        for seed in config.seeds
    ]
    return config, runs


@pytest.mark.parametrize("per_round", [2, 5])
@pytest.mark.parametrize("noise", list(Noise))
def test_twice_the_rounds_cost_the_same_at_the_equal_level(data, noise, per_round):
    """For the clients that really join: of 5 users not all join equally often."""
    flag = f"--clients_per_round={per_round}"
    config, ours = build_runs(data, Role.UPCYCLED, flag, noise=noise)
    _, theirs = build_runs(data, Role.STEPS, flag, noise=noise)
    for one, other in zip(ours, theirs, strict=True):
        left, right, louder = (
            upcycled_study_private.compute_epsilons(config, data, [run])["as_published"]
            for run in (
                one,
                other,
                dataclasses.replace(other, noise_level=one.noise_level),
            )
        )
        assert (one.rounds, other.rounds) == (6, 12)
        assert right.largest == pytest.approx(left.largest, rel=1e-4)
        assert louder.largest > 1.2 * left.largest


def test_noise_that_nothing_can_make_equal_is_refused(data):
    with pytest.raises(ValueError, match="`noise_levels` of objective noise must be"):
        build_runs(data, Role.STEPS, "--noise_levels=1,.5", noise=Noise.OBJECTIVE)


def test_runs_have_the_rounds_and_noises_of_their_roles(data):
    found = {}
    for role in Role:
        _, (run, _) = build_runs(data, role, "--clients_per_round=5", factor=1.5)
        found[role] = (run.algorithm, run.rounds, run.noise_level, run.server_factor)
    fedprox = Algorithm.FEDPROX
    assert found == {
        Role.UPCYCLED: (Algorithm.UPCYCLED, 6, 0.8, 1.0),
        Role.PAPER: (fedprox, 12, 1.0, 1.0),
        Role.STEPS: (fedprox, 12, pytest.approx(0.8 * math.sqrt(2)), 1.0),
        Role.ROUNDS: (fedprox, 6, 0.8, 1.0),
        Role.TUNED: (fedprox, 6, 0.8, 1.5),
    }
    config = parse(*STUDY, "--noequal_epsilon")
    assert upcycled_study_private.list_roles(config) == [Role.UPCYCLED, Role.PAPER]
    assert upcycled_study_private.list_factor_runs(config, {}, {}) == []


def build_row(role: Role, accuracy: tuple[float, ...], epsilon: float) -> PrivateRow:
    return PrivateRow(
        data="iid",
        noise=Noise.OUTPUT,
        mu=0.3,
        role=role,
        rounds=1,
        noise_level=1.0,
        server_factor=1.0,
        accuracy=accuracy,
        epsilons={
            "as_published": Epsilons(
                mean=epsilon, least=0.0, largest=epsilon, standing=""
            )
        },
    )


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [
        ((0.50, 0.41), Verdict.LEADS),
        ((0.70, 0.61), Verdict.TRAILS),
        ((0.50, 0.60), Verdict.UNDECIDED),
    ],
)
@pytest.mark.parametrize(
    ("epsilon", "order"), [(1.5, "smaller"), (1.0, "equal"), (0.9, "larger")]
)
def test_verdicts_by_hand(theirs, verdict, epsilon, order):
    """Of two seeds the interval is mean +- 12.706 |a - b| / 2."""
    config = parse(
        *STUDY, "--noises=output", "--noise_levels=1", "--baseline_noise_levels=2"
    )
    ours = (0.60, 0.51)
    rows = [build_row(Role.UPCYCLED, ours, 1.0), build_row(Role.PAPER, theirs, epsilon)]
    [found] = upcycled_study_private.compare(config, rows)
    assert found.verdict is verdict and found.order == order
    differences = np.subtract(ours, theirs)
    assert found.difference.mean == pytest.approx(differences.mean())
    half = 12.7062 * abs(differences[0] - differences[1]) / 2
    assert found.difference.high == pytest.approx(differences.mean() + half, rel=1e-4)


@pytest.mark.slow
class TestStudy:
    def test_every_figure_stands_by_its_accountant(self, finished):
        outcome, out = finished
        for label in LABELS.values():
            assert label in out
        assert "no epsilon holds against" in out and "which no epsilon covers" in out
        summary = json.loads((outcome.folder / "results.json").read_text())
        assert len(summary["private"]) == 2 * 5
        assert "no epsilon holds against" in summary["privacy"]
        for row in summary["private"]:
            standings = {k: v["standing"] for k, v in row["epsilons"].items()}
            assert standings["as_published"] == LABELS[row["noise"]]
            assert ("proven" in standings) == (row["noise"] == "output")
        assert (outcome.folder / "private.png").stat().st_size > 1000

    def test_epsilons_are_theorem_c1s(self, finished):
        """Everyone joins every round; users have 16 examples each."""
        outcome, _ = finished
        summary = json.loads((outcome.folder / "results.json").read_text())
        rows = [row for row in summary["private"] if row["noise"] == "output"]
        for row in rows:
            a = row["rounds"] * 10**2 / (2 * row["noise_level"] ** 2 * 16**2)
            expected = 2 * math.sqrt(a * math.log(1e3)) + a
            assert row["epsilons"]["as_published"]["largest"] == pytest.approx(expected)
        by_title = {row["title"]: row["epsilons"]["proven"]["largest"] for row in rows}
        assert by_title["Upcycled-FL"] == pytest.approx(
            by_title["FedProx, equal epsilon"]
        )
        assert by_title["Upcycled-FL"] < by_title["FedProx, the paper's noise"]

    def test_noise_is_there_and_of_each_run_alone(self, finished):
        outcome, _ = finished
        text = (outcome.folder / "results.csv").read_text()
        rows = list(csv.DictReader(io.StringIO(text)))
        found = {row["train_loss"] for row in rows}
        assert len(found) == len(rows)
        assert {row["noise"] for row in rows} == {"output", "objective"}
