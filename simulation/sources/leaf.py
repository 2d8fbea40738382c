"""Federated data sets in LEAF's JSON format (https://leaf.cmu.edu).

A file is {"users": [...], "num_samples": [...], "user_data": {user: {"x", "y"}}}. It is
read one user at a time, so that the memory holds the largest user and all names.
"""

import dataclasses
import enum
import html
import importlib.util
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from simulation.sources.json_reader import DamageError, JsonReader
from simulation.sources.source import (
    TEST,
    TRAIN,
    Feature,
    Kind,
    OnBad,
    Record,
    Source,
    SourceError,
    Value,
)

_NUM_CHARACTERS = 62
_CHARACTER_SIZE = 28
_SENT140_FIELDS = 6
_SENT140_TEXT = 4
_SHAKESPEARE_LENGTH = 80
_IMAGE_SIZE = 84
_INT64_LIMIT = 2**63
_WORD = re.compile(r"https?://\S+|www\.\S+|@\w+|\w+(?:['\u2019-]\w+)*|[^\w\s]")


class LeafDataset(enum.Enum):
    """What the x and y of an example are."""

    FEMNIST = "femnist"
    SENT140 = "sent140"
    SHAKESPEARE = "shakespeare"
    SYNTHETIC = "synthetic"
    CELEBA = "celeba"


class LeafSource(Source):
    """The examples of LEAF's `all_data`, or of its folders `train` and `test`.

    FEMNIST: pixels (1.0 is the background) and label, as TFF's EMNIST has them.
    SENT140: the text as it is, its tokens, and label (1 is positive; a 4 is read as 1).
    SHAKESPEARE: x, 80 characters, and y, the next one. SYNTHETIC: x and label.
    CELEBA: image, RGB of 84 x 84, and label.

    A user that comes twice is refused the second time; a user of `train` may come in
    `test` too. A user without examples that `users` does not list is passed over:
    LEAF's division by sample leaves such behind.
    """

    def __init__(
        self,
        *,
        path: pathlib.Path | str,
        dataset: LeafDataset,
        images: pathlib.Path | str | None = None,
    ) -> None:
        """Finds the files.

        Args:
            path: A JSON file, a folder of *.json and *.json.gz, or a folder with
                folders `train` and `test` of them.
            dataset: What the files have.
            images: The folder of CelebA's images; None for the other data sets.

        Raises:
            SourceError: If there are no such files, or Pillow is needed and not
                installed.
            ValueError: If images are missing, or given for another data set.
        """
        self._inputs = _find_inputs(pathlib.Path(path))
        self._dataset = dataset
        self._dim: int | None = None
        self._images = pathlib.Path(images or "")
        if (images is not None) != (dataset is LeafDataset.CELEBA):
            raise ValueError(
                "`images` must be the folder of the images for CELEBA and None for the "
                f"other data sets. Found {images!r} for {dataset.name}."
            )
        if images is None:
            return
        if not self._images.is_dir():
            raise SourceError(str(images), "`images` must be a folder. Found none.")
        if importlib.util.find_spec("PIL") is None:
            raise SourceError(
                str(images), "reading images needs Pillow. Install Pillow."
            )

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        """The JSON files; CelebA's images are not among them."""
        return tuple(path for path, _ in self._inputs)

    @property
    def features(self) -> Mapping[str, Feature]:
        text, label = Feature(kind=Kind.BYTES), Feature(kind=Kind.INT64)
        match self._dataset:
            case LeafDataset.FEMNIST:
                shape: tuple[int, ...] = (_CHARACTER_SIZE, _CHARACTER_SIZE)
                pixels = Feature(kind=Kind.FLOAT, shape=shape)
                return {"label": label, "pixels": pixels}
            case LeafDataset.SENT140:
                return {"label": label, "text": text, "tokens": text}
            case LeafDataset.SHAKESPEARE:
                return {"x": text, "y": text}
            case LeafDataset.SYNTHETIC:
                shape = (self._find_dim(),)
                return {"label": label, "x": Feature(kind=Kind.FLOAT, shape=shape)}
            case LeafDataset.CELEBA:
                shape = (_IMAGE_SIZE, _IMAGE_SIZE, 3)
                return {"image": Feature(kind=Kind.INT64, shape=shape), "label": label}

    @property
    def separators(self) -> Mapping[str, str]:
        return {"tokens": " "} if self._dataset is LeafDataset.SENT140 else {}

    def read(self, on_bad: OnBad) -> Iterator[Record]:
        try:
            convert = self._choose_converter()
        except DamageError as error:
            on_bad(error)
            return
        seen: dict[str | None, set[str]] = {TRAIN: set(), TEST: set(), None: set()}
        for path, split in self._inputs:
            try:
                for user in _read_users(path, seen[split], on_bad):
                    for index, (x, y) in enumerate(zip(user.x, user.y, strict=True)):
                        place = f"{user.place}, example {index}"
                        try:
                            features = convert(x, y)
                        except ValueError as error:
                            on_bad(SourceError(place, str(error)))
                            continue
                        yield Record(
                            client_id=user.name,
                            features=features,
                            place=place,
                            split=split,
                        )
            except DamageError as error:
                on_bad(error)

    def _choose_converter(self) -> Callable[[Any, Any], dict[str, Value]]:
        match self._dataset:
            case LeafDataset.FEMNIST:
                return _convert_femnist
            case LeafDataset.SENT140:
                return _convert_sent140
            case LeafDataset.SHAKESPEARE:
                return _convert_shakespeare
            case LeafDataset.SYNTHETIC:
                dim = self._find_dim()
                return lambda x, y: _convert_synthetic(x, y, dim=dim)
            case LeafDataset.CELEBA:
                images = self._images
                return lambda x, y: _convert_celeba(x, y, images=images)

    def _find_dim(self) -> int:
        """Returns the dimension of the first example."""
        if self._dim is not None:
            return self._dim
        path = self.files[0]
        for user in _read_users(path, set(), on_bad=lambda error: None):
            if isinstance(user.x[0], list) and user.x[0]:
                self._dim = len(user.x[0])
                return self._dim
            raise DamageError(
                f"{user.place}, example 0",
                f"`x` must be a list of numbers. Found {_shorten(user.x[0])}.",
            )
        raise DamageError(str(path), "must have an example. Found none.")


