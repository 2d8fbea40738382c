"""Tests for LEAF's files that are wrong: users, and files that are damaged."""

import collections
import json
import pathlib

import numpy as np
import pytest

from simulation.sources import leaf, source
from simulation.sources.leaf import LeafDataset
from tests.simulation.sources import leaf_files


class TestBadUsers:
    def check(self, folder: pathlib.Path, document: dict, user: str, reason: str):
        """Checks that a user is told of, and that user "z" is read all the same."""
        path = leaf_files.write(folder, document)
        records, (error,) = leaf_files.read(path)
        assert leaf_files.get_labels(records) == [("z", 7, None)]
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
        document = leaf_files.build(
            {"a": (x or [], y), "z": leaf_files.one(7)}, num_samples=[count, 1]
        )
        document["user_data"]["a"]["x"] = x
        self.check(tmp_path, document, "'a'", reason)

    @pytest.mark.parametrize("data", [[], {"x": [[0.0]]}, "x", None])
    def test_data_without_x_and_y(self, tmp_path, data):
        document = leaf_files.build({"a": leaf_files.one(1), "z": leaf_files.one(7)})
        document["user_data"]["a"] = data
        self.check(tmp_path, document, "'a'", "must have lists `x` and `y`")

    def test_not_in_users(self, tmp_path):
        document = leaf_files.build(
            {"a": leaf_files.one(1), "z": leaf_files.one(7)},
            users=["z"],
            num_samples=[1],
        )
        self.check(tmp_path, document, "'a'", "must be in `users`")

    def test_not_in_user_data(self, tmp_path):
        document = leaf_files.build({"a": leaf_files.one(1), "z": leaf_files.one(7)})
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
        self.check(
            tmp_path,
            leaf_files.build({name: leaf_files.one(1), "z": leaf_files.one(7)}),
            shown,
            reason,
        )

    def test_twice_in_a_file(self, tmp_path):
        text = json.dumps(
            leaf_files.build({"a": leaf_files.one(1), "b": leaf_files.one(7)})
        )
        path = leaf_files.write(
            tmp_path,
            text.replace('"b"', '"a"')
            .replace('["a", "a"]', '["a"]')
            .replace("[1, 1]", "[1]"),
        )
        records, (error,) = leaf_files.read(path)
        assert leaf_files.get_labels(records) == [("a", 1, None)]
        assert str(error) == f"{path}, user 'a': a user must come once. Found before."

    def test_twice_in_a_folder(self, tmp_path):
        leaf_files.write(tmp_path, leaf_files.build({"a": leaf_files.one(1)}), "0.json")
        path = leaf_files.write(
            tmp_path,
            leaf_files.build({"a": leaf_files.one(2), "b": leaf_files.one(3)}),
            "1.json",
        )
        records, (error,) = leaf_files.read(tmp_path)
        assert leaf_files.get_labels(records) == [("a", 1, None), ("b", 3, None)]
        assert error.place == f"{path}, user 'a'"

    def test_what_on_bad_raises_ends_the_reading(self, tmp_path):
        told = []

        def refuse(error: source.SourceError) -> None:
            told.append(error)
            raise error

        leaf_files.write(tmp_path, '{"users"', "0.json")
        leaf_files.write(tmp_path, leaf_files.build({"a": leaf_files.one(2)}), "1.json")
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
        users = {"a": ([leaf_files.WINDOW], ["x"]), "b": ([leaf_files.WINDOW], ["y"])}
        path = leaf_files.write(tmp_path, leaf_files.build(users, **changes), "0.json")
        leaf_files.write(tmp_path, leaf_files.build({"z": users["a"]}), "1.json")
        records, (error,) = leaf_files.read(tmp_path, LeafDataset.SHAKESPEARE)
        assert [record.client_id for record in records] == ["z"]
        assert error.place == f"{path}{place}"
        assert error.reason.startswith(reason)

    @pytest.mark.parametrize("suffix", ["", ".gz"])
    def test_truncated(self, tmp_path, suffix):
        rng = np.random.default_rng(1)
        users = {
            name: (rng.normal(size=[500, 20]).tolist(), [1] * 500) for name in "abcde"
        }
        path = leaf_files.write(
            tmp_path, leaf_files.build(users), "all_data.json" + suffix
        )
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 7 // 10])
        records, (error,) = leaf_files.read(path)
        # The users before it are whole.
        assert collections.Counter(r.client_id for r in records) == dict.fromkeys(
            "abc", 500
        )
        assert error.place.startswith(f"{path}, user 'd', character ")
        assert error.reason.startswith("must be whole. Found ")

    def test_not_utf8(self, tmp_path):
        path = leaf_files.write(
            tmp_path,
            leaf_files.build({name: ([leaf_files.WINDOW], ["?"]) for name in "ab"}),
        )
        data = path.read_bytes()
        byte = data.rindex(b"?")
        path.write_bytes(data[:byte] + b"\xe9" + data[byte + 1 :])
        records, (error,) = leaf_files.read(path, LeafDataset.SHAKESPEARE)
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
        path = leaf_files.write(tmp_path, text)
        records, (error,) = leaf_files.read(path, LeafDataset.SHAKESPEARE)
        assert not records
        assert error.place.startswith(f"{path}, character ")
        assert error.reason.startswith(reason)

    def test_what_follows_the_document(self, tmp_path):
        path = leaf_files.write(
            tmp_path, json.dumps(leaf_files.build({"a": leaf_files.one(1)})) + "{}"
        )
        records, (error,) = leaf_files.read(path)
        assert len(records) == 1
        assert error.reason == "must end here. Found '{'."
