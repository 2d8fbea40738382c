"""Tests for evaluation: against NumPy and by hand, and how much it holds."""

import collections
import json
import weakref

import numpy as np
import pytest
import tensorflow as tf

from simulation import evaluation
from simulation.model import Model
from simulation.population.federated_data import ArrayData
from tests.simulation import evaluation_toys, toys

IDS, STEPS = 5, 4


def evaluate(model, data, **options) -> evaluation.Evaluation:
    return evaluation.Evaluation(model, evaluation_toys.select(data), **options)


def build_token_model() -> Model:
    """Returns a table of logits for the next id; ids of 0 count nowhere."""

    def count(labels, _):
        return tf.reduce_sum(tf.cast(labels > 0, tf.float32), axis=-1)

    def count_right(labels, logits):
        predicted = tf.argmax(logits, axis=-1, output_type=tf.int32)
        right = tf.logical_and(tf.equal(predicted, labels), labels > 0)
        return tf.reduce_sum(tf.cast(right, tf.float32), axis=-1)

    ids = tf.TensorSpec([None, STEPS], tf.int32)
    return Model(
        name="token",
        initialize=lambda rng: (rng.normal(size=[IDS, IDS]).astype(np.float32),),
        predict=lambda weights, x, seed: tf.gather(weights[0], x),
        compute_loss=lambda y, logits: tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits), axis=-1
        ),
        metrics={"accuracy": count_right},
        example_spec=collections.OrderedDict(x=ids, y=ids),
        metric_weights=count,
    )


def build_tokens(client_ids=("a", "silent", "none", "b")) -> ArrayData:
    """Returns sentences; those of "silent" have no id that counts."""

    def make(client_id):
        rng = np.random.default_rng(list(client_id.encode()))
        size = {"a": 7, "b": 2, "silent": 2, "none": 0}[client_id]
        x = rng.integers(1, IDS, size=[size, STEPS]).astype(np.int32)
        y = rng.integers(0, IDS, size=[size, STEPS]).astype(np.int32)
        return x, (np.zeros_like(y) if client_id == "silent" else y)

    return ArrayData(client_ids=tuple(client_ids), make=make)


