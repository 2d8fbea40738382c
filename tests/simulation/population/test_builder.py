"""Tests for imports: what TFF reads back, interruptions, damage and hostile input.

`toy_source` gives the sources: lists of records.
"""

import hashlib
import json
import multiprocessing
import os
import pathlib
import sqlite3

import numpy as np
import pytest
import tensorflow as tf

from simulation import run_folder
from simulation.population import builder, layout, manifest, split, sql_data
from simulation.population.federated_data import DataError
from simulation.population.split import SplitBy, SplitRule
from simulation.sources.source import (
    TEST,
    TRAIN,
    VALIDATION,
    Feature,
    Kind,
    SourceError,
)
from tests.simulation.population.toy_source import (
    BYTES,
    INT,
    build_job,
    build_source,
    read_rows,
    record,
)

NAME = "data.sqlite"
BY_USER = SplitRule(by=SplitBy.USER, test_fraction=0.2, validation_fraction=0.2)
BY_EXAMPLE = SplitRule(by=SplitBy.EXAMPLE, test_fraction=0.2)


def list_names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_labels(path: pathlib.Path) -> dict[str, dict[str, list[int]]]:
    """Returns the labels of each user in each split, in the file's order."""
    found: dict[str, dict[str, list[int]]] = {}
    for _, name, user, proto in read_rows(path)["examples"]:
        feature = tf.train.Example.FromString(proto).features.feature["label"]
        found.setdefault(name, {}).setdefault(user, []).extend(feature.int64_list.value)
    return found


@pytest.fixture
def out(tmp_path) -> pathlib.Path:
    return tmp_path / "out"


