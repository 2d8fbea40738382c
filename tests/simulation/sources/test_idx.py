"""Tests of the idx source: values, writers and every way that a file can be wrong."""

import collections
import gzip
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from simulation.sources import idx, source
from simulation.sources.source import SourceError
from tests.simulation.sources import idx_files

_MNIST = pathlib.Path(__file__).parents[4] / "shared" / "data" / "mnist"
needs_mnist = pytest.mark.skipif(
    not _MNIST.is_dir(), reason=f"the real MNIST files are absent: {_MNIST}"
)


def _draw_images(count, seed=0):
    return np.random.default_rng(seed).integers(256, size=[count, 28, 28])


def _raise(error):
    raise error


def _read(splits):
    return list(idx.IdxSource(splits=splits).read(_raise))


def _read_with_errors(splits):
    errors = []
    return list(idx.IdxSource(splits=splits).read(errors.append)), errors


@pytest.fixture
def qmnist(tmp_path):
    """Three images; extended labels with two rows to spare."""
    extended = np.zeros([5, 8], int)
    extended[:, 0] = [3, 61, 0, 9, 9]
    extended[:, 2] = [7, 2107, 7, 1, 1]
    return idx.IdxSplit(
        split=source.TEST,
        images=idx_files.write(tmp_path / "images.gz", _draw_images(3), pack=True),
        labels=idx_files.write(tmp_path / "labels", extended, code=0x0C),
    )


