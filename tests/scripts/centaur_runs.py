"""How the tests of run_centaur call it, and what NumPy makes of the same flags."""

import contextlib
import csv
import dataclasses
import functools
import io
import json
import pathlib
import sys
from typing import Any

import numpy as np
from absl import flags

from centaur import personal_data
from scripts import centaur_training, distributed_training, run_centaur
from scripts.centaur_config import CentaurConfig
from scripts.flags import build_config
from simulation import client_data, client_training, cohort, seeds, training
from simulation.image_models import build_mlp
from simulation.population.federated_data import ArrayData
from simulation.tasks.task import Task
from tests.centaur import papers

COMMAND = [sys.executable, "-m", "scripts.run_centaur"]
SEED, FRACTION = 3, 0.2
SHAPE, NUM_CLASSES = (4, 1, 1), 3
# Of training examples, those for validation among them, and of test examples.
SIZES = {"ann": (9, 4), "bo": (6, 1), "cy": (12, 6), "di": (7, 3), "ed": (14, 5)}
# Different numbers for whatever can be mistaken for something else.
RATES = (
    "--client_lr=0.1",
    "--client_momentum=0.8",
    "--head_lr=0.3",
    "--head_momentum=0.5",
    "--weight_decay=0.05",
    "--server_lr=0.7",
)
TINY = (
    "--task=digits",
    "--model=toy",
    f"--seed={SEED}",
    f"--validation_fraction={FRACTION}",
    "--total_rounds=2",
    "--eval_every=1",
    "--mechanism=none",
    "--batch_size=3",
    "--client_epochs=2",
    "--head_epochs=3",
    *RATES,
)
# What each method needs beside its name.
EXTRA = {
    "ppsgd_paper": ("--ppsgd_head_lr=0.2",),
    "ppsgd_authors": ("--ppsgd_head_lr=0.2",),
    "pmtl_ft": ("--pmtl_lambda=0.6",),
    "stand_alone": ("--stand_alone_epochs=4", "--total_rounds=1"),
}


def define() -> flags.FlagValues:
    values = flags.FlagValues()
    run_centaur.define_flags(values)
    return values


def parse(*arguments: str) -> CentaurConfig:
    values = define()
    values(["run_centaur", *arguments])
    return build_config(CentaurConfig, values)


def draw_client(stream: int, client_id: str) -> tuple[np.ndarray, np.ndarray]:
    """Examples whose class shows in the mean of their inputs, mostly."""
    index, count = list(SIZES).index(client_id), SIZES[client_id][stream]
    rng = np.random.default_rng([stream, index])
    y = rng.integers(NUM_CLASSES, size=count).astype(np.int32)
    x = rng.normal(size=[count, *SHAPE]) + 0.8 * (y - 1)[:, None, None, None]
    return x.astype(np.float32), y


def build_task() -> Task:
    return Task(
        name="toy",
        description="made up",
        train=ArrayData(
            client_ids=tuple(SIZES), make=functools.partial(draw_client, 0)
        ),
        test=ArrayData(client_ids=tuple(SIZES), make=functools.partial(draw_client, 1)),
        has_test_users=True,
        models={"toy": build_model},
        metric="accuracy",
    )


def build_model():
    model = build_mlp(SHAPE, NUM_CLASSES, hidden_sizes=[5, 6])
    return dataclasses.replace(model, stackable=False)


def run(
    folder: pathlib.Path,
    *arguments: str,
    task: Task | None = None,
    is_seeded: bool = True,
) -> tuple[distributed_training.RunOutcome, str]:
    """Runs the program on the toy task in this process, in a folder of its own."""
    tiny = [flag for flag in TINY if is_seeded or not flag.startswith("--seed=")]
    config = parse(*tiny, f"--output_root={folder}", "--experiment=run", *arguments)
    out = io.StringIO()
    original = distributed_training.load_task
    distributed_training.load_task = lambda *_: task or build_task()
    try:
        with contextlib.redirect_stdout(out):
            outcome = centaur_training.run(config)
    finally:
        distributed_training.load_task = original
    return outcome, out.getvalue()


