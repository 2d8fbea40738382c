"""One run of run_upcycled_study: training in this process's engine, and its curve."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow_federated as tff
from scipy import special

from scripts.upcycled_study_config import (
    Algorithm,
    InitialWeights,
    Loss,
    Noise,
    Run,
    StudyConfig,
)
from scripts.upcycled_study_curve import METRICS, Curve
from scripts.upcycled_study_data import StudyData
from simulation import (
    client_data,
    cohort,
    execution,
    image_models,
    learning,
    linear_models,
    seeds,
)
from simulation.algorithm import FederatedAveraging
from simulation.model import Model
from upcycled_fl import accounting, finalizer, schedule
from upcycled_fl import learning as upcycled_learning
from upcycled_fl.private_averaging import PrivateAveraging

# The engine keeps 64 programs, of which a process has two.
_KEPT_PROCESSES = 24

Weights = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that a learning process depends on: neither the data nor the seed.

    Attributes:
        shape: The length of an input, and the number of the model's outputs.
        loss: What clients minimise.
        client_momentum: The momentum of the clients' SGD.
        client_lr: Its learning rate.
        mu: As in Run.
        lambda_value: As in Run.
        server_factor: As in Run.
        noise: As in Run.
        noise_level: As in Run.
        model_clip: The norm of a client's model under output noise.
    """

    shape: tuple[int, int]
    loss: Loss
    client_momentum: float
    client_lr: float
    mu: float
    lambda_value: float | None
    server_factor: float
    noise: Noise | None = None
    noise_level: float | None = None
    model_clip: float = 1.0


def build_recipe(run: Run, config: StudyConfig, *, shape: tuple[int, int]) -> Recipe:
    """Returns the recipe of a run's process."""
    return Recipe(
        shape=shape,
        loss=Loss(config.loss),
        client_momentum=config.client_momentum,
        client_lr=run.client_lr,
        mu=run.mu,
        lambda_value=run.lambda_value,
        server_factor=run.server_factor,
        noise=run.noise,
        noise_level=run.noise_level,
        model_clip=config.model_clip,
    )


@functools.lru_cache(maxsize=_KEPT_PROCESSES)
def build_process(
    recipe: Recipe,
) -> tuple[tff.learning.templates.LearningProcess, Any]:
    """Returns the learning process of a recipe, and its first state.

    Clients count by their numbers of examples.
    """
    model = build_model(recipe.loss, recipe.shape)
    common: dict[str, Any] = {
        "client_optimizer": tff.learning.optimizers.build_sgdm(
            recipe.client_lr, momentum=recipe.client_momentum
        ),
        "server_optimizer": tff.learning.optimizers.build_sgdm(1.0),
        "initial_weights": build_initial_weights(
            InitialWeights.ZEROS, recipe.shape, seed=0
        ),
        "measure_clients": False,
    }
    algorithm = build_algorithm(recipe)
    aggregator = tff.aggregators.MeanFactory()
    if recipe.lambda_value is not None:
        process = upcycled_learning.build_upcycled_fl(
            model,
            aggregator,
            upcycling=upcycled_learning.Upcycling(
                coefficients=schedule.ConstantLambda(
                    mu=recipe.mu, lambda_value=recipe.lambda_value
                ),
                num_steps=1,
            ),
            algorithm=algorithm,
            **common,
        )
    else:
        wrap = None
        if recipe.server_factor != 1:
            wrap = functools.partial(
                finalizer.build_scaled_finalizer, factor=recipe.server_factor
            )
        process = learning.build_learning_process(
            model, aggregator, algorithm, wrap_finalizer=wrap, **common
        )
    return process, process.initialize()


def build_algorithm(recipe: Recipe) -> FederatedAveraging:
    """Returns FedAvg or FedProx, with the noise of the recipe."""
    perturbation = build_perturbation(
        recipe.noise, recipe.noise_level, mu=recipe.mu, model_clip=recipe.model_clip
    )
    if perturbation is None:
        return FederatedAveraging(proximal_strength=recipe.mu)
    return PrivateAveraging(proximal_strength=recipe.mu, perturbation=perturbation)


def build_perturbation(
    noise: Noise | None, level: float | None, *, mu: float, model_clip: float
) -> accounting.OutputPerturbation | accounting.ObjectivePerturbation | None:
    """Returns what the accountants know of the noise; None for none."""
    if noise is None or level is None:
        return None
    if noise is Noise.OUTPUT:
        return accounting.OutputPerturbation(l2_clip=model_clip, local_stddev=level)
    return accounting.ObjectivePerturbation(
        noise_rate=level, mu=mu, loss=accounting.SOFTMAX_LOSS
    )


