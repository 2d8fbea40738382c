"""Tests of the CIFAR source: channels, partitions, and pickles that would run code."""

import collections
import io
import os
import pathlib
import pickle
import pickletools
import struct
import tarfile

import numpy as np
import pytest

from simulation.sources import cifar, source
from simulation.sources.source import SourceError

_CIFAR = pathlib.Path(__file__).parents[4] / "shared" / "data" / "cifar10"
_ARCHIVE = _CIFAR / "cifar-10-python-subset.tar.xz"
needs_cifar = pytest.mark.skipif(
    not _ARCHIVE.is_file(), reason=f"the real CIFAR files are absent: {_ARCHIVE}"
)


def _raise(error):
    raise error


def _keep_all(split, labels):
    return [f"{split}_{index}" for index in range(len(labels["label"]))]


def _draw_rows(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(256, size=[count, 3072]).astype(np.uint8)


def _dump(content, *, bytes_keys=True):
    """How Python 3 pickles what Python 2 had: names as bytes, protocol 2."""
    if bytes_keys:
        content = {key.encode(): value for key, value in content.items()}
    return pickle.dumps(content, protocol=2)


def _dump_python_2(labels, rows):
    """A batch of Python 2, opcode by opcode as in the published archive."""

    def short(text):
        return b"U" + bytes([len(text)]) + text

    def whole(number):
        return b"J" + struct.pack("<i", number)

    data = rows.tobytes()
    dtype = b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + short(b"|") + b"NNN" + whole(-1) * 2 + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
    array += short(b"b") + b"\x87R"
    array += b"(K\x01" + whole(rows.shape[0]) + whole(rows.shape[1]) + b"\x86"
    array += dtype + b"\x89T" + struct.pack("<i", len(data)) + data + b"tb"
    numbers = b"](" + b"".join(whole(label) for label in labels) + b"e"
    return b"\x80\x02}(" + short(b"data") + array + short(b"labels") + numbers + b"u."


def _pack(path, members, *, folder="cifar-10-batches-py", mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def _read(path, assign=_keep_all):
    return list(cifar.CifarSource(path=path, assign=assign).read(_raise))


def _read_with_errors(path, assign=_keep_all):
    errors = []
    records = list(cifar.CifarSource(path=path, assign=assign).read(errors.append))
    return records, errors


class TestValues:
    @pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
    def test_records(self, tmp_path, mode):
        rows, test_rows = _draw_rows(3), _draw_rows(2, seed=1)
        path = _pack(
            tmp_path / "archive",
            {
                "readme.html": b"no pickle",
                "test_batch": _dump({"data": test_rows, "labels": [9, 0]}),
                "data_batch_2": _dump({"data": rows, "labels": [4, 5, 6]}),
            },
            mode=mode,
        )
        read = cifar.CifarSource(path=path, assign=_keep_all)
        assert read.num_classes == 10
        assert read.files == (path,)
        assert set(read.features) == {"image", "label"}
        assert read.features["image"].kind is source.Kind.INT64
        assert read.features["image"].shape == (32, 32, 3)
        records = list(read.read(_raise))
        assert [r.features["label"] for r in records] == [9, 0, 4, 5, 6]
        assert [r.split for r in records] == ["test"] * 2 + ["train"] * 3
        assert records[3].place == f"{path}, data_batch_2, image 1"
        assert [r.client_id for r in records[:3]] == ["test_0", "test_1", "train_0"]

    def test_channels_are_last(self, tmp_path):
        rows = _draw_rows(1)
        path = _pack(
            tmp_path / "a", {"test_batch": _dump({"data": rows, "labels": [1]})}
        )
        image = _read(path)[0].features["image"]
        assert image.dtype == np.int64
        for channel in range(3):
            for y in range(32):
                for x in range(32):
                    byte = int(rows[0, channel * 1024 + y * 32 + x])
                    assert image[y, x, channel] == byte
        # Channels first, interleaved channels, and a transposed image.
        assert not np.array_equal(image, rows.reshape(32, 32, 3))
        assert not np.array_equal(image, image.transpose(1, 0, 2))
        assert not np.array_equal(image, image[:, :, ::-1])

    def test_pickle_of_python_2(self, tmp_path):
        rows = _draw_rows(2)
        content = _dump_python_2([3, 8], rows)
        pickletools.dis(content, out=io.StringIO())
        path = _pack(tmp_path / "a", {"data_batch_1": content})
        records = _read(path)
        assert [r.features["label"] for r in records] == [3, 8]
        assert records[1].features["image"][0, 1, 2] == rows[1, 2 * 1024 + 1]

    def test_array_in_fortran_order(self, tmp_path):
        rows = _draw_rows(3)
        content = {"data": np.asfortranarray(rows), "labels": [0, 1, 2]}
        path = _pack(tmp_path / "a", {"test_batch": _dump(content)})
        assert _read(path)[1].features["image"][5, 6, 1] == rows[1, 1024 + 5 * 32 + 6]

    def test_names_as_text(self, tmp_path):
        content = {"data": _draw_rows(1), "labels": [7]}
        path = _pack(tmp_path / "a", {"test_batch": _dump(content, bytes_keys=False)})
        assert _read(path)[0].features["label"] == 7

    def test_cifar_100(self, tmp_path):
        content = {
            "data": _draw_rows(2),
            "fine_labels": [99, 5],
            "coarse_labels": [19, 0],
        }
        path = _pack(
            tmp_path / "a",
            {"meta": b"no pickle", "train": _dump(content)},
            folder="cifar-100-python",
        )
        calls = []

        def assign(split, labels):
            calls.append((split, {key: x.tolist() for key, x in labels.items()}))
            return [None, "only"]

        read = cifar.CifarSource(path=path, assign=assign)
        assert read.num_classes == 100
        assert set(read.features) == {"image", "label", "coarse_label"}
        (record,) = read.read(_raise)
        assert record.client_id == "only"
        assert (record.features["label"], record.features["coarse_label"]) == (5, 0)
        assert calls == [("train", {"label": [99, 5], "coarse_label": [19, 0]})]

    def test_partition_is_by_name_whatever_the_order(self, tmp_path):
        """The archive has batch 2 first; the folder's records agree with its."""
        members = {
            "data_batch_2": _dump({"data": _draw_rows(2), "labels": [2, 3]}),
            "test_batch": _dump({"data": _draw_rows(1), "labels": [9]}),
            "data_batch_1": _dump({"data": _draw_rows(2, 5), "labels": [0, 1]}),
        }
        path = _pack(tmp_path / "a", members)
        folder = tmp_path / "around" / "cifar-10-batches-py"
        folder.mkdir(parents=True)
        for name, content in members.items():
            (folder / name).write_bytes(content)
        calls = []

        def assign(split, labels):
            calls.append((split, labels["label"].tolist()))
            return [f"client_{label}" for label in labels["label"]]

        found = [
            {r.client_id: r.features["image"].tobytes() for r in _read(p, assign)}
            for p in (path, folder, folder.parent)
        ]
        assert found[0] == found[1] == found[2]
        assert calls == [("train", [0, 1, 2, 3]), ("test", [9])] * 3
        read = cifar.CifarSource(path=folder.parent, assign=assign)
        assert [file.name for file in read.files] == [
            "data_batch_1",
            "data_batch_2",
            "test_batch",
        ]
        labels = [(r.client_id, r.features["label"]) for r in _read(path, assign)]
        assert all(client_id == f"client_{label}" for client_id, label in labels)
        assert [label for _, label in labels] == [2, 3, 9, 0, 1]


class TestMaliciousPickles:
    """None of them may run: each would leave a file behind."""

    def _check(self, tmp_path, content, reason):
        path = _pack(tmp_path / "a", {"test_batch": content})
        with pytest.raises(SourceError, match=reason) as error:
            _read(path)
        assert error.value.place == f"{path}, test_batch"
        assert not (tmp_path / "ran").exists()
        return error.value

    def test_the_attack_works_without_the_restriction(self, tmp_path):
        pickle.loads(self._build_call(tmp_path))
        assert (tmp_path / "ran").exists()

    def _build_call(self, tmp_path):
        class Attack:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "ran"),)

        return pickle.dumps(Attack(), protocol=2)

    def test_call(self, tmp_path):
        error = self._check(tmp_path, self._build_call(tmp_path), "was not run")
        assert f"`{os.mkdir.__module__}.mkdir`" in error.reason

    @pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
    def test_eval_inside_a_batch(self, tmp_path, protocol):
        class Attack:
            def __reduce__(self):
                return eval, (f"__import__('os').mkdir({str(tmp_path / 'ran')!r})",)

        content = {"data": _draw_rows(1), "labels": [1], "filenames": Attack()}
        data = pickle.dumps(content, protocol=protocol)
        self._check(tmp_path, data, "eval|_frombuffer")

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            # Names that are allowed, used otherwise.
            (b"cnumpy\nndarray\n((I9\ntI0\ntR.", "calls `numpy.ndarray`"),
            (b"cnumpy\ndtype\n(S'O8'\ntR.", "must be of bytes. Found b'O8'"),
            (b"c_codecs\nencode\n(V70\nVhex\ntR.", "encodes as 'hex'"),
            (b"c__builtin__\nbytes\n(I1000000000000\ntR.", "cannot be unpickled"),
            (b"c_codecs\nencode\n}S'_build'\nI0\nsb.", "changes a name"),
            (b"\x80\x04\x8c\x05numpy\x8c\x0cndarray.data\x93.", "ndarray.data"),
            (b"Pid\n.", "cannot be unpickled"),
            (b"(S'id'\nios\nsystem\n.", "os.system"),
            (b"\x80\x02\x82\x01.", "cannot be unpickled"),
        ],
    )
    def test_tricks(self, tmp_path, content, reason):
        self._check(tmp_path, content, reason)

    def test_array_of_objects(self, tmp_path):
        array = np.array([[1, None]], dtype=object)
        content = _dump({"data": array, "labels": [1]})
        self._check(tmp_path, content, "must be of bytes. Found 'O8'")

    def test_array_that_announces_more_than_it_has(self, tmp_path):
        content = _dump_python_2([1], _draw_rows(1))
        size = b"J" + struct.pack("<i", 3072)
        forged = content.replace(size, b"J" + struct.pack("<i", 2**31 - 1), 1)
        assert forged != content
        self._check(tmp_path, forged, "must be of bytes, and whole")


