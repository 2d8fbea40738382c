"""Tests for data of one's own: vectors, images and text by their manifest."""

import pathlib

import numpy as np
import pytest

from simulation.population import layout, sql_data
from simulation.population.federated_data import DataError
from simulation.population.partition import PartitionKind
from simulation.sources import arrays, table
from simulation.sources.source import TEST, TRAIN, Feature, Kind
from simulation.tasks import TaskOptions, load_task
from tests.simulation.tasks import files

_SYNTHETIC = (
    pathlib.Path(__file__).parents[4]
    / "shared/data/upcycled_synthetic/synthetic_0_0.npz"
)
MINE = layout.rename(layout.PLAIN, "mine")


def load(folder, **options):
    return load_task(
        "own", TaskOptions(data_dir=folder, **{"data_name": "mine", **options})
    )


def check(task, rows, scale=1.0) -> None:
    """Compares all clients with the rows."""
    for split, data in ((TRAIN, task.train), (TEST, task.test)):
        expected = files.gather(rows, split)
        assert data.client_ids == tuple(expected)
        for client_id, features in expected.items():
            x, y = data.load(client_id)
            assert x.dtype == np.float32 and y.dtype == np.int32
            assert y.tolist() == features["label"].tolist()
            flat = features["x"].reshape([len(y), -1]) * scale
            np.testing.assert_allclose(x.reshape([len(y), -1]), flat, rtol=1e-6)


