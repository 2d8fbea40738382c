"""The contract of every aggregation factory: its types, and a round of a few clients.

Processes are expensive: one for each factory and form of its noise seeds, built once.
"""

import functools

import numpy as np
import pytest
import tensorflow_federated as tff

from distributed_dp.update_layout import NoiseSeeds
from tests.distributed_dp import goodness_of_fit
from tests.distributed_dp.factories import (
    CARRIED_TYPE,
    CASES,
    CENTRAL_STDDEV,
    DIM,
    EXPECTED_CLIENTS,
    L2_CLIP,
    UPDATE_TYPE,
    to_update,
    to_vector,
)

_RUNS = [
    ("ddgauss", NoiseSeeds.CARRIED),
    ("ddgauss", NoiseSeeds.ENTROPY),
    ("skellam", NoiseSeeds.CARRIED),
    ("skellam", NoiseSeeds.ENTROPY),
    ("central_gaussian", NoiseSeeds.CARRIED),
    ("central_gaussian", NoiseSeeds.ENTROPY),
    ("no_privacy", NoiseSeeds.CARRIED),
]
_CLIENT_DATA = {
    "num_clients",
    "num_nonfinite",
    "fraction_clipped",
    "mean_norm",
    "mean_rounded_norm",
    "num_redraws",
}


@functools.cache
def _build_process(
    name: str, noise_seeds: NoiseSeeds
) -> tff.templates.AggregationProcess:
    is_carried = noise_seeds is NoiseSeeds.CARRIED
    factory = CASES[name].build(noise_seeds=noise_seeds)
    return factory.create(CARRIED_TYPE if is_carried else UPDATE_TYPE)


@functools.cache
def _get_first_state(name: str, noise_seeds: NoiseSeeds):
    return _build_process(name, noise_seeds).initialize()


class _Round:
    """A process at its first state."""

    def __init__(self, name: str, noise_seeds: NoiseSeeds):
        self.case = CASES[name]
        self.noise_seeds = noise_seeds
        self.process = _build_process(name, noise_seeds)
        self.state = _get_first_state(name, noise_seeds)

    def run(self, vectors, seed: np.ndarray, *, state=None, joined: int | None = None):
        """Returns the next state, the mean as a vector, and the measurements."""
        clients = [to_update(vector) for vector in vectors]
        if self.noise_seeds is NoiseSeeds.CARRIED:
            joined = len(clients) if joined is None else joined
            clients = [
                (update, seed + np.int32([i, 0]), np.int32(joined))
                for i, update in enumerate(clients)
            ]
        output = self.process.next(self.state if state is None else state, clients)
        return output.state, to_vector(output.result), output.measurements


def _draw_vectors(rng: np.random.Generator, norms) -> np.ndarray:
    directions = rng.normal(size=[len(norms), DIM])
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return (directions * np.array(norms)[:, np.newaxis]).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "noise_seeds"), _RUNS, ids=[f"{n}-{s.value}" for n, s in _RUNS]
)
class TestTypes:
    def test_the_result_has_the_updates_type(self, name: str, noise_seeds) -> None:
        process = _build_process(name, noise_seeds)
        value_type = CARRIED_TYPE if noise_seeds is NoiseSeeds.CARRIED else UPDATE_TYPE
        state_type = process.initialize.type_signature.result
        expected = tff.FunctionType(
            parameter=tff.StructType(
                [
                    ("state", state_type),
                    ("value", tff.FederatedType(value_type, tff.CLIENTS)),
                ]
            ),
            result=tff.templates.MeasuredProcessOutput(
                state_type,
                tff.FederatedType(UPDATE_TYPE, tff.SERVER),
                process.next.type_signature.result.measurements,
            ),
        )
        assert process.next.type_signature.is_equivalent_to(expected)
        assert not process.is_weighted

    def test_measurements_are_scalars(self, name: str, noise_seeds) -> None:
        process = _build_process(name, noise_seeds)
        measured = process.next.type_signature.result.measurements.member
        assert all(leaf.shape == () for leaf in tff.structure.flatten(measured))
        assert _CLIENT_DATA - {"mean_rounded_norm", "num_redraws"} <= set(dir(measured))


