"""Speed of the execution engine: rounds of federated averaging over the bare loop.

  python -m benchmarks.engine
  python -m benchmarks.engine --model=linear --linear_data=synthetic_1_1.npz
  python -m benchmarks.engine --pfl_python=pfl_env/bin/python --output=engine.json

Two trainings: a CNN of 1,018,174 parameters, 20 clients x 100 examples, batch 20, one
epoch; and logistic regression, 30 clients of very different sizes, batch 32, 20 epochs,
on generated data of the sizes of the Upcycled-FL authors' synthetic sets, or on one of
their files. The bare loop is the same SGD steps as one hand-written tf.function for a
client, on as many threads as there are cores and one thread an op, with nothing around
it. Calls are interleaved, so that a noisy machine hits all alike, and medians are
compared; the peers (pfl with PyTorch, FedJAX) have processes of their own, before.
Runtime: about 2 minutes on 2 cores.
"""

import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402
from absl import flags  # noqa: E402

from benchmarks import systems  # noqa: E402
from benchmarks.systems import Examples, Run  # noqa: E402
from distributed_dp import NoPrivacyFactory  # noqa: E402
from distributed_dp.update_layout import NoiseSeeds  # noqa: E402
from simulation import process  # noqa: E402
from simulation.engine import devices  # noqa: E402
from simulation.engine.local_context import LocalContext  # noqa: E402
from simulation.engine.tff_worker import (  # noqa: E402
    WorkerExecutorFactory,
    build_worker_context,
)
from simulation.image_models import (  # noqa: E402
    build_emnist_cnn,
    build_logistic_regression,
)
from simulation.model import Model  # noqa: E402

FLAGS = flags.FLAGS
BARE, PLAIN, DDGAUSS = "bare loop", "local, no privacy", "local, DDGauss 16 bits"
ENCODES = "the encodings alone"
TFF_PLAIN = "TFF runtime, no privacy"
KERAS, TFF_KERAS = "local, TFF's Keras process", "TFF runtime, TFF's Keras process"
PEERS = {"peer_pfl": "pfl_python", "peer_fedjax": "fedjax_python"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained.

    Attributes:
        model: The model.
        examples: The clients' data.
        batch_size: Examples in a batch.
        num_epochs: Passes over a client's examples.
    """

    model: Model
    examples: Examples
    batch_size: int
    num_epochs: int


def define_flags() -> None:
    """Defines the program's flags."""
    flags.DEFINE_enum("model", "all", ["cnn", "linear", "all"], "what is trained")
    flags.DEFINE_integer("clients", None, "clients of a round (unset: 20, or 30)", 1)
    flags.DEFINE_integer("examples", 100, "examples of a client of the CNN", 1)
    flags.DEFINE_string("linear_data", None, "NPZ with x_train, y_train, user_train")
    flags.DEFINE_integer("repeats", 5, "interleaved repetitions", 1)
    flags.DEFINE_bool("tff", True, "time TFF's own runtime and its Keras process, too")
    for peer, name in PEERS.items():
        flags.DEFINE_string(
            name, sys.executable, f"interpreter of {peer}, where its packages are"
        )
    flags.DEFINE_string("output", None, "JSON file for the figures")


def build_cnn_training() -> Training:
    """Returns the training of the CNN, on noise: its values do not matter."""
    rng, count = np.random.default_rng(0), FLAGS.examples
    examples = [
        (
            rng.random([count, 28, 28, 1]).astype(np.float32),
            rng.integers(62, size=count).astype(np.int32),
        )
        for _ in range(FLAGS.clients or 20)
    ]
    return Training(
        model=build_emnist_cnn((28, 28, 1), 62),
        examples=examples,
        batch_size=min(20, count),
        num_epochs=1,
    )


def build_linear_training() -> Training:
    """Returns the training of logistic regression: 20 features, 10 classes."""
    if FLAGS.linear_data:
        with np.load(FLAGS.linear_data) as data:
            x, y, user = (data[f"{name}_train"] for name in ("x", "y", "user"))
        examples = [
            (x[user == name].astype(np.float32), y[user == name].astype(np.int32))
            for name in np.unique(user)
        ]
    else:
        rng = np.random.default_rng(0)
        # A median of about 75 and a long tail, as in the authors' sets.
        sizes = 45 + np.minimum(rng.lognormal(3.4, 2.2, FLAGS.clients or 30), 2000)
        examples = [
            (
                rng.normal(size=[int(size), 20]).astype(np.float32),
                rng.integers(10, size=int(size)).astype(np.int32),
            )
            for size in sizes
        ]
    shape = (examples[0][0].shape[1], 1, 1)
    return Training(
        model=build_logistic_regression(shape, 10),
        examples=[(x.reshape([-1, *shape]), y) for x, y in examples],
        batch_size=32,
        num_epochs=20,
    )


def build_candidates(training: Training) -> Mapping[str, Callable[[], Run]]:
    """Returns what is timed, by name: functions that build a round's function."""
    model, examples = training.model, training.examples
    batching = {"batch_size": training.batch_size, "num_epochs": training.num_epochs}
    num_clients = len(examples)
    local = LocalContext()
    ours = systems.build_our_data(model, examples, **batching)
    plain = systems.build_ours(
        model,
        NoPrivacyFactory(
            systems.build_scheme(num_clients), noise_seeds=NoiseSeeds.CARRIED
        ),
    )
    weights = model.initialize(np.random.default_rng(0))

    def build_private() -> Run:
        factory = systems.build_ddgauss(model, num_clients)
        return systems.build_round(systems.build_ours(model, factory), ours, local)

    candidates: dict[str, Callable[[], Run]] = {
        BARE: lambda: systems.build_bare_loop(model, examples, weights, **batching),
        PLAIN: lambda: systems.build_round(plain, ours, local),
        DDGAUSS: build_private,
        ENCODES: lambda: systems.build_encodes(
            systems.build_ddgauss(model, num_clients), model, num_clients
        ),
    }
    if FLAGS.tff:
        cores = len(os.sched_getaffinity(0))
        worker = build_worker_context(WorkerExecutorFactory(cores + 1))
        keras = systems.build_keras_process(model)
        batches = systems.build_batched(examples, **batching)
        candidates |= {
            TFF_PLAIN: lambda: systems.build_round(plain, ours, worker),
            KERAS: lambda: systems.build_round(keras, batches, local),
            TFF_KERAS: lambda: systems.build_round(keras, batches, worker),
        }
    return candidates


def time_peers(training: Training) -> dict[str, Mapping[str, Any]]:
    """Returns what the peers print, by their names; for clients of one size alone."""
    if len({len(y) for _, y in training.examples}) > 1 or training.num_epochs > 1:
        return {}
    found = {}
    for program, flag in PEERS.items():
        printed = systems.time_peer(
            program,
            FLAGS[flag].value,
            training.examples,
            batch_size=training.batch_size,
            model="cnn",
            num_classes=62,
            repeats=FLAGS.repeats,
        )
        if printed is not None:
            found[printed["system"]] = printed
    return found


def measure(training: Training) -> dict[str, Any]:
    """Returns the figures of a training."""
    peers = time_peers(training)
    rounds: dict[str, Run] = {}
    first: dict[str, float] = {}
    for name, build in build_candidates(training).items():
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
    for name, printed in peers.items():
        times[name], first[name] = printed["seconds"], printed["first_seconds"]
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "median_seconds": medians,
        "first_seconds": first,
        "over_bare": {name: value / medians[BARE] for name, value in medians.items()},
        "ratios": compute_ratios(medians),
    }


