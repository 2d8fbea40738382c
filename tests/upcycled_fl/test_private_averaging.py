"""Tests of the clients' noise in a learning process: where it goes, and what it is."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from scipy import stats

from distributed_dp import DDGaussFactory, NoPrivacyFactory, accounting
from distributed_dp.accounting import CohortScheme, Mechanism, Sampling
from distributed_dp.random_bits import fold_in
from distributed_dp.update_layout import NoiseSeeds
from simulation import client_training, execution, learning
from simulation.algorithm import ClientContext, FederatedAveraging
from simulation.image_models import build_logistic_regression
from simulation.linear_models import build_one_output_logistic_regression
from tests.distributed_dp.goodness_of_fit import (
    FALSE_FAILURE,
    compute_mean_p_value,
    compute_variance_p_value,
)
from tests.upcycled_fl import papers
from upcycled_fl import exact_solver, finalizer, perturbation
from upcycled_fl.accounting import (
    ExactMinimiser,
    ObjectivePerturbation,
    OutputPerturbation,
    ResidualNoise,
)
from upcycled_fl.private_averaging import PrivateAveraging

SHAPE, NUM_CLASSES = (24, 1, 1), 10
DIM = (24 + 1) * NUM_CLASSES
LR, MOMENTUM, MU = 0.2, 0.5, 0.4
CLIP, SIGMA, HUGE, TINY = 3.0, 0.5, 1e6, 1e-30
TOLERANCE = 1e-3
# Rounding of float32 weights of size 1, times the few that a model is made of.
RTOL = 1e-5

STACKED = build_logistic_regression(SHAPE, NUM_CLASSES)
MODEL = dataclasses.replace(STACKED, stackable=False)
ONE_OUTPUT = build_one_output_logistic_regression(SHAPE)


@pytest.fixture(scope="module", autouse=True)
def engine():
    return execution.set_execution_context()


def draw_weights(model):
    rng = np.random.default_rng(7)
    return tuple(
        rng.normal(size=part.shape).astype(np.float32) for part in model.initialize(rng)
    )


def flatten(weights) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.float64).ravel() for part in weights])


def build_output(l2_clip=HUGE, stddev=TINY, minimiser=None) -> PrivateAveraging:
    return PrivateAveraging(
        proximal_strength=MU,
        perturbation=OutputPerturbation(
            l2_clip=l2_clip, local_stddev=stddev, minimiser=minimiser
        ),
    )


def build_objective(rate, residual=None, mu=MU) -> PrivateAveraging:
    return PrivateAveraging(
        proximal_strength=mu,
        perturbation=ObjectivePerturbation(noise_rate=rate, mu=mu, residual=residual),
    )


PLAIN = FederatedAveraging(proximal_strength=MU)
CLIPPED = build_output(l2_clip=CLIP)
NOISY = build_output(l2_clip=CLIP, stddev=SIGMA)


def draw_client(index=0, size=11, num_epochs=2):
    """One client's examples, and its batches."""
    rng = np.random.default_rng([1, index])
    examples = {
        "x": rng.normal(size=[size, *SHAPE]).astype(np.float32),
        "y": rng.integers(NUM_CLASSES, size=size).astype(np.int32),
    }
    batches = client_training.draw_batches(
        size, batch_size=4, num_epochs=num_epochs, rng=rng
    )
    return examples, batches


def carry(client, noise_seed, num_joined=1):
    return learning.build_client_data(
        *client,
        noise_seed=np.int32(noise_seed),
        training_seed=np.int32([3, 4]),
        num_joined=num_joined,
    )


def build_factory(num_clients=1):
    scheme = CohortScheme(Sampling.FIXED, 6, num_clients)
    return NoPrivacyFactory(scheme, noise_seeds=NoiseSeeds.CARRIED)


def build_process(
    algorithm, *, model=MODEL, factory=None, momentum=MOMENTUM, **options
):
    return learning.build_learning_process(
        model,
        factory or build_factory(),
        algorithm,
        client_optimizer=tff.learning.optimizers.build_sgdm(LR, momentum=momentum),
        server_optimizer=tff.learning.optimizers.build_sgdm(1.0),
        initial_weights=draw_weights(model),
        **options,
    )