class TestWhatTffReads:
    """TFF's own loaders are given the files, and yield what was put in."""

    def read(self, data, client_id: str) -> list[dict]:
        dataset = data.create_tf_dataset_for_client(client_id)
        return list(dataset.as_numpy_iterator())

    def test_every_kind_and_shape(self, tmp_path, out):
        from tensorflow_federated import simulation as tff

        kinds = {
            "x": Feature(kind=Kind.FLOAT, shape=(2,)),
            "one": Feature(kind=Kind.FLOAT),
            "image": Feature(kind=Kind.INT64, shape=(2, 3)),
            "text": BYTES,
            "label": INT,
        }
        examples = [
            {
                "x": np.array([number, 1e-30], np.float64),
                "one": 0.1 * number,
                "image": np.full([2, 3], number - 2, np.uint8).tolist(),
                "text": b"\xff \0" * number,
                "label": np.int16(number),
            }
            for number in range(2, 6)
        ]
        # Users take turns, and end in another order.
        records = [
            record("ba"[n % 2], TRAIN, **entry) for n, entry in enumerate(examples)
        ]
        read = build_source(tmp_path, records, kinds=kinds)
        outcome = builder.build_population(build_job(read), out)
        assert not outcome.was_there
        dtypes = {
            "x": tf.float32,
            "one": tf.float32,
            "image": tf.int64,
            "text": tf.string,
            "label": tf.int64,
        }
        spec = {n: tf.TensorSpec(kinds[n].shape, dtype) for n, dtype in dtypes.items()}
        path = str(outcome.path)
        theirs = tff.datasets.load_and_parse_sql_client_data(path, spec, TRAIN)
        assert theirs.client_ids == ["a", "b"]
        for user, numbers in (("b", [2, 4]), ("a", [3, 5])):
            found = self.read(theirs, user)
            assert [entry["label"] for entry in found] == numbers
            for entry, expected in zip(
                found, [examples[number - 2] for number in numbers], strict=True
            ):
                assert entry["text"] == expected["text"]
                np.testing.assert_array_equal(entry["image"], expected["image"])
                for name in ("x", "one"):
                    expected_floats = np.float32(expected[name])
                    np.testing.assert_array_equal(entry[name], expected_floats)
        ours = sql_data.SqlData(
            path=outcome.path, split=TRAIN, features=kinds, decode=0
        )
        assert ours.read("a")["label"].tolist() == [3, 5]

    def test_emnist(self, tmp_path, out):
        from tensorflow_federated import simulation as tff

        kinds = {"pixels": Feature(kind=Kind.FLOAT, shape=(28, 28)), "label": INT}

        def make(user, label, where=TRAIN):
            pixels = np.full([28, 28], int(label) / 64, np.float32)
            return record(user, where, pixels=pixels, label=label)

        records = [
            # A label of any type is a label.
            make("f1", np.array(9)),
            make("f1", 10),
            make("f1", np.int32(0), TEST),
            make("f2", np.int64(35)),
            make("f2", 61, TEST),
        ]
        read = build_source(tmp_path, records, kinds=kinds)
        job = build_job(read, layout=layout.EMNIST)
        outcome = builder.build_population(job, out)
        expected = {
            True: [{"f1": [9]}, {"f1": [0]}],
            False: [{"f1": [9, 10], "f2": [35]}, {"f1": [0], "f2": [61]}],
        }
        for only_digits, splits in expected.items():
            loaded = tff.datasets.emnist.load_data(only_digits, cache_dir=str(out))
            for data, users in zip(loaded, splits, strict=True):
                assert data.client_ids == list(users)
                for user, labels in users.items():
                    examples = self.read(data, user)
                    assert [entry["label"] for entry in examples] == labels
                    for entry in examples:
                        pixels = np.full([28, 28], entry["label"] / 64, np.float32)
                        np.testing.assert_array_equal(entry["pixels"], pixels)
        assert outcome.manifest.num_classes == 62
        assert outcome.manifest.splits == {
            "all_test": {"users": 2, "examples": 2},
            "all_train": {"users": 2, "examples": 3},
            "digits_only_test": {"users": 1, "examples": 1},
            "digits_only_train": {"users": 1, "examples": 1},
        }

    def test_cifar100(self, tmp_path, out, rng):
        from tensorflow_federated import simulation as tff

        image = Feature(kind=Kind.INT64, shape=(32, 32, 3))
        kinds = {"image": image, "label": INT, "coarse_label": INT}
        examples = [
            {
                "image": rng.integers(256, size=[32, 32, 3], dtype=np.uint8),
                "label": 7 * number,
                "coarse_label": number,
            }
            for number in range(3)
        ]
        splits = [TRAIN, TEST, TRAIN]
        records = [
            record("0", where, **e) for where, e in zip(splits, examples, strict=True)
        ]
        read = build_source(tmp_path, records, kinds=kinds)
        builder.build_population(build_job(read, layout=layout.CIFAR100), out)
        train, test = tff.datasets.cifar100.load_data(cache_dir=str(out))
        for data, expected in ((train, examples[::2]), (test, examples[1:2])):
            found = self.read(data, "0")
            assert len(found) == len(expected)
            for entry, right in zip(found, expected, strict=True):
                assert entry["image"].dtype == np.uint8
                assert entry.keys() == right.keys()
                for name in right:
                    np.testing.assert_array_equal(entry[name], right[name])

    def test_stackoverflow_and_its_counts(self, tmp_path, out):
        from tensorflow_federated import simulation as tff

        names = ["creation_date", "tags", "title", "tokens", "type"]
        kinds = {name: BYTES for name in names} | {"score": INT}

        def make(user, where, tokens, tags):
            texts = {name: f"{name} {user}".encode() for name in names}
            texts |= {"tokens": tokens.encode(), "tags": tags.encode()}
            return record(user, where, score=len(tokens), **texts)

        records = [
            make("1", TRAIN, "the the  cat .", "a|c#"),
            make("1", TRAIN, "the \u00e9", "a|"),
            make("2", TRAIN, "cat it's", ""),
            make("2", TEST, "only test", "only-test|a"),
            make("3", TRAIN, "", "vb . net"),
            make("10", VALIDATION, "only held out", "held|a"),
        ]
        counted = {"tokens": " ", "tags": "|"}
        read = build_source(tmp_path, records, kinds=kinds, counted=counted)
        builder.build_population(build_job(read, layout=layout.STACKOVERFLOW), out)
        train, heldout, test = tff.datasets.stackoverflow.load_data(cache_dir=str(out))
        assert train.client_ids == ["1", "2", "3"]
        assert (heldout.client_ids, test.client_ids) == (["10"], ["2"])
        for data, user, expected in (
            (train, "1", records[:2]),
            (train, "2", records[2:3]),
            (test, "2", records[3:4]),
            (heldout, "10", records[5:]),
        ):
            right = [dict(sorted(entry.features.items())) for entry in expected]
            assert self.read(data, user) == right
        # As TFF reads the files of its archives.
        with open(out / "stackoverflow.word_count") as file:
            pairs = [line.split() for line in file]
        assert [(word, int(count)) for word, count in pairs] == [
            ("the", 3),
            ("cat", 2),
            (".", 1),
            ("it's", 1),
            ("\u00e9", 1),
        ]
        with open(out / "stackoverflow.tag_count") as file:
            tags = json.load(file)
        # Of users, not of posts: the first has "a" twice.
        assert list(tags.items()) == [("a", 1), ("c#", 1), ("vb . net", 1)]
        assert list_names(out) == [
            "stackoverflow.manifest.json",
            "stackoverflow.sqlite",
            "stackoverflow.tag_count",
            "stackoverflow.word_count",
        ]

    def test_tags_are_of_users_and_ranked(self, tmp_path, out):
        users = {"a": ["x", "x|y"], "b": ["y", "z|y"], "c": ["y|z"]}
        records = [
            record(user, TRAIN, tags=tags.encode())
            for user, texts in users.items()
            for tags in texts
        ]
        read = build_source(
            tmp_path, records, kinds={"tags": BYTES}, counted={"tags": "|"}
        )
        builder.build_population(build_job(read), out)
        counts = json.loads((out / "data.tags_count").read_text())
        assert list(counts.items()) == [("y", 3), ("z", 2), ("x", 1)]


