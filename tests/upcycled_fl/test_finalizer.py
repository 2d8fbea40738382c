"""Tests of the even step: by hand, around every inner finalizer, and in trainings."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp import NoPrivacyFactory
from distributed_dp.accounting import CohortScheme, Sampling
from distributed_dp.update_layout import NoiseSeeds
from simulation import client_training, execution, learning
from simulation.image_models import build_logistic_regression
from simulation.local_solver import OptimizerSolver
from upcycled_fl import finalizer, schedule
from upcycled_fl import learning as upcycled_learning

SHAPE = (2, 2, 1)


@pytest.fixture(scope="module", autouse=True)
def engine():
    return execution.set_execution_context()


@tff.tensorflow.computation
def make_weights():
    return tff.learning.models.ModelWeights(
        trainable=(tf.zeros([3]), tf.zeros([2])), non_trainable=()
    )


WEIGHTS_TYPE = make_weights.type_signature.result
OPTIMIZERS = {
    "sgd": tff.learning.optimizers.build_sgdm(1.0),
    "momentum": tff.learning.optimizers.build_sgdm(0.5, momentum=0.9),
    "adam": tff.learning.optimizers.build_adam(0.1),
    "yogi": tff.learning.optimizers.build_yogi(0.1),
}


def build_inner(name="sgd"):
    return tff.learning.templates.build_apply_optimizer_finalizer(
        OPTIMIZERS[name], WEIGHTS_TYPE
    )


def pack(*arrays):
    return tff.learning.models.ModelWeights(
        trainable=tuple(np.float32(array) for array in arrays), non_trainable=()
    )


def run(process, updates, start=None):
    """Returns the weights after each round."""
    state, weights = process.initialize(), start or pack([1, 1, 1], [0, 0])
    found = []
    for update in updates:
        output = process.next(state, weights, update)
        state, weights = output.state, output.result
        found.append((state, weights.trainable))
    return found


UPDATES = [
    (np.float32([1, 2, 3]), np.float32([1, -1])),
    (np.float32([0.5, 0, -2]), np.float32([4, 8])),
    (np.float32([-1, 1, 0.25]), np.float32([0, 2])),
]


class TestRule:
    def test_two_rounds_by_hand(self):
        process = finalizer.build_upcycled_finalizer(build_inner(), [0.5, 0.25])
        rounds = run(process, UPDATES[:2])
        # Odd: 1 - (1, 2, 3); even: odd + 0.5 * -(1, 2, 3).
        state, weights = rounds[0]
        assert state["odd_weights"][0].tolist() == [0.0, -1.0, -2.0]
        assert weights[0].tolist() == [-0.5, -2.0, -3.5]
        assert weights[1].tolist() == [-1.5, 1.5]
        state, weights = rounds[1]
        assert state["odd_weights"][0].tolist() == [-1.0, -2.0, -1.5]
        assert weights[0].tolist() == [-1.125, -2.0, -1.0]
        assert state["upcycled_steps"] == 2

    def test_the_last_coefficient_stays(self):
        process = finalizer.build_upcycled_finalizer(build_inner(), [0.5, 0.0])
        *_, (state, weights) = run(process, UPDATES)
        for odd, even in zip(state["odd_weights"], weights, strict=True):
            assert np.array_equal(odd, even)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_coefficient_0_is_the_inner_finalizer_bit_for_bit(self, name):
        plain = run(build_inner(name), UPDATES)
        same = run(finalizer.build_upcycled_finalizer(build_inner(name), [0]), UPDATES)
        other = run(
            finalizer.build_upcycled_finalizer(build_inner(name), [0.1]), UPDATES
        )
        for (_, a), (_, b), (_, c) in zip(plain, same, other, strict=True):
            assert all(map(np.array_equal, a, b))
            assert not np.array_equal(a[0], c[0])

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_a_constant_coefficient_is_a_larger_server_step_bit_for_bit(self, name):
        rng = np.random.default_rng(0)
        updates = [
            (rng.normal(size=3).astype("f"), rng.normal(size=2).astype("f"))
            for _ in range(5)
        ]
        upcycled = run(
            finalizer.build_upcycled_finalizer(build_inner(name), [0.3]), updates
        )
        scaled = run(finalizer.build_scaled_finalizer(build_inner(name), 1.3), updates)
        for (_, a), (_, b) in zip(upcycled, scaled, strict=True):
            assert all(map(np.array_equal, a, b))

    def test_it_is_tffs_server_learning_rate_up_to_rounding(self):
        inner = tff.learning.templates.build_apply_optimizer_finalizer(
            tff.learning.optimizers.build_sgdm(1.3), WEIGHTS_TYPE
        )
        upcycled = finalizer.build_upcycled_finalizer(build_inner(), [0.3])
        pairs = zip(run(inner, UPDATES), run(upcycled, UPDATES), strict=True)
        for (_, a), (_, b) in pairs:
            np.testing.assert_allclose(a[0], b[0], rtol=1e-6)

    def test_measurements_have_the_coefficient_and_the_inner_ones(self):
        process = finalizer.build_upcycled_finalizer(build_inner(), [0.5, 0.25])
        output = process.next(process.initialize(), pack([1] * 3, [0] * 2), UPDATES[0])
        assert float(output.measurements["upcycled_coefficient"]) == 0.5
        assert "inner" in output.measurements

    @pytest.mark.parametrize("coefficients", [[], [-0.1], [1.1], [np.nan], [[0.5]]])
    def test_bad_coefficients_are_refused(self, coefficients):
        with pytest.raises(ValueError, match="`coefficients` must be"):
            finalizer.build_upcycled_finalizer(build_inner(), coefficients)

    @pytest.mark.parametrize("factor", [0.0, -1.0, np.inf, np.nan])
    def test_bad_factors_are_refused(self, factor):
        with pytest.raises(ValueError, match="`factor` must be positive"):
            finalizer.build_scaled_finalizer(build_inner(), factor)


def build_clients(count=4):
    clients = []
    for index in range(count):
        rng = np.random.default_rng(index)
        size = 3 + index
        examples = {
            "x": rng.normal(size=[size, *SHAPE]).astype(np.float32),
            "y": rng.integers(3, size=size).astype(np.int32),
        }
        batches = client_training.draw_batches(
            size, batch_size=2, num_epochs=2, rng=rng
        )
        clients.append(
            learning.build_client_data(
                examples,
                batches,
                noise_seed=np.int32([1, index]),
                training_seed=np.int32([2, index]),
                num_joined=count,
            )
        )
    return clients


FACTORIES = {
    "uniform": lambda: NoPrivacyFactory(
        CohortScheme(Sampling.FIXED, 8, 4), noise_seeds=NoiseSeeds.CARRIED
    ),
    "by_examples": tff.aggregators.MeanFactory,
}


def train(build, factory, rounds=3, **fields):
    model = build_logistic_regression(SHAPE, 3)
    process = build(
        model,
        FACTORIES[factory](),
        client_optimizer=tff.learning.optimizers.build_sgdm(0.1, momentum=0.5),
        server_optimizer=tff.learning.optimizers.build_sgdm(1.0),
        initial_weights=model.initialize(np.random.default_rng(0)),
        **fields,
    )
    state, found = process.initialize(), []
    for _ in range(rounds):
        state = process.next(state, build_clients()).state
        found.append(state)
    return found


def read(states):
    return [state.global_model_weights.trainable for state in states]


class TestTraining:
    @pytest.mark.slow
    @pytest.mark.parametrize("factory", ["uniform", "by_examples"])
    def test_it_is_fedprox_with_a_larger_server_step_bit_for_bit(self, factory):
        mu, lambda_value = 0.5, 0.21
        constant = schedule.ConstantLambda(mu=mu, lambda_value=lambda_value)
        upcycled = train(
            upcycled_learning.build_upcycled_fl,
            factory,
            proximal_strength=mu,
            upcycling=upcycled_learning.Upcycling(coefficients=constant, num_steps=3),
        )
        factor = 1 + mu / (mu + lambda_value)
        scaled, wrong = (
            train(
                learning.build_federated_averaging,
                factory,
                proximal_strength=strength,
                wrap_finalizer=functools.partial(
                    finalizer.build_scaled_finalizer, factor=factor
                ),
            )
            for strength in (mu, 0.0)
        )
        for a, b, c in zip(read(upcycled), read(scaled), read(wrong), strict=True):
            assert all(map(np.array_equal, a, b))
            assert not np.allclose(a[0], c[0], rtol=1e-4)
        plain = train(
            learning.build_federated_averaging, factory, rounds=1, proximal_strength=mu
        )
        odd = upcycled[0].finalizer["odd_weights"]
        assert all(map(np.array_equal, odd, read(plain)[0]))

    def test_coefficient_0_is_the_baseline_bit_for_bit(self):
        zero = schedule.ConstantCoefficient(coefficient=0.0)
        upcycled = train(
            upcycled_learning.build_upcycled_fl,
            "uniform",
            upcycling=upcycled_learning.Upcycling(coefficients=zero, num_steps=1),
        )
        plain = train(learning.build_federated_averaging, "uniform")
        for a, b in zip(read(upcycled), read(plain), strict=True):
            assert all(map(np.array_equal, a, b))

    @pytest.mark.slow
    def test_weights_are_the_numbers_of_examples(self):
        """The mean by hand, from each client's own training."""
        model = build_logistic_regression(SHAPE, 3)
        initial = model.initialize(np.random.default_rng(0))
        optimizer = tff.learning.optimizers.build_sgdm(0.1, momentum=0.5)
        run_client = client_training.build_training(
            model, OptimizerSolver(optimizer=optimizer)
        )
        total, weights = 0.0, 0
        for (client,) in build_clients():
            trained, _ = run_client(
                tuple(map(tf.constant, initial)),
                collections.OrderedDict(client["examples"]),
                tf.constant(client["batches"]),
                tf.constant(client["training_seed"]),
            )
            size = len(client["examples"]["y"])
            total, weights = total + size * trained[0].numpy(), weights + size
        (state,) = train(learning.build_federated_averaging, "by_examples", rounds=1)
        np.testing.assert_allclose(read([state])[0][0], total / weights, rtol=1e-5)

    def test_the_schedules_mu_is_the_clients(self):
        constant = schedule.ConstantLambda(mu=0.5, lambda_value=0.2)
        with pytest.raises(ValueError, match="`proximal_strength` must be the mu"):
            train(
                upcycled_learning.build_upcycled_fl,
                "uniform",
                upcycling=upcycled_learning.Upcycling(
                    coefficients=constant, num_steps=1
                ),
            )

    def test_bad_values_are_refused(self):
        with pytest.raises(ValueError, match="`proximal_strength` must be finite"):
            train(learning.build_federated_averaging, "uniform", proximal_strength=-1.0)
        constant = schedule.ConstantCoefficient(coefficient=0.5)
        with pytest.raises(ValueError, match="`num_steps` must be >= 1"):
            upcycled_learning.Upcycling(coefficients=constant, num_steps=0)