@functools.cache
def build_sender(algorithm, *, has_one_output=False, **options):
    """Returns the model that the client of `draw_client` sends in a first round, given
    its seed for noise: the server takes it as it is."""
    process = build_process(
        algorithm, model=ONE_OUTPUT if has_one_output else MODEL, **options
    )
    start = process.initialize()

    def send(noise_seed=(1, 2)) -> np.ndarray:
        output = process.next(start, [carry(draw_client(), noise_seed)])
        return flatten(output.state.global_model_weights.trainable)

    return send


def is_close(one, two, rtol=RTOL) -> bool:
    return bool(np.linalg.norm(one - two) <= rtol * np.linalg.norm(two))


@pytest.fixture(scope="module")
def trained(engine) -> np.ndarray:
    """The model that the client of `draw_client` comes to without noise."""
    return build_sender(PLAIN)()


class TestOutput:
    def test_no_clip_and_no_noise_is_fedprox(self, trained):
        assert is_close(build_sender(build_output())(), trained)
        start = flatten(draw_weights(MODEL))
        assert not is_close(start, trained, rtol=0.1)
        for algorithm in (CLIPPED, NOISY):
            assert not is_close(build_sender(algorithm)(), trained, rtol=0.1)

    def test_the_model_is_clipped_and_not_the_update(self, trained):
        sent, norm = build_sender(CLIPPED)(), np.linalg.norm(trained)
        assert norm > 4 * CLIP
        assert np.linalg.norm(sent) == pytest.approx(CLIP, rel=RTOL)
        assert is_close(sent, trained * (CLIP / norm))
        start = flatten(draw_weights(MODEL))
        step = trained - start
        clipped_update = start + step * min(1, CLIP / np.linalg.norm(step))
        assert not is_close(sent, clipped_update, rtol=0.1)

    def test_noise_is_added_to_the_clipped_model(self, trained, rng):
        """Many clients and rounds, each with a seed of its own."""
        send = build_sender(NOISY)
        seeds = rng.integers(2**31, size=[50, 2])
        clipped = trained * (CLIP / np.linalg.norm(trained))
        sent = np.array([send(seed) for seed in seeds])
        # The clip's norm, and no more noise than 50 draws of such a norm have: mean
        # DIM sigma^2, and 1e-6 of a chi square.
        limit = CLIP + SIGMA * np.sqrt(stats.chi2(DIM).isf(FALSE_FAILURE / 50))
        assert np.all(np.linalg.norm(sent, axis=1) <= limit)
        noise = (sent - clipped).ravel()

        def fit(values, sigma):
            return stats.kstest(values, stats.norm(scale=sigma).cdf).pvalue

        assert fit(noise, SIGMA) > FALSE_FAILURE
        assert compute_variance_p_value(noise, SIGMA**2) > FALSE_FAILURE
        # The variance for the deviation, one for all of the model, 5 % off, and noise
        # that is clipped too.
        for wrong in (SIGMA**2, SIGMA**0.5, SIGMA / DIM**0.5):
            assert fit(noise, wrong) < FALSE_FAILURE
        assert compute_variance_p_value(noise, (0.95 * SIGMA) ** 2) < FALSE_FAILURE
        norms = np.linalg.norm(sent, axis=1, keepdims=True)
        inside = (sent * np.minimum(1, CLIP / norms) - clipped).ravel()
        assert fit(inside, SIGMA) < FALSE_FAILURE
        # No two clients share any.
        pairs = np.float64(noise.reshape([50, -1]))
        products = (pairs[:-1] * pairs[1:]).ravel() / SIGMA**2
        assert compute_mean_p_value(products, 0.0, 1.0) > FALSE_FAILURE

    def test_a_draw_is_a_function_of_the_seed(self, trained):
        send, clipped = build_sender(NOISY), build_sender(CLIPPED)()
        one = send((1, 2))
        assert np.array_equal(one, send((1, 2)))
        for other in ((1, 3), (2, 2), (2, 1)):
            assert not np.any(one == send(other))
        # What it is.
        seed = fold_in(tf.constant([1, 2]), tf.constant(2**40, tf.int64))
        zeros = [tf.zeros(part.shape) for part in draw_weights(MODEL)]
        noise = flatten(perturbation.add_gaussian_noise(zeros, SIGMA, seed))
        assert is_close(one - clipped, noise, rtol=1e-4)

    @pytest.mark.parametrize("model", [MODEL, STACKED], ids=["alone", "stacked"])
    def test_every_client_of_a_cohort_adds_its_own(self, model):
        process = build_process(NOISY, model=model, factory=build_factory(2))
        data = [carry(draw_client(), seed, num_joined=2) for seed in ((1, 2), (3, 4))]
        mean = process.next(process.initialize(), data).state.global_model_weights
        send = build_sender(NOISY)
        assert is_close(flatten(mean.trainable), (send((1, 2)) + send((3, 4))) / 2)


