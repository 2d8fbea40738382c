"""Speed of a round of CENTAUR over the arithmetic of its clients' training.

  python -m benchmarks.centaur
  python -m benchmarks.centaur --hidden_sizes=64,32,16 --clients=2000
  python -m benchmarks.centaur --output=centaur.json

Every client has the same number of examples of 28x28 pixels, random ones: their values
do not matter. A round is what a training program runs: each client's batches drawn,
padded and read on the threads that train, 15 epochs of its head and 2 of the
representation, the sums, what the clients keep brought back. The bare arithmetic is
the same function of stacks of 16 clients, compiled by XLA, of arrays that are stacked
already, in as many threads as clients work at a time. The two are interleaved, so that
a noisy machine hits both alike; the ratio is of their medians, and beside it is the
median of the ratios of neighbours. Runtime: about 2 minutes on 2 cores.
"""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tensorflow_federated as tff  # noqa: E402
from absl import flags  # noqa: E402

from benchmarks import systems  # noqa: E402
from centaur.algorithms import HeadFirst, build_centaur_algorithm  # noqa: E402
from centaur.local_training import Phase, SplitTraining  # noqa: E402
from centaur.split_model import build_split_model  # noqa: E402
from distributed_dp import NoPrivacyFactory  # noqa: E402
from distributed_dp.update_layout import NoiseSeeds  # noqa: E402
from simulation import client_data, execution, learning, process, seeds  # noqa: E402
from simulation.client_states import ClientStates  # noqa: E402
from simulation.image_models import build_mlp  # noqa: E402
from simulation.model import Model  # noqa: E402
from simulation.population.federated_data import ArrayData, Examples  # noqa: E402
from simulation.population.held_data import HeldData  # noqa: E402

FLAGS = flags.FLAGS
SHAPE, NUM_CLASSES = (28, 28, 1), 10
ROUND, BARE = "round", "bare arithmetic"
# What the engine stacks at most.
STACK_SIZE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained.

    Attributes:
        model: The model.
        algorithm: What clients do.
        optimizer: That of the representation.
        weights: The initial model's.
        load: Makes a client's data from its key.
        root: The root of all seeds.
    """

    model: Model
    algorithm: HeadFirst
    optimizer: tff.learning.optimizers.Optimizer
    weights: tuple[np.ndarray, ...]
    load: client_data.ClientLoader
    root: seeds.RootSeed

    def list_keys(
        self, round_number: int, states: ClientStates
    ) -> list[client_data.ClientKey]:
        """Returns the clients' keys in a round."""
        ids = self.load.data.client_ids
        return [
            client_data.derive_key(
                client_id,
                root=self.root,
                noise_root=self.root,
                round_number=round_number,
                num_joined=len(ids),
                client_state=states.get(client_id),
            )
            for client_id in ids
        ]


def define_flags() -> None:
    """Defines the program's flags."""
    flags.DEFINE_list("hidden_sizes", ["256", "128", "16"], "hidden layers' sizes")
    flags.DEFINE_integer("clients", 1024, "clients of a round", 1)
    flags.DEFINE_integer("examples", 22, "examples of a client", 1)
    flags.DEFINE_integer("batch_size", 100, "examples in a batch", 1)
    flags.DEFINE_integer("head_epochs", 15, "epochs of the head", 1)
    flags.DEFINE_integer("shared_epochs", 2, "epochs of the representation", 1)
    flags.DEFINE_integer("repeats", 7, "interleaved repetitions", 1)
    flags.DEFINE_string("output", None, "JSON file for the figures")


def draw_data() -> HeldData:
    """Returns clients with random examples, held in memory as tasks hold theirs."""
    rng = np.random.default_rng(0)
    held: dict[str, Examples] = {
        f"client{number}": (
            rng.random([FLAGS.examples, *SHAPE], np.float32),
            rng.integers(NUM_CLASSES, size=FLAGS.examples).astype(np.int32),
        )
        for number in range(FLAGS.clients)
    }
    data = ArrayData(client_ids=tuple(held), make=held.__getitem__)
    return HeldData(data, max_bytes=2**40)


def build_training() -> Training:
    """Returns the training that the flags describe."""
    model = build_mlp(
        SHAPE, NUM_CLASSES, hidden_sizes=list(map(int, FLAGS.hidden_sizes))
    )
    build_sgdm = tff.learning.optimizers.build_sgdm
    algorithm = build_centaur_algorithm(
        build_split_model(model),
        head=Phase(
            optimizer=build_sgdm(0.1, momentum=0.9),
            num_epochs=FLAGS.head_epochs,
            weight_decay=1e-4,
        ),
        shared_epochs=FLAGS.shared_epochs,
        weight_decay=1e-4,
    )
    load = client_data.ClientLoader(
        data=draw_data(),
        batch_size=FLAGS.batch_size,
        num_epochs=algorithm.count_epochs(1),
        padded=True,
    )
    return Training(
        model=model,
        algorithm=algorithm,
        optimizer=build_sgdm(0.05, momentum=0.9),
        weights=model.initialize(np.random.default_rng(0)),
        load=load,
        root=seeds.build_root_seed(1),
    )


