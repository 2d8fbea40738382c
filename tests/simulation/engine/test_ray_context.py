"""Tests for the Ray engine, on a cluster of two nodes that Ray simulates."""

import dataclasses
import os
import pathlib
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp import DDGaussFactory, accounting
from simulation import execution, learning
from simulation.engine import (
    chunk,
    client_part,
    plan,
    portable,
    ray_cluster,
    ray_context,
)
from simulation.engine.client_pass import PassInputs, Watch
from simulation.engine.client_value import ClientValue
from simulation.engine.cohort_run import ClientError
from simulation.engine.context import _compile
from simulation.engine.errors import EngineError
from simulation.engine.local_context import LocalContext
from simulation.engine.pass_plan import plan_passes
from simulation.engine.ray_context import RayContext
from simulation.engine.single_element import Element
from tests.simulation import test_client_training as client_tests
from tests.simulation.engine import zoo
from tests.simulation.engine.test_contract import check_same

NUM_CLIENTS = 70


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    ray_cluster.import_ray()
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False},
    )
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def contexts(cluster) -> Iterator[dict]:
    before = tff.framework.get_context_stack().current
    ray, local = RayContext(address=cluster.address), LocalContext()
    yield {"ray": ray, "local": local}
    ray.close()
    local.close()
    tff.framework.set_default_context(before)


@pytest.fixture
def context(contexts) -> Iterator[RayContext]:
    tff.framework.set_default_context(contexts["ray"])
    yield contexts["ray"]
    contexts["ray"].on_client_done = None


@tff.tensorflow.computation(np.float32)
def split(x):
    check = tf.debugging.assert_none_equal(x, 0.0, message="zero")
    with tf.control_dependencies([check]):
        return 1.0 / x, tf.constant(1), tf.cast(x, tf.int64)


@tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
def add_up(values):
    inverse, one, whole = tff.federated_map(split, values)
    return tff.federated_sum(inverse), tff.federated_sum(one), tff.federated_sum(whole)


@dataclasses.dataclass(frozen=True)
class Loader:
    """Makes numbers, notes where, and does what it is told."""

    folder: pathlib.Path
    kills: str = ""

    def __call__(self, key: float) -> np.float32:
        os.makedirs(self.folder / f"process-{os.getpid()}", exist_ok=True)
        if self.kills and key == 40:
            try:
                (self.folder / "killed").touch(exist_ok=self.kills == "always")
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return np.float32(key)

    def __getstate__(self) -> dict:
        return dict(self.__dict__)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        number = len(list(self.folder.glob(f"shipped-{os.getpid()}-*")))
        (self.folder / f"shipped-{os.getpid()}-{number}").touch()


def build_values(loader: Loader) -> list[ClientValue]:
    return [ClientValue(loader, 1 + number) for number in range(NUM_CLIENTS)]


def await_size(context: RayContext, num_slots: int) -> None:
    deadline = time.monotonic() + 60
    while context.cluster.num_slots < num_slots and time.monotonic() < deadline:
        add_up([1.0])
    assert context.cluster.num_slots == num_slots


# One of each kind; the others are slow, because every one is compiled anew.
QUICK = {
    "placements",
    "two passes",
    "data set as a result",
    "our discrete Gaussian",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in zoo.EXACT
    ],
)
def test_the_answers_are_those_of_the_local_engine(contexts, name):
    results = []
    for engine in ("ray", "local"):
        tff.framework.set_default_context(contexts[engine])
        results.append(zoo.EXACT[name]())
    check_same(*results)


class TestSpreading:
    def test_both_nodes_work_and_each_is_sent_the_loader_once(self, context, tmp_path):
        assert (context.cluster.num_nodes, context.cluster.num_slots) == (2, 2)
        values = build_values(Loader(tmp_path))
        first, second = add_up(values), add_up(values)
        assert list(first[1:]) == [NUM_CLIENTS, NUM_CLIENTS * (NUM_CLIENTS + 1) // 2]
        assert first[0] == second[0]
        assert first[0] == pytest.approx(
            sum(1 / n for n in range(1, NUM_CLIENTS + 1)), rel=1e-6
        )
        workers = [p.name.split("-")[1] for p in tmp_path.glob("process-*")]
        assert len(workers) == 2 and str(os.getpid()) not in workers
        shipped = sorted(p.name.split("-")[1] for p in tmp_path.glob("shipped-*"))
        assert shipped == sorted(workers)

    def test_progress_counts_every_client(self, context):
        seen = []
        context.on_client_done = lambda done, total: seen.append((done, total))
        add_up([1.0] * 5)
        assert seen == [(number, 5) for number in range(1, 6)]

    def test_no_clients_are_no_chunk(self, context):
        assert list(add_up([])) == [0.0, 0, 0]


@pytest.mark.slow
def test_stacks_are_those_of_the_local_engine(contexts, rng):
    # Trained weights are rounded to integers: one other bit would show.
    factory = zoo.build_ours(
        DDGaussFactory, accounting.Mechanism.DDGAUSS, padded_dim=40
    )
    process = learning.build_federated_averaging(
        client_tests.MODELS["logistic_regression"],
        factory,
        client_optimizer=client_tests.OPTIMIZERS["momentum"],
        server_optimizer=tff.learning.optimizers.build_sgdm(1.0),
        initial_weights=client_tests.MODELS["logistic_regression"].initialize(rng),
    )
    data = client_tests.draw_data((8, 3, 1, 0, 17, 4, 6) * 8, rng)
    weights = []
    for context in contexts.values():
        tff.framework.set_default_context(context)
        state = process.initialize()
        for _ in range(2):
            state = process.next(state, data).state
        weights.append(state.global_model_weights.trainable)
    for one, two in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, two)


