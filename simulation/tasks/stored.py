"""Files that tasks read: found, fetched by TFF's loaders, or missed with one error."""

import contextlib
import pathlib
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
from simulation.population.partition import Partition
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


def divide(
    partition: Partition,
    train: sql_data.SqlData,
    test: sql_data.SqlData,
    *,
    keep: Callable[[Mapping[str, np.ndarray]], np.ndarray] | None = None,
) -> tuple[FederatedData, FederatedData]:
    """Returns all examples of a file divided anew among the partition's clients.

    The features that `decode` makes x and y of stay in memory in their stored form.

    Args:
        partition: How they are divided.
        train: The training examples.
        test: The test examples.
        keep: Of features, which examples are meant; None for all.

    Raises:
        DataError: If they cannot be divided so.
    """
    pooled_train, pooled_test = _pool(train, keep), _pool(test, keep)
    try:
        division = partition.divide(
            pooled_train["label"], coarse=pooled_train.get("coarse_label")
        )
        followed = division.follow(pooled_test["label"])
    except ValueError as error:
        raise DataError(str(error)) from error
    names = [f"part_{index:05d}" for index in range(partition.num_clients)]

    def build(
        pool: Mapping[str, np.ndarray], rows: list[np.ndarray], data: sql_data.SqlData
    ) -> FederatedData:
        mine = {n: r for n, r in zip(names, rows, strict=True) if len(r)}

        def make(client_id: str) -> Any:
            chosen = mine[client_id]
            return data.decode({name: part[chosen] for name, part in pool.items()})

        counts = {name: len(owned) for name, owned in mine.items()}
        return ArrayData(client_ids=tuple(mine), make=make, counts=counts)

    return (
        build(pooled_train, division.rows, train),
        build(pooled_test, followed, test),
    )


def _pool(
    data: sql_data.SqlData,
    keep: Callable[[Mapping[str, np.ndarray]], np.ndarray] | None,
) -> dict[str, np.ndarray]:
    """Returns the features of all clients' examples, images of integers as bytes."""
    parts: dict[str, list[np.ndarray]] = {}
    for client_id in data.client_ids:
        features = data.read(client_id)
        rows: Any = slice(None) if keep is None else keep(features)
        for name, values in features.items():
            is_image = values.ndim > 1 and values.dtype == np.int64
            kept = values[rows]
            parts.setdefault(name, []).append(
                kept.astype(np.uint8) if is_image else kept
            )
    pool = {name: np.concatenate(values) for name, values in parts.items()}
    if not len(pool["label"]):
        raise DataError(f"{data.path} must have such examples in {data.split}.")
    return pool


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
