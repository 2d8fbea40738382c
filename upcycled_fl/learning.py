"""Upcycled-FL as a learning process: a baseline, and a server step without clients.

Source: Yin et al. 2024, algorithm 1. One round is the paper's two steps.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow_federated as tff

from simulation import learning
from simulation.algorithm import FederatedAveraging
from simulation.model import Model
from upcycled_fl import finalizer, schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Upcycling:
    """The even steps of a process.

    Attributes:
        coefficients: The schedule of their coefficients.
        num_steps: How many of them the schedule is computed for; the last coefficient
            is used from there on.
    """

    coefficients: schedule.Schedule
    num_steps: int

    def __post_init__(self) -> None:
        schedule.check_schedule(self.coefficients)
        if self.num_steps < 1:
            raise ValueError(f"`num_steps` must be >= 1. Found {self.num_steps!r}.")

    def compute_table(self) -> np.ndarray:
        """Returns the coefficients, float32[num_steps]."""
        return schedule.compute_coefficient_table(self.coefficients, self.num_steps)


def build_upcycled_fl(
    model: Model,
    aggregator_factory: learning.AggregationFactory,
    *,
    client_optimizer: tff.learning.optimizers.Optimizer,
    server_optimizer: tff.learning.optimizers.Optimizer,
    initial_weights: tuple[np.ndarray, ...],
    upcycling: Upcycling,
    proximal_strength: float = 0.0,
    algorithm: FederatedAveraging | None = None,
    carried_seeds: bool = True,
    measure_clients: bool = True,
) -> Any:
    """Returns a baseline with an even step by the server after each round.

    The baseline is FedAvg (SGD at 1 on the server), FedProx (a proximal strength),
    FedAvgM (momentum on the server), FedYogi (TFF's Yogi on the server), or any
    algorithm of `upcycled_fl.baselines` and `upcycled_fl.private_averaging`, under any
    aggregator: none, or one with noise. The even step is post-processing: a round
    costs what the baseline's does.

    Args:
        model: The model.
        aggregator_factory: As `learning.build_learning_process` takes it.
        client_optimizer: The optimizer of the clients.
        server_optimizer: The optimizer of the odd step.
        initial_weights: The weights before the first round.
        upcycling: The even steps.
        proximal_strength: mu of the clients' proximal term; positive where the
            schedule is one of lambda, and then its mu.
        algorithm: The baseline where it is more than FedAvg or FedProx; its proximal
            strength is then its own.
        carried_seeds: As `learning.build_learning_process` takes it.
        measure_clients: As `learning.build_learning_process` takes it.

    Returns:
        What `learning.build_learning_process` returns: a
        `tff.learning.templates.LearningProcess` unless clients keep something. The
        finalizer's state is `finalizer.build_upcycled_finalizer`'s.

    Raises:
        ValueError: If the schedule's mu is not the proximal strength, or that is given
            beside an algorithm.
    """
    if algorithm is not None and proximal_strength:
        raise ValueError(
            "`proximal_strength` must be 0 where an algorithm is given, which has its "
            f"own. Found {proximal_strength!r}."
        )
    if algorithm is None:
        algorithm = FederatedAveraging(proximal_strength=proximal_strength)
    proximal_strength = algorithm.proximal_strength
    mu = getattr(upcycling.coefficients, "mu", None)
    if mu is not None and mu != proximal_strength:
        raise ValueError(
            "`proximal_strength` must be the mu of the schedule of lambda, "
            f"{mu!r}; without a proximal term give the coefficient itself "
            f"(ConstantCoefficient). Found {proximal_strength!r}."
        )
    return learning.build_learning_process(
        model,
        aggregator_factory,
        algorithm,
        client_optimizer=client_optimizer,
        server_optimizer=server_optimizer,
        initial_weights=initial_weights,
        carried_seeds=carried_seeds,
        measure_clients=measure_clients,
        wrap_finalizer=functools.partial(
            finalizer.build_upcycled_finalizer,
            coefficients=upcycling.compute_table(),
        ),
    )
