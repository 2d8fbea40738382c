"""Tests for local training: batches, and many clients as one stack."""

import dataclasses
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from simulation import client_training, execution, learning
from simulation.engine import local_context, lockstep, stage
from simulation.image_models import build_logistic_regression, build_mlp
from simulation.local_solver import OptimizerSolver
from simulation.model import compute_means
from simulation.population.federated_data import ArrayData
from tests.simulation import toys


class TestBatches:
    def draw(self, batch_size: int, num_epochs: int, seed: int = 0, num_examples=5):
        return client_training.draw_batches(
            num_examples,
            batch_size=batch_size,
            num_epochs=num_epochs,
            rng=np.random.default_rng(seed),
        )

    @pytest.mark.parametrize(
        ("batch_size", "sizes"),
        [(1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (9, [5]), (10**9, [5])],
    )
    def test_every_epoch_has_every_example_once(self, batch_size, sizes):
        batches = self.draw(batch_size, 3)
        assert np.count_nonzero(batches, axis=1).tolist() == sizes * 3
        for row, size in zip(batches, sizes * 3, strict=True):
            assert np.all(row[:size] > 0)
        flat = batches[batches > 0].reshape([3, 5])
        assert np.sort(flat).tolist() == [[1, 2, 3, 4, 5]] * 3

    def test_a_client_without_examples_has_no_batch(self):
        assert self.draw(4, 2, num_examples=0).shape == (0, 1)

    def test_few_shapes_occur_among_many_clients(self):
        shapes, widths = set(), set()
        for size in range(200):
            x = np.arange(size, dtype=np.float32)
            batches = self.draw(16, 3, num_examples=size)
            examples, padded = client_training.pad_client({"x": x}, batches)
            assert np.array_equal(examples["x"][:size], x)
            assert np.array_equal(padded[: len(batches)], batches)
            assert not np.any(padded[len(batches) :])
            shapes.add((examples["x"].shape, padded.shape))
            widths.add(padded.shape[1])
        assert widths == {1, 2, 4, 8, 16}
        assert len(shapes) < 15

    def test_orders_follow_the_generator(self):
        assert np.array_equal(self.draw(2, 4, 1), self.draw(2, 4, 1))
        assert not np.array_equal(self.draw(2, 4, 1), self.draw(2, 4, 2))

    def test_epochs_have_their_own_orders(self):
        assert len({tuple(epoch) for epoch in self.draw(5, 8)}) > 1


SHAPE, NUM_CLASSES = (3, 3, 1), 4
MODELS = {
    "logistic_regression": build_logistic_regression(SHAPE, NUM_CLASSES),
    "mlp": build_mlp(SHAPE, NUM_CLASSES, hidden_sizes=[7, 5]),
}
OPTIMIZERS = {
    "sgd": tff.learning.optimizers.build_sgdm(0.3),
    "momentum": tff.learning.optimizers.build_sgdm(0.3, momentum=0.9),
    # Its state counts the steps, which a client that has ended must not go on with. Its
    # small default epsilon would magnify differences of rounding.
    "adam": tff.learning.optimizers.build_adam(0.03, epsilon=0.01),
}


def build_process(model, optimizer) -> tff.learning.templates.LearningProcess:
    return learning.build_federated_averaging(
        model,
        toys.CarriedMeanFactory(divisor=3.0),
        client_optimizer=optimizer,
        server_optimizer=tff.learning.optimizers.build_sgdm(1.0),
        initial_weights=model.initialize(np.random.default_rng(3)),
    )


def draw_data(sizes, rng) -> list:
    data = []
    for index, size in enumerate(sizes):
        x = rng.normal(size=[size, *SHAPE]).astype(np.float32)
        y = rng.integers(NUM_CLASSES, size=size).astype(np.int32)
        batches = client_training.draw_batches(
            size, batch_size=4, num_epochs=3, rng=rng
        )
        carried = dict(noise_seed=[0, index], training_seed=[1, index], num_joined=3)
        carried = {k: np.array(v, np.int32) for k, v in carried.items()}
        data.append(
            learning.build_client_data(
                *client_training.pad_client({"x": x, "y": y}, batches), **carried
            )
        )
    return data


@pytest.fixture
def context():
    before = tff.framework.get_context_stack().current
    context = local_context.LocalContext()
    tff.framework.set_default_context(context)
    yield context
    tff.framework.set_default_context(before)
    context.close()


def build_map(work) -> tff.Computation:
    """Returns the computation that maps clients' work over clients' values."""
    values_type = tff.FederatedType(work.type_signature.parameter, tff.CLIENTS)

    @tff.federated_computation(values_type)
    def run(values):
        return tff.federated_map(work, values)

    return run


def list_lockstep(context) -> list[lockstep.Lockstep | None]:
    return [
        current.stage._lockstep[0]
        for _, _, runner in context._programs.values()
        for current in runner.passes.values()
    ]


@pytest.mark.parametrize(
    ("batch_size", "num_epochs", "expected"),
    [(8, 1, False), (2, 1, True), (8, 4, True)],
)
def test_stacks_are_for_clients_with_several_steps(batch_size, num_epochs, expected):
    data = ArrayData(
        client_ids=tuple(str(index) for index in range(50)),
        make=lambda _: (np.zeros([8, *SHAPE], np.float32), np.zeros([8], np.int32)),
    )
    choices = {"batch_size": batch_size, "num_epochs": num_epochs}
    chosen = client_training.choose_stacking(MODELS["mlp"], data, **choices)
    assert chosen.stackable is expected
    plain = dataclasses.replace(MODELS["mlp"], stackable=False)
    assert not client_training.choose_stacking(plain, data, **choices).stackable


PLACED = textwrap.dedent("""
    import os
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import numpy as np
    import tensorflow as tf
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    import tensorflow_federated as tff
    from simulation.engine import local_context, lockstep
    from tests.simulation import test_client_training as tests

    found = set()
    run = lockstep.Lockstep.run

    def watch(cut, clients):
        inputs = [tensors[: cut.num_stacked] for tensors in map(
            lambda inputs: cut.before(*inputs), clients)]
        [result, *_] = cut.together(*inputs[0])
        found.add(result.device[-5:])
        return run(cut, clients)

    lockstep.Lockstep.run = watch
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    tff.framework.set_default_context(local_context.LocalContext(devices=names))
    process = tests.build_process(tests.MODELS["mlp"], tests.OPTIMIZERS["sgd"])
    data = tests.draw_data([3] * 64, np.random.default_rng(0))
    process.next(process.initialize(), data)
    print(*sorted(found))
""")


def test_stacks_are_trained_on_the_devices_that_share_the_cohort():
    done = subprocess.run(
        [sys.executable, "-c", PLACED],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["CPU:0", "CPU:1"]


class TestLockstep:
    # Whole and broken batches, one example, none, and more clients than a group holds.
    SIZES = (8, 3, 1, 0, 17, 4, 6) * 6

    @pytest.mark.parametrize(
        ("name", "optimizer"),
        [
            ("logistic_regression", "momentum"),
            ("mlp", "sgd"),
            pytest.param("mlp", "adam", marks=pytest.mark.slow),
        ],
    )
    def test_a_stack_trains_as_the_clients_do_one_by_one(
        self, context, name, optimizer, rng, monkeypatch
    ):
        data = draw_data(self.SIZES, rng)
        results, alone_runs = [], []
        run_one = stage.Stage._run_one

        def count(self, flat, slot):
            alone_runs.append(slot)
            return run_one(self, flat, slot)

        monkeypatch.setattr(stage.Stage, "_run_one", count)
        for stackable in (True, False):
            assert not alone_runs
            model = dataclasses.replace(MODELS[name], stackable=stackable)
            process = build_process(model, OPTIMIZERS[optimizer])
            state = process.initialize()
            for _ in range(2):
                output = process.next(state, data)
                state = output.state
            results.append((state.global_model_weights.trainable, output.metrics))
        assert len(alone_runs) == 2 * len(data)
        together, alone = list_lockstep(context)
        assert together is not None and alone is None
        assert 1 < together.group_size < len(data)
        for one, two in zip(*(result[0] for result in results), strict=True):
            scale = np.max(np.abs(two))
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5 * scale)
        (_, one), (_, two) = results
        for name in ("loss", "accuracy", "num_examples"):
            assert one["client_work"][name] == pytest.approx(
                two["client_work"][name], rel=1e-5
            )
        assert one["client_work"]["num_examples"] == 3 * sum(self.SIZES)

    @pytest.mark.parametrize("stackable", [True, False])
    def test_metrics_are_over_their_weights_by_hand(self, context, stackable, rng):
        model = dataclasses.replace(
            MODELS["mlp"],
            stackable=stackable,
            metrics={"share": lambda y, _: tf.cast(y, tf.float32) + 0.25},
            metric_weights=lambda y, _: tf.cast(y * y, tf.float32) + 0.5,
        )
        data = draw_data((8, 3, 0, 1, 5), rng)
        process = build_process(model, OPTIMIZERS["sgd"])
        output = process.next(process.initialize(), data)
        [cut] = list_lockstep(context)
        assert (cut is not None) is stackable
        used = (np.unique(client[0]["batches"]) for client in data)
        labels = np.concatenate(
            [
                client[0]["examples"]["y"][rows[rows > 0] - 1]
                for client, rows in zip(data, used, strict=True)
            ]
        ).astype(np.float64)
        assert len(labels) == 17
        share = np.sum(labels + 0.25) / np.sum(labels**2 + 0.5)
        sums = output.metrics["client_work"]
        assert sums["metric_weight"] == pytest.approx(
            3 * np.sum(labels**2 + 0.5), rel=1e-5
        )
        means = compute_means(sums)
        assert means["share"] == pytest.approx(share, rel=1e-5)
        assert means["loss"] == pytest.approx(sums["loss"] / (3 * 17), rel=1e-5)

    def test_a_client_alone_is_the_client_in_the_stack(self, context, rng):
        process = build_process(MODELS["mlp"], OPTIMIZERS["momentum"])
        data = draw_data((5, 9, 2), rng)
        state = process.initialize()
        start = state.global_model_weights.trainable

        def train(cohort):
            trained = process.next(state, cohort).state.global_model_weights.trainable
            return [a - b for a, b in zip(start, trained, strict=True)]

        apart = [train([client]) for client in data]
        for index, together in enumerate(train(data)):
            total = sum(update[index] for update in apart)
            np.testing.assert_allclose(together, total, rtol=1e-4, atol=1e-6)

    def build_runs(self, context, data) -> list:
        """Returns what a round raises, or its weights and metrics: stacked, alone."""
        results = []
        for stackable in (True, False):
            model = dataclasses.replace(MODELS["mlp"], stackable=stackable)
            process = build_process(model, OPTIMIZERS["sgd"])
            try:
                output = process.next(process.initialize(), data)
            except execution.ClientError as error:
                results.append(error)
            else:
                weights = output.state.global_model_weights.trainable
                results.append((weights, output.metrics["client_work"]))
        assert [cut is None for cut in list_lockstep(context)] == [False, True]
        return results

    def test_a_label_that_does_not_exist_is_an_error_of_its_client(self, context, rng):
        data = draw_data((4, 4, 4), rng)
        data[1][0]["examples"]["y"][2] = NUM_CLASSES
        together, alone = self.build_runs(context, data)
        assert str(together) == str(alone)
        assert together.client_index == alone.client_index == 1
        assert "label value" in str(together)

    def test_a_failing_client_of_a_stack_is_dropped_alone(self, context, rng):
        context._client_failure = execution.ClientFailure.DROP
        data = draw_data((4, 4, 4), rng)
        data[1][0]["examples"]["y"][2] = NUM_CLASSES
        (weights, metrics), (expected, _) = self.build_runs(context, data)
        assert metrics["num_examples"] == 3 * 8
        for one, two in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)

    def test_a_client_with_nan_spoils_no_other_and_is_as_if_alone(self, context, rng):
        data = draw_data((4, 4, 4), rng)
        data[1][0]["examples"]["x"][0] = np.nan
        (_, together), (_, alone) = self.build_runs(context, data)
        for name in alone:
            np.testing.assert_equal(together[name], alone[name], err_msg=name)
        assert np.isnan(together["loss"])

    def test_shapes_that_no_padding_made_alike_train_too(self, context, rng):
        data = []
        for size in (3, 0, 5):
            batches = client_training.draw_batches(
                size, batch_size=2, num_epochs=1, rng=rng
            )
            x = rng.normal(size=[size, *SHAPE]).astype(np.float32)
            examples = {"x": x, "y": np.zeros(size, np.int32)}
            seed = np.zeros(2, np.int32)
            seeds = dict(noise_seed=seed, training_seed=seed, num_joined=3)
            data.append(learning.build_client_data(examples, batches, **seeds))
        (weights, metrics), (expected, _) = self.build_runs(context, data)
        assert metrics["num_examples"] == 8
        for one, two in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)

    def test_stacked_clients_draw_entropy_of_their_own(self, context, rng):
        @tff.tensorflow.computation(tff.TensorType(np.float32, [3]))
        def work(x):
            before = tf.random.uniform([2])
            [doubled] = lockstep.call_stacked(
                lambda x, y: [2 * x + y[:, :1]], [x, before]
            )
            # The draw of before is needed on both sides of the call.
            return doubled - before[0], before, tf.random.uniform([2])

        @tff.federated_computation(
            tff.FederatedType(work.type_signature.parameter, tff.CLIENTS)
        )
        def run(values):
            return tff.federated_map(work, values)

        values = [np.full(3, index, np.float32) for index in range(20)]
        results = [*run(values), *run(values)]
        assert list_lockstep(context)[0] is not None
        draws = set()
        for index, (doubled, before, after) in enumerate(results):
            np.testing.assert_allclose(doubled, 2.0 * (index % 20), atol=1e-5)
            draws |= {float(draw) for draw in (*before, *after)}
        assert len(draws) == 4 * len(results)

    def test_what_waits_for_the_call_or_the_data_is_cut_too(self, context):
        @tff.tensorflow.computation(tff.SequenceType(np.float32))
        def work(data):
            x = data.get_single_element()
            [doubled] = lockstep.call_stacked(lambda x: [2 * x], [x])
            with tf.control_dependencies([x, doubled]):
                return tf.constant(1.0) + doubled

        @tff.federated_computation(
            tff.FederatedType(work.type_signature.parameter, tff.CLIENTS)
        )
        def run(values):
            return tff.federated_map(work, values)

        assert list(run([[1.0], [2.0], [5.0]])) == [3.0, 5.0, 11.0]
        assert list_lockstep(context)[0] is not None

    def test_a_model_with_large_stacks_is_trained_one_by_one(self, context, rng):
        model = build_mlp(SHAPE, NUM_CLASSES, hidden_sizes=[2000, 3000])
        process = build_process(model, OPTIMIZERS["sgd"])
        process.next(process.initialize(), draw_data((3, 2), rng))
        assert list_lockstep(context) == [None]


