"""Federated algorithms with seeds that are carried with the clients' data.

Our training differs from `tff.learning.algorithms` in what a client's data are: a
sequence of one element, with the examples, which of them make up each batch, the seeds
derived for this client and round, and the number of clients that joined. The client's
update is then (delta, noise_seed, joined), and the aggregator's noise is reproducible.
The rest is TFF's: its composition, broadcast, optimizers and finalizer.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulation import client_state_process, client_training
from simulation.algorithm import (
    ClientContext,
    ClientData,
    FederatedAveraging,
    compute_update,
)
from simulation.local_solver import OptimizerSolver
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
    """Returns federated averaging, or FedProx: `build_learning_process` of them.

    Args:
        model: As there, like all arguments but one.
        aggregator_factory: As there.
        client_optimizer: As there.
        server_optimizer: As there.
        initial_weights: As there.
        carried_seeds: As there.
        measure_clients: As there.
        proximal_strength: mu of FedProx; 0 is federated averaging, bit for bit.
        wrap_finalizer: As there.
    """
    return build_learning_process(
        model,
        aggregator_factory,
        FederatedAveraging(proximal_strength=proximal_strength),
        client_optimizer=client_optimizer,
        server_optimizer=server_optimizer,
        initial_weights=initial_weights,
        carried_seeds=carried_seeds,
        measure_clients=measure_clients,
        wrap_finalizer=wrap_finalizer,
    )


def build_learning_process(
    model: Model,
    aggregator_factory: AggregationFactory,
    algorithm: FederatedAveraging,
    *,
    client_optimizer: tff.learning.optimizers.Optimizer,
    server_optimizer: tff.learning.optimizers.Optimizer,
    initial_weights: tuple[np.ndarray, ...],
    carried_seeds: bool = True,
    measure_clients: bool = True,
    wrap_finalizer: WrapFinalizer | None = None,
) -> Any:
    """Returns the learning process of an algorithm under an aggregator.

    A client's optimizer starts afresh every round. A client's update is (initial
    weights) - (trained weights), which the server's optimizer takes for a gradient, or
    what the algorithm makes of it. Under an unweighted aggregator clients count
    equally; under a weighted one (without noise of the clients' own) by their number
    of examples. All that a client sends goes through the aggregator as one value: a
    mechanism under it clips it jointly.

    Args:
        model: The model.
        aggregator_factory: Its value type is the updates' type, or, unweighted and with
            carried seeds, (update, int32[2], int32); its result is an estimate of the
            mean update.
        algorithm: What clients do, keep and send.
        client_optimizer: The optimizer of the clients.
        server_optimizer: The optimizer of the server.
        initial_weights: The model's weights before the first round.
        carried_seeds: Whether seeds come with the clients' data. Otherwise dropout
            layers draw from TensorFlow's unseeded source, the aggregator must take
            bare updates, and the algorithm must be federated averaging or FedProx.
        measure_clients: Whether to sum the clients' losses and metrics: exact
            functions of private data, for the simulation alone.
        wrap_finalizer: Returns the finalizer of the process, made around the
            algorithm's; None leaves it as it is.

    Returns:
        A `tff.learning.templates.LearningProcess`, or, where clients keep something, a
        `ClientStateProcess`. The type of one client's data is
        `build_client_data_type`'s. What the server sends beside the weights is the
        model weights' non-trainable part.

    Raises:
        ValueError: If the algorithm needs carried seeds, or its proximal strength is
            negative or not finite.
    """
    if not carried_seeds and type(algorithm) is not FederatedAveraging:
        raise ValueError(
            f"`carried_seeds` must be True for {algorithm.name}. Found False."
        )
    global_weights = algorithm.initialize_global(initial_weights)
    shared = algorithm.initialize_shared(initial_weights)

    @tff.tensorflow.computation
    def initial_weights_fn() -> tff.learning.models.ModelWeights:
        return tff.learning.models.ModelWeights(
            trainable=tuple(tf.constant(weight) for weight in global_weights),
            non_trainable=tuple(tf.constant(part) for part in shared),
        )

    weights_type = initial_weights_fn.type_signature.result
    is_weighted = isinstance(
        aggregator_factory, tff.aggregators.WeightedAggregationFactory
    )
    client_state = algorithm.initialize_client_state(initial_weights)
    work = _build_work(
        model,
        algorithm,
        client_optimizer,
        weights_type,
        initial_weights,
        carried_seeds=carried_seeds,
        measure_clients=measure_clients,
        is_weighted=is_weighted,
    )
    result_type = work.type_signature.result[0]
    if not is_weighted:
        aggregator_factory = tff.aggregators.as_weighted_aggregator(aggregator_factory)
    aggregator = aggregator_factory.create(
        result_type.update, result_type.update_weight
    )
    finalizer = algorithm.wrap_finalizer(
        tff.learning.templates.build_apply_optimizer_finalizer(
            server_optimizer, weights_type
        )
    )
    if wrap_finalizer is not None:
        finalizer = wrap_finalizer(finalizer)

    def sum_metrics(sums: Any) -> Any:
        if measure_clients:
            return tff.federated_sum(sums)
        return tff.federated_value(collections.OrderedDict(), tff.SERVER)

    if client_state:
        return client_state_process.compose(
            initial_weights_fn,
            work,
            aggregator,
            finalizer,
            initial_client_state=client_state,
            personalize=algorithm.personalize if algorithm.has_own_models else None,
            sum_metrics=sum_metrics,
        )
    return tff.learning.templates.compose_learning_process(
        initial_weights_fn,
        tff.learning.templates.build_broadcast_process(weights_type),
        _build_client_work(work, sum_metrics),
        aggregator,
        finalizer,
    )


def build_client_data_type(
    model: Model, *, carried_seeds: bool, client_state: Sequence[np.ndarray] = ()
) -> tff.Type:
    """Returns the type of one client's data: sequences, as `tff.learning` asks for.

    Args:
        model: The model.
        carried_seeds: Whether seeds come with the data.
        client_state: What a client keeps between rounds, which then comes with them.
    """
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
    if client_state:
        element["state"] = tuple(
            tf.TensorSpec(part.shape, part.dtype) for part in client_state
        )
    return tff.SequenceType(tff.types.tensorflow_to_type(element))


def build_client_data(
    examples: Mapping[str, np.ndarray],
    batches: np.ndarray,
    *,
    noise_seed: np.ndarray,
    training_seed: np.ndarray,
    num_joined: int,
    client_state: Sequence[np.ndarray] = (),
) -> list[Any]:
    """Returns one client's data with what it carries: a sequence of one element.

    Args:
        examples: All of the client's "x" and "y".
        batches: What `client_training.draw_batches` returns for them.
        noise_seed: int32[2], of this client and round alone.
        training_seed: int32[2], of this client and round alone.
        num_joined: The clients that joined the round, those that drop out included.
        client_state: What the client kept; () where clients keep nothing.

    Raises:
        ValueError: If "x" and "y" have different numbers of examples, or a batch refers
            to an example that is not there.
    """
    sizes = {name: len(part) for name, part in examples.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"`examples` must have equally many of everything. Found {sizes}."
        )
    low, high = batches.min(initial=0), batches.max(initial=0)
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
    if client_state:
        element["state"] = tuple(client_state)
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


def _build_work(
    model: Model,
    algorithm: FederatedAveraging,
    optimizer: tff.learning.optimizers.Optimizer,
    weights_type: tff.Type,
    initial_weights: Sequence[np.ndarray],
    *,
    carried_seeds: bool,
    measure_clients: bool,
    is_weighted: bool,
) -> tff.Computation:
    """Returns a client's work: (weights, data) -> (result, sums, what it keeps)."""
    data_type = build_client_data_type(
        model,
        carried_seeds=carried_seeds,
        client_state=algorithm.initialize_client_state(initial_weights),
    )
    conclude = algorithm.build_client_work(model, optimizer, initial_weights)

    def work_carried(weights: Any, data: Any) -> Any:
        client = data.get_single_element()
        context = ClientContext(
            initial=tuple(weights.trainable),
            shared=tuple(weights.non_trainable),
            state=tuple(client.get("state", ())),
            seed=client["noise_seed"],
        )
        conclusion, sums = conclude(
            context,
            ClientData(
                examples=client["examples"],
                batches=client["batches"],
                seed=client["training_seed"],
            ),
        )
        update = conclusion.update
        if is_weighted:
            count = client_training.count_examples(client["batches"])
            return update, tf.cast(count, tf.float32), sums, conclusion.state
        carrying = (update, client["noise_seed"], client["joined"])
        return carrying, tf.constant(1.0), sums, conclusion.state

    def work_bare(weights: Any, data: Any) -> Any:
        initial = tuple(weights.trainable)
        trained, sums = client_training.train_on_dataset(
            model,
            OptimizerSolver(optimizer=optimizer),
            initial,
            data,
            _draw_entropy(),
            proximal_strength=algorithm.proximal_strength,
        )
        weight = sums["num_examples"] if is_weighted else tf.constant(1.0)
        return compute_update(initial, trained), weight, sums, ()

    @tff.tensorflow.computation(weights_type, data_type)
    def work(weights: Any, data: Any) -> Any:
        run = work_carried if carried_seeds else work_bare
        update, weight, sums, state = run(weights, data)
        result = tff.learning.templates.ClientResult(
            update=update, update_weight=weight
        )
        return result, (sums if measure_clients else collections.OrderedDict()), state

    return work


def _build_client_work(
    work: tff.Computation, sum_metrics: Callable[[Any], Any]
) -> tff.learning.templates.ClientWorkProcess:
    """Returns the work of clients that keep nothing, as TFF composes it."""
    weights_type, data_type = work.type_signature.parameter

    @tff.federated_computation
    def initialize() -> Any:
        return tff.federated_value((), tff.SERVER)

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(weights_type, tff.CLIENTS),
        tff.FederatedType(data_type, tff.CLIENTS),
    )
    def next_fn(state: Any, weights: Any, client_data: Any) -> Any:
        result, sums, _ = tff.federated_map(work, (weights, client_data))
        return tff.templates.MeasuredProcessOutput(state, result, sum_metrics(sums))

    return tff.learning.templates.ClientWorkProcess(initialize, next_fn)


def _draw_entropy() -> tf.Tensor:
    """Draws an int32[2] seed at every call, for dropout layers; too weak for noise."""
    return tf.raw_ops.NonDeterministicInts(
        shape=tf.constant([2], tf.int64), dtype=tf.int32
    )
