"""Tests for reading files: what TFF reads, and every file that is wrong."""

import contextlib
import hashlib
import os
import pathlib
import pickle
import re
import shutil
import sqlite3
from concurrent import futures

import cloudpickle
import numpy as np
import pytest
import tensorflow as tf

from simulation.population import sql_data, staging
from simulation.population.federated_data import DataError
from simulation.sources.source import Feature, Kind

FEATURES = {
    "x": Feature(kind=Kind.FLOAT, shape=(2,)),
    "image": Feature(kind=Kind.INT64, shape=(2, 3)),
    "text": Feature(kind=Kind.BYTES),
    "label": Feature(kind=Kind.INT64),
}
# In no order, and with names that sort otherwise than they look.
SIZES = {"b": 3, "a": 1, "B": 2, "\u00e9": 1, "10": 2, "9": 4, "it's": 2, "a\nb": 1}
INDEX = "CREATE INDEX i ON examples (client_id, split_name)"


def make_example(client_id: str, number: int) -> dict:
    value = 100 * list(SIZES).index(client_id) + number
    return {
        "x": np.array([value, -1e-30], np.float32),
        "image": np.arange(6).reshape(2, 3) * value - 2**40,
        "text": f"{client_id} {number}\0".encode(),
        "label": value,
    }


def write_file(path: pathlib.Path, rows, metadata=None, *, index: str = INDEX):
    """Writes (split, client, proto) rows; metadata are their counts unless given."""
    rows = list(rows)
    if metadata is None:
        metadata = {(user, name): 0 for name, user, _ in rows}
        for name, user, _ in rows:
            metadata[user, name] += 1
        metadata = [(*key, count) for key, count in metadata.items()]
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE examples (split_name TEXT, client_id TEXT, "
            "serialized_example_proto BLOB)"
        )
        connection.execute(
            "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, "
            "num_examples INTEGER)"
        )
        connection.execute(index or "SELECT 1")
        connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
        connection.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", metadata)
    connection.close()
    return path


def build_rows(split: str = "train", sizes=SIZES) -> list[tuple[str, str, bytes]]:
    """Returns the rows of all clients, taking turns."""
    return [
        (split, name, staging.serialize(FEATURES, make_example(name, number)))
        for number in range(max(sizes.values()))
        for name, size in sizes.items()
        if number < size
    ]


def decode(features):
    return features["x"], features["label"]


def open_data(path: pathlib.Path, split: str = "train", **options):
    values = {"features": FEATURES, "decode": decode} | options
    return sql_data.SqlData(path=path, split=split, **values)


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    rows = build_rows()
    # Of another split, and between the others.
    rows[4:4] = build_rows("test", {"b": 2, "a": 1})
    return write_file(tmp_path / "a b#c?d%41.sqlite", rows)


