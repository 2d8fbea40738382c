"""The baselines in settings that NumPy can follow: clients, rounds, and processes."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow_federated as tff

from distributed_dp import NoPrivacyFactory
from distributed_dp.accounting import CohortScheme, Sampling
from distributed_dp.update_layout import NoiseSeeds
from simulation import client_training, learning
from simulation.algorithm import FederatedAveraging
from simulation.image_models import build_logistic_regression
from tests.upcycled_fl import papers
from upcycled_fl import baselines

SHAPE, NUM_CLASSES = (2, 1, 1), 3
SIZES, EPOCHS = (5, 2, 8, 0, 6, 7), (2, 3, 2, 1, 2, 1)
# Half of the clients a round; some come back, with what they kept.
COHORTS = ((0, 1, 2), (1, 3, 5), (0, 3, 4), (1, 2, 0))
SHARE = 0.5
LR = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An algorithm in a setting."""

    kind: str
    momentum: float = 0.0
    by_examples: bool = False
    server_lr: float = 1.0
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def algorithm(self) -> FederatedAveraging:
        return getattr(baselines, self.kind)(**self.fields)

    def get_rule(self, **changes) -> Any:
        """The paper's algorithm, or with `changes` another one."""
        names = {"proximal_strength": "mu", "participation": "share"}
        fields = {names.get(name, name): v for name, v in self.fields.items()}
        own = {"lr": LR, "momentum": self.momentum, "server_lr": self.server_lr}
        return getattr(papers, self.kind)(**(own | fields | changes))


CASES = {
    "fednova": Case(kind="FedNova", by_examples=True),
    # Both roots of the recursion are real: no gradient has a negative weight.
    "fednova_proximal": Case(
        kind="FedNova",
        momentum=0.4,
        server_lr=0.8,
        fields={"proximal_strength": 0.5},
    ),
    "scaffold": Case(kind="Scaffold", fields={"participation": SHARE}),
    "scaffold_proximal": Case(
        kind="Scaffold",
        momentum=0.4,
        server_lr=0.8,
        by_examples=True,
        fields={"participation": SHARE, "proximal_strength": 0.5},
    ),
    "feddyn": Case(
        kind="FedDyn", fields={"participation": SHARE, "proximal_strength": 0.6}
    ),
    "feddyn_momentum": Case(
        kind="FedDyn",
        momentum=0.5,
        by_examples=True,
        fields={"participation": SHARE, "proximal_strength": 0.6},
    ),
    "pfedme": Case(
        kind="PFedMe",
        by_examples=True,
        fields={"penalty": 1.5, "personal_steps": 3, "local_lr": 0.3},
    ),
    "pfedme_momentum": Case(
        kind="PFedMe",
        momentum=0.5,
        server_lr=0.8,
        fields={"penalty": 1.5, "personal_steps": 2, "local_lr": 0.3},
    ),
}
RICH = ("fednova_proximal", "scaffold_proximal", "feddyn_momentum", "pfedme_momentum")


def build_model(stackable=False):
    model = build_logistic_regression(SHAPE, NUM_CLASSES)
    return dataclasses.replace(model, stackable=stackable)


def draw_initial_weights():
    rng = np.random.default_rng(7)
    specs = build_model().initialize(rng)
    return tuple(rng.normal(size=part.shape).astype(np.float32) for part in specs)


INITIAL = draw_initial_weights()


def flatten(weights):
    return np.concatenate([np.asarray(part, np.float64).ravel() for part in weights])


def draw_client(index, round_number, *, size=None, num_epochs=None):
    """One client's examples, and batches of its own number of epochs."""
    size = SIZES[index] if size is None else size
    data = np.random.default_rng([1, index])
    examples = {
        "x": data.normal(size=[size, *SHAPE]).astype(np.float32),
        "y": data.integers(NUM_CLASSES, size=size).astype(np.int32),
    }
    batches = client_training.draw_batches(
        size,
        batch_size=2,
        num_epochs=num_epochs or EPOCHS[index],
        rng=np.random.default_rng([2, index, round_number]),
    )
    return examples, batches


def carry(client, state=()):
    return learning.build_client_data(
        *client_training.pad_client(*client),
        noise_seed=np.int32([1, 2]),
        training_seed=np.int32([3, 4]),
        num_joined=3,
        client_state=state,
    )


def convert(client):
    """The same client for the papers' algorithms."""
    examples, batches = client
    return papers.Client(
        x=examples["x"].reshape([-1, SHAPE[0]]).astype(np.float64),
        y=examples["y"],
        batches=[rows[rows > 0] - 1 for rows in batches],
        num_classes=NUM_CLASSES,
    )


def build_uniform(l2_clip=None):
    return NoPrivacyFactory(
        CohortScheme(Sampling.FIXED, 6, 3),
        l2_clip=l2_clip,
        noise_seeds=NoiseSeeds.CARRIED,
    )


def build_process(case, *, stackable=False, factory=None, algorithm=None, **options):
    if factory is None:
        by_examples = tff.aggregators.MeanFactory() if case.by_examples else None
        factory = by_examples or build_uniform()
    sgdm = tff.learning.optimizers.build_sgdm
    return learning.build_learning_process(
        build_model(stackable),
        factory,
        algorithm or case.algorithm,
        client_optimizer=sgdm(LR, momentum=case.momentum or None),
        server_optimizer=sgdm(case.server_lr),
        initial_weights=INITIAL,
        **options,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """What a round leaves."""

    state: Any
    clients: dict[int, Any]

    @property
    def weights(self):
        return self.state.global_model_weights.trainable

    @property
    def shared(self):
        return self.state.global_model_weights.non_trainable


def run(process, cohorts=COHORTS, draw=draw_client) -> list[Round]:
    """Runs rounds, handing clients what they kept."""
    initial = getattr(process, "initial_client_state", ())
    state, kept, found = process.initialize(), {}, []
    for number, cohort in enumerate(cohorts):
        data = [
            carry(draw(index, number), kept.get(index, initial)) for index in cohort
        ]
        output = process.next(state, data)
        state = output.state
        if initial:
            kept = kept | dict(zip(cohort, output.client_states, strict=True))
        found.append(Round(state=state, clients=kept))
    return found


def follow(case, *, send=lambda message: message, by_examples=None, **changes):
    """The same rounds by the paper's algorithm."""
    by_examples = case.by_examples if by_examples is None else by_examples
    rounds = [
        {index: convert(draw_client(index, number)) for index in cohort}
        for number, cohort in enumerate(COHORTS)
    ]
    return papers.run_rounds(
        case.get_rule(**changes),
        flatten(INITIAL),
        rounds,
        by_examples=by_examples,
        send=send,
    )


def is_close(got, wanted, rtol=1e-5):
    wanted = np.asarray(wanted)
    difference = np.linalg.norm(flatten(got) - wanted)
    return difference <= rtol * np.linalg.norm(wanted)
