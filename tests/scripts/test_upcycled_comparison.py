"""Tests for run_upcycled_comparison: what is compared, choices, and a tiny one."""

import csv
import io
import json

import pytest
from absl import flags

from scripts import run_upcycled_comparison, upcycled_comparison
from scripts.flags import build_config
from scripts.upcycled_comparison import Outcome
from scripts.upcycled_comparison_config import ComparisonConfig, Variant

TINY = ("--total_rounds=2", "--seeds=1,2", "--server_lrs=1", "--eval_every=1")


def parse(*arguments: str) -> ComparisonConfig:
    values = flags.FlagValues()
    run_upcycled_comparison.define_flags(values)
    values(["run_upcycled_comparison", *arguments])
    return build_config(ComparisonConfig, values)


def build_outcome(variant=Variant.BASELINE, seed=1, **changes) -> Outcome:
    values = {
        "server_lr": 1.0,
        "rounds": 4,
        "metric": 0.5,
        "test_loss": 1.0,
        "train_loss": 1.0,
        "epsilon": 6.0,
        "epsilon_name": "of whole users (proven)",
        "curve": ((4, 0.5),),
    }
    return Outcome(variant=variant, seed=seed, **{**values, **changes})


class TestConfig:
    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--seed=1", "`seed` must be unset"),
            ("--noupcycled", "`upcycled` must be true"),
            ("--total_rounds=5", "`total_rounds` must be even"),
            ("--seeds=1", "`seeds` must be at least 2"),
            ("--seeds=1,1", "`seeds` must be at least 2 different"),
            ("--seeds=0,1", "`tuning_seed` must not be among"),
            ("--server_lrs=-1", "`server_lrs` must be positive"),
            ("--diagnostics=off", "`diagnostics` must be on"),
            ("--compare_central", "`compare_central` off"),
        ],
    )
    def test_what_is_refused(self, flag, message):
        with pytest.raises(ValueError, match=message):
            parse(flag)

    @pytest.mark.parametrize(
        "flags_", [["--client_stddev=1", "--mechanism=none"], ["--client_epsilon=2"]]
    )
    def test_noise_that_is_not_at_equal_epsilon(self, flags_):
        with pytest.raises(ValueError, match="^`client_epsilon` must be given with"):
            parse("--perturbation=output", *flags_)

    def test_half_the_rounds_and_the_baseline(self):
        config = parse("--total_rounds=10")
        for variant in Variant:
            run = config.build_run(variant, 3, server_lr=1.5)
            assert run.total_rounds == (5 if variant.is_half else 10)
            assert run.upcycled == variant.is_upcycled
            assert (run.seed, run.server_lr) == (3, 1.5)
            assert run.epsilon == config.epsilon and run.delta == config.delta
        names = {config.build_run(variant, 3).experiment for variant in Variant}
        assert len(names) == len(Variant)


class TestChoices:
    def test_the_rate_is_chosen_by_the_training_loss_alone(self):
        trials = [
            build_outcome(server_lr=1.0, train_loss=0.5, metric=0.9, test_loss=0.1),
            build_outcome(server_lr=2.0, train_loss=0.4, metric=0.1, test_loss=9.0),
            build_outcome(server_lr=4.0, train_loss=float("nan")),
        ]
        assert upcycled_comparison.choose_rate(trials) == 2.0

    def test_differences_are_paired_by_seed(self):
        """(.1, .1) is certain; (.2, 0) is not: its half width is 1.27."""
        outcomes = [
            build_outcome(Variant.UPCYCLED, 1, metric=0.6),
            build_outcome(Variant.UPCYCLED, 2, metric=0.4),
            build_outcome(Variant.BASELINE, 2, metric=0.3),
            build_outcome(Variant.BASELINE, 1, metric=0.5),
            build_outcome(Variant.TUNED, 1, metric=0.4),
            build_outcome(Variant.TUNED, 2, metric=0.4),
        ]
        compare = upcycled_comparison.compare
        text, verdict = compare(outcomes, Variant.UPCYCLED, Variant.BASELINE)
        assert text == "+0.1000 (+0.1000 to +0.1000)" and verdict == "leads"
        text, verdict = compare(outcomes, Variant.UPCYCLED, Variant.TUNED)
        assert text == "+0.1000 (-1.1706 to +1.3706)" and verdict == "undecided"


@pytest.mark.slow
def test_a_tiny_comparison(tmp_path, capsys):
    config = parse(*TINY, f"--output_root={tmp_path}", "--experiment=one")
    outcomes = upcycled_comparison.run(config)
    assert len(outcomes) == 2 * len(Variant)
    by_variant = {outcome.variant: outcome for outcome in outcomes}
    for variant, outcome in by_variant.items():
        # The even step is not a release, and half the releases cost the same target.
        assert outcome.rounds == (1 if variant.is_half else 2)
        assert 5.9 < outcome.epsilon <= 6
        assert outcome.epsilon_name == "of whole users (proven)"
    out = capsys.readouterr().out
    assert "of whole users (proven)" in out and "undecided" in out
    rows = list(
        csv.DictReader(io.StringIO((tmp_path / "one/comparison.csv").read_text()))
    )
    assert len(rows) == len(outcomes)
    summary = json.loads((tmp_path / "one/comparison.json").read_text())
    assert len(summary["comparisons"]) == 6
    assert (tmp_path / "one/comparison.png").stat().st_size > 1000
    # Once more: nothing is trained again, and the same comes out.
    assert upcycled_comparison.run(config) == outcomes