def to_list(value):
    """Returns an array as lists; bytes stay what they are, also a 0 at their end."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def check_client(found, client_id: str, count: int) -> None:
    expected = [make_example(client_id, number) for number in range(count)]
    assert found.keys() == FEATURES.keys()
    for name, values in found.items():
        assert values.tolist() == [to_list(entry[name]) for entry in expected]
    dtypes = {name: values.dtype for name, values in found.items()}
    assert dtypes == {"x": "f4", "image": "i8", "text": object, "label": "i8"}


class TestExamples:
    def test_are_those_that_were_written(self, path):
        data = open_data(path)
        assert data.client_ids == tuple(sorted(SIZES))
        for client_id, size in SIZES.items():
            assert data.count(client_id) == size
            check_client(data.read(client_id), client_id, size)
            x, y = data.load(client_id)
            assert x.shape == (size, 2) and x.dtype == np.float32
            assert y.tolist() == [
                make_example(client_id, n)["label"] for n in range(size)
            ]

    def test_of_another_split(self, path):
        data = open_data(path, "test")
        assert data.client_ids == ("a", "b")
        assert [data.count(name) for name in data.client_ids] == [1, 2]
        check_client(data.read("b"), "b", 2)
        assert sql_data.read_splits(path) == {"train", "test"}

    def test_are_those_of_tffs_loader(self, path):
        from tensorflow_federated import simulation as tff

        spec = {
            "x": tf.TensorSpec([2], tf.float32),
            "image": tf.TensorSpec([2, 3], tf.int64),
            "text": tf.TensorSpec([], tf.string),
            "label": tf.TensorSpec([], tf.int64),
        }
        theirs = tff.datasets.load_and_parse_sql_client_data(str(path), spec, "train")
        ours = open_data(path)
        assert list(ours.client_ids) == theirs.client_ids
        for client_id in ours.client_ids:
            # TFF writes the name into its query as it is.
            if "'" in client_id:
                continue
            dataset = theirs.create_tf_dataset_for_client(client_id)
            examples = list(dataset.as_numpy_iterator())
            for name, values in ours.read(client_id).items():
                assert values.tolist() == [to_list(e[name]) for e in examples]

    def test_of_a_file_of_tffs_writer(self, tmp_path):
        from tensorflow_federated import simulation as tff

        def make(client_id):
            examples = [make_example(client_id, n) for n in range(SIZES[client_id])]
            columns = {name: [e[name] for e in examples] for name in FEATURES}
            columns["text"] = np.array(columns["text"], object)
            return tf.data.Dataset.from_tensor_slices(columns)

        path = tmp_path / "theirs.sqlite"
        names = {name: "test" if name == "a" else "train" for name in SIZES}
        tff.datasets.save_to_sql_client_data(
            list(SIZES), make, str(path), split_names_by_client_id=names
        )
        data = open_data(path)
        assert data.client_ids == tuple(sorted(SIZES.keys() - {"a"}))
        for client_id in data.client_ids:
            check_client(data.read(client_id), client_id, SIZES[client_id])
        check_client(open_data(path, "test").read("a"), "a", 1)

    @pytest.mark.parametrize("most", [1, 2, 3, 100])
    def test_at_most_the_first(self, path, most):
        data = open_data(path, max_examples=most)
        for client_id, size in SIZES.items():
            assert data.count(client_id) == min(size, most)
            check_client(data.read(client_id), client_id, min(size, most))

    def test_some_features_alone(self, path):
        features = {name: FEATURES[name] for name in ("x", "label")}
        assert open_data(path, features=features).read("b").keys() == features.keys()

    def test_clients_without_examples_are_none(self, tmp_path):
        metadata = [("b", "train", 1), ("b", "train", 2), ("a", "train", 0)]
        path = write_file(tmp_path / "d", build_rows(sizes={"b": 3}), metadata)
        data = open_data(path)
        assert data.client_ids == ("b",)
        assert data.count("b") == 3


class TestElsewhere:
    @pytest.mark.parametrize("module", [pickle, cloudpickle])
    def test_a_copy_reads_the_same(self, path, module):
        data = open_data(path)
        data.read("a")
        copy = pickle.loads(module.dumps(data))
        assert copy == data
        check_client(copy.read("b"), "b", 3)

    def test_a_decoder_made_on_the_spot_goes_too(self, path):
        factor = 2
        data = open_data(path, decode=lambda f: (f["x"] * factor, f["label"]))
        copy = pickle.loads(cloudpickle.dumps(data))
        np.testing.assert_array_equal(copy.load("9")[0], 2 * data.read("9")["x"])

    def test_several_threads_at_once(self, path, rng):
        data = open_data(path)
        names = [str(name) for name in rng.choice(list(SIZES), size=400)]
        with futures.ThreadPoolExecutor(8) as pool:
            for name, found in zip(names, pool.map(data.read, names), strict=True):
                check_client(found, name, SIZES[name])


def replace_file(path: pathlib.Path) -> None:
    """Puts another file in its place."""
    rows = build_rows(sizes={"b": 1, "it's": 2})
    write_file(path.with_name("other"), rows).replace(path)


def change_file(path: pathlib.Path) -> None:
    """Writes into it, so that it grows."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE more AS SELECT zeroblob(100000) AS zeros")


