"""The configuration of prepare_data: one field for each flag, validated."""

import dataclasses
import pathlib

from simulation.population.partition import Partition, PartitionKind
from simulation.population.split import SplitBy, SplitRule
from simulation.tasks.options import DEFAULT_DATA_DIR

_TABLES = ("csv", "parquet")
# What a partition is told beside its kind.
_PARTITION_FIELDS = ("num_clients", "classes_per_client", "data_alpha")
# The flags that only some formats take, with these formats.
_TAKEN_BY = {
    "leaf_dataset": ("leaf",),
    "celeba_images": ("leaf",),
    "writers": ("idx",),
    "test_writers": ("idx",),
    "test_from": ("stack_exchange",),
    "user_column": _TABLES,
    "label_column": _TABLES,
    "split_column": _TABLES,
    "text_columns": _TABLES,
    "feature_columns": _TABLES,
    "labels": _TABLES,
    **dict.fromkeys(("partition", *_PARTITION_FIELDS), ("idx", "cifar", "images")),
}
# Of the flags that are never unset.
DEFAULTS = {
    "test_fraction": 0.1,
    "validation_fraction": 0.0,
    "image_layout": "user_class",
    "image_size": 32,
    "grayscale": False,
}
_NEEDED = {
    "leaf": ("leaf_dataset",),
    # TFF would take any file of its own names, emnist_all and stackoverflow, for its
    # data: whoever wants that says so.
    "idx": ("name",),
    "stack_exchange": ("name",),
    "csv": ("user_column", "label_column", "name"),
    "parquet": ("user_column", "label_column", "name"),
    "npz": ("name",),
    "images": ("name",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparationConfig:
    """What an import is told. The fields are the flags of scripts/prepare_data.py."""

    format: str | None
    input: str | None
    data_dir: str | None
    name: str | None
    split: str | None
    test_fraction: float
    validation_fraction: float
    data_seed: int
    skip_bad: bool
    overwrite: bool
    leaf_dataset: str | None
    celeba_images: str | None
    writers: str | None
    test_writers: str | None
    test_from: str | None
    user_column: str | None
    label_column: str | None
    split_column: str | None
    text_columns: list[str] | None
    feature_columns: list[str] | None
    labels: list[str] | None
    image_layout: str
    image_size: int
    grayscale: bool
    partition: str | None
    num_clients: int | None
    classes_per_client: int | None
    data_alpha: float | None

    def __post_init__(self) -> None:
        for name in ("format", "input"):
            if not getattr(self, name):
                raise ValueError(
                    f"`{name}` must be given. Found {getattr(self, name)!r}."
                )
        if not pathlib.Path(str(self.input)).exists():
            raise ValueError(
                f"`input` must be a file or a folder. Found none at {self.input!r}."
            )
        for name, formats in _TAKEN_BY.items():
            if getattr(self, name) is not None and self.format not in formats:
                raise ValueError(
                    f"`{name}` must be unset unless format is {' or '.join(formats)}. "
                    f"Found {getattr(self, name)!r} for {self.format}."
                )
        for name in _NEEDED.get(str(self.format), ()):
            if not getattr(self, name):
                raise ValueError(
                    f"`{name}` must be given for format {self.format}. Found "
                    f"{getattr(self, name)!r}."
                )
        if self.data_seed < 0:
            raise ValueError(f"`data_seed` must be >= 0. Found {self.data_seed!r}.")
        if self.data_alpha is not None and not self.data_alpha > 0:
            raise ValueError(
                f"`data_alpha` must be positive. Found {self.data_alpha!r}."
            )
        for name in ("image_layout", "image_size", "grayscale"):
            if self.format != "images" and getattr(self, name) != DEFAULTS[name]:
                raise ValueError(
                    f"`{name}` must be unset unless format is images. Found "
                    f"{getattr(self, name)!r} for {self.format}."
                )
        if self.format == "images" and self.image_layout == "user_class":
            for name in ("partition", *_PARTITION_FIELDS):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"`{name}` must be unset for images of users. Found "
                        f"{getattr(self, name)!r}; give --image_layout=class."
                    )
        if self.format == "idx":
            # Its users are the writers, or else clients of a partition.
            rule, unused = "with", ["writers", "test_writers"]
            if self.partition is None:
                rule, unused = "without", list(_PARTITION_FIELDS)
            for name in unused:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"`{name}` must be unset for idx files {rule} a `partition`. "
                        f"Found {getattr(self, name)!r}."
                    )
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(
                f"`data_dir` must be a folder. Found a file at {self.data_dir!r}."
            )
        # Where the input divides is known only when it is read.
        self.build_rule(has_splits=False)
        if self.partition is not None:
            self.build_partition(num_classes=0)

    @property
    def folder(self) -> pathlib.Path:
        """Where the file goes."""
        return pathlib.Path(self.data_dir or DEFAULT_DATA_DIR).expanduser()

    def build_rule(self, *, has_splits: bool) -> SplitRule:
        """Returns how examples are divided.

        Args:
            has_splits: Whether the source says it.
        """
        by = SplitBy.SOURCE if has_splits else SplitBy.EXAMPLE
        by = by if self.split is None else SplitBy(self.split)
        if by is SplitBy.SOURCE:
            for name in ("test_fraction", "validation_fraction"):
                if getattr(self, name) != DEFAULTS[name]:
                    raise ValueError(
                        f"`{name}` must be unset where the input itself says what is "
                        f"for the test. Found {getattr(self, name)!r}; give "
                        "--split=user or --split=example."
                    )
        return SplitRule(
            by=by,
            test_fraction=self.test_fraction,
            validation_fraction=self.validation_fraction,
            seed=self.data_seed,
        )

    def build_partition(self, *, num_classes: int) -> Partition:
        """Returns how examples without users are divided among clients.

        Args:
            num_classes: 100 for CIFAR-100, which has coarse labels.
        """
        has_coarse = num_classes == 100
        kind = PartitionKind.PACHINKO if has_coarse else PartitionKind.DIRICHLET
        if self.partition is not None:
            kind = PartitionKind(self.partition)
        return Partition(
            kind=kind,
            num_clients=self.num_clients or (500 if has_coarse else 100),
            alpha=0.1 if self.data_alpha is None else self.data_alpha,
            classes_per_client=self.classes_per_client or 2,
            seed=self.data_seed,
        )
