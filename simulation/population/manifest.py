"""The manifest beside an imported file: where it is from and what is in it."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from simulation.population.federated_data import DataError
from simulation.sources.source import Feature, Kind

_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an import was made of, and what it made.

    Attributes:
        source: The kind of the source.
        files: The SHA-256 of each source file, by name.
        options: What was asked for: everything that decides the result.
        features: The features of an example.
        splits: For each split, the number of "users" and of "examples".
        classes: The names of the classes, where they have names.
        num_classes: The number of classes, where examples have labels.
        skipped: The records that were left out, with the reason.
        num_skipped: How many they were.
    """

    source: str
    files: Mapping[str, str]
    options: Mapping[str, Any]
    features: Mapping[str, Feature]
    splits: Mapping[str, Mapping[str, int]]
    classes: tuple[str, ...] | None
    num_classes: int | None
    skipped: tuple[str, ...]
    num_skipped: int

    def to_json(self) -> str:
        """Returns the manifest's text."""
        values = dataclasses.asdict(self) | {
            "format": _FORMAT,
            "features": {
                name: {"kind": feature.kind.value, "shape": list(feature.shape)}
                for name, feature in self.features.items()
            },
        }
        return json.dumps(values, indent=2) + "\n"


def read_manifest(path: pathlib.Path) -> Manifest:
    """Returns a manifest from its file.

    Raises:
        DataError: If there is none, or it is damaged.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format") != _FORMAT:
            raise ValueError("another format")
        features = {
            name: Feature(kind=Kind(value["kind"]), shape=tuple(value["shape"]))
            for name, value in values.pop("features").items()
        }
        classes = values.pop("classes")
        return Manifest(
            features=features,
            classes=None if classes is None else tuple(classes),
            skipped=tuple(values.pop("skipped")),
            **values,
        )
    except FileNotFoundError:
        raise DataError(
            f"{path} must be the manifest that scripts/prepare_data.py writes. Found "
            "none."
        ) from None
    except (
        AttributeError,
        KeyError,
        TypeError,
        UnicodeDecodeError,
        ValueError,
    ) as error:
        raise DataError(f"{path} must be a manifest. Found {error!r}.") from error
