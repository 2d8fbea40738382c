"""Tests for the mean-estimation study's measurements: right ones pass, wrong ones not.

Errors of a repeat are means of d squares, so the ratio of two means over R repeats has
a relative standard deviation of about sqrt(2 / (d R)). Limits are 5 of them: a right
mechanism fails with probability 6e-7.
"""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from distributed_dp.accounting import Mechanism, NormBound
from scripts import mean_estimation
from scripts.mean_estimation_config import Cell, Setting
from scripts.mean_estimation_plan import (
    build_baseline,
    build_codec,
    build_plan,
    calibrate_distributed,
)
from simulation import seeds

DELTA = 1e-5
BETA = math.exp(-0.5)
SETTING = Setting(num_clients=12, dim=60, clip=10.0, epsilon=3.0)
# Enough that XLA compiles the cell.
REPEATS = 500
# So few that it does not, for what is far off.
FEW_REPEATS = 40


@pytest.fixture
def root(seed: np.ndarray) -> seeds.RootSeed:
    return seeds.build_root_seed(int(seed[0]))


def build_cell(**changes) -> Cell:
    cell = Cell(
        mechanism=Mechanism.DDGAUSS,
        rotation="hadamard",
        norm_bound=NormBound.WORST_CASE,
        setting=SETTING,
        num_stddevs=4.0,
        bits=16,
    )
    return dataclasses.replace(cell, **changes)


def measure_ratio(
    cell: Cell,
    root: seeds.RootSeed,
    *,
    repeats: int,
    stddev_factor: float = 1.0,
) -> mean_estimation.Interval:
    """Returns the ratio to the central Gaussian; a factor other than 1 is a defect."""
    parameters = calibrate_distributed(cell, delta=DELTA, beta=BETA)
    parameters = dataclasses.replace(
        parameters, local_stddev=stddev_factor * parameters.local_stddev
    )
    measurement = mean_estimation.measure_codec(
        build_codec(cell, parameters),
        cell.setting.population,
        key=cell.key,
        root=root,
        repeats=repeats,
    )
    baseline = build_baseline(cell.setting, delta=DELTA)
    [central] = mean_estimation.measure_central(
        [baseline.same_accountant.central_stddev],
        cell.setting.population,
        keys=["central"],
        root=root,
        repeats=repeats,
    )
    return mean_estimation.compute_ratio_interval(measurement.errors, central)


def compute_tolerance(repeats: int) -> float:
    return 5 * math.sqrt(2 / (SETTING.dim * repeats))


class TestRatio:
    @pytest.mark.parametrize("mechanism", [Mechanism.DDGAUSS, Mechanism.SKELLAM])
    def test_enough_bits_reach_the_central_gaussian(self, mechanism, root):
        ratio = measure_ratio(build_cell(mechanism=mechanism), root, repeats=REPEATS)
        assert ratio.value == pytest.approx(1, abs=compute_tolerance(REPEATS))
        assert ratio.low < ratio.value < ratio.high

    @pytest.mark.parametrize(
        ("factor", "repeats"),
        [
            pytest.param(
                math.sqrt(SETTING.num_clients), FEW_REPEATS, id="central noise a client"
            ),
            pytest.param(
                1 / math.sqrt(SETTING.num_clients), FEW_REPEATS, id="a root too many"
            ),
            pytest.param(1.05, REPEATS, id="5 % too much"),
        ],
    )
    def test_wrong_noise_is_rejected(self, factor, repeats, root):
        ratio = measure_ratio(build_cell(), root, repeats=repeats, stddev_factor=factor)
        assert ratio.value != pytest.approx(1, abs=compute_tolerance(repeats))
        assert not ratio.low < 1 < ratio.high

    def test_few_bits_cost_and_a_larger_k_costs_more(self, root):
        narrow, wide = (
            measure_ratio(build_cell(bits=6, num_stddevs=k), root, repeats=FEW_REPEATS)
            for k in (2.0, 4.0)
        )
        # The noise alone is 1.62 and 8.76 times the central Gaussian's.
        assert narrow.low > 1.3
        assert wide.low > 3
        assert wide.low > narrow.high

    def test_optimistic_bound_wraps_around_at_small_k(self, root):
        setting = dataclasses.replace(SETTING, num_clients=60, epsilon=6.0)
        cell = build_cell(norm_bound=NormBound.OPTIMISTIC, setting=setting)
        narrow = measure_ratio(
            dataclasses.replace(cell, num_stddevs=2.0), root, repeats=FEW_REPEATS
        )
        wide = measure_ratio(cell, root, repeats=FEW_REPEATS)
        assert narrow.low > 1.15
        assert wide.value == pytest.approx(1, abs=compute_tolerance(FEW_REPEATS))
        assert wide.high < narrow.low


