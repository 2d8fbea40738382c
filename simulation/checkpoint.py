"""Checkpoints: the whole state of a training in one program state of TFF.

The state of the process, the ledger and the table of metrics are saved together and
appear together: TFF writes a folder under a temporary name and renames it. A digest
tells a damaged checkpoint from a good one.
"""

import dataclasses
import hashlib
import io
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulation import client_states, coroutine, ledger, table

_PREFIX = "round_"
_KEPT = 2
# Names of the arrays in a checkpoint.
_STATE, _LEDGER, _METRICS, _CLIENTS = "state/", "ledger/", "metrics", "clients/"


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
        # What a killed process left half-written.
        for partial in path.glob(f"{_PREFIX}*_temp*"):
            shutil.rmtree(partial, ignore_errors=True)
        self._manager = tff.program.FileProgramStateManager(
            path, prefix=_PREFIX, keep_total=_KEPT, keep_first=False
        )

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint, whole or not at all."""
        version = checkpoint.ledger_state.rounds_completed
        coroutine.run(self._manager.save(_pack(checkpoint), version))

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
            return _unpack(arrays, initial)
        # What TensorFlow raises for a damaged file depends on where the damage is.
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint {path} is damaged or does not fit this run "
                f"({_summarize(error)}). Remove that folder to go on from the one "
                "before it: an unseeded run pays for the rounds since, a seeded one "
                "repeats them"
            ) from error


def _summarize(error: Exception) -> str:
    """Returns one short line: TensorFlow's errors carry the trace of an op."""
    if isinstance(error, ValueError | tff.program.ProgramStateNotFoundError):
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"TensorFlow cannot read it, {type(error).__name__}"


def _pack(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Returns the checkpoint as one array of bytes, with its digest.

    One array, because TFF saves each in a variable of its own, at 5 ms a piece.
    """
    leaves = tf.nest.flatten(checkpoint.state)
    arrays = {f"{_STATE}{index}": np.asarray(leaf) for index, leaf in enumerate(leaves)}
    for name, value in ledger.pack_ledger_state(checkpoint.ledger_state).items():
        arrays[_LEDGER + name] = value
    for name, array in checkpoint.clients.pack().items():
        arrays[_CLIENTS + name] = array
    text = checkpoint.metrics.to_csv().encode()
    arrays[_METRICS] = np.frombuffer(text, np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    content = np.frombuffer(buffer.getvalue(), np.uint8)
    return {"content": content, "digest": _compute_digest(content)}


def _unpack(packed: dict[str, np.ndarray], initial: Checkpoint) -> Checkpoint:
    content = packed["content"]
    if not np.array_equal(packed["digest"], _compute_digest(content)):
        raise ValueError("its digest does not match its content")
    with np.load(io.BytesIO(content.tobytes()), allow_pickle=False) as file:
        arrays = dict(file)
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
        clients=initial.clients.unpack(select(_CLIENTS)),
    )


def _compute_digest(content: np.ndarray) -> np.ndarray:
    """Returns the SHA-256 of the bytes, uint8[32]."""
    return np.frombuffer(hashlib.sha256(content.tobytes()).digest(), np.uint8)


def _describe(array: np.ndarray) -> tuple[str, Sequence[int]]:
    return array.dtype.str, array.shape