class TestArrays:
    def test_vectors(self, tmp_path):
        x = np.random.default_rng(0).normal(size=[12, 5]).astype(np.float32)
        rows = files.write_own(tmp_path, list(x))
        task = load(tmp_path)
        check(task, rows)
        assert task.name == "mine" and "vectors in 3 classes" in task.description
        assert task.train.load("a")[0].shape == (3, 5, 1, 1)
        assert list(task.models) == [
            "logistic_regression",
            "mlp",
            "double_softmax_regression",
        ]
        assert task.build_model().num_parameters == 6 * 3
        assert task.build_model("mlp").num_parameters == 6 * 196 + 197 * 3
        path = tmp_path / "mine.sqlite"
        assert task.identity == {
            "file": "mine.sqlite",
            "digest": sql_data.compute_digest(path),
        }
        # Which classes there are is not of the training examples alone.
        (caveat,) = task.caveats
        assert "which classes there are" in caveat
        assert "those for the test included" in caveat

    def test_one_output_is_for_two_classes(self, tmp_path):
        rows = [
            (
                "a",
                (TRAIN, TEST)[index // 2],
                {"x": np.full(3, index, np.float32), "label": index % 2},
            )
            for index in range(4)
        ]
        features = {"x": Feature(kind=Kind.FLOAT, shape=(3,)), "label": files.NUMBER}
        files.write(tmp_path / "two", MINE, rows, features)
        task = load(tmp_path / "two")
        name = "one_output_logistic_regression"
        assert task.build_model(name).num_parameters == 4
        assert sorted(task.train.load("a")[1].tolist()) == [0, 1]
        # With a third class its loss would take it for the first.
        rows.append(("a", TRAIN, {"x": np.zeros(3, np.float32), "label": 2}))
        files.write(tmp_path / "three", MINE, rows, features)
        with pytest.raises(ValueError, match=f"must be one of .* Found '{name}'"):
            load(tmp_path / "three").build_model(name)

    def test_pictures_of_bytes_are_in_0_to_1(self, tmp_path):
        x = np.random.default_rng(0).integers(256, size=[12, 6, 4, 3])
        rows = files.write_own(tmp_path, list(x), kind=Kind.INT64)
        task = load(tmp_path)
        check(task, rows, 1 / 255)
        assert task.train.load("a")[0].shape == (3, 6, 4, 3)
        assert "images in 3 classes" in task.description
        assert "small_cnn" in task.models
        # 3x3 from 3 to 16, from 16 to 32, and 1x1x32 that two poolings leave.
        parameters = 27 * 16 + 16 + 9 * 16 * 32 + 32 + 32 * 3 + 3
        assert task.build_model("small_cnn").num_parameters == parameters

    def test_gray_pictures_of_floats_stay_as_they_are(self, tmp_path):
        x = np.random.default_rng(0).uniform(size=[12, 8, 8]).astype(np.float32)
        rows = files.write_own(tmp_path, list(x))
        task = load(tmp_path)
        check(task, rows)
        assert task.train.load("b")[0].shape == (3, 8, 8, 1)

    def test_a_picture_that_is_too_small_to_be_pooled_twice(self, tmp_path):
        files.write_own(tmp_path, list(np.zeros([12, 8, 3], np.float32)))
        assert "small_cnn" not in load(tmp_path).models

    def test_more_dimensions(self, tmp_path):
        files.write_own(tmp_path, list(np.zeros([12, 2, 2, 2, 2], np.float32)))
        with pytest.raises(
            DataError, match="'x' must have at most 3 dimensions. Found"
        ):
            load(tmp_path)

    def test_a_vocabulary_is_for_text(self, tmp_path):
        files.write_own(tmp_path, list(np.zeros([12, 2], np.float32)))
        with pytest.raises(
            ValueError, match="`vocabulary_size` must be unset .* text. Found 5"
        ):
            load(tmp_path, vocabulary_size=5)

    def test_names_of_classes_count_also_those_without_an_example(self, tmp_path):
        rows = [
            ("a", split, {"x": np.zeros(2, np.float32), "label": 0})
            for split in (TRAIN, TEST)
        ]
        features = {"x": Feature(kind=Kind.FLOAT, shape=(2,)), "label": files.NUMBER}
        files.write(tmp_path, MINE, rows, features, classes=("no", "yes", "perhaps"))
        assert load(tmp_path).build_model().num_parameters == 3 * 3


class TestPartition:
    SHARDS = {
        "partition": PartitionKind.SHARDS,
        "num_clients": 3,
        "classes_per_client": 2,
    }

    def read(self, data) -> list[tuple[float, int, str]]:
        """Returns the first number, the label and the client of all examples."""
        return sorted(
            (float(x.flat[0]), int(label), client_id)
            for client_id in data.client_ids
            for x, label in zip(*data.load(client_id), strict=True)
        )

    def test_examples_are_those_of_the_rows(self, tmp_path):
        x = np.arange(24, dtype=np.float32).reshape([12, 2])
        rows = files.write_own(tmp_path, list(x))
        task = load(tmp_path, **self.SHARDS)
        for data, split in ((task.train, TRAIN), (task.test, TEST)):
            expected = [
                (features["x"][0], features["label"])
                for _, where, features in rows
                if where == split
            ]
            found = self.read(data)
            assert [row[:2] for row in found] == sorted(expected)
            assert {row[2] for row in found} == set(task.train.client_ids)
            for client_id in data.client_ids:
                assert len(set(data.load(client_id)[1])) == 2

    def test_a_fraction_is_held_out(self, tmp_path):
        x = np.arange(24, dtype=np.float32).reshape([12, 2])
        rows = files.write_own(tmp_path, list(x))
        task = load(tmp_path, test_fraction=0.25, **self.SHARDS)
        train, test = self.read(task.train), self.read(task.test)
        assert len(train) == 9 and len(test) == 3
        expected = [(features["x"][0], features["label"]) for _, _, features in rows]
        assert sorted(row[:2] for row in train + test) == sorted(expected)

    def test_it_is_in_description_identity_and_caveats(self, tmp_path):
        files.write_own(tmp_path, list(np.zeros([12, 2], np.float32)))
        plain, shards = load(tmp_path), load(tmp_path, **self.SHARDS)
        held_out = load(tmp_path, test_fraction=0.25, **self.SHARDS)
        assert shards.description == (
            f"{plain.description}, its users left aside: 3 clients, at most 2 classes "
            "a client, seed 0"
        )
        assert held_out.description.startswith(shards.description)
        assert plain.identity.items() < shards.identity.items()
        assert shards.identity.items() < held_out.identity.items()
        for task in (shards, held_out):
            classes, divided = task.caveats
            assert "which classes there are" in classes
            assert "which followed from their labels" in divided

    def test_numbers_that_are_no_bytes_stay_as_they_are(self, tmp_path):
        x = np.arange(24).reshape([12, 2]) * 100 - 300
        files.write_own(tmp_path, list(x), kind=Kind.INT64)
        whole = self.read(load(tmp_path).train)
        divided = self.read(load(tmp_path, **self.SHARDS).train)
        assert [row[:2] for row in divided] == [row[:2] for row in whole]
        assert whole[0][0] < -1 and whole[-1][0] > 4

    def test_text_is_not_divided(self, tmp_path):
        files.write_tweets(tmp_path, MINE)
        with pytest.raises(
            ValueError, match="`partition` must be unset for text. Found 'shards'"
        ):
            load(tmp_path, partition=PartitionKind.SHARDS)


class TestTexts:
    def test_the_counted_feature(self, tmp_path):
        files.write_tweets(tmp_path, MINE)
        task = load(tmp_path, vocabulary_size=2)
        # happy is 1, so 2, others 3.
        assert task.train.load("u1")[0][:, :5].tolist() == [
            [2, 2, 2, 1, 3],
            [2, 3, 0, 0, 0],
        ]
        assert task.train.load("u1")[1].tolist() == [1, 0]
        assert "texts in 2 classes" in task.description
        classes, vocabulary = task.caveats
        assert "which classes there are" in classes
        assert "the 2 words of the vocabulary" in vocabulary
        assert task.build_model().num_parameters == 4 * 300 + 351_490

    def test_the_vocabulary_is_in_the_identity(self, tmp_path):
        files.write_tweets(tmp_path, MINE)
        two, three, again = (
            load(tmp_path, vocabulary_size=size).identity for size in (2, 3, 2)
        )
        assert two == again
        assert two["vocabulary"] != three["vocabulary"]
        # The file is the same.
        assert {**two, "vocabulary": ""} == {**three, "vocabulary": ""}

    def test_text_that_nobody_counted(self, tmp_path):
        files.write_tweets(tmp_path, MINE, counted=None)
        with pytest.raises(
            DataError,
            match=r"counted text beside the label. Found \['label', 'tokens'\]",
        ):
            load(tmp_path)


class TestErrors:
    def test_no_name(self, tmp_path):
        with pytest.raises(ValueError, match="`data_name` must be .* Found None"):
            load_task("own", TaskOptions(data_dir=tmp_path))

    def test_a_name_that_is_none(self, tmp_path):
        with pytest.raises(ValueError, match="`name` must be made of .* Found '../x'"):
            load(tmp_path, data_name="../x")

    def test_no_manifest(self, tmp_path):
        files.write_own(tmp_path, list(np.zeros([12, 2], np.float32)))
        (tmp_path / "mine.manifest.json").unlink()
        with pytest.raises(DataError, match="mine.manifest.json must be the manifest"):
            load(tmp_path)
        (tmp_path / "mine.manifest.json").write_text("{}")
        with pytest.raises(DataError, match="mine.manifest.json must be a manifest"):
            load(tmp_path)

    def test_no_label(self, tmp_path):
        rows = [(*row[:2], {"tokens": row[2]["tokens"]}) for row in files.TWEETS]
        files.write(tmp_path, MINE, rows, {"tokens": files.TEXT})
        with pytest.raises(
            DataError,
            match=r"mine.sqlite must have a feature 'label'. Found \['tokens'",
        ):
            load(tmp_path)

    def test_nothing_but_a_label(self, tmp_path):
        rows = [("a", split, {"label": 1}) for split in (TRAIN, TEST)]
        files.write(tmp_path, MINE, rows, {"label": files.NUMBER})
        with pytest.raises(
            DataError, match="must have images, vectors or counted text"
        ):
            load(tmp_path)

    def test_no_test_data(self, tmp_path):
        rows = [("a", TRAIN, {"x": np.zeros(2, np.float32), "label": 0})]
        features = {"x": Feature(kind=Kind.FLOAT, shape=(2,)), "label": files.NUMBER}
        files.write(tmp_path, MINE, rows, features)
        with pytest.raises(DataError, match="clients in the split 'test'. Found"):
            load(tmp_path)


def read_all(reader, split=None) -> files.Rows:
    def fail(error):
        raise error

    return [
        (record.client_id, record.split or split[index % 2], dict(record.features))
        for index, record in enumerate(reader.read(fail))
    ]


def test_a_table(tmp_path):
    lines = ["who,kind,height,width"]
    lines += [f"u{i % 3},{'small' if i % 4 else 'big'},{i},{-i / 2}" for i in range(24)]
    (tmp_path / "things.csv").write_text("\n".join(lines) + "\n")
    reader = table.TableSource(
        path=tmp_path / "things.csv", user_column="who", label_column="kind"
    )
    rows = read_all(reader, (TRAIN, TEST))
    files.write(tmp_path, MINE, rows, reader.features, classes=reader.classes)
    task = load(tmp_path)
    check(task, rows)
    x, y = task.train.load("u0")
    assert x[..., 0, 0].tolist() == [[i, -i / 2] for i in (0, 6, 12, 18)]
    assert y.tolist() == [0, 1, 0, 1]


@pytest.mark.skipif(
    not _SYNTHETIC.is_file(), reason=f"the authors' data are absent: {_SYNTHETIC}"
)
def test_the_authors_synthetic_data(tmp_path):
    reader = arrays.ArraySource(path=_SYNTHETIC)
    rows = [row for row in read_all(reader) if int(row[0]) < 5]
    files.write(tmp_path, MINE, rows, reader.features)
    task = load(tmp_path)
    check(task, rows)
    with np.load(_SYNTHETIC) as published:
        for data, split in ((task.train, "train"), (task.test, "test")):
            x, y = data.load("3")
            chosen = published[f"user_{split}"] == 3
            np.testing.assert_allclose(
                x[..., 0, 0], published[f"x_{split}"][chosen], rtol=1e-6
            )
            assert y.tolist() == published[f"y_{split}"][chosen].tolist()
