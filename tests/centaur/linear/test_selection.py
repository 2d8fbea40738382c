"""The choice among trials, on constructed ones."""

import numpy as np
import pytest
from scipy import linalg

from centaur import linear
from centaur.linear import selection

LIMIT = 0.3


def turn(basis: np.ndarray, angle: float) -> np.ndarray:
    """Returns span(e1, e2) with e2 turned towards e3 by an angle, of a basis."""
    turned = basis[:, :2].copy()
    turned[:, 1] = np.cos(angle) * basis[:, 1] + np.sin(angle) * basis[:, 2]
    return turned


@pytest.fixture
def basis(rng):
    return linear.sample_orthonormal(rng, 6, 6)


def choose(trials) -> linear.Selection:
    (found,) = linear.select_trials(np.stack(trials)[np.newaxis], trial_distance=LIMIT)
    return found


def test_a_good_trial_is_chosen_wherever_it_stands(basis, rng):
    good = [turn(basis, angle) for angle in (0.0, 0.05, -0.05)]
    bad = [basis[:, [2, 3]], basis[:, [4, 5]]]
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 1, 2], [4, 3, 2, 1, 0]):
        trials = [[*good, *bad][index] for index in order]
        found = choose(trials)
        assert order[found.require()] in (0, 1, 2)
        assert sorted(found.agreements) == [0, 0, 2, 2, 2]


def test_the_basis_of_a_trial_does_not_matter(basis, rng):
    trials = [
        basis[:, :2] @ linear.sample_orthonormal(rng, 2, 2),
        basis[:, :2] @ linear.sample_orthonormal(rng, 2, 2),
        basis[:, [4, 5]],
    ]
    assert choose(trials).agreements == (1, 1, 0)


def test_no_majority_is_flagged_and_refused(basis):
    found = choose([basis[:, [0, 1]], basis[:, [2, 3]], basis[:, [4, 5]]])
    assert found.index is None
    with pytest.raises(linear.NoMajorityError, match="at least half of the other 2"):
        found.require()


@pytest.mark.parametrize(
    ("agreements", "index"),
    [
        ((0,), 0),
        ((1, 1), 0),
        ((0, 0), None),
        ((1, 2, 2), 1),
        ((1, 1, 0), 0),
        ((1, 1, 1, 1, 0), None),
        ((0, 2, 2, 2, 0), 1),
        ((1, 1, 1, 1), None),
        ((2, 2, 2, 0), 0),
    ],
)
def test_at_least_half_of_the_others(agreements, index):
    assert selection.choose(agreements).index == index


def test_agreements_equal_principal_angles(rng):
    trials = np.stack(
        [
            linear.sample_orthonormal(rng, 3, 2) if i else np.eye(3)[:, :2]
            for i in range(9)
        ]
    )
    found = choose(trials).agreements
    limit = 2 * np.arcsin(LIMIT)
    expected = [
        sum(
            linalg.subspace_angles(one, other).max() <= limit
            for j, other in enumerate(trials)
            if j != i
        )
        for i, one in enumerate(trials)
    ]
    assert list(found) == expected and any(expected)


@pytest.mark.parametrize(("factor", "agrees"), [(0.99, True), (1.01, False)])
def test_the_threshold_is_an_angle_of_two_trials(basis, factor, agrees):
    """Two trials at eps_0 on either side of B* agree, hardly."""
    angle = factor * np.arcsin(LIMIT)
    found = choose([turn(basis, angle), turn(basis, -angle)])
    assert (found.index is not None) == agrees


def test_the_radius_is_kept_at_its_worst(basis):
    """Two of three trials at eps_0; the third, chosen, as far as it may agree."""
    good, step = np.arcsin(LIMIT), 0.999 * np.arcsin(LIMIT)
    trials = [turn(basis, good + 2 * step), turn(basis, good), turn(basis, good)]
    found = choose(trials)
    assert found.agreements == (2, 2, 2) and found.index == 0
    distance = linear.compute_distance(trials[0], basis[:, :2])
    radius = linear.compute_radius(LIMIT)
    assert 0.99 * radius < distance <= radius


def test_groups_are_chosen_on_their_own(basis):
    same, other = basis[:, :2], basis[:, [4, 5]]
    groups = np.stack([[other, same, same], [same, other, other]])
    found = linear.select_trials(groups, trial_distance=LIMIT)
    assert [one.index for one in found] == [1, 1]


@pytest.mark.parametrize("value", [0.0, 0.5, -1.0, float("nan")])
def test_reject_distances(value):
    with pytest.raises(ValueError, match=r"`trial_distance` must be in \(0, 1/2\)"):
        linear.compute_radius(value)


def test_reject_shapes():
    with pytest.raises(ValueError, match=r"`trials` must be \[groups, T_0, d, k\]"):
        linear.select_trials(np.zeros((2, 3, 2)), trial_distance=LIMIT)