def touch_file(path: pathlib.Path) -> None:
    """Changes its time alone: as large as it was."""
    later = path.stat().st_mtime_ns + 1
    os.utime(path, ns=(later, later))


class TestPinned:
    @pytest.mark.parametrize("how", [replace_file, change_file, touch_file, os.unlink])
    def test_a_file_must_stay_as_it_is_while_it_is_in_use(self, path, how):
        data = open_data(path)
        check_client(data.read("b"), "b", 3)
        how(path)
        for read in (
            lambda: data.read("b"),
            lambda: data.load("b"),
            lambda: data.count("b"),
            lambda: data.client_ids,
        ):
            with pytest.raises(
                DataError, match="sqlite must stay as it is while it is in use. Found"
            ):
                read()

    def test_a_file_that_others_only_read_stays(self, path):
        data, other = open_data(path), open_data(path, "test")
        path.read_bytes()
        check_client(other.read("b"), "b", 2)
        check_client(data.read("b"), "b", 3)

    def test_the_next_one_reads_the_file_that_is_there(self, path):
        data = open_data(path)
        replace_file(path)
        again = open_data(path)
        assert again.client_ids == ("b", "it's")
        check_client(again.read("b"), "b", 1)
        with pytest.raises(DataError, match="must stay as it is"):
            data.read("b")

    def test_a_copy_is_of_the_file_of_where_it_arrives(self, path):
        packed = pickle.dumps(open_data(path))
        replace_file(path)
        copy = pickle.loads(packed)
        assert copy.client_ids == ("b", "it's")
        check_client(copy.read("b"), "b", 1)
        # There too it must stay.
        touch_file(path)
        with pytest.raises(DataError, match="must stay as it is"):
            copy.read("b")


def write_users(path: pathlib.Path, names: dict[tuple[str, int], tuple[str, int]]):
    """Writes three users of two examples each, some of which are others' examples."""
    keys = [(user, number) for number in range(2) for user in ("a", "b", "9")]
    rows = [
        (
            "train",
            key[0],
            staging.serialize(FEATURES, make_example(*names.get(key, key))),
        )
        for key in keys
    ]
    return write_file(path, rows)


