"""Toy data, weights and what they evaluate to, for the tests of evaluation."""

import numpy as np

from simulation import evaluation
from simulation.population.federated_data import ArrayData
from tests.simulation import toys

# "none" has no example, "large" has more than some batches.
SIZES = {"b": 3, "none": 0, "a": 1, "large": 11, "c": 4}


def build_data(sizes=None, client_ids=None, *, seed: int = 0) -> ArrayData:
    """Returns images whose first entry numbers them: 1000 a client."""
    sizes = SIZES if sizes is None else sizes

    def make(client_id):
        rng = np.random.default_rng([seed, *client_id.encode()])
        x = rng.normal(size=[sizes[client_id], *toys.SHAPE]).astype(np.float32)
        first = 1000 * sorted(sizes).index(client_id)
        x[:, 0, 0, 0] = first + np.arange(len(x))
        return x, rng.integers(toys.NUM_CLASSES, size=len(x)).astype(np.int32)

    return ArrayData(client_ids=tuple(client_ids or sizes), make=make)


def select(data, **options) -> evaluation.EvaluationSet:
    return evaluation.select_evaluation_set(data, **options)


def draw_weights(model, seed: int = 0) -> list[np.ndarray]:
    """Returns weights that are not zero; the number of an image counts little."""
    rng = np.random.default_rng(seed)
    weights = [
        rng.normal(size=weight.shape).astype(np.float32)
        for weight in model.initialize(rng)
    ]
    weights[0][0] *= 1e-4
    return weights


def compute_expected(weights, x, y) -> tuple[np.ndarray, np.ndarray]:
    """Returns each example's loss and accuracy of the toy model, in float64."""
    kernel, bias = (weight.astype(np.float64) for weight in weights)
    logits = x.reshape([-1, 4]).astype(np.float64) @ kernel + bias
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    return losses, (logits.argmax(1) == y).astype(float)
