"""Evaluation on central test data, in this process, in bounded memory."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from simulation.model import Model
from simulation.tasks.task import Task, build_dataset

_BATCH_SIZE = 500


def build_evaluation(
    model: Model, task: Task
) -> Callable[[Sequence[np.ndarray]], Mapping[str, float]]:
    """Returns a function from weights to the mean loss and metrics on the test data.

    Guarantees: batches come in a fixed order and dropout is off, so that equal weights
    give equal numbers.
    """
    batches = build_dataset(task.test_x, task.test_y).batch(_BATCH_SIZE)

    @tf.function
    def compute_sums(
        weights: tuple[tf.Tensor, ...], x: tf.Tensor, y: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        outputs = model.predict(weights, x, None)
        sums = {"loss": tf.reduce_sum(model.compute_loss(y, outputs))}
        for name, metric in model.metrics.items():
            sums[name] = tf.reduce_sum(metric(y, outputs))
        return sums

    def evaluate(weights: Sequence[np.ndarray]) -> Mapping[str, float]:
        tensors = tuple(tf.convert_to_tensor(weight) for weight in weights)
        totals: dict[str, float] = {}
        for batch in batches:
            for name, value in compute_sums(tensors, batch["x"], batch["y"]).items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return {name: total / len(task.test_y) for name, total in totals.items()}

    return evaluate
