"""What reading clients' data costs: a population of EMNIST's shape in TFF's format.

  python -m benchmarks.data
  python -m benchmarks.data --population=emnist_all.sqlite --output=data.json

A file of 3,400 users with 100 noisy images each on average is made first, about 1.1 GB,
unless one is named. Then, interleaved: sampling 100 of them and building their data
sets, as the training does and as TFF's loader does; and a round of the EMNIST CNN
(1,018,174 parameters, batch 20) on them, from arrays in memory, from the file, and from
the file read ahead of the round. Then 300 rounds of logistic regression on cohorts of 5
to 99 users from the file: resident memory at the end over that after 50 rounds.
Runtime: about 4 minutes on 2 cores.
"""

import collections
import contextlib
import json
import os
import pathlib
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
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
from simulation import client_data, cohort, execution, process, seeds  # noqa: E402
from simulation.image_models import (  # noqa: E402
    build_emnist_cnn,
    build_logistic_regression,
)
from simulation.model import Model  # noqa: E402
from simulation.population import layout, staging  # noqa: E402
from simulation.population.federated_data import FederatedData  # noqa: E402
from simulation.population.held_data import HeldData  # noqa: E402
from simulation.sources.source import Feature, Kind  # noqa: E402
from simulation.tasks import TaskOptions, load_task  # noqa: E402

FLAGS = flags.FLAGS
NUM_USERS, COHORT, BATCH_SIZE, SHAPE, NUM_CLASSES = 3_400, 100, 20, (28, 28, 1), 62
_FEATURES = {
    "pixels": Feature(kind=Kind.FLOAT, shape=(28, 28)),
    "label": Feature(kind=Kind.INT64),
}
_HELD_BYTES = 256 << 20
BUILD, TFF_BUILD = "sample and build", "the same by TFF's loader"
ROUND, FILE_ROUND = "round from memory", "round from the file"
AHEAD_ROUND = "round from the file, read ahead"


def define_flags() -> None:
    """Defines the program's flags."""
    flags.DEFINE_string("population", None, "an emnist_all.sqlite to read")
    flags.DEFINE_integer("examples", 100, "examples of a user on average", 2)
    flags.DEFINE_integer("repeats", 3, "interleaved repetitions", 1)
    flags.DEFINE_integer("rounds", 300, "rounds of the look at memory", 60)
    flags.DEFINE_string("output", None, "JSON file for the figures")


def write_population(path: pathlib.Path, mean_examples: int) -> None:
    """Writes a population of EMNIST's shape: all users in training and test."""
    rng = np.random.default_rng(0)
    pool = [
        staging.serialize(
            _FEATURES,
            {"pixels": rng.random((28, 28)), "label": int(rng.integers(NUM_CLASSES))},
        )
        for _ in range(2_000)
    ]
    sizes = np.maximum(2, rng.gamma(4.0, mean_examples / 4.0, NUM_USERS)).astype(int)
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA journal_mode = OFF")
        file.execute("PRAGMA synchronous = OFF")
        file.execute(
            "CREATE TABLE examples (split_name TEXT, client_id TEXT, "
            "serialized_example_proto BLOB)"
        )
        file.execute(
            "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, "
            "num_examples INTEGER)"
        )
        for index in tqdm.trange(NUM_USERS, unit="user", disable=None, leave=False):
            name, size = f"f{index:04d}_00", int(sizes[index])
            for split, count in (("all_train", size), ("all_test", 1)):
                protos = [pool[k] for k in rng.integers(len(pool), size=count)]
                rows = [(split, name, proto) for proto in protos]
                file.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
                file.execute(
                    "INSERT INTO client_metadata VALUES (?, ?, ?)", (name, split, count)
                )
        file.execute("CREATE INDEX users ON examples (client_id, split_name)")
        file.commit()


