"""What a training shows people while it runs: a progress bar, events and times."""

import contextlib
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping

import tensorflow as tf
import tensorflow_federated as tff
import tqdm

from simulation import coroutine, run_folder, table

_TIMING_NAME = "timing.csv"
_EVENTS_NAME = "tensorboard"
# The clients of a round, which may be long or short.
_CLIENTS_SECONDS = {True: 0.5, False: 60.0}


class Releases:
    """What is written for people to watch: TensorBoard events and times.

    A round takes the longer the more clients joined: times are diagnostics.
    """

    def __init__(self, folder: pathlib.Path, *, keeps_times: bool) -> None:
        with _tensorboard_errors():
            self._events = tff.program.TensorBoardReleaseManager(folder / _EVENTS_NAME)
        self._path = folder / _TIMING_NAME if keeps_times else None
        self._times = _read_times(self._path)

    def release(
        self, row: Mapping[str, table.Scalar], completed: int, seconds: float
    ) -> None:
        """Writes a round's numbers."""
        values = {
            _name_tag(name, row): float(value)
            for name, value in row.items()
            if isinstance(value, int | float) and name != "round"
        }

        with _tensorboard_errors():
            coroutine.run(self._events.release(values, completed))
        if self._path is not None:
            self._times[completed] = f"{seconds:.4f}"
            lines = ["round,seconds", *(f"{k},{v}" for k, v in self._times.items())]
            run_folder.write_text(self._path, "\n".join(lines) + "\n")


def _name_tag(name: str, row: Mapping[str, table.Scalar]) -> str:
    """Returns a column's name in TensorBoard, an epsilon's with what it rests on."""
    if name.startswith("client_epsilon"):
        return f"{name} ({row['client_accountant']}; {row['client_standing']})"
    if name == "epsilon" and row.get("as_published"):
        return "epsilon (as published, not proven)"
    return name


@contextlib.contextmanager
def _tensorboard_errors() -> Iterator[None]:
    """Turns TensorFlow's errors about files into the system's."""
    try:
        yield
    except tf.errors.OpError as error:
        raise OSError(f"cannot write tensorboard events: {error.message}") from error


def _read_times(path: pathlib.Path | None) -> dict[int, str]:
    """Returns the times of earlier rounds; none from a file that is damaged."""
    if path is None or not path.exists():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    pairs = [line.split(",") for line in text.splitlines()[1:]]
    return {int(p[0]): p[1] for p in pairs if len(p) == 2 and p[0].isdigit()}


class ClientProgress:
    """Shows how far a long round is, beside the bar's label."""

    def __init__(self, bar: tqdm.tqdm) -> None:
        self._bar = bar
        # A hidden bar has no description.
        self._label = getattr(bar, "desc", "")
        self._shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if done == total:
            self._bar.set_description_str(self._label, refresh=False)
        elif time.monotonic() - self._shown > _CLIENTS_SECONDS[sys.stderr.isatty()]:
            self._shown = time.monotonic()
            label = f"{self._label}, client {done}/{total}"
            self._bar.set_description_str(label)


def summarize_row(
    row: Mapping[str, table.Scalar], metric: str, epsilon_name: str
) -> str:
    """Returns what the progress bar says of a round."""
    parts = []
    for name, title in (
        ("train_loss", "loss"),
        (f"test_{metric}", metric),
        (f"validation_{metric}", f"validation {metric}"),
        ("epsilon", epsilon_name),
        ("client_epsilon_max", f"client epsilon max ({row.get('client_accountant')})"),
    ):
        value = row.get(name)
        if isinstance(value, float):
            parts.append(f"{title} {value:.3g}")
    return ", ".join(parts)
