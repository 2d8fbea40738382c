"""Tests for the manifest: what is written is read, and damage is told."""

import json
import pathlib

import pytest

from simulation.population import manifest
from simulation.population.federated_data import DataError
from simulation.sources.source import Feature, Kind


def build(**changes) -> manifest.Manifest:
    values = {
        "source": "list",
        "files": {"a/\u00e9 '\".txt": "0" * 64},
        "options": {"size": 1, "names": ["a"], "deep": {"x": None}, "half": 0.5},
        "features": {
            "x": Feature(kind=Kind.FLOAT, shape=(2, 3)),
            "tokens": Feature(kind=Kind.BYTES),
            "label": Feature(kind=Kind.INT64),
        },
        "splits": {"train": {"users": 2, "examples": 5}},
        "classes": ("cat", "\u72ac"),
        "num_classes": 2,
        "skipped": ("line 1: bad\nworse", "\ud800"),
        "num_skipped": 9,
    }
    return manifest.Manifest(**(values | changes))


def write(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "data.manifest.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"classes": None, "num_classes": None, "features": {}, "skipped": ()},
        {"classes": (), "splits": {}},
    ],
)
def test_round_trip(tmp_path, changes):
    written = build(**changes)
    read = manifest.read_manifest(write(tmp_path, written.to_json()))
    assert read == written
    assert list(read.features) == list(written.features)
    assert read != build(num_skipped=10)


def test_equal_manifests_have_equal_texts():
    assert build().to_json() == build().to_json() != build(num_classes=3).to_json()


def test_missing(tmp_path):
    match = "data.manifest.json must be the manifest that scripts/prepare_data.py"
    with pytest.raises(DataError, match=match):
        manifest.read_manifest(tmp_path / "data.manifest.json")


@pytest.mark.parametrize("text", ["", "{", "null", "3", "[]", "{}", '"a"', "[1, 2]"])
def test_no_manifest(tmp_path, text):
    with pytest.raises(DataError, match="must be a manifest. Found"):
        manifest.read_manifest(write(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", 2),
        ("format", None),
        ("features", []),
        ("features", {"x": {"kind": "complex", "shape": []}}),
        ("features", {"x": {"kind": "float"}}),
        ("features", {"x": {"kind": "float", "shape": None}}),
        ("features", {"x": 3}),
        ("classes", 3),
        ("skipped", None),
        ("surplus", 1),
    ],
)
def test_damaged(tmp_path, name, value):
    values = json.loads(build().to_json()) | {name: value}
    with pytest.raises(DataError, match="must be a manifest. Found"):
        manifest.read_manifest(write(tmp_path, json.dumps(values)))


@pytest.mark.parametrize("name", [*vars(build()), "format"])
def test_something_is_missing(tmp_path, name):
    values = json.loads(build().to_json())
    del values[name]
    with pytest.raises(DataError, match="must be a manifest. Found"):
        manifest.read_manifest(write(tmp_path, json.dumps(values)))


@pytest.mark.parametrize("cut", [1, 100, -3])
def test_truncated(tmp_path, cut):
    with pytest.raises(DataError, match="must be a manifest. Found"):
        manifest.read_manifest(write(tmp_path, build().to_json()[:cut]))


def test_not_utf8(tmp_path):
    path = write(tmp_path, build().to_json())
    path.write_bytes(path.read_bytes().replace(b"list", b"l\xefst"))
    with pytest.raises(DataError, match="must be a manifest. Found UnicodeDecodeErr"):
        manifest.read_manifest(path)
