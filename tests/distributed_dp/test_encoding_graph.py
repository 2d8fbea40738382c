"""The codec's graphs: nothing of Python in them, and every op at home on a GPU."""

import pytest
import tensorflow as tf

from distributed_dp import xla
from distributed_dp.accounting import Mechanism
from distributed_dp.rotation import RotationKind
from tests.distributed_dp import device_graph
from tests.distributed_dp.codecs import build_codec

_DIM = 20_000
"""Far above the tables' size, which may be in host memory."""

_CASES = [
    *((Mechanism.DDGAUSS, 40.0, rotation) for rotation in RotationKind),
    (Mechanism.DDGAUSS, 2.0, RotationKind.IDENTITY),
    (Mechanism.DDGAUSS, 5000.0, RotationKind.IDENTITY),
    *((Mechanism.SKELLAM, 2.0, rotation) for rotation in RotationKind),
]


def _trace(mechanism: Mechanism, local_scale: float, rotation: RotationKind):
    """Traces a client's and the server's side of a round."""
    codec = build_codec(
        mechanism,
        dim=_DIM,
        rotation=rotation,
        granularity=1e-4,
        local_scale=local_scale,
        clients_per_round=10,
        cohorts=(8, 11),
    )

    def run(x, total, l2_clip, joined, arrived, rotation_seed, noise_seed):
        sent = codec.encode(
            x,
            l2_clip=l2_clip,
            joined=joined,
            rotation_seed=rotation_seed,
            noise_seed=noise_seed,
        )
        total += tf.cast(sent.residues, tf.int64)
        total += codec.noise.sample_missing(
            codec.parameters.padded_dim, noise_seed, joined, arrived
        )
        decoded = codec.decode(total, l2_clip=l2_clip, rotation_seed=rotation_seed)
        return decoded, sent.norm, sent.rounded_norm, sent.num_redraws, sent.is_clipped

    size, seed = tf.TensorSpec([], tf.int64), tf.TensorSpec([2], tf.int32)
    return tf.function(run, autograph=False).get_concrete_function(
        tf.TensorSpec([_DIM]),
        tf.TensorSpec([codec.parameters.padded_dim], tf.int64),
        tf.TensorSpec([]),
        size,
        size,
        seed,
        seed,
    )


@pytest.fixture
def visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets graphs be built as on a machine with a GPU."""
    devices = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    monkeypatch.setattr(xla.tf.config, "list_physical_devices", lambda kind: devices)


@pytest.mark.usefixtures("visible_gpu")
@pytest.mark.parametrize(
    ("mechanism", "local_scale", "rotation"),
    _CASES,
    ids=[f"{m.value}-{scale}-{rotation.value}" for m, scale, rotation in _CASES],
)
def test_every_op_stays_on_a_gpu(
    mechanism: Mechanism, local_scale: float, rotation: RotationKind
) -> None:
    traced = _trace(mechanism, local_scale, rotation)
    ops = list(device_graph.walk_ops(traced.graph))
    # The loops of the rounding, of the ties and of the missing shares were entered.
    assert sum(op.type == "StatelessWhile" for op in ops) >= 3
    assert any(op.type == "TensorScatterUpdate" for op in ops)
    assert device_graph.find_offences(traced.graph, _DIM // 2) == []
    _check_no_state(traced, ops)


def _check_no_state(traced, ops: list[tf.Operation]) -> None:
    assert traced.captured_inputs == []
    assert traced.variables == ()
    assert not [op.type for op in ops if op.op_def.is_stateful]
    assert not [op.type for op in ops if "PyFunc" in op.type]


@pytest.mark.parametrize("mechanism", [Mechanism.DDGAUSS, Mechanism.SKELLAM])
def test_no_state_on_a_cpu(
    mechanism: Mechanism, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla, "MIN_SIZE", 1)
    traced = _trace(mechanism, 2.0, RotationKind.HADAMARD)
    ops = list(device_graph.walk_ops(traced.graph))
    calls = {"PartitionedCall", "StatefulPartitionedCall"}
    assert traced.captured_inputs == []
    assert not [op.type for op in ops if op.op_def.is_stateful and op.type not in calls]


class TestControls:
    """What the walk must find."""

    @staticmethod
    def _find(function, dtype: tf.DType = tf.int32, size: int = _DIM):
        traced = tf.function(function, autograph=False).get_concrete_function(
            tf.TensorSpec([size], dtype)
        )
        return device_graph.find_offences(traced.graph, _DIM // 2)

    def test_int32_addition(self) -> None:
        offences = self._find(lambda x: x + x)
        assert {offence.op_type for offence in offences} >= {"AddV2"}
        assert "host memory" in offences[0].reason

    def test_short_int32_addition_is_allowed(self) -> None:
        assert self._find(lambda x: x + x, size=16) == []

    @pytest.mark.parametrize("dtype", [tf.uint32, tf.int64, tf.float32])
    def test_addition_of_other_types_is_allowed(self, dtype: tf.DType) -> None:
        assert self._find(lambda x: x + x, dtype) == []

    @pytest.mark.parametrize("size", [16, _DIM])
    def test_an_op_of_the_cpu_alone(self, size: int) -> None:
        offences = self._find(tf.random.shuffle, tf.float32, size)
        assert [offence.op_type for offence in offences] == ["RandomShuffle"]
        assert offences[0].reason == "no GPU kernel"

    def test_inside_a_loop(self) -> None:
        def run(x: tf.Tensor) -> tf.Tensor:
            step = lambda i, x: (i + 1, tf.random.shuffle(x))  # noqa: E731
            return tf.while_loop(lambda i, x: i < 3, step, (0, x))[1]

        types = {offence.op_type for offence in self._find(run, tf.float32)}
        assert types == {"RandomShuffle"}

    def test_inside_a_branch(self) -> None:
        def run(x: tf.Tensor) -> tf.Tensor:
            return tf.cond(x[0] > 0, lambda: tf.random.shuffle(x), lambda: x)

        types = {offence.op_type for offence in self._find(run, tf.float32)}
        assert types == {"RandomShuffle"}

    def test_inside_a_called_function(self) -> None:
        inner = tf.function(lambda x: tf.random.shuffle(x))
        types = {offence.op_type for offence in self._find(inner, tf.float32)}
        assert types == {"RandomShuffle"}

    def test_a_loop_that_carries_int32(self) -> None:
        def run(x: tf.Tensor) -> tf.Tensor:
            step = lambda i, x: (i + 1, tf.bitwise.invert(x))  # noqa: E731
            return tf.while_loop(lambda i, x: i < 3, step, (0, x))[1]

        offences = self._find(run)
        assert any(offence.op_type.endswith("While") for offence in offences)

    def test_types_without_a_kernel(self) -> None:
        offences = self._find(lambda x: tf.gather(x, [0, 1]), tf.uint32)
        assert [offence.op_type for offence in offences] == ["GatherV2"]
