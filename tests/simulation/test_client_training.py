"""Tests for local training: batches, and many clients as one stack."""

import dataclasses
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow_federated as tff

from simulation import client_training, learning
from simulation.engine import local_context, lockstep
from simulation.model import build_logistic_regression, build_mlp
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


def list_lockstep(context) -> list[lockstep.Lockstep | None]:
    return [
        current.stage._lockstep[0]
        for _, _, runner in context._programs.values()
        for current in runner.passes.values()
    ]


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

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("name", MODELS)
    def test_a_stack_trains_as_the_clients_do_one_by_one(
        self, context, name, optimizer, rng
    ):
        data = draw_data(self.SIZES, rng)
        results = []
        for stackable in (True, False):
            model = dataclasses.replace(MODELS[name], stackable=stackable)
            process = build_process(model, OPTIMIZERS[optimizer])
            state = process.initialize()
            for _ in range(2):
                output = process.next(state, data)
                state = output.state
            results.append((state.global_model_weights.trainable, output.metrics))
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

    def test_a_model_with_large_stacks_is_trained_one_by_one(self, context, rng):
        model = build_mlp(SHAPE, NUM_CLASSES, hidden_sizes=[2000, 3000])
        process = build_process(model, OPTIMIZERS["sgd"])
        process.next(process.initialize(), draw_data((3, 2), rng))
        assert list_lockstep(context) == [None]
