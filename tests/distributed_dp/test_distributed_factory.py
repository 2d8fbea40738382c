"""One round's TensorFlow side, without TFF's runtime: arguments, streams, wiring."""

import collections
import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp import distributed_factory, xla
from distributed_dp.accounting import (
    CohortScheme,
    DDGaussParameters,
    GaussianParameters,
    Sampling,
    SkellamParameters,
    compute_cohort_bounds,
)
from distributed_dp.adaptive_clip import AdaptiveClip
from distributed_dp.central_gaussian_factory import CentralGaussianFactory
from distributed_dp.ddgauss_factory import DDGaussFactory
from distributed_dp.rotation import RotationKind
from distributed_dp.skellam_factory import DistributedSkellamFactory
from distributed_dp.update_layout import NoiseSeeds
from tests.distributed_dp import device_graph, goodness_of_fit

_DIM = 64
_SCHEME = CohortScheme(Sampling.FIXED, 20, 4)
_CARRIED = {
    "noise_seeds": NoiseSeeds.CARRIED,
    "rotation_seed": (1, 2),
    "server_noise_seed": (3, 4),
}
_KINDS = {
    DDGaussFactory: DDGaussParameters,
    DistributedSkellamFactory: SkellamParameters,
}


def _build_parameters(kind: type, *, dim: int = _DIM, **changes):
    values = {
        "l2_clip": 1.0,
        "granularity": 2.0**-10,
        "local_stddev": 0.02,
        "beta": math.exp(-0.5),
        "bits": 16,
        "padded_dim": dim,
        "clients_per_round": 4,
    }
    return kind(**(values | changes))


def _build_value_type(dim: int = _DIM) -> tff.Type:
    return tff.to_type(((np.float32, [dim]), (np.int32, [2]), np.int32))


def _build_round_ops(
    monkeypatch: pytest.MonkeyPatch, factory, value_type: tff.Type | None = None
):
    """Returns what `create` hands over to TFF."""
    with monkeypatch.context() as patch:
        patch.setattr(
            distributed_factory, "_build_process", lambda ops, *args, **options: ops
        )
        return factory.create(value_type or _build_value_type())


def _run_round(ops, state, vectors: np.ndarray, seeds: np.ndarray, joined: int):
    """Runs a round as the process does; returns the next state, mean, measurements."""
    told = ops.prepare(state, tf.constant(0))
    total = np.zeros(ops.sent_dim, np.int64)
    counts = {"arrived": tf.constant(0), "joined": tf.constant(0, tf.int64)}
    for name in ("clipped", "finite", "norm", "rounded_norm", "redraws"):
        counts[name] = tf.constant(0.0)
    for vector, seed in zip(vectors, seeds, strict=True):
        value = (tf.constant(vector), tf.constant(seed), tf.constant(joined))
        residues, counted = ops.encode(value, told)
        assert residues.dtype == ops.sent_dtype
        assert residues.shape == [ops.sent_dim]
        total += residues.numpy()
        for name, number in counted.items():
            counts[name] += number
    return ops.decode(state, tf.constant(total, ops.sent_dtype), counts)