class TestSplits:
    def build(self, tmp_path, records, rule, name="out"):
        job = build_job(build_source(tmp_path, records), rule=rule)
        return builder.build_population(job, tmp_path / name)

    def make(self, sizes: dict[str, int]):
        """Returns records of users who take turns, with labels in their order."""
        return [
            record(user, label=100 * index + number)
            for number in range(max(sizes.values()))
            for index, (user, size) in enumerate(sizes.items())
            if number < size
        ]

    def check_complete(self, found, sizes: dict[str, int]) -> None:
        for index, (user, size) in enumerate(sizes.items()):
            labels = [
                labels for users in found.values() for labels in users.get(user, [])
            ]
            assert sorted(labels) == [100 * index + n for n in range(size)]
        for users in found.values():
            assert all(sorted(labels) == labels for labels in users.values())

    def test_by_the_source(self, tmp_path):
        splits = [TRAIN, TEST, VALIDATION, TRAIN, TEST]
        records = [
            record("ab"[n % 2], where, label=n) for n, where in enumerate(splits)
        ]
        outcome = self.build(tmp_path, records, SplitRule(by=SplitBy.SOURCE))
        assert read_labels(outcome.path) == {
            "train": {"a": [0], "b": [3]},
            "test": {"a": [4], "b": [1]},
            "validation": {"a": [2]},
        }

    def test_by_user(self, tmp_path):
        sizes = {f"user {index}": 1 + index % 3 for index in range(20)}
        outcome = self.build(tmp_path, self.make(sizes), BY_USER)
        found = read_labels(outcome.path)
        self.check_complete(found, sizes)
        assert {name: len(users) for name, users in found.items()} == {
            "train": 12,
            "validation": 4,
            "test": 4,
        }
        assert sum(map(len, found.values())) == len(set().union(*found.values()))
        homes = BY_USER.assign_users(sizes)
        assert all(
            homes[user] == name for name, users in found.items() for user in users
        )
        assert {n: s["users"] for n, s in outcome.manifest.splits.items()} == {
            name: len(users) for name, users in found.items()
        }

    def test_by_example(self, tmp_path):
        sizes = {"one": 1, "two": 2, "ten": 10, "also one": 1}
        outcome = self.build(tmp_path, self.make(sizes), BY_EXAMPLE)
        found = read_labels(outcome.path)
        self.check_complete(found, sizes)
        counts = {
            name: {user: len(labels) for user, labels in users.items()}
            for name, users in found.items()
        }
        assert counts == {
            "train": {"one": 1, "two": 1, "ten": 8, "also one": 1},
            "test": {"two": 1, "ten": 2},
        }
        assert outcome.manifest.splits["test"] == {"users": 2, "examples": 3}

    @pytest.mark.parametrize("rule", [BY_USER, BY_EXAMPLE])
    def test_the_order_of_users_does_not_matter(self, tmp_path, rule, rng):
        records = self.make({f"user {index}": 1 + index % 4 for index in range(12)})
        position = {
            name: rank for rank, name in enumerate(rng.permutation(12).tolist())
        }
        other = sorted(records, key=lambda entry: position[int(entry.client_id[5:])])
        assert [r.client_id for r in other] != [r.client_id for r in records]
        rows = [
            read_rows(self.build(tmp_path, items, rule, name).path)
            for name, items in (("1", records), ("2", other))
        ]
        assert rows[0] == rows[1]
        changed = SplitRule(**(vars(rule) | {"seed": 1}))
        assert read_rows(self.build(tmp_path, other, changed, "3").path) != rows[0]

    def test_metadata_and_index(self, tmp_path):
        outcome = self.build(tmp_path, self.make({"b": 3, "a": 1}), BY_EXAMPLE)
        rows = read_rows(outcome.path)
        assert [row[1:] for row in rows["client_metadata"]] == [
            ("a", "train", 1),
            ("b", "test", 1),
            ("b", "train", 2),
        ]
        assert any(
            "(client_id, split_name)" in str(row) for row in rows["sqlite_master"]
        )

    def test_the_source_does_not_divide(self, tmp_path):
        match = "of a: the source does not say .*--split=user or --split=example"
        with pytest.raises(SourceError, match=match):
            self.build(tmp_path, [record("a")], SplitRule(by=SplitBy.SOURCE))
        assert list_names(tmp_path / "out") == []

    def test_too_few_users(self, tmp_path):
        match = "`split` by user must have at least one user for each split. Found 2"
        with pytest.raises(ValueError, match=match):
            self.build(tmp_path, self.make({"a": 5, "b": 5}), BY_USER)
        assert list_names(tmp_path / "out") == []


def make_many(size: int) -> list:
    """Returns records of 97 users who take turns."""
    return [record(f"user {n % 97}", label=n) for n in range(size)]


@pytest.fixture
def serialized(monkeypatch) -> list:
    """The examples that were serialised so far."""
    done = []
    original = builder.serialize

    def serialize(features, values):
        done.append(values["label"])
        return original(features, values)

    monkeypatch.setattr(builder, "serialize", serialize)
    return done


