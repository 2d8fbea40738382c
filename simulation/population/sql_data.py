"""Populations in the SQLite files that TFF reads, without TFF's cost for each client.

Source: the format of `tff.simulation.datasets.SqlClientData` in TFF 0.87: a table
`examples` of serialised `tf.train.Example`s and a table `client_metadata`. TFF makes a
`tf.data` pipeline for each client; here one query and one op parse all of its examples.
"""

import dataclasses
import functools
import hashlib
import pathlib
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from simulation.population.federated_data import DataError, Examples, check_examples
from simulation.sources.source import Feature, Kind

_DTYPES = {Kind.BYTES: tf.string, Kind.INT64: tf.int64, Kind.FLOAT: tf.float32}
_EXAMPLES_QUERY = (
    "SELECT serialized_example_proto FROM examples "
    "WHERE client_id = ? AND split_name = ? ORDER BY rowid LIMIT ?"
)
# Examples of a file without an index, which each client's query goes through.
_MAX_SCANNED = 10_000
_HASHED_WHOLE = 512 << 20
_SAMPLED_USERS = 500
_connections = threading.local()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SqlData:
    """The clients of one split of a file.

    Attributes:
        path: The file.
        split: The split's name in the file.
        features: The features to read.
        decode: Returns x and y of a client's features: arrays with one entry an
            example, bytes as objects.
        max_examples: Of a client, at most so many, the first ones; None for all.
    """

    path: pathlib.Path
    split: str
    features: Mapping[str, Feature]
    decode: Callable[[Mapping[str, np.ndarray]], Examples]
    max_examples: int | None = None

    def __post_init__(self) -> None:
        if self.max_examples is not None and self.max_examples < 1:
            raise ValueError(
                f"`max_examples` must be >= 1. Found {self.max_examples!r}."
            )
        self._pin()
        if not self.client_ids:
            found = sorted(read_splits(self.path))
            raise DataError(
                f"{self.path} must have clients in the split {self.split!r}. Found the "
                f"splits {found}."
            )
        # A file of another kind is refused before anything is trained.
        self._parse(self._fetch(self.client_ids[0], limit=1), self.client_ids[0])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_version"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # Elsewhere it is a file of that machine.
        self._pin()

    def _pin(self) -> None:
        vars(self)["_version"] = _identify(self.path)

    def _check_pinned(self) -> None:
        if _identify(self.path) != vars(self)["_version"]:
            raise DataError(
                f"{self.path} must stay as it is while it is in use. Found it changed "
                "or gone."
            )

    @property
    def client_ids(self) -> tuple[str, ...]:
        """The clients, sorted."""
        return tuple(self._counts)

    def count(self, client_id: str) -> int:
        """Returns the number of a client's examples."""
        stored = self._counts[client_id]
        return stored if self.max_examples is None else min(stored, self.max_examples)

    def read(self, client_id: str) -> dict[str, np.ndarray]:
        """Returns the features of a client's examples.

        Raises:
            DataError: If the file cannot be read, or an example lacks a feature.
        """
        if client_id not in self._counts:
            raise DataError(f"{self.path} has no client {client_id!r} in {self.split}.")
        limit = -1 if self.max_examples is None else self.max_examples
        protos = self._fetch(client_id, limit)
        if len(protos) != self.count(client_id):
            raise DataError(
                f"{self.path} must have as many examples of client {client_id!r} in "
                f"{self.split} as client_metadata says, {self.count(client_id)}. Found "
                f"{len(protos)}."
            )
        return self._parse(protos, client_id)

    def _fetch(self, client_id: str, limit: int) -> list[bytes]:
        """Returns a client's examples as they are stored."""
        self._check_pinned()
        try:
            rows = _connect(self.path).execute(
                _EXAMPLES_QUERY, (client_id, self.split, limit)
            )
            return [row[0] for row in rows]
        except (OSError, sqlite3.Error) as error:
            raise DataError(f"{self.path} cannot be read: {error}.") from error

    def _parse(self, protos: Sequence[bytes], client_id: str) -> dict[str, np.ndarray]:
        specs = {
            name: tf.io.FixedLenFeature(feature.shape, _DTYPES[feature.kind])
            for name, feature in self.features.items()
        }
        try:
            with tf.device("CPU"):
                parsed = tf.io.parse_example(np.array(protos, object), specs)
        # TensorFlow's message may hold the damaged bytes, which are no text.
        except (tf.errors.InvalidArgumentError, UnicodeDecodeError):
            wanted = {n: (f.kind.value, f.shape) for n, f in self.features.items()}
            raise DataError(
                f"{self.path}, client {client_id!r} in {self.split}: the examples must "
                f"have the features {wanted}. Found others, or damaged bytes."
            ) from None
        return {name: tensor.numpy() for name, tensor in parsed.items()}

    def load(self, client_id: str) -> Examples:
        """Returns one client's x and y. See `FederatedData`."""
        return check_examples(self.decode(self.read(client_id)), client_id)

    @property
    def _counts(self) -> Mapping[str, int]:
        self._check_pinned()
        return _read_counts(self.path, self.split, vars(self)["_version"])


