"""Evaluation in bounded memory: of all test data, of each client, and personalised.

What is evaluated is chosen once, from a seed, and identified: a subset's digest goes
into the outputs, so that two figures can be told to be of the same examples.
"""

import collections
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from simulation import table
from simulation.model import Model, Weights, compute_means
from simulation.population.federated_data import DataError, Examples, FederatedData

_LARGEST_BATCH = 500
# Of a batch's outputs: 16 MB of float32.
_LARGEST_OUTPUT = 1 << 22
_DECILES = tuple(range(10, 100, 10))
_WORST_FRACTION = 0.1

WeightArrays = Sequence[np.ndarray]
# (client, global weights) -> the weights that the client is evaluated with. It may look
# at the client's training data, and never at its test data, which it is not given.
Personalize = Callable[[str, WeightArrays], WeightArrays]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """The examples that an evaluation takes.

    Attributes:
        data: The data that they are chosen from.
        client_ids: The clients, in the order in which they are read.
        limits: Of some clients, how many examples are taken.
        num_examples: The number of examples in all.
        seed: What the choice was made with.
        source: What tells the data from others, as JSON values.
    """

    data: FederatedData
    client_ids: tuple[str, ...]
    limits: Mapping[str, int]
    num_examples: int
    seed: int
    source: Mapping[str, Any]

    def load(self, client_id: str) -> Examples:
        """Returns the x and y of a client that are taken."""
        x, y = self.data.load(client_id)
        if client_id not in self.limits:
            return x, y
        words = _digest(self.seed, client_id)
        order = np.random.default_rng(np.frombuffer(words, np.uint32))
        rows = np.sort(order.permutation(len(y))[: self.limits[client_id]])
        return x[rows], y[rows]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return not self.limits and len(self.client_ids) == len(self.data.client_ids)

    def identify(self) -> dict[str, Any]:
        """Returns what says whether two evaluations are of the same, as JSON values."""
        source = json.dumps(self.source, sort_keys=True, default=str)
        digest = hashlib.sha256(source.encode())
        if self.limits:
            # Which of a client's examples are taken.
            digest.update(f"{self.seed}".encode())
        # Sorted: what is evaluated, not in which order.
        for client_id in sorted(self.client_ids):
            counts = (self.data.count(client_id), self.limits.get(client_id))
            digest.update(f"\0{client_id}\0{counts}".encode())
        return {
            "examples": self.num_examples,
            "clients": len(self.client_ids),
            "of_clients": len(self.data.client_ids),
            "is_whole": self.is_whole,
            "seed": None if self.is_whole else self.seed,
            "digest": digest.hexdigest()[:16],
        }


