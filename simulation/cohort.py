"""Cohorts: which clients join a round, and which of them drop out of it.

Every choice is a pure function of (root, round), and of the client for dropout: nothing
is drawn from a stateful generator, so that a resumed run meets the same clients.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from simulation import seeds

_WORD = 2**64


class CohortSampler(Protocol):
    """Selects the clients of a round."""

    @property
    def client_ids(self) -> tuple[str, ...]:
        """The population, in a fixed order."""

    def select(self, round_number: int) -> list[str]:
        """Returns the clients that join a round, in the population's order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoissonCohort:
    """Every client joins every round with the same probability, independently.

    Guarantees: the cohort's size is Binomial(N, q) and may be 0. The probability is
    `sampling_rate` rounded down to a multiple of 2**-64.

    Attributes:
        client_ids: The N clients.
        sampling_rate: The probability q, in (0, 1].
        root: The root of the streams.
    """

    client_ids: tuple[str, ...]
    sampling_rate: float
    root: seeds.RootSeed

    def __post_init__(self) -> None:
        _check_client_ids(self.client_ids)
        if not 0 < self.sampling_rate <= 1:
            raise ValueError(
                f"`sampling_rate` must be in (0, 1]. Found {self.sampling_rate!r}."
            )

    def select(self, round_number: int) -> list[str]:
        """Returns the clients that join a round, in the population's order."""
        threshold = int(self.sampling_rate * _WORD)
        if threshold == _WORD:
            return list(self.client_ids)
        words = _derive_words(self.root, round_number, len(self.client_ids))
        joined = np.flatnonzero(words < np.uint64(threshold))
        return [self.client_ids[index] for index in joined]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedCohort:
    """A fixed number of clients joins, drawn without replacement.

    Guarantees: every subset of the size is equally likely, up to ties of 64-bit words.

    Attributes:
        client_ids: The N clients.
        clients_per_round: The size n of every cohort, in [1, N].
        root: The root of the streams.
    """

    client_ids: tuple[str, ...]
    clients_per_round: int
    root: seeds.RootSeed

    def __post_init__(self) -> None:
        _check_client_ids(self.client_ids)
        if not 1 <= self.clients_per_round <= len(self.client_ids):
            raise ValueError(
                "`clients_per_round` must be in [1, number of clients = "
                f"{len(self.client_ids)}]. Found {self.clients_per_round!r}."
            )

    def select(self, round_number: int) -> list[str]:
        """Returns the clients that join a round, in the population's order."""
        words = _derive_words(self.root, round_number, len(self.client_ids))
        order = np.argsort(words, kind="stable")
        joined = np.sort(order[: self.clients_per_round])
        return [self.client_ids[index] for index in joined]


def count_rounds_joined(cohorts: CohortSampler, num_rounds: int) -> np.ndarray:
    """Returns how many of the first rounds each client joins, int64[N]."""
    index = {client_id: place for place, client_id in enumerate(cohorts.client_ids)}
    counts = np.zeros(len(index), np.int64)
    for round_number in range(num_rounds):
        counts[[index[client_id] for client_id in cohorts.select(round_number)]] += 1
    return counts


def select_survivors(
    cohort: Sequence[str], *, root: seeds.RootSeed, round_number: int, rate: float
) -> list[str]:
    """Returns the clients of a cohort that do not drop out after the round's start.

    Args:
        cohort: The clients that joined.
        root: The root of the streams.
        round_number: The round.
        rate: The probability that a client drops out, in [0, 1), independently.

    Raises:
        ValueError: If the rate is out of range.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"`rate` must be in [0, 1). Found {rate!r}.")
    if rate == 0:
        return list(cohort)
    threshold = int(rate * _WORD)
    return [
        client_id
        for client_id in cohort
        if int(
            seeds.derive_words(
                root,
                purpose=seeds.Purpose.DROPOUT,
                round_number=round_number,
                client_id=client_id,
                count=1,
            )[0]
        )
        >= threshold
    ]


def _derive_words(root: seeds.RootSeed, round_number: int, count: int) -> np.ndarray:
    return seeds.derive_words(
        root, purpose=seeds.Purpose.COHORT, round_number=round_number, count=count
    )


def _check_client_ids(client_ids: tuple[str, ...]) -> None:
    if not client_ids:
        raise ValueError("`client_ids` must not be empty.")
    if len(set(client_ids)) != len(client_ids):
        raise ValueError("`client_ids` must be distinct.")
