"""Cost of a client, and memory, over cohorts of many sizes on the local engine.

  python -m benchmarks.scale
  python -m benchmarks.scale --output=scale.json

Two models, with 40 examples a client: a CNN whose clients are trained one by one, and
logistic regression, whose clients are trained in stacks. First rounds of 10, 100 and
1,000 clients without privacy, interleaved: milliseconds a client. Then 200 rounds under
DDGauss at 16 bits with cohorts of varying size: the process's resident memory at the
end over that after a quarter of them. Runtime: about 2 minutes on 2 cores.
"""

import json
import os
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import tensorflow_federated as tff  # noqa: E402
import tqdm  # noqa: E402
from absl import flags  # noqa: E402

from benchmarks import systems  # noqa: E402
from distributed_dp import NoPrivacyFactory  # noqa: E402
from distributed_dp.update_layout import NoiseSeeds  # noqa: E402
from simulation import client_training, execution, learning, process  # noqa: E402
from simulation.image_models import (  # noqa: E402
    build_logistic_regression,
    build_small_cnn,
)
from simulation.model import Model  # noqa: E402

FLAGS = flags.FLAGS
SHAPE, NUM_CLASSES, EXAMPLES, BATCH_SIZE = (28, 28, 1), 10, 40, 10
BUILDERS = {
    "small_cnn": build_small_cnn,
    "logistic_regression": build_logistic_regression,
}


class Loader:
    """Makes a client's data where its work runs, as the training programs do."""

    def __init__(self, model: Model) -> None:
        self._padded = model.stackable

    def __call__(self, key: tuple[int, int]) -> list[Any]:
        """Returns the data of the client with a number, in a cohort of a size."""
        number, num_joined = key
        rng = np.random.default_rng(number)
        examples = {
            "x": rng.random([EXAMPLES, *SHAPE], np.float32),
            "y": rng.integers(NUM_CLASSES, size=EXAMPLES).astype(np.int32),
        }
        batches = client_training.draw_batches(
            EXAMPLES, batch_size=BATCH_SIZE, num_epochs=1, rng=rng
        )
        if self._padded:
            examples, batches = client_training.pad_client(examples, batches)
        return learning.build_client_data(
            examples,
            batches,
            noise_seed=np.array([1, number], np.int32),
            training_seed=np.array([2, number], np.int32),
            num_joined=num_joined,
        )


class Rounds:
    """Rounds of one process, each from the last one's state."""

    def __init__(
        self, model: Model, factory: tff.aggregators.UnweightedAggregationFactory
    ) -> None:
        self._process = systems.build_ours(model, factory)
        self._state = self._process.initialize()
        self._loader = Loader(model)

    def run(self, num_clients: int) -> None:
        """Runs a round."""
        data = [
            execution.ClientValue(self._loader, (number, num_clients))
            for number in range(num_clients)
        ]
        self._state = self._process.next(self._state, data).state


def define_flags() -> None:
    """Defines the program's flags."""
    flags.DEFINE_list("sizes", ["10", "100", "1000"], "clients of the timed rounds")
    flags.DEFINE_integer("repeats", 5, "interleaved repetitions", 1)
    flags.DEFINE_integer("rounds", 200, "rounds of the look at memory", 4)
    flags.DEFINE_string("output", None, "JSON file for the figures")


def time_sizes(rounds: Rounds, sizes: Sequence[int]) -> dict[int, float]:
    """Returns the median milliseconds a client for each size."""
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for size in sizes:
        rounds.run(size)
    for _ in range(FLAGS.repeats):
        for size in sizes:
            # As many clients for each size, so that noise hits all alike.
            number = max(1, min(10, max(sizes) // (10 * size)))
            started = time.perf_counter()
            for _ in range(number):
                rounds.run(size)
            seconds = time.perf_counter() - started
            times[size].append(1e3 * seconds / (number * size))
    return {size: statistics.median(values) for size, values in times.items()}


def watch_memory(rounds: Rounds, num_rounds: int) -> list[float]:
    """Returns MiB of resident memory after each quarter of rounds of many sizes."""
    rng, found = np.random.default_rng(0), []
    for number in tqdm.trange(num_rounds, unit="round", disable=None, leave=False):
        rounds.run(int(rng.integers(5, 100)))
        if (number + 1) % (num_rounds // 4) == 0:
            found.append(psutil.Process().memory_info().rss / 2**20)
    return found


def main() -> None:
    """Measures, prints, and writes the figures."""
    sizes = [int(size) for size in FLAGS.sizes]
    figures = {}
    with execution.use_execution_context() as engine:
        print(f"engine: {engine.engine.value} on {engine.device}")
        for name, build in BUILDERS.items():
            model = build(SHAPE, NUM_CLASSES)
            plain = NoPrivacyFactory(
                systems.build_scheme(100), noise_seeds=NoiseSeeds.CARRIED
            )
            costs = time_sizes(Rounds(model, plain), sizes)
            private = Rounds(model, systems.build_ddgauss(model, 50))
            memory = watch_memory(private, FLAGS.rounds)
            figures[name] = {
                "milliseconds_per_client": costs,
                "largest_over_smallest_cohort": costs[sizes[-1]] / costs[sizes[0]],
                "memory_mib": memory,
                "memory_growth": memory[-1] / memory[0],
            }
            print(f"{name}, {EXAMPLES} examples a client, batch {BATCH_SIZE}")
            for size, cost in costs.items():
                print(f"  {size:6d} clients a round {cost:10.3f} ms a client")
            print(
                f"  resident memory over {FLAGS.rounds} rounds of 5 to 99 clients: "
                + " ".join(f"{value:.0f}" for value in memory)
                + f" MiB, last over first {memory[-1] / memory[0]:.3f}"
            )
    if FLAGS.output:
        text = json.dumps(figures, indent=2) + "\n"
        pathlib.Path(FLAGS.output).write_text(text)


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name="scale")
