"""Files that tasks read: found, fetched by TFF's loaders, or missed with one error."""

import contextlib
import dataclasses
import pathlib
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from simulation.population import sql_data
from simulation.population.federated_data import (
    ArrayData,
    DataError,
    Examples,
    FederatedData,
)
from simulation.population.held_data import HeldData
from simulation.population.layout import Layout
from simulation.population.manifest import read_manifest
from simulation.population.partition import Division, Partition
from simulation.population.split import SplitBy, SplitRule
from simulation.sources.source import TEST, TRAIN
from simulation.tasks.options import TaskOptions
from simulation.tasks.task import Task

_TIMEOUT_SECONDS = 20.0
_BYTES_PER_MB = 1 << 20


def find_file(
    options: TaskOptions,
    layout: Layout,
    *,
    fetch: Callable[[str], Any] | None,
    command: str,
) -> pathlib.Path:
    """Returns the data's file, fetched if it is not there.

    Args:
        options: Where it is looked for.
        layout: Its name.
        fetch: TFF's loader, given a cache folder; None where TFF has none.
        command: What makes the file of other files, for the error.

    Raises:
        DataError: If it is not there and cannot be fetched.
    """
    path = options.folder / layout.file_name
    if path.is_file():
        return path
    why = "TFF has no such data to fetch"
    if fetch is not None and options.data_name is None:
        try:
            # Only a whole file gets the name that TFF takes for a whole file.
            with _temporary_folder(options.folder) as folder, short_timeout():
                fetch(str(folder))
                shutil.move(folder / layout.file_name, path)
            return path
        # URLError, but also what lzma, sqlite3 and TFF say of half a file.
        except Exception as error:
            why = f"it cannot be fetched: {error}"
    tiny = "" if fetch is None else ". Or give --synthetic_data, a tiny made-up set"
    raise DataError(
        f"`data_dir` must hold {layout.file_name}. Found no {path}, and {why}. Make it "
        f"with: {command} --name={layout.stem}{tiny}"
    )


@contextlib.contextmanager
def _temporary_folder(parent: pathlib.Path) -> Iterator[pathlib.Path]:
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=parent) as name:
        yield pathlib.Path(name)


@contextlib.contextmanager
def short_timeout() -> Iterator[None]:
    """Lets no connection that is opened inside wait for long."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def identify(path: pathlib.Path) -> dict[str, Any]:
    """Returns what says whether another run read the same file, as JSON values."""
    return {"file": path.name, "digest": sql_data.compute_digest(path)}


def describe(path: pathlib.Path, layout: Layout) -> str:
    """Returns a file's place and, if it was imported, what from."""
    manifest = path.with_name(layout.manifest_name)
    if not manifest.is_file():
        return str(path)
    files = list(read_manifest(manifest).files)
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f"{path} (made of {', '.join(files[:3])}{more})"


def hold(data: FederatedData, options: TaskOptions) -> HeldData:
    """Returns data of which as much stays in memory as the options allow."""
    return HeldData(data, max_bytes=options.hold_mb * _BYTES_PER_MB)


PARTITION_CAVEAT = (
    "how the examples were divided among clients, which followed from their labels"
)


_Keep = Callable[[Mapping[str, np.ndarray]], np.ndarray]


