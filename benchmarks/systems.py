"""What benchmarks/engine.py times: the same training in several systems."""

import collections
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp import DDGaussFactory, RotationKind, accounting, build_rotation
from distributed_dp.update_layout import NoiseSeeds
from simulation import client_training, learning
from simulation.model import Model
from simulation.population.federated_data import build_dataset

LEARNING_RATE = 0.05
# x of shape [examples, ...] and y, for each client.
Examples = Sequence[tuple[np.ndarray, np.ndarray]]
Run = Callable[[], Any]
# What a peer's program answers where its packages are missing.
_MISSING_STATUS = 3


def build_bare_loop(
    model: Model,
    examples: Examples,
    weights: Sequence[np.ndarray],
    *,
    batch_size: int,
    num_epochs: int,
) -> Run:
    """Returns the round without federated learning around it.

    Clients' examples are cut into batches before, the last one of an epoch dropped
    where it is not full: the loop does at most what the systems do.
    """

    @tf.function(autograph=False)
    def train(weights: Any, x: tf.Tensor, y: tf.Tensor, seed: tf.Tensor) -> Any:
        def step(number: tf.Tensor, *current: tf.Tensor) -> Any:
            step_seed = tf.random.experimental.stateless_fold_in(seed, number)
            with tf.GradientTape() as tape:
                tape.watch(current)
                outputs = model.predict(current, x[number], step_seed)
                loss = tf.reduce_mean(model.compute_loss(y[number], outputs))
            gradients = tape.gradient(loss, current)
            return number + 1, *[
                w - LEARNING_RATE * g for w, g in zip(current, gradients, strict=True)
            ]

        count = tf.shape(y)[0]
        _, *trained = tf.while_loop(
            lambda number, *_: number < count, step, (tf.constant(0), *weights)
        )
        return [a - b for a, b in zip(weights, trained, strict=True)]

    weights = [tf.constant(weight) for weight in weights]
    data = [
        (
            tf.constant(np.tile(_cut(x, batch_size), [num_epochs] + [1] * x.ndim)),
            tf.constant(np.tile(_cut(y, batch_size), [num_epochs, 1])),
        )
        for x, y in examples
    ]
    pool = concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    def run() -> Any:
        tasks = [
            pool.submit(train, weights, x, y, tf.constant([7, index]))
            for index, (x, y) in enumerate(data)
        ]
        total = tasks[0].result()
        for task in tasks[1:]:
            pairs = zip(total, task.result(), strict=True)
            total = [first + second for first, second in pairs]
        return [weight.numpy() for weight in total]

    return run


def build_round(
    learning_process: tff.learning.templates.LearningProcess,
    data: Sequence[Any],
    context: Any,
) -> Run:
    """Returns a round of a learning process, which goes on from the last one."""
    tff.framework.set_default_context(context)
    state = learning_process.initialize()

    def run() -> Any:
        nonlocal state
        tff.framework.set_default_context(context)
        state = learning_process.next(state, data).state
        return state

    return run


def build_ours(
    model: Model, factory: tff.aggregators.UnweightedAggregationFactory
) -> tff.learning.templates.LearningProcess:
    """Returns our federated averaging with the seeds that the clients carry."""
    return learning.build_federated_averaging(
        model,
        factory,
        client_optimizer=tff.learning.optimizers.build_sgdm(LEARNING_RATE),
        server_optimizer=tff.learning.optimizers.build_sgdm(1.0),
        initial_weights=model.initialize(np.random.default_rng(0)),
    )


def build_our_data(
    model: Model, examples: Examples, *, batch_size: int, num_epochs: int
) -> list[Any]:
    """Returns the clients' data with seeds, as the training programs make them."""
    data = []
    for index, (x, y) in enumerate(examples):
        batches = client_training.draw_batches(
            len(y),
            batch_size=batch_size,
            num_epochs=num_epochs,
            rng=np.random.default_rng(index),
        )
        client: Mapping[str, np.ndarray] = {"x": x, "y": y}
        if model.stackable:
            client, batches = client_training.pad_client(client, batches)
        data.append(
            learning.build_client_data(
                client,
                batches,
                noise_seed=np.array([1, index], np.int32),
                training_seed=np.array([2, index], np.int32),
                num_joined=len(examples),
            )
        )
    return data


def build_batched(
    examples: Examples, *, batch_size: int, num_epochs: int
) -> list[tf.data.Dataset]:
    """Returns the clients' data as TFF's own algorithms take them."""
    return [
        build_dataset(x, y).batch(batch_size).repeat(num_epochs) for x, y in examples
    ]


