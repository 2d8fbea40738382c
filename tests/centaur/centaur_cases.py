"""CENTAUR and its baselines in settings that NumPy can follow."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow_federated as tff

from centaur import algorithms
from centaur.algorithms import HeadState, PpsgdMode
from centaur.learning import build_centaur
from centaur.local_training import Phase
from centaur.split_model import SplitModel, build_split_model
from distributed_dp import NoPrivacyFactory
from distributed_dp.accounting import CohortScheme, Sampling
from distributed_dp.update_layout import NoiseSeeds
from simulation import client_training, learning
from simulation.image_models import build_mlp
from tests.centaur import papers

SHAPE, NUM_CLASSES, HIDDEN = (4, 1, 1), 3, [5, 6]
# With batches of 2 an epoch has 3, 1, 4 and 2 of them: two end with a smaller one.
SIZES = (5, 2, 8, 3)
# 3, 4, 3 and 4 of them; padded for a stack all four are of one shape.
STACK_SIZES = (5, 8, 6, 7)
ALL = ((0, 1, 2, 3),) * 3
SOME = ((0, 1, 2), (2, 3), (0, 3), (1, 2))
HEAD = {"lr": 0.3, "momentum": 0.5, "decay": 0.05, "epochs": 4}
SHARED = {"lr": 0.1, "momentum": 0.8, "decay": 0.02, "epochs": 2}
FINAL = {"lr": 0.2, "momentum": 0.6, "decay": 0.03, "epochs": 3}
LAMBDA, SERVER_LR, DIVISOR = 0.7, 0.8, 3


def build_model(*, stackable=False):
    model = build_mlp(SHAPE, NUM_CLASSES, hidden_sizes=HIDDEN)
    return dataclasses.replace(model, stackable=stackable)


def draw_initial_weights():
    rng = np.random.default_rng(7)
    specs = build_model().initialize(rng)
    return tuple(
        rng.normal(scale=0.7, size=part.shape).astype(np.float32) for part in specs
    )


INITIAL = draw_initial_weights()


def build_split(*, stackable=False, split_layer=None) -> SplitModel:
    return build_split_model(build_model(stackable=stackable), split_layer)


def build_sgd(lr, momentum):
    return tff.learning.optimizers.build_sgdm(lr, momentum=momentum or None)


def build_phase(values) -> Phase:
    return Phase(
        optimizer=build_sgd(values["lr"], values["momentum"]),
        num_epochs=values["epochs"],
        weight_decay=values["decay"],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A method in a setting."""

    kind: str
    split_layer: str | None = None
    cohorts: tuple[tuple[int, ...], ...] = ALL
    clip: float | None = None
    sizes: tuple[int, ...] = SIZES
    head: dict[str, float] = dataclasses.field(default_factory=lambda: HEAD)
    shared: dict[str, float] = dataclasses.field(default_factory=lambda: SHARED)

    def build_algorithm(self, *, stackable=False) -> algorithms.PersonalAlgorithm:
        split = build_split(stackable=stackable, split_layer=self.split_layer)
        head, final = build_phase(self.head), build_phase(FINAL)
        decay = self.shared["decay"]
        if self.kind in ("client", "refit"):
            return algorithms.build_centaur_algorithm(
                split,
                head=head,
                shared_epochs=self.shared["epochs"],
                weight_decay=decay,
                head_state=HeadState(self.kind),
                final_head=final,
            )
        if self.kind in ("paper", "authors"):
            return algorithms.build_ppsgd_algorithm(
                split,
                mode=PpsgdMode(self.kind),
                head=head,
                weight_decay=decay,
                final_head=final,
            )
        if self.kind == "stand_alone":
            return algorithms.StandAlone(split=split, final_head=final, whole=final)
        return algorithms.WholeModel(
            title=self.kind,
            split=split,
            final_head=final,
            weight_decay=decay,
            proximal_strength=2 * LAMBDA * (self.kind == "pmtl"),
        )

    def count_epochs(self) -> int:
        return self.build_algorithm().count_epochs(int(self.shared["epochs"]))

    def build_program(self, **changes: Any) -> papers.Program:
        """The paper's program, or with `changes` another one."""
        single = {}
        if self.kind in ("paper", "authors"):
            # One epoch of each; in the paper its first step alone.
            single = {"steps": 1 if self.kind == "paper" else None, "epochs": 1}
        head, shared, final = (
            papers.Sgd(**{**values, **changes.pop(name, {})})
            for name, values in (
                ("head", self.head | single),
                ("shared", self.shared | single),
                ("final", FINAL),
            )
        )
        common = {
            "initial": [part.astype(np.float64) for part in INITIAL],
            "count": {None: 4, "dense_2": 2}[self.split_layer],
            "final": final,
        }
        if self.kind in ("client", "refit", "paper"):
            common |= {"head": head, "keeps": self.kind != "refit"}
        elif self.kind == "authors":
            common["head"] = head
        elif self.kind == "pmtl":
            common["strength"] = LAMBDA
        kinds = {
            "authors": papers.SummedHeads,
            "fedavg": papers.Whole,
            "pmtl": papers.Whole,
            "stand_alone": papers.StandAlone,
        }
        build = changes.pop("build", kinds.get(self.kind, papers.Centaur))
        return build(**{**common, "shared": shared, **changes})