class TestVectors:
    def test_norms_are_the_radius(self, root):
        vectors = mean_estimation.sample_vectors(root, (50, 20, 3.0), repeat=0)
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 3, rtol=1e-6)

    def test_law_is_uniform_on_the_sphere(self, root):
        """(1 + x_1 / c) / 2 has law Beta((d - 1) / 2, (d - 1) / 2)."""
        vectors = mean_estimation.sample_vectors(root, (20000, 5, 2.0), repeat=0)
        for column in (0, 4):
            uniform = (1 + vectors[:, column] / 2) / 2
            assert stats.kstest(uniform, stats.beta(2, 2).cdf).pvalue > 1e-6
            # The same test rejects a law that is off: a coordinate in dimension 6.
            assert stats.kstest(uniform, stats.beta(2.5, 2.5).cdf).pvalue < 1e-6

    def test_repeats_and_populations_differ_and_clips_share_directions(self, root):
        first = mean_estimation.sample_vectors(root, (4, 3, 1.0), repeat=0)
        again = mean_estimation.sample_vectors(root, (4, 3, 1.0), repeat=0)
        other = mean_estimation.sample_vectors(root, (4, 3, 1.0), repeat=1)
        scaled = mean_estimation.sample_vectors(root, (4, 3, 2.0), repeat=0)
        np.testing.assert_array_equal(first, again)
        assert np.all(first != other)
        np.testing.assert_allclose(scaled, 2 * first, rtol=1e-6)


class TestEstimator:
    def test_without_noise_it_is_the_mean_up_to_rounding(self, root):
        cell = build_cell()
        parameters = calibrate_distributed(cell, delta=DELTA, beta=BETA)
        exact = dataclasses.replace(parameters, local_stddev=0.0)
        measurement = mean_estimation.measure_codec(
            build_codec(cell, exact),
            SETTING.population,
            key=cell.key,
            root=root,
            repeats=2,
        )
        rounding = parameters.granularity**2 / 4 / SETTING.num_clients
        assert np.all(measurement.errors < 2 * rounding)

    def test_compiling_changes_no_random_bit(self, root):
        codec = build_plan(build_cell(), delta=DELTA, beta=BETA).codec
        vectors = mean_estimation.sample_vectors(root, SETTING.population, repeat=0)
        rotation_seed, noise_seed = np.int32([1, 2]), np.int32([3, 4])
        plain, compiled = (
            mean_estimation.build_estimator(
                codec, num_clients=SETTING.num_clients, compiled=is_compiled
            )(vectors, rotation_seed, noise_seed)[0]
            for is_compiled in (False, True)
        )
        # Float32 sums in another order may move single roundings by one step.
        assert np.linalg.norm(plain - compiled) < 1e-2 * np.linalg.norm(plain)

    def test_cells_have_noise_of_their_own(self, root):
        cell = build_cell()
        other = dataclasses.replace(cell, num_stddevs=4.5)
        assert cell.key != other.key
        codec = build_plan(cell, delta=DELTA, beta=BETA).codec
        errors = [
            mean_estimation.measure_codec(
                codec, SETTING.population, key=key, root=root, repeats=2
            ).errors
            for key in (cell.key, cell.key, other.key)
        ]
        np.testing.assert_array_equal(errors[0], errors[1])
        assert np.all(errors[0] != errors[2])

    def test_an_exception_of_the_check_ends_it(self, root):
        def stop() -> None:
            raise InterruptedError

        with pytest.raises(InterruptedError):
            mean_estimation.measure_central(
                [1.0], (2, 2, 1.0), keys=["a"], root=root, repeats=2, check_stop=stop
            )


class TestCentral:
    def test_error_is_the_variance_of_the_mean(self, root):
        [errors] = mean_estimation.measure_central(
            [7.0], (10, 40, 1.0), keys=["a"], root=root, repeats=100
        )
        draws = 100 * mean_estimation.CENTRAL_DRAWS * 40
        tolerance = 5 * math.sqrt(2 / draws)
        assert np.mean(errors) / 0.49 == pytest.approx(1, abs=tolerance)

    def test_analytic_gaussian_needs_less_noise(self):
        baseline = build_baseline(SETTING, delta=DELTA)
        fraction = (
            baseline.analytic.central_stddev / baseline.same_accountant.central_stddev
        )
        assert 0.9 < fraction < 1


class TestIntervals:
    def test_mean_interval_is_students(self, rng):
        values = rng.normal(size=9)
        interval = mean_estimation.compute_mean_interval(values + 10)
        expected = stats.t.interval(
            0.95, 8, loc=np.mean(values) + 10, scale=stats.sem(values)
        )
        np.testing.assert_allclose((interval.low, interval.high), expected)

    def test_intervals_cover_as_often_as_they_say(self, rng):
        numerators = rng.chisquare(50, size=(2000, 25)) * 1.5
        denominators = rng.chisquare(200, size=(2000, 25)) / 4
        found = [
            mean_estimation.compute_ratio_interval(x, y)
            for x, y in zip(numerators, denominators, strict=True)
        ]
        covered = np.mean([f.low < 1.5 < f.high for f in found])
        # 5 standard deviations of a proportion, and 0.5 % for the delta method.
        assert covered == pytest.approx(0.95, abs=5 * 0.0049 + 0.005)

    def test_pairs_that_move_together_leave_a_narrow_interval(self, rng):
        shared = rng.chisquare(10, size=50)
        interval = mean_estimation.compute_ratio_interval(2 * shared, shared)
        assert interval.value == pytest.approx(2)
        assert interval.high - interval.low < 1e-12
