"""Tests for evaluation: against NumPy and by hand, subsets, and how much it holds."""

import collections
import json
import weakref

import numpy as np
import pytest
import tensorflow as tf

from simulation import evaluation
from simulation.model import Model
from simulation.population.federated_data import ArrayData
from tests.simulation import toys

# "none" has no example, "large" has more than some batches.
SIZES = {"b": 3, "none": 0, "a": 1, "large": 11, "c": 4}
IDS, STEPS = 5, 4


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


def evaluate(model, data, **options) -> evaluation.Evaluation:
    return evaluation.Evaluation(model, select(data), **options)


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


def build_tokens() -> ArrayData:
    """Returns sentences; those of "silent" have no id that counts."""

    def make(client_id):
        rng = np.random.default_rng(list(client_id.encode()))
        size = {"a": 7, "b": 2, "silent": 2, "none": 0}[client_id]
        x = rng.integers(1, IDS, size=[size, STEPS]).astype(np.int32)
        y = rng.integers(0, IDS, size=[size, STEPS]).astype(np.int32)
        return x, (np.zeros_like(y) if client_id == "silent" else y)

    return ArrayData(client_ids=("a", "silent", "none", "b"), make=make)


class TestMeans:
    # Smaller than clients, as large as one, over several clients, larger than all.
    @pytest.mark.parametrize("batch_size", [1, 2, 4, 7, 11, 500])
    def test_means_are_those_of_numpy(self, batch_size):
        model, data = toys.build_toy_model(), build_data()
        weights = draw_weights(model)
        evaluate_toy = evaluate(model, data, batch_size=batch_size)
        means = evaluate_toy(weights)
        clients = evaluate_toy.evaluate_clients(weights)
        values = {
            client_id: compute_expected(weights, *data.load(client_id))
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
        assert clients.num_examples.tolist() == list(SIZES.values())
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
        data = build_data({"a": 0, "b": 0})
        model = toys.build_toy_model()
        found = evaluate(model, data)
        weights = draw_weights(model)
        means = found(weights)
        assert set(means) == {"loss", "accuracy"}
        assert np.isnan(list(means.values())).all()
        clients = found.evaluate_clients(weights)
        assert clients.num_examples.tolist() == [0, 0]
        summary = clients.summarize()
        assert summary == {"clients": 2, "loss": None, "accuracy": None}

    def test_dropout_is_off(self):
        plain, dropout = toys.build_toy_model(), toys.build_toy_model(dropout=True)
        weights, data = draw_weights(plain), build_data()
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
            evaluate(model, build_data(), batch_size=3),
            draw_weights(model),
        )
        assert found(weights) == found([weight.copy() for weight in weights])


class TestPersonalization:
    def shift(self, client_id, weights):
        """Adds the length of the client's name to the bias of class 0."""
        kernel, bias = (weight.copy() for weight in weights)
        bias[0] += len(client_id)
        return [kernel, bias]

    def test_it_is_called_once_a_client_and_never_sees_test_data(self):
        model, data = toys.build_toy_model(), build_data()
        weights, calls = draw_weights(model), []

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
        model, data = toys.build_toy_model(), build_data()
        weights = draw_weights(model)
        clients = evaluate(model, data, batch_size=batch_size).evaluate_clients(
            weights, personalize=self.shift
        )
        for index, client_id in enumerate(data.client_ids):
            examples = data.load(client_id)
            if not len(examples[1]):
                assert np.isnan(clients.means["loss"][index])
                continue
            losses, right = compute_expected(self.shift(client_id, weights), *examples)
            assert clients.means["loss"][index] == pytest.approx(
                losses.mean(), rel=1e-5
            )
            assert clients.means["accuracy"][index] == right.mean()
            others, _ = compute_expected(weights, *examples)
            assert clients.means["loss"][index] != pytest.approx(others.mean(), 1e-3)

    def test_a_client_does_not_depend_on_the_others(self):
        model = toys.build_toy_model()
        weights = draw_weights(model)
        together = evaluate(model, build_data()).evaluate_clients(
            weights, personalize=self.shift
        )
        for index, client_id in enumerate(together.client_ids):
            alone = evaluate(model, build_data(client_ids=[client_id]))
            clients = alone.evaluate_clients(weights, personalize=self.shift)
            for name, values in clients.means.items():
                assert values[0] == together.means[name][index] or (
                    client_id == "none" and np.isnan(values[0])
                )

    def test_the_global_weights_cannot_be_written(self):
        model = toys.build_toy_model()
        weights = draw_weights(model)
        before = [weight.copy() for weight in weights]

        def spoil(_, given):
            given[1][:] = 7.0
            return given

        with pytest.raises(ValueError, match="read-only"):
            evaluate(model, build_data()).evaluate_clients(weights, personalize=spoil)
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


MANY = {f"user_{index}": 1 + index % 5 for index in range(40)}


def list_rows(chosen: evaluation.EvaluationSet) -> list[float]:
    """Returns the numbers of the images that are taken."""
    return [
        number
        for client_id in chosen.client_ids
        for number in chosen.load(client_id)[0][:, 0, 0, 0].tolist()
    ]


