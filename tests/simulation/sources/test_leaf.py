"""Tests for LEAF's files: small ones written here, and real tweets."""

import collections
import gzip
import json
import math
import pathlib
import sys
import tracemalloc

import numpy as np
import pytest

from simulation.sources import json_reader, leaf, source
from simulation.sources.leaf import LeafDataset
from tests.simulation.sources import leaf_files

REAL = pathlib.Path(__file__).parents[4] / "shared" / "data" / "sent140"
TWEET = ["1", "Mon Apr 06", "NO_QUERY", "u", "Hi!", "training"]


def read_one(folder: pathlib.Path, dataset: LeafDataset, x, y, **options):
    """Returns the features of one example, checked against what is declared."""
    path = leaf_files.write(folder, leaf_files.build({"u": ([x], [y])}))
    (record,), bad = leaf_files.read(path, dataset, **options)
    assert not bad
    declared = leaf.LeafSource(path=path, dataset=dataset, **options).features
    assert record.features.keys() == declared.keys()
    for name, value in record.features.items():
        if declared[name].kind is source.Kind.BYTES:
            assert isinstance(value, bytes)
        assert np.shape(value) == declared[name].shape
    return record.features


def read_bad(folder: pathlib.Path, dataset: LeafDataset, x, y, **options) -> str:
    """Returns why an example is bad; another one beside it is read."""
    good = {
        LeafDataset.FEMNIST: [0.5] * 784,
        LeafDataset.SENT140: TWEET,
        LeafDataset.SHAKESPEARE: leaf_files.WINDOW,
        LeafDataset.SYNTHETIC: [0.0, 1.0],
        LeafDataset.CELEBA: "1.png",
    }[dataset]
    good_y = "x" if dataset is LeafDataset.SHAKESPEARE else 1
    path = leaf_files.write(
        folder, leaf_files.build({"u": ([good, x, good], [good_y, y, good_y])})
    )
    records, (error,) = leaf_files.read(path, dataset, **options)
    assert [record.place[-9:] for record in records] == ["example 0", "example 2"]
    assert error.place == f"{path}, user 'u', example 1"
    return error.reason


class TestFemnist:
    def test_pixels_and_label(self, tmp_path):
        x = [1.0] * 784
        x[28 * 3 + 5] = 0.25
        features = read_one(tmp_path, LeafDataset.FEMNIST, x, 61)
        assert features["label"] == 61
        assert features["pixels"].dtype == np.float32
        # The row first: [5, 3] would be the transposed image.
        assert features["pixels"][3, 5] == 0.25
        assert features["pixels"].sum() == 783.25

    @pytest.mark.parametrize(
        ("x", "y", "reason"),
        [
            ([0.5] * 783, 0, "`x` must be a list of 784 numbers. Found 783 values"),
            ([0.5] * 783 + ["1"], 0, "`x` must be a list of 784 numbers"),
            ([0.5] * 783 + [True], 0, "`x` must be a list of 784 numbers"),
            ([[0.5] * 28] * 28, 0, "`x` must be a list of 784 numbers"),
            ("x", 0, "`x` must be a list of 784 numbers. Found 'x'"),
            ([0.5] * 783 + [math.nan], 0, "`x` must be finite. Found nan at 783"),
            ([-math.inf] + [0.5] * 783, 0, "`x` must be finite. Found -inf at 0"),
            ([0.0] * 783 + [255], 0, "`x` must be in [0, 1]. Found 0 to 255"),
            ([0.5] * 784, 62, "`y` must be a whole number in [0, 62). Found 62"),
            ([0.5] * 784, -1, "`y` must be a whole number in [0, 62). Found -1"),
            ([0.5] * 784, "1", "`y` must be a whole number in [0, 62). Found '1'"),
            ([0.5] * 784, 1.5, "`y` must be a whole number in [0, 62). Found 1.5"),
            ([0.5] * 784, True, "`y` must be a whole number in [0, 62). Found True"),
        ],
    )
    def test_bad_examples(self, tmp_path, x, y, reason):
        assert read_bad(tmp_path, LeafDataset.FEMNIST, x, y).startswith(reason)


