"""CENTAUR and what it is compared with, as algorithms of `simulation.learning`.

Each says what the server holds, what a client keeps to itself, and how a client's own
model is made of the two: by fitting its head on its training examples.

Sources: Shen et al. 2023 (CENTAUR), algorithms 1 and 2, and its baselines: DP-FedAvg
with a fine-tuned head (Yu et al. 2020), PPSGD (Bietti et al. 2022) and PMTL (Hu et al.
2021) with a fine-tuned head.
"""

import abc
import dataclasses
import enum
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from centaur.local_training import PartSolver, Phase, SplitTraining
from centaur.personal_fit import HeadFit, PersonalFit, WholeFit
from centaur.split_model import SplitModel
from simulation import client_training
from simulation.algorithm import (
    ClientContext,
    ClientData,
    ClientWork,
    Conclusion,
    FederatedAveraging,
    compute_update,
)
from simulation.local_solver import Sums
from simulation.model import Model

Arrays = Sequence[np.ndarray]


class HeadState(enum.Enum):
    """Where a client's head begins in a round, and when its own model is made."""

    CLIENT = "client"
    """Where it ended in the last round that the client took part in."""
    REFIT = "refit"
    """At the head of the initial model: nothing is kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersonalAlgorithm(FederatedAveraging, abc.ABC):
    """An algorithm whose clients each end with a model of their own.

    Attributes:
        split: The model.
        final_head: How a client's head is fitted when its own model is made.
    """

    split: SplitModel
    final_head: Phase

    @property
    @abc.abstractmethod
    def final_fit(self) -> PersonalFit:
        """How a client's own model is made of what the server and the client hold."""

    def initialize_own_head(self, weights: Arrays) -> tuple[np.ndarray, ...]:
        """Returns what a client holds that has kept nothing.

        Args:
            weights: The initial model's.
        """
        del weights
        return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadFirst(PersonalAlgorithm):
    """A client fits its head, then trains what the server holds, and sends that alone.

    CENTAUR is the one without a shared head: the server holds the representation.

    Attributes:
        title: Its name for people.
        head: How the head is fitted in a round.
        num_shared_steps: Steps of what the server holds; None for whole epochs.
        shared_epochs: Epochs of it.
        weight_decay: Of what the server holds.
        head_state: Where the head begins.
        shares_head: Whether the server holds a head, on top of which the client's
            own one is added.
    """

    title: str
    head: Phase
    shared_epochs: int = 1
    num_shared_steps: int | None = None
    weight_decay: float = 0.0
    head_state: HeadState = HeadState.CLIENT
    shares_head: bool = False

    def __post_init__(self) -> None:
        if self.proximal_strength:
            raise ValueError(
                f"`proximal_strength` must be 0 for {self.title}. Found "
                f"{self.proximal_strength!r}."
            )

    @property
    def name(self) -> str:
        """Its name for people."""
        return self.title

    @property
    def keeps_state(self) -> bool:
        """Whether clients keep their heads."""
        return self.head_state is HeadState.CLIENT

    @property
    def final_fit(self) -> HeadFit:
        """A fit that begins at the client's own head."""
        training = SplitTraining(
            split=self.split, head=self.final_head, shares_head=self.shares_head
        )
        return HeadFit(training=training)

    def initialize_own_head(self, weights: Arrays) -> tuple[np.ndarray, ...]:
        """Returns the initial model's head, or zeros to add to a shared one."""
        head = tuple(weights[self.split.num_representation_weights :])
        return tuple(np.zeros_like(part) for part in head) if self.shares_head else head

    def initialize_global(self, weights: Arrays) -> tuple[np.ndarray, ...]:
        """Returns the representation, with the head only where it is shared."""
        count = self.split.num_representation_weights
        return tuple(weights) if self.shares_head else tuple(weights[:count])

    def initialize_client_state(self, weights: Arrays) -> tuple[np.ndarray, ...]:
        """Returns the head that a client begins with; () where it keeps none."""
        if self.head_state is HeadState.REFIT:
            return ()
        return self.initialize_own_head(weights)

    def count_epochs(self, num_epochs: int) -> int:
        """Returns the passes of the head and of what the server holds."""
        del num_epochs
        return self.head.num_epochs + self.shared_epochs

    def count_sent(self, num_parameters: int) -> int:
        """Returns how many numbers a client sends."""
        if self.shares_head:
            return num_parameters
        return self.split.num_representation_parameters

    def build_client_work(
        self,
        model: Model,
        optimizer: tff.learning.optimizers.Optimizer,
        initial_weights: Arrays,
    ) -> ClientWork:
        """Returns a client's work: its own head never is in what it sends."""
        del model
        train = SplitTraining(
            split=self.split,
            head=self.head,
            shared=Phase(
                optimizer=optimizer,
                num_epochs=self.shared_epochs,
                num_steps=self.num_shared_steps,
                weight_decay=self.weight_decay,
            ),
            shares_head=self.shares_head,
        )
        start = self.initialize_own_head(initial_weights)

        def work(context: ClientContext, data: ClientData) -> tuple[Conclusion, Sums]:
            shared, own, sums = train(
                context.initial,
                context.state or start,
                data.examples,
                data.batches,
                data.seed,
            )
            update = compute_update(context.initial, shared)
            state = own if context.state else ()
            return Conclusion(update=update, state=state), sums

        return work


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeModel(PersonalAlgorithm):
    """All clients train one whole model; its head is fitted when a client's is made.

    With a proximal strength the clients are pulled towards the global model.

    Attributes:
        title: Its name for people.
        weight_decay: Of all weights.
    """

    title: str
    weight_decay: float = 0.0

    @property
    def name(self) -> str:
        """Its name for people."""
        return self.title

    @property
    def final_fit(self) -> HeadFit:
        """A fit that begins at the global model's head."""
        training = SplitTraining(split=self.split, head=self.final_head)
        return HeadFit(training=training, starts_at_shared_head=True)

    def build_training(
        self, model: Model, optimizer: tff.learning.optimizers.Optimizer
    ) -> client_training.Training:
        """Returns a client's training."""
        return client_training.build_training(
            model,
            PartSolver(optimizer=optimizer, weight_decay=self.weight_decay),
            proximal_strength=self.proximal_strength,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandAlone(PersonalAlgorithm):
    """No federation: each client trains a whole model by itself, from the same start.

    A round does nothing and sends zeros.

    Attributes:
        whole: How a client's model is trained.
    """

    whole: Phase

    @property
    def name(self) -> str:
        """Its name for people."""
        return "stand-alone"

    @property
    def final_fit(self) -> WholeFit:
        """The training of the whole model."""
        return WholeFit(model=self.split.model, training=self.whole)

    def count_epochs(self, num_epochs: int) -> int:
        """Returns one: of the round, in which nothing is trained."""
        del num_epochs
        return 1

    def build_client_work(
        self,
        model: Model,
        optimizer: tff.learning.optimizers.Optimizer,
        initial_weights: Arrays,
    ) -> ClientWork:
        """Returns work that does nothing."""
        del optimizer, initial_weights

        def work(context: ClientContext, data: ClientData) -> tuple[Conclusion, Sums]:
            del data
            update = tuple(tf.zeros_like(part) for part in context.initial)
            return Conclusion(update=update), client_training.build_sums(model)

        return work


def build_centaur_algorithm(
    split: SplitModel,
    *,
    head: Phase,
    shared_epochs: int,
    weight_decay: float = 0.0,
    head_state: HeadState = HeadState.CLIENT,
    final_head: Phase | None = None,
) -> HeadFirst:
    """Returns CENTAUR: Shen et al. 2023, algorithms 1 and 2.

    Args:
        split: The model.
        head: How a client fits its head in a round; its own model's by default too.
        shared_epochs: A client's epochs of the representation.
        weight_decay: Of the representation.
        head_state: Where the head begins.
        final_head: How the head of a client's own model is fitted.
    """
    return HeadFirst(
        title="CENTAUR",
        split=split,
        head=head,
        shared_epochs=shared_epochs,
        weight_decay=weight_decay,
        head_state=head_state,
        final_head=final_head or head,
    )


class PpsgdMode(enum.Enum):
    """Which of two programs PPSGD is."""

    PAPER = "paper"
    """CENTAUR with one step of the head and one of the representation a round."""
    AUTHORS = "authors"
    """A shared head and an own one, summed; an epoch of each a round."""


def build_ppsgd_algorithm(
    split: SplitModel,
    *,
    mode: PpsgdMode,
    head: Phase,
    weight_decay: float = 0.0,
    final_head: Phase,
) -> HeadFirst:
    """Returns PPSGD (Bietti et al. 2022), as CENTAUR is compared with it.

    Args:
        split: The model.
        mode: Which of the two.
        head: How a client's head is trained; PAPER takes its first step alone.
        weight_decay: Of what the server holds.
        final_head: How the head of a client's own model is fitted.
    """
    single = 1 if mode is PpsgdMode.PAPER else None
    return HeadFirst(
        title=f"PPSGD ({mode.value})",
        split=split,
        head=dataclasses.replace(head, num_epochs=1, num_steps=single),
        shared_epochs=1,
        num_shared_steps=single,
        weight_decay=weight_decay,
        final_head=final_head,
        shares_head=mode is PpsgdMode.AUTHORS,
    )
