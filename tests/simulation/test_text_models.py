"""Tests for models of text: values by hand and Keras', padding, sizes, training."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_federated.python.simulation.baselines.stackoverflow import (
    tag_prediction_preprocessing,
)

from simulation import client_training, text_models
from simulation.local_solver import OptimizerSolver

WORDS, STEPS = 11, 6
layers = tf.keras.layers


def draw_weights(model, rng) -> list[tf.Tensor]:
    """Returns weights of one scale, biases too: no gate is like another."""
    return [
        tf.constant(rng.normal(scale=0.1, size=weight.shape), tf.float32)
        for weight in model.initialize(rng)
    ]


def draw_sentences(rng, num_ids: int, lengths) -> tf.Tensor:
    """Returns ids from 1 to num_ids - 1, padded to STEPS."""
    ids = rng.integers(1, num_ids, size=[len(lengths), STEPS])
    return tf.constant(np.where(np.arange(STEPS) < np.c_[lengths], ids, 0), tf.int32)


def assert_close(actual, expected) -> None:
    """Compares with a relative error of 1e-5, and 1e-6 of what is largest."""
    expected = np.asarray(expected)
    scale = float(np.max(np.abs(expected)))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6 * scale)


def compute_gradients(model, weights, x, y) -> list[np.ndarray]:
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = tf.reduce_mean(model.compute_loss(y, model.predict(weights, x, None)))
    return [tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, weights)]


class TestLstm:
    def test_one_unit_by_hand(self):
        weights = ([[0.5, -1.0, 2.0, 0.3]], [[0.1, 0.2, -0.3, 0.4]], [0.1, 1, -0.2, 0])
        kernel, recurrent, bias = (np.array(weight, np.float32) for weight in weights)
        outputs = text_models.apply_lstm(
            tf.constant([[[1.0], [-2.0]]]), kernel, recurrent, bias
        )
        hidden, cell, expected = 0.0, 0.0, []
        for x in (1.0, -2.0):
            i, f, g, o = x * kernel[0] + hidden * recurrent[0] + bias
            i, f, o = (1.0 / (1.0 + np.exp(-gate)) for gate in (i, f, o))
            cell = f * cell + i * np.tanh(g)
            hidden = o * np.tanh(cell)
            expected.append([hidden])
        np.testing.assert_allclose(outputs[0], expected, rtol=1e-6)

    def test_initial_weights(self):
        kernel, recurrent, bias = text_models.draw_lstm(
            np.random.default_rng(0), 300, 128
        )
        assert np.var(kernel) == pytest.approx(2.0 / (300 + 512), rel=0.02)
        product = recurrent @ recurrent.T
        np.testing.assert_allclose(product, np.eye(128), atol=1e-5)
        assert np.mean(recurrent > 0) == pytest.approx(0.5, abs=0.02)
        gates = bias.reshape([4, 128])
        assert np.array_equal(gates, np.outer([0, 1, 0, 0], np.ones(128)))


class TestNextWord:
    def test_parameters(self):
        assert text_models.build_next_word_lstm().num_parameters == 4_050_748

    def test_outputs_and_gradients_are_keras(self, rng):
        model = text_models.build_next_word_lstm(WORDS, STEPS)
        num_ids = WORDS + 4
        theirs = tf.keras.Sequential(
            [
                layers.Embedding(num_ids, 96),
                layers.LSTM(670, return_sequences=True),
                layers.Dense(96),
                layers.Dense(num_ids),
            ]
        )
        weights = draw_weights(model, rng)
        x, y = (draw_sentences(rng, num_ids, [STEPS] * 4) for _ in range(2))
        theirs.build(x.shape)
        theirs.set_weights([weight.numpy() for weight in weights])
        with tf.GradientTape() as tape:
            logits = theirs(x)
            loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)(
                y, logits
            )
        expected = tape.gradient(loss, theirs.trainable_variables)
        assert_close(model.predict(weights, x, None), logits)
        for one, two in zip(
            compute_gradients(model, weights, x, y), expected, strict=True
        ):
            assert_close(one, tf.convert_to_tensor(two))

    def test_loss_and_accuracy_by_hand(self):
        model = text_models.build_next_word_lstm(4, 5)
        # Two words (one right), an unknown word and the end; nothing; one word.
        labels = tf.constant([[2, 4, 5, 7, 0], [0] * 5, [3, 0, 0, 0, 0]])
        predicted = [[2, 3, 5, 7, 0], [0, 1, 2, 3, 4], [3, 3, 3, 3, 3]]
        logits = 2.0 * tf.one_hot(predicted, 8)
        right, wrong = np.log1p(7 * np.exp(-2.0)), np.log(7 + np.exp(2.0))
        losses = model.compute_loss(labels, logits).numpy()
        assert losses == pytest.approx([(3 * right + wrong) / 4, 0, right], rel=1e-6)
        assert model.metrics["accuracy"](labels, logits).numpy().tolist() == [1, 0, 1]
        assert model.metric_weights(labels, logits).numpy().tolist() == [2, 0, 1]

    def test_padding_changes_nothing(self, rng):
        short, long = (
            text_models.build_next_word_lstm(WORDS, steps)
            for steps in (STEPS, STEPS + 5)
        )
        weights = draw_weights(short, rng)
        ends = [3, STEPS, 1]
        x, y = (draw_sentences(rng, WORDS + 4, ends) for _ in range(2))
        # Behind the last target, what is read does not count either.
        noise = draw_sentences(rng, WORDS + 4, [STEPS] * 3)
        padded_x, padded_y = (
            tf.pad(part, [[0, 0], [0, 5]]) for part in (tf.where(y > 0, x, noise), y)
        )
        one, two = (
            model.predict(weights, part, None)
            for model, part in ((short, x), (long, padded_x))
        )
        assert_close(
            long.compute_loss(padded_y, two).numpy(), short.compute_loss(y, one)
        )
        for count in ("accuracy", None):
            counts = [
                (model.metrics[count] if count else model.metric_weights)(*arguments)
                for model, arguments in ((short, (y, one)), (long, (padded_y, two)))
            ]
            assert np.array_equal(*counts)
        for a, b in zip(
            compute_gradients(long, weights, padded_x, padded_y),
            compute_gradients(short, weights, x, y),
            strict=True,
        ):
            assert_close(a, b)


class TestTags:
    def test_parameters(self):
        model = text_models.build_tag_regression()
        assert model.num_parameters == 5_000_500
        assert not any(map(np.any, model.initialize(np.random.default_rng(0))))

    def test_the_bag_is_that_of_tff(self):
        words = [f"word{index}" for index in range(7)]
        bag = tag_prediction_preprocessing.build_to_ids_fn(words, ["tag"])
        model = text_models.build_tag_regression(7, 7, sequence_length=5)
        weights = (tf.eye(7), tf.zeros([7]))
        # A word twice, and one that is not in the vocabulary; none but such.
        for text, ids in (
            ("word3 word6 other word3", [4, 7, 4, 0, 0]),
            ("word0", [0, 0, 1, 0, 0]),
            ("other", [0] * 5),
        ):
            example = dict(tokens=text, title="another", tags="tag")
            expected, _ = bag({k: tf.constant(v) for k, v in example.items()})
            found = model.predict(weights, tf.constant([ids]), None)
            np.testing.assert_allclose(found[0], expected, rtol=1e-6)

    def test_a_word_beyond_the_vocabulary_is_an_error(self):
        model = text_models.build_tag_regression(7, 7, sequence_length=2)
        with pytest.raises(tf.errors.InvalidArgumentError):
            model.predict((tf.eye(7), tf.zeros([7])), tf.constant([[8, 1]]), None)

    def test_the_gradient_is_that_of_a_dense_bag_and_of_tff(self, rng):
        model = text_models.build_tag_regression(WORDS, 6, sequence_length=STEPS)
        weights = draw_weights(model, rng)
        x = draw_sentences(rng, WORDS + 1, [STEPS, 2, 0, 4])
        y = tf.constant(rng.integers(2, size=[4, 6]), tf.float32)
        bags = tf.reduce_sum(tf.one_hot(x - 1, WORDS), axis=1)
        bags = tf.math.divide_no_nan(bags, tf.reduce_sum(bags, 1, keepdims=True))
        theirs = tf.keras.Sequential([layers.Dense(6, activation="sigmoid")])
        theirs.build(bags.shape)
        theirs.set_weights([weight.numpy() for weight in weights])
        with tf.GradientTape() as tape:
            loss = tf.keras.losses.BinaryCrossentropy(reduction="sum")(y, theirs(bags))
        found = compute_gradients(model, weights, x, y)
        expected = tape.gradient(loss, theirs.trainable_variables)
        for one, two in zip(found, expected, strict=True):
            # Of 6 tags the mean, of 4 examples the sum.
            assert_close(one, two * 6 / 4)

    def test_recall_is_that_of_keras(self, rng):
        model = text_models.build_tag_regression(WORDS, 12, sequence_length=STEPS)
        y = tf.constant(rng.random([30, 12]) < 0.2, tf.float32)
        logits = tf.constant(rng.normal(size=[30, 12]), tf.float32)
        theirs = tf.keras.metrics.Recall(top_k=5)
        theirs.update_state(y, tf.sigmoid(logits))
        found = tf.reduce_sum(model.metrics["recall_at_5"](y, logits))
        recall = found / tf.reduce_sum(model.metric_weights(y, logits))
        assert 0.2 < float(recall) < 0.8
        assert float(recall) == pytest.approx(float(theirs.result()), rel=1e-6)

    def test_recall_and_loss_by_hand(self):
        model = text_models.build_tag_regression(3, 6, sequence_length=2)
        y = tf.constant([[1.0, 1, 0, 0, 0, 0], [0.0, 0, 0, 0, 0, 1], [0.0] * 6])
        logits = tf.constant([[-1.0, 1, 2, 3, 4, 5], [0.0, 0, 0, 0, 0, 1], [0.0] * 6])
        found = model.metrics["recall_at_5"](y, logits).numpy()
        assert found.tolist() == [1, 1, 0]
        assert model.metric_weights(y, logits).numpy().tolist() == [2, 1, 0]
        loss = model.compute_loss(y, logits).numpy()[1:]
        expected = [5 * np.log(2) + np.log1p(np.exp(-1)), 6 * np.log(2)]
        assert loss == pytest.approx(expected, rel=1e-6)


class TestSentiment:
    @pytest.mark.parametrize(
        ("classes", "learned", "expected"),
        [(2, False, 351_490), (3, False, 351_619), (2, True, 351_490 + 13 * 300)],
    )
    def test_parameters(self, classes, learned, expected):
        embedding = None if learned else np.zeros([WORDS + 2, 300])
        model = text_models.build_sentiment_lstm(
            WORDS, embedding=embedding, num_classes=classes
        )
        assert model.num_parameters == expected
        assert model.example_spec["x"].shape.as_list() == [None, 25]

    @pytest.mark.parametrize("learned", [False, True])
    def test_outputs_and_gradients_are_keras_with_its_mask(self, learned, rng):
        embedding = rng.normal(size=[WORDS + 2, 300]).astype(np.float32)
        model = text_models.build_sentiment_lstm(
            WORDS, STEPS, embedding=None if learned else embedding
        )
        weights = draw_weights(model, rng)
        theirs = tf.keras.Sequential(
            [
                layers.Embedding(WORDS + 2, 300, mask_zero=True, trainable=learned),
                layers.LSTM(128, return_sequences=True),
                layers.LSTM(128),
                layers.Dense(2),
            ]
        )
        x = draw_sentences(rng, WORDS + 2, [3, STEPS, 1])
        y = tf.constant([0, 1, 1])
        theirs.build(x.shape)
        theirs.layers[0].set_weights([weights[0].numpy() if learned else embedding])
        for variable, weight in zip(theirs.trainable_variables, weights, strict=True):
            variable.assign(weight)
        with tf.GradientTape() as tape:
            logits = theirs(x)
            loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)(
                y, logits
            )
        expected = tape.gradient(loss, theirs.trainable_variables)
        assert_close(model.predict(weights, x, None), logits)
        for one, two in zip(
            compute_gradients(model, weights, x, y), expected, strict=True
        ):
            assert_close(one, tf.convert_to_tensor(two))

    def test_padding_changes_nothing(self, rng):
        short, long = (
            text_models.build_sentiment_lstm(WORDS, steps) for steps in (STEPS, 25)
        )
        weights = draw_weights(short, rng)
        x = draw_sentences(rng, WORDS + 2, [3, STEPS, 1, 0])
        padded = tf.pad(x, [[0, 0], [0, 25 - STEPS]])
        one, two = (
            model.predict(weights, part, None)
            for model, part in ((short, x), (long, padded))
        )
        assert_close(two, one)
        # And words do.
        other = short.predict(weights, tf.where(x > 0, x, 1), None).numpy()
        assert not np.any(np.all(np.isclose(other[[0, 2, 3]], one.numpy()[[0, 2, 3]])))

    @pytest.mark.parametrize("shape", [(WORDS, 300), (WORDS + 2,)])
    def test_an_embedding_has_a_row_for_each_id(self, shape):
        with pytest.raises(ValueError, match=r"`embedding` must be a matrix .* 13"):
            text_models.build_sentiment_lstm(WORDS, embedding=np.zeros(shape))


@pytest.mark.parametrize(
    ("build", "sizes", "name"),
    [
        (text_models.build_next_word_lstm, (0, 5), "vocabulary_size"),
        (text_models.build_next_word_lstm, (5, -1), "sequence_length"),
        (text_models.build_tag_regression, (0, 5), "vocabulary_size"),
        (text_models.build_tag_regression, (5, 4), "num_tags"),
        (text_models.build_sentiment_lstm, (5, 0), "sequence_length"),
    ],
)
def test_sizes_are_positive(build, sizes, name):
    with pytest.raises(ValueError, match=f"`{name}` must be "):
        build(*sizes)


BUILDERS = {
    "next_word": functools.partial(text_models.build_next_word_lstm, WORDS, STEPS),
    "tags": functools.partial(
        text_models.build_tag_regression, WORDS, 6, sequence_length=STEPS
    ),
    "sentiment": functools.partial(text_models.build_sentiment_lstm, WORDS, STEPS),
}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (
            BUILDERS["next_word"],
            [
                ("embedding", [(15, 96)]),
                ("lstm", [(96, 2680), (670, 2680), (2680,)]),
                ("dense_1", [(670, 96), (96,)]),
                ("logits", [(96, 15), (15,)]),
            ],
        ),
        (BUILDERS["tags"], [("logits", [(WORDS, 6), (6,)])]),
        (
            BUILDERS["sentiment"],
            [
                (
                    "encoder",
                    [(13, 300)]
                    + [(300, 512), (128, 512), (512,)]
                    + [(128, 512), (128, 512), (512,)],
                ),
                ("logits", [(128, 2), (2,)]),
            ],
        ),
        (
            functools.partial(
                BUILDERS["sentiment"], embedding=np.zeros([WORDS + 2, 7])
            ),
            [
                (
                    "encoder",
                    [(7, 512), (128, 512), (512,), (128, 512), (128, 512), (512,)],
                ),
                ("logits", [(128, 2), (2,)]),
            ],
        ),
    ],
)
def test_layers_and_their_weights(build, expected):
    model = build()
    weights = iter(model.initialize(np.random.default_rng(0)))
    found = [
        (layer.name, [next(weights).shape for _ in range(layer.num_weights)])
        for layer in model.layers
    ]
    assert found == expected
    assert next(weights, None) is None


@pytest.mark.parametrize("name", BUILDERS)
def test_initial_weights_follow_the_generator(name):
    model = BUILDERS[name]()
    one, two = (model.initialize(np.random.default_rng(4)) for _ in range(2))
    assert all(weight.dtype == np.float32 for weight in one)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", BUILDERS)
def test_a_client_trains_by_the_gradient(name, rng):
    model = BUILDERS[name]()
    weights = draw_weights(model, rng)
    x = draw_sentences(rng, WORDS + 1, [4, 0, STEPS, 2])
    y = {
        "next_word": lambda: draw_sentences(rng, WORDS + 4, [4, 0, STEPS, 2]),
        "tags": lambda: tf.constant(rng.integers(2, size=[4, 6]), tf.float32),
        "sentiment": lambda: tf.constant([0, 1, 1, 0]),
    }[name]()
    optimizer = tff.learning.optimizers.build_sgdm(0.5)
    train = client_training.build_training(model, OptimizerSolver(optimizer=optimizer))
    batches = tf.constant([[2, 1, 4, 3]])
    trained, sums = tf.function(train)(
        weights, {"x": x, "y": y}, batches, tf.constant([0, 0])
    )
    gradients = compute_gradients(model, weights, x, y)
    for before, after, gradient in zip(weights, trained, gradients, strict=True):
        assert_close(after, before - 0.5 * gradient)
    outputs = model.predict(weights, x, None)
    expected = {"num_examples": 4.0, "loss": model.compute_loss(y, outputs)}
    for metric, function in model.metrics.items():
        expected[metric] = function(y, outputs)
    if model.metric_weights is not None:
        expected["metric_weight"] = model.metric_weights(y, outputs)
    assert set(sums) == set(expected)
    for key, values in expected.items():
        assert float(sums[key]) == pytest.approx(float(np.sum(values)), rel=1e-5)
