"""Tasks: federated data with models and metrics, by name.

The names are known without importing TensorFlow; a task's module is imported when the
task is loaded.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.tasks.task import Task

_BUILDERS = {
    "digits": "simulation.tasks.digits",
    "emnist_character_synthetic": "simulation.tasks.emnist_synthetic",
}
TASK_NAMES = tuple(_BUILDERS)

__all__ = ["TASK_NAMES", "load_task"]


def load_task(name: str) -> "Task":
    """Returns a task by name, with its data loaded.

    Raises:
        ValueError: If there is no such task.
    """
    if name not in _BUILDERS:
        raise ValueError(
            f"`name` must be one of {', '.join(TASK_NAMES)}. Found {name!r}."
        )
    return importlib.import_module(_BUILDERS[name]).build_task()
