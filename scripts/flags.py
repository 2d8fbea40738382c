"""Flags that the training programs share, and how flags become a configuration."""

import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Callable
from typing import Any, TypeVar

from absl import flags

from simulation.population.partition import PartitionKind
from simulation.tasks import TASK_NAMES, TaskOptions

ConfigT = TypeVar("ConfigT")

SERVER_OPTIMIZERS = ("sgd", "adagrad", "adam", "yogi")
# What distributed_dp.modular takes.
MAX_BITS = 32
LARGEST_CLIP = 1e15
# What decides whether a repeated round is the same round.
_PACKAGES = (
    "dp-accounting",
    "numpy",
    "scipy",
    "tensorflow",
    "tensorflow-federated",
    "tensorflow-privacy",
)
_SOURCE_PACKAGES = (
    "centaur",
    "distributed_dp",
    "scripts",
    "simulation",
    "upcycled_fl",
)


def define_run_flags(values: flags.FlagValues) -> None:
    """Defines --seed, the engine's flags, and where the output goes."""
    flags.DEFINE_integer(
        "seed",
        None,
        "root seed: the same seed gives the same metrics.csv, bit for bit. No "
        "epsilon holds against those who know or guess it. Unset: the operating "
        "system's entropy, and that of noise and cohorts is stored nowhere",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_enum(
        "engine",
        "local",
        ["local", "ray", "tff"],
        "what runs the TFF computations. local: this process's TensorFlow; ray: the "
        "clients on a Ray cluster; tff: TFF's own runtime, a helper process on the CPU",
        flag_values=values,
    )
    flags.DEFINE_string(
        "device",
        "auto",
        "where clients work: auto (all GPUs, else the CPU), cpu, or gpu:<number>; on a "
        "Ray cluster gpu",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "client_failure",
        "raise",
        ["raise", "drop"],
        "when a client's work fails. raise: the run ends; drop: the client drops out "
        "of the round, and the server adds the noise that is then missing",
        flag_values=values,
    )
    flags.DEFINE_string(
        "ray_address",
        None,
        "address of a running Ray cluster, for --engine=ray. Unset: one is started on "
        "this machine",
        flag_values=values,
    )
    define_output_flags(values)


def define_output_flags(values: flags.FlagValues) -> None:
    """Defines --output_root and --experiment."""
    flags.DEFINE_string(
        "output_root", "runs", "folder that holds the run folders", flag_values=values
    )
    flags.DEFINE_string(
        "experiment",
        None,
        "name of the run folder. Unset: a name that follows from the other flags, so "
        "that the same command takes up its own unfinished run",
        flag_values=values,
    )


def define_task_flags(values: flags.FlagValues) -> None:
    """Defines --task, --model, and what tasks can be told (TaskOptions)."""
    flags.DEFINE_enum("task", "digits", TASK_NAMES, "what to learn", flag_values=values)
    flags.DEFINE_string(
        "model",
        None,
        "model of the task (unset: the task's default)",
        flag_values=values,
    )
    flags.DEFINE_string(
        "data_dir",
        None,
        "folder of the data's files, which scripts/prepare_data.py writes (unset: "
        "TFF's, ~/.tff)",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "synthetic_data",
        False,
        "the tiny made-up sets that TFF ships, in place of the task's data",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "data_seed",
        0,
        "decides partitions, generated data, and which examples are evaluated; not the "
        "training",
        flag_values=values,
    )
    flags.DEFINE_string(
        "data_name",
        None,
        "name that prepare_data gave the data (unset: the task's own)",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "partition",
        None,
        [kind.value for kind in PartitionKind],
        "divide the examples of cifar10, cifar100, EMNIST or own arrays anew among "
        "clients, in place of the file's users",
        flag_values=values,
    )
    for name, text in (
        ("num_clients", "clients of a partition or of generated data"),
        ("classes_per_client", "classes of a client, for --partition=shards"),
        ("vocabulary_size", "most words of a vocabulary (unset: 10,000)"),
        ("eval_examples", "most test examples an evaluation takes (unset: the task's)"),
    ):
        flags.DEFINE_integer(name, None, text, flag_values=values)
    for name, text in (
        (
            "data_alpha",
            "concentration of --partition=dirichlet; of synthetic data, how much local "
            "models differ",
        ),
        ("data_beta", "of synthetic data, how much local inputs differ"),
        (
            "test_fraction",
            "with --partition: divide all examples of the file, and hold this fraction "
            "of each client's out for the test (unset: the file's test is divided by "
            "itself)",
        ),
    ):
        flags.DEFINE_float(name, None, text, flag_values=values)
    flags.DEFINE_string(
        "embedding_file",
        None,
        "word vectors in GloVe's text format, for sent140 (unset: learned)",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "hold_mb",
        512,
        "most memory for examples that were read, in megabytes",
        flag_values=values,
    )


def build_task_options(config: Any) -> TaskOptions:
    """Returns a task's options of a configuration that has their names for fields.

    Raises:
        ValueError: If a value is out of range.
    """
    names = [field.name for field in dataclasses.fields(TaskOptions)]
    given = {name: getattr(config, name) for name in names}
    for name in ("data_dir", "embedding_file"):
        if given[name] is not None:
            given[name] = pathlib.Path(given[name])
    if given["partition"] is not None:
        given["partition"] = PartitionKind(given["partition"])
    return TaskOptions(**given)


def build_config(kind: Callable[..., ConfigT], values: flags.FlagValues) -> ConfigT:
    """Returns a configuration whose every field has the value of the flag of its name.

    Raises:
        ValueError: If a value is out of range.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [field.name for field in fields if field.init]
    return kind(**{name: values[name].value for name in names})


def check_positive(config: Any, *names: str) -> None:
    """Raises ValueError unless each field named is a positive finite number."""
    for name in names:
        value = getattr(config, name)
        if not 0 < value < float("inf"):
            raise ValueError(f"`{name}` must be positive and finite. Found {value!r}.")


def check_clip(clip: float) -> None:
    """Raises ValueError unless float32 holds sums of clipped vectors with room."""
    if not 1 / LARGEST_CLIP <= clip <= LARGEST_CLIP:
        raise ValueError(
            f"`clip` must be between {1 / LARGEST_CLIP:g} and {LARGEST_CLIP:g}: the "
            f"arithmetic is float32. Found {clip!r}."
        )


def check_experiment(experiment: str) -> None:
    """Raises ValueError unless `experiment` is the name of a folder."""
    if experiment in ("", ".", "..") or "/" in experiment or "\0" in experiment:
        raise ValueError(
            "`experiment` must be a name without slashes, of a folder in output_root. "
            f"Found {experiment!r}."
        )


def check_output_root(output_root: str) -> None:
    """Raises ValueError unless folders can be made in `output_root`.

    An early look, so that nobody waits for imports: the folder itself decides later.
    """
    path = pathlib.Path(output_root).absolute()
    try:
        while not path.exists():
            path = path.parent
    except OSError as error:
        raise ValueError(
            f"`output_root` must be a path that the system takes: {error.strerror}. "
            f"Found {output_root!r:.80}."
        ) from None
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(
            f"`output_root` must be a folder that can be written. Found {output_root!r}"
            f", where {path} is {'read-only' if path.is_dir() else 'not a folder'}."
        )


def read_sources() -> str:
    """Returns the SHA-256 of the Python files that a training runs."""
    root = pathlib.Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for package in _SOURCE_PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            name, content = str(file.relative_to(root)).encode(), file.read_bytes()
            for part in (name, content):
                digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def read_versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that decide the numbers."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        versions[package] = importlib.metadata.version(package)
    return versions
