"""How users' examples are divided into training, validation and test."""

import dataclasses
import enum
import hashlib
from collections.abc import Iterable

import numpy as np

from simulation.sources.source import TEST, TRAIN, VALIDATION


class SplitBy(enum.Enum):
    """What is divided."""

    SOURCE = "source"
    """Nothing: the source says where each example belongs."""
    USER = "user"
    """Users: all of a user's examples are in one split."""
    EXAMPLE = "example"
    """Each user's examples: a user with two or more is in training and test."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitRule:
    """A rule that decides the same for the same users and examples, in any order.

    Attributes:
        by: What is divided.
        test_fraction: The part of it for the test, in [0, 1).
        validation_fraction: The part of it for the validation, in [0, 1).
        seed: Decides who and which.
    """

    by: SplitBy
    test_fraction: float = 0.1
    validation_fraction: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("test_fraction", "validation_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be in [0, 1). Found {getattr(self, name)!r}."
                )
        if self.test_fraction + self.validation_fraction >= 1:
            raise ValueError(
                "`test_fraction` and `validation_fraction` must leave something to "
                f"train on. Found {self.test_fraction!r} and "
                f"{self.validation_fraction!r}."
            )

    def assign_users(self, users: Iterable[str]) -> dict[str, str]:
        """Returns each user's split; every split that is asked for has a user.

        Raises:
            ValueError: If there are fewer users than splits.
        """
        ranked = sorted(users, key=lambda user: self._digest(user))
        names = self._divide(len(ranked))
        if len(ranked) < 1 + sum(map(bool, self._fractions)):
            raise ValueError(
                "`split` by user must have at least one user for each split. Found "
                f"{len(ranked)} users in all."
            )
        return dict(zip(ranked, names, strict=True))

    def assign_examples(self, user: str, count: int) -> list[str]:
        """Returns the split of each of a user's examples, by position.

        A single example is for training; of two or more, the test has at least one.
        """
        words = np.frombuffer(self._digest(user), np.uint32)
        names = self._divide(count)
        splits = np.empty(count, object)
        splits[np.random.default_rng(words).permutation(count)] = names
        return list(splits)

    @property
    def _fractions(self) -> tuple[float, float]:
        return self.test_fraction, self.validation_fraction

    def _divide(self, count: int) -> list[str]:
        """Returns the splits of `count` ranked things: test, validation, training."""
        names: list[str] = []
        for name, fraction in zip((TEST, VALIDATION), self._fractions, strict=True):
            left = count - len(names)
            # One is for training, and one for the validation if there are enough.
            reserved = 1 + (name == TEST and self.validation_fraction > 0)
            if fraction and left > 1:
                room = max(1, left - reserved)
                names += [name] * min(max(1, round(fraction * count)), room)
        return names + [TRAIN] * (count - len(names))

    def _digest(self, user: str) -> bytes:
        return hashlib.sha256(f"{self.seed} {user}".encode()).digest()
