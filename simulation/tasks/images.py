"""EMNIST and CIFAR, in the files of TFF 0.87."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow_federated as tff

from simulation import image_models
from simulation.model import Model
from simulation.population import layout as layouts
from simulation.population.federated_data import Examples
from simulation.population.partition import Partition, PartitionKind
from simulation.population.sql_data import SqlData, read_splits
from simulation.sources.source import Feature, Kind
from simulation.tasks import stored
from simulation.tasks.options import PARTITION_OPTIONS, TaskOptions
from simulation.tasks.task import Task

EMNIST_SHAPE, CIFAR_SHAPE = (28, 28, 1), (32, 32, 3)
_NUM_CHARACTERS, _NUM_DIGITS, _NUM_LETTERS = 62, 10, 52
_EMNIST_FEATURES = {
    "pixels": Feature(kind=Kind.FLOAT, shape=(28, 28)),
    "label": Feature(kind=Kind.INT64),
}
_CIFAR_FEATURES = {
    "image": Feature(kind=Kind.INT64, shape=CIFAR_SHAPE),
    "label": Feature(kind=Kind.INT64),
}
_EMNIST_COMMAND = (
    "python -m scripts.prepare_data --format=leaf --leaf_dataset=femnist "
    "--input=<folder all_data>, or --format=idx --input=<folder of idx files with "
    "writers>"
)
# Per channel, of CIFAR-10's training images in [0, 1], as widely published.
_CIFAR_MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
_CIFAR_STDDEV = np.array([0.2470, 0.2435, 0.2616], np.float32)
# FEMNIST of FedProx and Upcycled-FL: the letters a to j, which EMNIST calls 36 to 45.
_FIRST_LOWER_CASE, _NUM_AF = 36, 10
_AF_CLIENTS, _AF_CLASSES = 50, 5


def _decode_emnist(features: Mapping[str, np.ndarray], *, first: int = 0) -> Examples:
    """Returns x in [0, 1], 0 the background, and labels from 0 on."""
    x = 1.0 - features["pixels"].reshape([-1, *EMNIST_SHAPE])
    return x, (features["label"] - first).astype(np.int32)


def _decode_cifar(features: Mapping[str, np.ndarray]) -> Examples:
    """Returns x with mean 0 and standard deviation 1 a channel, and labels."""
    x = features["image"].astype(np.float32) / np.float32(255.0)
    return (x - _CIFAR_MEAN) / _CIFAR_STDDEV, features["label"].astype(np.int32)


def build_emnist_character(options: TaskOptions) -> Task:
    """Returns the task `emnist_character`: 62 classes."""
    return _build_emnist(
        options,
        name="emnist_character",
        only_digits=False,
        num_classes=_NUM_CHARACTERS,
        what="digits, upper-case and lower-case letters",
        models={
            "emnist_cnn": image_models.build_emnist_cnn,
            "fedavg_cnn": image_models.build_fedavg_cnn,
            "conv_dropout_cnn": image_models.build_conv_dropout_cnn,
            "logistic_regression": image_models.build_logistic_regression,
        },
    )


def build_emnist_digits(options: TaskOptions) -> Task:
    """Returns the task `emnist_digits`: 10 classes."""
    return _build_emnist(
        options,
        name="emnist_digits",
        only_digits=True,
        num_classes=_NUM_DIGITS,
        what="digits",
        models=_SMALL_MODELS,
    )


def build_emnist_letters(options: TaskOptions) -> Task:
    """Returns the task `emnist_letters`: 52 classes, the digits left out."""
    return _build_emnist(
        options,
        name="emnist_letters",
        only_digits=False,
        num_classes=_NUM_LETTERS,
        what="upper-case and lower-case letters",
        models=_SMALL_MODELS,
        first=_NUM_DIGITS,
    )


_SMALL_MODELS: Mapping[str, Callable[..., Model]] = {
    "emnist_cnn": image_models.build_emnist_cnn,
    "mlp": functools.partial(image_models.build_mlp, hidden_sizes=[256, 128, 16]),
    "small_mlp": functools.partial(image_models.build_mlp, hidden_sizes=[64, 32, 16]),
    "small_cnn": image_models.build_small_cnn,
    "logistic_regression": image_models.build_logistic_regression,
}


def build_femnist_af(options: TaskOptions) -> Task:
    """Returns the task `femnist_af`: the letters a to j, 5 of them a client.

    Source: Li et al. 2020 (FedProx) and the Upcycled-FL experiments, with 50 clients.
    """
    options.check_taken("femnist_af", "data_name", "num_clients", "classes_per_client")
    path, layout = _find_emnist(options)
    partition = Partition(
        kind=PartitionKind.SHARDS,
        num_clients=options.num_clients or _AF_CLIENTS,
        classes_per_client=options.classes_per_client or _AF_CLASSES,
        seed=options.data_seed,
    )

    def keep(features: Mapping[str, np.ndarray]) -> np.ndarray:
        letters = features["label"] - _FIRST_LOWER_CASE
        return (letters >= 0) & (letters < _NUM_AF)

    decode = functools.partial(_decode_emnist, first=_FIRST_LOWER_CASE)
    train, test = stored.divide(
        partition,
        _read(path, "all_train", _EMNIST_FEATURES, decode),
        _read(path, "all_test", _EMNIST_FEATURES, decode),
        keep=keep,
    )
    return Task(
        name="femnist_af",
        description=(
            f"EMNIST's lower-case letters a to j from "
            f"{stored.describe(path, layout)}, their writers left aside: "
            f"{partition.description}"
        ),
        train=train,
        test=test,
        has_test_users=True,
        models=_bind(
            {
                "mlp": functools.partial(
                    image_models.build_mlp, hidden_sizes=[196], dropout_rate=0.5
                ),
                "cnn": image_models.build_three_filter_cnn,
            },
            EMNIST_SHAPE,
            _NUM_AF,
        ),
        metric="accuracy",
        caveats=(stored.PARTITION_CAVEAT,),
        identity={
            **stored.identify(path),
            "partition": partition.description,
        },
    )


def build_cifar10(options: TaskOptions) -> Task:
    """Returns the task `cifar10`."""
    options.check_taken("cifar10", "data_name", *PARTITION_OPTIONS)
    layout = layouts.rename(layouts.PLAIN, options.data_name or "cifar10")
    path = stored.find_file(
        options,
        layout,
        fetch=None,
        command=_CIFAR_COMMAND.format("cifar-10-python.tar.gz"),
    )
    return _build_cifar(
        options,
        path,
        layout,
        num_classes=10,
        build=functools.partial(image_models.build_lenet, hidden_sizes=[384, 32]),
    )


def build_cifar100(options: TaskOptions) -> Task:
    """Returns the task `cifar100`, as TFF divides it unless a partition is given."""
    options.check_taken("cifar100", "synthetic_data", "data_name", *PARTITION_OPTIONS)
    datasets = tff.simulation.datasets.cifar100
    layout = layouts.rename(layouts.CIFAR100, options.data_name)
    build = functools.partial(image_models.build_lenet, hidden_sizes=[128, 32])
    if options.synthetic_data:
        return stored.build_tiny_task(
            "cifar100",
            datasets.get_synthetic(),
            _decode_cifar,
            models=_bind({"lenet": build}, CIFAR_SHAPE, 100),
            metric="accuracy",
        )
    path = stored.find_file(
        options,
        layout,
        fetch=lambda folder: datasets.load_data(cache_dir=folder),
        command=_CIFAR_COMMAND.format("cifar-100-python.tar.gz"),
    )
    return _build_cifar(options, path, layout, num_classes=100, build=build)


_CIFAR_COMMAND = (
    "python -m scripts.prepare_data --format=cifar --input={} --partition=dirichlet"
)


def _build_cifar(
    options: TaskOptions,
    path: pathlib.Path,
    layout: layouts.Layout,
    *,
    num_classes: int,
    build: Callable[..., Model],
) -> Task:
    features = dict(_CIFAR_FEATURES)
    if num_classes == 100:
        features["coarse_label"] = Feature(kind=Kind.INT64)
    stored_train = _read(path, "train", features, _decode_cifar)
    stored_test = _read(path, "test", features, _decode_cifar)
    arranged = stored.arrange(options, stored_train, stored_test)
    how = "users as in the file"
    if arranged.partition is not None:
        how = f"its examples divided anew: {arranged.partition}"
    return Task(
        name=f"cifar{num_classes}",
        description=(
            f"CIFAR-{num_classes} from {stored.describe(path, layout)}, {how}"
        ),
        train=arranged.train,
        test=arranged.test,
        has_test_users=True,
        models=_bind(
            {
                "lenet": build,
                "small_cnn": image_models.build_small_cnn,
                "logistic_regression": image_models.build_logistic_regression,
            },
            CIFAR_SHAPE,
            num_classes,
        ),
        metric="accuracy",
        identity={**stored.identify(path), **arranged.identity},
        # Files of CIFAR have no users but those that a partition made.
        caveats=(stored.PARTITION_CAVEAT,),
    )


def _build_emnist(
    options: TaskOptions,
    *,
    name: str,
    only_digits: bool,
    num_classes: int,
    what: str,
    models: Mapping[str, Callable[..., Model]],
    first: int = 0,
) -> Task:
    options.check_taken(name, "synthetic_data", "data_name", *PARTITION_OPTIONS)
    bound = _bind(models, EMNIST_SHAPE, num_classes)
    if options.synthetic_data:
        if first:
            raise ValueError(
                f"`synthetic_data` must be off for the task {name}: TFF's made-up set "
                "has digits alone. Found True."
            )
        tiny = tff.simulation.datasets.emnist.get_synthetic()
        return stored.build_tiny_task(
            name, tiny, _decode_emnist, models=bound, metric="accuracy"
        )
    path, layout = _find_emnist(options)
    arranged = _arrange_emnist(
        options, path, "digits_only" if only_digits else "all", first=first
    )
    source = stored.describe(path, layout)
    return Task(
        name=name,
        description=(
            f"EMNIST's {what} by writer, from {source}"
            if arranged.partition is None
            else f"EMNIST's {what}, from {source}, their writers left aside: "
            f"{arranged.partition}"
        ),
        train=arranged.train,
        test=arranged.test,
        has_test_users=True,
        models=bound,
        metric="accuracy",
        identity={**stored.identify(path), **arranged.identity},
        caveats=arranged.caveats,
    )


def _arrange_emnist(
    options: TaskOptions, path: pathlib.Path, prefix: str, *, first: int
) -> stored.Arrangement:
    """Returns EMNIST's characters from `first` on, by writer or divided anew."""

    def keep(features: Mapping[str, np.ndarray]) -> np.ndarray:
        return features["label"] >= first

    def decode(features: Mapping[str, np.ndarray]) -> Examples:
        kept = keep(features)
        return _decode_emnist(
            {key: value[kept] for key, value in features.items()}, first=first
        )

    train, test = (
        _read(path, f"{prefix}_{split}", _EMNIST_FEATURES, decode)
        for split in ("train", "test")
    )
    wrap = (lambda data: _LetterData(data=data)) if first else None
    return stored.arrange(options, train, test, keep=keep, wrap=wrap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LetterData:
    """EMNIST without its digits.

    Attributes:
        data: A split with all characters, whose `decode` leaves the digits out.
    """

    data: SqlData

    @property
    def client_ids(self) -> tuple[str, ...]:
        """The writers, also those who wrote digits alone."""
        return self.data.client_ids

    def count(self, client_id: str) -> int:
        """Returns the number of a client's letters."""
        return self.data.count(client_id) - self._digits.get(client_id, 0)

    def load(self, client_id: str) -> Examples:
        """Returns one client's x and y. See `FederatedData`."""
        return self.data.load(client_id)

    @functools.cached_property
    def _digits(self) -> Mapping[str, int]:
        """The number of each client's digits, which have splits of their own."""
        split = self.data.split.replace("all", "digits_only")
        if split not in read_splits(self.data.path):
            return {}
        digits = dataclasses.replace(self.data, split=split)
        return {name: digits.count(name) for name in digits.client_ids}


def _find_emnist(options: TaskOptions) -> tuple[pathlib.Path, layouts.Layout]:
    layout = layouts.rename(layouts.EMNIST, options.data_name)
    path = stored.find_file(
        options,
        layout,
        fetch=lambda folder: tff.simulation.datasets.emnist.load_data(cache_dir=folder),
        command=_EMNIST_COMMAND,
    )
    return path, layout


def _read(
    path: pathlib.Path,
    split: str,
    features: Mapping[str, Feature],
    decode: Callable[[Mapping[str, np.ndarray]], Examples],
) -> SqlData:
    return SqlData(path=path, split=split, features=features, decode=decode)


def _bind(
    models: Mapping[str, Callable[..., Model]],
    shape: tuple[int, int, int],
    num_classes: int,
) -> dict[str, Callable[[], Model]]:
    return {
        name: functools.partial(build, shape, num_classes)
        for name, build in models.items()
    }
