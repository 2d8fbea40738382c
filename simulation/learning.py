"""Federated averaging with seeds that are carried with the clients' data.

Our training differs from `tff.learning.algorithms` in one thing: a client's data are
(examples, carried), where `carried` is a sequence of one element that holds the seeds
derived for this client and round, and the number of clients that joined. The client's
update is then (delta, noise_seed, joined), and the aggregator's noise is reproducible.
The rest is TFF's: its composition, broadcast, optimizers and finalizer.
"""

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulation.model import Model, Weights


def build_federated_averaging(
    model: Model,
    aggregator_factory: tff.aggregators.UnweightedAggregationFactory,
    *,
    client_optimizer: tff.learning.optimizers.Optimizer,
    server_optimizer: tff.learning.optimizers.Optimizer,
    initial_weights: tuple[np.ndarray, ...],
    carried_seeds: bool = True,
    measure_clients: bool = True,
) -> tff.learning.templates.LearningProcess:
    """Returns federated averaging of `model` under an aggregator.

    Clients count equally. A client's optimizer starts afresh every round. A client's
    update is (initial weights) - (trained weights), which the server's optimizer takes
    for a gradient.

    Args:
        model: The model.
        aggregator_factory: Its value type is the weights' type, or with carried seeds
            (weights, int32[2], int32); its result is an estimate of the mean update.
        client_optimizer: The optimizer of the clients.
        server_optimizer: The optimizer of the server.
        initial_weights: The weights before the first round.
        carried_seeds: Whether seeds come with the clients' data. Otherwise dropout
            layers draw from TensorFlow's unseeded source, and the aggregator must take
            bare weights.
        measure_clients: Whether to sum the clients' losses and metrics: exact
            functions of private data, for the simulation alone.

    Returns:
        The process. The type of one client's data is `build_client_data_type`'s.
    """

    @tff.tensorflow.computation
    def initial_weights_fn() -> tff.learning.models.ModelWeights:
        return tff.learning.models.ModelWeights(
            trainable=tuple(tf.constant(weight) for weight in initial_weights),
            non_trainable=(),
        )

    weights_type = initial_weights_fn.type_signature.result
    client_work = _build_client_work(
        model, client_optimizer, weights_type, carried_seeds, measure_clients
    )
    result_type = client_work.next.type_signature.result.result.member
    aggregator = tff.aggregators.as_weighted_aggregator(aggregator_factory).create(
        result_type.update, result_type.update_weight
    )
    return tff.learning.templates.compose_learning_process(
        initial_weights_fn,
        tff.learning.templates.build_broadcast_process(weights_type),
        client_work,
        aggregator,
        tff.learning.templates.build_apply_optimizer_finalizer(
            server_optimizer, weights_type
        ),
    )


def build_client_data_type(model: Model, *, carried_seeds: bool) -> tff.Type:
    """Returns the type of one client's data: sequences, as `tff.learning` asks for."""
    examples = tff.SequenceType(
        tff.types.tensorflow_to_type(collections.OrderedDict(model.example_spec))
    )
    if not carried_seeds:
        return examples
    return tff.to_type(
        collections.OrderedDict(
            examples=examples,
            carried=tff.SequenceType(
                tff.types.tensorflow_to_type(
                    collections.OrderedDict(
                        noise_seed=tf.TensorSpec([2], tf.int32),
                        training_seed=tf.TensorSpec([2], tf.int32),
                        joined=tf.TensorSpec([], tf.int32),
                    )
                )
            ),
        )
    )


def build_client_data(
    examples: tf.data.Dataset,
    *,
    noise_seed: np.ndarray,
    training_seed: np.ndarray,
    num_joined: int,
) -> Mapping[str, tf.data.Dataset]:
    """Returns one client's data with what it carries.

    Args:
        examples: The client's batches.
        noise_seed: int32[2], of this client and round alone.
        training_seed: int32[2], of this client and round alone.
        num_joined: The clients that joined the round, those that drop out included.
    """
    carried = collections.OrderedDict(
        noise_seed=noise_seed, training_seed=training_seed, joined=np.int32(num_joined)
    )
    return collections.OrderedDict(
        examples=examples, carried=tf.data.Dataset.from_tensors(carried)
    )


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
    carried_seeds: bool,
    measure_clients: bool,
) -> tff.learning.templates.ClientWorkProcess:
    """Returns the work of clients: local training, and sums of what it measured."""
    data_type = build_client_data_type(model, carried_seeds=carried_seeds)

    @tff.tensorflow.computation(weights_type, data_type)
    def work(weights: Any, data: Any) -> Any:
        initial = tuple(weights.trainable)
        if carried_seeds:
            noise_seed, training_seed, joined = _read_carried(data["carried"])
            examples = data["examples"]
        else:
            training_seed, examples = _draw_entropy(), data
        trained, sums = _train(model, optimizer, initial, examples, training_seed)
        delta = tuple(
            before - after for before, after in zip(initial, trained, strict=True)
        )
        update = (delta, noise_seed, joined) if carried_seeds else delta
        result = tff.learning.templates.ClientResult(
            update=update, update_weight=tf.constant(1.0)
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


def _train(
    model: Model,
    optimizer: tff.learning.optimizers.Optimizer,
    initial: Weights,
    examples: tf.data.Dataset,
    seed: tf.Tensor,
) -> tuple[Weights, Mapping[str, tf.Tensor]]:
    """Trains on one client, and sums its losses and metrics on the way.

    Returns:
        The trained weights, and the sums over examples of the loss and the metrics in
        training, with their number: "num_examples", "loss" and the metrics' names.
    """
    zero = tf.zeros([], tf.float32)
    sums = collections.OrderedDict(num_examples=zero, loss=zero)
    sums.update((name, zero) for name in model.metrics)
    specs = tuple(tf.TensorSpec(weight.shape, weight.dtype) for weight in initial)

    def step(carry: Any, batch: Any) -> Any:
        number, weights, optimizer_state, sums = carry
        y = batch["y"]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            batch_seed = tf.random.experimental.stateless_fold_in(seed, number)
            outputs = model.predict(weights, batch["x"], batch_seed)
            losses = model.compute_loss(y, outputs)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, weights)
        optimizer_state, weights = optimizer.next(optimizer_state, weights, gradients)
        found = collections.OrderedDict(
            num_examples=tf.cast(tf.shape(losses)[0], tf.float32),
            loss=tf.reduce_sum(losses),
        )
        for name, metric in model.metrics.items():
            found[name] = tf.reduce_sum(metric(y, outputs))
        sums = tf.nest.map_structure(tf.add, sums, found)
        return number + 1, tuple(weights), optimizer_state, sums

    start = (tf.constant(0), tuple(initial), optimizer.initialize(specs), sums)
    _, trained, _, sums = examples.reduce(start, step)
    return trained, sums


def _read_carried(
    carried: tf.data.Dataset,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns (noise_seed, training_seed, joined) of the sequence's one element."""
    entry = carried.get_single_element()
    return entry["noise_seed"], entry["training_seed"], entry["joined"]


def _draw_entropy() -> tf.Tensor:
    """Draws an int32[2] seed at every call, for dropout layers; too weak for noise."""
    return tf.raw_ops.NonDeterministicInts(
        shape=tf.constant([2], tf.int64), dtype=tf.int32
    )