class TestDigest:
    @pytest.fixture
    def users(self, tmp_path) -> pathlib.Path:
        return write_users(tmp_path / "users.sqlite", {})

    @pytest.fixture
    def swapped(self, tmp_path) -> pathlib.Path:
        """The second examples of two users are each other's."""
        names = {("a", 1): ("b", 1), ("b", 1): ("a", 1)}
        return write_users(tmp_path / "swapped.sqlite", names)

    def test_of_the_whole(self, users, swapped):
        expected = hashlib.sha256(users.read_bytes()).hexdigest()[:32]
        assert sql_data.compute_digest(users) == expected
        assert users.stat().st_size == swapped.stat().st_size
        assert sql_data.compute_digest(swapped) != expected

    def test_the_largest_file_that_is_read_whole(self, users, monkeypatch):
        whole = sql_data.compute_digest(users)
        size = users.stat().st_size
        monkeypatch.setattr(sql_data, "_HASHED_WHOLE", size)
        assert sql_data.compute_digest(users) == whole
        monkeypatch.setattr(sql_data, "_HASHED_WHOLE", size - 1)
        sampled = sql_data.compute_digest(users)
        assert len(sampled) == 32 and sampled != whole

    def test_of_a_sample(self, users, swapped, tmp_path, monkeypatch):
        monkeypatch.setattr(sql_data, "_HASHED_WHOLE", 0)
        digest = sql_data.compute_digest(users)
        copy = pathlib.Path(shutil.copy(users, tmp_path / "copy"))
        assert sql_data.compute_digest(copy) == digest
        # One example of a user is looked at, the first; what it cannot tell is said.
        assert sql_data.compute_digest(swapped) == digest
        assert "one example of each" in (sql_data.compute_digest.__doc__ or "")
        names = {("a", 0): ("b", 0), ("b", 0): ("a", 0)}
        firsts = write_users(tmp_path / "firsts.sqlite", names)
        assert firsts.stat().st_size == users.stat().st_size
        assert sql_data.compute_digest(firsts) != digest

    def test_of_users_and_sizes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sql_data, "_HASHED_WHOLE", 0)
        rows = build_rows(sizes={"b": 1})
        variants = [
            rows,
            build_rows("test", {"b": 1}),
            [("train", "c", rows[0][2])],
            rows * 2,
        ]
        paths = [
            write_file(tmp_path / f"{number}.sqlite", variant)
            for number, variant in enumerate(variants)
        ]
        assert len({path.stat().st_size for path in paths}) == 1
        assert len({sql_data.compute_digest(path) for path in paths}) == len(paths)

    def test_a_sample_of_many_users_is_spread_over_all(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sql_data, "_HASHED_WHOLE", 0)
        monkeypatch.setattr(sql_data, "_SAMPLED_USERS", 2)
        rows = [
            ("train", name, staging.serialize(FEATURES, make_example("b", number)))
            for number, name in enumerate("abcdef")
        ]
        digest = sql_data.compute_digest(write_file(tmp_path / "all", rows))
        changed = []
        for index, (split, name, _) in enumerate(rows):
            other = staging.serialize(FEATURES, make_example("b", 99))
            variant = [*rows[:index], (split, name, other), *rows[index + 1 :]]
            path = write_file(tmp_path / name, variant)
            if sql_data.compute_digest(path) != digest:
                changed.append(name)
        assert changed == ["a", "d"]


class TestIndex:
    @pytest.mark.parametrize(
        "index", ["", "CREATE INDEX i ON examples (split_name)"], ids=["none", "other"]
    )
    def test_a_large_file_must_have_one(self, tmp_path, index):
        ((*_, proto),) = build_rows(sizes={"a": 1})
        rows = [("train", f"{i % 10}", proto) for i in range(10_000)]
        path = write_file(tmp_path / "large.sqlite", rows, index=index)
        assert open_data(path).count("3") == 1000
        with sqlite3.connect(path) as connection:
            connection.execute("INSERT INTO examples VALUES (?, ?, ?)", rows[0])
            connection.execute("UPDATE client_metadata SET num_examples = 1001")
        with pytest.raises(DataError, match="a scan of all 10,001 examples") as error:
            open_data(path)
        # The command that it gives makes the file whole.
        command = str(error.value).split("'")[-2]
        assert str(error.value).endswith(f"sqlite3 large.sqlite '{command}'.")
        connection.execute(command)
        connection.close()
        assert open_data(path).count("3") == 1001

    @pytest.mark.parametrize("columns", ["client_id", "client_id, split_name"])
    def test_either_will_do(self, tmp_path, columns, monkeypatch):
        monkeypatch.setattr(sql_data, "_MAX_SCANNED", 3)
        index = f"CREATE INDEX i ON examples ({columns})"
        path = write_file(tmp_path / "d", build_rows(), index=index)
        check_client(open_data(path).read("9"), "9", 4)


