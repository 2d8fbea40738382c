"""The factories in learning processes and in other factories of TFF."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp.accounting import DDGaussParameters
from distributed_dp.ddgauss_factory import DDGaussFactory
from distributed_dp.update_layout import NoiseSeeds
from tests.distributed_dp.factories import (
    CASES,
    DIM,
    EXPECTED_CLIENTS,
    FIXED,
    UPDATE_TYPE,
    build_parameters,
    to_update,
    to_vector,
)

pytestmark = pytest.mark.usefixtures("tff_context")


def _build_model() -> tff.learning.models.FunctionalModel:
    """Linear regression of 3 features: 4 parameters."""
    spec = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]))
    weights = ((np.zeros([3, 1], np.float32), np.zeros([1], np.float32)), ())

    @tf.function
    def predict(model_weights, x, training):
        del training
        (slope, offset), _ = model_weights
        return x @ slope + offset

    @tf.function
    def compute_loss(output, label, sample_weight=None):
        del sample_weight
        return tf.reduce_mean(tf.square(output - label))

    return tff.learning.models.FunctionalModel(
        initial_weights=weights,
        predict_on_batch_fn=predict,
        loss_fn=compute_loss,
        metrics_fns=(
            lambda: collections.OrderedDict(num_batches=0),
            lambda state, labels, output, sample_weight=None: state,
            lambda state: state,
        ),
        input_spec=spec,
    )


def test_federated_averaging_learns() -> None:
    factory = DDGaussFactory(build_parameters(DDGaussParameters, padded_dim=4), FIXED)
    process = tff.learning.algorithms.build_unweighted_fed_avg(
        _build_model(),
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
        server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0),
        model_aggregator=factory,
    )
    rng = np.random.default_rng(0)
    target = np.float32([[1.0], [-0.5], [0.25]])
    clients = []
    for _ in range(EXPECTED_CLIENTS):
        x = rng.normal(size=[20, 3]).astype(np.float32)
        clients.append(tf.data.Dataset.from_tensor_slices((x, x @ target)).batch(5))
    state = process.initialize()
    for _ in range(8):
        output = process.next(state, clients)
        state = output.state
    trained = process.get_model_weights(state).trainable[0]
    assert np.linalg.norm(trained - target) < 0.2 * np.linalg.norm(target)
    measured = output.metrics["aggregator"]
    assert measured["num_clients"] == EXPECTED_CLIENTS


@pytest.mark.parametrize("name", ["ddgauss", "central_gaussian"])
def test_nested_in_factories_of_tff(name: str, rng: np.random.Generator) -> None:
    inner = CASES[name].build(noise_seeds=NoiseSeeds.ENTROPY)
    clipping = tff.aggregators.clipping_factory(1.0, inner)
    factory = tff.aggregators.zeroing_factory(10.0, clipping, norm_order=2.0)
    process = factory.create(UPDATE_TYPE)
    vectors = rng.normal(size=[3, DIM])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors *= [[0.5], [5.0], [50.0]]
    output = process.next(process.initialize(), [to_update(v) for v in vectors])
    # The second is clipped by TFF, the third is zeroed.
    expected = (vectors[0] + vectors[1] / 5) / EXPECTED_CLIENTS
    error = np.linalg.norm(to_vector(output.result) - expected)
    noise = CASES[name].stddev * np.sqrt(DIM)
    assert 0.8 * noise <= error <= 1.2 * noise