RATE = 20.0


@functools.cache
def trace_shift(algorithm, has_one_output):
    weights = draw_weights(ONE_OUTPUT if has_one_output else MODEL)

    @tf.function
    def draw(seed):
        return algorithm.compute_shift(
            ClientContext(initial=weights, shared=(), state=(), seed=seed)
        )

    return draw


def draw_shift(algorithm, noise_seed, has_one_output=False) -> np.ndarray:
    draw = trace_shift(algorithm, has_one_output)
    return flatten(draw(tf.constant(noise_seed, tf.int32)))


class TestObjective:
    def test_a_shift_is_drawn_for_each_client_and_round(self, rng):
        algorithm = build_objective(RATE)
        one = draw_shift(algorithm, [1, 2])
        assert np.array_equal(one, draw_shift(algorithm, [1, 2]))
        for other in ([1, 3], [2, 2]):
            assert not np.any(one == draw_shift(algorithm, other))
        shifts = [draw_shift(algorithm, s) for s in rng.integers(2**31, size=[1500, 2])]
        norms = np.linalg.norm(shifts, axis=1)
        # Its norm: Gamma(dim, rate), not that of one tensor, nor a Gaussian's.
        assert stats.kstest(norms, stats.gamma(DIM, scale=1 / RATE).cdf).pvalue > (
            FALSE_FAILURE
        )
        for wrong in (
            stats.gamma(DIM - NUM_CLASSES, scale=1 / RATE),
            stats.gamma(DIM, scale=1 / (1.05 * RATE)),
            stats.chi(DIM, scale=DIM**0.5 / RATE),
        ):
            assert stats.kstest(norms, wrong.cdf).pvalue < FALSE_FAILURE

    def test_there_is_none_under_output_perturbation(self):
        context = ClientContext(initial=(), shared=(), state=(), seed=tf.zeros([2]))
        assert build_output().compute_shift(context) is None

    @pytest.mark.parametrize("noise_seed", [(1, 2), (5, 6)])
    def test_it_is_part_of_the_objective(self, noise_seed):
        algorithm = build_objective(RATE)
        sent = build_sender(algorithm)(noise_seed)
        shift = draw_shift(algorithm, noise_seed)
        assert is_close(sent, descend(lambda pull: pull + shift))
        # Left out, with the other sign, drawn for another client, once for each step.
        other = draw_shift(algorithm, (9, 9))
        for wrong in (
            lambda pull: pull,
            lambda pull: pull - shift,
            lambda pull: pull + other,
        ):
            assert not is_close(sent, descend(wrong), rtol=1e-2)

    def test_it_is_in_the_momentum_as_a_gradient_is(self):
        algorithm = build_objective(RATE)
        sent, shift = build_sender(algorithm)(), draw_shift(algorithm, (1, 2))
        right = descend(lambda pull: pull + shift)
        assert is_close(sent, right)
        # Beside the momentum, and added to its buffer once more at each step, as in
        # the authors' program, the proximal term with it.
        assert not is_close(sent, descend_beside(shift), rtol=1e-2)
        assert not is_close(sent, descend_leaking(shift), rtol=1e-2)
        # Without momentum there is no difference.
        plain = build_sender(algorithm, momentum=None)()
        assert is_close(plain, descend_beside(shift, momentum=0.0))

    def test_a_large_rate_is_fedprox(self, trained):
        assert is_close(build_sender(build_objective(1e12))(), trained)
        assert not is_close(build_sender(build_objective(RATE))(), trained, rtol=1e-2)


def convert(client) -> papers.Client:
    examples, batches = client
    return papers.Client(
        x=examples["x"].reshape([-1, SHAPE[0]]).astype(np.float64),
        y=examples["y"],
        batches=[rows[rows > 0] - 1 for rows in batches],
        num_classes=NUM_CLASSES,
    )


