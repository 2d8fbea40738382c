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

REAL = pathlib.Path(__file__).parents[4] / "shared" / "data" / "sent140"
WINDOW = "First Citizen:\nBefore we proceed".ljust(80)
TWEET = ["1", "Mon Apr 06", "NO_QUERY", "u", "Hi!", "training"]


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


def read_one(folder: pathlib.Path, dataset: LeafDataset, x, y, **options):
    """Returns the features of one example, checked against what is declared."""
    path = write(folder, build({"u": ([x], [y])}))
    (record,), bad = read(path, dataset, **options)
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
        LeafDataset.SHAKESPEARE: WINDOW,
        LeafDataset.SYNTHETIC: [0.0, 1.0],
        LeafDataset.CELEBA: "1.png",
    }[dataset]
    good_y = "x" if dataset is LeafDataset.SHAKESPEARE else 1
    path = write(folder, build({"u": ([good, x, good], [good_y, y, good_y])}))
    records, (error,) = read(path, dataset, **options)
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
        features = read_one(tmp_path, LeafDataset.SHAKESPEARE, WINDOW, "\u00e9")
        assert features == {"x": WINDOW.encode(), "y": "\u00e9".encode()}

    @pytest.mark.parametrize(
        ("x", "y", "reason"),
        [
            (WINDOW[1:], "a", "`x` must be a string of 80 characters"),
            (WINDOW, "", "`y` must be a string of 1 characters. Found ''"),
            (WINDOW, "ab", "`y` must be a string of 1 characters. Found 'ab'"),
            (WINDOW, 1, "`y` must be a string of 1 characters. Found 1"),
            (list(WINDOW), "a", "`x` must be a string of 80 characters"),
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
            (build({"u": ([3], [1])}), "user 'u', example 0: `x` must be a list of"),
            (build({"u": ([[]], [1])}), "user 'u', example 0: `x` must be a list of"),
            (build({}), "must have an example"),
            ('{"users', "all_data.json, character 7: must be whole"),
        ],
    )
    def test_files_without_a_first_example(self, tmp_path, document, match):
        reader = leaf.LeafSource(
            path=write(tmp_path, document), dataset=LeafDataset.SYNTHETIC
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
        path = write(tmp_path, build({}))
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
            path = write(tmp_path, build({}))
            leaf.LeafSource(path=path, dataset=LeafDataset.CELEBA, **options)


def one(*labels: int) -> tuple[list, list]:
    """Returns the x and y of a user with these labels."""
    return [[float(label)] for label in labels], list(labels)


def get_labels(records: list[source.Record]) -> list[tuple]:
    return [(r.client_id, r.features["label"], r.split) for r in records]


class TestFiles:
    def test_a_folder_in_order(self, tmp_path):
        last = write(tmp_path, build({"b": one(3)}), "all_data_1.json")
        first = write(tmp_path, build({"z": one(1, 2)}), "all_data_0.json.gz")
        write(tmp_path, "no JSON", "readme.txt")
        records, bad = read(tmp_path)
        assert not bad
        assert get_labels(records) == [("z", 1, None), ("z", 2, None), ("b", 3, None)]
        assert records[1].place == f"{first}, user 'z', example 1"
        reader = leaf.LeafSource(path=tmp_path, dataset=LeafDataset.SYNTHETIC)
        assert reader.files == (first, last)

    def test_train_and_test(self, tmp_path):
        write(tmp_path, build({"a": one(2)}), "test/all_data_test_9.json")
        write(tmp_path, build({"a": one(0, 1)}), "train/all_data_train_9.json")
        write(tmp_path, build({"c": one(0)}), "all_data/all_data.json")
        records, bad = read(tmp_path)
        assert not bad
        assert get_labels(records) == [
            ("a", 0, "train"),
            ("a", 1, "train"),
            ("a", 2, "test"),
        ]
        records, _ = read(tmp_path / "train")
        assert {record.split for record in records} == {None}

    @pytest.mark.parametrize("key", ["users", "num_samples"])
    def test_the_order_of_the_keys_is_free(self, tmp_path, key):
        document = build({"a": one(0, 1), "b": one(2)}, hierarchies=["p", "q"])
        document[key] = document.pop(key)
        records, bad = read(write(tmp_path, document))
        assert not bad
        assert get_labels(records) == [("a", 0, None), ("a", 1, None), ("b", 2, None)]
        document["num_samples"] = [2, 2]
        records, (error,) = read(write(tmp_path, document))
        assert len(records) == 2
        assert error.place.endswith("user 'b'")

    def test_leafs_remainder_of_a_division_is_no_error(self, tmp_path):
        # LEAF's split_data.py by sample leaves users of one example so.
        document = build({"a": one(0)})
        document["user_data"]["b"] = {"x": [], "y": []}
        records, bad = read(write(tmp_path, document))
        assert len(records) == 1 and not bad

    def test_no_files(self, tmp_path):
        with pytest.raises(source.SourceError, match="must be a file or a folder"):
            read(tmp_path / "none")
        with pytest.raises(source.SourceError, match="must have either .* Found none"):
            read(tmp_path)

    def test_both_layouts(self, tmp_path):
        write(tmp_path, build({}))
        write(tmp_path, build({}), "train/a.json")
        with pytest.raises(source.SourceError, match="must have either .* Found both"):
            read(tmp_path)


class TestBadUsers:
    def check(self, folder: pathlib.Path, document: dict, user: str, reason: str):
        """Checks that a user is told of, and that user "z" is read all the same."""
        path = write(folder, document)
        records, (error,) = read(path)
        assert get_labels(records) == [("z", 7, None)]
        assert error.place == f"{path}, user {user}"
        assert error.reason.startswith(reason)

    @pytest.mark.parametrize(
        ("x", "y", "count", "reason"),
        [
            (
                [[0.0]],
                [1],
                2,
                "`num_samples` must be the number of x and of y. Found 2",
            ),
            ([[0.0]], [1, 1], 2, "`num_samples` must be the number of x and of y"),
            ([[0.0]] * 2, [1], 2, "`num_samples` must be the number of x and of y"),
            ([[0.0]] * 2, [1], 1, "`num_samples` must be the number of x and of y"),
            ([], [], 0, "a user must have examples"),
            ({}, [1], 1, "must have lists `x` and `y`"),
            (None, [1], 1, "must have lists `x` and `y`"),
        ],
    )
    def test_counts(self, tmp_path, x, y, count, reason):
        document = build({"a": (x or [], y), "z": one(7)}, num_samples=[count, 1])
        document["user_data"]["a"]["x"] = x
        self.check(tmp_path, document, "'a'", reason)

    @pytest.mark.parametrize("data", [[], {"x": [[0.0]]}, "x", None])
    def test_data_without_x_and_y(self, tmp_path, data):
        document = build({"a": one(1), "z": one(7)})
        document["user_data"]["a"] = data
        self.check(tmp_path, document, "'a'", "must have lists `x` and `y`")

    def test_not_in_users(self, tmp_path):
        document = build({"a": one(1), "z": one(7)}, users=["z"], num_samples=[1])
        self.check(tmp_path, document, "'a'", "must be in `users`")

    def test_not_in_user_data(self, tmp_path):
        document = build({"a": one(1), "z": one(7)})
        del document["user_data"]["a"]
        self.check(tmp_path, document, "'a'", "must be in `user_data`")

    @pytest.mark.parametrize(
        ("name", "shown", "reason"),
        [
            ("", "''", "a user must have a name"),
            ("\ud800", r"'\ud800'", "a user's name: a text must be Unicode"),
        ],
    )
    def test_names(self, tmp_path, name, shown, reason):
        self.check(tmp_path, build({name: one(1), "z": one(7)}), shown, reason)

    def test_twice_in_a_file(self, tmp_path):
        text = json.dumps(build({"a": one(1), "b": one(7)}))
        path = write(
            tmp_path,
            text.replace('"b"', '"a"')
            .replace('["a", "a"]', '["a"]')
            .replace("[1, 1]", "[1]"),
        )
        records, (error,) = read(path)
        assert get_labels(records) == [("a", 1, None)]
        assert str(error) == f"{path}, user 'a': a user must come once. Found before."

    def test_twice_in_a_folder(self, tmp_path):
        write(tmp_path, build({"a": one(1)}), "0.json")
        path = write(tmp_path, build({"a": one(2), "b": one(3)}), "1.json")
        records, (error,) = read(tmp_path)
        assert get_labels(records) == [("a", 1, None), ("b", 3, None)]
        assert error.place == f"{path}, user 'a'"

    def test_what_on_bad_raises_ends_the_reading(self, tmp_path):
        told = []

        def refuse(error: source.SourceError) -> None:
            told.append(error)
            raise error

        write(tmp_path, '{"users"', "0.json")
        write(tmp_path, build({"a": one(2)}), "1.json")
        reader = leaf.LeafSource(path=tmp_path, dataset=LeafDataset.SENT140)
        with pytest.raises(source.SourceError, match="0.json, character 8"):
            list(reader.read(refuse))
        assert len(told) == 1


class TestDamage:
    @pytest.mark.parametrize(
        ("changes", "place", "reason"),
        [
            ({"users": None}, "", "`users` must be a list. Found None"),
            ({"num_samples": None}, "", "`num_samples` must be a list. Found None"),
            ({"users": "a"}, "", "`users` must be a list. Found 'a'"),
            ({"user_data": None}, "", "must have `user_data`"),
            ({"users": ["a", 12]}, ", users[1]", "must be of str. Found 12"),
            ({"num_samples": [1, "1"]}, ", num_samples[1]", "must be of int. Found"),
            ({"num_samples": [1, True]}, ", num_samples[1]", "must be of int"),
            ({"num_samples": [1]}, "", "`users` must be distinct and as many as"),
            ({"users": ["a", "a"]}, "", "`users` must be distinct and as many as"),
            ({"user_data": [1]}, ", character 58", "must have '{'. Found '['"),
        ],
    )
    def test_a_file_is_left_out_and_the_next_is_read(
        self, tmp_path, changes, place, reason
    ):
        users = {"a": ([WINDOW], ["x"]), "b": ([WINDOW], ["y"])}
        path = write(tmp_path, build(users, **changes), "0.json")
        write(tmp_path, build({"z": users["a"]}), "1.json")
        records, (error,) = read(tmp_path, LeafDataset.SHAKESPEARE)
        assert [record.client_id for record in records] == ["z"]
        assert error.place == f"{path}{place}"
        assert error.reason.startswith(reason)

    @pytest.mark.parametrize("suffix", ["", ".gz"])
    def test_truncated(self, tmp_path, suffix):
        rng = np.random.default_rng(1)
        users = {
            name: (rng.normal(size=[500, 20]).tolist(), [1] * 500) for name in "abcde"
        }
        path = write(tmp_path, build(users), "all_data.json" + suffix)
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 7 // 10])
        records, (error,) = read(path)
        # The users before it are whole.
        assert collections.Counter(r.client_id for r in records) == dict.fromkeys(
            "abc", 500
        )
        assert error.place.startswith(f"{path}, user 'd', character ")
        assert error.reason.startswith("must be whole. Found ")

    def test_not_utf8(self, tmp_path):
        path = write(tmp_path, build({name: ([WINDOW], ["?"]) for name in "ab"}))
        data = path.read_bytes()
        byte = data.rindex(b"?")
        path.write_bytes(data[:byte] + b"\xe9" + data[byte + 1 :])
        records, (error,) = read(path, LeafDataset.SHAKESPEARE)
        assert [record.client_id for record in records] == ["a"]
        assert error.place.startswith(f"{path}, user 'b', character ")
        assert error.reason.startswith("must be UTF-8. Found ")
        assert f"at byte {byte}." in error.reason

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "must have '{'. Found 'its end'"),
            ("hello", "must have '{'. Found 'h'"),
            ("[1]", "must have '{'. Found '['"),
            ('{"users": [1 2]}', "must be JSON. Found Expecting ','"),
        ],
    )
    def test_no_json(self, tmp_path, text, reason):
        path = write(tmp_path, text)
        records, (error,) = read(path, LeafDataset.SHAKESPEARE)
        assert not records
        assert error.place.startswith(f"{path}, character ")
        assert error.reason.startswith(reason)

    def test_what_follows_the_document(self, tmp_path):
        path = write(tmp_path, json.dumps(build({"a": one(1)})) + "{}")
        records, (error,) = read(path)
        assert len(records) == 1
        assert error.reason == "must end here. Found '{'."


class TestStreaming:
    NUM_USERS = 60

    @pytest.fixture
    def path(self, tmp_path, monkeypatch) -> pathlib.Path:
        monkeypatch.setattr(json_reader, "_BLOCK_CHARACTERS", 2**16)
        user = ([[0.123456789] * 100] * 100, [1] * 100)
        return write(tmp_path, build({f"u{i}": user for i in range(self.NUM_USERS)}))

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
    records, bad = read(REAL, LeafDataset.SENT140)
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