def build_model(loss: Loss, shape: tuple[int, int]) -> Model:
    """Returns the model of inputs and outputs of the lengths of `shape`."""
    num_features, num_classes = shape
    image_shape = (num_features, 1, 1)
    if loss is Loss.DOUBLE_SOFTMAX:
        return linear_models.build_double_softmax_regression(image_shape, num_classes)
    return image_models.build_logistic_regression(image_shape, num_classes)


def build_initial_weights(
    kind: InitialWeights, shape: tuple[int, int], *, seed: int
) -> Weights:
    """Returns the kernel, float32 of `shape`, and the bias."""
    if kind is InitialWeights.ZEROS:
        return np.zeros(shape, np.float32), np.zeros(shape[1:], np.float32)
    rng = seeds.derive_generator(
        seeds.build_root_seed(seed), purpose=seeds.Purpose.MODEL_INIT
    )
    limit = 1 / math.sqrt(shape[0])
    return tuple(
        rng.uniform(-limit, limit, size).astype(np.float32)
        for size in (shape, shape[1:])
    )


def train(run: Run, data: StudyData, config: StudyConfig) -> Curve:
    """Trains, and evaluates after every server step.

    The clients of a round, who of them is a straggler, and the batches depend on the
    seed, the round and the client alone: at one seed all algorithms see the same.
    """
    recipe = build_recipe(run, config, shape=data.shape)
    process, state = build_process(recipe)
    loss = recipe.loss
    weights = build_initial_weights(
        InitialWeights(config.initial_weights), data.shape, seed=run.seed
    )
    state = process.set_model_weights(
        state,
        tff.learning.models.ModelWeights(trainable=weights, non_trainable=()),
    )
    root = seeds.build_root_seed(run.seed)
    # Everything that decides what is sent decides the noise.
    scope = json.dumps([config.to_dict(), data.identity, run.key], default=str)
    noise_root = seeds.scope_root(root, scope)
    cohorts = cohort.FixedCohort(
        client_ids=data.train.client_ids,
        clients_per_round=config.clients_per_round,
        root=root,
    )
    load = client_data.ClientLoader(
        data=data.train,
        batch_size=config.batch_size,
        num_epochs=config.client_epochs,
        padded=True,
    )
    found = [evaluate(weights, data, loss=loss)]
    odd_found = list(found)
    for number in range(run.rounds):
        clients = [
            execution.ClientValue(
                load,
                client_data.derive_key(
                    client_id,
                    root=root,
                    noise_root=noise_root,
                    round_number=number,
                    num_joined=config.clients_per_round,
                    straggler_rate=config.straggler_rate,
                ),
            )
            for client_id in cohorts.select(number)
        ]
        state = process.next(state, clients).state
        found.append(evaluate(state.global_model_weights.trainable, data, loss=loss))
        if run.algorithm is Algorithm.UPCYCLED:
            odd = state.finalizer["odd_weights"]
            odd_found.append(evaluate(odd, data, loss=loss))
    return Curve(
        values=_stack(found),
        odd_values=_stack(odd_found) if run.algorithm is Algorithm.UPCYCLED else None,
    )


def evaluate(weights: Any, data: StudyData, *, loss: Loss) -> dict[str, float]:
    """Returns METRICS over the examples of all users: mean loss, accuracy in [0, 1]."""
    kernel, bias = (np.asarray(weight, np.float32) for weight in weights)
    found = {}
    for part, (x, y) in data.examples.items():
        outputs = x @ kernel.reshape(-1, bias.size) + bias
        found[f"{part}_accuracy"] = float(np.mean(np.argmax(outputs, axis=1) == y))
        if loss is Loss.DOUBLE_SOFTMAX:
            outputs = np.exp(special.log_softmax(outputs, axis=1))
        scores = special.log_softmax(outputs, axis=1)[np.arange(len(y)), y]
        found[f"{part}_loss"] = -float(np.mean(scores, dtype=np.float64))
    return {name: found[name] for name in METRICS}


def _stack(found: list[dict[str, float]]) -> Mapping[str, np.ndarray]:
    return {name: np.array([entry[name] for entry in found]) for name in METRICS}
