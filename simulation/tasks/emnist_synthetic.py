"""A stand-in for EMNIST with 62 classes: its sizes, without its data.

TFF ships 10 hard-coded digit images as `tff.simulation.datasets.emnist.get_synthetic`,
in the format of its EMNIST, for 2 clients. To run the published settings (3,400
clients, 100 a round) each of 3,400 made-up clients gets 40 copies of them, each moved
by up to 3 pixels. Times, bits and epsilon are those of the real task; the accuracy says
nothing about it.
"""

import functools
import zlib

import numpy as np
import tensorflow_federated as tff

from simulation.image_models import build_emnist_cnn, build_logistic_regression
from simulation.population.federated_data import ArrayData, build_pool
from simulation.tasks.options import TaskOptions
from simulation.tasks.task import Task

IMAGE_SHAPE = (28, 28, 1)
NUM_CLASSES = 62
NUM_CLIENTS = 3_400
EXAMPLES_PER_CLIENT = 40
_NUM_TEST = 500
_LARGEST_SHIFT = 3


def build_task(options: TaskOptions) -> Task:
    """Returns the task `emnist_character_synthetic`."""
    options.check_taken("emnist_character_synthetic")
    data = tff.simulation.datasets.emnist.get_synthetic()
    examples = list(data.create_tf_dataset_for_client(data.client_ids[0]))
    images = np.stack([example["pixels"].numpy() for example in examples])
    labels = np.array([example["label"].numpy() for example in examples], np.int32)
    test_x, test_y = _draw_examples("test", images, labels, count=_NUM_TEST)
    return Task(
        name="emnist_character_synthetic",
        description=(
            "SYNTHETIC data, not EMNIST: 10 digit images that TFF ships, shifted at "
            "random, for 3,400 made-up users with 40 images each; 500 test images. "
            "The accuracy says nothing about EMNIST"
        ),
        train=ArrayData(
            client_ids=tuple(f"synthetic_{index:04d}" for index in range(NUM_CLIENTS)),
            make=lambda client_id: _draw_examples(
                client_id, images, labels, count=EXAMPLES_PER_CLIENT
            ),
        ),
        test=build_pool(test_x, test_y),
        has_test_users=False,
        models={
            "emnist_cnn": functools.partial(build_emnist_cnn, IMAGE_SHAPE, NUM_CLASSES),
            "logistic_regression": functools.partial(
                build_logistic_regression, IMAGE_SHAPE, NUM_CLASSES
            ),
        },
        metric="accuracy",
    )


def _draw_examples(
    name: str, images: np.ndarray, labels: np.ndarray, *, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns shifted images and their labels: a function of the name alone."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    chosen = rng.integers(len(images), size=count)
    shifts = rng.integers(-_LARGEST_SHIFT, _LARGEST_SHIFT + 1, size=[count, 2])
    x = np.stack(
        [
            np.roll(images[index], shift, axis=(0, 1))
            for index, shift in zip(chosen, shifts, strict=True)
        ]
    )
    return x[..., np.newaxis].astype(np.float32), labels[chosen]
