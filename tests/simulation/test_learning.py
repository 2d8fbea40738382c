"""Tests for federated averaging: against TFF's own, by hand, and its determinism."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from simulation import client_training, learning
from tests.simulation import toys

LEARNING_RATE = 0.3
WEIGHTS = (
    np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 3),
    np.array([0.1, 0.0, -0.1], np.float32),
)


def build_process(
    divisor: float = 1.0,
    *,
    dropout: bool = False,
    noise_stddev: float = 0.0,
    momentum: float | None = None,
    **options,
) -> tff.learning.templates.LearningProcess:
    return learning.build_federated_averaging(
        toys.build_toy_model(dropout=dropout),
        toys.CarriedMeanFactory(divisor, noise_stddev),
        client_optimizer=tff.learning.optimizers.build_sgdm(LEARNING_RATE),
        server_optimizer=tff.learning.optimizers.build_sgdm(1.0, momentum=momentum),
        initial_weights=WEIGHTS,
        **options,
    )


class InOrder:
    """A generator for those who want the examples as they are."""

    def permuted(self, x: np.ndarray, *, axis: int, out: np.ndarray) -> np.ndarray:
        assert axis == 1 and out is not None
        return x


def build_examples(client: int, batch_size: int = 2) -> tf.data.Dataset:
    x, y = toys.load_toy_client(str(client))
    return tf.data.Dataset.from_tensor_slices({"x": x, "y": y}).batch(batch_size)


def build_data(
    client: int,
    *,
    repeats=1,
    limit=None,
    batch_size=2,
    noise_seed=(1, 2),
    training_seed=(3, 4),
    num_joined=3,
) -> tf.data.Dataset:
    x, y = (values[:limit] for values in toys.load_toy_client(str(client)))
    batches = client_training.draw_batches(
        len(y), batch_size=batch_size, num_epochs=repeats, rng=InOrder()
    )
    return learning.build_client_data(
        {"x": x, "y": y},
        batches,
        noise_seed=np.array(noise_seed, np.int32),
        training_seed=np.array(training_seed, np.int32),
        num_joined=num_joined,
    )


def train_in_numpy(client: int, batch_size: int = 2) -> tuple[list[np.ndarray], float]:
    """Returns a client's update and the sum of its losses, in float64."""
    kernel, bias = (weight.astype(np.float64) for weight in WEIGHTS)
    x, y = toys.load_toy_client(str(client))
    x = x.reshape([len(x), -1]).astype(np.float64)
    total = 0.0
    for start in range(0, len(x), batch_size):
        rows, labels = x[start : start + batch_size], y[start : start + batch_size]
        logits = rows @ kernel + bias
        logits -= logits.max(axis=1, keepdims=True)
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        total -= np.log(shares[np.arange(len(labels)), labels]).sum()
        shares[np.arange(len(labels)), labels] -= 1
        kernel = kernel - LEARNING_RATE * rows.T @ shares / len(labels)
        bias = bias - LEARNING_RATE * shares.mean(axis=0)
    return [WEIGHTS[0] - kernel, WEIGHTS[1] - bias], total


def run_round(process, data):
    output = process.next(process.initialize(), data)
    return output, output.state.global_model_weights.trainable


