"""The files of trained weights: a model's, and apart from it the clients' own heads."""

import io
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from simulation import run_folder

MODEL_NAME = "model.npz"
HEADS_NAME = "heads.npz"


def write_model(folder: pathlib.Path, weights: Sequence[np.ndarray]) -> pathlib.Path:
    """Writes what the server holds: arrays weight_000, weight_001, in order.

    Returns:
        The file, which holds nothing else.
    """
    arrays = {f"weight_{index:03d}": part for index, part in enumerate(weights)}
    return _write(folder / MODEL_NAME, arrays)


def write_heads(
    folder: pathlib.Path, heads: Mapping[str, Sequence[np.ndarray]]
) -> pathlib.Path:
    """Writes clients' heads: "client_ids", and of all of them head_000, head_001.

    Returns:
        The file, which is private to the clients.
    """
    columns = zip(*heads.values(), strict=True)
    arrays = {f"head_{index:03d}": np.stack(part) for index, part in enumerate(columns)}
    return _write(folder / HEADS_NAME, {"client_ids": np.array(list(heads)), **arrays})


def _write(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> pathlib.Path:
    buffer = io.BytesIO()
    np.savez(buffer, **{name: np.asarray(part) for name, part in arrays.items()})
    run_folder.write_bytes(path, buffer.getvalue())
    return path
