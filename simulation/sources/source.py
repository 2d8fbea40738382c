"""What a source is: files that people have, read as records of users' examples.

Records come one at a time, in an order that depends on the files and the options alone:
an import that was interrupted skips those that it has. What is wrong in a file is a
`SourceError` with its place.
"""

import abc
import dataclasses
import enum
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

TRAIN, VALIDATION, TEST = "train", "validation", "test"
# What a feature of one example may be.
Value = bytes | int | float | np.ndarray


class SourceError(ValueError):
    """A file, or a record of one, that cannot be read.

    Attributes:
        place: The file and, as far as known, the line or record.
        reason: What is wrong: the rule and what was found.
    """

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


# Told of every bad record; raises, or counts. The reader goes on where it can.
OnBad = Callable[[SourceError], None]

# Given a split and the labels of its images by feature name, int64 [N] each: the client
# of each image in order, None where an image is nobody's.
Assign = Callable[[str, dict[str, np.ndarray]], Sequence[str | None]]


class Kind(enum.Enum):
    """What the values of a feature are on disk (`tf.train.Feature`)."""

    BYTES = "bytes"
    INT64 = "int64"
    FLOAT = "float"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature of every example of a source.

    Attributes:
        kind: What its values are.
        shape: The shape of one example's value; () for a scalar. BYTES are scalars.
    """

    kind: Kind
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One example.

    Attributes:
        client_id: Whose it is.
        features: Its values, by the names of the source's features.
        place: Where it stands, for messages.
        split: TRAIN, VALIDATION or TEST where the source itself divides its examples,
            else None.
    """

    client_id: str
    features: Mapping[str, Value]
    place: str
    split: str | None = None


class Source(abc.ABC):
    """Files of one format."""

    @property
    @abc.abstractmethod
    def files(self) -> tuple[pathlib.Path, ...]:
        """The files that are read, in order: what the manifest has the hash of."""

    @property
    @abc.abstractmethod
    def features(self) -> Mapping[str, Feature]:
        """The features of every example. May look into the files.

        Raises:
            SourceError: If a file cannot be read.
        """

    @property
    def separators(self) -> Mapping[str, str]:
        """Features whose parts are counted when all is read, with what divides them.

        The counts of parts (words, tags) of the training examples are written beside
        the data and are a task's vocabulary.
        """
        return {}

    @abc.abstractmethod
    def read(self, on_bad: OnBad) -> Iterator[Record]:
        """Yields the records, in the same order every time.

        Args:
            on_bad: Is given a SourceError for each bad record, and for a file that ends
                early or is damaged. Where it returns, the record (or what is left of
                the file) is left out.

        Raises:
            SourceError: Whatever `on_bad` raises.
        """


def assign_clients(
    assign: Assign, split: str, labels: dict[str, np.ndarray]
) -> Sequence[str | None]:
    """Asks a partition for the client of each image of a split.

    Args:
        assign: The partition.
        split: The split.
        labels: By feature name, [N] each.

    Raises:
        ValueError: If there are not N of them, or one is not a name.
    """
    client_ids = assign(split, labels)
    count = len(labels["label"])
    if len(client_ids) != count:
        raise ValueError(
            f"`assign` must return one client for each of {count} images of {split!r}. "
            f"Found {len(client_ids)}."
        )
    for index, client_id in enumerate(client_ids):
        if client_id is not None and not (isinstance(client_id, str) and client_id):
            raise ValueError(
                f"`assign` must return names or None. Found {client_id!r} for image "
                f"{index} of {split!r}."
            )
    return client_ids