class TestValues:
    def test_records(self, qmnist):
        records = _read([qmnist])
        assert [r.client_id for r in records] == [
            "writer_0007",
            "writer_2107",
            "writer_0007",
        ]
        assert [r.features["label"] for r in records] == [3, 61, 0]
        assert {type(r.features["label"]) for r in records} == {int}
        assert {r.split for r in records} == {"test"}
        assert records[1].place == f"{qmnist.images}, record 1"

    def test_features_are_those_of_tff(self, qmnist):
        read = idx.IdxSource(splits=[qmnist])
        assert read.features["pixels"].kind is source.Kind.FLOAT
        assert read.features["pixels"].shape == (28, 28)
        assert read.features["label"].kind is source.Kind.INT64
        assert read.features["label"].shape == ()
        assert read.files == (qmnist.images, qmnist.labels)

    def test_background_is_one(self, qmnist):
        images = _draw_images(3)
        for image, record in zip(images, _read([qmnist]), strict=True):
            pixels = record.features["pixels"]
            assert pixels.dtype == np.float32
            expected = [
                [np.float32((255 - int(byte)) / 255) for byte in row] for row in image
            ]
            np.testing.assert_array_equal(pixels, expected)
            # The wrong polarity, and the wrong orientation.
            assert not np.array_equal(pixels, (image / 255).astype(np.float32))
            assert not np.array_equal(pixels, np.transpose(expected))

    def test_extreme_bytes(self, tmp_path):
        images = np.zeros([1, 28, 28], int)
        images[0, 2, 20] = 255
        split = idx.IdxSplit(
            split=source.TRAIN,
            images=idx_files.write(tmp_path / "i", images),
            labels=idx_files.write(tmp_path / "l", [5]),
            writers=idx_files.write(tmp_path / "w", [3]),
        )
        pixels = _read([split])[0].features["pixels"]
        assert pixels[2, 20] == 0.0
        assert pixels.sum() == 28 * 28 - 1
        transposed = idx.IdxSplit(
            split=source.TRAIN,
            images=split.images,
            labels=split.labels,
            writers=split.writers,
            transpose=True,
        )
        pixels = _read([transposed])[0].features["pixels"]
        assert pixels[20, 2] == 0.0
        assert pixels[2, 20] == 1.0

    def test_clients_of_a_partition(self, tmp_path):
        """No writers are asked for; an image may be nobody's."""
        splits = [
            idx.IdxSplit(
                split=name,
                images=idx_files.write(tmp_path / f"{name}_i", _draw_images(3, seed)),
                labels=idx_files.write(tmp_path / f"{name}_l", [4, seed, 6]),
            )
            for seed, name in enumerate((source.TRAIN, source.TEST))
        ]
        asked = []

        def assign(split, labels):
            asked.append((split, labels["label"].tolist()))
            return ["b", None, "a"]

        read = idx.IdxSource(splits=splits, assign=assign)
        found = [(r.client_id, r.split, r.features["label"]) for r in read.read(_raise)]
        assert asked == [("train", [4, 0, 6]), ("test", [4, 1, 6])]
        assert found == [
            ("b", "train", 4),
            ("a", "train", 6),
            ("b", "test", 4),
            ("a", "test", 6),
        ]
        last = list(read.read(_raise))[1]
        np.testing.assert_array_equal(
            last.features["pixels"],
            (1 - _draw_images(3, 0)[2] / 255).astype(np.float32),
        )

    def test_other_columns(self, tmp_path, qmnist):
        extended = np.arange(24).reshape(3, 8)
        labels = idx_files.write(tmp_path / "other", extended, code=0x0C)
        split = idx.IdxSplit(
            split=source.TRAIN,
            images=qmnist.images,
            labels=labels,
            writer_column=7,
            label_column=1,
        )
        records = _read([split])
        assert [r.features["label"] for r in records] == [1, 9, 17]
        assert [r.client_id for r in records] == [
            "writer_0007",
            "writer_0015",
            "writer_0023",
        ]

    @pytest.mark.parametrize("pack", [False, True])
    def test_writers_as_text(self, tmp_path, pack):
        text = '\ufeff12\r\n f0123_45 \n"8"\n'.encode()
        writers = tmp_path / "writers.csv"
        writers.write_bytes(gzip.compress(text) if pack else text)
        split = idx.IdxSplit(
            split=source.TRAIN,
            images=idx_files.write(tmp_path / "i", _draw_images(3)),
            labels=idx_files.write(tmp_path / "l", [1, 2, 3], code=0x0C),
            writers=writers,
        )
        assert [r.client_id for r in _read([split])] == [
            "writer_0012",
            "writer_f0123_45",
            "writer_0008",
        ]
        assert idx.IdxSource(splits=[split]).files[-1] == writers

    def test_writers_of_extended_labels_beside_plain_ones(self, tmp_path, qmnist):
        split = idx.IdxSplit(
            split=source.TRAIN,
            images=qmnist.images,
            labels=idx_files.write(tmp_path / "plain", [1, 2, 3]),
            writers=qmnist.labels,
        )
        records = _read([split])
        assert [r.features["label"] for r in records] == [1, 2, 3]
        assert records[1].client_id == "writer_2107"

    def test_blocks_join(self, tmp_path):
        count = 2 * 1024 + 3
        images = np.zeros([count, 28, 28], int)
        images[:, 0, 0] = np.arange(count) % 256
        images[:, 0, 1] = np.arange(count) // 256
        writers = tmp_path / "w.txt"
        writers.write_text("".join(f"{n}\n" for n in range(count)))
        split = idx.IdxSplit(
            split=source.TRAIN,
            images=idx_files.write(tmp_path / "i", images, pack=True),
            labels=idx_files.write(tmp_path / "l", np.arange(count) % 62),
            writers=writers,
        )
        records = _read([split])
        assert len(records) == count
        for index in (0, 1023, 1024, 2047, 2048, count - 1):
            low = 255 - round(float(records[index].features["pixels"][0, 0]) * 255)
            high = 255 - round(float(records[index].features["pixels"][0, 1]) * 255)
            assert low + 256 * high == index
            assert records[index].features["label"] == index % 62
            assert records[index].client_id == f"writer_{index:04d}"


