"""Folders of images, one folder for each class.

Either `class/image.png`, whose images a partition assigns to clients, or
`user/class/image.png`. Where all subfolders are called train, validation or test, each
holds such folders of one split. Images become one size and one number of channels.
"""

import enum
import functools
import importlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from simulation.sources import source
from simulation.sources.source import SourceError

EXTENSIONS = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
_SPLITS = (source.TRAIN, source.VALIDATION, source.TEST)
# What Pillow calls images of 8 bits a channel. It would cut others off, not scale them.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB")


class ImageLayout(enum.Enum):
    """What the folders above an image are."""

    CLASS = "class"
    USER_CLASS = "user/class"


class ImageFolderSource(source.Source):
    """Images with `image` INT64 [height, width, channels] in 0..255 and `label`.

    Files without an image's extension are left out. Not guaranteed: transparency and
    the orientation in EXIF are ignored; of an animation the first image is taken.

    Attributes:
        classes: The names of the classes: a label is an index in them. Sorted.
    """

    def __init__(
        self,
        *,
        path: pathlib.Path,
        layout: ImageLayout,
        size: tuple[int, int],
        grayscale: bool = False,
        assign: source.Assign | None = None,
    ) -> None:
        """Lists the classes.

        Args:
            path: The folder.
            layout: What its subfolders, or those of its splits, are.
            size: Height and width to which images of another size are scaled.
            grayscale: Whether images have one channel and not three.
            assign: For CLASS: given a split and the labels of its images, returns the
                client of each. The split of a folder without splits is TRAIN. None for
                USER_CLASS, where the outer folder is the user.

        Raises:
            SourceError: If there is no such folder, or no class in it.
            ValueError: If `size` is not positive, or `assign` does not fit `layout`.
        """
        if len(size) != 2 or min(size) < 1:
            raise ValueError(
                f"`size` must be a positive height and width. Found {size!r}."
            )
        if (assign is None) == (layout is ImageLayout.CLASS):
            raise ValueError(
                "`assign` must say whose the images are where `layout` is CLASS, and "
                f"be None where it is USER_CLASS. Found {assign!r} with {layout.name}."
            )
        if not path.is_dir():
            raise SourceError(str(path), "must be a folder.")
        self._path, self._layout, self._assign = path, layout, assign
        self._size, self._grayscale = size, grayscale
        self._roots: dict[str | None, pathlib.Path] = {None: path}
        folders = {folder.name: folder for folder in _list_folders(path)}
        if folders and set(folders) <= set(_SPLITS):
            self._roots = {name: folders[name] for name in _SPLITS if name in folders}
        names = {
            folder.name
            for split in self._roots
            for _, folder in self._list_classes(split, _ignore)
        }
        if not names:
            raise SourceError(
                str(path), f"must hold folders {layout.value}. Found none."
            )
        self.classes: tuple[str, ...] = tuple(sorted(names))

    @functools.cached_property
    def files(self) -> tuple[pathlib.Path, ...]:
        """The images."""
        return tuple(
            image
            for split in self._roots
            for _, folder in self._list_classes(split, _ignore)
            for image in _list_images(folder, _ignore)
        )

    @property
    def num_ignored(self) -> int:
        """How many files there are without an image's extension, hidden ones apart."""
        return sum(
            not _is_image(path) and not path.name.startswith(".")
            for path in self._path.rglob("*")
            if path.is_file()
        )

    @property
    def features(self) -> Mapping[str, source.Feature]:
        """`image`, INT64 [height, width, 1 or 3], and `label`."""
        shape = (*self._size, 1 if self._grayscale else 3)
        return {
            "image": source.Feature(kind=source.Kind.INT64, shape=shape),
            "label": source.Feature(kind=source.Kind.INT64),
        }

    def read(self, on_bad: source.OnBad) -> Iterator[source.Record]:
        """Yields the images by split, user, class and name, in sorted order."""
        pillow = _import_pillow(self._path)
        numbers = {name: number for number, name in enumerate(self.classes)}
        for split in self._roots:
            images: list[pathlib.Path] = []
            labels: list[int] = []
            users: list[str | None] = []
            for user, folder in self._list_classes(split, on_bad):
                found = _list_images(folder, on_bad)
                if not found:
                    on_bad(SourceError(str(folder), "must hold an image."))
                images += found
                labels += [numbers[folder.name]] * len(found)
                users += [user] * len(found)
            client_ids: Sequence[str | None] = users
            if self._assign is not None and images:
                client_ids = source.assign_clients(
                    self._assign,
                    split or source.TRAIN,
                    {"label": np.array(labels, np.int64)},
                )
            for image, label, client_id in zip(images, labels, client_ids, strict=True):
                if client_id is None:
                    continue
                try:
                    pixels = self._load_image(image, pillow)
                except SourceError as error:
                    on_bad(error)
                    continue
                yield source.Record(
                    client_id=client_id,
                    features={"image": pixels, "label": label},
                    place=str(image),
                    split=split,
                )

    def _list_classes(
        self, split: str | None, on_bad: source.OnBad
    ) -> list[tuple[str | None, pathlib.Path]]:
        """Returns the folders of classes of a split, and whose they are if anyone's."""
        root = self._roots[split]
        _check_no_images(root, on_bad)
        if self._layout is ImageLayout.CLASS:
            return [(None, folder) for folder in _list_folders(root)]
        classes: list[tuple[str | None, pathlib.Path]] = []
        for user in _list_folders(root):
            _check_no_images(user, on_bad)
            found = _list_folders(user)
            if not found:
                on_bad(SourceError(str(user), "must hold a folder for each class."))
            classes += [(user.name, folder) for folder in found]
        return classes

    def _load_image(self, path: pathlib.Path, pillow: Any) -> np.ndarray:
        """Returns int64 [height, width, channels]."""
        height, width = self._size
        try:
            with pillow.open(path) as image:
                if image.mode not in _MODES:
                    raise SourceError(
                        str(path),
                        f"must have 8 bits a channel. Found mode {image.mode}.",
                    )
                converted = image.convert("L" if self._grayscale else "RGB")
                if converted.size != (width, height):
                    converted = converted.resize(
                        (width, height), pillow.Resampling.BILINEAR
                    )
                pixels = np.asarray(converted, np.int64)
        except SourceError:
            raise
        except Exception as error:  # Each of Pillow's decoders raises its own.
            raise SourceError(str(path), f"is no sound image: {error}.") from error
        return pixels.reshape(height, width, -1)


def _ignore(error: SourceError) -> None:
    """Leaves a bad record to the one who reads."""


def _import_pillow(path: pathlib.Path) -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise SourceError(
            str(path), "images need Pillow: `pip install pillow`."
        ) from error


def _list_visible(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _list_folders(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in _list_visible(folder) if path.is_dir()]


def _list_images(folder: pathlib.Path, on_bad: source.OnBad) -> list[pathlib.Path]:
    images = []
    for path in _list_visible(folder):
        if path.is_dir():
            on_bad(SourceError(str(path), "must be an image, not a folder."))
        elif _is_image(path):
            images.append(path)
    return images


def _check_no_images(folder: pathlib.Path, on_bad: source.OnBad) -> None:
    for path in _list_visible(folder):
        if path.is_file() and _is_image(path):
            on_bad(SourceError(str(path), "must be in the folder of a class."))


def _is_image(path: pathlib.Path) -> bool:
    return path.suffix.lower() in EXTENSIONS
