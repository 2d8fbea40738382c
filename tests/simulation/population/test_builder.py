"""Tests for imports: what TFF's loaders read back, divided, of any user."""

import hashlib
import json
import os

import numpy as np
import pytest
import tensorflow as tf

from simulation.population import builder, layout, sql_data, staging
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
    BY_EXAMPLE,
    BY_USER,
    BYTES,
    INT,
    build_job,
    build_source,
    list_names,
    read_labels,
    read_rows,
    record,
)


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
        first = staging.serialize(self.KINDS, {"x": [1, 2], "text": b"a"})
        other = staging.serialize(
            dict(reversed(self.KINDS.items())), {"text": b"a", "x": np.array([1, 2])}
        )
        assert (
            first == other != staging.serialize(self.KINDS, {"x": [1, 3], "text": b"a"})
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
            staging.serialize(self.KINDS, values)

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
            staging.serialize({"x": Feature(kind=kind)}, {"x": value})

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
        proto = staging.serialize({"x": Feature(kind=kind)}, {"x": value})
        feature = tf.train.Example.FromString(proto).features.feature["x"]
        found = feature.int64_list if kind is Kind.INT64 else feature.float_list
        assert list(found.value) == [expected]


def test_hash_of_a_file_of_several_blocks(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(os.urandom((1 << 20) + 7))
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert builder.hash_file(path) == expected
