"""Data of one's own: whatever scripts/prepare_data.py made, by its manifest.

The features decide the models: images, vectors, or text.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping

import numpy as np

from simulation import image_models, linear_models, text_models
from simulation.model import Model
from simulation.population import layout as layouts
from simulation.population.federated_data import DataError, Examples
from simulation.population.manifest import Manifest, read_manifest
from simulation.population.sql_data import SqlData
from simulation.sources.source import TEST, TRAIN, Feature, Kind
from simulation.tasks import stored, texts
from simulation.tasks.options import PARTITION_OPTIONS, TaskOptions
from simulation.tasks.task import Task

_COMMAND = "python -m scripts.prepare_data --format=<csv, npz, ...> --input=<file>"
_LABEL = "label"
_CLASSES_CAVEAT = (
    "which classes there are, which was read from all examples, those for the test "
    "included"
)
_TEXT_LENGTH = 25
_BRIGHTEST = 255.0


def build_task(options: TaskOptions) -> Task:
    """Returns the task `own` on the data called `data_name`.

    Raises:
        ValueError: If `data_name` is not given.
        DataError: If there are no such data, or they are not for classification.
    """
    options.check_taken("own", "data_name", "vocabulary_size", *PARTITION_OPTIONS)
    if options.data_name is None:
        raise ValueError(
            "`data_name` must be the name that prepare_data gave the data, for the "
            "task own. Found None."
        )
    layout = layouts.rename(layouts.PLAIN, options.data_name)
    path = stored.find_file(options, layout, fetch=None, command=_COMMAND)
    manifest = read_manifest(path.with_name(layout.manifest_name))
    if _LABEL not in manifest.features or manifest.num_classes is None:
        raise DataError(
            f"{path} must have a feature {_LABEL!r}. Found {sorted(manifest.features)}."
        )
    kind = _choose(manifest, path, options, layout)
    features = {name: manifest.features[name] for name in (kind.feature, _LABEL)}
    train, test = (
        SqlData(path=path, split=name, features=features, decode=kind.decode)
        for name in (TRAIN, TEST)
    )
    arranged = stored.arrange(options, train, test)
    how = ""
    if arranged.partition is not None:
        how = f", its users left aside: {arranged.partition}"
    return Task(
        name=options.data_name,
        description=(
            f"{kind.what} in {manifest.num_classes} classes from "
            f"{stored.describe(path, layout)}{how}"
        ),
        train=arranged.train,
        test=arranged.test,
        has_test_users=True,
        models=kind.models,
        metric="accuracy",
        identity={**stored.identify(path), **kind.identity, **arranged.identity},
        caveats=(_CLASSES_CAVEAT, *kind.caveats, *arranged.caveats),
    )


@dataclasses.dataclass(frozen=True)
class _Kind:
    """How one kind of examples is read and learned."""

    feature: str
    what: str
    decode: Callable[[Mapping[str, np.ndarray]], Examples]
    models: Mapping[str, Callable[[], Model]]
    caveats: tuple[str, ...] = ()
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _choose(
    manifest: Manifest,
    path: pathlib.Path,
    options: TaskOptions,
    layout: layouts.Layout,
) -> _Kind:
    """Returns the kind of the first feature that can be learned from."""
    for name, feature in manifest.features.items():
        if name == _LABEL:
            continue
        if feature.kind is Kind.BYTES:
            counts = path.with_name(layout.name_count_file(name))
            if counts.is_file():
                if options.partition is not None:
                    # Its vocabulary is that of what the file has for training.
                    raise ValueError(
                        "`partition` must be unset for text. Found "
                        f"{options.partition.value!r}."
                    )
                return _build_text(name, counts, manifest, options)
        elif math.prod(feature.shape) > 0 and feature.shape:
            if options.vocabulary_size is not None:
                raise ValueError(
                    "`vocabulary_size` must be unset for data without text. Found "
                    f"{options.vocabulary_size!r}."
                )
            return _build_array(name, feature, manifest)
    raise DataError(
        f"{path} must have images, vectors or counted text beside the label. Found "
        f"{sorted(manifest.features)}."
    )


def _build_array(name: str, feature: Feature, manifest: Manifest) -> _Kind:
    is_image = len(feature.shape) > 1
    shape = (*feature.shape, 1, 1)[: max(3, len(feature.shape))]
    if len(shape) > 3:
        raise DataError(
            f"the feature {name!r} must have at most 3 dimensions. Found "
            f"{feature.shape}."
        )
    scale = np.float32(1 / _BRIGHTEST if feature.kind is Kind.INT64 else 1.0)

    def decode(features: Mapping[str, np.ndarray]) -> Examples:
        x = features[name].astype(np.float32).reshape([-1, *shape]) * scale
        return x, features[_LABEL].astype(np.int32)

    num_classes = int(manifest.num_classes or 0)
    models: dict[str, Callable[[], Model]] = {
        "logistic_regression": functools.partial(
            image_models.build_logistic_regression, shape, num_classes
        ),
        "mlp": functools.partial(
            image_models.build_mlp, shape, num_classes, hidden_sizes=[196]
        ),
    }
    models["double_softmax_regression"] = functools.partial(
        linear_models.build_double_softmax_regression, shape, num_classes
    )
    if num_classes == 2:
        models["one_output_logistic_regression"] = functools.partial(
            linear_models.build_one_output_logistic_regression, shape
        )
    if is_image and min(shape[:2]) >= 4:
        models["small_cnn"] = functools.partial(
            image_models.build_small_cnn, shape, num_classes
        )
    return _Kind(name, "images" if is_image else "vectors", decode, models)


def _build_text(
    name: str, counts: pathlib.Path, manifest: Manifest, options: TaskOptions
) -> _Kind:
    size = options.vocabulary_size or texts.VOCABULARY_SIZE
    words = texts.read_words(counts, size)
    ids = {word: index + 1 for index, word in enumerate(words)}
    decode = functools.partial(
        texts.decode_labelled, ids=ids, sequence_length=_TEXT_LENGTH, feature=name
    )
    models = {
        "lstm": functools.partial(
            text_models.build_sentiment_lstm,
            len(words),
            _TEXT_LENGTH,
            num_classes=int(manifest.num_classes or 0),
        )
    }
    return _Kind(
        name,
        "texts",
        decode,
        models,
        caveats=(texts.describe_vocabulary(words),),
        identity={"vocabulary": texts.digest_words(words)},
    )
