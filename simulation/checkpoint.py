"""Checkpoints: the whole state of a training in one program state of TFF.

The state of the process, the ledger and the table of metrics are saved together and
appear together: TFF writes a folder under a temporary name and renames it. A digest
tells a damaged checkpoint from a good one.

What the clients keep is theirs alone. It lies in a file of its own, which is written
before the checkpoint that it belongs to; the checkpoint holds the file's digest.
"""

import dataclasses
import hashlib
import io
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulation import client_states, coroutine, ledger, run_folder, table

_PREFIX = "round_"
_KEPT = 2
# Names of the arrays in a checkpoint.
_STATE, _LEDGER, _METRICS, _CLIENTS = "state/", "ledger/", "metrics", "clients_digest"
_CLIENTS_FOLDER = "clients"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a training needs to go on.

    Attributes:
        state: The state of the learning process.
        ledger_state: The state of the ledger.
        metrics: The table of all rounds so far.
        clients: What the clients keep.
    """

    state: Any
    ledger_state: ledger.LedgerState
    metrics: table.Table
    clients: client_states.ClientStates = client_states.ClientStates()


class CheckpointFolder:
    """Saves checkpoints by the number of completed rounds and keeps the last two."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._clients_path = path.with_name(f"{path.name}_{_CLIENTS_FOLDER}")
        # What a killed process left half-written.
        for partial in path.glob(f"{_PREFIX}*_temp*"):
            shutil.rmtree(partial, ignore_errors=True)
        self._manager = tff.program.FileProgramStateManager(
            path, prefix=_PREFIX, keep_total=_KEPT, keep_first=False
        )

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint, whole or not at all."""
        version = checkpoint.ledger_state.rounds_completed
        packed = checkpoint.clients.pack()
        content = _write_arrays(packed) if packed else None
        if content is not None:
            self._clients_path.mkdir(parents=True, exist_ok=True)
            file = self._get_clients_file(version)
            run_folder.write_bytes(file, content.tobytes(), durable=True)
        coroutine.run(self._manager.save(_pack(checkpoint, content), version))
        if content is not None:
            self._remove_clients()

    def load_latest(self, initial: Checkpoint) -> Checkpoint:
        """Returns the latest checkpoint, or `initial` where there is none.

        Args:
            initial: The state before the first round, of the same structure.

        Raises:
            CheckpointError: If the latest checkpoint is damaged or does not fit.
        """
        try:
            versions = coroutine.run(self._manager.get_versions())
        except tf.errors.OpError:
            raise CheckpointError(
                f"{self._path} is not a folder of checkpoints"
            ) from None
        if not versions:
            return initial
        version = versions[-1]
        path = self._path / f"{_PREFIX}{version}"
        template = _pack(initial)
        try:
            arrays = coroutine.run(self._manager.load(version, template))
            return _unpack(arrays, initial, self._get_clients_file(version))
        # What TensorFlow raises for a damaged file depends on where the damage is.
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint {path} is damaged or does not fit this run "
                f"({_summarize(error)}). Remove that folder to go on from the one "
                "before it: an unseeded run pays for the rounds since, a seeded one "
                "repeats them"
            ) from error

    def _get_clients_file(self, version: int) -> pathlib.Path:
        return self._clients_path / f"{_PREFIX}{version}.npz"

    def _remove_clients(self) -> None:
        """Removes the files of checkpoints that are no longer there."""
        versions = coroutine.run(self._manager.get_versions()) or []
        wanted = {self._get_clients_file(version) for version in versions}
        for file in self._clients_path.iterdir():
            if file not in wanted:
                file.unlink(missing_ok=True)


def _summarize(error: Exception) -> str:
    """Returns one short line: TensorFlow's errors carry the trace of an op."""
    if isinstance(error, OSError | ValueError | tff.program.ProgramStateNotFoundError):
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"TensorFlow cannot read it, {type(error).__name__}"


def _pack(
    checkpoint: Checkpoint, clients: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Returns the checkpoint as one array of bytes, with its digest.

    One array, because TFF saves each in a variable of its own, at 5 ms a piece.

    Args:
        checkpoint: The checkpoint.
        clients: The bytes of the clients' file, or None where they keep nothing.
    """
    leaves = tf.nest.flatten(checkpoint.state)
    arrays = {f"{_STATE}{index}": np.asarray(leaf) for index, leaf in enumerate(leaves)}
    for name, value in ledger.pack_ledger_state(checkpoint.ledger_state).items():
        arrays[_LEDGER + name] = value
    if clients is not None:
        arrays[_CLIENTS] = _compute_digest(clients)
    text = checkpoint.metrics.to_csv().encode()
    arrays[_METRICS] = np.frombuffer(text, np.uint8)
    content = _write_arrays(arrays)
    return {"content": content, "digest": _compute_digest(content)}


def _unpack(
    packed: dict[str, np.ndarray], initial: Checkpoint, clients_file: pathlib.Path
) -> Checkpoint:
    content = packed["content"]
    if not np.array_equal(packed["digest"], _compute_digest(content)):
        raise ValueError("its digest does not match its content")
    arrays = _read_arrays(content)
    clients: dict[str, np.ndarray] = {}
    if _CLIENTS in arrays:
        kept = np.fromfile(clients_file, np.uint8)
        if not np.array_equal(arrays[_CLIENTS], _compute_digest(kept)):
            raise ValueError(f"its digest does not match {clients_file}")
        clients = _read_arrays(kept)
    expected = [np.asarray(leaf) for leaf in tf.nest.flatten(initial.state)]
    names = [name for name in arrays if name.startswith(_STATE)]
    found = [arrays[f"{_STATE}{index}"] for index in range(len(names))]
    if [_describe(array) for array in found] != [_describe(x) for x in expected]:
        raise ValueError("it holds a state of another structure")

    def select(prefix: str) -> dict[str, np.ndarray]:
        return {
            name.removeprefix(prefix): array
            for name, array in arrays.items()
            if name.startswith(prefix)
        }

    return Checkpoint(
        state=tf.nest.pack_sequence_as(initial.state, found),
        ledger_state=ledger.unpack_ledger_state(select(_LEDGER)),
        metrics=table.Table.from_csv(arrays[_METRICS].tobytes().decode()),
        clients=initial.clients.unpack(clients),
    )


def _write_arrays(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns arrays as the bytes of a file, uint8."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def _read_arrays(content: np.ndarray) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(content.tobytes()), allow_pickle=False) as file:
        return dict(file)


def _compute_digest(content: np.ndarray) -> np.ndarray:
    """Returns the SHA-256 of the bytes, uint8[32]."""
    return np.frombuffer(hashlib.sha256(content.tobytes()).digest(), np.uint8)


def _describe(array: np.ndarray) -> tuple[str, Sequence[int]]:
    return array.dtype.str, array.shape