def compute_ratios(medians: Mapping[str, float]) -> dict[str, float]:
    """Returns what the table does not show at once."""
    extra = medians[DDGAUSS] - medians[PLAIN]
    ratios = {"DDGauss beyond no privacy, over the encodings": extra / medians[ENCODES]}
    if TFF_KERAS in medians:
        ratios |= {
            "TFF's Keras process in its runtime over ours": (
                medians[TFF_KERAS] / medians[PLAIN]
            ),
            "TFF's Keras process in its runtime over the local engine": (
                medians[TFF_KERAS] / medians[KERAS]
            ),
            "TFF's runtime over ours, without privacy": (
                medians[TFF_PLAIN] / medians[PLAIN]
            ),
        }
    return ratios


def print_figures(training: Training, figures: Mapping[str, Any]) -> None:
    """Prints a training's table and ratios."""
    model, sizes = training.model, [len(y) for _, y in training.examples]
    print(
        f"{model.name}, {model.num_parameters:,} parameters, {len(sizes)} clients with "
        f"{min(sizes)} to {max(sizes)} examples, batch {training.batch_size}, "
        f"{training.num_epochs} epochs; median of {FLAGS.repeats}"
    )
    print(f"  {'':36s}{'seconds':>9s}{'/ bare':>9s}{'first':>9s}")
    for name, seconds in figures["median_seconds"].items():
        over, first = figures["over_bare"][name], figures["first_seconds"][name]
        print(f"  {name:36s}{seconds:9.3f}{over:9.2f}{first:9.2f}")
    for name, value in figures["ratios"].items():
        print(f"  {name:58s}{value:5.2f}")


def main() -> None:
    """Times, prints, and writes the figures."""
    devices.give_clients_the_cores()
    builders = {"cnn": build_cnn_training, "linear": build_linear_training}
    names = list(builders) if FLAGS.model == "all" else [FLAGS.model]
    figures = {}
    for name in names:
        training = builders[name]()
        figures[name] = measure(training)
        print_figures(training, figures[name])
    if FLAGS.output:
        text = json.dumps(figures, indent=2) + "\n"
        pathlib.Path(FLAGS.output).write_text(text)


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name="engine")
