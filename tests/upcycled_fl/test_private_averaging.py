"""Tests of the clients' noise in a learning process: where it goes, and what it is."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from scipy import stats

from distributed_dp.random_bits import fold_in
from simulation import execution
from simulation.algorithm import ClientContext
from tests.distributed_dp.goodness_of_fit import (
    FALSE_FAILURE,
    compute_mean_p_value,
    compute_variance_p_value,
)
from tests.upcycled_fl import papers
from tests.upcycled_fl.senders import (
    CLIP,
    CLIPPED,
    DIM,
    LR,
    MODEL,
    MOMENTUM,
    MU,
    NOISY,
    NUM_CLASSES,
    PLAIN,
    RATE,
    RTOL,
    SHAPE,
    SIGMA,
    STACKED,
    build_factory,
    build_objective,
    build_output,
    build_process,
    build_sender,
    carry,
    draw_client,
    draw_shift,
    draw_weights,
    flatten,
    is_close,
)
from upcycled_fl import finalizer, perturbation
from upcycled_fl.accounting import (
    ExactMinimiser,
    ObjectivePerturbation,
    OutputPerturbation,
)
from upcycled_fl.private_averaging import PrivateAveraging


@pytest.fixture(scope="module", autouse=True)
def engine():
    return execution.set_execution_context()


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
