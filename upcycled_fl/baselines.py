"""The baselines beside FedAvg and FedProx: FedNova, SCAFFOLD, FedDyn and pFedMe.

FedAvgM and FedYogi are FedAvg with another optimizer on the server. What a client keeps
between rounds (control variates, personal models) never leaves it.
"""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulation import client_training
from simulation.algorithm import (
    Arrays,
    ClientContext,
    Conclusion,
    FederatedAveraging,
    compute_update,
)
from simulation.local_solver import (
    ComputeGradients,
    LocalTerms,
    OptimizerSolver,
    Sums,
    initialize_optimizer,
)
from simulation.model import Model, Weights
from upcycled_fl.finalizer import build_zeros, get_weights_type


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedNova(FederatedAveraging):
    """Averages updates over their numbers of steps, and steps by the mean number.

    A client with r times the steps of another moves r times as far; the mean of plain
    updates then favours it. A client sends d_i = update / a_i and a_i, with a_i the sum
    of the weights that its gradients have in its update, momentum and proximal term
    included; the server steps by (mean a_i) (mean d_i). The paper has the norm of these
    weights, which is their sum unless strong momentum and a strong proximal term make
    some of them negative.

    Source: Wang et al. 2020 (FedNova), equations 6-8 and section 4.
    """

    @property
    def name(self) -> str:
        """Its name for people."""
        return "FedNova"

    def count_sent(self, num_parameters: int) -> int:
        """Returns the numbers of d_i and a_i."""
        return num_parameters + 1

    def build_training(
        self, model: Model, optimizer: tff.learning.optimizers.Optimizer
    ) -> client_training.Training:
        """Returns training that measures a_i."""
        return _build_measured_training(model, optimizer, self.proximal_strength)

    def conclude(self, context: ClientContext, carried: Weights) -> Conclusion:
        """Sends (d_i, a_i), both in units of the learning rate."""
        update, reach = _split_reach(context, carried)
        normalized = tuple(tf.math.divide_no_nan(part, reach) for part in update)
        return Conclusion(update=(normalized, reach))

    def wrap_finalizer(
        self, inner: tff.learning.templates.FinalizerProcess
    ) -> tff.learning.templates.FinalizerProcess:
        """Returns the server's step from the means of d_i and a_i."""
        weights_type = get_weights_type(inner)
        update_type = tff.types.to_type((weights_type.trainable, np.float32))

        @tff.tensorflow.computation(update_type)
        def combine(update: Any) -> Any:
            normalized, reach = update
            return tf.nest.map_structure(lambda part: part * reach, normalized)

        @tff.federated_computation(
            inner.initialize.type_signature.result,
            tff.FederatedType(weights_type, tff.SERVER),
            tff.FederatedType(update_type, tff.SERVER),
        )
        def next_fn(state: Any, weights: Any, update: Any) -> Any:
            return inner.next(state, weights, tff.federated_map(combine, update))

        return tff.learning.templates.FinalizerProcess(inner.initialize, next_fn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaffold(FederatedAveraging):
    """Corrects a client's gradients by control variates, its own and the server's.

    A client adds c - c_i to its gradients, keeps as its new c_i the mean of the
    gradients that it met (option II), and sends its update and the change of c_i; the
    server adds `participation` times the mean change to c. With momentum or a proximal
    term the mean is weighted as the gradients are in the update.

    Source: Karimireddy et al. 2020 (SCAFFOLD), algorithm 1.

    Attributes:
        participation: |S| / N, the part of all clients that joins a round.
    """

    participation: float

    def __post_init__(self) -> None:
        _check_participation(self.participation)

    @property
    def name(self) -> str:
        """Its name for people."""
        return "SCAFFOLD"

    def initialize_shared(self, weights: Arrays) -> tuple[np.ndarray, ...]:
        """Returns c = 0."""
        return tuple(np.zeros_like(weight) for weight in weights)

    def initialize_client_state(self, weights: Arrays) -> tuple[np.ndarray, ...]:
        """Returns c_i = 0."""
        return self.initialize_shared(weights)

    def count_sent(self, num_parameters: int) -> int:
        """Returns the numbers of an update and a change of c_i."""
        return 2 * num_parameters

    def build_training(
        self, model: Model, optimizer: tff.learning.optimizers.Optimizer
    ) -> client_training.Training:
        """Returns training that measures the gradients' weights."""
        return _build_measured_training(model, optimizer, self.proximal_strength)

    def compute_shift(self, context: ClientContext) -> Weights:
        """Returns c - c_i."""
        return tuple(
            shared - own
            for shared, own in zip(context.shared, context.state, strict=True)
        )

    def conclude(self, context: ClientContext, carried: Weights) -> Conclusion:
        """Sends the update and the change of c_i; keeps c_i."""
        update, reach = _split_reach(context, carried)
        # update / reach is the mean of the gradients plus c - c_i. A client that took
        # no step has met none.
        change = tuple(
            tf.where(reach > 0, tf.math.divide_no_nan(part, reach) - shared, 0.0)
            for part, shared in zip(update, context.shared, strict=True)
        )
        state = tuple(
            own + part for own, part in zip(context.state, change, strict=True)
        )
        return Conclusion(update=(update, change), state=state)

    def wrap_finalizer(
        self, inner: tff.learning.templates.FinalizerProcess
    ) -> tff.learning.templates.FinalizerProcess:
        """Returns the server's step, which moves c too."""
        weights_type = get_weights_type(inner)
        update_type = tff.types.to_type((weights_type.trainable,) * 2)

        @tff.tensorflow.computation(weights_type, weights_type.trainable)
        def move_shared(weights: Any, change: Any) -> Any:
            shared = tuple(
                old + self.participation * part
                for old, part in zip(weights.non_trainable, change, strict=True)
            )
            return tff.learning.models.ModelWeights(weights.trainable, shared)

        @tff.federated_computation(
            inner.initialize.type_signature.result,
            tff.FederatedType(weights_type, tff.SERVER),
            tff.FederatedType(update_type, tff.SERVER),
        )
        def next_fn(state: Any, weights: Any, update: Any) -> Any:
            output = inner.next(state, weights, update[0])
            moved = tff.federated_map(move_shared, (output.result, update[1]))
            return tff.templates.MeasuredProcessOutput(
                output.state, moved, output.measurements
            )

        return tff.learning.templates.FinalizerProcess(inner.initialize, next_fn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedDyn(FederatedAveraging):
    """Dynamic regularization: each client's linear term makes optima agree.

    A client minimises its loss - <g_i, w> + alpha / 2 times the squared distance from
    the global weights, and keeps g_i + alpha (update). The server keeps h, adds
    `participation` alpha (mean update) to it, and steps by the mean update + h / alpha.
    alpha is the proximal strength. Clients send their updates alone.

    Source: Acar et al. 2021 (FedDyn), algorithm 1.

    Attributes:
        participation: |S| / N, the part of all clients that joins a round.
    """

    participation: float

    def __post_init__(self) -> None:
        _check_participation(self.participation)
        if not 0 < self.proximal_strength < float("inf"):
            raise ValueError(
                "`proximal_strength` must be positive and finite for FedDyn: it is "
                f"its alpha. Found {self.proximal_strength!r}."
            )

    @property
    def name(self) -> str:
        """Its name for people."""
        return "FedDyn"

    def initialize_client_state(self, weights: Arrays) -> tuple[np.ndarray, ...]:
        """Returns g_i = 0."""
        return tuple(np.zeros_like(weight) for weight in weights)

    def compute_shift(self, context: ClientContext) -> Weights:
        """Returns -g_i."""
        return tuple(-part for part in context.state)

    def conclude(self, context: ClientContext, carried: Weights) -> Conclusion:
        """Sends the update; keeps g_i."""
        update = compute_update(context.initial, carried)
        state = tuple(
            own + self.proximal_strength * part
            for own, part in zip(context.state, update, strict=True)
        )
        return Conclusion(update=update, state=state)

    def wrap_finalizer(
        self, inner: tff.learning.templates.FinalizerProcess
    ) -> tff.learning.templates.FinalizerProcess:
        """Returns the server's step by the mean update + h / alpha."""
        weights_type = get_weights_type(inner)
        drift_type = weights_type.trainable
        start = tff.tensorflow.computation(build_zeros(drift_type))

        @tff.tensorflow.computation(drift_type, drift_type)
        def combine(drift: Any, update: Any) -> Any:
            drift = tuple(
                old + self.participation * part
                for old, part in zip(drift, update, strict=True)
            )
            step = tuple(a + b for a, b in zip(update, drift, strict=True))
            return drift, step

        @tff.federated_computation
        def initialize() -> Any:
            # h / alpha is kept.
            return tff.federated_zip(
                (inner.initialize(), tff.federated_eval(start, tff.SERVER))
            )

        @tff.federated_computation(
            initialize.type_signature.result,
            tff.FederatedType(weights_type, tff.SERVER),
            tff.FederatedType(drift_type, tff.SERVER),
        )
        def next_fn(state: Any, weights: Any, update: Any) -> Any:
            drift, step = tff.federated_map(combine, (state[1], update))
            output = inner.next(state[0], weights, step)
            next_state = tff.federated_zip((output.state, drift))
            return tff.templates.MeasuredProcessOutput(
                next_state, output.result, output.measurements
            )

        return tff.learning.templates.FinalizerProcess(initialize, next_fn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PFedMe(FederatedAveraging):
    """A personal model for each client, pulled towards a local copy of the global one.

    On each batch a client takes `personal_steps` steps of its personal model theta on
    loss(theta) + penalty / 2 ||theta - w_i||^2, at the rate of its optimizer, and then
    moves w_i by -local_lr penalty (w_i - theta). It sends w_i and keeps theta. The
    server's rate is the paper's beta.

    Source: T. Dinh et al. 2020 (pFedMe), algorithm 1.

    Attributes:
        penalty: lambda of the paper, positive.
        personal_steps: K, the steps on a batch.
        local_lr: eta, the rate of w_i, positive.
    """

    penalty: float = 15.0
    personal_steps: int = 5
    local_lr: float = 0.005

    def __post_init__(self) -> None:
        for name in ("penalty", "local_lr"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(
                    f"`{name}` must be positive and finite. Found {value!r}."
                )
        if self.personal_steps < 1:
            raise ValueError(
                f"`personal_steps` must be >= 1. Found {self.personal_steps!r}."
            )
        if self.proximal_strength:
            raise ValueError(
                "`proximal_strength` must be 0 for pFedMe, whose pull is `penalty`. "
                f"Found {self.proximal_strength!r}."
            )

    @property
    def name(self) -> str:
        """Its name for people."""
        return "pFedMe"

    def initialize_client_state(self, weights: Arrays) -> tuple[np.ndarray, ...]:
        """Returns the weights before training, for a personal model."""
        return tuple(weights)

    def build_training(
        self, model: Model, optimizer: tff.learning.optimizers.Optimizer
    ) -> client_training.Training:
        """Returns training that carries w_i and theta."""
        solver = _MoreauSolver(optimizer=optimizer, rule=self)
        return client_training.build_training(model, solver)

    def conclude(self, context: ClientContext, carried: Weights) -> Conclusion:
        """Sends the update; keeps theta."""
        update = compute_update(context.initial, carried)
        return Conclusion(update=update, state=tuple(carried[len(update) :]))

    @property
    def has_own_models(self) -> bool:
        """True: theta."""
        return True

    def personalize(self, weights: Arrays, state: Arrays) -> Arrays:
        """Returns theta."""
        del weights
        return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MoreauSolver:
    """pFedMe's steps; carries w_i and then theta."""

    optimizer: tff.learning.optimizers.Optimizer
    rule: PFedMe

    def begin(self, weights: Weights) -> Weights:
        return (*weights, *weights)

    def initialize(self, carried: Weights) -> Any:
        return initialize_optimizer(self.optimizer, carried[len(carried) // 2 :])

    def step(
        self,
        compute_gradients: ComputeGradients,
        carried: Weights,
        state: Any,
        terms: LocalTerms,
    ) -> tuple[Weights, Any, Sums]:
        del terms
        count = len(carried) // 2
        local, personal = carried[:count], tuple(carried[count:])
        pull = LocalTerms(initial=tuple(local), strength=self.rule.penalty)
        sums: Sums = {}
        for number in range(self.rule.personal_steps):
            gradients, found = compute_gradients(personal)
            gradients = pull.add_gradients(gradients, personal)
            state, stepped = self.optimizer.next(state, personal, tuple(gradients))
            personal = tuple(stepped)
            # What is measured is the model that the batch found.
            sums = found if number == 0 else sums
        rate = self.rule.local_lr * self.rule.penalty
        local = tuple(
            old - rate * (old - own) for old, own in zip(local, personal, strict=True)
        )
        return (*local, *personal), state, sums


def _build_measured_training(
    model: Model, optimizer: tff.learning.optimizers.Optimizer, strength: float
) -> client_training.Training:
    return client_training.build_training(
        model,
        OptimizerSolver(optimizer=optimizer, measures_reach=True),
        proximal_strength=strength,
    )


def _split_reach(context: ClientContext, carried: Weights) -> tuple[Weights, tf.Tensor]:
    """Returns the update, and the learning rate times a_i."""
    return compute_update(context.initial, carried), -carried[-1]


def _check_participation(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"`participation` must be in (0, 1]. Found {value!r}.")