class TestErrors:
    """What is wrong with the whole is raised at once; a record's fault is told."""

    def _split(self, tmp_path, **changes):
        files = {
            "images": idx_files.pack_array(_draw_images(3), code=0x08),
            "labels": idx_files.pack_array([1, 2, 3], code=0x08),
            "writers": idx_files.pack_array([4, 5, 6], code=0x0C),
        } | changes
        for name, content in files.items():
            if content is not None:
                (tmp_path / name).write_bytes(content)
        return idx.IdxSplit(
            split=source.TRAIN,
            images=tmp_path / "images",
            labels=tmp_path / "labels",
            writers=None if files["writers"] is None else tmp_path / "writers",
        )

    @pytest.mark.parametrize(
        ("changes", "file", "reason"),
        [
            ({"images": b"\x01\x00\x08\x03" + bytes(12)}, "images", "01 00 08 03"),
            ({"images": b""}, "images", "Found nothing"),
            ({"labels": b"\0\0\x08\x01\0\0"}, "labels", "ends in its header"),
            (
                {"labels": idx_files.pack_array([1.0] * 3, code=0x0D)},
                "labels",
                "00 00 0d 01",
            ),
            (
                {"images": idx_files.pack_array([1, 2, 3], code=0x08)},
                "images",
                r"\[N, 28, 28\]",
            ),
            (
                {"images": idx_files.pack_array(np.ones([3, 8, 8], int), code=8)},
                "images",
                "8, 8",
            ),
            (
                {"images": idx_files.pack_array(_draw_images(3), code=0x0C)},
                "images",
                "int32",
            ),
            (
                {"labels": idx_files.pack_array([1, 2], code=8)},
                "labels",
                "3 images. Found 2 records",
            ),
            (
                {"labels": idx_files.pack_array([1] * 4, code=8)},
                "labels",
                "Found 4 records",
            ),
            (
                {"labels": idx_files.pack_array(_draw_images(3), code=8)},
                "labels",
                "idx1 or idx2",
            ),
            (
                {"writers": idx_files.pack_array([1] * 4, code=8)},
                "writers",
                "Found 4 records",
            ),
            ({"writers": b"writer\n1\n2\n3\n"}, "writers", "Found 4 lines"),
            ({"writers": b""}, "writers", "Found 0 lines"),
            ({"writers": gzip.compress(b"1\n2\n3\n")[:-9]}, "writers", "is damaged"),
        ],
    )
    def test_files_that_do_not_fit(self, tmp_path, changes, file, reason):
        split = self._split(tmp_path, **changes)
        with pytest.raises(SourceError, match=reason) as error:
            idx.IdxSource(splits=[split])
        assert error.value.place == str(tmp_path / file)

    def test_too_few_extended_labels(self, tmp_path):
        extended = idx_files.pack_array(np.zeros([2, 8], int), code=0x0C)
        split = self._split(tmp_path, labels=extended, writers=None)
        with pytest.raises(SourceError, match="labels: .* 3 images. Found 2 rows"):
            idx.IdxSource(splits=[split])

    def test_missing_column(self, tmp_path):
        extended = idx_files.pack_array(np.zeros([3, 2], int), code=0x0C)
        split = self._split(tmp_path, labels=extended, writers=None)
        with pytest.raises(SourceError, match="`writer_column` .* 2 columns. Found 2"):
            idx.IdxSource(splits=[split])

    def test_no_writers(self, tmp_path):
        split = self._split(tmp_path, writers=None)
        with pytest.raises(SourceError, match="labels: names no writers.*column 2"):
            idx.IdxSource(splits=[split])

    def test_missing_file(self, tmp_path):
        split = self._split(tmp_path)
        split.labels.unlink()
        with pytest.raises(SourceError, match="labels: cannot be read"):
            idx.IdxSource(splits=[split])

    def test_labels_out_of_range(self, tmp_path):
        split = self._split(
            tmp_path, labels=idx_files.pack_array([62, 61, -1], code=0x0C)
        )
        records, errors = _read_with_errors([split])
        assert [r.features["label"] for r in records] == [61]
        assert records[0].client_id == "writer_0005"
        assert [e.place for e in errors] == [
            f"{split.labels}, record 0",
            f"{split.labels}, record 2",
        ]
        assert "[0, 62). Found 62" in errors[0].reason
        with pytest.raises(SourceError, match="record 0"):
            _read([split])

    @pytest.mark.parametrize(
        ("writers", "found"),
        [
            (idx_files.pack_array([4, -5, 6], code=0x0C), "negative. Found -5"),
            (b"4\n\n6\n", "Found '\\n'"),
            (b"4\nann,7\n6\n", "Found 'ann,7\\n'"),
            (b"4\n\xff\n6\n", "UTF-8"),
        ],
    )
    def test_bad_writer(self, tmp_path, writers, found):
        split = self._split(tmp_path, writers=writers)
        records, errors = _read_with_errors([split])
        assert [r.features["label"] for r in records] == [1, 3]
        assert [e.place for e in errors] == [f"{split.writers}, record 1"]
        assert found in errors[0].reason

    @pytest.mark.parametrize("name", ["images", "labels"])
    def test_truncated(self, tmp_path, name):
        whole = {
            "images": idx_files.pack_array(_draw_images(3), code=0x08),
            "labels": idx_files.pack_array([1, 2, 3], code=0x0C),
        }
        split = self._split(tmp_path, **(whole | {name: whole[name][:-1]}))
        records, errors = _read_with_errors([split])
        assert [r.features["label"] for r in records] == [1, 2]
        assert [e.place for e in errors] == [f"{tmp_path / name}, record 2"]
        assert "announces 3 records" in errors[0].reason

    @pytest.mark.parametrize("name", ["images", "labels", "writers"])
    def test_more_than_announced(self, tmp_path, name):
        whole = {
            "images": idx_files.pack_array(_draw_images(3), code=0x08),
            "labels": idx_files.pack_array([1, 2, 3], code=0x08),
            "writers": idx_files.pack_array([1, 2, 3], code=0x08),
        }
        split = self._split(tmp_path, **(whole | {name: whole[name] + b"\0"}))
        records, errors = _read_with_errors([split])
        assert len(records) == 3
        assert [e.place for e in errors] == [f"{tmp_path / name}, record 3"]

    @pytest.mark.parametrize("cut", ["end", "middle"])
    def test_damaged_gzip(self, tmp_path, cut):
        packed = idx_files.pack_array(_draw_images(3), code=0x08, pack=True)
        if cut == "end":
            packed = packed[:-20]
        else:
            packed = packed[:900] + bytes([packed[900] ^ 255]) + packed[901:]
        split = self._split(tmp_path, images=packed)
        _, errors = _read_with_errors([split])
        assert [e.place for e in errors] == [f"{split.images}, record 0"]
        assert "damaged" in errors[0].reason

    def test_bad_arguments(self, tmp_path):
        path = tmp_path / "x"
        with pytest.raises(ValueError, match="`split` must be one of .* 'dev'"):
            idx.IdxSplit(split="dev", images=path, labels=path)
        for name in ("writer_column", "label_column"):
            with pytest.raises(ValueError, match=f"`{name}` .* Found -1"):
                idx.IdxSplit(split="test", images=path, labels=path, **{name: -1})
        with pytest.raises(ValueError, match="`splits` must not be empty"):
            idx.IdxSource(splits=[])