@pytest.mark.usefixtures("tff_context")
@pytest.mark.parametrize(
    ("name", "noise_seeds"), _RUNS, ids=[f"{n}-{s.value}" for n, s in _RUNS]
)
class TestExecution:
    @pytest.fixture
    def a_round(self, name: str, noise_seeds: NoiseSeeds) -> _Round:
        return _Round(name, noise_seeds)

    def test_the_mean_is_over_the_expected_clients(
        self, a_round: _Round, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        # Three of four expected: clipped, at the clip, far below it.
        vectors = _draw_vectors(rng, [20.0, L2_CLIP, 0.3])
        _, mean, measured = a_round.run(vectors, seed)
        clipped = vectors.astype(np.float64)
        if a_round.case.l2_clip is not None:
            clipped[0] *= L2_CLIP / 20.0
        expected = clipped.sum(axis=0) / EXPECTED_CLIENTS
        error = np.linalg.norm(mean - expected)
        # 2016 coordinates: the norm of the noise is within 20 % of its mean.
        noise = a_round.case.stddev * np.sqrt(DIM)
        assert error <= 1.2 * noise + 1e-6
        assert error >= 0.8 * noise
        for wrong in (clipped.sum(axis=0) / 3, clipped.sum(axis=0), -expected):
            assert np.linalg.norm(mean - wrong) > 1.2 * noise + 1e-6
        assert measured["num_clients"] == 3
        assert measured["num_nonfinite"] == 0
        norms = [20.0, L2_CLIP, 0.3]
        assert measured["mean_norm"] == pytest.approx(np.mean(norms), rel=1e-5)
        if a_round.case.l2_clip is not None:
            # The second's norm is the clip up to rounding, on either side.
            assert round(3 * measured["fraction_clipped"]) in (1, 2)

    def test_an_empty_cohort_gives_pure_noise(
        self, a_round: _Round, seed: np.ndarray
    ) -> None:
        state, mean, measured = a_round.run([], seed)
        self._check_noise(a_round, mean)
        assert measured["num_clients"] == 0
        assert measured["fraction_clipped"] == 0
        assert state["round_number"] == 1

    @pytest.mark.parametrize("num_clients", [1, 5])
    def test_noise_is_the_same_for_every_cohort(
        self, a_round: _Round, num_clients: int, seed: np.ndarray
    ) -> None:
        _, mean, _ = a_round.run(np.zeros([num_clients, DIM]), seed)
        self._check_noise(a_round, mean)

    @staticmethod
    def _check_noise(a_round: _Round, mean: np.ndarray) -> None:
        if a_round.case.stddev == 0:
            assert not mean.any()
            return
        for stddev in (
            a_round.case.stddev,
            CENTRAL_STDDEV,
            CENTRAL_STDDEV / EXPECTED_CLIENTS**0.5,
            CENTRAL_STDDEV / EXPECTED_CLIENTS**1.5,
            a_round.case.stddev * 1.15,
            a_round.case.stddev / 1.15,
        ):
            p_value = goodness_of_fit.compute_variance_p_value(mean, stddev**2)
            is_right = p_value > goodness_of_fit.FALSE_FAILURE
            assert is_right == (stddev == a_round.case.stddev)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_client_that_is_not_finite_is_left_out(
        self, a_round: _Round, bad: float, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        vectors = _draw_vectors(rng, [1.0, 1.0])
        vectors[1, 2015] = bad
        _, mean, measured = a_round.run(vectors, seed)
        error = np.linalg.norm(mean - vectors[0] / EXPECTED_CLIENTS)
        assert error <= 1.2 * a_round.case.stddev * np.sqrt(DIM) + 1e-6
        assert measured["num_clients"] == 2
        assert measured["num_nonfinite"] == 1

    def test_a_huge_client_is_only_clipped(
        self, a_round: _Round, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        # Its squared norm is no float32.
        vectors = _draw_vectors(rng, [1.0, 1e25])
        _, mean, _ = a_round.run(vectors, seed)
        factor = 1.0 if a_round.case.l2_clip is None else L2_CLIP / 1e25
        expected = (vectors[0] + vectors[1] * factor) / EXPECTED_CLIENTS
        error = np.linalg.norm(mean - expected)
        assert error <= 1.2 * a_round.case.stddev * np.sqrt(DIM) + 1e-6

    def test_rounds_and_calls(
        self, a_round: _Round, seed: np.ndarray, rng: np.random.Generator
    ) -> None:
        vectors = _draw_vectors(rng, [1.0, 1.0])
        state, mean, _ = a_round.run(vectors, seed)
        same_state, again, _ = a_round.run(vectors, seed)
        _, next_mean, _ = a_round.run(vectors, seed, state=state)
        if a_round.case.stddev == 0:
            assert np.array_equal(mean, next_mean)
            return
        assert np.mean(mean == next_mean) < 0.01
        if a_round.noise_seeds is NoiseSeeds.ENTROPY:
            assert np.mean(mean == again) < 0.01
            return
        assert mean.tobytes() == again.tobytes()
        assert all(np.array_equal(state[key], same_state[key]) for key in dict(state))
        _, other, _ = a_round.run(vectors, seed ^ np.int32([0, 1]))
        is_other = np.mean(mean == other) < 0.01
        assert is_other == a_round.case.is_distributed

    def test_dropouts_are_topped_up(self, a_round: _Round, seed: np.ndarray) -> None:
        # Only carried seeds come with the number that joined.
        joined = 6 if a_round.noise_seeds is NoiseSeeds.CARRIED else None
        _, mean, measured = a_round.run(np.zeros([2, DIM]), seed, joined=joined)
        self._check_noise(a_round, mean)
        assert measured["num_clients"] == 2


_FACTORIES = list(CASES)


@pytest.mark.parametrize("name", _FACTORIES)
class TestCreate:
    @pytest.mark.parametrize(
        "value_type",
        [
            tff.to_type((np.float64, [4])),
            tff.to_type((np.int32, [4])),
            tff.to_type((np.float32, [None])),
            tff.TensorType(np.float32, None),
            tff.to_type([(np.float32, [4]), (np.int64, [])]),
            tff.to_type((np.float32, [0])),
            tff.StructType([("a", tff.TensorType(np.float32, [4]))]),
            tff.to_type([]),
        ],
        ids=str,
    )
    def test_other_updates_are_refused(self, name: str, value_type: tff.Type) -> None:
        factory = CASES[name].build(noise_seeds=NoiseSeeds.ENTROPY)
        with pytest.raises(ValueError, match="`value_type` must"):
            factory.create(value_type)
        factory = CASES[name].build(noise_seeds=NoiseSeeds.CARRIED)
        carried = tff.to_type((value_type, (np.int32, [2]), np.int32))
        with pytest.raises(ValueError, match="`value_type` must"):
            factory.create(carried)

    @pytest.mark.parametrize(
        "rest",
        [
            [],
            [(np.int32, [2])],
            [np.int32, (np.int32, [2])],
            [(np.int32, [3]), np.int32],
            [(np.int64, [2]), np.int32],
            [(np.int32, [2]), np.int64],
            [(np.int32, [2]), np.int32, np.int32],
        ],
        ids=str,
    )
    def test_missing_seeds_are_refused(self, name: str, rest: list) -> None:
        factory = CASES[name].build(noise_seeds=NoiseSeeds.CARRIED)
        for value_type in (tff.to_type((UPDATE_TYPE, *rest)), UPDATE_TYPE):
            with pytest.raises(ValueError, match="`value_type` must be <update"):
                factory.create(value_type)

    def test_without_diagnostics_nothing_of_the_clients_is_measured(
        self, name: str
    ) -> None:
        factory = CASES[name].build(noise_seeds=NoiseSeeds.ENTROPY, diagnostics=False)
        process = factory.create(tff.to_type((np.float32, [DIM])))
        measured = process.next.type_signature.result.measurements.member
        assert not _CLIENT_DATA & set(dir(measured))