@pytest.mark.usefixtures("engine")
class TestOneRound:
    def test_updates_losses_and_divisor_by_hand(self):
        clients = [0, 2, 5]
        divisor = 4.0
        output, weights = run_round(
            build_process(divisor), [build_data(client) for client in clients]
        )
        updates, losses = zip(
            *(train_in_numpy(client) for client in clients), strict=True
        )
        for index in range(2):
            mean = sum(update[index] for update in updates) / divisor
            np.testing.assert_allclose(
                weights[index], WEIGHTS[index] - mean, rtol=1e-5, atol=1e-7
            )
        measured = output.metrics["client_work"]
        assert measured["num_examples"] == sum(client + 1 for client in clients)
        assert measured["loss"] == pytest.approx(sum(losses), rel=1e-5)

    def test_it_is_tffs_own_federated_averaging(self):
        clients = [1, 3, 4]
        native = tff.learning.algorithms.build_unweighted_fed_avg(
            learning.build_functional_model(toys.build_toy_model()),
            client_optimizer_fn=tff.learning.optimizers.build_sgdm(LEARNING_RATE),
            server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0, momentum=0.9),
        )
        ours = build_process(float(len(clients)), momentum=0.9)
        native_state = native.set_model_weights(
            native.initialize(),
            tff.learning.models.ModelWeights(trainable=WEIGHTS, non_trainable=()),
        )
        our_state = ours.initialize()
        for _ in range(3):
            native_state = native.next(
                native_state, [build_examples(client) for client in clients]
            ).state
            our_state = ours.next(
                our_state, [build_data(client) for client in clients]
            ).state
        for one, two in zip(
            native.get_model_weights(native_state).trainable,
            ours.get_model_weights(our_state).trainable,
            strict=True,
        ):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)
            assert not np.array_equal(two, WEIGHTS[0])

    def test_carried_values_reach_the_aggregator(self):
        data = [
            build_data(client, noise_seed=(client, -10), num_joined=7)
            for client in (1, 2)
        ]
        measured = run_round(build_process(), data)[0].metrics["aggregator"]
        assert measured["joined"] == 14
        assert measured["seeds"] == 1 + 2 - 20

    def test_an_empty_cohort_leaves_the_weights(self):
        output, weights = run_round(build_process(), [])
        assert all(np.array_equal(a, b) for a, b in zip(weights, WEIGHTS, strict=True))
        assert output.metrics["client_work"]["num_examples"] == 0

    def test_a_client_without_examples_sends_a_zero_update(self):
        data = build_data(1, limit=0)
        output, weights = run_round(build_process(), [data])
        assert all(np.array_equal(a, b) for a, b in zip(weights, WEIGHTS, strict=True))
        assert output.metrics["aggregator"]["joined"] == 3

    def test_nothing_is_measured_if_not_asked_for(self):
        process = build_process(measure_clients=False)
        output, _ = run_round(process, [build_data(1)])
        assert not output.metrics["client_work"]


@pytest.mark.usefixtures("engine")
class TestSeeds:
    def test_the_same_seeds_give_the_same_bits(self):
        process = build_process(dropout=True, noise_stddev=1.0)
        runs = [
            run_round(process, [build_data(client) for client in range(5)])[1]
            for _ in range(3)
        ]
        for again in runs[1:]:
            assert all(
                np.array_equal(a, b) for a, b in zip(runs[0], again, strict=True)
            )

    def test_the_noise_seed_decides_the_noise_alone(self):
        process = build_process(noise_stddev=1.0)
        one, two = (
            run_round(process, [build_data(2, noise_seed=(5, index))])[1]
            for index in range(2)
        )
        assert not np.array_equal(one[0], two[0])
        plain = build_process()
        one, two = (
            run_round(plain, [build_data(2, noise_seed=(5, index))])[1]
            for index in range(2)
        )
        assert np.array_equal(one[0], two[0])

    def test_the_training_seed_decides_dropout(self):
        process = build_process(dropout=True)
        one, two = (
            run_round(process, [build_data(3, training_seed=(5, index))])[1]
            for index in range(2)
        )
        assert not np.array_equal(one[0], two[0])

    def test_every_batch_has_its_own_dropout(self):
        # Weights start at zero, so a pixel that is dropped leaves its row at zero. With
        # one mask for all batches, more batches would move no more rows than one.
        process = build_process(dropout=True)
        updates = []
        for repeats in (1, 16):
            data = build_data(3, limit=1, batch_size=1, repeats=repeats)
            zeros = process.set_model_weights(
                process.initialize(),
                tff.learning.models.ModelWeights(
                    tuple(np.zeros_like(weight) for weight in WEIGHTS), ()
                ),
            )
            state = process.next(zeros, [data]).state
            updates.append(state.global_model_weights.trainable[0])
        used = [np.any(update != 0, axis=1) for update in updates]
        assert not np.all(used[0])
        assert np.all(used[1])


@pytest.mark.usefixtures("engine")
def test_bare_updates_go_to_tffs_own_aggregators():
    process = learning.build_federated_averaging(
        toys.build_toy_model(dropout=True),
        tff.aggregators.UnweightedMeanFactory(),
        client_optimizer=tff.learning.optimizers.build_sgdm(LEARNING_RATE),
        server_optimizer=tff.learning.optimizers.build_sgdm(1.0),
        initial_weights=WEIGHTS,
        carried_seeds=False,
    )
    one, two = (run_round(process, [build_examples(4)])[1] for _ in range(2))
    # Dropout draws from the system's entropy here.
    assert not np.array_equal(one[0], two[0])
