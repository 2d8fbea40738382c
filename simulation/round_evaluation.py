"""What a training looks at between its rounds, and at its end."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from simulation import evaluation, table
from simulation.client_state_process import Personalize
from simulation.client_states import Arrays, ClientStates
from simulation.model import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalEvaluation:
    """What there is to say of a training's result.

    Attributes:
        final: Loss and metrics by name: of the final model on all test examples, or,
            where there is no such model, the means over the clients' own models. None
            where the test examples are left alone.
        clients: The same of each test user; None where test data have no users, or
            where there is no model for all.
        own_models: The same with each client's own model, or None.
        validation: The same on what each client holds for choices, or None.
        heads: What of its model each client has for itself; empty where that is not
            asked for.
    """

    final: Mapping[str, float] | None
    clients: evaluation.ClientMetrics | None
    own_models: evaluation.ClientMetrics | None = None
    validation: evaluation.ClientMetrics | None = None
    heads: Mapping[str, Arrays] = dataclasses.field(default_factory=dict)


class Evaluator(Protocol):
    """Evaluates a training."""

    @property
    def columns(self) -> Sequence[str]:
        """The columns of metrics.csv that `evaluate_round` fills."""

    def evaluate_round(
        self,
        weights: evaluation.WeightArrays,
        clients: ClientStates,
        *,
        num_rounds: int,
    ) -> Mapping[str, table.Scalar]:
        """Returns values of the columns after a number of rounds.

        Args:
            weights: What the server holds.
            clients: What the clients keep.
            num_rounds: The rounds that are over.
        """

    def evaluate_final(
        self,
        weights: evaluation.WeightArrays,
        clients: ClientStates,
        *,
        num_rounds: int,
    ) -> FinalEvaluation:
        """Returns what there is to say of the result. See `evaluate_round`."""


class TestEvaluator:
    """Evaluates the global model on test data."""

    # Not a test, though its name begins like one.
    __test__ = False

    def __init__(
        self,
        model: Model,
        selected: evaluation.EvaluationSet,
        *,
        has_test_users: bool,
        personalize: Personalize | None,
    ) -> None:
        """Builds the graph.

        Args:
            model: The model.
            selected: The test examples.
            has_test_users: Whether they are of users.
            personalize: Makes a client's own model of what it keeps; None where
                clients have none.
        """
        self._evaluate = evaluation.Evaluation(model, selected)
        self._names = ("loss", *model.metrics)
        self._has_test_users = has_test_users
        self._personalize = personalize

    @property
    def columns(self) -> Sequence[str]:
        """The test loss and metrics."""
        return [f"test_{name}" for name in self._names]

    def evaluate_round(
        self,
        weights: evaluation.WeightArrays,
        clients: ClientStates,
        *,
        num_rounds: int,
    ) -> Mapping[str, table.Scalar]:
        """Returns the test loss and metrics. See `Evaluator`."""
        del clients, num_rounds
        found = self._evaluate(weights)
        return {f"test_{name}": found[name] for name in self._names}

    def evaluate_final(
        self,
        weights: evaluation.WeightArrays,
        clients: ClientStates,
        *,
        num_rounds: int,
    ) -> FinalEvaluation:
        """Returns the metrics of all, of each, and of own models. See `Evaluator`."""
        del num_rounds
        final, of_clients = self._evaluate.evaluate_all(weights)
        if not self._has_test_users:
            return FinalEvaluation(final=final, clients=None)
        return FinalEvaluation(
            final=final,
            clients=of_clients,
            own_models=self._evaluate_own_models(weights, clients),
        )

    def _evaluate_own_models(
        self, weights: evaluation.WeightArrays, clients: ClientStates
    ) -> evaluation.ClientMetrics | None:
        """Returns the metrics of the clients' own models, None where there are none.

        Clients that never took part have the global one.
        """
        personalize = self._personalize
        if personalize is None:
            return None

        def choose(
            client_id: str, weights: evaluation.WeightArrays
        ) -> Sequence[np.ndarray]:
            state: Any = clients.kept.get(client_id)
            return weights if state is None else personalize(weights, state)

        return self._evaluate.evaluate_clients(weights, personalize=choose)
