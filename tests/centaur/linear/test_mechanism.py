"""The stacked Gaussian mechanism: law, seeds, and the one of distributed_dp."""

import numpy as np
import pytest
import tensorflow_federated as tff
from scipy import stats

from centaur import linear
from distributed_dp import CentralGaussianFactory
from distributed_dp.accounting import CohortScheme, GaussianParameters, Sampling

FALSE_FAILURE = 1e-6
SHAPE = (2, 60, 50)
USERS, CLIP = 7, 3.0


def build(multipliers=(1.5, 0.0), shape=SHAPE, seed=(1, 2)):
    factory = linear.StackedGaussianFactory(
        multipliers, l2_clip=CLIP, num_users=USERS, noise_seed=seed
    )
    return factory.create(tff.TensorType(np.float32, shape))


def release(process, values, *, run=0, releases=0):
    state = {"run": np.int64(run), "releases": np.int64(releases)}
    return process.next(state, values)


def test_noise_has_the_law_of_its_member():
    values = [np.zeros(SHAPE, np.float32)] * 2
    found = np.asarray(release(build(), values).result)
    assert not found[1].any()
    noise = found[0].reshape(-1).astype(np.float64)
    scale = 1.5 * CLIP / USERS
    assert stats.kstest(noise / scale, "norm").pvalue > FALSE_FAILURE
    statistic = np.sum((noise / scale) ** 2)
    law = stats.chi2(noise.size)
    assert min(law.cdf(statistic), law.sf(statistic)) > FALSE_FAILURE
    for wrong in (0.9, 1.1, CLIP, USERS**0.5):
        tails = law.cdf(statistic / wrong**2), law.sf(statistic / wrong**2)
        assert min(tails) < FALSE_FAILURE


def test_noise_is_added_to_the_mean(rng):
    values = [rng.standard_normal(SHAPE).astype(np.float32) for _ in range(3)]
    found = np.asarray(release(build((0.0, 0.0)), values).result)
    np.testing.assert_allclose(found, sum(values) / USERS, rtol=1e-5, atol=1e-7)


def test_seeds_runs_and_releases():
    values = [np.zeros(SHAPE, np.float32)]
    process = build((1.0, 1.0))
    first = release(process, values)
    assert first.state["releases"] == 1
    again = np.asarray(release(build((1.0, 1.0)), values).result)
    assert np.array_equal(first.result, again)
    others = [
        first.result[0],
        first.result[1],
        release(process, values, run=1).result[0],
        release(process, values, releases=1).result[0],
        release(build((1.0, 1.0), seed=(1, 3)), values).result[0],
    ]
    for index, one in enumerate(others):
        for other in others[:index]:
            correlation = np.corrcoef(np.ravel(one), np.ravel(other))[0, 1]
            assert abs(correlation) < 5 / np.sqrt(60 * 50)


def test_without_a_seed_every_release_differs():
    process = build((1.0, 1.0), seed=None)
    values = [np.zeros(SHAPE, np.float32)]
    first, second = (np.asarray(release(process, values).result) for _ in range(2))
    assert not np.array_equal(first, second)


def test_equals_the_central_mechanism_of_one_user_a_client(rng):
    """Clipping of client_work, and this sum, are distributed_dp's without noise."""
    import tensorflow as tf

    from centaur.linear import client_work

    rows = 2 * rng.standard_normal((USERS, 20)).astype(np.float32) / np.sqrt(5)
    central = CentralGaussianFactory(
        GaussianParameters(l2_clip=CLIP, noise_multiplier=0.0, clients_per_round=USERS),
        CohortScheme(Sampling.FIXED, USERS, USERS),
    ).create(tff.TensorType(np.float32, [20]))
    expected = central.next(central.initialize(), list(rows))
    clipped = [
        client_work.sum_clipped(tf.constant(row[np.newaxis, np.newaxis]), CLIP)
        for row in rows
    ]
    found = release(build((0.0,), (1, 20)), [part.total.numpy() for part in clipped])
    np.testing.assert_allclose(found.result[0], expected.result, rtol=1e-5)
    fraction = np.mean([int(part.clipped[0]) for part in clipped])
    assert 0 < fraction == pytest.approx(expected.measurements["fraction_clipped"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multipliers": []}, "`noise_multipliers` must hold at least one"),
        ({"noise_multipliers": [-1.0]}, "`noise_multiplier` must be at least 0"),
        ({"l2_clip": 0.0}, "`l2_clip` must be positive"),
        ({"l2_clip": float("nan")}, "`l2_clip` must be positive"),
        ({"num_users": 0}, "`num_users` must be an integer"),
        ({"noise_seed": (1, 2**31)}, "`noise_seed` must be a pair"),
    ],
)
def test_reject(changes, message):
    fields = {"noise_multipliers": [1.0], "l2_clip": 1.0, "num_users": 2}
    fields |= changes
    with pytest.raises(ValueError, match=message):
        linear.StackedGaussianFactory(fields.pop("noise_multipliers"), **fields)


@pytest.mark.parametrize(
    "kind", [tff.TensorType(np.float32, [3, 2]), tff.TensorType(np.float64, [2, 3])]
)
def test_reject_types(kind):
    factory = linear.StackedGaussianFactory([1.0, 1.0], l2_clip=1.0, num_users=2)
    with pytest.raises(ValueError, match=r"`value_type` must be float32\[2, ...\]"):
        factory.create(kind)
