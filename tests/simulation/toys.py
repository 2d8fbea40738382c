"""A model, data and an aggregator that are small enough to compute by hand."""

import collections

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulation import cohort, evaluation, round_evaluation, seeds, training
from simulation import model as models
from simulation.image_models import build_logistic_regression

NUM_CLIENTS = 6
NUM_CLASSES = 3
SHAPE = (2, 2, 1)


def build_toy_model(*, dropout: bool = False) -> models.Model:
    """Returns logistic regression, with dropout on its input if asked for."""
    model = build_logistic_regression(SHAPE, NUM_CLASSES)
    if not dropout:
        return model

    def predict(weights, x, seed):
        return model.predict(weights, models.apply_dropout(x, 0.5, seed), None)

    return models.Model(
        name="toy_dropout",
        initialize=model.initialize,
        predict=predict,
        compute_loss=model.compute_loss,
        metrics=model.metrics,
        example_spec=model.example_spec,
    )


def load_toy_client(client_id: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns from 1 to 6 examples, a function of the client's name."""
    index = int(client_id)
    rng = np.random.default_rng(index)
    x = rng.normal(size=[index + 1, *SHAPE]).astype(np.float32)
    return x, rng.integers(NUM_CLASSES, size=index + 1).astype(np.int32)


class CarriedMeanFactory(tff.aggregators.UnweightedAggregationFactory):
    """The sum of (weights, seed, joined) over `divisor`, with noise from the seeds.

    It measures what it was given: the sum of `joined`, and the sum of the seeds.
    """

    def __init__(self, divisor: float, noise_stddev: float = 0.0) -> None:
        self._divisor = divisor
        self._noise_stddev = noise_stddev

    def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
        @tff.tensorflow.computation(value_type)
        def prepare(value):
            weights, seed, joined = value
            noisy = tf.nest.map_structure(
                lambda weight: (
                    (
                        weight
                        + self._noise_stddev
                        * tf.random.stateless_normal(weight.shape, seed)
                    )
                    / self._divisor
                ),
                weights,
            )
            return noisy, joined, tf.reduce_sum(tf.cast(seed, tf.int64))

        @tff.federated_computation
        def initialize():
            return tff.federated_value((), tff.SERVER)

        @tff.federated_computation(
            initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state, value):
            weights, joined, seeds = tff.federated_map(prepare, value)
            measurements = collections.OrderedDict(
                joined=tff.federated_sum(joined), seeds=tff.federated_sum(seeds)
            )
            return tff.templates.MeasuredProcessOutput(
                state, tff.federated_sum(weights), tff.federated_zip(measurements)
            )

        return tff.templates.AggregationProcess(initialize, next_fn)


def build_toy_training(
    learning_process, task, engine, *, root, budget=None, **options
) -> training.Training:
    """Returns a training of the toy model on half of the clients, at .25 a round."""
    model = build_toy_model(dropout=True)
    return training.Training(
        label="toy",
        learning_process=learning_process,
        model=model,
        task=task,
        cohorts=cohort.PoissonCohort(
            client_ids=task.train.client_ids, sampling_rate=0.5, root=root
        ),
        root=root,
        engine=engine,
        noise_root=seeds.scope_root(root, "toy"),
        privacy=training.PrivacyTerms(
            compute_epsilon=lambda rounds: 0.25 * rounds,
            budget=budget,
            describe=lambda rounds: {"delta": 1e-3},
        ),
        options=training.TrainingOptions(**options),
        evaluator=round_evaluation.TestEvaluator(
            model,
            evaluation.select_evaluation_set(task.test),
            has_test_users=task.has_test_users,
            personalize=getattr(learning_process, "personalize", None),
        ),
    )
