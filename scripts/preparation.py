"""One run of prepare_data: from a configuration to a population's file."""

import dataclasses
import pathlib

import numpy as np
import tqdm

from scripts.preparation_config import PreparationConfig
from simulation import process
from simulation.population import builder, layout
from simulation.population.federated_data import DataError
from simulation.population.partition import Division
from simulation.sources import (
    arrays,
    cifar,
    idx,
    image_folder,
    leaf,
    stack_exchange,
    table,
)
from simulation.sources.source import TEST, TRAIN, Source, SourceError

_LEAF_LAYOUTS = {
    leaf.LeafDataset.FEMNIST: layout.EMNIST,
    leaf.LeafDataset.SENT140: layout.rename(layout.PLAIN, "sent140"),
    # Not TFF's names: its files of Shakespeare and CelebA have other features.
    leaf.LeafDataset.SHAKESPEARE: layout.rename(layout.PLAIN, "shakespeare_leaf"),
    leaf.LeafDataset.SYNTHETIC: layout.rename(layout.PLAIN, "synthetic_leaf"),
    leaf.LeafDataset.CELEBA: layout.rename(layout.PLAIN, "celeba_leaf"),
}
_NOT_OPTIONS = ("input", "data_dir", "name", "overwrite")


def run(config: PreparationConfig) -> builder.Outcome:
    """Imports as configured, and prints what there is then.

    Raises:
        UserError: For anything the user can mend.
    """
    with process.user_errors(OSError, DataError, SourceError, ValueError):
        source, usual, has_splits, classes = _build_source(config)
        target = layout.rename(usual, config.name)
        job = builder.Import(
            kind=config.format or "",
            source=source,
            layout=target,
            rule=config.build_rule(has_splits=has_splits),
            options={
                key: value
                for key, value in vars(config).items()
                if key not in _NOT_OPTIONS
            },
            classes=classes,
            skip_bad=config.skip_bad,
            needs_test=True,
        )
        with tqdm.tqdm(unit=" examples", desc=target.file_name) as bar:
            try:
                outcome = builder.build_population(
                    job,
                    config.folder,
                    overwrite=config.overwrite,
                    on_progress=lambda count: bar.update(count - bar.n),
                )
            except process.Terminated as error:
                error.hint = "the same command goes on from there"
                raise
    print(_describe(outcome, target, source), flush=True)
    return outcome


def _build_source(
    config: PreparationConfig,
) -> tuple[Source, layout.Layout, bool, tuple[str, ...] | None]:
    """Returns the source, its layout, whether it divides, and its classes' names."""
    path = pathlib.Path(config.input or "")
    if config.format == "leaf":
        dataset = leaf.LeafDataset(config.leaf_dataset)
        read = leaf.LeafSource(path=path, dataset=dataset, images=config.celeba_images)
        return read, _LEAF_LAYOUTS[dataset], (path / "train").is_dir(), None
    if config.format == "idx":
        digits = idx.IdxSource(
            splits=_find_idx(config, path),
            assign=None if config.partition is None else _Assignment(config),
        )
        return digits, layout.EMNIST, True, None
    if config.format == "cifar":
        assign = _Assignment(config)
        images = cifar.CifarSource(path=path, assign=assign)
        assign.num_classes = images.num_classes
        usual = layout.CIFAR100
        if images.num_classes == 10:
            usual = layout.rename(layout.PLAIN, "cifar10")
        return images, usual, True, None
    if config.format == "stack_exchange":
        posts = stack_exchange.StackExchangeSource(
            path=path, test_from=config.test_from
        )
        return posts, layout.STACKOVERFLOW, True, None
    if config.format in ("csv", "parquet"):
        columns, names = config.feature_columns, config.labels
        rows = table.TableSource(
            path=path,
            user_column=config.user_column or "",
            label_column=config.label_column or "",
            text_columns=tuple(config.text_columns or ()),
            split_column=config.split_column,
            feature_columns=None if columns is None else tuple(columns),
            labels=None if names is None else tuple(names),
        )
        return rows, layout.PLAIN, config.split_column is not None, rows.classes
    if config.format == "npz":
        with_splits = arrays.ArraySource(path=path)
        return with_splits, layout.PLAIN, _divides(with_splits), None
    kind = image_folder.ImageLayout(config.image_layout.replace("_", "/"))
    by_user = kind is image_folder.ImageLayout.USER_CLASS
    folder = image_folder.ImageFolderSource(
        path=path,
        layout=kind,
        size=(config.image_size, config.image_size),
        grayscale=config.grayscale,
        assign=None if by_user else _Assignment(config),
    )
    return folder, layout.PLAIN, (path / TRAIN).is_dir(), folder.classes


def _divides(source: Source) -> bool:
    """Returns whether a source says what is for training and what for the test."""

    def fail(error: SourceError) -> None:
        raise error

    return next(source.read(fail)).split is not None


def _find_idx(config: PreparationConfig, path: pathlib.Path) -> list[idx.IdxSplit]:
    """Returns the folder's splits, with the writers that the flags name."""
    if not path.is_dir():
        raise ValueError(
            f"`input` must be the folder of the idx files. Found {config.input!r}."
        )
    named = {TRAIN: config.writers, TEST: config.test_writers}
    return [
        dataclasses.replace(split, writers=pathlib.Path(file))
        if (file := named.get(split.split)) is not None
        else split
        for split in idx.find_idx_files(path)
    ]


class _Assignment:
    """Gives images without users clients, by the configuration's partition."""

    def __init__(self, config: PreparationConfig) -> None:
        self._config = config
        self.num_classes = 0
        self._division: Division | None = None

    def __call__(self, split: str, labels: dict[str, np.ndarray]) -> list[str | None]:
        """Returns the client of each image of a split; the training images first."""
        if split == TRAIN:
            partition = self._config.build_partition(num_classes=self.num_classes)
            self._division = partition.divide(
                labels["label"], coarse=labels.get("coarse_label")
            )
            rows = self._division.rows
        elif self._division is None:
            raise ValueError(
                "`input` must have training images, whose division the others follow. "
                f"Found {split} alone."
            )
        else:
            rows = self._division.follow(labels["label"])
        clients: list[str | None] = [None] * len(labels["label"])
        for index, owned in enumerate(rows):
            for row in owned:
                clients[row] = f"client_{index:05d}"
        return clients


def _describe(outcome: builder.Outcome, target: layout.Layout, source: Source) -> str:
    """Returns the last lines: what is in the file, and where all lies."""
    manifest = outcome.manifest
    lines = ["Already there, made of the same input with the same flags:"] * (
        outcome.was_there
    )
    lines.append(f"{'split':<20}{'users':>10}{'examples':>12}")
    for name, counts in manifest.splits.items():
        lines.append(f"{name:<20}{counts['users']:>10,}{counts['examples']:>12,}")
    if manifest.num_skipped:
        lines.append(
            f"{manifest.num_skipped:,} bad records were left out, listed in the "
            "manifest; the first:"
        )
        lines += [f"  {text}" for text in manifest.skipped[:5]]
    for name, text in (
        ("num_without_owner", "posts without an owner were left out"),
        ("num_ignored", "files that are no images were left out"),
    ):
        if getattr(source, name, 0):
            lines.append(f"{getattr(source, name):,} {text}")
    folder = outcome.path.parent
    names = [target.file_name, target.manifest_name]
    names += [target.name_count_file(feature) for feature in source.separators]
    return "\n".join([*lines, "files", *(f"  {folder / name}" for name in names)])