class TestResume:
    SIZE = 11_000

    @pytest.fixture(scope="class")
    def whole(self, tmp_path_factory):
        """The rows and the manifest of an import that nothing interrupted."""
        folder = tmp_path_factory.mktemp("whole")
        read = build_source(folder, make_many(self.SIZE))
        outcome = builder.build_population(build_job(read, rule=BY_EXAMPLE), folder)
        return read_rows(outcome.path), outcome.manifest

    def check(self, outcome, whole) -> None:
        folder = outcome.path.parent
        assert (read_rows(outcome.path), outcome.manifest) == whole
        assert not outcome.was_there
        assert list_names(folder) == ["data.manifest.json", NAME]
        assert manifest.read_manifest(folder / "data.manifest.json") == whole[1]

    def interrupt(self, tmp_path, out, after: int, **options) -> None:
        """Begins an import that is interrupted after some records."""
        items = [*make_many(after), KeyboardInterrupt()]
        job = build_job(build_source(tmp_path, items), rule=BY_EXAMPLE)
        with pytest.raises(KeyboardInterrupt):
            builder.build_population(job, out, **options)
        assert list_names(out) == [f"{NAME}.staging"]

    def resume(self, tmp_path, out, **options):
        job = build_job(build_source(tmp_path, make_many(self.SIZE)), rule=BY_EXAMPLE)
        return builder.build_population(job, out, **options)

    @pytest.mark.parametrize("after", [0, 1, 5_000, 7_345, 11_000])
    def test_goes_on_where_it_was(self, tmp_path, out, whole, serialized, after):
        self.interrupt(tmp_path, out, after)
        assert serialized == list(range(after))
        progress: list[int] = []
        outcome = self.resume(tmp_path, out, on_progress=progress.append)
        # Every record once, over both.
        assert serialized == list(range(self.SIZE))
        assert progress == [k for k in (5_000, 10_000) if k > after] + [self.SIZE]
        self.check(outcome, whole)

    def test_several_times(self, tmp_path, out, whole, serialized):
        for after in (10, 5_500, 5_500, 10_999):
            self.interrupt(tmp_path, out, after)
        self.check(self.resume(tmp_path, out), whole)
        assert serialized == list(range(self.SIZE))

    def test_after_the_process_was_killed(self, tmp_path, out, whole, serialized):
        items = [*make_many(7_345), lambda: os._exit(9)]
        job = build_job(build_source(tmp_path, items), rule=BY_EXAMPLE)
        process = multiprocessing.get_context("fork").Process(
            target=builder.build_population, args=(job, out)
        )
        process.start()
        process.join(60)
        assert process.exitcode == 9
        assert NAME not in list_names(out)
        self.check(self.resume(tmp_path, out), whole)
        # What was on the disk.
        assert serialized == list(range(5_000, self.SIZE))

    def test_a_signal_while_a_part_is_written(
        self, tmp_path, out, whole, serialized, monkeypatch
    ):
        class Connection(sqlite3.Connection):
            def execute(self, statement, *values):
                result = super().execute(statement, *values)
                if statement == "COMMIT" and len(serialized) == 5_000:
                    raise KeyboardInterrupt
                return result

        connect = sqlite3.connect
        with monkeypatch.context() as patch:
            patch.setattr(
                sqlite3, "connect", lambda *a, **k: connect(*a, factory=Connection, **k)
            )
            with pytest.raises(KeyboardInterrupt):
                self.resume(tmp_path, out)
        self.check(self.resume(tmp_path, out), whole)
        assert serialized == list(range(self.SIZE))

    @pytest.mark.parametrize("when", ["_check", "_format_counts", "Manifest"])
    def test_interrupted_while_the_file_is_written(
        self, tmp_path, out, serialized, monkeypatch, when
    ):
        def fail(*_, **__):
            raise KeyboardInterrupt

        kinds, counted = {"label": INT, "text": BYTES}, {"text": " "}
        records = [record("a", label=n, text=b"x y") for n in range(10)]
        read = build_source(tmp_path, records, kinds=kinds, counted=counted)
        job = build_job(read, rule=BY_EXAMPLE)
        with monkeypatch.context() as patch:
            patch.setattr(builder, when, fail)
            with pytest.raises(KeyboardInterrupt):
                builder.build_population(job, out)
        assert list_names(out) == [f"{NAME}.staging"]
        outcome = builder.build_population(job, out)
        assert serialized == list(range(10))
        assert outcome.manifest.splits["train"]["examples"] == 8
        assert (out / "data.text_count").read_text() == "x 8\ny 8\n"

    @pytest.mark.parametrize(
        "changes",
        [{"options": {"size": 2}}, {"kind": "other"}, {"rule": BY_USER}],
        ids=["options", "kind", "rule"],
    )
    def test_another_import_begins_anew(self, tmp_path, out, serialized, changes):
        self.interrupt(tmp_path, out, 200)
        serialized.clear()
        records = make_many(150)
        job = build_job(
            build_source(tmp_path, records), **({"rule": BY_EXAMPLE} | changes)
        )
        outcome = builder.build_population(job, out)
        assert len(serialized) == 150
        examples = [counts["examples"] for counts in outcome.manifest.splits.values()]
        assert sum(examples) == 150

    def test_a_changed_file_begins_anew(self, tmp_path, out, serialized):
        self.interrupt(tmp_path, out, 200)
        serialized.clear()
        read = build_source(tmp_path, make_many(150))
        read.path.write_text("changed")
        builder.build_population(build_job(read, rule=BY_EXAMPLE), out)
        assert len(serialized) == 150

    def test_the_last_word_is_progress_of_all(self, tmp_path, out):
        progress: list[int] = []
        self.resume(tmp_path, out, on_progress=progress.append)
        assert progress == [5_000, 10_000, self.SIZE]


