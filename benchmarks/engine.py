"""Speed of the execution engine: rounds of federated averaging over the bare loop.

  python -m benchmarks.engine
  python -m benchmarks.engine --repeats=7 --output=engine.json

The bare loop is the same SGD steps as one hand-written tf.function for a client, on as
many threads as there are cores and one thread an op, with nothing around it. Every
candidate trains the same model on the same examples; calls are interleaved, so that a
noisy machine hits all alike, and medians are compared. TFF's own runtime (a helper
process) runs TFF's own Keras process, which the local engine runs too. Runtime: about 1
minute on 2 cores.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tensorflow_federated as tff  # noqa: E402
from absl import flags  # noqa: E402

from distributed_dp import (  # noqa: E402
    DDGaussFactory,
    NoPrivacyFactory,
    RotationKind,
    accounting,
    build_rotation,
)
from distributed_dp.update_layout import NoiseSeeds  # noqa: E402
from simulation import learning, process  # noqa: E402
from simulation.engine import devices  # noqa: E402
from simulation.engine.local_context import LocalContext  # noqa: E402
from simulation.engine.tff_worker import (  # noqa: E402
    WorkerExecutorFactory,
    build_worker_context,
)
from simulation.model import (  # noqa: E402
    Model,
    build_emnist_cnn,
    build_logistic_regression,
)
from simulation.tasks.task import build_dataset  # noqa: E402

FLAGS = flags.FLAGS
IMAGE_SHAPE, NUM_CLASSES = (28, 28, 1), 62
LEARNING_RATE = 0.05
Examples = Sequence[tuple[np.ndarray, np.ndarray]]


def define_flags() -> None:
    """Defines the program's flags."""
    flags.DEFINE_integer("clients", 20, "clients of a round", 1)
    flags.DEFINE_integer("examples", 100, "examples of a client", 1)
    flags.DEFINE_integer("batch_size", 20, "examples in a batch", 1)
    flags.DEFINE_integer("repeats", 5, "interleaved repetitions", 1)
    flags.DEFINE_enum("model", "cnn", ["cnn", "linear"], "what is trained")
    flags.DEFINE_bool("tff", True, "time TFF's own runtime and its Keras process, too")
    flags.DEFINE_string("output", None, "JSON file for the figures")


def draw_examples() -> Examples:
    """Returns x and y of each client, in batches."""
    rng = np.random.default_rng(0)
    shape = [FLAGS.examples // FLAGS.batch_size, FLAGS.batch_size]
    return [
        (
            rng.random([*shape, *IMAGE_SHAPE]).astype(np.float32),
            rng.integers(NUM_CLASSES, size=shape).astype(np.int32),
        )
        for _ in range(FLAGS.clients)
    ]


def build_bare_loop(
    model: Model, examples: Examples, weights: Sequence[np.ndarray]
) -> Callable[[], Any]:
    """Returns the round without federated learning around it."""

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
    data = [(tf.constant(x), tf.constant(y)) for x, y in examples]
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
) -> Callable[[], Any]:
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


def build_our_data(examples: Examples) -> list[Any]:
    """Returns data sets with seeds."""
    return [
        learning.build_client_data(
            {"x": x.reshape([-1, *IMAGE_SHAPE]), "y": y.reshape([-1])},
            1 + np.arange(y.size, dtype=np.int32).reshape(y.shape),
            noise_seed=np.array([1, index], np.int32),
            training_seed=np.array([2, index], np.int32),
            num_joined=len(examples),
        )
        for index, (x, y) in enumerate(examples)
    ]


def build_ddgauss(model: Model) -> DDGaussFactory:
    """Returns the distributed discrete Gaussian at 16 bits."""
    scheme = accounting.CohortScheme(accounting.Sampling.POISSON, 3400, FLAGS.clients)
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


def build_keras_process() -> tff.learning.templates.LearningProcess:
    """Returns TFF's own federated averaging of its own Keras model."""

    def build_model() -> tff.learning.models.VariableModel:
        keras = tf.keras
        layers = [keras.layers.InputLayer(IMAGE_SHAPE)]
        if FLAGS.model == "cnn":
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
        layers += [keras.layers.Dense(NUM_CLASSES)]
        return tff.learning.models.from_keras_model(
            keras.Sequential(layers),
            input_spec=collections.OrderedDict(
                x=tf.TensorSpec([None, *IMAGE_SHAPE], tf.float32),
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


def build_candidates(model: Model, examples: Examples) -> Mapping[str, Any]:
    """Returns what is timed, by name: functions that build a round's function."""
    local = LocalContext()
    ours = build_our_data(examples)
    scheme = accounting.CohortScheme(accounting.Sampling.POISSON, 3400, FLAGS.clients)
    plain = NoPrivacyFactory(scheme, noise_seeds=NoiseSeeds.CARRIED)
    weights = model.initialize(np.random.default_rng(0))
    candidates: dict[str, Callable[[], Callable[[], Any]]] = {
        "bare loop": lambda: build_bare_loop(model, examples, weights),
        "local, no privacy": lambda: build_round(build_ours(model, plain), ours, local),
        "local, DDGauss 16 bits": lambda: build_round(
            build_ours(model, build_ddgauss(model)), ours, local
        ),
    }
    if FLAGS.tff:
        batches = [build_dataset(x, y) for x, y in examples]
        cores = len(os.sched_getaffinity(0))
        worker = build_worker_context(WorkerExecutorFactory(cores + 1))
        keras = build_keras_process()
        candidates |= {
            "local, TFF's Keras process": lambda: build_round(keras, batches, local),
            "TFF runtime, TFF's Keras process": lambda: build_round(
                keras, batches, worker
            ),
            "TFF runtime, no privacy": lambda: build_round(
                build_ours(model, plain), ours, worker
            ),
        }
    return candidates


def main() -> None:
    """Times, prints, and writes the figures."""
    devices.give_clients_the_cores()
    builders = {"cnn": build_emnist_cnn, "linear": build_logistic_regression}
    model = builders[FLAGS.model](IMAGE_SHAPE, NUM_CLASSES)
    examples = draw_examples()
    rounds, first = {}, {}
    for name, build in build_candidates(model, examples).items():
        started = time.perf_counter()
        rounds[name] = build()
        rounds[name]()
        first[name] = time.perf_counter() - started
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(FLAGS.repeats):
        for name, run in rounds.items():
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in times.items()}
    bare = medians["bare loop"]
    print(
        f"{model.name}, {model.num_parameters:,} parameters, {FLAGS.clients} clients x "
        f"{FLAGS.examples} examples, batch {FLAGS.batch_size}; median of "
        f"{FLAGS.repeats}"
    )
    print(f"  {'':34s}{'seconds':>9s}{'/ bare':>9s}{'first':>9s}")
    for name, seconds in medians.items():
        print(f"  {name:34s}{seconds:9.3f}{seconds / bare:9.2f}{first[name]:9.2f}")
    if FLAGS.output:
        figures = {"median_seconds": medians, "first_seconds": first}
        text = json.dumps(figures, indent=2) + "\n"
        pathlib.Path(FLAGS.output).write_text(text)


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name="engine")