class Rounds:
    """Rounds of federated averaging without privacy on a population."""

    def __init__(self, data: FederatedData, model: Model) -> None:
        self._data = data
        self._model = model
        self._root = seeds.build_root_seed(1)
        self._loader = client_data.ClientLoader(
            data=data, batch_size=BATCH_SIZE, num_epochs=1, padded=model.stackable
        )
        factory = NoPrivacyFactory(
            systems.build_scheme(COHORT), noise_seeds=NoiseSeeds.CARRIED
        )
        self._process = systems.build_ours(model, factory)
        self._state = self._process.initialize()

    def select(self, number: int, size: int = COHORT) -> list[str]:
        """Returns the users of a round."""
        sampler = cohort.FixedCohort(
            client_ids=self._data.client_ids, clients_per_round=size, root=self._root
        )
        return sampler.select(number)

    def build_keys(self, number: int, size: int = COHORT) -> list[Any]:
        """Returns what the round's clients' data are made from."""
        return [
            client_data.derive_key(
                client_id,
                root=self._root,
                noise_root=self._root,
                round_number=number,
                num_joined=size,
            )
            for client_id in self.select(number, size)
        ]

    def build_data(self, number: int) -> list[Any]:
        """Returns the data of a round's clients, read in this thread."""
        return [self._loader(key) for key in self.build_keys(number)]

    def run(self, data: Sequence[Any]) -> None:
        """Runs a round on data that are there."""
        self._state = self._process.next(self._state, data).state

    def run_on_keys(self, number: int, size: int = COHORT) -> None:
        """Runs a round whose clients read their data."""
        self.run(
            [
                execution.ClientValue(self._loader, key)
                for key in self.build_keys(number, size)
            ]
        )


def read_by_tff(data: tff.simulation.datasets.ClientData, names: list[str]) -> None:
    """Builds and reads users' batches as TFF's own examples do."""
    for name in names:
        for _ in data.create_tf_dataset_for_client(name).batch(BATCH_SIZE):
            pass


def time_reading(path: pathlib.Path) -> dict[str, float]:
    """Returns the median seconds of each way, interleaved."""
    options = TaskOptions(data_dir=path.parent, hold_mb=0)
    data = load_task("emnist_character", options).train
    held = HeldData(data, max_bytes=_HELD_BYTES)
    model = build_emnist_cnn(SHAPE, NUM_CLASSES)
    direct, ahead = Rounds(data, model), Rounds(held, model)
    loader, _ = tff.simulation.datasets.emnist.load_data(
        only_digits=False, cache_dir=str(path.parent)
    )
    times: dict[str, list[float]] = collections.defaultdict(list)

    def take(name: str, run: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = run()
        times[name].append(time.perf_counter() - started)
        return result

    for number in tqdm.trange(FLAGS.repeats + 1, disable=None, leave=False):
        names = direct.select(number)
        ready = take(BUILD, lambda number=number: direct.build_data(number))
        take(TFF_BUILD, lambda names=names: read_by_tff(loader, names))
        take(ROUND, lambda ready=ready: direct.run(ready))
        take(FILE_ROUND, lambda number=number: direct.run_on_keys(number))
        held.read_ahead(ahead.select(number))
        held.wait()
        held.read_ahead(ahead.select(number + 1))
        take(AHEAD_ROUND, lambda number=number: ahead.run_on_keys(number))
    # The first of each builds.
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def watch_memory(path: pathlib.Path, num_rounds: int) -> list[float]:
    """Returns MiB of resident memory after 50, 100, ... rounds from the file."""
    data = load_task("emnist_character", TaskOptions(data_dir=path.parent)).train
    held = HeldData(data, max_bytes=_HELD_BYTES // 8)
    rounds = Rounds(held, build_logistic_regression(SHAPE, NUM_CLASSES))
    rng, found = np.random.default_rng(0), []
    for number in tqdm.trange(num_rounds, unit="round", disable=None, leave=False):
        size = int(rng.integers(5, 100))
        rounds.run_on_keys(number, size)
        if (number + 1) % 50 == 0:
            found.append(psutil.Process().memory_info().rss / 2**20)
    return found


def main() -> None:
    """Measures, prints, and writes the figures."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(execution.use_execution_context())
        if FLAGS.population:
            path = pathlib.Path(FLAGS.population).resolve()
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            path = pathlib.Path(folder) / layout.EMNIST.file_name
            write_population(path, FLAGS.examples)
        medians = time_reading(path)
        memory = watch_memory(path, FLAGS.rounds)
    ratios = {
        "building over the round": medians[BUILD] / medians[ROUND],
        "TFF's loader over ours": medians[TFF_BUILD] / medians[BUILD],
        "round from the file over one from memory": medians[FILE_ROUND]
        / medians[ROUND],
        "the same, read ahead": medians[AHEAD_ROUND] / medians[ROUND],
        "memory, last over first": memory[-1] / memory[0],
    }
    print(f"{COHORT} of {NUM_USERS:,} users a round, median of {FLAGS.repeats}")
    for name, seconds in medians.items():
        print(f"  {name:45s}{seconds:9.3f} s")
    for name, value in ratios.items():
        print(f"  {name:45s}{value:9.3f}")
    print("  MiB every 50 rounds: " + " ".join(f"{value:.0f}" for value in memory))
    if FLAGS.output:
        figures = {"seconds": medians, "ratios": ratios, "memory_mib": memory}
        pathlib.Path(FLAGS.output).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name="data")
