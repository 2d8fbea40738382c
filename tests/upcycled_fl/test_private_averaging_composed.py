"""Tests of the clients' noise beside an exact solver, and beside aggregators' noise."""

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from distributed_dp import DDGaussFactory, accounting
from distributed_dp.accounting import CohortScheme, Mechanism, Sampling
from distributed_dp.random_bits import fold_in
from distributed_dp.update_layout import NoiseSeeds
from simulation import execution
from simulation.algorithm import ClientContext
from tests.distributed_dp.goodness_of_fit import (
    FALSE_FAILURE,
    compute_mean_p_value,
)
from tests.upcycled_fl.senders import (
    CLIPPED,
    DIM,
    MU,
    NOISY,
    ONE_OUTPUT,
    RATE,
    SHAPE,
    TOLERANCE,
    build_objective,
    build_output,
    build_process,
    build_sender,
    draw_client,
    draw_shift,
    draw_weights,
    flatten,
    is_close,
)
from upcycled_fl import exact_solver, perturbation
from upcycled_fl.accounting import (
    ExactMinimiser,
    ResidualNoise,
)


@pytest.fixture(scope="module", autouse=True)
def engine():
    return execution.set_execution_context()


class TestExact:
    """Newton's method in place of SGD, for the model that it knows."""

    def solve(self, shift) -> np.ndarray:
        solve = exact_solver.build_exact_solver(mu=MU, tolerance=TOLERANCE)
        examples, batches = draw_client()
        (weights,), _ = solve(
            tuple(map(tf.constant, draw_weights(ONE_OUTPUT))),
            {name: tf.constant(part) for name, part in examples.items()},
            tf.constant(batches),
            tf.constant([3, 4]),
            (tf.constant(shift, tf.float32),),
        )
        return np.float64(weights)

    def test_objective_perturbation_minimises_and_adds_noise(self, rng):
        """What is left of the sent model is the residual's noise, and its law."""
        rate = 50.0
        algorithm = build_objective(
            RATE, ResidualNoise(gradient_tolerance=TOLERANCE, rate=rate)
        )
        assert algorithm.gradient_tolerance == TOLERANCE
        send, noises = build_sender(algorithm, has_one_output=True), []
        for noise_seed in rng.integers(2**31, size=[60, 2]):
            shift = draw_shift(algorithm, noise_seed, True)
            noises.append(send(noise_seed) - self.solve(shift))
        norms, dim = np.linalg.norm(noises, axis=1), SHAPE[0] + 1
        law = stats.gamma(dim, scale=1 / rate)
        assert stats.kstest(norms, law.cdf).pvalue > FALSE_FAILURE
        for wrong in (
            stats.gamma(dim, scale=1 / RATE),
            stats.gamma(dim - 10, scale=1 / rate),
        ):
            assert stats.kstest(norms, wrong.cdf).pvalue < FALSE_FAILURE
        # It is not the objective's noise once more.
        shifts = [
            draw_shift(algorithm, seed, True)
            for seed in rng.integers(2**31, size=[60, 2])
        ]
        cosines = np.sum(np.array(noises) * shifts, axis=1) / (
            norms * np.linalg.norm(shifts, axis=1)
        )
        assert abs(np.mean(cosines)) < 0.2

    def test_output_perturbation_of_an_exact_minimiser(self):
        minimiser = ExactMinimiser(lipschitz=1.0, mu=MU, gradient_tolerance=TOLERANCE)
        algorithm = build_output(minimiser=minimiser)
        assert algorithm.gradient_tolerance == TOLERANCE
        sent = build_sender(algorithm, has_one_output=True)()
        assert is_close(sent, self.solve(np.zeros(SHAPE[0] + 1)))
        # SGD does not get there.
        sgd = build_sender(build_output(), has_one_output=True)()
        assert not is_close(sgd, sent, rtol=1e-2)

    @pytest.mark.parametrize(
        "algorithm",
        [
            build_objective(RATE, ResidualNoise(gradient_tolerance=0.1, rate=1.0)),
            build_output(
                minimiser=ExactMinimiser(
                    lipschitz=1.0, mu=MU, gradient_tolerance=TOLERANCE
                )
            ),
        ],
        ids=["objective", "output"],
    )
    def test_other_models_are_refused(self, algorithm):
        with pytest.raises(
            ValueError,
            match="`model` must be one_output_logistic_regression for the exact "
            "solver. Found 'logistic_regression'.",
        ):
            build_process(algorithm)


@pytest.mark.slow
class TestAggregators:
    """The carried seed is the aggregator's too: clients' streams are others."""

    def build_ddgauss(self):
        scheme = CohortScheme(Sampling.FIXED, 6, 1)
        parameters = accounting.calibrate(
            Mechanism.DDGAUSS,
            scheme,
            epsilon=8.0,
            delta=1e-5,
            num_rounds=1,
            l2_clip=3.0,
            bits=24,
            padded_dim=256,
            beta=0.5,
            num_stddevs=4.0,
        )
        return DDGaussFactory(
            parameters,
            scheme,
            noise_seeds=NoiseSeeds.CARRIED,
            rotation_seed=(1, 1),
            server_noise_seed=(2, 2),
        )

    def test_its_noise_and_the_clients_are_independent(self, rng):
        """Both noises of 20 clients, each without the other."""
        clipped, local = build_sender(CLIPPED)(), build_sender(NOISY)
        shared = build_sender(CLIPPED, factory=self.build_ddgauss())
        seeds = rng.integers(2**31, size=[20, 2])
        one = np.array([local(seed) - clipped for seed in seeds]).ravel()
        two = np.array([shared(seed) for seed in seeds])
        # Of one client's update, clipped and rotated, the same every time.
        two = (two - two.mean(axis=0)).ravel()

        def correlate(a, b) -> float:
            products = a * b / np.sqrt(np.mean(a**2) * np.mean(b**2))
            return compute_mean_p_value(products, 0.0, np.std(products))

        assert np.std(two) > 0.1
        assert correlate(one, two) > FALSE_FAILURE
        # A twentieth in common would show.
        scaled = one * np.std(two) / np.std(one)
        assert correlate(one, two + 0.1 * scaled) < FALSE_FAILURE
        # The seed decides both.
        assert np.array_equal(shared(seeds[0]), shared(seeds[0]))
        assert not np.array_equal(shared(seeds[0]), shared(seeds[1]))

    def test_the_streams_are_apart(self):
        """Those of the aggregators are split, or numbered from -1 up by coordinate."""
        seed = tf.constant([1, 2])
        streams = [
            tuple(fold_in(seed, tf.constant(number, tf.int64)).numpy())
            for number in [*range(-1, 64), 2**40, 2**40 + 1, 2**40 + 2]
        ]
        assert len(set(streams)) == len(streams)
        algorithm = build_objective(
            RATE, ResidualNoise(gradient_tolerance=TOLERANCE, rate=RATE)
        )
        context = ClientContext(
            initial=(tf.zeros([DIM]),), shared=(), state=(), seed=seed
        )
        # Of one rate, the objective's noise and the solution's are two draws.
        shift = flatten(algorithm.compute_shift(context))
        residual = -flatten(algorithm.conclude(context, context.initial).update)
        for noise, number in ((shift, 2**40 + 1), (residual, 2**40 + 2)):
            stream = fold_in(seed, tf.constant(number, tf.int64))
            expected = perturbation.draw_spherical_noise([[DIM]], RATE, stream)
            assert np.array_equal(noise, flatten(expected))
        assert not np.any(shift == residual)
