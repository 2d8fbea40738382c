"""How a client's own model is made: of what the server holds, on its training part."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import tensorflow as tf

from centaur.local_training import PartSolver, Phase, SplitTraining
from simulation.client_training import LocalLoop
from simulation.model import Model, Weights


class PersonalFit(Protocol):
    """Makes the weights of a client's own model."""

    @property
    def model(self) -> Model:
        """The model."""

    @property
    def num_epochs(self) -> int:
        """Passes over the client's training part."""

    def run(
        self,
        shared: Weights,
        own: Weights,
        examples: Mapping[str, tf.Tensor],
        batches: tf.Tensor,
        seed: tf.Tensor,
    ) -> Weights:
        """Returns the weights of one client's model.

        Args:
            shared: What the server holds.
            own: What the client holds.
            examples: The "x" and "y" of its training part.
            batches: Of `num_epochs` passes over them.
            seed: int32[2], for dropout layers.
        """

    def run_stack(
        self,
        shared: Weights,
        own: Weights,
        examples: Mapping[str, tf.Tensor],
        batches: tf.Tensor,
        seeds: tf.Tensor,
        numbers: Any,
    ) -> Weights:
        """Does so for clients stacked along the first axis of all tensors."""

    def list_numbers(self, shared: Weights, own: Weights) -> Any:
        """Returns the numbers that a stack is given: see `LocalLoop`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadFit:
    """A head over the frozen representation.

    Attributes:
        training: Of the head alone.
        starts_at_shared_head: Whether what the server holds ends with a head that the
            client's begins at.
    """

    training: SplitTraining
    starts_at_shared_head: bool = False

    def __post_init__(self) -> None:
        if self.training.shared is not None:
            raise ValueError(
                "`training` must leave what the server holds as it is. Found a phase "
                "that trains it."
            )

    @property
    def model(self) -> Model:
        """The model."""
        return self.training.split.model

    @property
    def num_epochs(self) -> int:
        """Passes over the client's training part."""
        return self.training.num_epochs

    def run(
        self,
        shared: Weights,
        own: Weights,
        examples: Mapping[str, tf.Tensor],
        batches: tf.Tensor,
        seed: tf.Tensor,
    ) -> Weights:
        """Returns the weights of one client's model. See `PersonalFit`."""
        shared, own = self._begin(shared, own)
        shared, own, _ = self.training.run(shared, own, examples, batches, seed)
        return self.training.combine(shared, own)

    def run_stack(
        self,
        shared: Weights,
        own: Weights,
        examples: Mapping[str, tf.Tensor],
        batches: tf.Tensor,
        seeds: tf.Tensor,
        numbers: Any,
    ) -> Weights:
        """Does so for stacked clients. See `PersonalFit`."""
        shared, own = self._begin(shared, own)
        shared, own, _ = self.training.run_stack(
            shared, own, examples, batches, seeds, numbers
        )
        return self.training.combine(shared, own)

    def list_numbers(self, shared: Weights, own: Weights) -> Any:
        """Returns the numbers that a stack is given."""
        return self.training.list_numbers(*self._begin(shared, own))

    def _begin(self, shared: Weights, own: Weights) -> tuple[Weights, Weights]:
        """Returns what stays and the head to begin with."""
        if not self.starts_at_shared_head:
            return shared, own
        count = self.training.split.num_representation_weights
        return tuple(shared[:count]), tuple(shared[count:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeFit:
    """A whole model that the client trains by itself, from where the server's is.

    Attributes:
        model: The model.
        training: How it is trained.
    """

    model: Model
    training: Phase

    def __post_init__(self) -> None:
        if self.training.num_steps is not None:
            raise ValueError(
                f"`training` must be of whole epochs. Found {self.training.num_steps!r}"
                " steps."
            )

    @property
    def num_epochs(self) -> int:
        """Passes over the client's training part."""
        return self.training.num_epochs

    def run(
        self,
        shared: Weights,
        own: Weights,
        examples: Mapping[str, tf.Tensor],
        batches: tf.Tensor,
        seed: tf.Tensor,
    ) -> Weights:
        """Returns the weights of one client's model. See `PersonalFit`."""
        del own
        return tuple(self._loop.run(shared, examples, batches, seed)[0])

    def run_stack(
        self,
        shared: Weights,
        own: Weights,
        examples: Mapping[str, tf.Tensor],
        batches: tf.Tensor,
        seeds: tf.Tensor,
        numbers: Any,
    ) -> Weights:
        """Does so for stacked clients. See `PersonalFit`."""
        del own
        loop = self._loop
        return tuple(loop.run_stack(shared, examples, batches, seeds, numbers)[0])

    def list_numbers(self, shared: Weights, own: Weights) -> Any:
        """Returns the numbers that a stack is given."""
        del own
        return self._loop.list_numbers(shared)

    @property
    def _loop(self) -> LocalLoop:
        solver = PartSolver(
            optimizer=self.training.optimizer, weight_decay=self.training.weight_decay
        )
        return LocalLoop(model=self.model, solver=solver)