class TestFailure:
    def test_after_an_error_nothing_is_left(self, tmp_path, out):
        items = [*make_many(6_000), SourceError("line 3", "is wrong")]
        read = build_source(tmp_path, items)
        with pytest.raises(SourceError, match="line 3: is wrong"):
            builder.build_population(build_job(read, rule=BY_EXAMPLE), out)
        assert list_names(out) == []

    @pytest.mark.parametrize("rule", [BY_EXAMPLE, SplitRule(by=SplitBy.SOURCE)])
    def test_no_example_at_all(self, tmp_path, out, rule):
        job = build_job(build_source(tmp_path, []), rule=rule)
        with pytest.raises(
            DataError, match="data.sqlite would have no examples at all"
        ):
            builder.build_population(job, out)
        assert list_names(out) == []

    def replace(self, tmp_path, out, **options):
        """Imports something else over what is there."""
        records = [record("c", TEST, label=2), record("c", TRAIN, label=3)]
        job = build_job(build_source(tmp_path, records), options={"size": 2})
        return builder.build_population(job, out, **options)

    @pytest.mark.parametrize("failing", [NAME, "data.manifest.json"])
    def test_a_crash_while_files_get_their_names(
        self, tmp_path, out, monkeypatch, failing
    ):
        records = [record("a", TRAIN, label=1), record("b", TEST, label=2)]
        first = build_job(build_source(tmp_path, records))
        before = read_rows(builder.build_population(first, out).path)
        replace = os.replace

        def crash(source, target):
            if pathlib.Path(target).name == failing:
                raise OSError("no")
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", crash)
            with pytest.raises(OSError, match="no"):
                self.replace(tmp_path, out, overwrite=True)
        # One of the two, whole, and no manifest of the other.
        assert list_names(out) == [NAME, f"{NAME}.staging"]
        assert (read_rows(out / NAME) == before) == (failing == NAME)
        for again in (
            lambda: builder.build_population(first, out),
            lambda: self.replace(tmp_path, out),
        ):
            with pytest.raises(
                DataError, match="without its manifest; give --overwrite"
            ):
                again()
        outcome = self.replace(tmp_path, out, overwrite=True)
        assert outcome.manifest.options["options"] == {"size": 2}
        assert read_labels(out / NAME) == {"test": {"c": [2]}, "train": {"c": [3]}}
        assert list_names(out) == ["data.manifest.json", NAME]

    @pytest.mark.parametrize("full", ["staging", "partial"])
    def test_a_full_disk(self, tmp_path, out, serialized, monkeypatch, full):
        connect = sqlite3.connect

        def connect_to_small(path, **options):
            connection = connect(path, **options)
            if pathlib.Path(path).suffix == f".{full}":
                connection.execute("PRAGMA max_page_count = 30")
            return connection

        job = build_job(build_source(tmp_path, make_many(6_000)), rule=BY_EXAMPLE)
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", connect_to_small)
            match = "data.sqlite cannot be written: database or disk is full"
            with pytest.raises(DataError, match=match):
                builder.build_population(job, out)
        assert list_names(out) == [f"{NAME}.staging"]
        outcome = builder.build_population(job, out)
        assert sum(s["examples"] for s in outcome.manifest.splits.values()) == 6_000
        if full == "partial":
            assert serialized == list(range(6_000))

    def test_a_staging_file_that_is_none(self, tmp_path, out):
        out.mkdir()
        (out / f"{NAME}.staging").write_bytes(b"hello" * 500)
        job = build_job(build_source(tmp_path, make_many(5)), rule=BY_EXAMPLE)
        match = "file is not a database. .*If data.sqlite.staging is damaged, delete it"
        with pytest.raises(DataError, match=match):
            builder.build_population(job, out)
        (out / f"{NAME}.staging").unlink()
        builder.build_population(job, out)

    def test_what_an_earlier_crash_left_half_is_replaced(self, tmp_path, out):
        out.mkdir()
        (out / f"{NAME}.partial").write_bytes(b"hello" * 500)
        job = build_job(build_source(tmp_path, make_many(5)), rule=BY_EXAMPLE)
        builder.build_population(job, out)
        assert list_names(out) == ["data.manifest.json", NAME]

    def test_a_file_that_lacks_what_was_written(self, tmp_path, out):
        lossy = layout.Layout(
            stem="data", name_splits=lambda where, _: (where,) * (where == TRAIN)
        )
        records = [record("a", TRAIN), record("a", TEST)]
        job = build_job(build_source(tmp_path, records), layout=lossy)
        with pytest.raises(DataError, match="data.sqlite must hold Counter"):
            builder.build_population(job, out)
        assert list_names(out) == []

    def test_a_user_in_two_splits(self, tmp_path, out):
        # As many examples of each split as there must be, but not of the right users.
        names = {(TRAIN, 1): (TRAIN, TEST), (TEST, 2): ()}
        mixing = layout.Layout(
            stem="data", name_splits=lambda *key: names.get(key, key[:1])
        )
        rule = SplitRule(by=SplitBy.USER, test_fraction=0.5)
        homes = {where: user for user, where in rule.assign_users("ab").items()}
        records = [record(homes[TRAIN], label=1), record(homes[TEST], label=2)]
        job = build_job(build_source(tmp_path, records), layout=mixing, rule=rule)
        match = f"data.sqlite: user '{homes[TRAIN]}' must be in one split"
        with pytest.raises(DataError, match=match):
            builder.build_population(job, out)
        assert list_names(out) == []


