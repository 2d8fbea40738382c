"""Models of text.

Words are ids: 0 pads the end of a sentence, 1 to V are the words of a vocabulary, most
frequent first, and V + 1 stands for all others. What pads a sentence changes nothing.
"""

import collections
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from simulation.model import (
    Layer,
    LayerChain,
    Model,
    Weights,
    build_classifier,
    compute_cross_entropy,
    draw_glorot,
)

PAD = 0
_TOP_TAGS = 5


def build_next_word_lstm(
    vocabulary_size: int = 10_000, sequence_length: int = 20
) -> Model:
    """Returns the language model of the Stack Overflow experiments.

    Source: Reddi et al. 2021 (TFF's `create_recurrent_model`): embedding of 96, an LSTM
    of 670 units, dense 96, dense. 4,050,748 parameters for 10,000 words.

    x and y are ids, int32[batch, sequence_length], y those of x one step later: a
    sentence begins with V + 2 and ends with V + 3. The loss of an example is the mean
    over its targets that are not padding (TFF's is a mean over all of a batch's). The
    accuracy is over targets that are words: it takes no padding, unknown word,
    beginning or end for right.

    Args:
        vocabulary_size: The number V of words.
        sequence_length: Words of a sentence, with its beginning.

    Raises:
        ValueError: If a size is not positive.
    """
    _check_positive(vocabulary_size=vocabulary_size, sequence_length=sequence_length)
    num_ids, embedded, units = vocabulary_size + 4, 96, 670

    def initialize(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return (
            _draw_embedding(rng, num_ids, embedded),
            *draw_lstm(rng, embedded, units),
            *_draw_dense(rng, units, embedded),
            *_draw_dense(rng, embedded, num_ids),
        )

    layers = (
        _build_layer("embedding", 1, lambda x, table: tf.gather(table, x)),
        _build_layer("lstm", 3, apply_lstm),
        _build_layer("dense_1", 2, _apply_dense),
        _build_layer("logits", 2, _apply_dense),
    )

    def compute_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        real = tf.cast(labels > PAD, tf.float32)
        losses = tf.reduce_sum(real * compute_cross_entropy(labels, logits), axis=-1)
        return tf.math.divide_no_nan(losses, tf.reduce_sum(real, axis=-1))

    def find_words(labels: tf.Tensor) -> tf.Tensor:
        return tf.logical_and(labels > PAD, labels <= vocabulary_size)

    def count_right(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        predicted = tf.argmax(logits, axis=-1, output_type=labels.dtype)
        right = tf.logical_and(find_words(labels), tf.equal(predicted, labels))
        return tf.reduce_sum(tf.cast(right, tf.float32), axis=-1)

    def count_words(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        del logits
        return tf.reduce_sum(tf.cast(find_words(labels), tf.float32), axis=-1)

    ids = tf.TensorSpec([None, sequence_length], tf.int32)
    return Model(
        name="next_word_lstm",
        initialize=initialize,
        predict=LayerChain(layers=layers),
        compute_loss=compute_loss,
        metrics={"accuracy": count_right},
        metric_weights=count_words,
        example_spec=collections.OrderedDict(x=ids, y=ids),
        layers=layers,
    )


def build_tag_regression(
    vocabulary_size: int = 10_000, num_tags: int = 500, *, sequence_length: int = 100
) -> Model:
    """Returns a logistic regression for each tag, on bags of words, zero at first.

    Source: Reddi et al. 2021 (TFF's tag prediction task). 5,000,500 parameters for
    10,000 words and 500 tags.

    x is int32[batch, sequence_length]: the ids of the words in the vocabulary alone, in
    any order, and 0 elsewhere; `predict` makes the bag of them, the share of each word,
    as a sparse matrix. An id above V is an error. y is float32[batch, num_tags], 1 for
    the example's tags.

    The loss of an example is the sum over tags of the cross entropies, and a client's
    step takes the mean over its batch. TFF takes the mean over tags and the *sum* over
    the batch: its learning rate is ours times num_tags / (examples in the batch). The
    metric is "recall_at_5": of the true tags, how many are among the 5 likeliest.

    Args:
        vocabulary_size: The number V of words.
        num_tags: The number of tags, at least 5.
        sequence_length: Words of an example, at most.

    Raises:
        ValueError: If a size is not positive, or there are fewer than 5 tags.
    """
    _check_positive(vocabulary_size=vocabulary_size, sequence_length=sequence_length)
    if num_tags < _TOP_TAGS:
        raise ValueError(f"`num_tags` must be at least {_TOP_TAGS}. Found {num_tags}.")

    def initialize(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        del rng
        return (
            np.zeros([vocabulary_size, num_tags], np.float32),
            np.zeros([num_tags], np.float32),
        )

    def multiply(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
        bag = _build_bag(x, vocabulary_size)
        return tf.nn.bias_add(tf.sparse.sparse_dense_matmul(bag, kernel), bias)

    layers = (_build_layer("logits", 2, multiply),)

    def compute_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
        return tf.reduce_sum(losses, axis=-1)

    def count_found(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        likeliest = tf.math.top_k(logits, _TOP_TAGS, sorted=False).indices
        return tf.reduce_sum(tf.gather(labels, likeliest, batch_dims=1), axis=-1)

    def count_tags(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        del logits
        return tf.reduce_sum(labels, axis=-1)

    return Model(
        name="tag_regression",
        initialize=initialize,
        predict=LayerChain(layers=layers),
        compute_loss=compute_loss,
        metrics={"recall_at_5": count_found},
        metric_weights=count_tags,
        example_spec=collections.OrderedDict(
            x=tf.TensorSpec([None, sequence_length], tf.int32),
            y=tf.TensorSpec([None, num_tags], tf.float32),
        ),
        layers=layers,
    )


def build_sentiment_lstm(
    vocabulary_size: int,
    sequence_length: int = 25,
    *,
    embedding: np.ndarray | None = None,
    num_classes: int = 2,
) -> Model:
    """Returns the classifier of sentences of the Sent140 experiments.

    Source: Yin et al. 2024, appendix H.2: two LSTMs of 128 units, one on the other, on
    embeddings of 300, and a dense layer on the last output of a sentence. 351,490
    parameters for two classes, beside (vocabulary_size + 2) x 300 of the embedding if
    it is learned.

    x is ids, int32[batch, sequence_length], y is int32[batch].

    Args:
        vocabulary_size: The number V of words.
        sequence_length: Words of a sentence, at most.
        embedding: The vectors of the ids 0 to V + 1, not trained; that of 0 has no
            effect unless a sentence has no word. None: learned, of dimension 300.
        num_classes: The number of classes.

    Raises:
        ValueError: If a size is not positive, or `embedding` is not a matrix with a row
            for each id.
    """
    _check_positive(
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        num_classes=num_classes,
    )
    num_ids, embedded, units = vocabulary_size + 2, 300, 128
    if embedding is not None:
        if embedding.ndim != 2 or len(embedding) != num_ids:
            raise ValueError(
                "`embedding` must be a matrix with vocabulary_size + 2 = "
                f"{num_ids} rows. Found shape {embedding.shape}."
            )
        embedding = embedding.astype(np.float32)
        embedded = embedding.shape[1]

    def initialize(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        learned: tuple[np.ndarray, ...] = ()
        if embedding is None:
            learned = (_draw_embedding(rng, num_ids, embedded),)
        return (
            *learned,
            *draw_lstm(rng, embedded, units),
            *draw_lstm(rng, units, units),
            *_draw_dense(rng, units, num_classes),
        )

    def encode(x: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
        *learned, lower, upper = (*weights[:-6], weights[-6:-3], weights[-3:])
        [table] = learned or [tf.constant(embedding)]
        outputs = apply_lstm(tf.gather(table, x), *lower)
        outputs = apply_lstm(outputs, *upper)
        steps = tf.range(sequence_length)
        last = tf.reduce_max(tf.where(x > PAD, steps, 0), axis=1)
        return tf.gather(outputs, last, batch_dims=1)

    # One layer as far as the last output: the ids say where a sentence ends.
    layers = (
        _build_layer("encoder", 6 + (embedding is None), encode),
        _build_layer("logits", 2, _apply_dense),
    )
    return build_classifier(
        "sentiment_lstm",
        initialize,
        layers,
        tf.TensorSpec([None, sequence_length], tf.int32),
    )


def apply_lstm(
    x: tf.Tensor, kernel: tf.Tensor, recurrent_kernel: tf.Tensor, bias: tf.Tensor
) -> tf.Tensor:
    """Returns the outputs of an LSTM (Hochreiter and Schmidhuber 1997) at every step.

    i, f, o = sigmoid(.), g = tanh(.) of x_t W + h_{t-1} U + b, in Keras' order i f g o;
    c_t = f c_{t-1} + i g; h_t = o tanh(c_t); c_0 = h_0 = 0.

    Args:
        x: The inputs, float32[batch, steps, inputs]; the number of steps is static.
        kernel: W, [inputs, 4 * units].
        recurrent_kernel: U, [units, 4 * units].
        bias: b, [4 * units].

    Returns:
        float32[batch, steps, units].
    """
    hidden = cell = tf.zeros([tf.shape(x)[0], recurrent_kernel.shape[0]])
    outputs = []
    # Unrolled: with a while loop a step of training takes 7 to 20 % longer.
    for inputs in tf.unstack(_apply_dense(x, kernel, bias), axis=1):
        gates = inputs + hidden @ recurrent_kernel
        entered, kept, new, shown = tf.split(gates, 4, axis=-1)
        cell = tf.sigmoid(kept) * cell + tf.sigmoid(entered) * tf.tanh(new)
        hidden = tf.sigmoid(shown) * tf.tanh(cell)
        outputs.append(hidden)
    return tf.stack(outputs, axis=1)


def draw_lstm(
    rng: np.random.Generator, inputs: int, units: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws an LSTM's weights: Glorot uniform, orthogonal, 1 for the forget gate."""
    kernel = draw_glorot(rng, [inputs, 4 * units])
    orthogonal, triangular = np.linalg.qr(rng.normal(size=[4 * units, units]))
    # With these signs the law is uniform over matrices with orthonormal columns.
    orthogonal *= np.sign(np.diag(triangular))
    bias = np.zeros([4 * units], np.float32)
    bias[units : 2 * units] = 1.0
    return kernel, orthogonal.T.astype(np.float32), bias


def _build_layer(
    name: str, num_weights: int, function: Callable[..., tf.Tensor]
) -> Layer:
    """Returns the layer of a function of inputs and weights, without dropout."""

    def apply(weights: Weights, x: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        del seed
        return function(x, *weights)

    return Layer(name=name, num_weights=num_weights, apply=apply)


def _build_bag(x: tf.Tensor, vocabulary_size: int) -> tf.SparseTensor:
    """Returns the share of each word in each example, [batch, vocabulary_size].

    Its product with a matrix takes a quarter of a dense bag's time, and so does the
    gradient.
    """
    places = tf.where(x > PAD)
    rows, words = places[:, 0], tf.cast(tf.gather_nd(x, places), tf.int64) - 1
    num_words = tf.math.count_nonzero(x > PAD, axis=1, dtype=tf.float32)
    return tf.SparseTensor(
        tf.stack([rows, words], axis=1),
        1.0 / tf.gather(num_words, rows),
        [tf.shape(x, out_type=tf.int64)[0], vocabulary_size],
    )


def _apply_dense(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Returns a dense layer on the last axis."""
    return tf.nn.bias_add(tf.tensordot(x, kernel, 1), bias)


def _draw_dense(
    rng: np.random.Generator, inputs: int, outputs: int
) -> tuple[np.ndarray, np.ndarray]:
    return draw_glorot(rng, [inputs, outputs]), draw_glorot(rng, [outputs])


def _draw_embedding(rng: np.random.Generator, num_ids: int, dim: int) -> np.ndarray:
    return rng.uniform(-0.05, 0.05, [num_ids, dim]).astype(np.float32)


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"`{name}` must be positive. Found {size}.")
