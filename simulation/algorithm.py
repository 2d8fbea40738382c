"""Federated algorithms: what a client does, keeps and sends, and what the server adds.

`learning.build_learning_process` makes a process of one. The base is federated
averaging; others replace what they do otherwise.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulation import client_training
from simulation.local_solver import OptimizerSolver
from simulation.model import Model, Weights

Arrays = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientContext:
    """What a client knows in a round.

    Attributes:
        initial: The global weights.
        shared: What the server sends beside them.
        state: What the client kept from the last round that it took part in.
        seed: int32[2], of this client, round and configuration alone: for noise.
    """

    initial: Weights
    shared: Weights
    state: Weights
    seed: tf.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientData:
    """A client's data in a round.

    Attributes:
        examples: All of its "x" and "y".
        batches: What `client_training.draw_batches` returned for them.
        seed: int32[2], of this client and round alone: for dropout layers.
    """

    examples: Mapping[str, tf.Tensor]
    batches: tf.Tensor
    seed: tf.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conclusion:
    """What a client makes of its training.

    Attributes:
        update: What it sends, a structure of float32 tensors.
        state: What it keeps: never sent.
    """

    update: Any
    state: Weights = ()


# Returns what a client makes of a round, and the sums of its training.
ClientWork = Callable[
    [ClientContext, ClientData], tuple[Conclusion, client_training.Sums]
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FederatedAveraging:
    """Federated averaging, and FedProx where it has a proximal term.

    Attributes:
        proximal_strength: mu of the clients' proximal term; 0 adds nothing.
    """

    proximal_strength: float = 0.0

    @property
    def name(self) -> str:
        """Its name for people."""
        return "FedProx" if self.proximal_strength else "FedAvg"

    def initialize_global(self, weights: Arrays) -> tuple[np.ndarray, ...]:
        """Returns what the server holds of a model's weights: here all."""
        return tuple(weights)

    def initialize_shared(self, weights: Arrays) -> tuple[np.ndarray, ...]:
        """Returns what the server sends beside the weights, at first."""
        del weights
        return ()

    @property
    def keeps_state(self) -> bool:
        """Whether clients keep something between rounds."""
        return len(self.initialize_client_state((np.zeros(()),))) > 0

    def initialize_client_state(self, weights: Arrays) -> tuple[np.ndarray, ...]:
        """Returns what a client keeps before its first round; () for nothing."""
        del weights
        return ()

    def count_epochs(self, num_epochs: int) -> int:
        """Returns the passes over its examples that a client has batches for.

        Args:
            num_epochs: Those in which what the server holds is trained.
        """
        return num_epochs

    def count_sent(self, num_parameters: int) -> int:
        """Returns how many numbers a client sends, for a model's parameters."""
        return num_parameters

    def build_client_work(
        self,
        model: Model,
        optimizer: tff.learning.optimizers.Optimizer,
        initial_weights: Arrays,
    ) -> ClientWork:
        """Returns a client's work in a round.

        Args:
            model: The model.
            optimizer: The optimizer of what the server holds.
            initial_weights: The model's weights before the first round.
        """
        del initial_weights
        train = self.build_training(model, optimizer)

        def work(
            context: ClientContext, data: ClientData
        ) -> tuple[Conclusion, client_training.Sums]:
            carried, sums = train(
                context.initial,
                data.examples,
                data.batches,
                data.seed,
                self.compute_shift(context),
            )
            return self.conclude(context, carried), sums

        return work

    def build_training(
        self, model: Model, optimizer: tff.learning.optimizers.Optimizer
    ) -> client_training.Training:
        """Returns a client's training."""
        return client_training.build_training(
            model,
            OptimizerSolver(optimizer=optimizer),
            proximal_strength=self.proximal_strength,
        )

    def compute_shift(self, context: ClientContext) -> Weights | None:
        """Returns what a client adds to its gradients; None for nothing."""
        del context
        return None

    def conclude(self, context: ClientContext, carried: Weights) -> Conclusion:
        """Returns what a client sends and keeps.

        Args:
            context: What it knew.
            carried: What its training returned, the trained weights first.
        """
        return Conclusion(update=compute_update(context.initial, carried))

    def wrap_finalizer(
        self, inner: tff.learning.templates.FinalizerProcess
    ) -> tff.learning.templates.FinalizerProcess:
        """Returns the server's step from the mean of what clients send.

        Args:
            inner: The step of the server's optimizer, which takes a mean update.
        """
        return inner

    @property
    def has_own_models(self) -> bool:
        """Whether clients have models of their own."""
        return False

    def personalize(self, weights: Arrays, state: Arrays) -> Arrays:
        """Returns a client's own model: here the global one.

        Args:
            weights: The global weights.
            state: What the client keeps.
        """
        del state
        return weights


def compute_update(initial: Weights, trained: Weights) -> Weights:
    """Returns (initial weights) - (trained weights)."""
    # What a solver carries beside the weights comes after them.
    return tuple(
        before - after for before, after in zip(initial, trained, strict=False)
    )