class TestMeans:
    # Smaller than clients, as large as one, over several clients, larger than all.
    @pytest.mark.parametrize("batch_size", [1, 2, 4, 7, 11, 500])
    def test_means_are_those_of_numpy(self, batch_size):
        model, data = toys.build_toy_model(), evaluation_toys.build_data()
        weights = evaluation_toys.draw_weights(model)
        evaluate_toy = evaluate(model, data, batch_size=batch_size)
        means = evaluate_toy(weights)
        clients = evaluate_toy.evaluate_clients(weights)
        values = {
            client_id: evaluation_toys.compute_expected(weights, *data.load(client_id))
            for client_id in data.client_ids
        }
        pooled = np.concatenate(list(values.values()), axis=1)
        assert means["loss"] == pytest.approx(pooled[0].mean(), rel=1e-5)
        assert means["accuracy"] == pooled[1].mean()
        # A mean of clients' means, or of batches', is another number.
        of_means = np.mean(
            [losses.mean() for losses, _ in values.values() if len(losses)]
        )
        assert means["loss"] != pytest.approx(of_means, rel=1e-3)
        assert clients.client_ids == data.client_ids
        assert clients.num_examples.tolist() == list(evaluation_toys.SIZES.values())
        for index, (losses, right) in enumerate(values.values()):
            found = {name: array[index] for name, array in clients.means.items()}
            if not len(losses):
                assert np.isnan(list(found.values())).all()
                continue
            assert found["loss"] == pytest.approx(losses.mean(), rel=1e-5)
            assert found["accuracy"] == right.mean()

    @pytest.mark.parametrize("batch_size", [1, 3, 500])
    def test_metrics_over_their_weights(self, batch_size):
        model, data = build_token_model(), build_tokens()
        (table,) = weights = model.initialize(np.random.default_rng(5))
        evaluate_tokens = evaluate(model, data, batch_size=batch_size)
        right, count, losses = [], [], []
        for client_id in data.client_ids:
            x, y = data.load(client_id)
            logits = table[x].astype(np.float64)
            right.append(int(((logits.argmax(-1) == y) & (y > 0)).sum()))
            count.append(int((y > 0).sum()))
            picked = np.take_along_axis(logits, y[..., np.newaxis], -1)[..., 0]
            losses.append((np.log(np.exp(logits).sum(-1)) - picked).mean(-1))
        means = evaluate_tokens(weights)
        assert means["accuracy"] == pytest.approx(sum(right) / sum(count), rel=1e-6)
        # Not over examples, nor over all ids.
        assert sum(count) not in (11, 11 * STEPS)
        loss = np.concatenate(losses).mean()
        assert means["loss"] == pytest.approx(loss, rel=1e-5)
        clients = evaluate_tokens.evaluate_clients(weights)
        expected = [right[0] / count[0], np.nan, np.nan, right[3] / count[3]]
        np.testing.assert_allclose(clients.means["accuracy"], expected, rtol=1e-6)
        # The loss of examples without an id that counts is known all the same.
        known = [losses[0].mean(), losses[1].mean(), np.nan, losses[3].mean()]
        np.testing.assert_allclose(clients.means["loss"], known, rtol=1e-5)

    def test_nothing_to_average(self):
        """Examples, but no id that counts: the loss is known, no accuracy is."""
        model = build_token_model()
        found = evaluate(model, build_tokens(["silent", "none"]))
        weights = model.initialize(np.random.default_rng(5))
        means = found(weights)
        assert set(means) == {"loss", "accuracy"}
        assert means["loss"] > 0 and np.isnan(means["accuracy"])
        clients = found.evaluate_clients(weights)
        assert clients.num_examples.tolist() == [2, 0]
        assert np.isnan(clients.means["accuracy"]).all()
        assert np.isnan(clients.means["loss"]).tolist() == [False, True]
        summary = clients.summarize()
        assert summary["clients"] == 2 and summary["accuracy"] is None
        assert summary["loss"]["clients"] == 1

    def test_dropout_is_off(self):
        plain, dropout = toys.build_toy_model(), toys.build_toy_model(dropout=True)
        weights, data = (
            evaluation_toys.draw_weights(plain),
            evaluation_toys.build_data(),
        )
        assert evaluate(dropout, data)(weights) == evaluate(plain, data)(weights)
        # It would show.
        x, _ = data.load("large")
        seed = tf.constant([1, 2])
        assert not np.array_equal(
            dropout.predict(weights, x, seed), dropout.predict(weights, x, None)
        )

    def test_equal_weights_give_equal_numbers(self):
        model = toys.build_toy_model()
        found, weights = (
            evaluate(model, evaluation_toys.build_data(), batch_size=3),
            evaluation_toys.draw_weights(model),
        )
        assert found(weights) == found([weight.copy() for weight in weights])


