"""Computations that every engine must run, each as a function without arguments."""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp import (
    CentralGaussianFactory,
    DDGaussFactory,
    DistributedSkellamFactory,
    NoPrivacyFactory,
    accounting,
)
from distributed_dp.update_layout import NoiseSeeds

SPEC = collections.OrderedDict(
    x=tf.TensorSpec([None, 4], tf.float32), y=tf.TensorSpec([None, 1], tf.float32)
)
_sgd = tff.learning.optimizers.build_sgdm


def build_datasets(sizes: tuple[int, ...] = (7, 3, 5, 1)) -> list[tf.data.Dataset]:
    rng = np.random.default_rng(0)
    datasets = []
    for size in sizes:
        x = rng.normal(size=[size, 4]).astype(np.float32)
        examples = collections.OrderedDict(x=x, y=x.sum(1, keepdims=True))
        datasets.append(tf.data.Dataset.from_tensor_slices(examples).batch(3))
    return datasets


def build_keras_model() -> tff.learning.models.VariableModel:
    layers = [
        tf.keras.layers.Dense(3, "relu", kernel_initializer="ones", input_shape=[4]),
        tf.keras.layers.Dense(1, kernel_initializer="ones"),
    ]
    return tff.learning.models.from_keras_model(
        tf.keras.Sequential(layers),
        input_spec=SPEC,
        loss=tf.keras.losses.MeanSquaredError(),
        metrics=[tf.keras.metrics.MeanAbsoluteError()],
    )


def build_reconstruction_model() -> tff.learning.models.ReconstructionModel:
    inputs = tf.keras.layers.Input([4])
    shared = tf.keras.layers.Dense(2, kernel_initializer="ones")
    personal = tf.keras.layers.Dense(1, kernel_initializer="ones")
    return tff.learning.models.ReconstructionModel.from_keras_model_and_layers(
        tf.keras.Model(inputs, personal(shared(inputs))),
        global_layers=[shared],
        local_layers=[personal],
        input_spec=SPEC,
    )


def run_learning(build: Callable[[], Any], data: list | None = None) -> Any:
    """Runs two rounds. Returns all states and metrics."""
    process, data = build(), build_datasets() if data is None else data
    output = process.next(process.initialize(), data)
    again = process.next(output.state, data)
    return output, again


def run_kmeans() -> Any:
    rng = np.random.default_rng(1)
    data = [
        tf.data.Dataset.from_tensor_slices(rng.normal(size=[n, 4]).astype(np.float32))
        for n in (5, 4)
    ]
    return run_learning(
        lambda: tff.learning.algorithms.build_fed_kmeans(
            2, data_shape=(4,), random_seed=(1, 2)
        ),
        data,
    )


def build_mean_absolute_error() -> list[tf.keras.metrics.Metric]:
    return [tf.keras.metrics.MeanAbsoluteError()]


def build_reconstruction() -> Any:
    return tff.learning.algorithms.build_fed_recon(
        build_reconstruction_model,
        loss_fn=tf.keras.losses.MeanSquaredError,
        metrics_fn=build_mean_absolute_error,
        client_optimizer_fn=_sgd(0.05),
        reconstruction_optimizer_fn=_sgd(0.05),
    )


def run_personalization() -> Any:
    def evaluate(model: Any, dataset: tf.data.Dataset) -> Any:
        loss = tf.constant(0.0)
        for batch in dataset:
            loss += model.forward_pass(batch, training=False).loss
        return collections.OrderedDict(loss=loss)

    def personalize(model: Any, train: Any, test: Any) -> Any:

        @tf.function
        def step(batch: Any) -> None:
            with tf.GradientTape() as tape:
                loss = model.forward_pass(batch, training=True).loss
            gradients = tape.gradient(loss, model.trainable_variables)
            for variable, gradient in zip(
                model.trainable_variables, gradients, strict=True
            ):
                variable.assign_sub(0.05 * gradient)

        for batch in train.batch(3):
            step(batch)
        return evaluate(model, test.batch(3))

    computation = tff.learning.algorithms.build_personalization_eval_computation(
        build_keras_model,
        collections.OrderedDict(sgd=lambda: personalize),
        baseline_evaluate_fn=lambda model, data: evaluate(model, data.batch(3)),
        max_num_clients=10,
    )
    weights = tff.learning.models.ModelWeights.from_model(build_keras_model())
    data = [dataset.unbatch() for dataset in build_datasets()]
    pairs = [collections.OrderedDict(train_data=d, test_data=d) for d in data]
    return computation(weights, pairs)