def train_by_hand(initial, client, *, strength, momentum=0.9, outside=False):
    """Federated proximal training of logistic regression in NumPy.

    With `outside` the proximal term leaves the momentum out, which is not SGD with
    momentum on the sum of the two objectives.
    """
    weights = [np.array(part, np.float64) for part in initial]
    start = [part.copy() for part in weights]
    speed = [np.zeros_like(part) for part in weights]
    x = client["examples"]["x"].reshape([-1, 9]).astype(np.float64)
    y = client["examples"]["y"]
    for rows in client["batches"]:
        chosen = rows[rows > 0] - 1
        if not len(chosen):
            continue
        logits = x[chosen] @ weights[0] + weights[1]
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        error = odds / odds.sum(axis=1, keepdims=True)
        error[np.arange(len(chosen)), y[chosen]] -= 1
        error /= len(chosen)
        for k, gradient in enumerate([x[chosen].T @ error, error.sum(axis=0)]):
            pull = strength * (weights[k] - start[k])
            speed[k] = momentum * speed[k] + gradient + (0 if outside else pull)
            weights[k] = weights[k] - 0.3 * (speed[k] + (pull if outside else 0))
    return weights


@pytest.mark.parametrize("stackable", [False, True])
def test_the_proximal_term_is_part_of_the_objective(context, stackable, rng):
    model = dataclasses.replace(MODELS["logistic_regression"], stackable=stackable)
    initial = tuple(
        rng.normal(size=w.shape).astype(np.float32)
        for w in model.initialize(np.random.default_rng(0))
    )
    (data,) = draw_data([11], rng)
    found = {}
    for strength in (0.7, 0.0):
        process = learning.build_federated_averaging(
            model,
            toys.CarriedMeanFactory(divisor=1.0),
            client_optimizer=OPTIMIZERS["momentum"],
            server_optimizer=tff.learning.optimizers.build_sgdm(1.0),
            initial_weights=initial,
            proximal_strength=strength,
        )
        state = process.next(process.initialize(), [data]).state
        found[strength] = state.global_model_weights.trainable
        for got, wanted in zip(
            found[strength],
            train_by_hand(initial, data[0], strength=strength),
            strict=True,
        ):
            np.testing.assert_allclose(got, wanted, rtol=2e-5)
    wrong = train_by_hand(initial, data[0], strength=0.7, outside=True)
    assert not np.allclose(found[0.7][0], wrong[0], rtol=1e-3)
    assert not np.allclose(found[0.7][0], found[0.0][0], rtol=1e-3)


@pytest.mark.parametrize("strength", [-0.1, np.inf, np.nan])
def test_a_proximal_strength_that_is_none_is_refused(strength):
    with pytest.raises(ValueError, match="`proximal_strength` must be finite"):
        client_training.build_training(
            MODELS["mlp"],
            OptimizerSolver(optimizer=OPTIMIZERS["sgd"]),
            proximal_strength=strength,
        )