class TestSent140:
    @pytest.mark.parametrize(
        ("text", "tokens"),
        [
            (
                "@User I'm #happy &amp; well-known!! ",
                "@user i'm # happy & well-known ! !",
            ),
            ("see http://a.b/c?d=e. ok", "see http://a.b/c?d=e. ok"),
            ("masked http  yes", "masked http yes"),
            ("Caf\u00e9 \u65e5\u672c :)", "caf\u00e9 \u65e5\u672c : )"),
            ("'quoted' @ 9", "' quoted ' @ 9"),
            ("", ""),
        ],
    )
    def test_text_and_tokens(self, tmp_path, text, tokens):
        x = TWEET[:4] + [text, "training"]
        features = read_one(tmp_path, LeafDataset.SENT140, x, 0)
        assert features["text"] == text.encode()
        assert features["tokens"] == tokens.encode()
        separators = leaf.LeafSource(
            path=tmp_path, dataset=LeafDataset.SENT140
        ).separators
        assert separators == {"tokens": " "}

    @pytest.mark.parametrize(("y", "label"), [(0, 0), (1, 1), (4, 1)])
    def test_label(self, tmp_path, y, label):
        features = read_one(tmp_path, LeafDataset.SENT140, TWEET, y)
        assert features["label"] == label

    @pytest.mark.parametrize(
        ("x", "y", "reason"),
        [
            (TWEET[:5], 0, "`x` must be 6 strings"),
            ([*TWEET[:5], 1], 0, "`x` must be 6 strings"),
            ("Hi!", 0, "`x` must be 6 strings"),
            (TWEET, 2, "`y` must be 0, 1 or 4. Found 2"),
            (TWEET, "4", "`y` must be 0, 1 or 4. Found '4'"),
            (TWEET, True, "`y` must be 0, 1 or 4. Found True"),
            ([*TWEET[:4], "\ud800", "test"], 0, "a text must be Unicode"),
        ],
    )
    def test_bad_examples(self, tmp_path, x, y, reason):
        assert read_bad(tmp_path, LeafDataset.SENT140, x, y).startswith(reason)


class TestShakespeare:
    def test_window_and_next_character(self, tmp_path):
        features = read_one(
            tmp_path, LeafDataset.SHAKESPEARE, leaf_files.WINDOW, "\u00e9"
        )
        assert features == {"x": leaf_files.WINDOW.encode(), "y": "\u00e9".encode()}

    @pytest.mark.parametrize(
        ("x", "y", "reason"),
        [
            (leaf_files.WINDOW[1:], "a", "`x` must be a string of 80 characters"),
            (leaf_files.WINDOW, "", "`y` must be a string of 1 characters. Found ''"),
            (
                leaf_files.WINDOW,
                "ab",
                "`y` must be a string of 1 characters. Found 'ab'",
            ),
            (leaf_files.WINDOW, 1, "`y` must be a string of 1 characters. Found 1"),
            (list(leaf_files.WINDOW), "a", "`x` must be a string of 80 characters"),
        ],
    )
    def test_bad_examples(self, tmp_path, x, y, reason):
        assert read_bad(tmp_path, LeafDataset.SHAKESPEARE, x, y).startswith(reason)


class TestSynthetic:
    @pytest.mark.parametrize("y", [3, 3.0])
    def test_point_and_class(self, tmp_path, y):
        features = read_one(tmp_path, LeafDataset.SYNTHETIC, [0.1, -2, 3e5], y)
        assert features["x"].dtype == np.float32
        expected = np.array([0.1, -2, 3e5], np.float32)
        np.testing.assert_array_equal(features["x"], expected)
        assert features["label"] == 3
        assert type(features["label"]) is int

    @pytest.mark.parametrize(
        ("x", "y", "reason"),
        [
            ([0.5], 0, "`x` must be a list of 2 numbers. Found 1 values: (0.5,)"),
            ([0.5, 1e39], 0, "`x` must be finite. Found 1e+39 at 1 of 2"),
            ([10**400, 0], 0, "`x` must be finite. Found 10000"),
            ([0.5, None], 0, "`x` must be a list of 2 numbers"),
            ([0.5, 1.0], 2**63, "`y` must be a whole number in [0, 92233720"),
            ([0.5, 1.0], math.inf, "`y` must be a whole number"),
            ([0.5, 1.0], None, "`y` must be a whole number"),
        ],
    )
    def test_bad_examples(self, tmp_path, x, y, reason):
        assert read_bad(tmp_path, LeafDataset.SYNTHETIC, x, y).startswith(reason)

    @pytest.mark.parametrize(
        ("document", "match"),
        [
            (
                leaf_files.build({"u": ([3], [1])}),
                "user 'u', example 0: `x` must be a list of",
            ),
            (
                leaf_files.build({"u": ([[]], [1])}),
                "user 'u', example 0: `x` must be a list of",
            ),
            (leaf_files.build({}), "must have an example"),
            ('{"users', "all_data.json, character 7: must be whole"),
        ],
    )
    def test_files_without_a_first_example(self, tmp_path, document, match):
        reader = leaf.LeafSource(
            path=leaf_files.write(tmp_path, document), dataset=LeafDataset.SYNTHETIC
        )
        with pytest.raises(source.SourceError, match=match):
            _ = reader.features
        bad: list[source.SourceError] = []
        assert not list(reader.read(bad.append))
        assert len(bad) == 1