class TestPersonalization:
    def shift(self, client_id, weights):
        """Adds the length of the client's name to the bias of class 0."""
        kernel, bias = (weight.copy() for weight in weights)
        bias[0] += len(client_id)
        return [kernel, bias]

    def test_it_is_called_once_a_client_and_never_sees_test_data(self):
        model, data = toys.build_toy_model(), evaluation_toys.build_data()
        weights, calls = evaluation_toys.draw_weights(model), []

        def personalize(*arguments, **more):
            calls.append((arguments, more))
            return arguments[1]

        found = evaluate(model, data, batch_size=2)
        clients = found.evaluate_clients(weights, personalize=personalize)
        # Nobody asks for the weights of a client without a test example.
        assert [arguments[0] for arguments, _ in calls] == ["b", "a", "large", "c"]
        for (_, given), more in calls:
            assert not more
            for one, other in zip(given, weights, strict=True):
                assert np.array_equal(one, other)
        plain = found.evaluate_clients(weights)
        for name, values in clients.means.items():
            np.testing.assert_allclose(values, plain.means[name], rtol=1e-6)

    @pytest.mark.parametrize("batch_size", [2, 500])
    def test_its_weights_are_used_for_its_client_alone(self, batch_size):
        model, data = toys.build_toy_model(), evaluation_toys.build_data()
        weights = evaluation_toys.draw_weights(model)
        clients = evaluate(model, data, batch_size=batch_size).evaluate_clients(
            weights, personalize=self.shift
        )
        for index, client_id in enumerate(data.client_ids):
            examples = data.load(client_id)
            if not len(examples[1]):
                assert np.isnan(clients.means["loss"][index])
                continue
            losses, right = evaluation_toys.compute_expected(
                self.shift(client_id, weights), *examples
            )
            assert clients.means["loss"][index] == pytest.approx(
                losses.mean(), rel=1e-5
            )
            assert clients.means["accuracy"][index] == right.mean()
            others, _ = evaluation_toys.compute_expected(weights, *examples)
            assert clients.means["loss"][index] != pytest.approx(others.mean(), 1e-3)

    def test_a_client_does_not_depend_on_the_others(self):
        model = toys.build_toy_model()
        weights = evaluation_toys.draw_weights(model)
        together = evaluate(model, evaluation_toys.build_data()).evaluate_clients(
            weights, personalize=self.shift
        )
        for index, client_id in enumerate(together.client_ids):
            # Whoever has no examples cannot be alone.
            names = ["none", "a"] if client_id == "none" else [client_id]
            few = evaluate(model, evaluation_toys.build_data(client_ids=names))
            clients = few.evaluate_clients(weights, personalize=self.shift)
            assert clients.client_ids == tuple(names)
            for name, values in clients.means.items():
                assert np.isnan(values[0]) == (client_id == "none")
                assert np.array_equal(
                    values[0], together.means[name][index], equal_nan=True
                )
                if client_id == "none":
                    first = together.client_ids.index("a")
                    assert values[1] == together.means[name][first]

    def test_the_global_weights_cannot_be_written(self):
        model = toys.build_toy_model()
        weights = evaluation_toys.draw_weights(model)
        before = [weight.copy() for weight in weights]

        def spoil(_, given):
            given[1][:] = 7.0
            return given

        with pytest.raises(ValueError, match="read-only"):
            evaluate(model, evaluation_toys.build_data()).evaluate_clients(
                weights, personalize=spoil
            )
        for one, other in zip(weights, before, strict=True):
            assert np.array_equal(one, other)
        # The caller's own may.
        weights[1][0] = 1.0


def build_metrics(**means) -> evaluation.ClientMetrics:
    size = len(next(iter(means.values())))
    return evaluation.ClientMetrics(
        client_ids=tuple(f"c{index}" for index in range(size)),
        num_examples=np.arange(size),
        means={name: np.array(values, float) for name, values in means.items()},
    )


class TestSummary:
    def test_by_hand(self):
        # 1 to 21, shuffled: the worst tenth are 3 clients, 2.1 rounded up.
        values = np.random.default_rng(0).permutation(np.arange(1.0, 22.0))
        summary = build_metrics(loss=values, accuracy=values).summarize()
        for name, worst in (("loss", 20.0), ("accuracy", 2.0)):
            assert summary[name]["worst_10_percent"] == worst
            assert summary[name]["mean"] == 11.0
            # (21**2 - 1) / 12, over the clients, not over one less.
            assert summary[name]["stddev"] == pytest.approx(
                (440 / 12) ** 0.5, rel=1e-12
            )
            assert summary[name]["deciles"] == pytest.approx(
                [3, 5, 7, 9, 11, 13, 15, 17, 19], rel=1e-12
            )
            assert summary[name]["clients"] == 21
        assert summary["clients"] == 21

    def test_clients_without_a_value_are_left_out(self):
        summary = build_metrics(
            loss=[np.nan, 4.0, 2.0], accuracy=[np.nan, np.nan, 0.25]
        ).summarize()
        assert summary["clients"] == 3
        assert summary["loss"]["clients"] == 2
        assert summary["loss"]["mean"] == 3.0
        assert summary["loss"]["worst_10_percent"] == 4.0
        assert summary["accuracy"] == {
            "clients": 1,
            "mean": 0.25,
            "stddev": 0.0,
            "deciles": [0.25] * 9,
            "worst_10_percent": 0.25,
        }

    def test_it_is_json(self):
        summary = build_metrics(loss=[1.0, np.nan], accuracy=[np.nan] * 2).summarize()
        assert json.loads(json.dumps(summary, allow_nan=False)) == summary

    @pytest.mark.parametrize(
        ("clients", "worst"), [(1, 0.0), (10, 0.0), (11, 0.5), (20, 0.5), (30, 1.0)]
    )
    def test_the_worst_tenth_is_rounded_up(self, clients, worst):
        found = build_metrics(accuracy=np.arange(clients)).summarize()
        assert found["accuracy"]["worst_10_percent"] == worst

    def test_csv(self):
        metrics = evaluation.ClientMetrics(
            client_ids=("a", 'say "b", c'),
            num_examples=np.array([0, 2]),
            means={
                "loss": np.array([np.nan, 0.1]),
                "accuracy": np.array([np.nan, 1 / 3]),
            },
        )
        assert metrics.to_csv() == (
            "client_id,num_examples,loss,accuracy\n"
            "a,0,,\n"
            '"say ""b"", c",2,0.1,0.3333333333333333\n'
        )


