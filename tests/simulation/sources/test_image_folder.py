"""Tests of folders of images: values, both layouts, and errors with the file."""

import sys

import numpy as np
import pytest
from PIL import Image

from simulation.sources import image_folder, source
from simulation.sources.image_folder import ImageLayout
from simulation.sources.source import SourceError


def _raise(error):
    raise error


def _draw(seed, shape=(4, 6, 3)):
    return np.random.default_rng(seed).integers(256, size=shape).astype(np.uint8)


def _save(path, pixels=None, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(_draw(seed) if pixels is None else pixels).save(path)


def _keep_all(split, labels):
    return [f"client_{index}" for index in range(len(labels["label"]))]


def _build(path, **options):
    defaults = {"layout": ImageLayout.CLASS, "size": (4, 6)}
    options = defaults | options
    if options["layout"] is ImageLayout.CLASS:
        options.setdefault("assign", _keep_all)
    return image_folder.ImageFolderSource(path=path, **options)


def _read(path, **options):
    return list(_build(path, **options).read(_raise))


def _read_with_errors(path, **options):
    errors = []
    return list(_build(path, **options).read(errors.append)), errors


class TestClassLayout:
    def test_records(self, tmp_path):
        for seed, name in enumerate(["dog/b.png", "dog/a.PNG", "cat/z.bmp"]):
            _save(tmp_path / name, seed=seed)
        calls = []

        def assign(split, labels):
            calls.append((split, labels["label"].tolist(), labels["label"].dtype))
            return ["ann", None, "bob"]

        read = _build(tmp_path, assign=assign)
        assert read.classes == ("cat", "dog")
        names = ("cat/z.bmp", "dog/a.PNG", "dog/b.png")
        assert read.files == tuple(tmp_path / name for name in names)
        assert read.features["image"].kind is source.Kind.INT64
        assert read.features["image"].shape == (4, 6, 3)
        first, second = read.read(_raise)
        assert calls == [("train", [0, 1, 1], np.dtype(np.int64))]
        assert (first.client_id, second.client_id) == ("ann", "bob")
        assert (first.features["label"], second.features["label"]) == (0, 1)
        assert second.place == str(tmp_path / "dog/b.png")
        assert second.split is None

    def test_pixels(self, tmp_path):
        pixels = _draw(3)
        _save(tmp_path / "c/a.png", pixels)
        image = _read(tmp_path)[0].features["image"]
        assert image.dtype == np.int64
        np.testing.assert_array_equal(image, pixels)
        # Other orders of the axes and channels.
        assert not np.array_equal(image, pixels[:, :, ::-1])
        assert image.shape != (6, 4, 3)

    def test_size_is_height_and_width(self, tmp_path):
        # The left half black, the right half white: it stays so.
        pixels = np.zeros([10, 40, 3], np.uint8)
        pixels[:, 20:] = 255
        _save(tmp_path / "c/a.png", pixels)
        image = _read(tmp_path, size=(5, 8))[0].features["image"]
        assert image.shape == (5, 8, 3)
        assert (image[:, :3] == 0).all() and (image[:, 5:] == 255).all()

    def test_grayscale(self, tmp_path):
        pixels = _draw(1)
        _save(tmp_path / "c/a.png", pixels)
        _save(tmp_path / "c/b.png", pixels[:, :, 0])
        read = _build(tmp_path, grayscale=True)
        assert read.features["image"].shape == (4, 6, 1)
        color, gray = (record.features["image"] for record in read.read(_raise))
        # ITU-R 601-2, as Pillow documents; it rounds.
        luma = pixels @ np.array([299, 587, 114]) / 1000
        assert abs(color[:, :, 0] - luma).max() <= 1
        assert abs(pixels.mean(2) - luma).max() > 10
        np.testing.assert_array_equal(gray[:, :, 0], pixels[:, :, 0])

    def test_gray_file_becomes_color(self, tmp_path):
        pixels = _draw(1)[:, :, 0]
        _save(tmp_path / "c/a.png", pixels)
        image = _read(tmp_path)[0].features["image"]
        np.testing.assert_array_equal(image, np.stack([pixels] * 3, axis=-1))

    def test_splits(self, tmp_path):
        _save(tmp_path / "test/dog/a.png")
        _save(tmp_path / "train/cat/a.png")
        _save(tmp_path / "train/dog/b.png")
        calls = []

        def assign(split, labels):
            calls.append((split, labels["label"].tolist()))
            return _keep_all(split, labels)

        records = _read(tmp_path, assign=assign)
        assert calls == [("train", [0, 1]), ("test", [1])]
        assert [r.split for r in records] == ["train", "train", "test"]
        assert [r.features["label"] for r in records] == [0, 1, 1]

    def test_class_called_like_a_split(self, tmp_path):
        _save(tmp_path / "test/a.png")
        _save(tmp_path / "tube/a.png")
        assert _build(tmp_path).classes == ("test", "tube")

    def test_ignored_files(self, tmp_path):
        _save(tmp_path / "c/a.png")
        for name in ("c/.DS_Store", "c/Thumbs.db", "c/._a.png", "readme.txt"):
            (tmp_path / name).write_bytes(b"no image")
        (tmp_path / ".cache").mkdir()
        read = _build(tmp_path)
        assert len(list(read.read(_raise))) == 1
        assert read.num_ignored == 2
        assert read.classes == ("c",)


class TestUserLayout:
    def test_records(self, tmp_path):
        _save(tmp_path / "bob/cat/a.png")
        _save(tmp_path / "ann/dog/a.png")
        _save(tmp_path / "ann/cat/a.png")
        # A class that one user alone has.
        _save(tmp_path / "bob/eel/a.png")
        read = _build(tmp_path, layout=ImageLayout.USER_CLASS)
        assert read.classes == ("cat", "dog", "eel")
        found = [(r.client_id, r.features["label"]) for r in read.read(_raise)]
        assert found == [("ann", 0), ("ann", 1), ("bob", 0), ("bob", 2)]

    def test_splits(self, tmp_path):
        _save(tmp_path / "train/ann/cat/a.png")
        _save(tmp_path / "validation/ann/cat/a.png")
        records = _read(tmp_path, layout=ImageLayout.USER_CLASS)
        found = [(r.client_id, r.split) for r in records]
        assert found == [("ann", "train"), ("ann", "validation")]


class TestErrors:
    def _check(self, tmp_path, place, reason, *, count=1, **options):
        records, errors = _read_with_errors(tmp_path, **options)
        assert len(records) == count
        assert [e.place for e in errors] == [str(tmp_path / place)]
        with pytest.raises(SourceError, match=reason):
            _read(tmp_path, **options)

    def test_damaged_images(self, tmp_path):
        _save(tmp_path / "c/a.png")
        for name, cut in (("b.png", 60), ("c.png", 0), ("d.png", 10)):
            _save(tmp_path / "c" / name)
            data = (tmp_path / "c" / name).read_bytes()
            (tmp_path / "c" / name).write_bytes(data[:cut])
        (tmp_path / "c/e.jpg").write_text("no image")
        records, errors = _read_with_errors(tmp_path)
        assert [r.client_id for r in records] == ["client_0"]
        names = ["b.png", "c.png", "d.png", "e.jpg"]
        assert [e.place for e in errors] == [str(tmp_path / "c" / n) for n in names]
        with pytest.raises(SourceError, match=r"b.png: is no sound image"):
            _read(tmp_path)

    def test_sixteen_bits(self, tmp_path):
        _save(tmp_path / "c/a.png")
        _save(tmp_path / "c/b.png", np.full([4, 6], 40_000, np.uint16))
        self._check(tmp_path, "c/b.png", "must have 8 bits a channel. Found mode I;16")

    def test_empty_class(self, tmp_path):
        _save(tmp_path / "c/a.png")
        (tmp_path / "d").mkdir()
        self._check(tmp_path, "d", "d: must hold an image")

    def test_user_without_classes(self, tmp_path):
        _save(tmp_path / "ann/c/a.png")
        (tmp_path / "bob").mkdir()
        layout = ImageLayout.USER_CLASS
        self._check(tmp_path, "bob", "a folder for each class", layout=layout)

    @pytest.mark.parametrize("place", ["loose.png", "ann/loose.png"])
    def test_image_outside_a_class(self, tmp_path, place):
        _save(tmp_path / "ann/c/a.png")
        _save(tmp_path / place)
        layout = ImageLayout.USER_CLASS
        self._check(tmp_path, place, "must be in the folder of a class", layout=layout)

    def test_folder_too_deep(self, tmp_path):
        _save(tmp_path / "c/a.png")
        _save(tmp_path / "c/deep/a.png")
        self._check(tmp_path, "c/deep", "must be an image, not a folder")

    def test_no_classes(self, tmp_path):
        with pytest.raises(SourceError, match="must hold folders class. Found none"):
            _build(tmp_path)
        _save(tmp_path / "c/a.png")
        with pytest.raises(SourceError, match="folders user/class. Found none"):
            _build(tmp_path, layout=ImageLayout.USER_CLASS)
        with pytest.raises(SourceError, match="absent: must be a folder"):
            _build(tmp_path / "absent")

    def test_partition_that_does_not_fit(self, tmp_path):
        _save(tmp_path / "c/a.png")
        with pytest.raises(ValueError, match="each of 1 images of 'train'. Found 0"):
            _read(tmp_path, assign=lambda split, labels: [])

    def test_bad_arguments(self, tmp_path):
        for size in ((0, 4), (4, -1), (4,)):
            with pytest.raises(ValueError, match="`size` must be a positive height"):
                _build(tmp_path, size=size)
        with pytest.raises(ValueError, match="`assign` must say.* None with CLASS"):
            _build(tmp_path, assign=None)
        with pytest.raises(ValueError, match="`assign` must .* with USER_CLASS"):
            _build(tmp_path, layout=ImageLayout.USER_CLASS, assign=_keep_all)

    def test_without_pillow(self, tmp_path, monkeypatch):
        _save(tmp_path / "c/a.png")
        monkeypatch.setitem(sys.modules, "PIL.Image", None)
        with pytest.raises(SourceError, match="`pip install pillow`"):
            _read(tmp_path)
