"""Tasks: federated data with models and metrics, by name.

The names are known without importing TensorFlow; a task's module is imported when the
task is loaded.
"""

import importlib
from typing import TYPE_CHECKING

from simulation.tasks.options import TaskOptions

if TYPE_CHECKING:
    from simulation.tasks.task import Task

# Each builder takes the options.
_BUILDERS = {
    "digits": ("digits", "build_task"),
    "emnist_character": ("images", "build_emnist_character"),
    "emnist_digits": ("images", "build_emnist_digits"),
    "emnist_letters": ("images", "build_emnist_letters"),
    "emnist_character_synthetic": ("emnist_synthetic", "build_task"),
    "femnist_af": ("images", "build_femnist_af"),
    "cifar10": ("images", "build_cifar10"),
    "cifar100": ("images", "build_cifar100"),
    "stackoverflow_word": ("texts", "build_stackoverflow_word"),
    "stackoverflow_tag": ("texts", "build_stackoverflow_tag"),
    "sent140": ("texts", "build_sent140"),
    "synthetic": ("synthetic", "build_fedprox"),
    "synthetic_iid": ("synthetic", "build_fedprox_iid"),
    "synthetic_20": ("synthetic", "build_upcycled"),
    "synthetic_20_iid": ("synthetic", "build_upcycled_iid"),
    "synthetic_20_binary": ("synthetic", "build_upcycled_binary"),
    "own": ("own", "build_task"),
}
TASK_NAMES = tuple(_BUILDERS)

__all__ = ["TASK_NAMES", "TaskOptions", "load_task"]


def load_task(name: str, options: TaskOptions | None = None) -> "Task":
    """Returns a task by name, with its data found.

    Args:
        name: One of TASK_NAMES.
        options: Where the data are and what else there is to choose.

    Raises:
        ValueError: If there is no such task, or it does not take an option.
        DataError: If its data are not there, or damaged.
    """
    if name not in _BUILDERS:
        raise ValueError(
            f"`name` must be one of {', '.join(TASK_NAMES)}. Found {name!r}."
        )
    module, builder = _BUILDERS[name]
    build = getattr(importlib.import_module(f"simulation.tasks.{module}"), builder)
    return build(options or TaskOptions())