def descend(change) -> np.ndarray:
    """SGD with momentum in NumPy, whose gradients have `change` of FedProx's pull."""
    start = flatten(draw_weights(MODEL))
    rule = papers.Rule(lr=LR, momentum=MOMENTUM)
    client = convert(draw_client())
    return rule.descend(client, start, lambda w: change(MU * (w - start)))[0]


def descend_beside(shift, momentum=MOMENTUM) -> np.ndarray:
    start = flatten(draw_weights(MODEL))
    client, w, speed = convert(draw_client()), start, np.zeros_like(start)
    for rows in client.batches:
        speed = momentum * speed + client.compute_gradient(w, rows)
        w = w - LR * (speed + MU * (w - start) + shift)
    return w


def descend_leaking(shift) -> np.ndarray:
    start = flatten(draw_weights(MODEL))
    client, w, speed = convert(draw_client()), start, np.zeros_like(start)
    for rows in client.batches:
        gradient = client.compute_gradient(w, rows) + MU * (w - start) + shift
        speed = MOMENTUM * speed + gradient
        w = w - LR * speed
        speed = speed + MU * (w - start) + shift
    return w


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


class TestEvenSteps:
    COEFFICIENT = 0.7

    def test_they_use_the_released_models_alone(self):
        """Three rounds with other clients: the even model is a function of the odd one
        and the one before, and the odd ones are the baseline's from there."""
        process = build_process(
            NOISY,
            wrap_finalizer=functools.partial(
                finalizer.build_upcycled_finalizer, coefficients=[self.COEFFICIENT]
            ),
        )
        baseline = build_process(NOISY)
        state, plain = process.initialize(), baseline.initialize()
        for number in range(3):
            before = flatten(state.global_model_weights.trainable)
            data = [carry(draw_client(number), (number, 1))]
            released = baseline.next(replace_weights(plain, state), data).state
            state = process.next(state, data).state
            odd = flatten(state.finalizer["odd_weights"])
            assert np.array_equal(odd, flatten(released.global_model_weights.trainable))
            even = flatten(state.global_model_weights.trainable)
            factor = np.float32(1) + np.float32(self.COEFFICIENT)
            expected = np.float32(before) + factor * (np.float32(odd - before))
            assert is_close(even, np.float64(expected), rtol=1e-6)
            assert not is_close(even, odd, rtol=1e-2)
        # Nothing at the clients goes into the step.
        step = finalizer.build_upcycled_finalizer(
            tff.learning.templates.build_apply_optimizer_finalizer(
                tff.learning.optimizers.build_sgdm(1.0),
                process.initialize.type_signature.result.member.global_model_weights,
            ),
            [self.COEFFICIENT],
        )
        for part in step.next.type_signature.parameter:
            assert part.placement is tff.SERVER


def replace_weights(state, other):
    """Returns the state of a baseline at another process's weights."""
    return state._replace(global_model_weights=other.global_model_weights)


class TestWhatItIs:
    @pytest.mark.parametrize(
        ("algorithm", "name"),
        [
            (build_output(), "FedProx with output perturbation"),
            (build_objective(RATE), "FedProx with objective perturbation"),
            (
                PrivateAveraging(
                    perturbation=OutputPerturbation(l2_clip=1.0, local_stddev=1.0)
                ),
                "FedAvg with output perturbation",
            ),
        ],
    )
    def test_names(self, algorithm, name):
        assert algorithm.name == name
        assert algorithm.gradient_tolerance is None
        assert not algorithm.initialize_client_state(draw_weights(MODEL))
        assert algorithm.count_sent(DIM) == DIM

    @pytest.mark.parametrize(
        "noise",
        [
            ObjectivePerturbation(noise_rate=RATE, mu=MU),
            OutputPerturbation(
                l2_clip=1.0,
                local_stddev=1.0,
                minimiser=ExactMinimiser(lipschitz=1.0, mu=MU, gradient_tolerance=0.1),
            ),
        ],
        ids=["objective", "output"],
    )
    @pytest.mark.parametrize("strength", [0.0, 0.5])
    def test_the_mu_that_is_accounted_is_the_one_that_is_used(self, noise, strength):
        with pytest.raises(
            ValueError,
            match=f"`proximal_strength` must be the perturbation's mu, {MU}. Found "
            f"{strength}.",
        ):
            PrivateAveraging(proximal_strength=strength, perturbation=noise)
        PrivateAveraging(proximal_strength=MU, perturbation=noise)
