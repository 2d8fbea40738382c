"""Clients whose noise can be seen: a process of one client that a server repeats."""

import dataclasses
import functools

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp import NoPrivacyFactory
from distributed_dp.accounting import CohortScheme, Sampling
from distributed_dp.update_layout import NoiseSeeds
from simulation import client_training, learning
from simulation.algorithm import ClientContext, FederatedAveraging
from simulation.image_models import build_logistic_regression
from simulation.linear_models import build_one_output_logistic_regression
from upcycled_fl.accounting import ObjectivePerturbation, OutputPerturbation
from upcycled_fl.private_averaging import PrivateAveraging

SHAPE, NUM_CLASSES = (24, 1, 1), 10
DIM = (24 + 1) * NUM_CLASSES
LR, MOMENTUM, MU = 0.2, 0.5, 0.4
CLIP, SIGMA, HUGE, TINY = 3.0, 0.5, 1e6, 1e-30
TOLERANCE, RATE = 1e-3, 20.0
# Rounding of float32 weights of size 1, times the few that a model is made of.
RTOL = 1e-5

STACKED = build_logistic_regression(SHAPE, NUM_CLASSES)
MODEL = dataclasses.replace(STACKED, stackable=False)
ONE_OUTPUT = build_one_output_logistic_regression(SHAPE)


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
