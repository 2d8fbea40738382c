"""Tests for the measuring factory: three clients by hand, and what it leaves alone."""

import math

import numpy as np
import pytest
import tensorflow_federated as tff

from centaur.diagnosis import MeasuringFactory
from distributed_dp.accounting import CohortScheme, GaussianParameters, Sampling
from distributed_dp.central_gaussian_factory import CentralGaussianFactory
from distributed_dp.no_privacy_factory import NoPrivacyFactory
from distributed_dp.update_layout import NoiseSeeds
from simulation import execution

CLIP, STDDEV, EXPECTED = 5.0, 0.5, 4
SCHEME = CohortScheme(Sampling.POISSON, 20, EXPECTED)
# Two arrays of the representation, one of the head.
UPDATE_TYPE = tff.to_type(((np.float32, [1, 2]), (np.float32, [1]), (np.float32, [1])))
VALUE_TYPE = tff.to_type((UPDATE_TYPE, (np.int32, [2]), np.int32))
# Norms: 3 and 4, so 5, at the clip; 6 and 8, so 10, clipped to half; 0 and 1.
VECTORS = ([3.0, 0, 0, 4], [0, 0, 6, 8], [0, 0, 0, -1])


def build_gaussian() -> CentralGaussianFactory:
    parameters = GaussianParameters(
        l2_clip=CLIP, noise_multiplier=STDDEV / CLIP, clients_per_round=EXPECTED
    )
    return CentralGaussianFactory(
        parameters,
        SCHEME,
        noise_seeds=NoiseSeeds.CARRIED,
        server_noise_seed=(3, 4),
    )


def build_clients(vectors):
    clients = []
    for number, vector in enumerate(vectors):
        a, b, c, d = np.array(vector, np.float32)
        update = (np.array([[a, b]]), np.array([c]), np.array([d]))
        clients.append((update, np.array([number, 1], np.int32), np.int32(3)))
    return clients


def run(factory, vectors=VECTORS):
    process = factory.create(VALUE_TYPE)
    with execution.use_execution_context(device="cpu"):
        return process.next(process.initialize(), build_clients(vectors))


def measure(factory, vectors=VECTORS):
    return run(factory, vectors).measurements["updates"]


class TestClients:
    @pytest.fixture(scope="class")
    def output(self):
        factory = MeasuringFactory(
            build_gaussian(),
            l2_clip=CLIP,
            central_stddev=STDDEV,
            num_representation_weights=2,
        )
        return run(factory)

    def test_norms_by_part(self, output):
        found = output.measurements["updates"]
        assert found["num_clients"] == 3
        # At the clip is not above it.
        assert found["fraction_clipped"] == pytest.approx(1 / 3)
        whole, head = found["whole"], found["head"]
        representation = found["representation"]
        assert whole["mean_norm"] == pytest.approx((5 + 10 + 1) / 3)
        assert representation["mean_norm"] == pytest.approx((3 + 6 + 0) / 3)
        assert head["mean_norm"] == pytest.approx((4 + 8 + 1) / 3)
        assert whole["clipped_norm"] == pytest.approx((5 + 5 + 1) / 3)
        # The whole update is clipped, not its parts.
        assert representation["clipped_norm"] == pytest.approx((3 + 3 + 0) / 3)
        assert head["clipped_norm"] == pytest.approx((4 + 4 + 1) / 3)

    def test_signal_and_agreement(self, output):
        """The clipped ones add up to (3, 0, 3, 7)."""
        found, representation = output.measurements["updates"], math.hypot(3, 3)
        whole = math.sqrt(9 + 9 + 49)
        for part, signal, dim, total in (
            ("whole", whole, 4, 11),
            ("representation", representation, 3, 6),
            ("head", 7, 1, 9),
        ):
            noise = STDDEV * math.sqrt(dim)
            ratio = found[part]["signal_to_noise"]
            assert ratio == pytest.approx(signal / noise, rel=1e-6)
            assert found[part]["agreement"] == pytest.approx(signal / total, rel=1e-6)

    def test_the_other_factory_is_left_as_it_is(self, output):
        alone = run(build_gaussian())
        np.testing.assert_equal(tuple(output.result), tuple(alone.result))
        np.testing.assert_equal(dict(output.state), dict(alone.state))
        measured = dict(output.measurements)
        del measured["updates"]
        np.testing.assert_equal(measured, dict(alone.measurements))
        assert measured["fraction_clipped"] == pytest.approx(1 / 3)


class TestOtherwise:
    def test_without_a_clip_and_noise(self):
        inner = NoPrivacyFactory(SCHEME, noise_seeds=NoiseSeeds.CARRIED)
        found = measure(
            MeasuringFactory(
                inner, l2_clip=None, central_stddev=0.0, num_representation_weights=2
            )
        )
        assert found["fraction_clipped"] == 0
        assert found["whole"]["clipped_norm"] == found["whole"]["mean_norm"]
        assert found["whole"]["signal_to_noise"] == math.inf

    def build_without_head(self):
        return MeasuringFactory(
            build_gaussian(),
            l2_clip=CLIP,
            central_stddev=STDDEV,
            num_representation_weights=3,
        )

    def test_updates_without_a_head_and_not_finite_ones(self):
        vectors = [*VECTORS, [math.nan, 0, 0, 0]]
        found = measure(self.build_without_head(), vectors)
        assert "head" not in found
        assert found["representation"] == found["whole"]
        assert found["whole"]["mean_norm"] == pytest.approx(16 / 4)

    def test_nobody(self):
        found = measure(self.build_without_head(), [])
        assert found["num_clients"] == 0
        assert math.isnan(found["fraction_clipped"])
        assert math.isnan(found["whole"]["agreement"])
        assert math.isnan(found["whole"]["mean_norm"])
        assert found["whole"]["signal_to_noise"] == 0

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"l2_clip": 0.0}, "`l2_clip` must"),
            ({"central_stddev": -1.0}, "`central_stddev` must"),
            ({"central_stddev": math.inf}, "`central_stddev` must"),
            ({"num_representation_weights": 0}, "`num_representation_weights` must"),
        ],
    )
    def test_what_is_refused(self, change, message):
        values = {
            "l2_clip": 1.0,
            "central_stddev": 1.0,
            "num_representation_weights": 1,
        }
        with pytest.raises(ValueError, match=message):
            MeasuringFactory(build_gaussian(), **(values | change))
