"""Tests for the measuring factory: three clients by hand, and what it leaves alone."""

import collections
import math

import numpy as np
import pytest
import tensorflow_federated as tff

from centaur.diagnosis import MeasuringFactory, compute_row
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


def build_row(output, stddev=STDDEV, num_head=1):
    return compute_row(
        output.measurements,
        central_stddev=stddev,
        num_representation=4 - num_head,
        num_head=num_head,
    )


class TestClients:
    @pytest.fixture(scope="class")
    def output(self):
        factory = MeasuringFactory(
            build_gaussian(), l2_clip=CLIP, num_representation_weights=2
        )
        return run(factory)

    def test_norms_by_part(self, output):
        row = build_row(output)
        assert row.num_clients == 3
        # At the clip is not above it.
        assert row.fraction_clipped == pytest.approx(1 / 3)
        assert row.whole.mean_norm == pytest.approx((5 + 10 + 1) / 3)
        assert row.representation.mean_norm == pytest.approx((3 + 6 + 0) / 3)
        assert row.head.mean_norm == pytest.approx((4 + 8 + 1) / 3)
        assert row.whole.clipped_norm == pytest.approx((5 + 5 + 1) / 3)
        # The whole update is clipped, not its parts.
        assert row.representation.clipped_norm == pytest.approx((3 + 3 + 0) / 3)
        assert row.head.clipped_norm == pytest.approx((4 + 4 + 1) / 3)

    def test_signal_and_agreement(self, output):
        """The clipped ones add up to (3, 0, 3, 7)."""
        row, representation = build_row(output), math.hypot(3, 3)
        whole = math.sqrt(9 + 9 + 49)
        noise = {"whole": STDDEV * 2, "head": STDDEV}
        assert row.whole.signal_to_noise == pytest.approx(whole / noise["whole"])
        assert row.head.signal_to_noise == pytest.approx(7 / noise["head"])
        assert row.representation.signal_to_noise == pytest.approx(
            representation / (STDDEV * math.sqrt(3))
        )
        assert row.whole.agreement == pytest.approx(whole / 11)
        assert row.representation.agreement == pytest.approx(representation / 6)
        assert row.head.agreement == pytest.approx(7 / 9)

    def test_the_other_factory_is_left_as_it_is(self, output):
        alone = run(build_gaussian())
        np.testing.assert_equal(tuple(output.result), tuple(alone.result))
        np.testing.assert_equal(dict(output.state), dict(alone.state))
        measured = output.measurements["aggregator"]
        np.testing.assert_equal(dict(measured), dict(alone.measurements))
        assert measured["fraction_clipped"] == pytest.approx(1 / 3)


class TestOtherwise:
    def test_without_a_clip_and_noise(self):
        inner = NoPrivacyFactory(SCHEME, noise_seeds=NoiseSeeds.CARRIED)
        row = build_row(
            run(MeasuringFactory(inner, l2_clip=None, num_representation_weights=2)),
            stddev=0.0,
        )
        assert row.fraction_clipped == 0
        assert row.whole.clipped_norm == row.whole.mean_norm
        assert row.whole.signal_to_noise == math.inf

    def test_updates_without_a_head_and_not_finite_ones(self):
        factory = MeasuringFactory(
            build_gaussian(), l2_clip=CLIP, num_representation_weights=3
        )
        output = run(factory, [*VECTORS, [math.nan, 0, 0, 0]])
        row = build_row(output, num_head=0)
        assert row.head is None
        assert row.representation == row.whole
        assert row.whole.mean_norm == pytest.approx(16 / 4)

    def test_nobody(self):
        sums = collections.defaultdict(float)
        names = ["count", "num_clipped"]
        for part in ("whole", "representation", "head"):
            names += [f"norm_{part}", f"clipped_norm_{part}"]
            names.append(f"norm_of_clipped_sum_{part}")
        row = compute_row(
            {"updates": {name: sums[name] for name in names}},
            central_stddev=1.0,
            num_representation=3,
            num_head=1,
        )
        assert row.num_clients == 0
        assert math.isnan(row.fraction_clipped) and math.isnan(row.whole.agreement)
        assert row.whole.signal_to_noise == 0

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"l2_clip": 0.0, "num_representation_weights": 1}, "`l2_clip` must"),
            (
                {"l2_clip": 1.0, "num_representation_weights": 0},
                "`num_representation_weights` must",
            ),
        ],
    )
    def test_what_is_refused(self, values, message):
        with pytest.raises(ValueError, match=message):
            MeasuringFactory(build_gaussian(), **values)