class TestTwoAtOnce:
    def test_the_second_is_refused(self, tmp_path, out, whole_of_ten):
        told = []

        def begin_another():
            try:
                builder.build_population(job, out)
            except DataError as error:
                told.append(str(error))

        items = [*make_many(5), begin_another, *make_many(10)[5:]]
        job = build_job(build_source(tmp_path, items), rule=BY_EXAMPLE)
        outcome = builder.build_population(job, out)
        assert len(told) == 1
        assert "locked. (Is another import writing it" in told[0]
        assert read_rows(outcome.path) == whole_of_ten

    @pytest.fixture
    def whole_of_ten(self, tmp_path):
        job = build_job(build_source(tmp_path, make_many(10)), rule=BY_EXAMPLE)
        return read_rows(builder.build_population(job, tmp_path / "alone").path)

    def test_others_of_the_same_folder_are_not(self, tmp_path, out):
        def begin_another():
            other = layout.rename(layout.PLAIN, "other")
            job = build_job(inner, rule=BY_EXAMPLE, layout=other)
            builder.build_population(job, out)

        inner = build_source(tmp_path, make_many(7))
        items = [*make_many(5), begin_another]
        outer = build_job(build_source(tmp_path, items), rule=BY_EXAMPLE)
        builder.build_population(outer, out)
        assert list_names(out) == [
            "data.manifest.json",
            "data.sqlite",
            "other.manifest.json",
            "other.sqlite",
        ]


class TestPresent:
    @pytest.fixture
    def job(self, tmp_path, out):
        read = build_source(tmp_path, make_many(20))
        job = build_job(read, rule=BY_EXAMPLE)
        builder.build_population(job, out)
        return job

    def test_the_same_again_is_there(self, job, out):
        before = read_rows(out / NAME)
        outcome = builder.build_population(job, out)
        assert outcome.was_there
        assert outcome.path == out / NAME
        assert outcome.manifest.splits["train"]["users"] == 20
        assert job.source.num_reads == 1
        assert read_rows(out / NAME) == before

    def build_changed(self, job, changes):
        return builder.Import(**(vars(job) | changes))

    @pytest.mark.parametrize(
        "changes",
        [
            {"options": {"size": 2}},
            {"options": {}},
            {"kind": "other"},
            {"skip_bad": True},
            {"rule": BY_USER},
            {"rule": split.SplitRule(**(vars(BY_EXAMPLE) | {"seed": 1}))},
            {"rule": split.SplitRule(**(vars(BY_EXAMPLE) | {"test_fraction": 0.3}))},
        ],
    )
    def test_other_options_are_refused_and_may_replace(self, job, out, changes):
        before = read_rows(out / NAME)
        changed = self.build_changed(job, changes)
        match = "data.sqlite is there, made of other files or with other options.*give "
        with pytest.raises(DataError, match=match + "--overwrite"):
            builder.build_population(changed, out)
        assert job.source.num_reads == 1
        assert read_rows(out / NAME) == before
        outcome = builder.build_population(changed, out, overwrite=True)
        assert not outcome.was_there
        assert job.source.num_reads == 2
        assert builder.build_population(changed, out).was_there
        with pytest.raises(DataError, match="--overwrite"):
            builder.build_population(job, out)

    def test_another_file_is_refused(self, job, out):
        job.source.path.write_text("changed")
        with pytest.raises(DataError, match="--overwrite"):
            builder.build_population(job, out)

    def test_the_same_file_elsewhere_is_the_same(self, job, out, tmp_path):
        moved = tmp_path / "moved" / job.source.path.name
        moved.parent.mkdir()
        job.source.path = job.source.path.rename(moved)
        assert builder.build_population(job, out).was_there

    @pytest.mark.parametrize("damage", [None, "", "{}", "[]"])
    def test_without_a_sound_manifest(self, job, out, damage):
        path = out / "data.manifest.json"
        path.unlink()
        if damage is not None:
            path.write_text(damage)
        with pytest.raises(
            DataError, match="or without its manifest; give --overwrite"
        ):
            builder.build_population(job, out)
        builder.build_population(job, out, overwrite=True)
        assert builder.build_population(job, out).was_there

    def test_files_of_one_name_and_moves_between_folders(self, tmp_path, out):
        read = build_source(tmp_path, make_many(20))
        paths = [tmp_path / name / "1.png" for name in ("cat", "dog")]
        for path in paths:
            path.parent.mkdir()
            path.write_text(f"a {path.parent.name}")
        read.more = tuple(paths)
        job = build_job(read, rule=BY_EXAMPLE)
        outcome = builder.build_population(job, out)
        texts = {"input.txt": "an input", "cat/1.png": "a cat", "dog/1.png": "a dog"}
        assert outcome.manifest.files == {
            name: hashlib.sha256(text.encode()).hexdigest()
            for name, text in texts.items()
        }
        assert builder.build_population(job, out).was_there
        # The first is not the last of its name.
        paths[0].write_text("a lynx")
        with pytest.raises(DataError, match="--overwrite"):
            builder.build_population(job, out)
        paths[0].write_text("a dog")
        paths[1].write_text("a cat")
        with pytest.raises(DataError, match="--overwrite"):
            builder.build_population(job, out)

    def test_the_manifest_says_what_it_is(self, job, out):
        found = manifest.read_manifest(out / "data.manifest.json")
        assert found.source == "list"
        digest = hashlib.sha256(b"an input").hexdigest()
        assert found.files == {"input.txt": digest}
        assert found.options["options"] == {"size": 1}
        assert found.options["split"] == "example"
        assert found.features == {"label": INT}
        assert (found.classes, found.num_classes) == (None, 20)
        assert (found.skipped, found.num_skipped) == ((), 0)

    def test_classes_with_names(self, tmp_path, out):
        read = build_source(tmp_path, [record("a", TRAIN, label=1)])
        job = build_job(read, classes=("cat", "dog", "cow"))
        found = builder.build_population(job, out).manifest
        assert (found.classes, found.num_classes) == (("cat", "dog", "cow"), 3)

    def test_no_labels(self, tmp_path, out):
        read = build_source(
            tmp_path, [record("a", TRAIN, text=b"")], kinds={"text": BYTES}
        )
        found = builder.build_population(build_job(read), out).manifest
        assert (found.classes, found.num_classes) == (None, None)


