"""Tests for the mean-estimation study's configuration, grid and presets."""

import pathlib

import pytest
from absl import flags

from distributed_dp.accounting import Mechanism, NormBound
from distributed_dp.rotation import RotationKind
from scripts import flags as run_flags
from scripts import mean_estimation_plan, run_mean_estimation
from scripts.mean_estimation_config import ROTATIONS, StudyConfig, build_cells

ROOT = pathlib.Path(__file__).parents[2]
PRESETS = sorted((ROOT / "configs" / "distributed_dp").glob("mean_estimation*.flags"))


def parse(*arguments: str) -> StudyConfig:
    values = flags.FlagValues()
    run_mean_estimation.define_flags(values)
    values(["program", *arguments])
    return run_flags.build_config(StudyConfig, values)


class TestFlags:
    def test_defaults_are_the_study(self):
        config = parse()
        assert config.mechanism == ("ddgauss",)
        assert config.num_clients == (100, 1000)
        assert (config.dim, config.clip) == ((250,), (10.0,))
        assert (config.delta, config.repeats, config.seed) == (1e-5, 50, None)

    def test_lists_become_axes(self):
        config = parse("--bits=10, 12,14", "--epsilon=0.5", "--rotation=dft,identity")
        assert config.bits == (10, 12, 14)
        assert config.epsilon == (0.5,)
        assert config.rotation == ("dft", "identity")

    def test_rotations_are_the_librarys(self):
        assert set(ROTATIONS) == {kind.value for kind in RotationKind}

    @pytest.mark.parametrize("argument", ["--bits=10,x", "--epsilon=", "--dim=2.5"])
    def test_what_is_no_number_is_refused(self, argument):
        with pytest.raises(flags.IllegalFlagValueError):
            parse(argument)

    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ("--clip=0", "`clip` must be positive and finite. Found 0.0."),
            ("--clip=10,nan", "`clip` must be positive and finite. Found nan."),
            ("--epsilon=1,-1", "`epsilon` must be positive and finite. Found -1.0."),
            ("--num_stddevs=0", "`num_stddevs` must be positive and finite. Found 0."),
            ("--delta=0", r"`delta` must be in \(0, 1\). Found 0.0."),
            ("--delta=1", r"`delta` must be in \(0, 1\). Found 1.0."),
            ("--delta=nan", r"`delta` must be in \(0, 1\). Found nan."),
            ("--beta=1", r"`beta` must be in \[0, 1\). Found 1.0."),
            ("--num_clients=0", "`num_clients` must be at least 1. Found 0."),
            ("--dim=-3", "`dim` must be at least 1. Found -3."),
            ("--bits=0", r"`bits` must be in \[1, 32\]. Found 0."),
            ("--bits=33", r"`bits` must be in \[1, 32\]. Found 33."),
            ("--bits=10,10", "`bits` must hold each value once."),
            ("--repeats=1", "`repeats` must be at least 2"),
            ("--workers=0", "`workers` must be positive"),
            ("--mechanism=laplace", "`mechanism` must be one of ddgauss, .*'laplace'"),
            ("--rotation=spiral", "`rotation` must be one of hadamard, .*'spiral'"),
            ("--norm_bound=none", "`norm_bound` must be one of worst_case, .*'none'"),
            ("--output_root=", "`output_root` must not be empty"),
        ],
    )
    def test_what_is_out_of_range_is_refused(self, argument, message):
        with pytest.raises(ValueError, match=message):
            parse(argument)


class TestGrid:
    def test_every_combination_is_one_cell(self):
        config = parse(
            "--mechanism=ddgauss,skellam", "--rotation=dft,identity", "--bits=8,9,10"
        )
        cells = build_cells(config)
        # Mechanisms, rotations, norm bounds, n, k, B, epsilons.
        assert len(cells) == 2 * 2 * 2 * 2 * 2 * 3 * 2
        assert len({cell.key for cell in cells}) == len(cells)

    def test_the_gaussian_has_neither_bits_nor_rotation(self):
        config = parse("--mechanism=gaussian", "--bits=8,9", "--rotation=dft,identity")
        cells = build_cells(config)
        assert len(cells) == 2 * 2
        assert {cell.bits for cell in cells} == {None}
        assert {cell.mechanism for cell in cells} == {Mechanism.GAUSSIAN}

    def test_choices_become_enums(self):
        [cell] = build_cells(
            parse(
                "--norm_bound=optimistic",
                "--num_clients=5",
                "--num_stddevs=3",
                "--bits=8",
                "--epsilon=2",
            )
        )
        assert cell.norm_bound is NormBound.OPTIMISTIC
        assert cell.setting.population == (5, 250, 10.0)


class TestPresets:
    def test_there_are_some(self):
        assert len(PRESETS) >= 3

    @pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
    def test_header_says_what_to_run_and_expect(self, preset):
        header = [
            line
            for line in preset.read_text("utf-8").splitlines()
            if line.startswith("#")
        ]
        text = "\n".join(header)
        assert "python -m scripts.run_mean_estimation" in text
        assert preset.relative_to(ROOT).as_posix() in text
        for word in ("Setting", "Expected", "Runtime"):
            assert f"# {word}" in text
        assert "EXPECTED" not in text and "RUNTIME" not in text

    @pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
    def test_it_is_a_grid_with_a_feasible_cell(self, preset, monkeypatch):
        monkeypatch.chdir(ROOT)
        config = parse(f"--flagfile={preset}")
        assert config.seed is not None
        cells = build_cells(config)
        for cell in (cells[0], cells[-1]):
            plan = mean_estimation_plan.build_plan(
                cell, delta=config.delta, beta=config.beta
            )
            assert plan.problem is None