def _convert_femnist(x: Any, y: Any) -> dict[str, Value]:
    pixels = _check_floats(x, _CHARACTER_SIZE**2)
    if pixels.min() < 0 or pixels.max() > 1:
        raise ValueError(
            f"`x` must be in [0, 1]. Found {pixels.min():g} to {pixels.max():g}."
        )
    label = _check_label(y, _NUM_CHARACTERS)
    return {
        "label": label,
        "pixels": pixels.reshape([_CHARACTER_SIZE, _CHARACTER_SIZE]),
    }


def _convert_sent140(x: Any, y: Any) -> dict[str, Value]:
    if (
        not isinstance(x, list)
        or len(x) != _SENT140_FIELDS
        or not all(isinstance(field, str) for field in x)
    ):
        raise ValueError(
            f"`x` must be {_SENT140_FIELDS} strings: id, date, query, user, text, "
            f"split. Found {_shorten(x)}."
        )
    if isinstance(y, bool) or y not in (0, 1, 4):
        raise ValueError(f"`y` must be 0, 1 or 4. Found {_shorten(y)}.")
    text = x[_SENT140_TEXT]
    tokens = _WORD.findall(html.unescape(text).lower())
    return {
        "label": min(int(y), 1),
        "text": _encode(text),
        "tokens": _encode(" ".join(tokens)),
    }


def _convert_shakespeare(x: Any, y: Any) -> dict[str, Value]:
    for name, value, length in (("x", x, _SHAKESPEARE_LENGTH), ("y", y, 1)):
        if not isinstance(value, str) or len(value) != length:
            raise ValueError(
                f"`{name}` must be a string of {length} characters. Found "
                f"{_shorten(value)}."
            )
    return {"x": _encode(x), "y": _encode(y)}


def _convert_synthetic(x: Any, y: Any, *, dim: int) -> dict[str, Value]:
    return {"label": _check_label(y, _INT64_LIMIT), "x": _check_floats(x, dim)}


def _convert_celeba(x: Any, y: Any, *, images: pathlib.Path) -> dict[str, Value]:
    """Reads an image as LEAF does, where bicubic is what Pillow itself chooses."""
    from PIL import Image

    if not isinstance(x, str) or x in ("", ".", "..") or pathlib.PurePath(x).name != x:
        raise ValueError(f"`x` must be the name of a file. Found {_shorten(x)}.")
    label = _check_label(y, 2)
    size = (_IMAGE_SIZE, _IMAGE_SIZE)
    try:
        with Image.open(images / x) as image:
            pixels = image.resize(size, Image.Resampling.BICUBIC).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"`x` must be an image in {images}. Found {error}.") from error
    return {"image": np.asarray(pixels, dtype=np.int64), "label": label}


def _check_floats(x: Any, size: int) -> np.ndarray:
    """Returns finite numbers as float32[size]."""
    if (
        not isinstance(x, list)
        or len(x) != size
        or not {type(value) for value in x} <= {int, float}
    ):
        raise ValueError(f"`x` must be a list of {size} numbers. Found {_shorten(x)}.")
    try:
        with np.errstate(over="ignore"):
            values = np.array(x, dtype=np.float64).astype(np.float32)
    except OverflowError:
        values = np.array([np.inf])
    if not np.isfinite(values).all():
        index = next(i for i, v in enumerate(x) if not abs(v) <= np.finfo("f4").max)
        raise ValueError(
            f"`x` must be finite. Found {_shorten(x[index])} at {index} of {size}."
        )
    return values


