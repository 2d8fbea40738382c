"""Tests for models from Keras: against Keras, functional twins, what is refused."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from simulation import client_training, learning
from simulation.engine import local_context, lockstep
from simulation.image_models import build_mlp
from simulation.keras_model import build_keras_model
from tests.simulation import toys

layers = tf.keras.layers
SHAPE = (28, 28, 1)
IMAGES = tf.TensorSpec([None, *SHAPE])
VECTORS = tf.TensorSpec([None, 5])


def build_keras_mlp(hidden_sizes=(256, 128, 16)) -> tf.keras.Model:
    """Returns the Keras twin of `build_mlp`."""
    hidden = [
        layers.Dense(size, activation="relu", name=f"dense_{number}")
        for number, size in enumerate(hidden_sizes, start=1)
    ]
    return tf.keras.Sequential(
        [layers.Flatten(), *hidden, layers.Dense(10, name="logits")]
    )


def build_functional_cnn() -> tf.keras.Model:
    inputs = tf.keras.Input(SHAPE)
    x = layers.Rescaling(0.5)(inputs)
    x = layers.MaxPool2D()(layers.Conv2D(3, 3, name="conv_1")(x))
    # Operations of TensorFlow are layers too.
    x = tf.nn.relu(layers.Conv2D(4, 5, strides=3, name="conv_2")(x))
    x = layers.Dense(6, activation="tanh", name="dense_1")(tf.reshape(x, [-1, 36]))
    return tf.keras.Model(inputs, layers.Dense(10, name="logits")(x))


def draw_weights(model, rng) -> tuple[tf.Tensor, ...]:
    """Returns weights of one scale, biases too."""
    return tuple(
        tf.constant(rng.normal(scale=0.1, size=weight.shape), tf.float32)
        for weight in model.initialize(rng)
    )


def draw_batch(rng, spec=IMAGES, size=4) -> tuple[tf.Tensor, tf.Tensor]:
    x = tf.constant(rng.normal(size=[size, *spec.shape[1:]]), spec.dtype)
    return x, tf.constant(rng.integers(10, size=size), tf.int32)


def compute_all(model, weights, x, y, seed=None) -> list[np.ndarray]:
    """Returns the outputs and the gradients of the mean loss."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        outputs = model.predict(weights, x, seed)
        loss = tf.reduce_mean(model.compute_loss(y, outputs))
    return [outputs.numpy(), *(g.numpy() for g in tape.gradient(loss, weights))]


def assert_all_close(found, expected) -> None:
    """Compares with a relative error of 1e-5, and 1e-6 of what is largest."""
    for one, two in zip(found, expected, strict=True):
        two = np.asarray(two)
        scale = float(np.max(np.abs(two)))
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6 * scale)


def build_data(rng, spec, size: int) -> list:
    """Returns what a client of this size brings to a round."""
    x, y = (part.numpy() for part in draw_batch(rng, spec, size))
    batches = client_training.draw_batches(size, batch_size=4, num_epochs=2, rng=rng)
    examples, batches = client_training.pad_client({"x": x, "y": y}, batches)
    seed = np.array([1, size], np.int32)
    return learning.build_client_data(
        examples, batches, noise_seed=seed, training_seed=seed, num_joined=4
    )


@pytest.fixture(scope="module")
def keras_mlp():
    return build_keras_model(build_keras_mlp, name="keras_mlp", x_spec=IMAGES)


