"""The data of run_upcycled_study: the authors' files, or generated ones."""

import dataclasses
import hashlib
import io
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from scripts.upcycled_study_config import StudyConfig
from simulation.population.federated_data import ArrayData, FederatedData
from simulation.tasks import TaskOptions, load_task
from simulation.tasks.synthetic import NUM_CLASSES

_PARTS = ("train", "test")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StudyData:
    """One data set.

    Attributes:
        name: One of DATA_NAMES.
        train: The users' training data, inputs of shape [n, num_features, 1, 1].
        examples: x, float32[n, num_features], and y, int32[n], of all users together,
            by "train" and "test".
        identity: What says whether two runs had the same data, as JSON values.
    """

    name: str
    train: FederatedData
    examples: Mapping[str, tuple[np.ndarray, np.ndarray]]
    identity: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, int]:
        """The length of an input, and the number of classes: 1 + the largest label."""
        labels = [int(y.max()) for _, y in self.examples.values()]
        return self.examples["train"][0].shape[1], 1 + max(labels)

    @property
    def source(self) -> str:
        """Where it comes from: a file's name, or that it is generated."""
        return str(self.identity["source"])

    @property
    def is_generated(self) -> bool:
        """Whether it is made up here, and not the authors'."""
        return bool(self.identity["generated"])

    @property
    def description(self) -> str:
        """One line: where it comes from and how much it is."""
        sizes = ", ".join(f"{len(self.examples[part][1])} {part}" for part in _PARTS)
        return (
            f"{self.name}: {self.source}; {len(self.train.client_ids)} "
            f"users, {sizes} examples, {self.shape[1]} classes"
        )


def load_data(config: StudyConfig) -> dict[str, StudyData]:
    """Returns the data sets that are asked for, by name.

    Raises:
        ValueError: If a file is missing or malformed, with its name.
    """
    found = {}
    for name in config.data:
        if config.data_folder is None:
            data = _generate(name, seed=config.data_seed)
        else:
            data = read_file(pathlib.Path(config.data_folder), name)
        if len(data.train.client_ids) < config.clients_per_round:
            raise ValueError(
                "`clients_per_round` must be at most the number of users. Found "
                f"{config.clients_per_round!r} for {data.description}."
            )
        found[name] = data
    return found


def read_file(folder: pathlib.Path, name: str) -> StudyData:
    """Reads synthetic_<name>.npz of a folder.

    Raises:
        ValueError: If it is missing or malformed.
    """
    path = folder / f"synthetic_{name}.npz"
    content, arrays = _read_arrays(path)
    _check_arrays(path, arrays)
    examples, users = {}, {}
    for part in _PARTS:
        x = np.asarray(arrays[f"x_{part}"], np.float32)
        examples[part] = (x, np.asarray(arrays[f"y_{part}"], np.int32))
        users[part] = np.asarray(arrays[f"user_{part}"])
    x, y = examples["train"]
    rows = {str(user): users["train"] == user for user in np.unique(users["train"])}
    clients = {k: (x[kept, :, None, None], y[kept]) for k, kept in rows.items()}
    return StudyData(
        name=name,
        train=ArrayData(client_ids=tuple(clients), make=clients.__getitem__),
        examples=examples,
        identity={
            "source": path.name,
            "sha256": hashlib.sha256(content).hexdigest(),
            "generated": False,
        },
    )


def _read_arrays(path: pathlib.Path) -> tuple[bytes, dict[str, np.ndarray]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"{path} must be there, one file of `data_folder` for each of `data`. "
            "Found none."
        ) from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    names = {f"{kind}_{part}" for kind in ("x", "y", "user") for part in _PARTS}
    try:
        file = np.load(io.BytesIO(content), allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise ValueError("it holds one array without a name")
        missing = sorted(names - set(file.files))
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return content, {name: file[name] for name in names}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        problem = str(error)
    raise ValueError(f"{path} must be an .npz file of the six arrays: {problem}.")


def _check_arrays(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    for part in _PARTS:
        x, y, user = (arrays[f"{kind}_{part}"] for kind in ("x", "y", "user"))
        if x.ndim != 2 or x.dtype.kind not in "fiu" or not x.size:
            raise ValueError(
                f"{path}: `x_{part}` must be numbers of shape [n, features]. Found "
                f"{x.dtype} {list(x.shape)}."
            )
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(x.astype(np.float32))
        if not np.all(is_finite):
            raise ValueError(
                f"{path}: `x_{part}` must be finite in float32. Found "
                f"{x[~is_finite][0]!r}."
            )
        for name, values in ((f"y_{part}", y), (f"user_{part}", user)):
            if values.shape != (len(x),) or values.dtype.kind not in "iu":
                raise ValueError(
                    f"{path}: `{name}` must be integers of shape [{len(x)}], as "
                    f"`x_{part}` has so many rows. Found {values.dtype} "
                    f"{list(values.shape)}."
                )
        if y.min() < 0 or y.max() >= NUM_CLASSES:
            raise ValueError(
                f"{path}: `y_{part}` must be in [0, {NUM_CLASSES}). Found {y.min()} to "
                f"{y.max()}."
            )
    widths = [arrays[f"x_{part}"].shape[1] for part in _PARTS]
    if widths[0] != widths[1]:
        raise ValueError(
            f"{path}: `x_train` and `x_test` must have equally many features. Found "
            f"{widths[0]} and {widths[1]}."
        )


def _generate(name: str, *, seed: int) -> StudyData:
    options: dict[str, Any] = {"data_seed": seed}
    if name == "iid":
        task = load_task("synthetic_20_iid", TaskOptions(**options))
    else:
        alpha, beta = map(float, name.split("_"))
        options |= {"data_alpha": alpha, "data_beta": beta}
        task = load_task("synthetic_20", TaskOptions(**options))
    examples = {}
    for part, data in (("train", task.train), ("test", task.test)):
        loaded = [data.load(client_id) for client_id in data.client_ids]
        x = np.concatenate([x[:, :, 0, 0] for x, _ in loaded])
        examples[part] = (x, np.concatenate([y for _, y in loaded]))
    source = f"GENERATED by the task {task.name} ({task.identity['generated']}), not "
    return StudyData(
        name=name,
        train=task.train,
        examples=examples,
        identity={
            "source": f"{source}the authors' file",
            **task.identity,
            "generated": True,
        },
    )