class TestSelection:
    @pytest.mark.parametrize("max_examples", [1, 2, 7, 50, 119])
    def test_exactly_as_many_and_whole_clients_first(self, max_examples):
        data = build_data(MANY)
        assert sum(MANY.values()) == 120
        chosen = select(data, max_examples=max_examples, seed=3)
        rows = list_rows(chosen)
        assert len(rows) == len(set(rows)) == max_examples == chosen.num_examples
        sizes = [len(chosen.load(client_id)[1]) for client_id in chosen.client_ids]
        whole = [MANY[client_id] for client_id in chosen.client_ids]
        assert sizes[:-1] == whole[:-1]
        assert 0 < sizes[-1] <= whole[-1]
        assert not chosen.is_whole
        assert chosen.identify()["examples"] == max_examples

    def test_labels_stay_with_their_images(self):
        data = build_data({"a": 50})
        chosen = select(data, max_examples=20)
        x, y = chosen.load("a")
        all_x, all_y = data.load("a")
        rows = x[:, 0, 0, 0].astype(int)
        assert np.array_equal(x, all_x[rows]) and np.array_equal(y, all_y[rows])
        # Drawn, in the order of the data: neither the first ones nor the last.
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert rows.tolist() not in (list(range(20)), list(range(30, 50)))
        again = chosen.load("a")[0]
        assert np.array_equal(again, x)

    def test_partial_clients_are_drawn_evenly(self):
        taken = collections.Counter(
            int(row)
            for seed in range(300)
            for row in list_rows(
                select(build_data({"a": 4}), max_examples=1, seed=seed)
            )
        )
        # Binomial(300, 1/4): 5 standard deviations are 37.5; "the first" is 300.
        assert sorted(taken) == [0, 1, 2, 3]
        assert max(abs(count - 75) for count in taken.values()) < 37.5

    def test_clients_are_drawn_evenly(self):
        sizes = {name: 2 for name in "abcd"}
        taken = collections.Counter(
            client_id
            for seed in range(300)
            for client_id in select(
                build_data(sizes), max_examples=2, seed=seed
            ).client_ids
        )
        assert sorted(taken) == list("abcd")
        assert max(abs(count - 75) for count in taken.values()) < 37.5

    @pytest.mark.parametrize("max_examples", [1, 17, 119])
    def test_it_does_not_depend_on_the_order_of_clients(self, max_examples):
        one = select(build_data(MANY), max_examples=max_examples, seed=1)
        backwards = build_data(MANY, client_ids=reversed(MANY))
        other = select(backwards, max_examples=max_examples, seed=1)
        assert one.client_ids == other.client_ids
        assert list_rows(one) == list_rows(other)
        assert one.identify() == other.identify()

    def test_the_whole_is_the_same_in_any_order(self):
        one = select(build_data(MANY))
        other = select(build_data(MANY, client_ids=reversed(MANY)))
        assert one.identify() == other.identify()
        assert set(list_rows(one)) == set(list_rows(other))

    def test_seeds_choose_others(self):
        chosen = [
            select(build_data(MANY), max_examples=17, seed=seed) for seed in range(5)
        ]
        assert len({tuple(sorted(list_rows(one))) for one in chosen}) == 5
        assert len({one.identify()["digest"] for one in chosen}) == 5
        again = select(build_data(MANY), max_examples=17, seed=2)
        assert again.identify() == chosen[2].identify()
        assert list_rows(again) == list_rows(chosen[2])

    def test_parts_of_one_client_by_another_seed_are_told_apart(self):
        one, other = (
            select(build_data({"a": 50}), max_examples=20, seed=seed) for seed in (0, 1)
        )
        assert list_rows(one) != list_rows(other)
        assert one.identify() != other.identify()

    def test_sizes_are_told_apart(self):
        # The same client, with more of its examples.
        identities = [
            select(build_data({"a": 50}), max_examples=size).identify()["digest"]
            for size in (19, 20, 50)
        ]
        assert len(set(identities)) == 3

    @pytest.mark.parametrize("max_examples", [None, 120, 121, 10**9])
    def test_the_whole(self, max_examples):
        data = build_data(MANY)
        chosen = select(data, max_examples=max_examples, seed=9)
        assert chosen.is_whole
        assert chosen.client_ids == data.client_ids
        assert chosen.num_examples == 120 and not chosen.limits
        identity = chosen.identify()
        assert identity["is_whole"] and identity["seed"] is None
        # It is the same whatever the seed and the limit.
        assert identity == select(data).identify()
        assert json.loads(json.dumps(identity)) == identity

    def test_what_an_identity_says(self):
        identity = select(build_data(MANY), max_examples=17, seed=4).identify()
        assert identity.pop("clients") < 40
        assert len(identity.pop("digest")) == 16
        assert identity == {
            "examples": 17,
            "of_clients": 40,
            "is_whole": False,
            "seed": 4,
        }

    def test_only_what_is_chosen_is_evaluated(self):
        model, data = toys.build_toy_model(), build_data(MANY)
        weights = draw_weights(model)
        chosen = select(data, max_examples=33, seed=5)
        parts = [chosen.load(client_id) for client_id in chosen.client_ids]
        x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
        found = evaluation.Evaluation(model, chosen, batch_size=4)
        losses, right = compute_expected(weights, x, y)
        means = found(weights)
        assert means["loss"] == pytest.approx(losses.mean(), rel=1e-5)
        assert means["accuracy"] == pytest.approx(right.mean(), rel=1e-12)
        clients = found.evaluate_clients(weights)
        assert clients.client_ids == chosen.client_ids
        assert clients.num_examples.sum() == 33

    @pytest.mark.parametrize("max_examples", [0, -1])
    def test_less_than_one_example_is_refused(self, max_examples):
        with pytest.raises(ValueError, match="`max_examples` must be >= 1. Found"):
            select(build_data(MANY), max_examples=max_examples)


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
        chosen = select(data, max_examples=max_examples)
        found = evaluation.Evaluation(model, chosen, batch_size=batch_size)
        weights = draw_weights(model)
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
        found = evaluate(model, build_data({"a": examples}))
        # The mean over examples of how many are in their batch.
        assert found(draw_weights(model))["batch"] == batch
