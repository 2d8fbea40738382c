"""A failed client takes its share of the noise along, and the server adds that."""

import numpy as np
import pytest
import tensorflow_federated as tff

from distributed_dp import DDGaussFactory, accounting
from distributed_dp.update_layout import NoiseSeeds
from simulation import execution

DIM, JOINED = 4096, 6


def build_process() -> tuple[tff.templates.AggregationProcess, float]:
    scheme = accounting.CohortScheme(accounting.Sampling.POISSON, 60, JOINED)
    parameters = accounting.calibrate(
        accounting.Mechanism.DDGAUSS,
        scheme,
        epsilon=5.0,
        delta=1e-3,
        num_rounds=2,
        l2_clip=1.0,
        bits=16,
        padded_dim=DIM,
    )
    factory = DDGaussFactory(
        parameters,
        scheme,
        noise_seeds=NoiseSeeds.CARRIED,
        rotation_seed=(1, 2),
        server_noise_seed=(3, 4),
    )
    vector = tff.TensorType(np.float32, [DIM])
    seed = tff.TensorType(np.int32, [2])
    created = factory.create(tff.to_type((vector, seed, np.int32)))
    return created, parameters.central_stddev


class Loader:
    """Makes a zero update, but fails for some clients."""

    def __init__(self, failing: set[int]) -> None:
        self._failing = failing

    def __call__(self, number: int):
        if number in self._failing:
            raise OSError("no such file")
        seed = np.array([7, number], np.int32)
        return np.zeros(DIM, np.float32), seed, np.int32(JOINED)


@pytest.fixture(scope="module")
def process():
    return build_process()


@pytest.mark.parametrize("failing", [set(), {1, 2, 4}, set(range(JOINED))])
def test_the_noise_is_the_same_whoever_fails(process, failing):
    process, central_stddev = process
    values = [
        execution.ClientValue(Loader(failing), number) for number in range(JOINED)
    ]
    drop = execution.ClientFailure.DROP
    with execution.use_execution_context(client_failure=drop) as engine:
        output = process.next(process.initialize(), values)
        assert {failure.client_index for failure in engine.failures} == failing
    noise = np.std(output.result) * JOINED
    # Five standard errors are 6 %; without the server's part, half or all is missing.
    assert noise == pytest.approx(central_stddev, rel=0.06)