class TestFailures:
    def test_a_killed_worker_changes_nothing(self, context, tmp_path):
        (tmp_path / "whole").mkdir()
        whole = add_up(build_values(Loader(tmp_path / "whole")))
        broken = add_up(build_values(Loader(tmp_path, kills="once")))
        assert (tmp_path / "killed").exists()
        # Bit for bit, sums of floats too: the chunks and their order are the same.
        assert list(broken) == list(whole)
        # Another one takes its place.
        await_size(context, 2)

    @pytest.mark.slow
    def test_clients_that_kill_every_worker_are_an_error(self, context, tmp_path):
        values = build_values(Loader(tmp_path, kills="always"))
        with pytest.raises(EngineError, match="was lost 4 times.*out of memory"):
            add_up(values)
        assert add_up([1.0])[1] == 1

    def test_what_cannot_be_sent_is_named(self, context):
        lock = threading.Lock()
        with pytest.raises(EngineError, match="cannot be sent to Ray's workers.*lock"):
            add_up([ClientValue(np.float32, lock)])
        with pytest.raises(EngineError, match="cannot be sent.*Could not serialize"):
            add_up([ClientValue(lambda key: lock, 1)])

    def test_the_client_is_named(self, context):
        values = [1.0 + index for index in range(NUM_CLIENTS)]
        values[37] = 0.0
        with pytest.raises(ClientError, match="client 37 of 70 failed: Inv") as caught:
            add_up(values)
        assert caught.value.client_index == 37
        values[37] = "many"
        with pytest.raises(ClientError, match="client 37 of 70 failed: TypeError"):
            add_up(values)

    def test_dropped_clients_are_in_no_sum_and_are_counted(self, context, monkeypatch):
        monkeypatch.setattr(context, "_client_failure", execution.ClientFailure.DROP)
        values = [2.0] * 10
        values[3], values[8] = 0.0, "many"
        assert list(add_up(values)) == [4.0, 8, 16]
        assert [failure.client_index for failure in context.failures] == [3, 8]

    @pytest.mark.slow
    def test_a_new_node_works_and_its_loss_changes_nothing(self, cluster, context):
        values = [1.0 + index for index in range(NUM_CLIENTS)]
        whole = add_up(values)
        node = cluster.add_node(num_cpus=1)
        await_size(context, 3)
        assert context.cluster.num_nodes == 3
        assert list(add_up(values)) == list(whole)
        cluster.remove_node(node)
        assert list(add_up(values)) == list(whole)
        assert context.cluster.num_nodes == 2


def test_the_servers_part_stays_where_it_is():
    seed = np.array([1_234_567_891, 987_654_321], np.int32)

    @tff.tensorflow.computation(np.float32)
    def finish(total):
        return total + tf.random.stateless_normal([], tf.constant(seed))

    @tff.tensorflow.computation(np.float32)
    def work(x):
        return x * tf.constant(np.float32(1.2345678))

    @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
    def run(values):
        zero = tff.tensorflow.computation(lambda: tf.constant(0.0))()
        total = tff.federated_sum(tff.federated_map(work, values))
        return tff.federated_map(finish, total), zero

    compiled = _compile(run)
    whole = tff.framework.serialize_computation(compiled).SerializeToString()
    stripped = client_part.strip_server_functions(compiled)
    part = tff.framework.serialize_computation(stripped).SerializeToString()
    assert seed.tobytes() in whole and seed.tobytes() not in part
    assert np.float32(1.2345678).tobytes() in part
    passes = [plan_passes(plan.build_plan(c)) for c in (compiled, stripped)]
    kinds = [
        [
            [(node.kind, node.place) for node in found.inputs + found.outputs]
            for found in listed
            if found is not None
        ]
        for listed in passes
    ]
    assert kinds[0] == kinds[1] and len(kinds[0]) == 1


