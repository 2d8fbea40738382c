"""Tests of NPZ files: values, both layouts, and errors with array and index."""

import io
import pathlib
import zipfile

import numpy as np
import pytest

from simulation.sources import arrays, source
from simulation.sources.source import SourceError

_FOLDER = pathlib.Path(__file__).parents[4] / "shared" / "data" / "upcycled_synthetic"
needs_synthetic = pytest.mark.skipif(
    not _FOLDER.is_dir(), reason=f"the synthetic sets are absent: {_FOLDER}"
)


def _raise(error):
    raise error


def _build_arrays(**changes):
    return {
        "x": np.array([[1.5, 2], [3, 4], [5, 6]]),
        "y": np.array([2, 0, 1], np.int32),
        "user": np.array([7, 12, 7]),
    } | changes


def _save(path, *, compress=True, **content):
    with path.open("wb") as stream:
        (np.savez_compressed if compress else np.savez)(stream, **content)
    return path


def _read(path):
    return list(arrays.ArraySource(path=path).read(_raise))


def _read_with_errors(path):
    errors = []
    return list(arrays.ArraySource(path=path).read(errors.append)), errors


class TestValues:
    @pytest.mark.parametrize("compress", [False, True])
    def test_records(self, tmp_path, compress):
        path = _save(tmp_path / "a.npz", compress=compress, **_build_arrays())
        read = arrays.ArraySource(path=path)
        assert read.files == (path,)
        assert dict(read.features) == {
            "x": source.Feature(kind=source.Kind.FLOAT, shape=(2,)),
            "label": source.Feature(kind=source.Kind.INT64),
        }
        records = list(read.read(_raise))
        assert [r.client_id for r in records] == ["7", "12", "7"]
        assert [r.features["x"].tolist() for r in records] == [[1.5, 2], [3, 4], [5, 6]]
        assert [r.features["label"] for r in records] == [2, 0, 1]
        assert {type(r.features["label"]) for r in records} == {int}
        assert {r.features["x"].dtype for r in records} == {np.dtype(np.float32)}
        assert {r.split for r in records} == {None}
        assert records[1].place == f"{path}, x[1]"

    def test_splits(self, tmp_path):
        content = {
            f"{name}_{split}": value[:count]
            for split, count in (("test", 1), ("train", 3), ("validation", 2))
            for name, value in _build_arrays().items()
        }
        records = _read(_save(tmp_path / "a.npz", **content, note=np.array("extra")))
        splits = [r.split for r in records]
        assert splits == ["train"] * 3 + ["validation"] * 2 + ["test"]
        assert records[-1].place.endswith("x_test[0]")

    @pytest.mark.parametrize(
        ("users", "names"),
        [
            (["ann", "bj\u00f6rn", "ann"], ["ann", "bj\u00f6rn", "ann"]),
            ([b"a", "\u00e9".encode(), b"a"], ["a", "\u00e9", "a"]),
            (np.array([0, -1, 2], np.int8), ["0", "-1", "2"]),
        ],
    )
    def test_users(self, tmp_path, users, names):
        path = _save(tmp_path / "a.npz", **_build_arrays(user=np.array(users)))
        assert [r.client_id for r in _read(path)] == names

    @pytest.mark.parametrize("order", ["C", "F"])
    @pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
    def test_shapes_and_blocks(self, tmp_path, monkeypatch, shape, order):
        monkeypatch.setattr(arrays, "_BLOCK_BYTES", 64)
        x = np.random.default_rng(0).normal(size=(50, *shape)).astype(">f8")
        content = {"x": np.asarray(x, order=order), "y": np.arange(50)}
        path = _save(tmp_path / "a.npz", **content, user=np.zeros(50, int))
        read = arrays.ArraySource(path=path)
        assert read.features["x"].shape == shape
        for index, record in enumerate(read.read(_raise)):
            expected = x[index].astype(np.float32)
            np.testing.assert_array_equal(record.features["x"], expected)
            assert record.features["label"] == index
        assert index == 49

    def test_whole_floats_are_labels(self, tmp_path):
        path = _save(tmp_path / "a.npz", **_build_arrays(y=np.array([1.0, 0, -2])))
        assert [r.features["label"] for r in _read(path)] == [1, 0, -2]


