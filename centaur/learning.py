"""CENTAUR as a learning process: the server's state is the representation alone.

Source: Shen et al. 2023, algorithms 1 and 2.
"""

from typing import Any

import numpy as np
import tensorflow_federated as tff

from centaur.algorithms import HeadState, build_centaur_algorithm
from centaur.local_training import Phase
from centaur.split_model import SplitModel
from simulation import learning


def build_centaur(
    split: SplitModel,
    aggregator_factory: learning.AggregationFactory,
    *,
    head: Phase,
    shared_epochs: int,
    client_optimizer: tff.learning.optimizers.Optimizer,
    server_optimizer: tff.learning.optimizers.Optimizer,
    initial_weights: tuple[np.ndarray, ...],
    weight_decay: float = 0.0,
    head_state: HeadState = HeadState.CLIENT,
    measure_clients: bool = True,
) -> Any:
    """Returns CENTAUR under any aggregator.

    A client fits its head over features that are computed once, with the representation
    frozen, then trains the representation; the change of that alone is what the
    aggregator is given. What its noise costs is what it costs under any training, with
    one exception: where clients keep their heads and not all join every round, only
    Poisson sampling is proven to amplify (docs/privacy.md).

    Args:
        split: The model.
        aggregator_factory: As `learning.build_learning_process` takes it.
        head: How a client fits its head.
        shared_epochs: A client's epochs of the representation.
        client_optimizer: That of the representation at the clients.
        server_optimizer: The optimizer of the server.
        initial_weights: The whole model's weights before the first round; the head is
            what clients begin with.
        weight_decay: Of the representation.
        head_state: Where a client's head begins in a round.
        measure_clients: As `learning.build_learning_process` takes it.

    Returns:
        What `learning.build_learning_process` returns: a
        `tff.learning.templates.LearningProcess` under HeadState.REFIT, a
        `ClientStateProcess`, whose clients keep their heads, under HeadState.CLIENT.
        The trainable weights in its state are the representation's.
    """
    return learning.build_learning_process(
        split.model,
        aggregator_factory,
        build_centaur_algorithm(
            split,
            head=head,
            shared_epochs=shared_epochs,
            weight_decay=weight_decay,
            head_state=head_state,
        ),
        client_optimizer=client_optimizer,
        server_optimizer=server_optimizer,
        initial_weights=initial_weights,
        measure_clients=measure_clients,
    )