def test_a_worker_fetches_what_it_lacks_once():
    compiled = _compile(add_up)
    assert plan.build_plan(compiled).num_levels == 2
    fetched = []

    def fetch(name, value):
        return name, lambda: fetched.append(name) or value

    worker = chunk.ChunkWorker([None, None])
    computation = tff.framework.serialize_computation(compiled)
    zeros = [[np.float32(0)], [np.int32(0)], [np.int64(0)]]
    shared = chunk.SharedInputs(values={}, zeros=zeros)
    for value in (2.0, 4.0):
        [_, [count], [total]] = worker.run(
            fetch("computation", pickle.loads(pickle.dumps(computation))),
            0,
            fetch("shared", shared),
            [fetch("loader", lambda key: np.float32(key + 1))],
            chunk.ChunkInputs(
                groups=[
                    [{0: [np.float32(value)]}],
                    [],
                    [{0: chunk.Made(loader=0, key=value)}],
                ]
            ),
        ).totals
        assert (count, total) == (2, 2 * value + 1)
    assert fetched == ["computation", "shared", "loader"]


class TestPortable:
    def test_values_come_back(self):
        dataset = tf.data.Dataset.from_tensor_slices([[1, 2], [3, 4]]).repeat(2)
        flat = [
            tf.constant([1.5, -2.0]),
            tf.constant(["a", "b"]),
            tf.data.experimental.to_variant(dataset),
            Element([tf.constant(3), tf.constant([True])]),
        ]
        back = portable.unpack(pickle.loads(pickle.dumps(portable.pack(flat))))
        assert back[0].numpy().tolist() == [1.5, -2.0]
        assert back[1].numpy().tolist() == [b"a", b"b"]
        read = tf.data.experimental.from_variant(back[2], dataset.element_spec)
        assert [row.numpy().tolist() for row in read] == [[1, 2], [3, 4]] * 2
        assert isinstance(back[3], Element)
        assert [t.numpy().tolist() for t in back[3]] == [3, [True]]

    def test_a_data_set_of_this_process_alone_is_refused(self):
        dataset = tf.data.Dataset.from_generator(
            lambda: iter([1]), output_signature=tf.TensorSpec([], tf.int32)
        )
        with pytest.raises(tf.errors.OpError):
            portable.pack([tf.data.experimental.to_variant(dataset)])


def describe_node(name: str, cpus: float, gpus: float = 0, alive: bool = True) -> dict:
    return {
        "NodeID": name,
        "Alive": alive,
        "Resources": {"CPU": cpus, "GPU": gpus, "memory": 1e9},
    }


@pytest.mark.parametrize(
    ("node", "device", "sizes"),
    [
        (describe_node("a", 2), "auto", [(2, 0)]),
        (describe_node("a", 9), "auto", [(4, 0), (4, 0), (1, 0)]),
        (describe_node("a", 9), "gpu", []),
        (describe_node("a", 8, 2), "auto", [(4, 1), (4, 1)]),
        (describe_node("a", 8, 2), "gpu", [(4, 1), (4, 1)]),
        (describe_node("a", 8, 2), "cpu", [(4, 0), (4, 0)]),
        (describe_node("a", 2, 4), "auto", [(1, 1), (1, 1)]),
        (describe_node("a", 0), "auto", []),
        (describe_node("a", 4, alive=False), "auto", []),
    ],
)
def test_workers_share_a_nodes_processors(node, device, sizes):
    specs = ray_cluster.plan_workers([node], device=device)
    assert [(spec.num_cpus, spec.num_gpus) for spec in specs] == sizes


def test_without_ray_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"not installed: pip install 'ray>=2.52,<3'"):
        execution.set_execution_context(execution.Engine.RAY)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1'"),
        ("nowhere", "must be of the form <host>:<port>. Found 'nowhere'"),
    ],
)
def test_a_cluster_that_is_not_there_is_an_error(address, message):
    with pytest.raises(EngineError, match=message):
        ray_cluster.check_listening(address)


class TestCancelling:
    def test_what_still_runs_is_cancelled_when_a_client_fails(self):
        """Not when its error is forgotten: Ray may have ended by then."""
        ended = []

        class FakeCluster:
            def put(self, value):
                return value

            def run_chunks(self, shipment, chunks):
                try:
                    for _ in chunks:
                        failures = {0: "it broke"}
                        yield chunk.ChunkResult(totals=[], kept=[], failures=failures)
                finally:
                    ended.append(True)

        context = RayContext.__new__(RayContext)
        context.cluster = FakeCluster()
        context._loaders = {}
        given = PassInputs(num_clients=2, shared={}, readers={}, zeros=[])
        chunks = [ray_context._Chunk([range(n, n + 1)]) for n in range(2)]

        def fail(error):
            raise error

        watch = Watch(on_failure=fail, on_done=None)
        # The error is held, and with it every frame that it passed.
        with pytest.raises(ClientError, match="it broke") as caught:
            list(context._run_chunks(("c", None), 0, chunks, given, watch))
        assert ended == [True]
        assert caught.value.client_index == 0