class TestSkipBad:
    KINDS = {"label": INT, "x": Feature(kind=Kind.FLOAT, shape=(2,))}

    def make(self, user: str, label=0, x=(1.0, 2.0), **more):
        return record(user, TRAIN, label=label, x=np.array(x), **more)

    def make_bad(self) -> list:
        lacking = record("lacking", TRAIN, label=3)
        return [
            self.make("a", 1),
            SourceError("line 2", "is no line"),
            self.make("wide", 99, x=[1.0, 2.0, 3.0]),
            self.make("", 99),
            lacking,
            self.make("b", 2),
            self.make("more", 99, surplus=1),
            self.make("huge", 2**70),
            self.make("word", "7"),
            self.make("\ud800", 99),
            self.make("nul\0", 99),
            SourceError("line 12", "is damaged \ud800"),
            self.make("a", 3),
        ]

    REASONS = [
        "line 2: is no line",
        "line 12: is damaged",
        "of wide: `x` must have shape (2,). Found (3,).",
        "of : the user must not be empty. Found ''.",
        "of lacking: an example must have the features ['label', 'x']. Found ['lab",
        "of more: an example must have the features ['label', 'x']. Found ['label', 's",
        "of huge: `label` must be int64: Value out of range: 1180591620717411303424",
        "of word: `label` must be int64: 'str' object cannot be interpreted",
        "of ?: the user must be Unicode without NUL. Found '\\ud800'.",
        "of nul\0: the user must be Unicode without NUL. Found 'nul\\x00'.",
    ]

    def check(self, outcome) -> None:
        assert read_labels(outcome.path) == {"train": {"a": [1, 3], "b": [2]}}
        found = outcome.manifest
        assert found.num_skipped == len(found.skipped) == len(self.REASONS)
        for told, reason in zip(found.skipped, self.REASONS, strict=True):
            assert told.startswith(reason)
        # Not those of records that were left out.
        assert found.num_classes == 4
        path = outcome.path.with_name("data.manifest.json")
        assert manifest.read_manifest(path) == found

    def test_counts_and_lists(self, tmp_path, out):
        read = build_source(tmp_path, self.make_bad(), kinds=self.KINDS)
        job = build_job(read, skip_bad=True)
        self.check(builder.build_population(job, out))
        self.check(builder.build_population(job, out))

    @pytest.mark.parametrize("after", [1, 3, 6, 10, 12])
    def test_also_over_an_interruption(self, tmp_path, out, after):
        items = [*self.make_bad()[:after], KeyboardInterrupt()]
        read = build_source(tmp_path, items, kinds=self.KINDS)
        with pytest.raises(KeyboardInterrupt):
            builder.build_population(build_job(read, skip_bad=True), out)
        read = build_source(tmp_path, self.make_bad(), kinds=self.KINDS)
        self.check(builder.build_population(build_job(read, skip_bad=True), out))

    @pytest.mark.parametrize("index", [1, 2, 3, 4, 6, 7, 8, 9, 10, 11])
    def test_each_ends_an_import_that_may_not(self, tmp_path, out, index):
        items = [self.make("a"), self.make_bad()[index]]
        read = build_source(tmp_path, items, kinds=self.KINDS)
        with pytest.raises(SourceError, match="^(of|line) "):
            builder.build_population(build_job(read), out)
        assert list_names(out) == []

    def test_not_all_are_listed(self, tmp_path, out):
        errors = [SourceError(f"line {n}", "is wrong") for n in range(1_500)]
        read = build_source(tmp_path, [record("a", TRAIN), *errors])
        found = builder.build_population(build_job(read, skip_bad=True), out).manifest
        assert found.num_skipped == 1_500
        assert len(found.skipped) == 1_000
        assert found.skipped[-1] == "line 999: is wrong"

    def test_all_are_bad(self, tmp_path, out):
        read = build_source(tmp_path, [SourceError("line 1", "is wrong"), record("")])
        with pytest.raises(DataError, match="would have no examples at all"):
            builder.build_population(build_job(read, skip_bad=True), out)
        assert list_names(out) == []


