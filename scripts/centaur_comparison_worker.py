"""Runs of a comparison in processes of their own, a few in each.

TensorFlow keeps what it compiled until its process ends, and every run compiles its own
programs: some 100 MB stay behind each. So a process makes a few runs and ends.
"""

import contextlib
import dataclasses
import io
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from absl import flags

from scripts.centaur_config import CentaurConfig
from simulation import process, progress

RESULTS_NAME = "results.json"
_NAME = "run_centaur_comparison"
_MODULE = "scripts.centaur_comparison_worker"
_FLAG = "queue"
_RUNS_EACH = 8
_POLL_SECONDS = 0.2

# Makes runs in their order, and is called back after each of them.
Execute = Callable[[Sequence[CentaurConfig], Callable[[], None]], None]


def run_here(configs: Sequence[CentaurConfig], on_done: Callable[[], None]) -> None:
    """Makes runs in this process, without a word.

    Raises:
        UserError: For anything the user can mend.
    """
    from scripts import centaur_training

    for config in configs:
        with contextlib.redirect_stdout(io.StringIO()), progress.hide_progress():
            centaur_training.run(config)
        on_done()


def run_in_workers(
    configs: Sequence[CentaurConfig],
    on_done: Callable[[], None],
    *,
    parallel_runs: int = 1,
) -> None:
    """Makes runs in processes of their own.

    Args:
        configs: The runs.
        on_done: Called when a run is finished.
        parallel_runs: How many processes there are at a time.

    Raises:
        UserError: If a process ends early. It has printed why; the others are ended.
    """
    # No process is left with a batch while others have nothing to do.
    size = max(1, min(_RUNS_EACH, len(configs) // (2 * parallel_runs)))
    batches = [configs[start : start + size] for start in range(0, len(configs), size)]
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running: list[_Batch] = []
        while batches or running:
            while batches and len(running) < parallel_runs:
                queue = folder / f"{len(batches)}.json"
                running.append(_Batch(batches.pop(0), queue))
                stack.callback(process.end_child, running[-1].child)
            # Whoever ended before its folders are looked at has written all of them.
            ended = [batch for batch in running if batch.child.poll() is not None]
            for _ in range(sum(batch.take_finished() for batch in running)):
                on_done()
            for batch in ended:
                running.remove(batch)
                _check_exit(batch.child.returncode)
            if not ended:
                time.sleep(_POLL_SECONDS)


class _Batch:
    """A process that makes a few runs.

    Attributes:
        child: The process.
    """

    def __init__(self, configs: Sequence[CentaurConfig], queue: pathlib.Path) -> None:
        """Starts it.

        Args:
            configs: The runs.
            queue: The file that tells it of them, which this writes.
        """
        self._waiting = [
            pathlib.Path(config.output_root) / str(config.experiment) / RESULTS_NAME
            for config in configs
        ]
        queue.write_text(
            json.dumps([_get_fields(config) for config in configs]), encoding="utf-8"
        )
        command = [sys.executable, "-m", _MODULE, f"--{_FLAG}={queue}"]
        self.child = process.start_child(command)

    def take_finished(self) -> int:
        """Returns how many runs are finished since it was last asked."""
        before = len(self._waiting)
        while self._waiting and self._waiting[0].exists():
            self._waiting.pop(0)
        return before - len(self._waiting)


def _check_exit(code: int) -> None:
    """Raises UserError for a process that failed."""
    if code:
        raise process.UserError(
            f"a run ended with exit code {code}, and said why above; the same command "
            "goes on from there"
        )


def _get_fields(config: CentaurConfig) -> dict[str, object]:
    """Returns what the configuration is made of."""
    fields = [field for field in dataclasses.fields(config) if field.init]
    return {field.name: getattr(config, field.name) for field in fields}


def main() -> None:
    """Makes the runs of the queue."""
    queue = pathlib.Path(flags.FLAGS[_FLAG].value).read_text(encoding="utf-8")
    configs = [CentaurConfig(**values) for values in json.loads(queue)]
    process.import_quietly("tensorflow_federated")
    run_here(configs, lambda: None)


if __name__ == "__main__":
    flags.DEFINE_string(_FLAG, None, "file of the runs", required=True)
    process.run_program(main, name=_NAME)