def select_evaluation_set(
    data: FederatedData,
    *,
    max_examples: int | None = None,
    seed: int = 0,
    source: Mapping[str, Any] | None = None,
) -> EvaluationSet:
    """Returns whole clients, in a seeded order, until there are enough examples.

    Args:
        data: What to choose from.
        max_examples: The most examples; of the last client a seeded part is taken. None
            takes everything.
        seed: Decides the choice, together with the clients' names.
        source: What tells the data from others, as JSON values: it goes into the
            digest.

    Raises:
        ValueError: If `max_examples` is less than 1.
        DataError: If there are no examples.
    """
    if max_examples is not None and max_examples < 1:
        raise ValueError(f"`max_examples` must be >= 1. Found {max_examples!r}.")
    counts = {client_id: data.count(client_id) for client_id in data.client_ids}
    total = sum(counts.values())
    if not total:
        raise DataError(
            f"the test data must have examples. Found none of {len(counts)} clients."
        )
    limits: dict[str, int] = {}
    chosen = list(counts)
    if max_examples is not None and total > max_examples:
        chosen, total = [], 0
        for client_id in sorted(counts, key=lambda name: _digest(seed, name)):
            left = max_examples - total
            if counts[client_id] > left:
                limits[client_id] = left
            chosen.append(client_id)
            total += min(counts[client_id], left)
            if total == max_examples:
                break
    return EvaluationSet(
        data=data,
        client_ids=tuple(chosen),
        limits=limits,
        num_examples=total,
        seed=seed,
        source=source or {},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientMetrics:
    """The metrics of each client.

    Attributes:
        client_ids: The clients.
        num_examples: int[clients].
        means: By name, the loss and the metrics, float[clients], NaN for a client that
            has nothing to average.
    """

    client_ids: tuple[str, ...]
    num_examples: np.ndarray
    means: Mapping[str, np.ndarray]

    def summarize(self) -> dict[str, Any]:
        """Returns, for each metric, what there is to say of its spread over clients.

        Clients count equally. "worst_10_percent" is the mean over the tenth of clients,
        rounded up, with the least metric, or the greatest loss.
        """
        summary: dict[str, Any] = {"clients": len(self.client_ids)}
        for name, values in self.means.items():
            known = np.sort(values[~np.isnan(values)])
            if not len(known):
                summary[name] = None
                continue
            num_worst = -(-len(known) // round(1 / _WORST_FRACTION))
            worst = known[-num_worst:] if name == "loss" else known[:num_worst]
            summary[name] = {
                "clients": len(known),
                "mean": float(known.mean()),
                "stddev": float(known.std()),
                "deciles": [float(value) for value in np.percentile(known, _DECILES)],
                "worst_10_percent": float(worst.mean()),
            }
        return summary

    def to_csv(self) -> str:
        """Returns a row for each client."""
        rows = []
        for index, client_id in enumerate(self.client_ids):
            means = [float(values[index]) for values in self.means.values()]
            fields: list[table.Scalar] = [client_id, int(self.num_examples[index])]
            fields += [None if np.isnan(mean) else mean for mean in means]
            rows.append([table.format_scalar(field) for field in fields])
        columns = ["client_id", "num_examples", *self.means]
        return table.Table(columns, rows).to_csv()


class Evaluation:
    """Evaluates weights on an evaluation set.

    Guarantees: examples come in a fixed order and dropout is off, so that equal weights
    give equal numbers. Memory is that of a batch and of one client's examples.
    """

    def __init__(
        self,
        model: Model,
        selected: EvaluationSet,
        *,
        batch_size: int | None = None,
    ) -> None:
        """Builds the graph.

        Args:
            model: The model.
            selected: What it is evaluated on.
            batch_size: The most examples at a time; None for 500, or fewer where the
                outputs are large.
        """
        self.selected = selected
        self._names = ("loss", *model.metrics)
        self._has_weights = model.metric_weights is not None
        weights = model.initialize(np.random.default_rng(0))

        @tf.function(
            input_signature=[
                tuple(tf.TensorSpec(weight.shape, weight.dtype) for weight in weights),
                model.example_spec["x"],
                model.example_spec["y"],
            ]
        )
        def compute_values(
            weights: tuple[tf.Tensor, ...], x: tf.Tensor, y: tf.Tensor
        ) -> dict[str, tf.Tensor]:
            return compute_example_values(model, weights, x, y)

        self._compute_values = compute_values
        self._batch_size = batch_size or _choose_batch_size(model, weights)

    def __call__(self, weights: WeightArrays) -> Mapping[str, float]:
        """Returns the mean loss and metrics over all examples; NaN without any."""
        return _average(self._sum_by_client(weights))

    def evaluate_clients(
        self, weights: WeightArrays, *, personalize: Personalize | None = None
    ) -> ClientMetrics:
        """Returns the loss and metrics of each client.

        Args:
            weights: The global model.
            personalize: Makes each client's own weights of them, which it cannot write
                to; None evaluates the global model.
        """
        return self._tabulate(self._sum_by_client(weights, personalize))

    def evaluate_all(
        self, weights: WeightArrays
    ) -> tuple[Mapping[str, float], ClientMetrics]:
        """Returns what calling it does, and what `evaluate_clients` does, in one go."""
        sums = self._sum_by_client(weights)
        return _average(sums), self._tabulate(sums)

    def _tabulate(self, sums: Mapping[str, np.ndarray]) -> ClientMetrics:
        rows = [
            compute_means({name: float(part[index]) for name, part in sums.items()})
            for index in range(len(self.selected.client_ids))
        ]
        return ClientMetrics(
            client_ids=self.selected.client_ids,
            num_examples=sums["num_examples"].astype(int),
            means={
                name: np.array([row[name] for row in rows], float)
                for name in self._names
            },
        )

    def _sum_by_client(
        self, weights: WeightArrays, personalize: Personalize | None = None
    ) -> dict[str, np.ndarray]:
        """Returns what `compute_means` takes, for each client."""
        names = ["num_examples", *self._names]
        names += ["metric_weight"] * self._has_weights
        sums = {name: np.zeros(len(self.selected.client_ids)) for name in names}
        tensors = _convert(weights)
        shown = tuple(_protect(weight) for weight in weights)
        owner = None
        for owners, x, y in self._read_batches(mixed=personalize is None):
            if personalize is not None and owner != owners[0]:
                owner = owners[0]
                client_id = self.selected.client_ids[owner]
                tensors = _convert(personalize(client_id, shown))
            values = self._compute_values(tensors, x, y)
            np.add.at(sums["num_examples"], owners, 1.0)
            for name, value in values.items():
                np.add.at(sums[name], owners, value.numpy().astype(float))
        return sums

    def _read_batches(
        self, *, mixed: bool
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields clients' positions, x and y; of one client a batch unless mixed."""
        waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        count = 0
        for position, client_id in enumerate(self.selected.client_ids):
            x, y = self.selected.load(client_id)
            for start in range(0, len(y), self._batch_size):
                part = slice(start, start + self._batch_size)
                owners = np.full(len(y[part]), position)
                if waiting and (not mixed or count + len(owners) > self._batch_size):
                    yield _join(waiting)
                    waiting, count = [], 0
                waiting.append((owners, x[part], y[part]))
                count += len(owners)
        if waiting:
            yield _join(waiting)


def compute_example_values(
    model: Model, weights: Weights, x: tf.Tensor, y: tf.Tensor
) -> dict[str, tf.Tensor]:
    """Returns what `compute_means` takes the sums of, of each example, [batch].

    That is the loss, the metrics and, for a model that has them, their weights, with
    dropout off.
    """
    outputs = model.predict(weights, x, None)
    values = collections.OrderedDict(loss=model.compute_loss(y, outputs))
    for name, metric in model.metrics.items():
        values[name] = metric(y, outputs)
    if model.metric_weights is not None:
        values["metric_weight"] = model.metric_weights(y, outputs)
    return values


def _average(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the means over all clients' examples; NaN without any."""
    means = compute_means({name: float(part.sum()) for name, part in sums.items()})
    return {
        name: float("nan") if mean is None else mean for name, mean in means.items()
    }


def _choose_batch_size(model: Model, weights: WeightArrays) -> int:
    """Returns the largest batch whose outputs take bounded memory."""
    specs = tuple(tf.TensorSpec(weight.shape, weight.dtype) for weight in weights)
    predict = tf.function(lambda weights, x: model.predict(weights, x, None))
    traced = predict.get_concrete_function(specs, model.example_spec["x"])
    size = math.prod(n for n in traced.structured_outputs.shape[1:] if n)
    return max(1, min(_LARGEST_BATCH, _LARGEST_OUTPUT // size))


def _join(parts: Sequence[Sequence[np.ndarray]]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _convert(weights: WeightArrays) -> tuple[tf.Tensor, ...]:
    return tuple(tf.convert_to_tensor(weight) for weight in weights)


def _protect(weight: np.ndarray) -> np.ndarray:
    """Returns a view that cannot be written: what one client does reaches no other."""
    view = np.asarray(weight).view()
    view.flags.writeable = False
    return view


def _digest(seed: int, client_id: str) -> bytes:
    return hashlib.sha256(f"{seed} {client_id}".encode()).digest()