class TestFind:
    def _touch(self, folder, *names):
        for name in names:
            (folder / name).touch()

    def test_mnist_with_extended_labels(self, tmp_path):
        self._touch(
            tmp_path,
            "train-images-idx3-ubyte.gz",
            "train-labels-idx1-ubyte.gz",
            "qmnist-train-labels-idx2-int.gz",
            "t10k-images.idx3-ubyte",
            "qmnist-test-labels-idx2-int",
        )
        train, test = idx.find_idx_files(tmp_path)
        assert (train.split, test.split) == (source.TRAIN, source.TEST)
        assert train.images.name == "train-images-idx3-ubyte.gz"
        assert train.labels.name == "qmnist-train-labels-idx2-int.gz"
        assert test.images.name == "t10k-images.idx3-ubyte"
        assert test.labels.name == "qmnist-test-labels-idx2-int"
        assert train.writers is None and not train.transpose

    def test_emnist(self, tmp_path):
        self._touch(
            tmp_path,
            "emnist-byclass-train-images-idx3-ubyte.gz",
            "emnist-byclass-train-labels-idx1-ubyte.gz",
            "emnist-byclass-train-writers.csv",
        )
        (train,) = idx.find_idx_files(tmp_path)
        assert train.writers == tmp_path / "emnist-byclass-train-writers.csv"
        assert train.transpose

    def test_nothing(self, tmp_path):
        with pytest.raises(SourceError, match="train-images-idx3-ubyte"):
            idx.find_idx_files(tmp_path)

    def test_two_sets(self, tmp_path):
        for name in ("emnist-byclass-train", "emnist-digits-train"):
            self._touch(
                tmp_path, f"{name}-images-idx3-ubyte", f"{name}-labels-idx1-ubyte"
            )
        with pytest.raises(SourceError, match="one data set.*byclass.*digits"):
            idx.find_idx_files(tmp_path)

    def test_no_labels(self, tmp_path):
        self._touch(tmp_path, "t10k-images-idx3-ubyte")
        with pytest.raises(SourceError, match="beside t10k-labels-idx1-ubyte"):
            idx.find_idx_files(tmp_path)