def run_evaluation() -> Any:
    return run_learning(
        lambda: tff.learning.algorithms.build_fed_eval(build_keras_model)
    )


def run_composed() -> Any:
    @tff.tensorflow.computation(np.str_)
    def build_dataset(client_id: tf.Tensor) -> tf.data.Dataset:
        length = tf.cast(tf.strings.length(client_id), tf.float32)
        examples = collections.OrderedDict(
            x=length * tf.ones([5, 4]), y=length * tf.ones([5, 1])
        )
        return tf.data.Dataset.from_tensor_slices(examples).batch(3)

    learning_process = build_average()
    return run_learning(
        lambda: tff.simulation.compose_dataset_computation_with_learning_process(
            build_dataset, learning_process
        ),
        ["a", "bb", "ccc"],
    )


def build_average(**choices: Any) -> Any:
    return tff.learning.algorithms.build_weighted_fed_avg(
        build_keras_model, client_optimizer_fn=_sgd(0.05), **choices
    )


def run_aggregator(build: Callable[[], Any], *, weighted: bool = False) -> Any:
    """Runs an aggregation process twice on six vectors."""
    vectors = list(np.random.default_rng(3).normal(size=[6, 5]).astype(np.float32))
    value_type = tff.to_type((np.float32, [5]))
    if weighted:
        process = build().create(value_type, tff.to_type(np.float32))
        vectors = (vectors, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    else:
        process, vectors = build().create(value_type), (vectors,)
    output = process.next(process.initialize(), *vectors)
    return output, process.next(output.state, *vectors)


def run_ours(factory: Any) -> Any:
    """Runs one of our aggregators with the seeds that the clients carry."""
    value_type = tff.to_type(((np.float32, [5]), (np.int32, [2]), np.int32))
    process = factory.create(value_type)
    rng = np.random.default_rng(3)
    values = [
        (rng.normal(size=5).astype(np.float32), np.array([7, i], np.int32), np.int32(6))
        for i in range(6)
    ]
    # One drops out: the server adds what is missing.
    output = process.next(process.initialize(), values)
    return output, process.next(output.state, values[1:])


def build_ours(
    kind: type, mechanism: accounting.Mechanism | None, *, padded_dim: int = 8
) -> Any:
    scheme = accounting.CohortScheme(accounting.Sampling.POISSON, 60, 6)
    seeds: dict[str, Any] = {"noise_seeds": NoiseSeeds.CARRIED}
    if mechanism is None:
        return kind(scheme, **seeds)
    grid = {} if mechanism is accounting.Mechanism.GAUSSIAN else dict(bits=16)
    parameters = accounting.calibrate(
        mechanism,
        scheme,
        epsilon=5.0,
        delta=1e-3,
        num_rounds=2,
        l2_clip=1.0,
        **({**grid, "padded_dim": padded_dim} if grid else {}),
    )
    if grid:
        seeds["rotation_seed"] = (1, 2)
    return kind(parameters, scheme, server_noise_seed=(3, 4), **seeds)


@tff.tensorflow.computation(np.float32)
def _square(x: tf.Tensor) -> tf.Tensor:
    return x * x


@tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
def _place(values: Any) -> Any:
    two = tff.tensorflow.computation(lambda: tf.constant(2.0))
    squares = tff.federated_map(_square, values)
    return collections.OrderedDict(
        most=tff.federated_max(values),
        least=tff.federated_min(values),
        total=tff.federated_sum(squares),
        squares=squares,
        values=values,
        constant=tff.federated_value(3, tff.CLIENTS),
        at_clients=tff.federated_eval(two, tff.CLIENTS),
        at_server=tff.federated_eval(two, tff.SERVER),
        zipped=tff.federated_zip((values, squares)),
    )


@tff.tensorflow.computation(np.float32, np.float32)
def _subtract(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return x - y


@tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
def _compute_variance(values: Any) -> Any:
    """Two passes over the clients: the second needs what the first computed."""
    squares = tff.federated_map(_square, values)
    mean = tff.federated_broadcast(tff.federated_mean(squares))
    centered = tff.federated_map(_subtract, (squares, mean))
    return tff.federated_mean(tff.federated_map(_square, centered)), centered


@tff.federated_computation(
    tff.FederatedType(np.int32, tff.CLIENTS), tff.FederatedType(np.int32, tff.SERVER)
)
def _sum_securely(values: Any, bound: Any) -> Any:
    return (
        tff.federated_secure_sum_bitwidth(values, 8),
        tff.federated_secure_sum(values, 100),
        tff.backends.mapreduce.federated_secure_modular_sum(values, 7),
        bound,
    )


@tff.tensorflow.computation(np.int64)
def _count(number: tf.Tensor) -> tf.data.Dataset:
    return tf.data.Dataset.range(number)


_aggregators = tff.aggregators
_algorithms = tff.learning.algorithms
_KINDS = accounting.Mechanism

EXACT: dict[str, Callable[[], Any]] = {
    "weighted average": lambda: run_learning(build_average),
    "unweighted average, momentum": lambda: run_learning(
        lambda: _algorithms.build_unweighted_fed_avg(
            build_keras_model,
            client_optimizer_fn=_sgd(0.05),
            server_optimizer_fn=_sgd(1.0, 0.9),
        )
    ),
    "average over iterators": lambda: run_learning(
        lambda: build_average(
            loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR
        )
    ),
    "proximal": lambda: run_learning(
        lambda: _algorithms.build_weighted_fed_prox(
            build_keras_model, proximal_strength=0.1, client_optimizer_fn=_sgd(0.05)
        )
    ),
    "gradients": lambda: run_learning(
        lambda: _algorithms.build_fed_sgd(
            build_keras_model, server_optimizer_fn=_sgd(0.1)
        )
    ),
    "mime lite": lambda: run_learning(
        lambda: _algorithms.build_weighted_mime_lite(
            build_keras_model, base_optimizer=_sgd(0.05, 0.9)
        )
    ),
    "robust average": lambda: run_learning(
        lambda: build_average(model_aggregator=tff.learning.robust_aggregator())
    ),
    "secure average": lambda: run_learning(
        lambda: build_average(model_aggregator=tff.learning.secure_aggregator())
    ),
    "compressed average": lambda: run_learning(
        lambda: build_average(model_aggregator=tff.learning.compression_aggregator())
    ),
    "k-means": run_kmeans,
    "reconstruction": lambda: run_learning(build_reconstruction),
    "evaluation": run_evaluation,
    "personalization": run_personalization,
    "composed with data sets": run_composed,
    "mean": lambda: run_aggregator(_aggregators.MeanFactory, weighted=True),
    "unweighted mean": lambda: run_aggregator(_aggregators.UnweightedMeanFactory),
    "quantile clipping": lambda: run_aggregator(
        lambda: _aggregators.clipping_factory(
            _aggregators.PrivateQuantileEstimationProcess.no_noise(1.0, 0.5, 0.1),
            _aggregators.zeroing_factory(2.0, _aggregators.SumFactory()),
        )
    ),
    "secure sum of floats": lambda: run_aggregator(
        lambda: _aggregators.SecureSumFactory(10.0, -10.0)
    ),
    "placements": lambda: _place([1.0, 5.0, -2.0]),
    "two passes": lambda: _compute_variance([1.0, 5.0, -2.0]),
    "secure sums": lambda: _sum_securely([3, 50, 100], 4),
    "data set as a result": lambda: list(_count(4)),
    "our mean": lambda: run_ours(build_ours(NoPrivacyFactory, None)),
    "our central Gaussian": lambda: run_ours(
        build_ours(CentralGaussianFactory, _KINDS.GAUSSIAN)
    ),
    "our discrete Gaussian": lambda: run_ours(
        build_ours(DDGaussFactory, _KINDS.DDGAUSS)
    ),
    "our Skellam": lambda: run_ours(
        build_ours(DistributedSkellamFactory, _KINDS.SKELLAM)
    ),
}
"""Deterministic, up to the order of float sums."""

RANDOM: dict[str, Callable[[], Any]] = {
    "Gaussian": lambda: run_aggregator(
        lambda: _aggregators.DifferentiallyPrivateFactory.gaussian_fixed(1.0, 6.0, 1.0)
    ),
    "stochastic rounding": lambda: run_aggregator(
        lambda: _aggregators.EncodedSumFactory.quantize_above_threshold(8, 0)
    ),
    "random rotation": lambda: run_aggregator(
        lambda: _aggregators.HadamardTransformFactory(_aggregators.SumFactory())
    ),
}
"""Random: two runs differ, but in structure, types and rough size."""