class TestAgainstKeras:
    @pytest.mark.parametrize(
        ("build", "names"),
        [
            (build_keras_mlp, ["dense_1", "dense_2", "dense_3", "logits"]),
            (build_functional_cnn, ["conv_1", "conv_2", "dense_1", "logits"]),
        ],
    )
    def test_outputs_gradients_and_names(self, build, names, rng):
        model = build_keras_model(build, name="made_up", x_spec=IMAGES)
        assert model.name == "made_up"
        assert [layer.name for layer in model.layers] == names
        assert [layer.num_weights for layer in model.layers] == [2] * 4
        weights, (x, y) = draw_weights(model, rng), draw_batch(rng)
        theirs = build()
        theirs.build([None, *SHAPE])
        theirs.set_weights(weights)
        with tf.GradientTape() as tape:
            logits = theirs(x)
            loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)(
                y, logits
            )
        expected = [logits, *tape.gradient(loss, theirs.trainable_variables)]
        for seed in (None, tf.constant([1, 2])):
            assert_all_close(compute_all(model, weights, x, y, seed), expected)
        # Inside a function as well, and with arrays.
        predict = tf.function(lambda weights, x: model.predict(weights, x, None))
        assert_all_close([predict(weights, x)], [logits])
        arrays = [weight.numpy() for weight in weights]
        assert_all_close([model.predict(arrays, x.numpy(), None)], [logits])

    def test_integers_and_a_layer_within_a_layer(self, rng):
        def build():
            inner = tf.keras.Sequential(
                [layers.Dense(4, name="a"), layers.Dense(5, name="b")], name="inner"
            )
            return tf.keras.Sequential(
                [layers.Embedding(9, 3, name="embedding"), inner, layers.Flatten()]
            )

        spec = tf.TensorSpec([None, 6], tf.int32)
        model = build_keras_model(build, name="made_up", x_spec=spec)
        found = [(layer.name, layer.num_weights) for layer in model.layers]
        assert found == [("embedding", 1), ("inner", 4)]
        table, a, a_bias, b, b_bias = weights = draw_weights(model, rng)
        ids = tf.constant(rng.integers(9, size=[2, 6]), tf.int32)
        expected = (tf.gather(table, ids) @ a + a_bias) @ b + b_bias
        outputs = model.predict(weights, ids, None)
        assert_all_close([outputs], [tf.reshape(expected, [2, 30])])

    def test_models_made_before_work_after(self, rng):
        before = build_keras_mlp([3])
        before(tf.zeros([1, *SHAPE]))
        model = build_keras_model(lambda: build_keras_mlp([3]), name="x", x_spec=IMAGES)
        model.initialize(np.random.default_rng(0))
        assert before(tf.zeros([1, *SHAPE])).shape == [1, 10]


class TestTwin:
    def test_predictions_and_gradients_are_those_of_the_functional_model(
        self, keras_mlp, rng
    ):
        twin = build_mlp(SHAPE, 10, hidden_sizes=[256, 128, 16])
        assert [layer.name for layer in keras_mlp.layers] == [
            layer.name for layer in twin.layers
        ]
        assert keras_mlp.num_parameters == twin.num_parameters == 235_920 + 170
        assert keras_mlp.stackable and twin.stackable
        weights, (x, y) = draw_weights(twin, rng), draw_batch(rng)
        expected = compute_all(twin, weights, x, y)
        assert_all_close(compute_all(keras_mlp, weights, x, y), expected)
        other = (*weights[:-1], weights[-1] + 0.01)
        with pytest.raises(AssertionError):
            assert_all_close(compute_all(keras_mlp, other, x, y), expected)

    def test_rounds_train_as_with_the_functional_model(self, rng, monkeypatch):
        stacks, run = [], lockstep.Lockstep.run

        def watch(cut, clients):
            stacks.append(cut)
            return run(cut, clients)

        monkeypatch.setattr(lockstep.Lockstep, "run", watch)
        spec = tf.TensorSpec([None, 2, 3, 1])
        ours = build_mlp((2, 3, 1), 10, hidden_sizes=[4])
        keras = build_keras_model(
            lambda: build_keras_mlp([4]), name="keras", x_spec=spec
        )
        weights = tuple(weight.numpy() for weight in draw_weights(ours, rng))
        data = [build_data(rng, spec, size) for size in (8, 3, 0, 6)]
        results = []
        for model, stackable in ((ours, False), (keras, False), (keras, True)):
            process = learning.build_federated_averaging(
                dataclasses.replace(model, stackable=stackable),
                toys.CarriedMeanFactory(divisor=4.0),
                client_optimizer=tff.learning.optimizers.build_sgdm(0.5, momentum=0.9),
                server_optimizer=tff.learning.optimizers.build_sgdm(1.0),
                initial_weights=weights,
            )
            context = local_context.LocalContext()
            with tff.framework.get_context_stack().install(context):
                output = process.next(process.initialize(), data)
            context.close()
            results.append(output.state.global_model_weights.trainable)
            assert output.metrics["client_work"]["num_examples"] == 2 * 17
            assert bool(stacks) is stackable
        for found in results[1:]:
            assert_all_close(found, results[0])
        # Clients have moved.
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(results[0][0], weights[0], rtol=0.1)