CASES = {
    "centaur": Case(kind="client"),
    "centaur_some": Case(kind="client", cohorts=SOME),
    "centaur_deep": Case(kind="client", split_layer="dense_2", cohorts=SOME),
    "centaur_clip": Case(kind="client", clip=0.3),
    "refit": Case(kind="refit", cohorts=SOME),
    "ppsgd_paper": Case(kind="paper", cohorts=SOME),
    "ppsgd_authors": Case(kind="authors", cohorts=SOME),
    "fedavg_fb": Case(kind="fedavg", cohorts=SOME),
    "pmtl_ft": Case(kind="pmtl", cohorts=SOME),
}


def flatten(weights):
    return np.concatenate([np.asarray(part, np.float64).ravel() for part in weights])


def draw_examples(index, size, *, stream=1):
    data = np.random.default_rng([stream, index])
    return {
        "x": data.normal(size=[size, *SHAPE]).astype(np.float32),
        "y": data.integers(NUM_CLASSES, size=size).astype(np.int32),
    }


def draw_client(index, round_number, num_epochs, *, size, batch_size=2):
    """One client's examples, and batches of a number of epochs."""
    examples = draw_examples(index, size)
    batches = client_training.draw_batches(
        len(examples["y"]),
        batch_size=batch_size,
        num_epochs=num_epochs,
        rng=np.random.default_rng([2, index, round_number]),
    )
    return examples, batches


def carry(client, state=(), *, padded=False, joined=3):
    return learning.build_client_data(
        *(client_training.pad_client(*client) if padded else client),
        noise_seed=np.int32([1, 2]),
        training_seed=np.int32([3, 4]),
        num_joined=joined,
        client_state=state,
    )


def convert(examples, batches, num_epochs) -> papers.Client:
    """The same client for the papers' programs."""
    rows = [row[row > 0] - 1 for row in batches]
    steps = len(rows) // num_epochs
    return papers.Client(
        x=examples["x"].reshape([len(examples["y"]), -1]).astype(np.float64),
        y=examples["y"],
        epochs=[rows[k * steps : (k + 1) * steps] for k in range(num_epochs)],
    )


def build_factory(clip=None, divisor=DIVISOR):
    return NoPrivacyFactory(
        CohortScheme(Sampling.FIXED, len(SIZES), divisor),
        l2_clip=clip,
        noise_seeds=NoiseSeeds.CARRIED,
    )


def build_process(
    case, *, stackable=False, factory=None, initial_weights=INITIAL, **options
):
    algorithm = case.build_algorithm(stackable=stackable)
    factory = factory or build_factory(case.clip)
    options |= {
        "client_optimizer": build_sgd(case.shared["lr"], case.shared["momentum"]),
        "server_optimizer": build_sgd(SERVER_LR, 0.0),
        "initial_weights": initial_weights,
    }
    if case.kind in ("client", "refit") and "carried_seeds" not in options:
        return build_centaur(
            algorithm.split,
            factory,
            head=build_phase(case.head),
            shared_epochs=case.shared["epochs"],
            weight_decay=case.shared["decay"],
            head_state=HeadState(case.kind),
            **options,
        )
    return learning.build_learning_process(
        algorithm.split.model, factory, algorithm, **options
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """What a round leaves."""

    state: Any
    kept: dict[int, Any]

    @property
    def held(self):
        return self.state.global_model_weights.trainable


def draw_rounds(case):
    """The clients of each round, by index."""
    num_epochs = case.count_epochs()
    return [
        {
            index: draw_client(index, number, num_epochs, size=case.sizes[index])
            for index in cohort
        }
        for number, cohort in enumerate(case.cohorts)
    ]


def run(case, *, stackable=False, process=None) -> list[Round]:
    """Runs the rounds, handing clients what they kept."""
    process = process or build_process(case, stackable=stackable)
    initial = getattr(process, "initial_client_state", ())
    state, kept, found = process.initialize(), {}, []
    for clients in draw_rounds(case):
        data = [
            carry(client, kept.get(index, initial), padded=stackable)
            for index, client in clients.items()
        ]
        output = process.next(state, data)
        state = output.state
        if initial:
            kept = kept | dict(zip(clients, output.client_states, strict=True))
        found.append(Round(state=state, kept=kept))
    return found


def follow(case, **changes) -> list[papers.Left]:
    """The same rounds by the paper's program, or with `changes` by another one."""
    options = {"divisor": DIVISOR, "server_lr": SERVER_LR, "clip": case.clip}
    options |= {name: changes.pop(name) for name in options if name in changes}
    num_epochs = case.count_epochs()
    rounds = [
        {index: convert(*client, num_epochs) for index, client in clients.items()}
        for clients in draw_rounds(case)
    ]
    return papers.run_rounds(case.build_program(**changes), rounds, **options)


def measure(got, wanted) -> float:
    """How far weights are from others, in parts of their own size."""
    wanted = flatten(wanted)
    return np.linalg.norm(flatten(got) - wanted) / np.linalg.norm(wanted)
