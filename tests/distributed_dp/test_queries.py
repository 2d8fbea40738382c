"""The queries, eagerly and in TFF's factory for TensorFlow Privacy's queries."""

import collections
import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_privacy.privacy.dp_query import test_utils

from distributed_dp.accounting import DDGaussParameters, SkellamParameters
from distributed_dp.queries import DDGaussSumQuery, SkellamSumQuery
from tests.distributed_dp import goodness_of_fit
from tests.distributed_dp.factories import (
    CENTRAL_STDDEV,
    DIM,
    EXPECTED_CLIENTS,
    L2_CLIP,
    UPDATE_TYPE,
    build_parameters,
    to_update,
    to_vector,
)

_QUERIES = {
    DDGaussSumQuery: DDGaussParameters,
    SkellamSumQuery: SkellamParameters,
}


def _build_query(kind: type, **options):
    template = to_update(np.zeros(DIM))
    return kind(build_parameters(_QUERIES[kind]), template, **options)


def _draw_records(rng: np.random.Generator) -> np.ndarray:
    records = rng.normal(size=[EXPECTED_CLIENTS, DIM])
    records /= np.linalg.norm(records, axis=1, keepdims=True)
    return records * [[0.5], [1.0], [2.0], [10.0]]


def _check_sum(total: np.ndarray, records: np.ndarray) -> None:
    norms = np.linalg.norm(records, axis=1, keepdims=True)
    expected = (records * np.minimum(1.0, L2_CLIP / norms)).sum(axis=0)
    noise = total - expected
    # The rounding adds at most a quarter of a squared step for each client.
    variance = CENTRAL_STDDEV**2 + EXPECTED_CLIENTS * 2.0**-24 / 4
    for factor, is_right in ((1, True), (EXPECTED_CLIENTS, False), (1.3, False)):
        p_value = goodness_of_fit.compute_variance_p_value(noise, variance * factor)
        assert (p_value > goodness_of_fit.FALSE_FAILURE) == is_right


@pytest.mark.parametrize("kind", _QUERIES)
class TestEager:
    def test_sum(self, kind: type, rng: np.random.Generator) -> None:
        query = _build_query(kind)
        records = _draw_records(rng)
        state = query.initial_global_state()
        params = query.derive_sample_params(state)
        total = tf.zeros([2048], tf.int64)
        for record in records:
            residues = query.preprocess_record(params, to_update(record))
            assert residues.dtype == tf.int64
            assert residues.shape == [2048]
            assert 0 <= int(np.min(residues))
            assert int(np.max(residues)) < 2**18
            total += residues
        result, next_state, _ = query.get_noised_result(total, state)
        _check_sum(to_vector(result), records)
        assert next_state["round_number"] == 1
        # A modular sum decodes to the same.
        modular, _, _ = query.get_noised_result(total % 2**18, state)
        np.testing.assert_array_equal(to_vector(modular), to_vector(result))

    def test_in_the_runner_of_tensorflow_privacy(
        self, kind: type, rng: np.random.Generator
    ) -> None:
        query = _build_query(kind)
        records = _draw_records(rng)
        result, _ = test_utils.run_query(query, [to_update(r) for r in records])
        _check_sum(to_vector(result), records)

    def test_rounds_have_their_own_rotation_and_noise(self, kind: type) -> None:
        query = _build_query(kind, rotation_seed=(1, 2))
        state = query.initial_global_state()
        again = query.initial_global_state()
        assert np.array_equal(state["rotation_seed"], again["rotation_seed"])
        _, next_state, _ = query.get_noised_result(tf.zeros([2048], tf.int64), state)
        first, second = (query.derive_sample_params(s) for s in (state, next_state))
        assert not np.array_equal(first, second)
        record = to_update(np.zeros(DIM))
        drawn = [query.preprocess_record(first, record) for _ in range(2)]
        assert not np.array_equal(*drawn)

    def test_without_a_seed_the_rotation_is_fresh(self, kind: type) -> None:
        states = [_build_query(kind).initial_global_state() for _ in range(2)]
        assert not np.array_equal(*(state["rotation_seed"] for state in states))

    @pytest.mark.parametrize("seed", [(1,), (2**31, 0)])
    def test_a_bad_rotation_seed_is_refused(self, kind: type, seed: tuple) -> None:
        with pytest.raises(ValueError, match="`rotation_seed` must be a pair"):
            _build_query(kind, rotation_seed=seed)

    def test_another_length_is_refused(self, kind: type) -> None:
        with pytest.raises(ValueError, match="`parameters.padded_dim` must equal"):
            kind(build_parameters(_QUERIES[kind]), np.zeros([10]))


@pytest.mark.usefixtures("tff_context")
@pytest.mark.parametrize("kind", _QUERIES)
def test_in_the_factory_of_tff(kind: type, rng: np.random.Generator) -> None:
    factory = tff.aggregators.DifferentiallyPrivateFactory(_build_query(kind))
    process = factory.create(UPDATE_TYPE)
    records = _draw_records(rng)
    output = process.next(process.initialize(), [to_update(r) for r in records])
    _check_sum(to_vector(output.result), records)


def test_a_single_tensor_is_a_record(rng: np.random.Generator) -> None:
    record = rng.normal(size=[4, 4]).astype(np.float32)
    record /= np.linalg.norm(record)
    parameters = build_parameters(
        DDGaussParameters, padded_dim=16, local_stddev=0.0, clients_per_round=1
    )
    query = DDGaussSumQuery(parameters, tf.TensorSpec([4, 4]))
    state = query.initial_global_state()
    residues = query.preprocess_record(query.derive_sample_params(state), record)
    result, _, _ = query.get_noised_result(residues, state)
    assert result.shape == [4, 4]
    assert np.linalg.norm(result - record) < 2.0**-12 * math.sqrt(16)
    assert isinstance(state, collections.OrderedDict)
