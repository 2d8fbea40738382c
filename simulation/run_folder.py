"""The folder of a run: written whole or not at all, and never shared by two runs.

`config.json` is written before round 0. A folder is taken up again only by a run with
the same configuration, which then continues; any other run is refused.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import pathlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

CONFIG_NAME = "config.json"
_LOCK_NAME = ".lock"
# What marks a file that is being written; never the name of a finished one.
_PARTIAL_SUFFIX = ".partial"


class RunFolderError(RuntimeError):
    """The folder cannot serve this run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A folder that this process holds.

    Attributes:
        path: Where it is.
        resumed: Whether an earlier run with the same configuration began it.
    """

    path: pathlib.Path
    resumed: bool


class FolderChoice(Protocol):
    """What flags say of a run's folder."""

    @property
    def output_root(self) -> str:
        """The folder that holds the run folders."""

    @property
    def experiment(self) -> str | None:
        """The name of the run folder; None for one that follows from the flags."""


def write_text(path: pathlib.Path, text: str, *, durable: bool = False) -> None:
    """Writes a file of text whole: see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"), durable=durable)


def write_bytes(path: pathlib.Path, content: bytes, *, durable: bool = False) -> None:
    """Writes a file whole: readers see the old content or the new, never a part.

    Args:
        path: The file.
        content: Its content.
        durable: Whether to wait until the content is on the disk.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_PARTIAL_SUFFIX}")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(path.parent)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a value as indented JSON, whole and on the disk.

    NaN becomes null, and infinities become the strings "inf" and "-inf".
    """
    text = json.dumps(_make_strict(value), indent=2, allow_nan=False) + "\n"
    write_text(path, text, durable=True)


def choose_folder(
    config: FolderChoice, settings: Mapping[str, Any], *, name: str, finished: str
) -> pathlib.Path:
    """Returns the folder named by the flags, or one whose name follows from them.

    In the latter case a finished run is left alone: the next free number is taken.

    Args:
        config: What the flags say.
        settings: All that decides the result, of JSON values.
        name: What the folder's name begins with.
        finished: The file that marks a run as finished.
    """
    root = pathlib.Path(config.output_root)
    if config.experiment is not None:
        return root / config.experiment
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    path, number = root / f"{name}-{digest[:8]}", 1
    first = path
    while (path / finished).exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def _make_strict(value: Any) -> Any:
    """Returns the value with what JSON has no number for: null for NaN, "inf"."""
    if isinstance(value, Mapping):
        return {name: _make_strict(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_make_strict(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


@contextlib.contextmanager
def open_run_folder(
    path: pathlib.Path, config: Mapping[str, Any]
) -> Iterator[RunFolder]:
    """Begins or takes up a run folder, and holds it until the end of the block.

    Args:
        path: The folder, made where it is missing.
        config: What determines the run, as JSON values.

    Raises:
        RunFolderError: If the folder cannot be written, belongs to a run with another
            configuration (the difference is in the message), holds something else, or
            is held by another process.
    """
    wanted = json.loads(json.dumps(_make_strict(config)))
    found = read_config(path)
    if found is None:
        _check_unused(path)
    else:
        differences = describe_differences(found, wanted)
        if differences:
            raise RunFolderError(
                f"{path} belongs to a run with another configuration; name another "
                "folder or use the same flags. It has, and this run wants:\n  "
                + "\n  ".join(differences)
            )
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_hold(path))
            _remove_partials(path)
            if found is None:
                write_json(path / CONFIG_NAME, wanted)
        except OSError as error:
            raise RunFolderError(f"cannot write to {path}: {error}") from None
        yield RunFolder(path=path, resumed=found is not None)


def read_config(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the configuration of the run in a folder, or None where there is none.

    Raises:
        RunFolderError: If it cannot be read.
    """
    file = path / CONFIG_NAME
    config = read_json(file)
    if config is not None and not isinstance(config, dict):
        raise RunFolderError(f"{file} does not hold a configuration")
    return config


def read_json(file: pathlib.Path) -> Any:
    """Returns the value in a file of a run's folder, None where there is no file.

    Raises:
        RunFolderError: If it cannot be read.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot read {file}: {error}") from None


def describe_differences(
    found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> list[str]:
    """Returns a line for every entry that differs, nested names joined by dots."""
    left, right = dict(_flatten(found)), dict(_flatten(wanted))
    missing = "(none)"
    return [
        f"{name}: {left.get(name, missing)!s} -> {right.get(name, missing)!s}"
        for name in [*left, *(name for name in right if name not in left)]
        if left.get(name, missing) != right.get(name, missing)
    ]


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, entry in value.items():
        if isinstance(entry, Mapping):
            yield from _flatten(entry, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", entry


def _check_unused(path: pathlib.Path) -> None:
    try:
        entries = [entry.name for entry in path.iterdir() if entry.name != _LOCK_NAME]
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(
            f"cannot use {path} as an output folder: {error.strerror}"
        ) from None
    if any(not name.endswith(_PARTIAL_SUFFIX) for name in entries):
        raise RunFolderError(
            f"{path} holds files but no {CONFIG_NAME}: it is not the folder of a run"
        )


@contextlib.contextmanager
def _hold(path: pathlib.Path) -> Iterator[None]:
    """Keeps other processes out. The system lets go when this process ends."""
    with open(path / _LOCK_NAME, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunFolderError(f"another process is running in {path}") from None
        yield


def _remove_partials(path: pathlib.Path) -> None:
    for partial in path.rglob(f"*{_PARTIAL_SUFFIX}"):
        partial.unlink(missing_ok=True)


def _sync_folder(path: pathlib.Path) -> None:
    """Waits until a renaming in the folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
