"""A start and its rounds together: convergence, ledger, clip reports and flags."""

import numpy as np
import pytest

from centaur import linear

DIM, RANK, USERS = 8, 2, 2000
START = linear.StartConfig(trials=3, steps=8, l2_clip=8.0, trial_distance=0.3)
ROUNDS = linear.RoundsConfig(num_rounds=8, l2_clip=8.0, learning_rate=0.5)


@pytest.fixture(scope="module")
def population():
    rng = np.random.default_rng(5)
    users = linear.GeneratedUsers(
        problem=linear.LinearProblem(num_users=USERS, dim=DIM, rank=RANK),
        subsets=linear.Subsets(start=30, head=20, gradient=10),
        examples_per_user=270,
        num_rounds=8,
        users_per_block=500,
    )
    truth = linear.sample_orthonormal(rng, DIM, RANK)
    return users, users.build_blocks(truth, linear.build_block_seeds(rng, 4)), truth


@pytest.fixture(scope="module")
def trained(population, engine):
    """Members without noise, with little, and with far too much."""
    users, blocks, _ = population
    noises = [0.0, 2.0, 1e6]
    start = linear.run_start(
        users,
        blocks,
        START,
        noise_multipliers=noises,
        rng=np.random.default_rng(6),
        noise_seed=(1, 2),
    )
    rounds = linear.run_rounds(
        users,
        blocks,
        ROUNDS,
        stack=start.stack,
        noise_multipliers=noises,
        ledgers=start.trajectory.ledgers,
        noise_seed=(3, 4),
    )
    return start, rounds


def measure(stacks, truth):
    return np.array([linear.compute_distance(b, truth) for b in stacks])


def test_without_noise_distances_fall_linearly(trained, population):
    _, rounds = trained
    distances = measure(rounds.stacks[:, 0], population[2])
    ratios = distances[1:] / distances[:-1]
    # 1 - eta_g: heads have the second moment I.
    assert np.all((0.4 < ratios) & (ratios < 0.6))
    assert distances[-1] < 0.01 * distances[0]


def test_noise_leaves_a_floor(trained, population):
    _, rounds = trained
    distances = measure(rounds.stacks[:, 1], population[2])
    floor = float(linear.compute_floor(distances[1:], last=3))
    # sqrt(eta / (2 - eta)) of one round's noise, whose columns have d - k numbers.
    noise = 2.0 * ROUNDS.l2_clip / USERS * (np.sqrt(DIM - RANK) + 1)
    assert 0.3 < floor / (np.sqrt(0.5 / 1.5) * noise) < 2


def test_ledger_has_start_and_rounds(trained):
    _, rounds = trained
    assert rounds.ledgers[1].entries == (
        linear.Releases(purpose="start", count=24, noise_multiplier=2.0),
        linear.Releases(purpose="rounds", count=8, noise_multiplier=2.0),
    )
    assert rounds.ledgers[1].count == START.num_releases + ROUNDS.num_rounds


def test_clipping_is_reported(trained, population):
    start, rounds = trained
    assert not rounds.clipped[:, :2].any()
    assert np.all(rounds.largest[:, :2] < ROUNDS.l2_clip)
    users, blocks, _ = population
    tight = linear.RoundsConfig(num_rounds=1, l2_clip=0.01, learning_rate=0.5)
    found = linear.run_rounds(
        users,
        blocks,
        tight,
        stack=start.stack[2:],
        noise_multipliers=[0.0],
        ledgers=[linear.ReleaseLedger()],
    )
    assert found.clipped[0, 0] > 0.9
    assert found.largest[0, 0] > 0.01


def test_a_start_without_majority_is_flagged(trained):
    start, _ = trained
    assert [one.index is None for one in start.selections] == [False, False, True]
    with pytest.raises(linear.NoMajorityError):
        start.selections[2].require()
    assert np.array_equal(start.stack[2], start.trials[2, 0])


def test_the_same_seeds_give_the_same_bits(trained, population):
    users, blocks, _ = population
    again = linear.run_start(
        users,
        blocks,
        START,
        noise_multipliers=[0.0, 2.0, 1e6],
        rng=np.random.default_rng(6),
        noise_seed=(1, 2),
    )
    assert np.array_equal(again.trials, trained[0].trials)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (START, {"trials": 0}, "`trials` must be an integer"),
        (START, {"steps": 0}, "`steps` must be an integer"),
        (START, {"l2_clip": -1.0}, "`l2_clip` must be positive"),
        (START, {"trial_distance": 0.6}, "`trial_distance` must be in"),
        (ROUNDS, {"num_rounds": 0}, "`num_rounds` must be an integer"),
        (ROUNDS, {"l2_clip": 0.0}, "`l2_clip` must be positive"),
        (ROUNDS, {"learning_rate": float("inf")}, "`learning_rate` must be positive"),
    ],
)
def test_reject(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        type(kind)(**{**vars(kind), **changes})
