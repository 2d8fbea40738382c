"""Checkpoints: the whole state of a training in one program state of TFF.

The state of the process, the ledger and the table of metrics are saved together and
appear together: TFF writes a folder under a temporary name and renames it. A digest
over all arrays tells a damaged checkpoint from a good one.
"""

import asyncio
import dataclasses
import hashlib
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulation import ledger, table

_PREFIX = "round_"
_KEPT = 2


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a training needs to go on.

    Attributes:
        state: The state of the learning process.
        ledger_state: The state of the ledger.
        metrics: The table of all rounds so far.
    """

    state: Any
    ledger_state: ledger.LedgerState
    metrics: table.Table


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
        arrays = _pack(checkpoint)
        version = checkpoint.ledger_state.rounds_completed
        asyncio.run(self._manager.save(arrays, version))

    def load_latest(self, initial: Checkpoint) -> Checkpoint:
        """Returns the latest checkpoint, or `initial` where there is none.

        Args:
            initial: The state before the first round, of the same structure.

        Raises:
            CheckpointError: If the latest checkpoint is damaged or does not fit.
        """
        versions = asyncio.run(self._manager.get_versions())
        if not versions:
            return initial
        version = versions[-1]
        path = self._path / f"{_PREFIX}{version}"
        template = _pack(initial)
        try:
            arrays = asyncio.run(self._manager.load(version, template))
            return _unpack(arrays, initial)
        # What TensorFlow raises for a damaged file depends on where the damage is.
        except Exception as error:
            summary = str(error).strip().splitlines()
            reason = summary[0][:200] if summary else type(error).__name__
            raise CheckpointError(
                f"the checkpoint {path} is damaged or does not fit this run: {reason}"
            ) from error


def _pack(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the checkpoint as nested arrays with their digest."""
    text = checkpoint.metrics.to_csv().encode()
    arrays: dict[str, Any] = {
        "state": [np.asarray(leaf) for leaf in tf.nest.flatten(checkpoint.state)],
        "ledger": ledger.pack_ledger_state(checkpoint.ledger_state),
        "metrics": np.frombuffer(text, np.uint8),
    }
    return {**arrays, "digest": _compute_digest(arrays)}


def _unpack(arrays: dict[str, Any], initial: Checkpoint) -> Checkpoint:
    found = arrays.pop("digest")
    if not np.array_equal(found, _compute_digest(arrays)):
        raise ValueError("its digest does not match its content")
    leaves = tf.nest.flatten(initial.state)
    if [_describe(leaf) for leaf in leaves] != [_describe(x) for x in arrays["state"]]:
        raise ValueError("it holds a state of another structure")
    return Checkpoint(
        state=tf.nest.pack_sequence_as(initial.state, arrays["state"]),
        ledger_state=ledger.unpack_ledger_state(arrays["ledger"]),
        metrics=table.Table.from_csv(arrays["metrics"].tobytes().decode()),
    )


def _compute_digest(arrays: dict[str, Any]) -> np.ndarray:
    """Returns the SHA-256 of all arrays in a fixed order, uint8[32]."""
    digest = hashlib.sha256()
    for leaf in tf.nest.flatten(arrays):
        digest.update(repr(_describe(leaf)).encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


def _describe(leaf: Any) -> tuple[str, Sequence[int]]:
    array = np.asarray(leaf)
    return array.dtype.str, array.shape