class TestInitialWeights:
    def test_they_follow_the_generator_and_the_layers(self, keras_mlp):
        one, same, other = (
            keras_mlp.initialize(np.random.default_rng(seed)) for seed in (4, 4, 5)
        )
        assert all(map(np.array_equal, one, same))
        assert [weight.dtype for weight in one] == [np.float32] * 8
        for kernel, second, bias in zip(one[::2], other[::2], one[1::2], strict=True):
            assert not np.any(kernel == second)
            assert not np.any(bias)
        # Glorot, and not one draw for all.
        for kernel in one[:4:2]:
            assert np.var(kernel) == pytest.approx(2 / sum(kernel.shape), rel=0.05)
        assert not np.array_equal(one[0][:128, :16], one[2][:128, :16])

    def test_a_seed_of_its_own_is_kept(self):
        def build():
            ones = tf.keras.initializers.Constant(1.5)
            drawn = tf.keras.initializers.RandomNormal(seed=7)
            return tf.keras.Sequential(
                [layers.Dense(3, kernel_initializer=drawn, bias_initializer=ones)]
            )

        model = build_keras_model(build, name="x", x_spec=VECTORS)
        one, two = (model.initialize(np.random.default_rng(seed)) for seed in (1, 2))
        assert all(map(np.array_equal, one, two))
        assert one[1].tolist() == [1.5] * 3 and np.all(one[0] != 0)

    def test_an_initializer_without_a_seed_is_refused(self):
        @tf.keras.utils.register_keras_serializable("tests")
        class Unseeded(tf.keras.initializers.Initializer):
            def __call__(self, shape, dtype=None, **kwargs):
                del dtype, kwargs
                return tf.constant(np.random.default_rng().normal(size=shape), "float")

        with pytest.raises(ValueError, match="draw from their `seed`"):
            build_keras_model(
                lambda: tf.keras.Sequential([layers.Dense(2, None, True, Unseeded())]),
                name="x",
                x_spec=VECTORS,
            )


def in_a_row(*others) -> tf.keras.Model:
    """Returns layers of their kind, and dense ones around them."""
    return tf.keras.Sequential(
        [layers.Dense(5, name="first"), *others, layers.Dense(2, name="last")]
    )


def build_residual() -> tf.keras.Model:
    x = tf.keras.Input([5])
    return tf.keras.Model(x, layers.Add(name="sum")([x, layers.Dense(5)(x)]))


def build_shared() -> tf.keras.Model:
    x, dense = tf.keras.Input([5]), layers.Dense(5, name="shared")
    return tf.keras.Model(x, dense(dense(x)))


def build_branch() -> tf.keras.Model:
    x = tf.keras.Input([5])
    return tf.keras.Model(x, [layers.Dense(2)(x), layers.Dense(2)(x)])


class Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x)


class TestRefused:
    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda: in_a_row(layers.Dropout(0.5)), "draw, such as dropout.*'first'"),
            (lambda: in_a_row(layers.Dropout(0.5, seed=1)), "draw, such as dropout"),
            (lambda: in_a_row(layers.GaussianNoise(0.1)), "RandomStandardNormal"),
            (
                lambda: in_a_row(layers.BatchNormalization(name="norm")),
                "batch normalization.*'norm'.*moving_mean",
            ),
            (
                lambda: in_a_row(layers.Dense(4, trainable=False, name="frozen")),
                "'frozen' that are not trained",
            ),
            (
                lambda: in_a_row(layers.Dense(4, bias_regularizer="l2", name="decay")),
                "1 losses in layer 'decay'",
            ),
            (
                lambda: in_a_row(layers.Dense(4, dtype="float64", name="wide")),
                "float32 weights. Found float64 in layer 'wide'",
            ),
            (build_residual, "one tensor goes .* Found layer 'sum'"),
            (build_shared, "one tensor goes .* Found layer 'shared'"),
            (build_branch, "one input and one output. Found 1 and 2"),
            (
                lambda: in_a_row(layers.Reshape([5, 1]), layers.Masking(name="masks")),
                "Found a mask behind layer 'masks'",
            ),
            (Subclassed, "Sequential or functional model .* Found 0 and 0"),
            (lambda: tf.keras.Sequential([layers.ReLU()]), "a model with weights"),
            (lambda: 3, "must return a Keras model. Found 3"),
            (
                lambda: tf.keras.Sequential([tf.keras.Input([6]), layers.Dense(2)]),
                r"`x_spec` must be .* float32\[None, 6\]. Found float32\[None, 5\]",
            ),
            (
                lambda: tf.keras.Model(
                    x := tf.keras.Input([5], dtype="int32"), layers.Dense(2)(x)
                ),
                r"`x_spec` must be .* int32\[None, 5\]. Found float32\[None, 5\]",
            ),
        ],
    )
    def test_what_layers_cannot_be(self, build, message):
        with pytest.raises(ValueError, match=message):
            build_keras_model(build, name="x", x_spec=VECTORS)

    def test_only_dense_models_are_stackable(self):
        grouped = build_keras_model(
            lambda: in_a_row(layers.LayerNormalization()), name="x", x_spec=VECTORS
        )
        assert not grouped.stackable
        assert [layer.num_weights for layer in grouped.layers] == [2, 2, 2]