class TestCeleba:
    @pytest.fixture
    def images(self, tmp_path) -> pathlib.Path:
        image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
        folder = tmp_path / "images"
        folder.mkdir()
        pixels = np.zeros([218, 178, 3], np.uint8)
        # The upper half is red.
        pixels[:109, :, 0] = 200
        image.fromarray(pixels).save(folder / "1.png")
        image.fromarray(pixels[..., 0]).save(folder / "grey.png")
        (folder / "no.png").write_text("no image")
        return folder

    @pytest.mark.parametrize("y", [1, 1.0])
    def test_image_and_label(self, tmp_path, images, y):
        options = {"images": images}
        features = read_one(tmp_path, LeafDataset.CELEBA, "1.png", y, **options)
        image = features["image"]
        assert image.dtype == np.int64 and features["label"] == 1
        assert (image[:40, :, 0] == 200).all() and (image[44:, :, 0] == 0).all()
        assert (image[..., 1:] == 0).all()

    def test_grey_becomes_rgb(self, tmp_path, images):
        options = {"images": images}
        features = read_one(tmp_path, LeafDataset.CELEBA, "grey.png", 0, **options)
        assert (features["image"][0, 0] == [200, 200, 200]).all()

    @pytest.mark.parametrize(
        ("x", "y", "reason"),
        [
            ("2.png", 0, "`x` must be an image in "),
            ("no.png", 0, "`x` must be an image in "),
            ("../images/1.png", 0, "`x` must be the name of a file"),
            ("..", 0, "`x` must be the name of a file"),
            (1, 0, "`x` must be the name of a file"),
            ("1.png", 2, "`y` must be a whole number in [0, 2)"),
        ],
    )
    def test_bad_examples(self, tmp_path, images, x, y, reason):
        options = {"images": images}
        found = read_bad(tmp_path, LeafDataset.CELEBA, x, y, **options)
        assert found.startswith(reason)

    def test_the_folder_is_needed_and_for_others_refused(self, tmp_path):
        path = leaf_files.write(tmp_path, leaf_files.build({}))
        with pytest.raises(ValueError, match="`images` must be the folder"):
            leaf.LeafSource(path=path, dataset=LeafDataset.CELEBA)
        with pytest.raises(ValueError, match="`images` must be the folder"):
            leaf.LeafSource(path=path, dataset=LeafDataset.FEMNIST, images=tmp_path)
        with pytest.raises(source.SourceError, match="none: `images` must be a folder"):
            options = {"images": tmp_path / "none"}
            leaf.LeafSource(path=path, dataset=LeafDataset.CELEBA, **options)

    def test_without_pillow(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "PIL", None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(source.SourceError, match="Install Pillow"):
            options = {"images": tmp_path}
            path = leaf_files.write(tmp_path, leaf_files.build({}))
            leaf.LeafSource(path=path, dataset=LeafDataset.CELEBA, **options)


class TestFiles:
    def test_a_folder_in_order(self, tmp_path):
        last = leaf_files.write(
            tmp_path, leaf_files.build({"b": leaf_files.one(3)}), "all_data_1.json"
        )
        first = leaf_files.write(
            tmp_path,
            leaf_files.build({"z": leaf_files.one(1, 2)}),
            "all_data_0.json.gz",
        )
        leaf_files.write(tmp_path, "no JSON", "readme.txt")
        records, bad = leaf_files.read(tmp_path)
        assert not bad
        assert leaf_files.get_labels(records) == [
            ("z", 1, None),
            ("z", 2, None),
            ("b", 3, None),
        ]
        assert records[1].place == f"{first}, user 'z', example 1"
        reader = leaf.LeafSource(path=tmp_path, dataset=LeafDataset.SYNTHETIC)
        assert reader.files == (first, last)

    def test_train_and_test(self, tmp_path):
        leaf_files.write(
            tmp_path,
            leaf_files.build({"a": leaf_files.one(2)}),
            "test/all_data_test_9.json",
        )
        leaf_files.write(
            tmp_path,
            leaf_files.build({"a": leaf_files.one(0, 1)}),
            "train/all_data_train_9.json",
        )
        leaf_files.write(
            tmp_path,
            leaf_files.build({"c": leaf_files.one(0)}),
            "all_data/all_data.json",
        )
        records, bad = leaf_files.read(tmp_path)
        assert not bad
        assert leaf_files.get_labels(records) == [
            ("a", 0, "train"),
            ("a", 1, "train"),
            ("a", 2, "test"),
        ]
        records, _ = leaf_files.read(tmp_path / "train")
        assert {record.split for record in records} == {None}

    @pytest.mark.parametrize("key", ["users", "num_samples"])
    def test_the_order_of_the_keys_is_free(self, tmp_path, key):
        document = leaf_files.build(
            {"a": leaf_files.one(0, 1), "b": leaf_files.one(2)}, hierarchies=["p", "q"]
        )
        document[key] = document.pop(key)
        records, bad = leaf_files.read(leaf_files.write(tmp_path, document))
        assert not bad
        assert leaf_files.get_labels(records) == [
            ("a", 0, None),
            ("a", 1, None),
            ("b", 2, None),
        ]
        document["num_samples"] = [2, 2]
        records, (error,) = leaf_files.read(leaf_files.write(tmp_path, document))
        assert len(records) == 2
        assert error.place.endswith("user 'b'")

    def test_leafs_remainder_of_a_division_is_no_error(self, tmp_path):
        # LEAF's split_data.py by sample leaves users of one example so.
        document = leaf_files.build({"a": leaf_files.one(0)})
        document["user_data"]["b"] = {"x": [], "y": []}
        records, bad = leaf_files.read(leaf_files.write(tmp_path, document))
        assert len(records) == 1 and not bad

    def test_no_files(self, tmp_path):
        with pytest.raises(source.SourceError, match="must be a file or a folder"):
            leaf_files.read(tmp_path / "none")
        with pytest.raises(source.SourceError, match="must have either .* Found none"):
            leaf_files.read(tmp_path)

    def test_both_layouts(self, tmp_path):
        leaf_files.write(tmp_path, leaf_files.build({}))
        leaf_files.write(tmp_path, leaf_files.build({}), "train/a.json")
        with pytest.raises(source.SourceError, match="must have either .* Found both"):
            leaf_files.read(tmp_path)


class TestStreaming:
    NUM_USERS = 60

    @pytest.fixture
    def path(self, tmp_path, monkeypatch) -> pathlib.Path:
        monkeypatch.setattr(json_reader, "_BLOCK_CHARACTERS", 2**16)
        user = ([[0.123456789] * 100] * 100, [1] * 100)
        return leaf_files.write(
            tmp_path, leaf_files.build({f"u{i}": user for i in range(self.NUM_USERS)})
        )

    def test_the_first_record_needs_no_more_than_its_user(self, path, monkeypatch):
        opened = []
        original = pathlib.Path.open

        def open_and_keep(self, *args, **options):
            opened.append(original(self, *args, **options))
            return opened[-1]

        monkeypatch.setattr(pathlib.Path, "open", open_and_keep)
        reader = leaf.LeafSource(path=path, dataset=LeafDataset.SYNTHETIC)
        records = reader.read(pytest.fail)
        assert next(records).client_id == "u0"
        assert opened[-1].tell() < 2**18 < path.stat().st_size / 16
        records.close()
        assert all(file.closed for file in opened)

    def test_the_memory_is_that_of_a_user(self, path):
        reader = leaf.LeafSource(path=path, dataset=LeafDataset.SYNTHETIC)
        tracemalloc.start()
        try:
            num_records = sum(1 for _ in reader.read(pytest.fail))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert num_records == 100 * self.NUM_USERS
        assert peak < path.stat().st_size / 4


def test_real_tweets():
    path = REAL / "all_data.json.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    records, bad = leaf_files.read(REAL, LeafDataset.SENT140)
    assert not bad
    assert len(records) == 16_025
    assert len({record.client_id for record in records}) == 2_875
    with gzip.open(path) as file:
        data = json.load(file)["user_data"]
    expected = [
        (name, x[4].encode(), y)
        for name, user in data.items()
        for x, y in zip(user["x"], user["y"], strict=True)
    ]
    found = [(r.client_id, r.features["text"], r.features["label"]) for r in records]
    assert found == expected
    words = collections.Counter(
        word for record in records for word in record.features["tokens"].split(b" ")
    )
    # Mentions are masked in these data, and stay whole.
    assert words[b"@user"] > 5_000
    assert b"" not in words and b"&quot" not in words
