"""Federated averaging with seeds that are carried with the clients' data.

Our training differs from `tff.learning.algorithms` in what a client's data are: a
sequence of one element, with the examples, which of them make up each batch, the seeds
derived for this client and round, and the number of clients that joined. The client's
update is then (delta, noise_seed, joined), and the aggregator's noise is reproducible.
The rest is TFF's: its composition, broadcast, optimizers and finalizer.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulation import client_training
from simulation.model import Model

AggregationFactory: TypeAlias = (
    "tff.aggregators.UnweightedAggregationFactory"
    " | tff.aggregators.WeightedAggregationFactory"
)
WrapFinalizer = Callable[
    [tff.learning.templates.FinalizerProcess], tff.learning.templates.FinalizerProcess
]


def build_federated_averaging(
    model: Model,
    aggregator_factory: AggregationFactory,
    *,
    client_optimizer: tff.learning.optimizers.Optimizer,
    server_optimizer: tff.learning.optimizers.Optimizer,
    initial_weights: tuple[np.ndarray, ...],
    carried_seeds: bool = True,
    measure_clients: bool = True,
    proximal_strength: float = 0.0,
    wrap_finalizer: WrapFinalizer | None = None,
) -> tff.learning.templates.LearningProcess:
    """Returns federated averaging of `model` under an aggregator.

    A client's optimizer starts afresh every round. A client's update is (initial
    weights) - (trained weights), which the server's optimizer takes for a gradient.
    Under an unweighted aggregator clients count equally; under a weighted one (without
    noise of the clients' own) by their number of examples.

    Args:
        model: The model.
        aggregator_factory: Its value type is the weights' type, or, unweighted and with
            carried seeds, (weights, int32[2], int32); its result is an estimate of the
            mean update.
        client_optimizer: The optimizer of the clients.
        server_optimizer: The optimizer of the server.
        initial_weights: The weights before the first round.
        carried_seeds: Whether seeds come with the clients' data. Otherwise dropout
            layers draw from TensorFlow's unseeded source, and the aggregator must take
            bare weights.
        measure_clients: Whether to sum the clients' losses and metrics: exact
            functions of private data, for the simulation alone.
        proximal_strength: mu of FedProx; 0 is federated averaging, bit for bit.
        wrap_finalizer: Returns the finalizer of the process, made around the server
            optimizer's; None leaves it as it is.

    Returns:
        The process. The type of one client's data is `build_client_data_type`'s.

    Raises:
        ValueError: If the proximal strength is negative or not finite.
    """

    @tff.tensorflow.computation
    def initial_weights_fn() -> tff.learning.models.ModelWeights:
        return tff.learning.models.ModelWeights(
            trainable=tuple(tf.constant(weight) for weight in initial_weights),
            non_trainable=(),
        )

    weights_type = initial_weights_fn.type_signature.result
    is_weighted = isinstance(
        aggregator_factory, tff.aggregators.WeightedAggregationFactory
    )
    client_work = _build_client_work(
        model,
        client_optimizer,
        weights_type,
        carried_seeds=carried_seeds,
        measure_clients=measure_clients,
        proximal_strength=proximal_strength,
        is_weighted=is_weighted,
    )
    result_type = client_work.next.type_signature.result.result.member
    if not is_weighted:
        aggregator_factory = tff.aggregators.as_weighted_aggregator(aggregator_factory)
    aggregator = aggregator_factory.create(
        result_type.update, result_type.update_weight
    )
    finalizer = tff.learning.templates.build_apply_optimizer_finalizer(
        server_optimizer, weights_type
    )
    if wrap_finalizer is not None:
        finalizer = wrap_finalizer(finalizer)
    return tff.learning.templates.compose_learning_process(
        initial_weights_fn,
        tff.learning.templates.build_broadcast_process(weights_type),
        client_work,
        aggregator,
        finalizer,
    )


def build_client_data_type(model: Model, *, carried_seeds: bool) -> tff.Type:
    """Returns the type of one client's data: sequences, as `tff.learning` asks for."""
    example_spec = collections.OrderedDict(model.example_spec)
    if not carried_seeds:
        return tff.SequenceType(tff.types.tensorflow_to_type(example_spec))
    element = collections.OrderedDict(
        examples=example_spec,
        batches=tf.TensorSpec([None, None], tf.int32),
        noise_seed=tf.TensorSpec([2], tf.int32),
        training_seed=tf.TensorSpec([2], tf.int32),
        joined=tf.TensorSpec([], tf.int32),
    )
    return tff.SequenceType(tff.types.tensorflow_to_type(element))


def build_client_data(
    examples: Mapping[str, np.ndarray],
    batches: np.ndarray,
    *,
    noise_seed: np.ndarray,
    training_seed: np.ndarray,
    num_joined: int,
) -> list[Any]:
    """Returns one client's data with what it carries: a sequence of one element.

    Args:
        examples: All of the client's "x" and "y".
        batches: What `client_training.draw_batches` returns for them.
        noise_seed: int32[2], of this client and round alone.
        training_seed: int32[2], of this client and round alone.
        num_joined: The clients that joined the round, those that drop out included.

    Raises:
        ValueError: If "x" and "y" have different numbers of examples, or a batch refers
            to an example that is not there.
    """
    sizes = {name: len(part) for name, part in examples.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"`examples` must have equally many of everything. Found {sizes}."
        )
    low, high = np.min(batches, initial=0), np.max(batches, initial=0)
    if low < 0 or high > len(examples["y"]):
        raise ValueError(
            f"`batches` must be in [0, number of examples = {len(examples['y'])}]. "
            f"Found {low} to {high}."
        )
    element = collections.OrderedDict(
        examples=collections.OrderedDict(x=examples["x"], y=examples["y"]),
        batches=batches,
        noise_seed=noise_seed,
        training_seed=training_seed,
        joined=np.int32(num_joined),
    )
    return [element]


def build_functional_model(model: Model) -> tff.learning.models.FunctionalModel:
    """Returns the model for `tff.learning.algorithms`.

    Not guaranteed: dropout there draws from TensorFlow's unseeded source, because
    TFF's functional models have no argument for a seed.
    """

    @tf.function
    def predict_on_batch(model_weights: Any, x: tf.Tensor, training: bool) -> tf.Tensor:
        seed = _draw_entropy() if training else None
        return model.predict(model_weights[0], x, seed)

    def compute_loss(
        output: tf.Tensor, label: tf.Tensor, sample_weight: Any = None
    ) -> tf.Tensor:
        del sample_weight
        return tf.reduce_mean(model.compute_loss(label, output))

    return tff.learning.models.FunctionalModel(
        initial_weights=(model.initialize(np.random.default_rng(0)), ()),
        predict_on_batch_fn=predict_on_batch,
        loss_fn=compute_loss,
        input_spec=collections.OrderedDict(model.example_spec),
    )


def _build_client_work(
    model: Model,
    optimizer: tff.learning.optimizers.Optimizer,
    weights_type: tff.Type,
    *,
    carried_seeds: bool,
    measure_clients: bool,
    proximal_strength: float,
    is_weighted: bool,
) -> tff.learning.templates.ClientWorkProcess:
    """Returns the work of clients: local training, and sums of what it measured."""
    data_type = build_client_data_type(model, carried_seeds=carried_seeds)

    train = client_training.build_training(
        model, optimizer, proximal_strength=proximal_strength
    )

    @tff.tensorflow.computation(weights_type, data_type)
    def work(weights: Any, data: Any) -> Any:
        initial = tuple(weights.trainable)
        if carried_seeds:
            client = data.get_single_element()
            trained, sums = train(
                initial, client["examples"], client["batches"], client["training_seed"]
            )
        else:
            trained, sums = client_training.train_on_dataset(
                model,
                optimizer,
                initial,
                data,
                _draw_entropy(),
                proximal_strength=proximal_strength,
            )
        delta = tuple(
            before - after for before, after in zip(initial, trained, strict=True)
        )
        update, weight = delta, tf.constant(1.0)
        if carried_seeds and not is_weighted:
            update = (delta, client["noise_seed"], client["joined"])
        if is_weighted:
            weight = sums["num_examples"]
            if carried_seeds:
                # Every epoch refers to every example, whose numbers begin with 1.
                last = tf.maximum(tf.reduce_max(client["batches"]), 0)
                weight = tf.cast(last, tf.float32)
        result = tff.learning.templates.ClientResult(
            update=update, update_weight=weight
        )
        return result, (sums if measure_clients else collections.OrderedDict())

    @tff.federated_computation
    def initialize() -> Any:
        return tff.federated_value((), tff.SERVER)

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(weights_type, tff.CLIENTS),
        tff.FederatedType(data_type, tff.CLIENTS),
    )
    def next_fn(state: Any, weights: Any, client_data: Any) -> Any:
        result, sums = tff.federated_map(work, (weights, client_data))
        totals = tff.federated_value(collections.OrderedDict(), tff.SERVER)
        if measure_clients:
            totals = tff.federated_sum(sums)
        return tff.templates.MeasuredProcessOutput(state, result, totals)

    return tff.learning.templates.ClientWorkProcess(initialize, next_fn)


def _draw_entropy() -> tf.Tensor:
    """Draws an int32[2] seed at every call, for dropout layers; too weak for noise."""
    return tf.raw_ops.NonDeterministicInts(
        shape=tf.constant([2], tf.int64), dtype=tf.int32
    )
