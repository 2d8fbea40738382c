"""Learning processes whose clients keep something between rounds.

`tff.learning.templates.LearningProcess` returns values at the server alone. Here the
clients' new states are one more result, placed at the clients, as they came: a part of
the clients' data. Nothing of them is in the server's state.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow_federated as tff

Arrays = tuple[np.ndarray, ...]
Personalize = Callable[[Sequence[np.ndarray], Arrays], Sequence[np.ndarray]]


class ClientStateOutput(NamedTuple):
    """The result of a round.

    Attributes:
        state: The server's, `tff.learning.templates.LearningAlgorithmState`.
        metrics: By part of the process.
        client_states: What each client keeps, in the order of the clients.
    """

    state: Any
    metrics: Any
    client_states: Any


class ClientStateProcess(tff.templates.IterativeProcess):
    """(server state, clients' data with their states) -> `ClientStateOutput`.

    Attributes:
        initial_client_state: What a client has before its first round.
        personalize: (global weights, a client's state) -> the client's own model; None
            where clients have none.
    """

    def __init__(
        self,
        initialize_fn: tff.Computation,
        next_fn: tff.Computation,
        *,
        initial_client_state: Arrays,
        personalize: Personalize | None,
    ) -> None:
        super().__init__(initialize_fn, next_fn)
        self.personalize = personalize
        self.initial_client_state = initial_client_state


def compose(
    initial_weights_fn: tff.Computation,
    work: tff.Computation,
    aggregator: tff.templates.AggregationProcess,
    finalizer: tff.learning.templates.FinalizerProcess,
    *,
    initial_client_state: Arrays,
    personalize: Personalize | None,
    sum_metrics: Callable[[Any], Any],
) -> ClientStateProcess:
    """Returns the process of a client's work, an aggregator and a server's step.

    Args:
        initial_weights_fn: Returns the `ModelWeights` before the first round.
        work: (weights, data) -> (ClientResult, metrics, what the client keeps).
        aggregator: Takes the results' updates and weights.
        finalizer: Takes what the aggregator returns.
        initial_client_state: What a client has before its first round.
        personalize: As in `ClientStateProcess`.
        sum_metrics: Of the metrics at the clients, theirs at the server.
    """
    weights_type, data_type = work.type_signature.parameter
    distributor = tff.learning.templates.build_broadcast_process(weights_type)

    @tff.federated_computation
    def initialize() -> Any:
        return tff.federated_zip(
            tff.learning.templates.LearningAlgorithmState(
                tff.federated_eval(initial_weights_fn, tff.SERVER),
                distributor.initialize(),
                tff.federated_value((), tff.SERVER),
                aggregator.initialize(),
                finalizer.initialize(),
            )
        )

    @tff.federated_computation(
        initialize.type_signature.result, tff.FederatedType(data_type, tff.CLIENTS)
    )
    def next_fn(state: Any, client_data: Any) -> Any:
        sent = distributor.next(state.distributor, state.global_model_weights)
        result, metrics, kept = tff.federated_map(work, (sent.result, client_data))
        mean = aggregator.next(state.aggregator, result.update, result.update_weight)
        stepped = finalizer.next(
            state.finalizer, state.global_model_weights, mean.result
        )
        next_state = tff.federated_zip(
            tff.learning.templates.LearningAlgorithmState(
                stepped.result,
                sent.state,
                state.client_work,
                mean.state,
                stepped.state,
            )
        )
        measured = tff.federated_zip(
            collections.OrderedDict(
                distributor=sent.measurements,
                client_work=sum_metrics(metrics),
                aggregator=mean.measurements,
                finalizer=stepped.measurements,
            )
        )
        return ClientStateOutput(next_state, measured, kept)

    return ClientStateProcess(
        initialize,
        next_fn,
        initial_client_state=initial_client_state,
        personalize=personalize,
    )
