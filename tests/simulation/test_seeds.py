"""Tests for seeds: stable values, distinct streams, and a root that does not leak."""

import itertools

import numpy as np
import pytest

from simulation import seeds
from simulation.seeds import Purpose

ROOT = seeds.build_root_seed(7)


@pytest.mark.parametrize(
    ("purpose", "round_number", "client_id", "expected"),
    [
        (Purpose.CLIENT_NOISE, 0, "a", [776700455, 1848017350]),
        (Purpose.CLIENT_NOISE, 1, "a", [-821163594, 194064534]),
        (Purpose.MODEL_INIT, None, None, [-1375755865, -1095064139]),
    ],
)
def test_seed_is_the_one_of_every_earlier_version(
    purpose, round_number, client_id, expected
):
    found = seeds.derive_seed(
        ROOT, purpose=purpose, round_number=round_number, client_id=client_id
    )
    assert found.dtype == np.int32
    assert found.tolist() == expected


def test_words_are_those_of_every_earlier_version():
    words = seeds.derive_words(ROOT, purpose=Purpose.COHORT, round_number=3, count=2)
    assert words.dtype == np.uint64
    assert words.tolist() == [14840758425993961859, 5476498019487771713]


def test_streams_are_distinct_over_roots_purposes_rounds_and_clients():
    roots = [seeds.build_root_seed(value) for value in (0, 1, 2**31, 2**255)]
    rounds = [None, 0, 1, 10, 11, 256]
    clients = [None, "", "0", "1", "10", "a", "ab", "b"]
    found = {
        seeds.derive_seed(
            root, purpose=purpose, round_number=round_number, client_id=client_id
        ).tobytes()
        for root, purpose, round_number, client_id in itertools.product(
            roots, Purpose, rounds, clients
        )
    }
    assert len(found) == len(roots) * len(Purpose) * len(rounds) * len(clients)


def test_round_and_client_do_not_run_into_each_other():
    # Joined without lengths, both names would read "1" + "12" = "11" + "2".
    one = seeds.derive_seed(
        ROOT, purpose=Purpose.CLIENT_NOISE, round_number=1, client_id="12"
    )
    two = seeds.derive_seed(
        ROOT, purpose=Purpose.CLIENT_NOISE, round_number=11, client_id="2"
    )
    assert one.tolist() != two.tolist()


def test_words_of_a_longer_stream_begin_with_those_of_a_shorter_one():
    short = seeds.derive_words(ROOT, purpose=Purpose.COHORT, round_number=0, count=3)
    long = seeds.derive_words(ROOT, purpose=Purpose.COHORT, round_number=0, count=9)
    assert long[:3].tolist() == short.tolist()


def test_generator_repeats_and_differs_between_rounds():
    def draw(round_number: int) -> list[int]:
        rng = seeds.derive_generator(
            ROOT, purpose=Purpose.CLIENT_DATA, round_number=round_number
        )
        return rng.integers(2**60, size=4).tolist()

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


def test_scopes_of_a_root_share_no_stream():
    roots = [ROOT, *(seeds.scope_root(ROOT, scope) for scope in ("", "a", "b"))]
    drawn = [
        tuple(seeds.derive_seed(root, purpose=Purpose.CLIENT_NOISE)) for root in roots
    ]
    assert len(set(drawn)) == len(drawn)
    assert seeds.scope_root(ROOT, "a") == roots[2]
    assert roots[2].reproducible


def test_root_without_a_seed_is_fresh_and_said_not_to_be_reproducible():
    one, two = seeds.build_root_seed(None), seeds.build_root_seed(None)
    assert one.value != two.value
    assert not one.reproducible
    assert "not reproducible" in one.description
    assert str(one.value) not in one.description


def test_root_is_not_in_its_repr():
    root = seeds.build_root_seed(None)
    assert str(root.value) not in repr(root)


def test_root_with_a_seed_is_said_to_be_reproducible():
    assert ROOT.reproducible
    assert "--seed=7" in ROOT.description


@pytest.mark.parametrize("seed", [-1, 2**256])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=r"`seed` must be in"):
        seeds.build_root_seed(seed)
