"""Tests for clients' keys and data: who straggles, by which law, with which batches."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from simulation import client_data, seeds
from simulation.population.federated_data import ArrayData
from tests.simulation import toys

FALSE_FAILURE = 1e-6
"""Probability that a test of fit fails although the law is right."""

ROOT = seeds.build_root_seed(7)
NAMES = [f"client {index}" for index in range(200)]
EPOCHS = 5


def derive(client_id: str = "a", **changes) -> client_data.ClientKey:
    values = {
        "root": ROOT,
        "noise_root": seeds.build_root_seed(8),
        "round_number": 3,
        "num_joined": 9,
        "straggler_rate": 0.5,
    }
    return client_data.derive_key(client_id, **(values | changes))


def list_straggling(**changes) -> list[float | None]:
    return [derive(name, **changes).straggling for name in NAMES]


def draw_keys(
    rng: np.random.Generator, *, rate: float, size: int
) -> list[client_data.ClientKey]:
    """Returns keys of many clients in each of some rounds."""
    root = seeds.build_root_seed(int(rng.integers(2**63)))
    return [
        derive(f"{n % 1000}", root=root, round_number=n // 1000, straggler_rate=rate)
        for n in range(size)
    ]


class TestWhoStraggles:
    def test_rate_0_is_nobody_and_rate_1_everybody(self):
        assert list_straggling(straggler_rate=0.0) == [None] * len(NAMES)
        everybody = list_straggling(straggler_rate=1.0)
        assert all(share is not None and 0 <= share < 1 for share in everybody)
        assert len(set(everybody)) == len(NAMES)

    @pytest.mark.parametrize(
        ("word", "straggling"), [(0, 0.0), (2**64 - 1, 1.0 - 2.0**-53)]
    )
    def test_the_least_and_the_largest_words(self, monkeypatch, word, straggling):
        words = np.full(2, word, np.uint64)
        monkeypatch.setattr(seeds, "derive_words", lambda *_, **__: words)
        key = derive(straggler_rate=1.0)
        assert key.straggling == straggling
        assert client_data.count_epochs(key, EPOCHS) == (1 if word == 0 else EPOCHS - 1)

    def test_root_round_and_client_decide(self):
        found = list_straggling()
        assert list_straggling() == found
        others = [
            {"root": seeds.build_root_seed(9)},
            {"round_number": 4},
        ]
        for changes in others:
            other = list_straggling(**changes)
            assert [share is None for share in other] != [
                share is None for share in found
            ]
            # Not the same numbers among others either.
            assert not (set(other) & set(found)) - {None}
        assert len(set(found) - {None}) == len([s for s in found if s is not None])

    @pytest.mark.parametrize(
        "changes",
        [{"noise_root": seeds.build_root_seed(1)}, {"num_joined": 100}],
        ids=["noise_root", "num_joined"],
    )
    def test_nothing_else_decides(self, changes):
        assert list_straggling(**changes) == list_straggling()

    def test_a_higher_rate_adds_stragglers_and_leaves_the_others_as_they_are(self):
        low, high = (list_straggling(straggler_rate=rate) for rate in (0.2, 0.7))
        assert all(share in (None, more) for share, more in zip(low, high, strict=True))
        counts = [sum(share is not None for share in shares) for shares in (low, high)]
        assert 0 < counts[0] < counts[1] < len(NAMES)

    def test_the_rate_changes_no_other_stream(self):
        for name in NAMES:
            one, other = derive(name, straggler_rate=0.0), derive(name)
            for field in ("batch_seed", "noise_seed", "training_seed"):
                assert np.array_equal(getattr(one, field), getattr(other, field))


class TestLaw:
    @pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
    def test_the_fraction(self, rng, rate):
        size = 40_000
        keys = draw_keys(rng, rate=rate, size=size)
        count = sum(key.straggling is not None for key in keys)

        def compute_p_value(law: float) -> float:
            return stats.binomtest(count, size, law).pvalue

        assert compute_p_value(rate) > FALSE_FAILURE
        for wrong in (rate - 0.03, rate + 0.03):
            assert compute_p_value(wrong) < FALSE_FAILURE

    def test_epochs_are_uniform_from_1_to_one_less_than_all(self, rng):
        keys = draw_keys(rng, rate=0.5, size=20_000)
        epochs = [
            client_data.count_epochs(key, EPOCHS)
            for key in keys
            if key.straggling is not None
        ]
        observed = np.bincount(epochs, minlength=EPOCHS + 1)
        assert len(observed) == EPOCHS + 1 and observed.sum() > 5_000

        def compute_p_value(law: list[float]) -> float:
            """Of the cells 0 to E; those of probability 0 must be empty."""
            expected = np.array(law) / sum(law) * observed.sum()
            possible = expected > 0
            if observed[~possible].any():
                return 0.0
            return stats.chisquare(observed[possible], expected[possible]).pvalue

        assert compute_p_value([0, 1, 1, 1, 1, 0]) > FALSE_FAILURE
        wrong_laws = {
            "1 to E": [0, 1, 1, 1, 1, 1],
            "0 to E - 1": [1, 1, 1, 1, 1, 0],
            "2 to E - 1": [0, 0, 1, 1, 1, 0],
            # What rounding to the nearest, not down, would give.
            "rounded": [0, 0.5, 1, 1, 0.5, 0],
            "one cell a fifth too large": [0, 1.2, 1, 1, 1, 0],
        }
        for name, law in wrong_laws.items():
            assert compute_p_value(law) < FALSE_FAILURE, name

    def test_a_clients_rounds_are_independent(self, rng):
        """Else the same clients would always make less."""
        keys = draw_keys(rng, rate=0.5, size=20_000)
        straggles = np.array([key.straggling is not None for key in keys])
        by_round = straggles.reshape([20, 1000]).astype(int)
        pairs = np.bincount((2 * by_round[:-1] + by_round[1:]).ravel(), minlength=4)
        table = pairs.reshape([2, 2])
        assert stats.chi2_contingency(table)[1] > FALSE_FAILURE
        same = np.diag(np.bincount(by_round[0], minlength=2))
        assert stats.chi2_contingency(same)[1] < FALSE_FAILURE


class TestCountEpochs:
    @pytest.mark.parametrize("num_epochs", [1, 2, 20])
    def test_whoever_does_not_straggle_makes_all(self, num_epochs):
        key = derive(straggler_rate=0.0)
        assert client_data.count_epochs(key, num_epochs) == num_epochs

    @pytest.mark.parametrize(
        ("straggling", "num_epochs", "expected"),
        [
            # One epoch cannot become fewer.
            (0.0, 1, 1),
            (0.99, 1, 1),
            (0.0, 2, 1),
            (0.99, 2, 1),
            (0.0, 5, 1),
            (0.2499, 5, 1),
            (0.25, 5, 2),
            (0.75, 5, 4),
            (1 - 2.0**-53, 5, 4),
        ],
    )
    def test_by_hand(self, straggling, num_epochs, expected):
        key = dataclasses.replace(derive(), straggling=straggling)
        assert client_data.count_epochs(key, num_epochs) == expected


class TestBatches:
    def load(self, key, num_epochs: int, padded: bool):
        loader = client_data.ClientLoader(
            data=_Data(), batch_size=2, num_epochs=num_epochs, padded=padded
        )
        (element,) = loader(key)
        return element

    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("made", range(1, EPOCHS))
    def test_are_those_of_fewer_epochs(self, made, padded):
        whole = derive("5", straggler_rate=0.0)
        share = (made - 0.5) / (EPOCHS - 1)
        straggler = dataclasses.replace(whole, straggling=share)
        found = self.load(straggler, EPOCHS, padded)
        expected = self.load(whole, made, padded)
        assert found.keys() == expected.keys()
        made_batches, expected_batches = (
            # Without rows that are there for the shape alone.
            client["batches"][client["batches"][:, 0] > 0]
            for client in (found, expected)
        )
        assert np.array_equal(made_batches, expected_batches)
        for name, values in expected["examples"].items():
            assert np.array_equal(found["examples"][name], values)
        for name in ("noise_seed", "training_seed", "joined"):
            assert np.array_equal(found[name], expected[name])
        # Six examples in batches of two.
        full = self.load(whole, EPOCHS, padded)["batches"]
        assert not np.array_equal(full, expected["batches"])
        assert len(self.load(whole, EPOCHS, False)["batches"]) == 3 * EPOCHS
        assert len(self.load(straggler, EPOCHS, False)["batches"]) == 3 * made

    def test_are_the_first_ones_of_all_its_epochs(self):
        whole = derive("5", straggler_rate=0.0)
        straggler = dataclasses.replace(whole, straggling=0.3)
        all_batches = self.load(whole, EPOCHS, False)["batches"]
        batches = self.load(straggler, EPOCHS, False)["batches"]
        assert np.array_equal(batches, all_batches[: len(batches)])


class _Data:
    """The toy clients."""

    client_ids = tuple(str(index) for index in range(toys.NUM_CLIENTS))

    def load(self, client_id: str):
        return toys.load_toy_client(client_id)

    def count(self, client_id: str) -> int:
        return int(client_id) + 1


def test_a_straggler_has_the_shapes_of_the_others():
    """Programs are compiled for each shape."""
    x, y = np.zeros([70, 2], np.float32), np.zeros([70], np.int32)
    load = client_data.ClientLoader(
        data=ArrayData(client_ids=("a",), make=lambda _: (x, y)),
        batch_size=8,
        num_epochs=EPOCHS,
        padded=True,
    )
    shapes, counts = set(), set()
    for straggling in (None, 0.0, 0.5, 0.99):
        key = dataclasses.replace(derive("a"), straggling=straggling)
        [client] = load(key)
        shapes.add(client["batches"].shape)
        counts.add(int(np.count_nonzero(client["batches"][:, 0])))
    assert len(shapes) == 1
    assert len(counts) > 2