def build_scheme(num_clients: int) -> accounting.CohortScheme:
    """Returns a cohort of some size out of 3,400 users."""
    return accounting.CohortScheme(accounting.Sampling.POISSON, 3400, num_clients)


def build_ddgauss(model: Model, num_clients: int) -> DDGaussFactory:
    """Returns the distributed discrete Gaussian at 16 bits."""
    scheme = build_scheme(num_clients)
    rotation = build_rotation(RotationKind.HADAMARD, model.num_parameters)
    parameters = accounting.calibrate(
        accounting.Mechanism.DDGAUSS,
        scheme,
        epsilon=6.0,
        delta=1 / 3400,
        num_rounds=100,
        l2_clip=0.1,
        bits=16,
        padded_dim=rotation.padded_dim,
    )
    return DDGaussFactory(parameters, scheme, noise_seeds=NoiseSeeds.CARRIED)


def build_encodes(factory: DDGaussFactory, model: Model, num_clients: int) -> Run:
    """Returns the encoding of every client's update, on as many threads as cores."""
    codec = factory.build_codec(model.num_parameters)
    joined = tf.constant(num_clients, tf.int64)
    seed = tf.constant([3, 4])
    update = tf.random.stateless_normal([model.num_parameters], seed) * 1e-4

    @tf.function(autograph=False)
    def encode(update: tf.Tensor, noise_seed: tf.Tensor) -> tf.Tensor:
        return codec.encode(
            update,
            l2_clip=codec.parameters.l2_clip,
            joined=joined,
            rotation_seed=seed,
            noise_seed=noise_seed,
        ).residues

    pool = concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    def run() -> None:
        seeds = [tf.constant([5, index]) for index in range(num_clients)]
        list(pool.map(lambda noise_seed: encode(update, noise_seed), seeds))

    return run


def build_keras_process(
    model: Model,
) -> tff.learning.templates.LearningProcess:
    """Returns TFF's own federated averaging of the same model in Keras."""
    shape = model.example_spec["x"].shape[1:]
    num_classes = model.initialize(np.random.default_rng(0))[-1].size

    def build_model() -> tff.learning.models.VariableModel:
        keras = tf.keras
        layers = [keras.layers.InputLayer(shape)]
        if model.name == "emnist_cnn":
            layers += [
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.MaxPool2D(),
                keras.layers.Conv2D(64, 3, activation="relu"),
                keras.layers.Dropout(0.25),
                keras.layers.Flatten(),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dropout(0.5),
            ]
        else:
            layers += [keras.layers.Flatten()]
        layers += [keras.layers.Dense(num_classes)]
        return tff.learning.models.from_keras_model(
            keras.Sequential(layers),
            input_spec=collections.OrderedDict(
                x=tf.TensorSpec([None, *shape], tf.float32),
                y=tf.TensorSpec([None], tf.int32),
            ),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy()],
        )

    return tff.learning.algorithms.build_unweighted_fed_avg(
        build_model,
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(LEARNING_RATE),
        server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0),
    )


def time_peer(
    program: str,
    interpreter: str,
    examples: Examples,
    *,
    batch_size: int,
    model: str,
    num_classes: int,
    repeats: int,
) -> Mapping[str, Any] | None:
    """Runs a peer's program on the same data. Returns what it prints.

    Returns None where the peer's packages are not installed.
    """
    path = pathlib.Path(__file__).with_name(f"{program}.py")
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "data.npz"
        np.savez(
            data,
            x=np.stack([_cut(x, batch_size) for x, _ in examples]),
            y=np.stack([_cut(y, batch_size) for _, y in examples]),
            model=model,
            num_classes=num_classes,
            learning_rate=LEARNING_RATE,
            repeats=repeats,
        )
        done = subprocess.run(
            [interpreter, str(path), str(data)], capture_output=True, text=True
        )
    if done.returncode == _MISSING_STATUS:
        print(f"{program} left out: {done.stderr.strip()}", file=sys.stderr)
        return None
    if done.returncode:
        raise RuntimeError(f"{program} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _cut(values: np.ndarray, batch_size: int) -> np.ndarray:
    """Returns the full batches of one epoch, along a first axis."""
    count = len(values) // batch_size
    return values[: count * batch_size].reshape([count, batch_size, *values.shape[1:]])