class TestNames:
    HOSTILE = [
        "it's",
        "x' OR '1'='1",
        '"; DROP TABLE examples; --',
        "line\nbreak\r\n",
        "\u65e5\u672c \U0001f600",
        "e\u0301",
        "\u00e9",
        "x" * 100_000,
        "007",
        "7",
        "7.0",
        " 7",
        "1e999",
        "NULL",
        "None",
        "%s{}\\",
        "A",
        "a",
    ]

    @pytest.mark.parametrize("rule", [SplitRule(by=SplitBy.SOURCE), BY_EXAMPLE])
    def test_are_kept_apart_and_given_back(self, tmp_path, out, rule):
        records = [
            record(name, TRAIN, label=10 * index + number)
            for number in range(2)
            for index, name in enumerate(self.HOSTILE)
        ]
        job = build_job(build_source(tmp_path, records), rule=rule)
        outcome = builder.build_population(job, out)
        data = sql_data.SqlData(
            path=outcome.path, split=TRAIN, features={"label": INT}, decode=len
        )
        assert data.client_ids == tuple(sorted(self.HOSTILE))
        count = 2 if rule.by is SplitBy.SOURCE else 1
        for index, name in enumerate(self.HOSTILE):
            labels = data.read(name)["label"].tolist()
            assert len(labels) == count
            assert {label // 10 for label in labels} == {index}


class TestSerialize:
    KINDS = {"x": Feature(kind=Kind.INT64, shape=(2,)), "text": BYTES}

    def test_equal_examples_are_equal_bytes(self):
        first = builder.serialize(self.KINDS, {"x": [1, 2], "text": b"a"})
        other = builder.serialize(
            dict(reversed(self.KINDS.items())), {"text": b"a", "x": np.array([1, 2])}
        )
        assert (
            first == other != builder.serialize(self.KINDS, {"x": [1, 3], "text": b"a"})
        )

    @pytest.mark.parametrize(
        ("values", "match"),
        [
            (
                {"text": b"a"},
                r"must have the features \['text', 'x'\]. Found \['text'\]",
            ),
            ({"x": [1, 2], "text": b"", "y": 1}, r"Found \['text', 'x', 'y'\]"),
            ({"x": [1], "text": b""}, r"`x` must have shape \(2,\). Found \(1,\)"),
            ({"x": 1, "text": b""}, r"`x` must have shape \(2,\). Found \(\)"),
            ({"x": [[1, 2]], "text": b""}, r"Found \(1, 2\)"),
        ],
    )
    def test_wrong_features(self, values, match):
        with pytest.raises(ValueError, match=match):
            builder.serialize(self.KINDS, values)

    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            (Kind.INT64, 1.5),
            (Kind.INT64, np.array(1.0)),
            (Kind.INT64, 2**63),
            (Kind.INT64, np.array(2**63, np.uint64)),
            (Kind.INT64, "1"),
            (Kind.INT64, None),
            (Kind.FLOAT, "1.5"),
            (Kind.FLOAT, b"1.5"),
            (Kind.FLOAT, 1j),
            (Kind.FLOAT, 10**400),
            (Kind.BYTES, "text"),
            (Kind.BYTES, 3),
            (Kind.BYTES, [b"a"]),
        ],
    )
    def test_wrong_types(self, kind, value):
        # Not an example without a value, which protobuf makes of some arrays.
        with pytest.raises(ValueError, match=f"`x` must be {kind.value}: "):
            builder.serialize({"x": Feature(kind=kind)}, {"x": value})

    @pytest.mark.parametrize(
        ("kind", "value", "expected"),
        [
            (Kind.INT64, True, 1),
            (Kind.INT64, -(2**63), -(2**63)),
            (Kind.INT64, np.array(2**63 - 1, np.uint64), 2**63 - 1),
            (Kind.FLOAT, 3, 3.0),
            (Kind.FLOAT, np.float16(0.1), float(np.float16(0.1))),
            (Kind.FLOAT, 0.1, float(np.float32(0.1))),
        ],
    )
    def test_types_that_fit(self, kind, value, expected):
        proto = builder.serialize({"x": Feature(kind=kind)}, {"x": value})
        feature = tf.train.Example.FromString(proto).features.feature["x"]
        found = feature.int64_list if kind is Kind.INT64 else feature.float_list
        assert list(found.value) == [expected]


def test_hash_of_a_file_of_several_blocks(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(os.urandom((1 << 20) + 7))
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert builder.hash_file(path) == expected


def test_the_writer_of_texts_is_the_run_folders(tmp_path, out, monkeypatch):
    """Whole or not at all, and on the disk."""
    durable = {}
    original = run_folder.write_text

    def write(path, text, **options):
        durable[path.name] = options
        original(path, text, **options)

    monkeypatch.setattr(run_folder, "write_text", write)
    read = build_source(
        tmp_path,
        [record("a", TRAIN, text=b"x")],
        kinds={"text": BYTES},
        counted={"text": " "},
    )
    builder.build_population(build_job(read), out)
    assert durable == {
        "data.text_count": {"durable": True},
        "data.manifest.json": {"durable": True},
    }