class Runner:
    """The same flags once for all tests."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._finished: dict[tuple[str, ...], Any] = {}

    def __call__(self, *arguments: str) -> tuple[distributed_training.RunOutcome, str]:
        """Returns the outcome and what was printed."""
        if arguments not in self._finished:
            root = self._folder / str(len(self._finished))
            self._finished[arguments] = run(root, *arguments)
        return self._finished[arguments]


def read_bytes(outcome, *names: str) -> dict[str, bytes]:
    return {name: (outcome.folder / name).read_bytes() for name in names}


def read_model(folder: pathlib.Path) -> list[np.ndarray]:
    with np.load(folder / "model.npz", allow_pickle=False) as file:
        return [file[f"weight_{index:03d}"] for index in range(len(file.files))]


def read_heads(folder: pathlib.Path) -> dict[str, list[np.ndarray]]:
    with np.load(folder / "heads.npz", allow_pickle=False) as file:
        parts = [file[f"head_{index:03d}"] for index in range(len(file.files) - 1)]
        ids = file["client_ids"].tolist()
    return {name: [part[row] for part in parts] for row, name in enumerate(ids)}


def read_table(path: pathlib.Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def read_summary(outcome) -> dict[str, Any]:
    (name,) = outcome.results
    return json.loads((outcome.folder / "results.json").read_text())[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Followed:
    """What NumPy makes of a run.

    Attributes:
        held: What the server holds in the end.
        models: Each client's own model.
        cohorts: Who took part in which round.
    """

    held: papers.Arrays
    models: dict[str, papers.Arrays]
    cohorts: list[list[str]]


def build_program(method: str, **changes: Any) -> papers.Program:
    """The papers' program of a method and the flags above, or another one."""
    client = {"lr": 0.1, "momentum": 0.8, "decay": 0.05, "epochs": 2}
    own = {"lr": 0.3, "momentum": 0.5, "decay": 0.05, "epochs": 3}
    head, shared, final = own, client, own
    build: Any = papers.Centaur
    more: dict[str, Any] = {}
    if method.startswith("ppsgd"):
        single = {"epochs": 1, "steps": 1 if method == "ppsgd_paper" else None}
        head, shared = own | single | {"lr": 0.2}, client | single
        build = papers.Centaur if method == "ppsgd_paper" else papers.SummedHeads
    elif method == "stand_alone":
        build, final = papers.StandAlone, client | {"epochs": 4}
    elif method != "centaur":
        build = papers.Whole
        more["strength"] = 0.6 if method == "pmtl_ft" else 0.0
    if build in (papers.Centaur, papers.SummedHeads):
        more["head"] = papers.Sgd(**(head | changes.pop("head", {})))
    initial = training.build_initial_weights(build_model(), seeds.build_root_seed(SEED))
    build = changes.pop("build", build)
    return build(
        initial=[part.astype(np.float64) for part in initial],
        count=4,
        shared=papers.Sgd(**(shared | changes.pop("shared", {}))),
        final=papers.Sgd(**(final | changes.pop("final", {}))),
        **{**more, **changes},
    )


def follow(
    program: papers.Program,
    *,
    participation: float,
    num_rounds: int = 2,
    server_lr: float = 0.7,
    divisor: float | None = None,
) -> Followed:
    """The run of a program on the toy task."""
    root = seeds.build_root_seed(SEED)
    data = personal_data.split_personal_data(
        build_task(), validation_fraction=FRACTION, seed=0
    )
    cohorts = cohort.PoissonCohort(
        client_ids=tuple(SIZES), sampling_rate=participation, root=root
    )
    num_epochs = program.shared.epochs
    if isinstance(program, papers.Centaur | papers.SummedHeads):
        num_epochs += program.head.epochs

    def draw(client_id: str, number: int, num_epochs: int) -> papers.Client:
        x, y = data.train.load(client_id)
        key = client_data.derive_key(
            client_id, root=root, noise_root=root, round_number=number, num_joined=1
        )
        batches = client_training.draw_batches(
            len(y),
            batch_size=3,
            num_epochs=num_epochs,
            rng=np.random.default_rng(key.batch_seed),
        )
        rows = [row[row > 0] - 1 for row in batches]
        steps = len(rows) // num_epochs
        return papers.Client(
            x=x.reshape([len(y), -1]).astype(np.float64),
            y=y,
            epochs=[rows[k * steps : (k + 1) * steps] for k in range(num_epochs)],
        )

    chosen = [cohorts.select(number) for number in range(num_rounds)]
    rounds = [
        {client_id: draw(client_id, number, num_epochs) for client_id in ids}
        for number, ids in enumerate(chosen)
    ]
    left = papers.run_rounds(
        program,
        rounds,
        divisor=divisor or round(participation * len(SIZES)),
        server_lr=server_lr,
    )[-1]
    models = {
        client_id: program.personalize(
            draw(client_id, num_rounds, program.final.epochs),
            left.held,
            left.kept.get(client_id, program.start_own()),
        )
        for client_id in SIZES
    }
    return Followed(held=left.held, models=models, cohorts=chosen)