class TestErrors:
    def test_no_file(self, tmp_path):
        for path in (tmp_path / "none.sqlite", tmp_path):
            with pytest.raises(DataError, match="must be a file. Found none"):
                open_data(path)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "content", [b"", b"hello", b"SQLite format 3\0" + b"x" * 99]
    )
    def test_no_sqlite_file(self, tmp_path, content):
        path = tmp_path / "d"
        path.write_bytes(content)
        match = "must be a SQLite file with the tables `examples` and `client_metadata`"
        with pytest.raises(DataError, match=match):
            open_data(path)

    @pytest.mark.parametrize("table", ["examples", "client_metadata"])
    def test_a_table_is_missing(self, path, table):
        with sqlite3.connect(path) as connection:
            connection.execute(f"DROP TABLE {table}")
        with pytest.raises(
            DataError, match=f"as TFF reads them: no such table: {table}"
        ):
            open_data(path)

    def test_a_column_is_missing(self, path):
        with sqlite3.connect(path) as connection:
            connection.execute("DROP INDEX i")
            connection.execute("ALTER TABLE examples RENAME COLUMN client_id TO user")
        with pytest.raises(DataError, match="no such column: client_id"):
            open_data(path)

    def test_a_truncated_file(self, path):
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(DataError, match="sqlite (must be a SQLite file|cannot)"):
            data = open_data(path)
            for client_id in data.client_ids:
                data.read(client_id)

    def test_no_such_split(self, path):
        match = r"clients in the split 'heldout'. Found the splits \['test', 'train'\]"
        with pytest.raises(DataError, match=match):
            open_data(path, "heldout")

    def test_no_such_client(self, path):
        with pytest.raises(DataError, match="no client 'B' in test"):
            open_data(path, "test").load("B")

    @pytest.mark.parametrize("most", [0, -1])
    def test_no_examples_asked_for(self, path, most):
        with pytest.raises(
            ValueError, match=f"`max_examples` must be >= 1. Found {most}"
        ):
            open_data(path, max_examples=most)

    @pytest.mark.parametrize("told", [2, 4])
    def test_metadata_that_are_wrong(self, tmp_path, told):
        metadata = [("b", "train", told)]
        path = write_file(tmp_path / "d", build_rows(sizes={"b": 3}), metadata)
        match = f"as client_metadata says, {told}. Found 3"
        with pytest.raises(DataError, match=match):
            open_data(path).read("b")

    @pytest.mark.parametrize(
        "wrong",
        [
            {"y": FEATURES["x"]},
            {"x": Feature(kind=Kind.FLOAT, shape=(3,))},
            {"x": Feature(kind=Kind.INT64, shape=(2,))},
            {"text": Feature(kind=Kind.FLOAT)},
        ],
    )
    def test_features_that_are_not_there(self, path, wrong):
        ((name, feature),) = wrong.items()
        wanted = re.escape(f"'{name}': ('{feature.kind.value}', {feature.shape})")
        match = f"client '10' in train: the examples must have the features .*{wanted}"
        # At once, of the first client: before anything is trained.
        with pytest.raises(DataError, match=match):
            open_data(path, features=FEATURES | wrong)

    def test_an_example_that_is_none(self, path):
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE examples SET serialized_example_proto = x'0aff'")
        with pytest.raises(DataError, match="client '10' in train: the examples must"):
            open_data(path)

    @pytest.mark.parametrize("client_id", ["10", "b"])
    def test_a_later_example_that_is_none(self, path, client_id):
        with sqlite3.connect(path) as connection:
            connection.execute(
                "UPDATE examples SET serialized_example_proto = x'0aff' WHERE rowid = "
                "(SELECT MAX(rowid) FROM examples WHERE client_id = ?)",
                [client_id],
            )
        data = open_data(path)
        check_client(data.read("9"), "9", 4)
        match = f"client '{client_id}' in train: the examples must"
        with pytest.raises(DataError, match=match):
            data.load(client_id)

    def test_values_that_are_not_finite(self, tmp_path):
        features = make_example("a", 0) | {"x": np.array([np.nan, 0], np.float32)}
        row = ("train", "a", staging.serialize(FEATURES, features))
        data = open_data(write_file(tmp_path / "d", [row]))
        with pytest.raises(DataError, match="`x of client a` must be finite"):
            data.load("a")
