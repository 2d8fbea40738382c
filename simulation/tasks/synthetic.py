"""Synthetic(alpha, beta): generated data whose heterogeneity is a parameter.

Source: Li et al. 2020 (FedProx), section 5.1 and its program, with 60 features; the
Upcycled-FL paper, appendix H.1, with 20. For client k, u_k ~ N(0, alpha) and B_k ~
N(0, beta); the weights and biases of its local model are N(u_k, 1), the mean of its
inputs v_k is N(B_k, 1), inputs are N(v_k, diag(j**-1.2)) and labels the model's
largest logit. alpha and beta are standard deviations, as in FedProx's program. Sizes
are 50 more than a log-normal(4, 2). In the iid variant all clients share one model and
v_k = 0. In the binary variant, which is ours, the label is the larger of the first two
logits.
"""

import functools
from collections.abc import Callable, Mapping

import numpy as np

from simulation import image_models, linear_models
from simulation.model import Model
from simulation.population.federated_data import ArrayData
from simulation.tasks.options import TaskOptions
from simulation.tasks.task import Task

NUM_CLASSES, NUM_CLIENTS = 10, 30
_FEWEST, _LOG_MEAN, _LOG_STDDEV = 50, 4.0, 2.0
_TEST_FRACTION = 0.1


def build_fedprox(options: TaskOptions) -> Task:
    """Returns the task `synthetic`: 60 features, alpha = beta = 1 unless given."""
    return _build(options, name="synthetic", num_features=60)


def build_fedprox_iid(options: TaskOptions) -> Task:
    """Returns the task `synthetic_iid`."""
    return _build(options, name="synthetic_iid", num_features=60)


def build_upcycled(options: TaskOptions) -> Task:
    """Returns the task `synthetic_20`: the Upcycled-FL paper's 20 features."""
    return _build(options, name="synthetic_20", num_features=20)


def build_upcycled_iid(options: TaskOptions) -> Task:
    """Returns the task `synthetic_20_iid`."""
    return _build(options, name="synthetic_20_iid", num_features=20)


def build_upcycled_binary(options: TaskOptions) -> Task:
    """Returns the task `synthetic_20_binary`: `synthetic_20` with two classes."""
    return _build(options, name="synthetic_20_binary", num_features=20, num_classes=2)


def _build(
    options: TaskOptions,
    *,
    name: str,
    num_features: int,
    num_classes: int = NUM_CLASSES,
) -> Task:
    is_iid = name.endswith("iid")
    options.check_taken(
        name, "num_clients", *(() if is_iid else ("data_alpha", "data_beta"))
    )
    alpha = 1.0 if options.data_alpha is None else options.data_alpha
    beta = 1.0 if options.data_beta is None else options.data_beta
    num_clients = options.num_clients or NUM_CLIENTS
    clients = generate(
        num_clients,
        num_features=num_features,
        spread=None if is_iid else (alpha, beta),
        seed=options.data_seed,
        num_classes=num_classes,
    )
    names = [f"device_{index:03d}" for index in range(num_clients)]
    data = dict(zip(names, clients, strict=True))
    tests = {k: max(1, round(_TEST_FRACTION * len(y))) for k, (_, y) in data.items()}

    def build(part: str) -> ArrayData:
        def make(client_id: str) -> tuple[np.ndarray, np.ndarray]:
            x, y = data[client_id]
            count = tests[client_id]
            rows = slice(count) if part == "test" else slice(count, None)
            return x[rows, :, np.newaxis, np.newaxis], y[rows]

        return ArrayData(client_ids=tuple(names), make=make)

    shape = (num_features, 1, 1)
    law = "iid" if is_iid else f"alpha = {alpha:g}, beta = {beta:g}"
    return Task(
        name=name,
        description=(
            f"generated data ({law}; {num_features} features, {num_classes} classes, "
            f"seed {options.data_seed}); a tenth of each user's examples for the test"
        ),
        train=build("train"),
        test=build("test"),
        has_test_users=True,
        models=_list_models(shape, num_classes),
        metric="accuracy",
        identity={
            "generated": law,
            "num_features": num_features,
            "num_classes": num_classes,
            "num_clients": num_clients,
            "seed": options.data_seed,
        },
    )


def _list_models(
    shape: tuple[int, int, int], num_classes: int
) -> Mapping[str, Callable[[], Model]]:
    """Returns the models by name; the first is the default."""
    models: dict[str, Callable[[], Model]] = {
        "logistic_regression": functools.partial(
            image_models.build_logistic_regression, shape, num_classes
        )
    }
    if num_classes > 2:
        models["mlp"] = functools.partial(
            image_models.build_mlp, shape, num_classes, hidden_sizes=[64]
        )
    models["double_softmax_regression"] = functools.partial(
        linear_models.build_double_softmax_regression, shape, num_classes
    )
    if num_classes == 2:
        models["one_output_logistic_regression"] = functools.partial(
            linear_models.build_one_output_logistic_regression, shape
        )
    return models


def generate(
    num_clients: int,
    *,
    num_features: int,
    spread: tuple[float, float] | None,
    seed: int,
    num_classes: int = NUM_CLASSES,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the data of each client, float32[n, num_features] and int32[n].

    Args:
        num_clients: The number of clients.
        num_features: The dimension of the inputs.
        spread: (alpha, beta), or None for iid clients.
        seed: Decides everything; a client's data do not depend on how many there are.
        num_classes: The first of the NUM_CLASSES logits, which the label is chosen
            among; the inputs do not depend on it.
    """
    stddev = np.arange(1, num_features + 1) ** -0.6
    root = np.random.SeedSequence(seed)
    common = np.random.default_rng(root.spawn(1)[0])
    shared = _draw_model(common, 0.0, num_features)
    clients = []
    for child in root.spawn(num_clients):
        rng = np.random.default_rng(child)
        size = _FEWEST + int(rng.lognormal(_LOG_MEAN, _LOG_STDDEV))
        mean, model = np.zeros(num_features), shared
        if spread is not None:
            alpha, beta = spread
            model = _draw_model(rng, rng.normal(0.0, alpha), num_features)
            mean = rng.normal(rng.normal(0.0, beta), 1.0, num_features)
        x = mean + stddev * rng.normal(size=[size, num_features])
        weights, bias = model
        y = np.argmax((x @ weights + bias)[:, :num_classes], axis=1)
        clients.append((x.astype(np.float32), y.astype(np.int32)))
    return clients


def _draw_model(
    rng: np.random.Generator, mean: float, num_features: int
) -> tuple[np.ndarray, np.ndarray]:
    weights = rng.normal(mean, 1.0, [num_features, NUM_CLASSES])
    return weights, rng.normal(mean, 1.0, NUM_CLASSES)