def build_round(training: Training) -> Callable[[], Any]:
    """Returns a round, which goes on from the last one."""
    num_clients = len(training.load.data.client_ids)
    built = learning.build_learning_process(
        training.model,
        NoPrivacyFactory(
            systems.build_scheme(num_clients), noise_seeds=NoiseSeeds.CARRIED
        ),
        training.algorithm,
        client_optimizer=training.optimizer,
        server_optimizer=tff.learning.optimizers.build_sgdm(1.0),
        initial_weights=training.weights,
    )
    state = built.initialize()
    states = ClientStates(initial=built.initial_client_state)
    number = 0

    def run() -> Any:
        nonlocal state, states, number
        keys = training.list_keys(number, states)
        output = built.next(
            state, [execution.ClientValue(training.load, key) for key in keys]
        )
        state, number = output.state, number + 1
        states = states.replace([key.client_id for key in keys], output.client_states)
        return state

    return run


def build_bare(training: Training, *, num_threads: int) -> Callable[[], Any]:
    """Returns the clients' training alone, on arrays that are stacked already."""
    algorithm = training.algorithm
    train = SplitTraining(
        split=algorithm.split,
        head=algorithm.head,
        shared=Phase(
            optimizer=training.optimizer,
            num_epochs=algorithm.shared_epochs,
            weight_decay=algorithm.weight_decay,
        ),
    )
    own = algorithm.initialize_client_state(training.weights)
    shared = algorithm.initialize_global(training.weights)
    numbers = train.list_numbers(
        tuple(map(tf.constant, shared)), tuple(map(tf.constant, own))
    )
    run_stack = tf.function(train.run_stack, jit_compile=True, autograph=False)
    keys = training.list_keys(0, ClientStates(initial=own))
    elements = [training.load(key)[0] for key in keys]

    def stack(values: Sequence[Any]) -> Any:
        return tf.nest.map_structure(
            lambda *parts: tf.constant(np.stack(parts)), *values
        )

    stacks = []
    for start in range(0, len(elements), STACK_SIZE):
        clients = elements[start : start + STACK_SIZE]
        stacks.append(
            (
                stack([shared] * len(clients)),
                stack([own] * len(clients)),
                stack([dict(client["examples"]) for client in clients]),
                stack([client["batches"] for client in clients]),
                stack([client["training_seed"] for client in clients]),
                stack([numbers] * len(clients)),
            )
        )
    pool = concurrent.futures.ThreadPoolExecutor(num_threads)

    def run() -> Any:
        # What is not needed any longer goes at once, as in a round.
        for trained in pool.map(lambda arguments: run_stack(*arguments), stacks):
            del trained

    return run


def measure(training: Training, *, num_threads: int) -> dict[str, Any]:
    """Returns the figures."""
    runs = {
        BARE: build_bare(training, num_threads=num_threads),
        ROUND: build_round(training),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(FLAGS.repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in times.items()}
    pairs = zip(times[ROUND], times[BARE], strict=True)
    return {
        "median_seconds": medians,
        "seconds": times,
        "round_over_bare": medians[ROUND] / medians[BARE],
        "median_of_ratios": statistics.median(a / b for a, b in pairs),
    }


def main() -> None:
    """Measures, prints, and writes the figures."""
    with execution.use_execution_context() as engine:
        training = build_training()
        num_threads = len(os.sched_getaffinity(0))
        figures = measure(training, num_threads=num_threads)
        model = training.model
        print(
            f"engine: {engine.engine.value} on {engine.device}\n"
            f"{model.name}, {model.num_parameters:,} parameters, {FLAGS.clients} "
            f"clients with {FLAGS.examples} examples, batch {FLAGS.batch_size}, "
            f"{FLAGS.head_epochs} epochs of the head and {FLAGS.shared_epochs} of the "
            f"representation; median of {FLAGS.repeats}"
        )
    for name, seconds in figures["median_seconds"].items():
        each = 1e3 * seconds / FLAGS.clients
        print(f"  {name:20s}{seconds:9.3f} s{each:9.3f} ms a client")
    print(
        f"  round over bare arithmetic {figures['round_over_bare']:.2f}, "
        f"median of neighbours' ratios {figures['median_of_ratios']:.2f}"
    )
    if FLAGS.output:
        pathlib.Path(FLAGS.output).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name="centaur")
