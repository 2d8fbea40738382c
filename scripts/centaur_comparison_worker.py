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
    configs: Sequence[CentaurConfig], on_done: Callable[[], None]
) -> None:
    """Makes runs in processes of their own.

    Raises:
        UserError: If a process ends early. It has printed why.
    """
    for start in range(0, len(configs), _RUNS_EACH):
        _run_batch(configs[start : start + _RUNS_EACH], on_done)


def _run_batch(configs: Sequence[CentaurConfig], on_done: Callable[[], None]) -> None:
    waiting = [
        pathlib.Path(config.output_root) / str(config.experiment) / RESULTS_NAME
        for config in configs
    ]
    with tempfile.TemporaryDirectory() as folder:
        queue = pathlib.Path(folder) / "queue.json"
        queue.write_text(
            json.dumps([_get_fields(config) for config in configs]), encoding="utf-8"
        )
        command = [sys.executable, "-m", _MODULE, f"--{_FLAG}={queue}"]
        child = process.start_child(command)
        try:
            is_running = True
            while is_running:
                is_running = child.poll() is None
                while waiting and waiting[0].exists():
                    waiting.pop(0)
                    on_done()
                if is_running:
                    time.sleep(_POLL_SECONDS)
        finally:
            process.end_child(child)
    if child.returncode:
        raise process.UserError(
            f"a run ended with exit code {child.returncode}, and said why above; the "
            "same command goes on from there"
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
