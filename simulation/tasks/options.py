"""What a task can be told. No import of TensorFlow: the flags' checks come first."""

import dataclasses
import enum
import math
import pathlib

from simulation.population.partition import Partition, PartitionKind

DEFAULT_DATA_DIR = pathlib.Path("~/.tff")
PARTITION_OPTIONS = (
    "partition",
    "num_clients",
    "data_alpha",
    "classes_per_client",
    "test_fraction",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """What a task can be told. None stands for the task's own choice.

    Attributes:
        data_dir: The folder of the data's files; None for TFF's, ~/.tff.
        synthetic_data: Whether to use the tiny made-up sets that TFF ships instead.
        data_seed: Decides partitions, generated data and the evaluation's subset.
        data_name: The name that the data's file was given when it was made.
        partition: How examples are divided among clients, in place of the file's users.
        num_clients: The number of clients of a partition or of generated data.
        data_alpha: The Dirichlet partition's concentration, or how much the local
            models of generated data differ.
        data_beta: How much the local inputs of generated data differ.
        classes_per_client: The classes of a client of a partition in shards.
        test_fraction: The fraction of each client's examples that is for the test,
            where a partition divides all examples of a file, those for training and
            those for the test alike; None divides each of these by itself.
        vocabulary_size: The most words of a vocabulary.
        embedding_file: Word vectors in the text format of GloVe.
        eval_examples: The most examples that an evaluation takes.
        hold_mb: The most memory for examples that were read, in megabytes.
    """

    data_dir: pathlib.Path | None = None
    synthetic_data: bool = False
    data_seed: int = 0
    data_name: str | None = None
    partition: PartitionKind | None = None
    num_clients: int | None = None
    data_alpha: float | None = None
    data_beta: float | None = None
    classes_per_client: int | None = None
    test_fraction: float | None = None
    vocabulary_size: int | None = None
    embedding_file: pathlib.Path | None = None
    eval_examples: int | None = None
    hold_mb: int = 512

    def __post_init__(self) -> None:
        for name in (
            "num_clients",
            "classes_per_client",
            "vocabulary_size",
            "eval_examples",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be >= 1. Found {value!r}.")
        for name in ("data_alpha", "data_beta"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"`{name}` must be finite and >= 0. Found {value!r}.")
        if self.test_fraction is not None and not 0 < self.test_fraction < 1:
            raise ValueError(
                f"`test_fraction` must be in (0, 1). Found {self.test_fraction!r}."
            )
        for name in ("data_seed", "hold_mb"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"`{name}` must be >= 0. Found {getattr(self, name)!r}."
                )

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the data's files."""
        return (self.data_dir or DEFAULT_DATA_DIR).expanduser()

    def check_taken(self, task: str, *taken: str) -> None:
        """Raises ValueError if an option is given that the task does not take.

        Args:
            task: The task's name.
            taken: The options that it takes; all take data_dir, data_seed,
                eval_examples and hold_mb.
        """
        always = {"data_dir", "data_seed", "eval_examples", "hold_mb"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in always | set(taken) and value != field.default:
                found = value.value if isinstance(value, enum.Enum) else value
                raise ValueError(
                    f"`{field.name}` must be unset for the task {task}. "
                    f"Found {found!r}."
                )
        if self.synthetic_data:
            # A made-up set comes from no file, with clients of its own.
            for name in taken:
                if name in ("synthetic_data", "vocabulary_size"):
                    continue
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"`{name}` must be unset with `synthetic_data`. Found "
                        f"{getattr(self, name)!r}."
                    )

    def build_partition(self, *, num_clients: int) -> Partition | None:
        """Returns the partition that is asked for, or None.

        Args:
            num_clients: The number of clients where none is given.
        """
        if self.partition is None:
            for name in PARTITION_OPTIONS:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"`{name}` must be unset without `partition`. Found "
                        f"{getattr(self, name)!r}."
                    )
            return None
        own = {
            PartitionKind.DIRICHLET: ("data_alpha",),
            PartitionKind.SHARDS: ("classes_per_client",),
            PartitionKind.PACHINKO: (),
        }[self.partition]
        if self.data_alpha == 0:
            raise ValueError("`data_alpha` must be positive. Found 0.0.")
        given = {}
        for name in ("data_alpha", "classes_per_client"):
            value = getattr(self, name)
            if value is not None and name not in own:
                raise ValueError(
                    f"`{name}` must be unset for the partition {self.partition.value}. "
                    f"Found {value!r}."
                )
            if value is not None:
                given[name.removeprefix("data_")] = value
        return Partition(
            kind=self.partition,
            num_clients=self.num_clients or num_clients,
            seed=self.data_seed,
            **given,
        )
