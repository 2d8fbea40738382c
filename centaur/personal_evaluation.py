"""Evaluation of each client's own model, made on its training part alone.

A client's examples are in three parts. Its model is made of what the server holds, on
the first; the second decides between settings, the third is looked at when everything
is decided. What is not the training part enters after the model is made: no label of it
can reach a weight.

Making and evaluating is a computation at the clients, which the engine runs.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from centaur.personal_fit import PersonalFit
from simulation import (
    client_data,
    client_training,
    execution,
    round_evaluation,
    seeds,
    table,
)
from simulation.client_states import ClientStates
from simulation.evaluation import ClientMetrics, compute_example_values
from simulation.model import compute_means
from simulation.population.federated_data import Examples, FederatedData

Arrays = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersonalLoader:
    """Makes a client's data for the evaluation from its key.

    Attributes:
        train: The training parts.
        held: The parts that are evaluated, one after the other.
        batch_size: Examples in a batch of the fit.
        num_epochs: Passes of the fit.
        padded: Whether clients of similar size get equal shapes.
    """

    train: FederatedData
    held: tuple[FederatedData, ...]
    batch_size: int
    num_epochs: int
    padded: bool

    def __call__(self, key: client_data.ClientKey) -> list[Any]:
        """Returns the data: a sequence of one element."""
        x, y = self.train.load(key.client_id)
        batches = client_training.draw_batches(
            len(y),
            batch_size=self.batch_size,
            num_epochs=self.num_epochs,
            rng=np.random.default_rng(key.batch_seed),
        )
        examples = {"x": x, "y": y}
        held = _join([part.load(key.client_id) for part in self.held])
        if self.padded:
            examples, batches = client_training.pad_client(examples, batches)
            held, _ = client_training.pad_client(held, batches[:0])
        element = collections.OrderedDict(
            examples=collections.OrderedDict(x=examples["x"], y=examples["y"]),
            batches=batches,
            seed=key.training_seed,
            state=tuple(key.client_state),
            held=collections.OrderedDict(x=held["x"], y=held["y"]),
        )
        return [element]


def build_evaluation(
    fit: PersonalFit,
    *,
    shared: Arrays,
    own: Arrays,
    num_kept_weights: int = 0,
) -> tff.Computation:
    """Returns (what the server holds, clients' data) -> each client's values.

    Args:
        fit: How a client's model is made.
        shared: What the server holds, for its shapes.
        own: What a client holds, for its shapes.
        num_kept_weights: How many of the last weights of a client's model are returned
            beside the values, which are those of each held example.
    """
    model = fit.model
    example_spec = collections.OrderedDict(model.example_spec)
    data_type = tff.SequenceType(
        tff.types.tensorflow_to_type(
            collections.OrderedDict(
                examples=example_spec,
                batches=tf.TensorSpec([None, None], tf.int32),
                seed=tf.TensorSpec([2], tf.int32),
                state=_list_specs(own),
                held=example_spec,
            )
        )
    )
    shared_type = tff.types.tensorflow_to_type(_list_specs(shared))

    def finish(weights: Any, held: Mapping[str, tf.Tensor]) -> Any:
        values = compute_example_values(model, weights, held["x"], held["y"])
        kept = tuple(weights[len(weights) - num_kept_weights :])
        return collections.OrderedDict(values=values, kept=kept)

    def evaluate_stack(
        shared: Any,
        own: Any,
        examples: Any,
        batches: tf.Tensor,
        seeds: tf.Tensor,
        held: Any,
        numbers: Any,
    ) -> Any:
        weights = fit.run_stack(shared, own, examples, batches, seeds, numbers)
        return tf.vectorized_map(
            lambda given: finish(*given), (weights, held), fallback_to_while_loop=False
        )

    @tff.tensorflow.computation(shared_type, data_type)
    def evaluate(shared: Any, data: Any) -> Any:
        client = data.get_single_element()
        shared, own = tuple(shared), tuple(client["state"])
        given = (shared, own, dict(client["examples"]), client["batches"])
        if not model.stackable:
            weights = fit.run(*given, client["seed"])
            return finish(weights, client["held"])
        numbers = fit.list_numbers(shared, own)
        return client_training.call_stacked(
            evaluate_stack, (*given, client["seed"], dict(client["held"]), numbers)
        )

    @tff.federated_computation(
        tff.FederatedType(shared_type, tff.SERVER),
        tff.FederatedType(data_type, tff.CLIENTS),
    )
    def run(shared: Any, clients: Any) -> Any:
        return tff.federated_map(evaluate, (tff.federated_broadcast(shared), clients))

    return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnModels:
    """What the evaluation found.

    Attributes:
        metrics: Of each part, in order, the metrics of each client.
        heads: The heads of the clients' models, by client.
    """

    metrics: tuple[ClientMetrics, ...]
    heads: Mapping[str, tuple[np.ndarray, ...]]


class PersonalEvaluation:
    """Makes and evaluates the clients' own models."""

    def __init__(
        self,
        fit: PersonalFit,
        *,
        shared: Arrays,
        own: Arrays,
        train: FederatedData,
        batch_size: int,
        root: seeds.RootSeed,
        num_kept_weights: int = 0,
    ) -> None:
        """Builds the computation.

        Args:
            fit: How a client's model is made.
            shared: What the server holds, for its shapes.
            own: What a client holds that has kept nothing.
            train: The training parts.
            batch_size: Examples in a batch of the fit.
            root: The root of the streams.
            num_kept_weights: How many of the last weights of each model are returned.
        """
        self._fit = fit
        self._own = tuple(own)
        self._train = train
        self._batch_size = batch_size
        self._root = root
        self._compute = build_evaluation(
            fit, shared=shared, own=own, num_kept_weights=num_kept_weights
        )

    def __call__(
        self,
        shared: Arrays,
        kept: ClientStates,
        held: Sequence[FederatedData],
        *,
        num_rounds: int,
    ) -> OwnModels:
        """Returns what it found of all clients.

        Args:
            shared: What the server holds.
            kept: What the clients hold; `own` for those that have kept nothing.
            held: The parts that are evaluated.
            num_rounds: The rounds that are over, which decide the order of examples.
        """
        client_ids = self._train.client_ids
        load = PersonalLoader(
            train=self._train,
            held=tuple(held),
            batch_size=self._batch_size,
            num_epochs=self._fit.num_epochs,
            padded=self._fit.model.stackable,
        )
        values = [
            execution.ClientValue(
                load,
                client_data.derive_key(
                    client_id,
                    root=self._root,
                    noise_root=self._root,
                    round_number=num_rounds,
                    num_joined=len(client_ids),
                    client_state=kept.kept.get(client_id, self._own),
                ),
            )
            for client_id in client_ids
        ]
        found = self._compute(tuple(shared), values)
        return OwnModels(
            metrics=tuple(
                self._tabulate(found, held, position) for position in range(len(held))
            ),
            heads={
                client_id: tuple(np.asarray(part) for part in one["kept"])
                for client_id, one in zip(client_ids, found, strict=True)
            },
        )

    def _tabulate(
        self, found: Sequence[Any], held: Sequence[FederatedData], position: int
    ) -> ClientMetrics:
        """Returns the metrics of one part, from the values of all parts."""
        client_ids = self._train.client_ids
        names = ["loss", *self._fit.model.metrics]
        rows, counts = [], []
        for client_id, one in zip(client_ids, found, strict=True):
            start = sum(part.count(client_id) for part in held[:position])
            count = held[position].count(client_id)
            sums = {
                name: float(np.sum(np.asarray(values)[start : start + count]))
                for name, values in one["values"].items()
            }
            rows.append(compute_means({"num_examples": count, **sums}))
            counts.append(count)
        return ClientMetrics(
            client_ids=tuple(client_ids),
            num_examples=np.array(counts, int),
            means={
                name: np.array([row[name] for row in rows], float) for name in names
            },
        )


def _join(parts: Sequence[Examples]) -> dict[str, np.ndarray]:
    x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    return {"x": x, "y": y}


def _list_specs(weights: Arrays) -> tuple[tf.TensorSpec, ...]:
    return tuple(tf.TensorSpec(part.shape, part.dtype) for part in weights)


class PersonalEvaluator:
    """What a training looks at where every client has its own model.

    Between rounds that is the validation part alone; at the end the test part once.
    """

    def __init__(
        self,
        evaluation: PersonalEvaluation,
        *,
        validation: FederatedData,
        test: FederatedData | None,
        names: Sequence[str],
    ) -> None:
        """Keeps what it needs.

        Args:
            evaluation: Makes and evaluates the models.
            validation: The clients' validation parts.
            test: Their test parts; None to leave them alone.
            names: The names of the metrics, the loss among them.
        """
        self._evaluation = evaluation
        self._validation = validation
        self._test = test
        self._names = tuple(names)

    @property
    def columns(self) -> Sequence[str]:
        """The means over clients on their validation parts."""
        return [f"validation_{name}" for name in self._names]

    def evaluate_round(
        self, weights: Arrays, clients: ClientStates, *, num_rounds: int
    ) -> Mapping[str, table.Scalar]:
        """Returns the means over clients. See `round_evaluation.Evaluator`."""
        found = self._evaluation(
            weights, clients, [self._validation], num_rounds=num_rounds
        )
        means = _average(found.metrics[0])
        return {f"validation_{name}": means[name] for name in self._names}

    def evaluate_final(
        self, weights: Arrays, clients: ClientStates, *, num_rounds: int
    ) -> round_evaluation.FinalEvaluation:
        """Returns the metrics on both parts. See `round_evaluation.Evaluator`."""
        held = [self._validation, *([] if self._test is None else [self._test])]
        found = self._evaluation(weights, clients, held, num_rounds=num_rounds)
        validation, *tested = found.metrics
        test = tested[0] if tested else None
        return round_evaluation.FinalEvaluation(
            final=None if test is None else _average(test),
            clients=None,
            own_models=test,
            validation=validation,
            heads=found.heads,
        )


def _average(metrics: ClientMetrics) -> dict[str, float]:
    """Returns the means over the clients that have something to average."""
    return {
        name: float(np.mean(values[~np.isnan(values)]))
        if np.any(~np.isnan(values))
        else float("nan")
        for name, values in metrics.means.items()
    }