class TestMemory:
    """How many examples are alive at a time, of clients that are read."""

    def measure(self, sizes, *, batch_size, personalized=False, max_examples=None):
        alive: dict[int, int] = {}
        most = 0

        def make(client_id):
            nonlocal most
            size = sizes[int(client_id)]
            x = np.zeros([size, *toys.SHAPE], np.float32)
            alive[id(x)] = size
            weakref.finalize(x, alive.pop, id(x))
            most = max(most, sum(alive.values()))
            return x, np.zeros([size], np.int32)

        data = ArrayData(
            client_ids=tuple(str(index) for index in range(len(sizes))), make=make
        )
        model = toys.build_toy_model()
        chosen = evaluation_toys.select(data, max_examples=max_examples)
        found = evaluation.Evaluation(model, chosen, batch_size=batch_size)
        weights = evaluation_toys.draw_weights(model)
        if personalized:
            found.evaluate_clients(weights, personalize=lambda _, given: given)
        else:
            found(weights)
        assert not alive
        return most

    @pytest.mark.parametrize("personalized", [False, True])
    @pytest.mark.parametrize(
        ("sizes", "batch_size"),
        [
            ([50] * 40, 60),
            # Each leaves one example for the next batch, which holds its client.
            ([51] * 40, 50),
            ([26] * 40, 50),
            ([1, 101] * 20, 50),
            ([2] * 200, 50),
        ],
    )
    def test_it_holds_a_batch_and_few_clients(self, sizes, batch_size, personalized):
        most = self.measure(sizes, batch_size=batch_size, personalized=personalized)
        assert most <= 2 * batch_size + 3 * max(sizes) < sum(sizes)
        if personalized:
            assert most <= 3 * max(sizes)

    def test_also_of_a_part(self):
        sizes = [50] * 40
        most = self.measure(sizes, batch_size=60, max_examples=1_010)
        assert most <= 120 + 3 * 50 < sum(sizes)

    @pytest.mark.parametrize(
        ("output", "examples", "batch"), [(3, 1_000, 500), (1 << 20, 8, 4)]
    )
    def test_batches_are_smaller_where_outputs_are_large(self, output, examples, batch):
        toy = toys.build_toy_model()

        def count(labels, outputs):
            return tf.fill(tf.shape(labels), tf.cast(tf.shape(outputs)[0], tf.float32))

        model = Model(
            name="wide",
            initialize=toy.initialize,
            predict=lambda weights, x, seed: tf.tile(
                tf.reshape(x, [-1, 4])[:, :1], [1, output]
            ),
            compute_loss=lambda labels, outputs: outputs[:, 0],
            metrics={"batch": count},
            example_spec=toy.example_spec,
        )
        found = evaluate(model, evaluation_toys.build_data({"a": examples}))
        # The mean over examples of how many are in their batch.
        assert found(evaluation_toys.draw_weights(model))["batch"] == batch