class TestErrors:
    @pytest.mark.parametrize(
        ("changes", "array", "reason"),
        [
            ({"y": np.array([1, 0.5, 2])}, "y", "must be an integer. Found 0.5"),
            ({"y": np.array([1, np.nan, 2])}, "y", "must be an integer. Found nan"),
            ({"y": np.array([1, np.inf, 2])}, "y", "must be an integer. Found inf"),
            ({"y": np.array([1, 2**63, 2], np.uint64)}, "y", "must fit into int64"),
            ({"x": np.array([[1, 2], [3, np.nan], [5, 6]])}, "x", "nan at [1]"),
            ({"x": np.array([[1, 2], [-np.inf, 4], [5, 6]])}, "x", "-inf at [0]"),
            ({"x": np.array([[1, 2], [3, 1e39], [5, 6]])}, "x", "1e+39 at [1]"),
            ({"user": np.array(["a", " ", "c"])}, "user", "must name a user"),
            ({"user": np.array([b"a", b"\xff", b"c"])}, "user", "must be UTF-8"),
        ],
    )
    def test_bad_record(self, tmp_path, changes, array, reason):
        path = _save(tmp_path / "a.npz", **_build_arrays(**changes))
        records, errors = _read_with_errors(path)
        kept = [records[0].features["x"], records[1].features["x"]]
        assert len(records) == 2
        np.testing.assert_array_equal(kept, _build_arrays(**changes)["x"][[0, 2]])
        assert [e.place for e in errors] == [f"{path}, {array}[1]"]
        assert reason in errors[0].reason
        with pytest.raises(SourceError, match=rf"{array}\[1\]"):
            _read(path)

    @pytest.mark.parametrize(
        ("changes", "array", "reason"),
        [
            ({"y": np.array([1, 2])}, "y", "each of 3 examples of x. Found 2"),
            ({"user": np.arange(4)}, "user", "each of 3 examples of x. Found 4"),
            ({"user": np.array([1.0, 2, 3])}, "user", "integers or strings"),
            ({"y": np.array(["a", "b", "c"])}, "y", "must be integers. Found <U1"),
            ({"y": np.zeros([3, 1], int)}, "y", r"shape \[N\]. Found \[3, 1\]"),
            ({"x": np.array(1.0)}, "x", r"shape \[N, ...\]. Found \[\]"),
            ({"x": np.zeros([3, 2], complex)}, "x", "must be numbers"),
            ({"x": np.array([[None], [1], [2]])}, "x", "must be numbers. Found object"),
            ({"user": np.array(["a", None, 1])}, "user", "strings. Found object"),
        ],
    )
    def test_arrays_that_do_not_fit(self, tmp_path, changes, array, reason):
        path = _save(tmp_path / "a.npz", **_build_arrays(**changes))
        with pytest.raises(SourceError, match=reason) as error:
            arrays.ArraySource(path=path)
        assert error.value.place == f"{path}, {array}"

    def test_missing_arrays(self, tmp_path):
        content = _build_arrays()
        del content["user"]
        path = _save(tmp_path / "a.npz", **content)
        with pytest.raises(SourceError, match=r"the arrays \['user'\]. Found \['x'"):
            arrays.ArraySource(path=path)
        _save(path, x_train=content["x"], y_train=content["y"], user_train=content["y"])
        assert len(_read(path)) == 3
        _save(path, x_train=content["x"], **content)
        with pytest.raises(SourceError, match="either the arrays x, y, user or"):
            arrays.ArraySource(path=path)
        _save(path, images=content["x"])
        with pytest.raises(SourceError, match=r"either .* Found \['images'\]"):
            arrays.ArraySource(path=path)

    def test_shapes_of_splits(self, tmp_path):
        content = {f"{name}_train": value for name, value in _build_arrays().items()}
        other = _build_arrays(x=np.zeros([3, 4]))
        content |= {f"{name}_test": value for name, value in other.items()}
        path = _save(tmp_path / "a.npz", **content)
        with pytest.raises(SourceError, match=r"one shape. Found \[\(2,\), \(4,\)\]"):
            arrays.ArraySource(path=path)

    def test_no_npz(self, tmp_path):
        path = tmp_path / "a.npz"
        with pytest.raises(SourceError, match="cannot be read as .npz"):
            arrays.ArraySource(path=path)
        with path.open("wb") as stream:
            np.save(stream, np.arange(3))
        with pytest.raises(SourceError, match="cannot be read as .npz"):
            arrays.ArraySource(path=path)

    def test_array_that_is_none(self, tmp_path):
        path = _save(tmp_path / "a.npz", **_build_arrays())
        self._replace(path, "y", b"no array")
        with pytest.raises(SourceError, match="a.npz, y: is damaged"):
            arrays.ArraySource(path=path)

    @pytest.mark.parametrize("array", ["x", "y"])
    def test_array_that_ends_early(self, tmp_path, monkeypatch, array):
        monkeypatch.setattr(arrays, "_BLOCK_BYTES", 16)
        path = _save(tmp_path / "a.npz", **_build_arrays())
        stream = io.BytesIO()
        np.save(stream, _build_arrays()[array])
        self._replace(path, array, stream.getvalue()[:-4])
        records, errors = _read_with_errors(path)
        assert len(errors) == 1
        if array == "x":
            assert [r.client_id for r in records] == ["7", "12"]
            assert errors[0].place == f"{path}, x[2]"
            assert "announces 3 examples" in errors[0].reason
        else:
            assert not records
            assert errors[0].place == f"{path}, y"

    def _replace(self, path, array, content):
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        members[f"{array}.npy"] = content
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)

    def test_damaged_member(self, tmp_path):
        x = np.random.default_rng(0).normal(size=[100, 50])
        content = {"x": x, "y": np.arange(100), "user": np.arange(100)}
        path = _save(tmp_path / "a.npz", compress=False, **content)
        data = bytearray(path.read_bytes())
        data[20_000] ^= 1
        path.write_bytes(data)
        _, errors = _read_with_errors(path)
        assert [e.place for e in errors] == [f"{path}, x[0]"]
        assert "damaged" in errors[0].reason


@needs_synthetic
def test_synthetic_sets():
    path = _FOLDER / "synthetic_iid.npz"
    records = _read(path)
    with np.load(path) as content:
        expected = {name: content[name] for name in content.files}
    train = [r for r in records if r.split == source.TRAIN]
    assert (len(train), len(records) - len(train)) == (6043, 683)
    x = np.array([r.features["x"] for r in train])
    np.testing.assert_array_equal(x, expected["x_train"].astype(np.float32))
    labels = [r.features["label"] for r in train]
    assert labels == expected["y_train"].tolist()
    assert [int(r.client_id) for r in train] == expected["user_train"].tolist()
    assert len({r.client_id for r in records}) == 30