class TestArguments:
    @pytest.mark.parametrize("factory", _KINDS)
    def test_other_mechanisms_parameters_are_refused(self, factory: type) -> None:
        kind = next(kind for kind in _KINDS.values() if kind is not _KINDS[factory])
        for wrong in (
            _build_parameters(kind),
            GaussianParameters(l2_clip=1.0, noise_multiplier=1.0, clients_per_round=4),
        ):
            with pytest.raises(ValueError, match="`parameters` must be"):
                factory(wrong, _SCHEME)

    @pytest.mark.parametrize("factory", [*_KINDS, CentralGaussianFactory])
    def test_schemes_that_disagree_are_refused(self, factory: type) -> None:
        if factory is CentralGaussianFactory:
            parameters = GaussianParameters(
                l2_clip=1.0, noise_multiplier=1.0, clients_per_round=4
            )
        else:
            parameters = _build_parameters(_KINDS[factory])
        scheme = CohortScheme(Sampling.FIXED, 20, 5)
        with pytest.raises(ValueError, match="`parameters.clients_per_round` must"):
            factory(parameters, scheme)

    @pytest.mark.parametrize("seed", [(1,), (1, 2, 3), (2**31, 0), (0, -(2**31) - 1)])
    @pytest.mark.parametrize("name", ["rotation_seed", "server_noise_seed"])
    def test_seeds_that_are_no_int32_pair_are_refused(self, name: str, seed) -> None:
        parameters = _build_parameters(DDGaussParameters)
        with pytest.raises(ValueError, match=f"`{name}` must be a pair"):
            DDGaussFactory(parameters, _SCHEME, **{name: seed})

    def test_a_public_seed_for_the_servers_noise_is_refused(self) -> None:
        # Both are folded with the round's number alone: the noise would be public.
        parameters = _build_parameters(DDGaussParameters)
        with pytest.raises(ValueError, match="`server_noise_seed` must differ"):
            DDGaussFactory(
                parameters, _SCHEME, rotation_seed=(1, 2), server_noise_seed=(1, 2)
            )

    @pytest.mark.parametrize("dim", [_DIM - 1, _DIM // 2, _DIM + 1])
    def test_another_length_than_calibrated_for_is_refused(self, dim: int) -> None:
        factory = DDGaussFactory(
            _build_parameters(DDGaussParameters),
            _SCHEME,
            rotation=RotationKind.IDENTITY,
            **_CARRIED,
        )
        with pytest.raises(ValueError, match="`parameters.padded_dim` must equal"):
            factory.create(_build_value_type(dim))

    def test_a_quantile_that_could_wrap_is_refused(self) -> None:
        adaptive_clip = AdaptiveClip(noise_multiplier=4.0, contribution=100)
        factory = DDGaussFactory(
            _build_parameters(DDGaussParameters, bits=12, granularity=2.0**-6),
            _SCHEME,
            adaptive_clip=adaptive_clip,
            **_CARRIED,
        )
        with pytest.raises(ValueError, match="`bits` must hold the sum"):
            factory.create(_build_value_type())


@pytest.mark.parametrize("factory", _KINDS)
class TestRound:
    def _build(self, monkeypatch, factory: type, *, scheme=_SCHEME, **options):
        parameters = _build_parameters(_KINDS[factory], **options.pop("changes", {}))
        built = factory(parameters, scheme, **(_CARRIED | options))
        return _build_round_ops(
            monkeypatch, built, _build_value_type(parameters.padded_dim)
        )

    def test_missing_noise_is_added_inside_the_modulus(
        self, factory: type, monkeypatch: pytest.MonkeyPatch, seed: np.ndarray
    ) -> None:
        # The noise's standard deviation is the modulus: added after centring, most of
        # it would lie outside. (tests/distributed_dp/test_noise.py has the reason.)
        dim = 2048
        ops = self._build(
            monkeypatch,
            factory,
            rotation=RotationKind.IDENTITY,
            changes={"padded_dim": dim, "bits": 6, "local_stddev": 32 * 2.0**-10},
        )
        state = ops.initialize()
        for num_arrived in (0, 1):
            vectors = np.zeros([num_arrived, dim], np.float32)
            seeds = np.tile(seed, [num_arrived, 1])
            _, mean, measured = _run_round(ops, state, vectors, seeds, 4)
            steps = mean.numpy() * 4 * 2**10
            assert np.array_equal(steps, np.rint(steps))
            edges = np.arange(-32, 32)
            assert set(np.unique(steps)) == set(edges)
            p_value = goodness_of_fit.compute_p_value(
                steps, edges[:-1], np.arange(1, 64) / 64
            )
            assert p_value > goodness_of_fit.FALSE_FAILURE
            assert float(measured["max_sum_over_half_modulus"]) == 1.0

    @pytest.mark.parametrize("arrived", [0, 1, 3, 4, 5])
    def test_noise_does_not_depend_on_who_dropped_out(
        self, factory: type, arrived: int, monkeypatch, seed: np.ndarray
    ) -> None:
        dim = 4096
        ops = self._build(monkeypatch, factory, changes={"padded_dim": dim})
        vectors = np.zeros([arrived, dim], np.float32)
        seeds = [seed + np.int32([i, 0]) for i in range(arrived)]
        _, mean, _ = _run_round(ops, ops.initialize(), vectors, seeds, 4)
        # The divisor is the expected 4 whatever arrived; the noise of a cohort above
        # the fixed size is more than the full one.
        stddev = 0.02 * math.sqrt(max(arrived, 4)) / 4
        for wrong, factor in ((False, 1), (True, 4), (True, 1 / 4), (True, 1.25)):
            variance = stddev**2 * factor
            p_value = goodness_of_fit.compute_variance_p_value(mean.numpy(), variance)
            assert (p_value < goodness_of_fit.FALSE_FAILURE) == wrong

    def test_poisson_cohorts_have_the_same_noise(
        self, factory: type, monkeypatch, seed: np.ndarray
    ) -> None:
        dim = 4096
        scheme = CohortScheme(Sampling.POISSON, 1000, 40)
        low = compute_cohort_bounds(scheme).low
        assert 1 < low < 20
        ops = self._build(
            monkeypatch,
            factory,
            scheme=scheme,
            changes={"padded_dim": dim, "clients_per_round": 40},
        )
        for joined, arrived in ((2, 2), (low, low - 1), (20, 20), (40, 13), (60, 0)):
            vectors = np.zeros([arrived, dim], np.float32)
            seeds = [seed + np.int32([i, joined]) for i in range(arrived)]
            _, mean, _ = _run_round(ops, ops.initialize(), vectors, seeds, joined)
            stddev = 0.02 * math.sqrt(40) / 40
            p_value = goodness_of_fit.compute_variance_p_value(mean.numpy(), stddev**2)
            assert p_value > goodness_of_fit.FALSE_FAILURE

    def test_no_two_rounds_share_a_stream(
        self, factory: type, monkeypatch, seed: np.ndarray
    ) -> None:
        ops = self._build(monkeypatch, factory)
        first = ops.initialize()
        none = np.zeros([0, _DIM], np.float32)
        second, mean, _ = _run_round(ops, first, none, [], 4)
        _, next_mean, _ = _run_round(ops, second, none, [], 4)
        _, again, _ = _run_round(ops, first, none, [], 4)
        assert np.array_equal(mean, again)
        assert not np.any(np.isclose(mean, next_mean, rtol=0, atol=1e-7)[:3])
        told, next_told = (ops.prepare(s, tf.constant(4)) for s in (first, second))
        assert not np.array_equal(told["rotation_seed"], next_told["rotation_seed"])
        assert int(second["round_number"]) == 1

    def test_counts_do_not_overflow(self, factory: type, monkeypatch, seed) -> None:
        # Every client reports how many joined, so that the sum is their number squared.
        ops = self._build(monkeypatch, factory)
        state = ops.initialize()
        told = ops.prepare(state, tf.constant(4))
        value = (tf.zeros([_DIM]), tf.constant(seed), tf.constant(60_000))
        _, counts = ops.encode(value, told)
        assert counts["joined"].dtype == tf.int64
        assert 60_000 * int(counts["joined"]) > 2**31

    @pytest.mark.parametrize(
        ("bits", "dtype"), [(16, tf.int32), (27, tf.int32), (30, tf.int64)]
    )
    def test_sums_fit_their_type(
        self, factory: type, bits: int, dtype: tf.DType, monkeypatch
    ) -> None:
        ops = self._build(monkeypatch, factory, changes={"bits": bits})
        assert ops.sent_dtype == dtype
        most = compute_cohort_bounds(_SCHEME).high * (2**bits - 1)
        assert most < ops.sent_dtype.max

    def test_measurements_without_diagnostics_are_released_ones(
        self, factory: type, monkeypatch, seed: np.ndarray
    ) -> None:
        released = {
            "l2_clip",
            "granularity",
            "local_stddev",
            "bits",
            "bits_per_client",
            "max_sum_over_half_modulus",
            "wraparound_estimate",
        }
        ops = self._build(monkeypatch, factory, diagnostics=False)
        vectors = np.ones([2, _DIM], np.float32)
        told = ops.prepare(ops.initialize(), tf.constant(4))
        value = (tf.constant(vectors[0]), tf.constant(seed), tf.constant(4))
        assert set(ops.encode(value, told)[1]) == {"arrived", "joined"}
        seeds = [seed, seed ^ 1]
        _, _, measured = _run_round(ops, ops.initialize(), vectors, seeds, 4)
        assert set(measured) == released
        assert int(measured["bits_per_client"]) == 16 * _DIM
        ops = self._build(monkeypatch, factory)
        _, _, measured = _run_round(ops, ops.initialize(), vectors, seeds, 4)
        assert released < set(measured)


@pytest.mark.parametrize("factory", _KINDS)
def test_every_op_of_a_round_stays_on_a_gpu(
    factory: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    monkeypatch.setattr(xla.tf.config, "list_physical_devices", lambda kind: devices)
    dim = 20_480
    built = factory(
        _build_parameters(_KINDS[factory], dim=dim),
        _SCHEME,
        adaptive_clip=AdaptiveClip(noise_multiplier=4.0, contribution=4),
        **_CARRIED,
    )
    shapes = collections.OrderedDict(a=(np.float32, [100, 200]), b=(np.float32, [480]))
    value_type = tff.to_type((shapes, (np.int32, [2]), np.int32))
    ops = _build_round_ops(monkeypatch, built, value_type)
    state = ops.initialize()
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), state)
    told = ops.prepare(state, tf.constant(4))
    value = (
        {"a": tf.zeros([100, 200]), "b": tf.zeros([480])},
        tf.constant([1, 2]),
        tf.constant(4),
    )
    _, counts = ops.encode(value, told)
    encode = tf.function(ops.encode, autograph=False).get_concrete_function(value, told)
    decode = tf.function(ops.decode, autograph=False).get_concrete_function(
        specs, tf.TensorSpec([ops.sent_dim], ops.sent_dtype), counts
    )
    for traced in (encode, decode):
        assert traced.captured_inputs == []
        # The int32 residues that TFF's sum takes are the interface, not arithmetic.
        offences = [
            offence
            for offence in device_graph.find_offences(traced.graph, dim // 2)
            if offence.op_type != "Identity"
        ]
        assert offences == []
