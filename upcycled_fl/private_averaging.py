"""FedAvg and FedProx with noise that each client adds by itself.

Source: Yin et al. 2024 (Upcycled-FL), section 5 and algorithm 2. What the noise is
worth is in `upcycled_fl.accounting`, by named accountants; example-level, for each
client.
"""

import dataclasses

import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp.random_bits import fold_in
from simulation import client_training
from simulation.algorithm import (
    ClientContext,
    Conclusion,
    FederatedAveraging,
    compute_update,
)
from simulation.linear_models import ONE_OUTPUT
from simulation.model import Model, Weights
from upcycled_fl import accounting, exact_solver, perturbation

# Streams of a client's seed, apart from those that the aggregators' noise uses.
_OUTPUT_STREAM, _OBJECTIVE_STREAM, _RESIDUAL_STREAM = 2**40, 2**40 + 1, 2**40 + 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivateAveraging(FederatedAveraging):
    """Federated averaging of models that clients perturb.

    Under output perturbation a client clips its model, not its update, to l2_clip and
    adds Gaussian noise. Under objective perturbation it adds <n, w> to its objective,
    and noise to the solution where the perturbation has a residual. The exact solver
    takes the place of SGD where the perturbation says that the client minimises to a
    tolerance: for `linear_models.build_one_output_logistic_regression` alone.

    Attributes:
        perturbation: The perturbation; its mu, where it has one, is the proximal
            strength.
    """

    perturbation: accounting.OutputPerturbation | accounting.ObjectivePerturbation

    def __post_init__(self) -> None:
        for mu in (getattr(self._minimiser, "mu", None), self._objective_mu):
            if mu is not None and mu != self.proximal_strength:
                raise ValueError(
                    "`proximal_strength` must be the perturbation's mu, "
                    f"{mu!r}. Found {self.proximal_strength!r}."
                )

    @property
    def name(self) -> str:
        """Its name for people."""
        return f"{super().name} with {self.perturbation.kind.value} perturbation"

    @property
    def gradient_tolerance(self) -> float | None:
        """The gradient's norm up to which clients minimise; None for SGD."""
        if isinstance(self.perturbation, accounting.OutputPerturbation):
            minimiser = self.perturbation.minimiser
            return None if minimiser is None else minimiser.gradient_tolerance
        residual = self.perturbation.residual
        return None if residual is None else residual.gradient_tolerance

    def build_training(
        self, model: Model, optimizer: tff.learning.optimizers.Optimizer
    ) -> client_training.Training:
        """Returns SGD, or the exact solver.

        Raises:
            ValueError: If the exact solver does not know the model.
        """
        if self.gradient_tolerance is None:
            return super().build_training(model, optimizer)
        if model.name != ONE_OUTPUT:
            raise ValueError(
                f"`model` must be {ONE_OUTPUT} for the exact solver. "
                f"Found {model.name!r}."
            )
        return exact_solver.build_exact_solver(
            mu=self.proximal_strength, tolerance=self.gradient_tolerance
        )

    def compute_shift(self, context: ClientContext) -> Weights | None:
        """Returns the objective's noise n; None under output perturbation."""
        if isinstance(self.perturbation, accounting.OutputPerturbation):
            return None
        return perturbation.draw_spherical_noise(
            [part.shape for part in context.initial],
            self.perturbation.noise_rate,
            _fold(context, _OBJECTIVE_STREAM),
        )

    def conclude(self, context: ClientContext, carried: Weights) -> Conclusion:
        """Sends the perturbed model, as an update."""
        weights = tuple(carried)
        if isinstance(self.perturbation, accounting.OutputPerturbation):
            weights = perturbation.add_gaussian_noise(
                perturbation.clip_to_norm(weights, self.perturbation.l2_clip),
                self.perturbation.local_stddev,
                _fold(context, _OUTPUT_STREAM),
            )
        elif self.perturbation.residual is not None:
            noise = perturbation.draw_spherical_noise(
                [part.shape for part in context.initial],
                self.perturbation.residual.rate,
                _fold(context, _RESIDUAL_STREAM),
            )
            weights = tuple(a + b for a, b in zip(weights, noise, strict=True))
        return Conclusion(update=compute_update(context.initial, weights))

    @property
    def _minimiser(self) -> accounting.ExactMinimiser | None:
        return getattr(self.perturbation, "minimiser", None)

    @property
    def _objective_mu(self) -> float | None:
        return getattr(self.perturbation, "mu", None)


def _fold(context: ClientContext, stream: int) -> tf.Tensor:
    return fold_in(context.seed, tf.constant(stream, tf.int64))