class Pooled(Protocol):
    """Examples with the features that a partition reads, "label" among them."""

    @property
    def client_ids(self) -> tuple[str, ...]:
        """Whose they are."""

    def read(self, client_id: str) -> Mapping[str, np.ndarray]:
        """Returns the features of one's examples."""

    @property
    def decode(self) -> Callable[[Mapping[str, np.ndarray]], Examples]:
        """Returns x and y of features."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrangement:
    """The data of a file by client, and what a task says of the clients.

    Attributes:
        train: The clients' training data.
        test: Their test data.
        partition: How examples were divided anew, in words; None for the file's users.
        identity: What tells it from other arrangements, as JSON values.
        caveats: What a privacy statement does not cover because of it.
    """

    train: FederatedData
    test: FederatedData
    partition: str | None = None
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    caveats: tuple[str, ...] = ()


def arrange(
    options: TaskOptions,
    train: Any,
    test: Any,
    *,
    keep: _Keep | None = None,
    wrap: Callable[[sql_data.SqlData], FederatedData] | None = None,
) -> Arrangement:
    """Returns a file's data by its users, or divided anew where the options say so.

    Args:
        options: What is asked for.
        train: The training examples: `SqlData`, or `Pooled` where there is a
            partition.
        test: The test examples.
        keep: Of features, which examples are divided; None for all.
        wrap: Returns the data of the file's users; None for the examples as they are.

    Raises:
        ValueError: If the options do not fit each other.
        DataError: If the examples cannot be divided so.
    """
    partition = options.build_partition(num_clients=len(train.client_ids))
    if partition is None:
        users = [data if wrap is None else wrap(data) for data in (train, test)]
        return Arrangement(train=hold(users[0], options), test=hold(users[1], options))
    fraction = options.test_fraction
    new_train, new_test = divide(
        partition, train, test, keep=keep, test_fraction=fraction
    )
    description = partition.description
    identity: dict[str, Any] = {"partition": description}
    if fraction is not None:
        description += (
            "; training and test examples of the file pooled, and of each client's "
            f"examples {fraction:g} held out for the test"
        )
        identity["test_fraction"] = fraction
    return Arrangement(
        train=new_train,
        test=new_test,
        partition=description,
        identity=identity,
        caveats=(PARTITION_CAVEAT,),
    )


def divide(
    partition: Partition,
    train: Pooled,
    test: Pooled,
    *,
    keep: _Keep | None = None,
    test_fraction: float | None = None,
) -> tuple[FederatedData, FederatedData]:
    """Returns all examples of a file divided anew among the partition's clients.

    The features that `decode` makes x and y of stay in memory in their stored form.

    Args:
        partition: How they are divided.
        train: The training examples.
        test: The test examples, with the same `decode`.
        keep: Of features, which examples are meant; None for all.
        test_fraction: None: the training examples are divided, and the test examples
            follow. Else all are divided together, and of each client's examples this
            fraction is for the test, at least one, as the partition's seed and the
            client decide; at least one is for training.

    Raises:
        DataError: If they cannot be divided so.
    """
    pools = {TRAIN: _pool(train, keep), TEST: _pool(test, keep)}
    if test_fraction is not None:
        # One pool for both, training examples first.
        both = [pools.pop(part) for part in (TRAIN, TEST)]
        joined = {name: np.concatenate([p[name] for p in both]) for name in both[0]}
        pools = dict.fromkeys((TRAIN, TEST), joined)
    labels = {part: pool["label"] for part, pool in pools.items()}
    names = [f"part_{index:05d}" for index in range(partition.num_clients)]
    try:
        division = partition.divide(
            labels[TRAIN], coarse=pools[TRAIN].get("coarse_label")
        )
        if test_fraction is None:
            rows = {TRAIN: division.rows, TEST: _follow(division, labels[TEST])}
        else:
            rows = _hold_out(division.rows, names, test_fraction, partition.seed)
    except ValueError as error:
        raise DataError(str(error)) from error

    def build(part: str, decode: Callable[..., Examples]) -> FederatedData:
        pool = pools[part]
        mine = {n: r for n, r in zip(names, rows[part], strict=True) if len(r)}

        def make(client_id: str) -> Examples:
            chosen = mine[client_id]
            return decode({name: values[chosen] for name, values in pool.items()})

        counts = {name: len(owned) for name, owned in mine.items()}
        return ArrayData(client_ids=tuple(mine), make=make, counts=counts)

    return build(TRAIN, train.decode), build(TEST, test.decode)


def _follow(division: Division, labels: np.ndarray) -> list[np.ndarray]:
    try:
        return division.follow(labels)
    except ValueError as error:
        raise ValueError(
            f"{error} Or give `test_fraction`, which divides all examples together."
        ) from error


def _hold_out(
    rows: Sequence[np.ndarray], names: Sequence[str], fraction: float, seed: int
) -> dict[str, list[np.ndarray]]:
    """Returns each client's rows for training and for the test.

    Raises:
        ValueError: If a client has fewer than two.
    """
    rule = SplitRule(by=SplitBy.EXAMPLE, test_fraction=fraction, seed=seed)
    parts: dict[str, list[np.ndarray]] = {TRAIN: [], TEST: []}
    for name, owned in zip(names, rows, strict=True):
        if len(owned) < 2:
            raise ValueError(
                "`num_clients` must be small enough for each client to get two "
                "examples, one for training and one for the test; or leave "
                f"`test_fraction` unset. Found {len(names)} clients, and "
                f"{len(owned)} examples of {name}."
            )
        splits = np.array(rule.assign_examples(name, len(owned)))
        for part, found in parts.items():
            found.append(owned[splits == part])
    return parts


def _pool(data: Pooled, keep: _Keep | None) -> dict[str, np.ndarray]:
    """Returns the features of all clients' examples, images of bytes as bytes."""
    parts: dict[str, list[np.ndarray]] = {}
    for client_id in data.client_ids:
        features = data.read(client_id)
        rows: Any = slice(None) if keep is None else keep(features)
        for name, values in features.items():
            parts.setdefault(name, []).append(_shrink(values[rows]))
    pool = {name: np.concatenate(values) for name, values in parts.items()}
    if not len(pool["label"]):
        where = getattr(data, "path", "the data"), getattr(data, "split", "them")
        raise DataError(f"{where[0]} must have such examples in {where[1]}.")
    return pool


def _shrink(values: np.ndarray) -> np.ndarray:
    """Returns integers of more than one dimension as bytes where that changes none."""
    if values.ndim < 2 or values.dtype != np.int64 or not values.size:
        return values
    is_byte = 0 <= values.min() and values.max() <= np.iinfo(np.uint8).max
    return values.astype(np.uint8) if is_byte else values


def build_tiny_task(
    name: str,
    data: Any,
    decode: Callable[[Mapping[str, np.ndarray]], Examples],
    **fields: Any,
) -> Task:
    """Returns a task on a made-up set of TFF's, the same for training and test.

    Args:
        name: The name of the task that it stands for.
        data: TFF's set.
        decode: Returns x and y of a client's features.
        **fields: The task's other fields.
    """
    features = {
        client_id: _stack(data.create_tf_dataset_for_client(client_id))
        for client_id in data.client_ids
    }
    clients = ArrayData(
        client_ids=tuple(features), make=lambda client_id: decode(features[client_id])
    )
    return Task(
        name=f"{name} (SYNTHETIC DATA)",
        description=(
            f"SYNTHETIC DATA, not {name}: the tiny made-up set that TFF ships, "
            f"{len(data.client_ids)} clients, the same for training and test. No "
            "number says anything about the real task"
        ),
        train=clients,
        test=clients,
        has_test_users=True,
        identity={"synthetic_data": True},
        **fields,
    )


def _stack(dataset: Any) -> dict[str, np.ndarray]:
    """Returns the features of all examples of a data set."""
    examples = list(dataset.as_numpy_iterator())
    return {
        name: np.stack([example[name] for example in examples]) for name in examples[0]
    }
