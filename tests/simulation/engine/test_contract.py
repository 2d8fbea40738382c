"""The local engine gives the answers that TFF's own runtime gives."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp.entropy import draw_entropy_seed
from simulation import execution
from simulation.engine.local_context import LocalContext
from simulation.engine.tff_worker import WorkerExecutorFactory, build_worker_context
from tests.simulation.engine import zoo


@pytest.fixture(scope="module")
def contexts() -> Iterator[dict[str, Any]]:
    before = tff.framework.get_context_stack().current
    factory = WorkerExecutorFactory(max_concurrent_clients=2)
    local = LocalContext(max_concurrent_clients=2)
    yield {"tff": build_worker_context(factory), "local": local}
    factory.close()
    local.close()
    tff.framework.set_default_context(before)


def run_in_both(contexts: dict[str, Any], run: Any) -> tuple[Any, Any]:
    results = []
    for context in contexts.values():
        tff.framework.set_default_context(context)
        results.append(run())
    return results[0], results[1]


def list_leaves(result: Any) -> list[tuple[str, np.ndarray]]:
    """Returns arrays with the containers that they were found in."""

    def walk(value: Any, path: str) -> Iterator[tuple[str, np.ndarray]]:
        path = f"{path}/{type(value).__name__}"
        if hasattr(value, "__attrs_attrs__"):
            value = {f.name: getattr(value, f.name) for f in value.__attrs_attrs__}
        elif hasattr(value, "_asdict"):
            value = value._asdict()
        if isinstance(value, tff.structure.Struct):
            value = dict(tff.structure.to_elements(value))
        if isinstance(value, dict):
            for name, part in value.items():
                yield from walk(part, f"{path}.{name}")
        elif isinstance(value, list | tuple):
            for index, part in enumerate(value):
                yield from walk(part, f"{path}[{index}]")
        else:
            yield path, np.asarray(value)

    return list(walk(result, ""))


def check_same(ours: Any, theirs: Any) -> None:
    """Compares results and their containers, floats up to the order of sums."""
    ours, theirs = list_leaves(ours), list_leaves(theirs)
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, found), (_, expected) in zip(ours, theirs, strict=True):
        assert found.dtype == expected.dtype, path
        if found.dtype.kind == "f":
            np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=path)
        else:
            np.testing.assert_array_equal(found, expected, err_msg=path)


@pytest.mark.parametrize("name", zoo.EXACT)
def test_the_answers_are_the_same(contexts, name):
    theirs, ours = run_in_both(contexts, zoo.EXACT[name])
    check_same(ours, theirs)


@pytest.mark.parametrize("name", zoo.RANDOM)
def test_random_answers_have_the_same_structure(contexts, name):
    ours, theirs = reversed(run_in_both(contexts, zoo.RANDOM[name]))
    ours, theirs = list_leaves(ours), list_leaves(theirs)
    assert [(path, x.dtype, x.shape) for path, x in ours] == [
        (path, x.dtype, x.shape) for path, x in theirs
    ]
    assert all(np.all(np.isfinite(x)) for _, x in ours if x.dtype.kind == "f")


def test_no_clients_is_an_empty_sum(contexts):
    @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
    def run(values):
        return tff.federated_sum(values), values, tff.federated_value(3, tff.CLIENTS)

    tff.framework.set_default_context(contexts["local"])
    assert run([]) == (0.0, [], 3)


def test_noise_has_its_law_and_no_two_clients_share_it(contexts):
    """Stateful random ops below a client give a value of its own at every call."""

    @tff.tensorflow.computation(np.float32)
    def add_noise(x):
        return x + tf.random.normal([2000])

    @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
    def run(values):
        return tff.federated_map(add_noise, values)

    tff.framework.set_default_context(contexts["local"])
    drawn = np.array([*run([0.0] * 20), *run([0.0] * 20)])
    correlations = np.corrcoef(drawn)[np.triu_indices(40, 1)]
    # 780 correlations of independent samples: sd 1 / sqrt(2000), the largest near 3.3
    # of them. Equal samples would have 1.
    assert np.max(np.abs(correlations)) < 6 / np.sqrt(2000)
    assert abs(drawn.mean()) < 6 / np.sqrt(drawn.size)
    assert abs(drawn.std() - 1) < 6 / np.sqrt(2 * drawn.size)


def test_entropy_is_drawn_anew_for_every_client_and_call(contexts):
    """No two clients share a seed of the operating system: their noise would cancel."""

    @tff.tensorflow.computation(np.int32)
    def draw(x):
        return draw_entropy_seed() + 0 * x

    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def run(values):
        # One computation twice: in this engine both are in one graph.
        return tff.federated_map(draw, values), tff.federated_map(draw, values)

    tff.framework.set_default_context(contexts["local"])
    drawn = [tuple(seed) for _ in range(3) for seeds in run([0] * 50) for seed in seeds]
    assert len(set(drawn)) == 300


def test_a_later_pass_sees_what_was_drawn_in_an_earlier_one(contexts):
    """Noise that was summed must not be drawn again for what is computed from it."""

    @tff.tensorflow.computation(np.float32)
    def draw(x):
        return x + tf.random.normal([])

    @tff.tensorflow.computation(np.float32, np.float32)
    def subtract(x, y):
        return x - y

    @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
    def run(values):
        noise = tff.federated_map(draw, values)
        mean = tff.federated_mean(noise)
        centered = tff.federated_map(subtract, (noise, tff.federated_broadcast(mean)))
        return noise, mean, tff.federated_sum(centered), centered

    tff.framework.set_default_context(contexts["local"])
    noise, mean, rest, centered = run([0.0] * 10)
    assert mean == pytest.approx(np.mean(noise), abs=1e-6)
    assert rest == pytest.approx(0, abs=1e-5)
    np.testing.assert_allclose(centered, np.array(noise) - mean, atol=1e-6)
    assert len(set(map(float, noise))) == 10


def test_what_it_cannot_run_is_refused_before_work_starts(contexts):
    calls = []

    @tff.tensorflow.computation(np.str_, np.int32)
    def select(values, key):
        return tf.strings.join([values, tf.strings.as_string(key)])

    @tff.tensorflow.computation(np.int32)
    def build_keys(number):
        tf.py_function(lambda: calls.append(1), [], [])
        return tf.stack([number, number + 1])

    @tff.federated_computation(
        tff.FederatedType(np.int32, tff.CLIENTS),
        tff.FederatedType(np.str_, tff.SERVER),
    )
    def run(numbers, value):
        keys = tff.federated_map(build_keys, numbers)
        bound = tff.federated_value(5, tff.SERVER)
        return tff.federated_select(keys, bound, value, select)

    tff.framework.set_default_context(contexts["local"])
    with pytest.raises(execution.UnsupportedError, match="federated_select"):
        run([1, 2], "a")
    assert not calls


DIM, CLIENTS = 4096, 4


def aggregate(factory, values: list[np.ndarray]) -> np.ndarray:
    process = factory.create(tff.TensorType(np.float32, [DIM]))
    return process.next(process.initialize(), values).result


def test_gaussian_noise_has_the_law_that_was_asked_for(contexts):
    aggregators = tff.aggregators.DifferentiallyPrivateFactory
    factory = aggregators.gaussian_fixed(2.0, float(CLIENTS), 3.0)
    zeros = [np.zeros(DIM, np.float32)] * CLIENTS
    draws = [
        noise
        for noise in run_in_both(
            contexts, lambda: [aggregate(factory, zeros) for _ in range(2)]
        )
        for noise in noise
    ]
    stddev = 2.0 * 3.0 / CLIENTS
    for noise in draws:
        # Five standard errors; a stddev that is 6 % off, or one of the sum, is refused.
        assert np.std(noise) == pytest.approx(stddev, rel=5 / (2 * DIM) ** 0.5)
        assert abs(np.mean(noise)) < 5 * stddev / DIM**0.5
        assert abs(np.mean(noise**4) / stddev**4 - 3.0) < 5 * (96 / DIM) ** 0.5
    assert len({noise.tobytes() for noise in draws}) == 4


def test_stochastic_rounding_is_unbiased_and_within_a_step(contexts, rng):
    factory = tff.aggregators.EncodedSumFactory.quantize_above_threshold(8, 0)
    values = [rng.uniform(-1, 1, DIM).astype(np.float32) for _ in range(CLIENTS)]
    exact = np.sum(np.array(values, np.float64), axis=0)
    step = 2.0 / 255
    for found in run_in_both(contexts, lambda: aggregate(factory, values)):
        error = found - exact
        assert 0.5 * step < np.max(np.abs(error)) < CLIENTS * 1.01 * step
        # A rounding down would be off by half a step a client.
        assert abs(np.mean(error)) < 5 * np.std(error) / DIM**0.5


def test_a_random_rotation_is_undone(contexts, rng):
    sums = tff.aggregators.SumFactory()
    values = [rng.normal(size=DIM).astype(np.float32) for _ in range(CLIENTS)]
    exact = np.sum(np.array(values, np.float64), axis=0)
    factory = tff.aggregators.HadamardTransformFactory(sums)
    for found in run_in_both(contexts, lambda: aggregate(factory, values)):
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)


def test_clients_values_are_made_in_every_engine(contexts):
    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS), np.int32)
    def add(values, other):
        return tff.federated_sum(values), other

    values = [execution.ClientValue(lambda key: np.int32(2 * key), n) for n in range(4)]
    results = run_in_both(contexts, lambda: [add(values, 5), add(other=6, values=[3])])
    assert results[0] == results[1] == [(12, 5), (3, 6)]
