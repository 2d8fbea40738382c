"""A client's work on a split model: its head over frozen features, then the rest.

What the server holds is the representation, with a head of its own where clients share
one. What a client holds is its own head, which is added to the shared one if there is
such. A phase moves one of the two and leaves the other as it is; the features are
computed once for all steps of the head.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from centaur.split_model import SplitModel
from simulation import client_training
from simulation.client_training import LocalLoop
from simulation.local_solver import (
    ComputeGradients,
    LocalTerms,
    Sums,
    initialize_optimizer,
)
from simulation.model import Model, Weights

_HEAD_STREAM = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """How one part of a model is trained on a client.

    Attributes:
        optimizer: Takes the steps; it starts afresh in every phase.
        num_epochs: Passes over the client's examples.
        num_steps: Steps after which the phase ends all the same; None for no such end.
        weight_decay: What of the weights is added to their gradients.
    """

    optimizer: tff.learning.optimizers.Optimizer
    num_epochs: int
    num_steps: int | None = None
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.num_epochs < 1:
            raise ValueError(f"`num_epochs` must be >= 1. Found {self.num_epochs!r}.")
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"`num_steps` must be >= 1. Found {self.num_steps!r}.")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(
                f"`weight_decay` must be finite and >= 0. Found {self.weight_decay!r}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartSolver:
    """An optimizer's steps on the first of the weights; the others stay.

    Attributes:
        optimizer: The optimizer.
        num_frozen: How many of the last weights stay.
        weight_decay: What of the weights that move is added to their gradients.
    """

    optimizer: tff.learning.optimizers.Optimizer
    num_frozen: int = 0
    weight_decay: float = 0.0

    def begin(self, weights: Weights) -> Weights:
        """Returns the weights."""
        return tuple(weights)

    def initialize(self, carried: Weights) -> Any:
        """Returns the optimizer's state."""
        return initialize_optimizer(self.optimizer, self._divide(carried)[0])

    def step(
        self,
        compute_gradients: ComputeGradients,
        carried: Weights,
        state: Any,
        terms: LocalTerms,
    ) -> tuple[Weights, Any, Sums]:
        """Takes the step."""
        moved, frozen = self._divide(carried)
        gradients, sums = compute_gradients(carried)
        gradients = self._divide(terms.add_gradients(gradients, carried))[0]
        if self.weight_decay:
            gradients = tuple(
                gradient + self.weight_decay * weight
                for gradient, weight in zip(gradients, moved, strict=True)
            )
        state, stepped = self.optimizer.next(state, moved, tuple(gradients))
        return (*stepped, *frozen), state, sums

    def _divide(self, weights: Weights) -> tuple[Weights, Weights]:
        count = len(weights) - self.num_frozen
        return tuple(weights[:count]), tuple(weights[count:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitTraining:
    """Trains a client's own head, and after it what the server holds.

    Attributes:
        split: The model.
        head: How the head is trained.
        shared: How what the server holds is trained; None leaves it as it is.
        shares_head: Whether the server holds a head too, to which the client's own is
            added.
    """

    split: SplitModel
    head: Phase
    shared: Phase | None = None
    shares_head: bool = False

    @property
    def num_epochs(self) -> int:
        """Passes over the examples that a client must have batches for."""
        shared = 0 if self.shared is None else self.shared.num_epochs
        return self.head.num_epochs + shared

    def __call__(
        self,
        shared: Weights,
        own: Weights,
        examples: Mapping[str, tf.Tensor],
        batches: tf.Tensor,
        seed: tf.Tensor,
    ) -> tuple[Weights, Weights, Sums]:
        """Returns what the server holds and the client's head, trained, and the sums.

        The engine may run it for many clients together.

        Args:
            shared: What the server holds: the representation, and its head if any.
            own: The client's head.
            examples: All of the client's "x" and "y".
            batches: Of `num_epochs` passes; the first are the head's.
            seed: int32[2], for dropout layers.
        """
        if not self.split.model.stackable:
            return self.run(shared, own, examples, batches, seed)
        return client_training.call_stacked(
            self.run_stack,
            (
                tuple(shared),
                tuple(own),
                dict(examples),
                batches,
                seed,
                self.list_numbers(shared, own),
            ),
        )

    def run(
        self,
        shared: Weights,
        own: Weights,
        examples: Mapping[str, tf.Tensor],
        batches: tf.Tensor,
        seed: tf.Tensor,
    ) -> tuple[Weights, Weights, Sums]:
        """Does the same for one client alone."""

        def run_loop(
            loop: LocalLoop,
            name: str,
            weights: Weights,
            examples: Mapping[str, tf.Tensor],
            batches: tf.Tensor,
            seed: tf.Tensor,
        ) -> tuple[Weights, Sums]:
            del name
            return loop.run(weights, examples, batches, seed)

        return self._train(shared, own, examples, batches, seed, run_loop, _apply)

    def run_stack(
        self,
        shared: Weights,
        own: Weights,
        examples: Mapping[str, tf.Tensor],
        batches: tf.Tensor,
        seeds: tf.Tensor,
        numbers: Mapping[str, Any],
    ) -> tuple[Weights, Weights, Sums]:
        """Does the same for clients stacked along the first axis of all tensors."""

        def run_loop(
            loop: LocalLoop,
            name: str,
            weights: Weights,
            examples: Mapping[str, tf.Tensor],
            batches: tf.Tensor,
            seeds: tf.Tensor,
        ) -> tuple[Weights, Sums]:
            return loop.run_stack(weights, examples, batches, seeds, numbers[name])

        return self._train(
            shared, own, examples, batches, seeds, run_loop, _apply_to_stack
        )

    def list_numbers(self, shared: Weights, own: Weights) -> dict[str, Any]:
        """Returns the numbers that a stack is given: see `LocalLoop`."""
        _, tail = self._divide(shared)
        numbers = {"head": self._head_loop.list_numbers((*own, *tail))}
        if self.shared is not None:
            numbers["shared"] = self._shared_loop.list_numbers((*shared, *own))
        return numbers

    def combine(self, shared: Weights, own: Weights) -> Weights:
        """Returns the weights of the whole model: of a client, or of a stack."""
        representation, tail = self._divide(shared)
        return (*representation, *_add(own, tail))

    def _train(
        self,
        shared: Weights,
        own: Weights,
        examples: Mapping[str, tf.Tensor],
        batches: tf.Tensor,
        seeds: tf.Tensor,
        run_loop: Callable[..., Any],
        apply: Callable[..., Any],
    ) -> tuple[Weights, Weights, Sums]:
        representation, tail = self._divide(shared)
        for_head, for_shared = apply(self._divide_batches, batches)
        features = apply(
            lambda given: self.split.compute_features(given[0], given[1], None),
            (representation, examples["x"]),
        )
        # Of the other phase's streams another; only dropout layers draw.
        head_seeds = seeds + _HEAD_STREAM
        over_features = collections.OrderedDict(x=features, y=examples["y"])
        carried, sums = run_loop(
            self._head_loop, "head", (*own, *tail), over_features, for_head, head_seeds
        )
        own = tuple(carried[: len(own)])
        if self.shared is None:
            return tuple(shared), own, sums
        carried, sums = run_loop(
            self._shared_loop, "shared", (*shared, *own), examples, for_shared, seeds
        )
        return tuple(carried[: len(shared)]), own, sums

    def _divide_batches(self, batches: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the head's batches and the others', each with zeros behind them."""
        num_rows = client_training.count_rows(batches)
        num_head = num_rows * self.head.num_epochs // self.num_epochs
        index = tf.range(tf.shape(batches)[0])

        def select(first: tf.Tensor, last: tf.Tensor, phase: Phase | None) -> tf.Tensor:
            if phase is not None and phase.num_steps is not None:
                last = tf.minimum(last, first + phase.num_steps)
            rows = tf.gather(
                batches, tf.minimum(index + first, tf.shape(batches)[0] - 1)
            )
            return tf.where((index + first < last)[:, tf.newaxis], rows, 0)

        return (
            select(tf.constant(0), num_head, self.head),
            select(num_head, num_rows, self.shared),
        )

    @property
    def _head_loop(self) -> LocalLoop:
        """Steps of the client's head, on features."""
        count = self.split.num_head_weights

        def predict(
            weights: Weights, x: tf.Tensor, seed: tf.Tensor | None
        ) -> tf.Tensor:
            return self.split.apply_head(
                _add(weights[:count], weights[count:]), x, seed
            )

        return _build_loop(
            self.split.model, predict, self.head, num_frozen=count * self.shares_head
        )

    @property
    def _shared_loop(self) -> LocalLoop:
        """Steps of what the server holds, on examples."""
        assert self.shared is not None
        count = self.split.num_head_weights

        def predict(
            weights: Weights, x: tf.Tensor, seed: tf.Tensor | None
        ) -> tf.Tensor:
            whole = self.combine(weights[:-count], weights[-count:])
            return self.split.model.predict(whole, x, seed)

        return _build_loop(self.split.model, predict, self.shared, num_frozen=count)

    def _divide(self, shared: Weights) -> tuple[Weights, Weights]:
        """Returns the representation, and the server's head or ()."""
        count = self.split.num_representation_weights
        return tuple(shared[:count]), tuple(shared[count:])


def _build_loop(
    model: Model, predict: Callable[..., tf.Tensor], phase: Phase, *, num_frozen: int
) -> LocalLoop:
    return LocalLoop(
        model=dataclasses.replace(model, predict=predict, layers=()),
        solver=PartSolver(
            optimizer=phase.optimizer,
            num_frozen=num_frozen,
            weight_decay=phase.weight_decay,
        ),
    )


def _add(own: Weights, tail: Weights) -> Weights:
    """Returns the head: the client's own, on top of the server's where there is one."""
    if not tail:
        return tuple(own)
    return tuple(a + b for a, b in zip(own, tail, strict=True))


def _apply(function: Callable[..., Any], given: Any) -> Any:
    return function(given)


def _apply_to_stack(function: Callable[..., Any], given: Any) -> Any:
    return tf.vectorized_map(function, given, fallback_to_while_loop=False)