@needs_mnist
class TestRealFiles:
    def test_writers_and_first_images(self):
        records = idx.IdxSource(splits=idx.find_idx_files(_MNIST)).read(_raise)
        counts = collections.defaultdict(collections.Counter)
        labels = collections.Counter()
        first = {}
        for record in records:
            counts[record.split][record.client_id] += 1
            labels[record.split, record.features["label"]] += 1
            first.setdefault(record.split, record)
        train, test = counts[source.TRAIN], counts[source.TEST]
        assert (len(train), train.total()) == (539, 60_000)
        assert (min(train.values()), max(train.values())) == (19, 131)
        assert (len(test), test.total()) == (297, 10_000)
        assert not set(train) & set(test)
        # As published: 5,923 zeros and 6,742 ones in train; the test begins with a 7.
        assert labels[source.TRAIN, 0] == 5923
        assert labels[source.TRAIN, 1] == 6742
        assert first[source.TRAIN].features["label"] == 5
        assert first[source.TEST].features["label"] == 7
        # The first image is a five on paper: its corners are background.
        pixels = first[source.TRAIN].features["pixels"]
        assert pixels[0, 0] == pixels[27, 27] == 1.0
        assert pixels.mean() > 0.8
        with gzip.open(_MNIST / "train-images-idx3-ubyte.gz") as stream:
            data = stream.read(16 + 784)[16:]
        assert pixels.ravel().tolist() == [
            np.float32((255 - byte) / 255) for byte in data
        ]

    def test_without_extended_labels(self):
        split = idx.IdxSplit(
            split=source.TRAIN,
            images=_MNIST / "train-images-idx3-ubyte.gz",
            labels=_MNIST / "train-labels-idx1-ubyte.gz",
        )
        with pytest.raises(SourceError, match="names no writers"):
            idx.IdxSource(splits=[split])


def test_does_not_import_tensorflow():
    """All sources of files: in a fresh process, since other tests import it."""
    names = ("arrays", "cifar", "idx", "image_folder", "table")
    lines = ["import sys", *(f"import simulation.sources.{name}" for name in names)]
    lines.append("assert not {'tensorflow', 'PIL', 'pyarrow'} & set(sys.modules)")
    subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        check=True,
        cwd=pathlib.Path(__file__).parents[3],
    )
