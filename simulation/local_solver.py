"""How a client solves its local problem: steps on batches, with a pull and a shift.

The problem is its loss, plus mu / 2 times the squared distance from where it started,
plus a linear term: what FedProx, and methods with control variates, add to the loss.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import tensorflow as tf
import tensorflow_federated as tff

from simulation.model import Weights

Sums = Mapping[str, tf.Tensor]
# The gradient of a batch's mean loss at some weights, and sums over the batch.
ComputeGradients = Callable[[Weights], tuple[Weights, Sums]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalTerms:
    """What a client's problem has beside the loss.

    Attributes:
        initial: The weights that the client started with.
        strength: mu, a number or a scalar tensor; None for no proximal term.
        shift: The gradient of the linear term; None for no such term.
    """

    initial: Weights
    strength: Any = None
    shift: Weights | None = None

    def add_gradients(self, gradients: Weights, weights: Weights) -> Weights:
        """Returns gradients with those of the terms."""
        if self.strength is not None:
            gradients = tuple(
                gradient + self.strength * (weight - start)
                for gradient, weight, start in zip(
                    gradients, weights, self.initial, strict=True
                )
            )
        if self.shift is not None:
            gradients = tuple(
                gradient + part
                for gradient, part in zip(gradients, self.shift, strict=True)
            )
        return gradients


class LocalSolver(Protocol):
    """Takes a step on each batch.

    What it carries from step to step is a tuple of tensors, the first of which are the
    client's weights, and a state.
    """

    def begin(self, weights: Weights) -> Weights:
        """Returns what is carried before the first step."""

    def initialize(self, carried: Weights) -> Any:
        """Returns the state before the first step."""

    def step(
        self,
        compute_gradients: ComputeGradients,
        carried: Weights,
        state: Any,
        terms: LocalTerms,
    ) -> tuple[Weights, Any, Sums]:
        """Returns what is carried after a step, the state, and sums over the batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSolver:
    """One step of an optimizer, of the gradient of the whole problem.

    Attributes:
        optimizer: The optimizer; its momentum takes up the terms' gradients too.
        measures_reach: Whether one scalar more is carried: how far the client moves
            where every gradient is 1, as a number below 0. For SGD with momentum and a
            proximal term that is, over the learning rate, the sum of the weights with
            which its gradients are in its update (Wang et al. 2020, FedNova, section
            4: the norm of a_i).
    """

    optimizer: tff.learning.optimizers.Optimizer
    measures_reach: bool = False

    def begin(self, weights: Weights) -> Weights:
        """Returns the weights, and the scalar if it is carried."""
        reach = (tf.zeros([], tf.float32),) * self.measures_reach
        return (*weights, *reach)

    def initialize(self, carried: Weights) -> Any:
        """Returns the optimizer's state."""
        return initialize_optimizer(self.optimizer, carried)

    def step(
        self,
        compute_gradients: ComputeGradients,
        carried: Weights,
        state: Any,
        terms: LocalTerms,
    ) -> tuple[Weights, Any, Sums]:
        """Takes the step."""
        count = len(carried) - self.measures_reach
        weights, reach = carried[:count], carried[count:]
        gradients, sums = compute_gradients(weights)
        gradients = terms.add_gradients(gradients, weights)
        if self.measures_reach:
            zero = (tf.zeros_like(reach[0]),)
            pull = LocalTerms(initial=zero, strength=terms.strength)
            one = (tf.ones_like(reach[0]),)
            gradients = (*gradients, *pull.add_gradients(one, reach))
        state, stepped = self.optimizer.next(state, tuple(carried), tuple(gradients))
        return tuple(stepped), state, sums


def initialize_optimizer(
    optimizer: tff.learning.optimizers.Optimizer, weights: Weights
) -> Any:
    """Returns the state of an optimizer before its first step on some weights."""
    return optimizer.initialize(
        tuple(tf.TensorSpec(part.shape, part.dtype) for part in weights)
    )