def _check_label(y: Any, count: int) -> int:
    """Returns a whole number in [0, count); CelebA and FedProx write it as 1.0."""
    whole = type(y) is int or (type(y) is float and y.is_integer())
    if not whole or not 0 <= y < count:
        raise ValueError(
            f"`y` must be a whole number in [0, {count}). Found {_shorten(y)}."
        )
    return int(y)


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"a text must be Unicode. Found {_shorten(text)}.") from None


def _shorten(value: Any) -> str:
    """Returns a value for a message; of a list also the length."""
    if isinstance(value, list):
        return f"{len(value)} values: {_shorten(tuple(value[:3]))}"
    text = ascii(value)
    return text if len(text) <= 60 else text[:60] + "..."


def _find_inputs(path: pathlib.Path) -> tuple[tuple[pathlib.Path, str | None], ...]:
    """Returns the files with their splits, in the order of reading."""
    if path.is_file():
        return ((path, None),)
    if not path.is_dir():
        raise SourceError(str(path), "must be a file or a folder. Found none.")
    direct = [(file, None) for file in _list_json(path)]
    divided = [
        (file, split)
        for name, split in (("train", TRAIN), ("test", TEST))
        for file in _list_json(path / name)
    ]
    if bool(direct) == bool(divided):
        raise SourceError(
            str(path),
            "must have either *.json and *.json.gz files or folders `train` and `test` "
            f"of them. Found {'both' if direct else 'none'}.",
        )
    return (*direct, *divided)


def _list_json(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _User:
    """A user's examples, as many x as y and at least one."""

    name: str
    x: list[Any]
    y: list[Any]
    place: str


def _read_users(path: pathlib.Path, seen: set[str], on_bad: OnBad) -> Iterator[_User]:
    """Yields the users of a file that are in order.

    Args:
        path: The file.
        seen: The users that have been met; the file's own are added.
        on_bad: Is told of the other users.

    Raises:
        DamageError: If the file is damaged.
    """
    expected = _read_expected(path)
    met: set[str] = set()
    found = False
    with JsonReader(path) as reader:
        for key in reader.read_keys():
            if key != "user_data":
                reader.skip_value()
                continue
            found = True
            for name in reader.read_keys():
                reader.within = f"user {name!a}"
                data = reader.read_value()
                place = f"{path}, {reader.within}"
                reader.within = None
                if name not in expected and data == {"x": [], "y": []}:
                    continue
                met.add(name)
                try:
                    user = _check_user(name, data, expected, seen, place)
                except SourceError as error:
                    on_bad(error)
                    continue
                seen.add(name)
                yield user
        reader.check_end()
    if not found:
        raise DamageError(str(path), "must have `user_data`. Found none.")
    for name in expected:
        if name not in met:
            place = f"{path}, user {name!a}"
            on_bad(SourceError(place, "must be in `user_data`. Found in `users`."))


def _read_expected(path: pathlib.Path) -> dict[str, int]:
    """Returns how many examples each user has by `users` and `num_samples`.

    LEAF writes both before the data; where they come behind, the data are skipped.
    """
    lists: dict[str, Any] = {}
    with JsonReader(path) as reader:
        for key in reader.read_keys():
            if key in ("users", "num_samples"):
                lists[key] = reader.read_value()
            else:
                reader.skip_value()
            if len(lists) == 2:
                break
    for key, kind in (("users", str), ("num_samples", int)):
        if not isinstance(lists.get(key), list):
            raise DamageError(
                str(path), f"`{key}` must be a list. Found {_shorten(lists.get(key))}."
            )
        for index, value in enumerate(lists[key]):
            if type(value) is not kind:
                raise DamageError(
                    f"{path}, {key}[{index}]",
                    f"must be of {kind.__name__}. Found {_shorten(value)}.",
                )
    users, counts = lists["users"], lists["num_samples"]
    if len(users) != len(counts) or len(users) != len(set(users)):
        raise DamageError(
            str(path),
            "`users` must be distinct and as many as `num_samples`. Found "
            f"{len(users)}, {len(set(users))} of them distinct, and {len(counts)}.",
        )
    return dict(zip(users, counts, strict=True))


def _check_user(
    name: str, data: Any, expected: Mapping[str, int], seen: set[str], place: str
) -> _User:
    try:
        _encode(name)
    except ValueError as error:
        raise SourceError(place, f"a user's name: {error}") from None
    if not name:
        raise SourceError(place, "a user must have a name. Found ''.")
    if name not in expected:
        raise SourceError(place, "must be in `users`. Found in `user_data`.")
    if name in seen:
        raise SourceError(place, "a user must come once. Found before.")
    x, y = (data.get(k) if isinstance(data, dict) else None for k in ("x", "y"))
    if not isinstance(x, list) or not isinstance(y, list):
        raise SourceError(
            place, f"must have lists `x` and `y`. Found {_shorten(data)}."
        )
    if not len(x) == len(y) == expected[name]:
        raise SourceError(
            place,
            "`num_samples` must be the number of x and of y. Found "
            f"{expected[name]}, {len(x)} x and {len(y)} y.",
        )
    if not x:
        raise SourceError(place, "a user must have examples. Found none.")
    return _User(name=name, x=x, y=y, place=place)