class TestErrors:
    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ([1, 2], "must be a dictionary. Found list"),
            ({b"labels": [1]}, r"`data` must be .*3072\] bytes. Found none"),
            ({b"data": np.zeros([1, 784], np.uint8)}, r"Found \[1, 784\]"),
            ({b"data": b"text"}, "Found none"),
            ({b"data": _draw_rows(1)}, "`labels` must be a list of integers"),
            ({b"data": _draw_rows(1), b"labels": [1.5]}, "list of integers"),
            ({b"data": _draw_rows(1), b"labels": [True]}, "list of integers"),
            ({b"data": _draw_rows(2), b"labels": [1]}, "each of 2 images. Found 1"),
        ],
    )
    def test_batch_of_another_kind(self, tmp_path, content, reason):
        good = _dump({"data": _draw_rows(1), "labels": [3]})
        members = {
            "data_batch_1": pickle.dumps(content, protocol=2),
            "data_batch_2": good,
        }
        path = _pack(tmp_path / "a", members)
        with pytest.raises(SourceError, match=reason) as error:
            _read(path)
        assert error.value.place == f"{path}, data_batch_1"
        # Where bad records are counted, the other batch is read.
        records, errors = _read_with_errors(path)
        assert [r.features["label"] for r in records] == [3]
        assert len(errors) == 1

    def test_labels_out_of_range(self, tmp_path):
        rows = _draw_rows(4)
        content = {"data": rows, "labels": [10, 9, -1, 2**70]}
        path = _pack(tmp_path / "a", {"test_batch": _dump(content)})
        calls = []

        def assign(split, labels):
            calls.append(labels["label"].tolist())
            return ["ann"]

        records, errors = _read_with_errors(path, assign)
        assert calls == [[9]]
        assert records[0].features["image"][0, 0, 0] == rows[1, 0]
        assert records[0].place == f"{path}, test_batch, image 1"
        assert [e.place[-7:] for e in errors] == ["image 0", "image 2", "image 3"]
        assert "`label` must be in [0, 10). Found 10" in errors[0].reason

    def test_coarse_labels_out_of_range(self, tmp_path):
        content = {"data": _draw_rows(1), "fine_labels": [99], "coarse_labels": [20]}
        path = _pack(tmp_path / "a", {"test": _dump(content)})
        with pytest.raises(SourceError, match=r"`coarse_label` must be in \[0, 20\)"):
            _read(path)

    def test_no_batch(self, tmp_path):
        path = _pack(tmp_path / "a", {"readme.html": b""})
        read = cifar.CifarSource(path=path, assign=_keep_all)
        with pytest.raises(SourceError, match="must hold one of data_batch_1, "):
            _ = read.features
        (tmp_path / "empty").mkdir()
        with pytest.raises(SourceError, match="empty: must hold one of"):
            cifar.CifarSource(path=tmp_path / "empty", assign=_keep_all)
        with pytest.raises(SourceError, match="absent: must be an archive or a folder"):
            cifar.CifarSource(path=tmp_path / "absent", assign=_keep_all)

    def test_no_archive(self, tmp_path):
        (tmp_path / "a").write_bytes(b"no archive" * 100)
        with pytest.raises(SourceError, match="a: is damaged"):
            _read(tmp_path / "a")

    @pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
    def test_archive_that_ends_early(self, tmp_path, mode):
        members = {
            f"data_batch_{number}": _dump({"data": _draw_rows(60), "labels": [3] * 60})
            for number in (1, 2)
        }
        path = _pack(tmp_path / "a", members, mode=mode)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 3 // 4])
        with pytest.raises(SourceError):
            _read(path)
        records, errors = _read_with_errors(path)
        assert len(errors) >= 1
        # What a decompressor still gives before the cut is its own affair.
        assert len(records) in (0, 60)

    def test_batch_twice(self, tmp_path):
        batch = _dump({"data": _draw_rows(1), "labels": [3]})
        path = _pack(tmp_path / "a", {"test_batch": batch, "again/test_batch": batch})
        with pytest.raises(
            SourceError, match="test_batch: must be in the archive once"
        ):
            _read(path)

    def test_links_are_not_followed(self, tmp_path):
        (tmp_path / "secret").write_bytes(_dump({"data": _draw_rows(1), "labels": [3]}))
        with tarfile.open(tmp_path / "a", "w") as archive:
            member = tarfile.TarInfo("data_batch_1")
            member.type, member.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
            archive.addfile(member)
        with pytest.raises(SourceError, match="must hold one of"):
            _read(tmp_path / "a")

    def test_nothing_is_unpacked(self, tmp_path):
        batch = _dump({"data": _draw_rows(1), "labels": [3]})
        inner = tmp_path / "inner"
        inner.mkdir()
        path = _pack(inner / "a", {"test_batch": batch}, folder="../escaped")
        assert len(_read(path)) == 1
        assert [p.name for p in tmp_path.rglob("*")] == ["inner", "a"]

    def test_partition_that_does_not_fit(self, tmp_path):
        batch = _dump({"data": _draw_rows(2), "labels": [3, 4]})
        path = _pack(tmp_path / "a", {"test_batch": batch})
        with pytest.raises(ValueError, match="each of 2 images of 'test'. Found 1"):
            _read(path, lambda split, labels: ["ann"])
        with pytest.raises(ValueError, match="names or None. Found '' for image 1"):
            _read(path, lambda split, labels: ["ann", ""])
        with pytest.raises(ValueError, match="names or None. Found 7 for image 0"):
            _read(path, lambda split, labels: [7, "ann"])


@needs_cifar
class TestRealFiles:
    def test_subset(self):
        calls = []

        def assign(split, labels):
            calls.append((split, len(labels["label"])))
            return [f"{label}" for label in labels["label"]]

        read = cifar.CifarSource(path=_ARCHIVE, assign=assign)
        assert read.num_classes == 10
        counts = collections.Counter()
        total = np.zeros(3)
        for record in read.read(_raise):
            counts[record.split, record.client_id] += 1
            assert record.client_id == str(record.features["label"])
            total += record.features["image"].mean((0, 1))
        assert sorted(calls) == [("test", 2000), ("train", 6000)]
        for label in range(10):
            assert counts["train", str(label)] == 600
            assert counts["test", str(label)] == 200
        # The published means of CIFAR-10; the stratified subset's are within 5 standard
        # errors (two-sided normal tail 6e-7). Other orders of the channels are not.
        published, errors = (
            np.array([125.3, 123.0, 113.9]),
            np.array([0.36, 0.36, 0.44]),
        )
        assert (abs(total / 8000 - published) < 5 * errors).all()
        for order in ([2, 1, 0], [1, 0, 2], [0, 2, 1]):
            assert not (abs(total[order] / 8000 - published) < 5 * errors).all()