def read_splits(path: pathlib.Path) -> set[str]:
    """Returns the names of a file's splits."""
    query = "SELECT DISTINCT split_name FROM client_metadata"
    return {row[0] for row in _query(path, query)}


@functools.lru_cache(maxsize=32)
def _read_counts(
    path: pathlib.Path, split: str, version: tuple[int, int, int] | None
) -> Mapping[str, int]:
    """Returns the number of examples of each client of a split, sorted by client."""
    del version  # Only tells a file from another one that it was replaced by.
    _check_index(path)
    query = (
        "SELECT client_id, SUM(num_examples) FROM client_metadata WHERE split_name = ? "
        "GROUP BY client_id HAVING SUM(num_examples) > 0 ORDER BY client_id"
    )
    return dict(_query(path, query, split))


def _check_index(path: pathlib.Path) -> None:
    """Raises DataError if every client would cost a scan of the whole file."""
    plan = _query(path, "EXPLAIN QUERY PLAN " + _EXAMPLES_QUERY, "", "", 1)
    # Not an index of the splits alone.
    if "client_id=?" in str(plan):
        return
    num_rows = _query(path, "SELECT MAX(rowid) FROM examples")[0][0] or 0
    if num_rows > _MAX_SCANNED:
        raise DataError(
            f"{path} must have an index of its examples' clients; without one, each "
            f"client costs a scan of all {num_rows:,} examples. Make it once: sqlite3 "
            f"{path.name} 'CREATE INDEX examples_of_client ON "
            "examples (client_id, split_name)'."
        )


def _query(path: pathlib.Path, query: str, *values: str | int) -> list[tuple]:
    if not path.is_file():
        raise DataError(f"{path} must be a file. Found none.")
    try:
        return _connect(path).execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise DataError(
            f"{path} must be a SQLite file with the tables `examples` and "
            f"`client_metadata` as TFF reads them: {error}."
        ) from error


def compute_digest(path: pathlib.Path) -> str:
    """Returns what tells a file's content from others', 32 hexadecimal digits.

    Up to 512 MiB the SHA-256 of the whole file; beyond, of its size, of its users and
    their numbers of examples, and of one example of each of some 500 users.
    """
    size = path.stat().st_size
    if size <= _HASHED_WHOLE:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    digest = hashlib.sha256()
    query = (
        "SELECT split_name, client_id, num_examples FROM client_metadata ORDER BY 1, 2"
    )
    users = _query(path, query)
    digest.update(repr((size, users)).encode())
    for split, client_id, _ in users[:: max(1, len(users) // _SAMPLED_USERS)]:
        for (proto,) in _query(path, _EXAMPLES_QUERY, client_id, split, 1):
            digest.update(proto)
    return digest.hexdigest()[:32]


def _identify(path: pathlib.Path) -> tuple[int, int, int] | None:
    """Returns what changes when a file is replaced; None where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _connect(path: pathlib.Path) -> sqlite3.Connection:
    """Returns this thread's connection to a file that nobody writes."""
    opened = _connections.__dict__.setdefault("opened", {})
    key = (path.resolve(), _identify(path))
    if key not in opened:
        uri = path.resolve().as_uri() + "?mode=ro"
        opened[key] = sqlite3.connect(uri, uri=True)
    return opened[key]
