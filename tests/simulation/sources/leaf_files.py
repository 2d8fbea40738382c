"""Small files in LEAF's format, and what is read of them."""

import gzip
import json
import pathlib

from simulation.sources import leaf, source
from simulation.sources.leaf import LeafDataset

WINDOW = "First Citizen:\nBefore we proceed".ljust(80)


def build(users: dict, /, **changes) -> dict:
    """Returns a document; users are pairs of x and y."""
    document = {
        "users": list(users),
        "num_samples": [len(x) for x, _ in users.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in users.items()},
    }
    document |= changes
    return {key: value for key, value in document.items() if value is not None}


def write(folder: pathlib.Path, document: object, name="all_data.json"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = document if isinstance(document, str) else json.dumps(document)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def read(path: pathlib.Path, dataset=LeafDataset.SYNTHETIC, **options):
    """Returns the records and the errors."""
    bad: list[source.SourceError] = []
    reader = leaf.LeafSource(path=path, dataset=dataset, **options)
    return list(reader.read(bad.append)), bad


def one(*labels: int) -> tuple[list, list]:
    """Returns the x and y of a user with these labels."""
    return [[float(label)] for label in labels], list(labels)


def get_labels(records: list[source.Record]) -> list[tuple]:
    return [(r.client_id, r.features["label"], r.split) for r in records]
