"""Tests for the private study: equal epsilons, settings, and a tiny study."""

import contextlib
import csv
import io
import json
import math
import sys

import numpy as np
import pytest

from scripts import upcycled_study, upcycled_study_private
from scripts.upcycled_study_claims import Verdict
from scripts.upcycled_study_config import Algorithm, Noise
from scripts.upcycled_study_private import PrivateRow, Setting
from scripts.upcycled_study_training import build_perturbation
from simulation import execution
from tests.scripts.upcycled_studies import TINY, parse, write_files
from upcycled_fl import accounting

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


def compute_epsilon(noise: Noise, level: float, *, mu: float, releases: int) -> float:
    perturbation = build_perturbation(noise, level, mu=mu, model_clip=10.0)
    assert perturbation is not None
    return accounting.compute_privacy(
        perturbation,
        num_examples=[100],
        num_releases=[releases],
        accountant=accounting.Accountant.AS_PUBLISHED,
        delta=1e-3 if noise is Noise.OUTPUT else None,
    ).epsilon_max


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0])
@pytest.mark.parametrize(("noise", "level"), [("output", 0.8), ("objective", 40.0)])
def test_twice_the_releases_cost_the_same_at_the_equal_level(noise, level, mu):
    noise = Noise(noise)
    equal = upcycled_study_private.compute_equal_level(noise, level, mu=mu)
    half = compute_epsilon(noise, level, mu=mu, releases=40)
    assert compute_epsilon(noise, equal, mu=mu, releases=80) == pytest.approx(half)
    assert compute_epsilon(noise, level, mu=mu, releases=80) > 1.2 * half


def test_noise_that_no_level_can_halve_is_refused():
    with pytest.raises(ValueError, match="`noise_levels` of objective noise must be"):
        upcycled_study_private.compute_equal_level(Noise.OBJECTIVE, 0.5, mu=0.1)


def test_settings_have_the_rounds_and_noises_of_their_roles():
    config = parse(*STUDY, "--total_rounds=8", "--seeds=1,2")
    settings = upcycled_study_private.list_settings(config, Noise.OUTPUT, 0.3, 1.5)
    found = {
        role: (one.algorithm, one.rounds, one.noise_level, one.server_factor)
        for role, one in settings.items()
    }
    fedprox = Algorithm.FEDPROX
    assert found == {
        "upcycled": (Algorithm.UPCYCLED, 4, 0.8, 1.0),
        "paper": (fedprox, 8, 1.0, 1.0),
        "steps": (fedprox, 8, pytest.approx(0.8 * math.sqrt(2)), 1.0),
        "rounds": (fedprox, 4, 0.8, 1.0),
        "tuned": (fedprox, 4, 0.8, 1.5),
    }
    config = parse(*STUDY, "--noequal_epsilon")
    settings = upcycled_study_private.list_settings(config, Noise.OUTPUT, 0.3, 1.5)
    assert list(settings) == ["upcycled", "paper"]
    assert upcycled_study_private.list_factor_runs(config, {"iid": 0.1}) == []


def build_row(title: str, accuracy: tuple[float, ...], epsilon: float) -> PrivateRow:
    setting = Setting(
        title=title, algorithm=Algorithm.FEDPROX, rounds=1, noise_level=1.0
    )
    return PrivateRow(
        data="iid",
        noise=Noise.OUTPUT,
        mu=0.3,
        setting=setting,
        accuracy=accuracy,
        epsilons={"as_published": (epsilon, 0.0, 1.0, "")},
    )


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [
        ((0.50, 0.41), Verdict.LEADS),
        ((0.70, 0.61), Verdict.TRAILS),
        ((0.50, 0.60), Verdict.UNDECIDED),
    ],
)
def test_verdicts_by_hand(theirs, verdict):
    """Of two seeds the interval is mean +- 12.706 |a - b| / 2."""
    config = parse(
        *STUDY, "--noises=output", "--noise_levels=1", "--baseline_noise_levels=2"
    )
    ours = (0.60, 0.51)
    rows = [
        build_row("Upcycled-FL", ours, 1.0),
        build_row("FedProx, the paper's noise", theirs, 1.5),
    ]
    [found] = upcycled_study_private.compare(config, rows)
    assert found.verdict is verdict and found.saves
    differences = np.subtract(ours, theirs)
    assert found.difference.mean == pytest.approx(differences.mean())
    half = 12.7062 * abs(differences[0] - differences[1]) / 2
    assert found.difference.high == pytest.approx(differences.mean() + half, rel=1e-4)


class TestStudy:
    def test_every_figure_stands_by_its_accountant(self, finished):
        outcome, out = finished
        for label in LABELS.values():
            assert label in out
        assert "no epsilon holds against" in out
        summary = json.loads((outcome.folder / "results.json").read_text())
        assert len(summary["private"]) == 2 * 5
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
            assert row["epsilons"]["as_published"]["max"] == pytest.approx(expected)
        by_title = {row["title"]: row["epsilons"]["proven"]["max"] for row in rows}
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
