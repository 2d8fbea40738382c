"""Measures how well a mechanism estimates a mean: vectors, mechanism, squared error.

Source: Kairouz, Liu, Steinke 2021, the experiments on distributed mean estimation. n
clients hold one vector each, drawn uniformly from the sphere of radius c. The error of
one repeat is the squared error of a coordinate of the mean,

  MSE = ||estimate - mean||^2 / d,

with the true mean of the n vectors and their d coordinates, padding left out.

All cells with the same (n, d, c) estimate the means of the same vectors under the same
public rotations, repeat by repeat; noise and rounding are independent in each cell.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from scipy import stats
from tensorflow.python.eager import context

from distributed_dp.clipping import clip_by_l2_norm
from distributed_dp.encoding import Codec
from distributed_dp.random_bits import fold_in
from simulation import seeds

CONFIDENCE = 0.95
CENTRAL_DRAWS = 20
"""Noise vectors a repeat of the central Gaussian: they cost next to nothing."""

# From so many client vectors a cell, compiling by XLA pays: it takes 2 s, and then a
# client of 256 coordinates takes 10 us instead of 250. The random bits are the same.
_COMPILE_FROM = 6_000

FloatArray = npt.NDArray[np.float64]
Estimator = Callable[
    [npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.int32]],
    tuple[FloatArray, float],
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with the ends of its confidence interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What the repeats of one cell gave.

    Attributes:
        errors: The MSE of each repeat, [repeats].
        redraws_per_client: Mean number of rejected roundings of a client; None where
            nothing is rounded.
    """

    errors: FloatArray
    redraws_per_client: float | None


def sample_vectors(
    root: seeds.RootSeed, population: tuple[int, int, float], *, repeat: int
) -> npt.NDArray[np.float32]:
    """Draws the clients' vectors, independent and uniform on the sphere.

    Args:
        root: The root of the streams.
        population: (n, d, c).
        repeat: Which repeat.

    Returns:
        float32 [n, d] of norms c.
    """
    num_clients, dim, radius = population
    generator = seeds.derive_generator(
        root,
        purpose=seeds.Purpose.CLIENT_DATA,
        round_number=repeat,
        client_id=f"n={num_clients}/d={dim}",
    )
    vectors = generator.standard_normal((num_clients, dim), dtype=np.float32)
    norms = np.sqrt(np.sum(np.square(vectors), axis=1, keepdims=True))
    return vectors * (np.float32(radius) / norms)


def build_estimator(codec: Codec, *, num_clients: int, compiled: bool) -> Estimator:
    """Returns a function that runs the whole protocol once.

    Every client's vector goes through `Codec.encode`; residues are summed and
    `Codec.decode` maps the sum modulo 2**bits to the estimate.

    Args:
        codec: Encoder and decoder.
        num_clients: n.
        compiled: Whether XLA compiles it.

    Returns:
        A function of the vectors [n, dim], the rotation's seed and the noise's seed,
        both int32[2]. It gives the estimate of the mean [dim] and the number of
        rejected roundings a client.
    """
    clip = codec.parameters.l2_clip
    rotation = codec.rotation

    def compute_sum(
        vectors: tf.Tensor, rotation_seed: tf.Tensor, noise_seed: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        def add_client(
            sums: tuple[tf.Tensor, tf.Tensor], client: tuple[tf.Tensor, tf.Tensor]
        ) -> tuple[tf.Tensor, tf.Tensor]:
            total, redraws = sums
            vector, index = client
            update = codec.encode(
                vector,
                l2_clip=clip,
                joined=tf.constant(num_clients, tf.int64),
                rotation_seed=rotation_seed,
                noise_seed=fold_in(noise_seed, index),
            )
            total += tf.cast(update.residues, tf.int64)
            return total, redraws + tf.cast(update.num_redraws, tf.float64)

        total, redraws = tf.foldl(
            add_client,
            (vectors, tf.range(num_clients, dtype=tf.int64)),
            initializer=(
                tf.zeros([rotation.padded_dim], tf.int64),
                tf.constant(0.0, tf.float64),
            ),
            parallel_iterations=1,
        )
        decoded = codec.decode(total, l2_clip=clip, rotation_seed=rotation_seed)
        return decoded, redraws

    run = tf.function(
        compute_sum,
        autograph=False,
        jit_compile=compiled or None,
        input_signature=[
            tf.TensorSpec([num_clients, rotation.dim], tf.float32),
            tf.TensorSpec([2], tf.int32),
            tf.TensorSpec([2], tf.int32),
        ],
    ).get_concrete_function()

    def estimate(
        vectors: npt.NDArray[np.float32],
        rotation_seed: npt.NDArray[np.int32],
        noise_seed: npt.NDArray[np.int32],
    ) -> tuple[FloatArray, float]:
        total, redraws = run(
            tf.constant(vectors), tf.constant(rotation_seed), tf.constant(noise_seed)
        )
        mean = total.numpy().astype(np.float64) / num_clients
        return mean, float(redraws) / num_clients

    return estimate


def measure_codec(
    codec: Codec,
    population: tuple[int, int, float],
    *,
    key: str,
    root: seeds.RootSeed,
    repeats: int,
    check_stop: Callable[[], None] = lambda: None,
) -> Measurement:
    """Measures a distributed mechanism.

    Args:
        codec: Encoder and decoder.
        population: (n, d, c) of the vectors.
        key: The cell's name; its noise is a stream of its own.
        root: The root of the streams.
        repeats: Number of repeats.
        check_stop: Called before each repeat; may raise.
    """
    num_clients = population[0]
    estimate = build_estimator(
        codec,
        num_clients=num_clients,
        compiled=num_clients * repeats >= _COMPILE_FROM,
    )
    errors, redraws = [], 0.0
    for repeat in range(repeats):
        check_stop()
        vectors = sample_vectors(root, population, repeat=repeat)
        found, rejected = estimate(
            vectors,
            seeds.derive_seed(
                root, purpose=seeds.Purpose.ROTATION, round_number=repeat
            ),
            seeds.derive_seed(
                root,
                purpose=seeds.Purpose.CLIENT_NOISE,
                round_number=repeat,
                client_id=key,
            ),
        )
        errors.append(compute_error(found, _compute_mean(vectors)))
        redraws += rejected / repeats
    return Measurement(errors=np.array(errors), redraws_per_client=redraws)


def measure_central(
    stddevs: Sequence[float],
    population: tuple[int, int, float],
    *,
    keys: Sequence[str],
    root: seeds.RootSeed,
    repeats: int,
    draws: int = CENTRAL_DRAWS,
    check_stop: Callable[[], None] = lambda: None,
) -> list[FloatArray]:
    """Measures the central Gaussian: the clipped vectors' exact sum plus noise.

    Args:
        stddevs: Standard deviations of the sum's noise, in units of the vectors.
        population: (n, d, c) of the vectors.
        keys: The name of each one's stream of noise.
        root: The root of the streams.
        repeats: Number of repeats.
        draws: Noise vectors a repeat, over which its error is averaged.
        check_stop: Called before each repeat; may raise.

    Returns:
        The MSE of each repeat, [repeats], for each standard deviation.
    """
    num_clients, _, clip = population
    errors = np.empty((len(stddevs), repeats))
    for repeat in range(repeats):
        check_stop()
        vectors = sample_vectors(root, population, repeat=repeat)
        clipped = clip_by_l2_norm(tf.constant(vectors), clip)[0].numpy()
        total, mean = np.sum(clipped, axis=0, dtype=np.float64), _compute_mean(vectors)
        for index, (stddev, key) in enumerate(zip(stddevs, keys, strict=True)):
            generator = seeds.derive_generator(
                root,
                purpose=seeds.Purpose.SERVER_NOISE,
                round_number=repeat,
                client_id=key,
            )
            noise = stddev * generator.standard_normal((draws, len(total)))
            errors[index, repeat] = compute_error((total + noise) / num_clients, mean)
    return list(errors)


def free_compiled() -> None:
    """Frees what XLA compiled for all cells so far, about 45 MB each.

    TensorFlow keeps it, although the functions are gone, until its context ends; there
    is no public way to end that. No tensor outlives the call.
    """
    context._reset_context()


def compute_error(estimate: FloatArray, mean: FloatArray) -> float:
    """Returns ||estimate - mean||^2 / d, averaged over estimates [..., d]."""
    return float(np.mean(np.square(estimate - mean)))


def compute_mean_interval(values: FloatArray) -> Interval:
    """Returns the mean of independent values and its Student interval."""
    mean = float(np.mean(values))
    return _build_interval(mean, float(np.std(values, ddof=1)), len(values))


def compute_ratio_interval(
    numerators: FloatArray, denominators: FloatArray
) -> Interval:
    """Returns the ratio of the means of independent pairs and its interval.

    The interval is the delta method's: that of the mean of (x - ratio y) / mean(y).
    """
    base = float(np.mean(denominators))
    ratio = float(np.mean(numerators)) / base
    residuals = (numerators - ratio * denominators) / base
    return _build_interval(ratio, float(np.std(residuals, ddof=1)), len(residuals))


def _build_interval(value: float, stddev: float, count: int) -> Interval:
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
    half = quantile * stddev / math.sqrt(count)
    return Interval(value=value, low=max(0.0, value - half), high=value + half)


def _compute_mean(vectors: npt.NDArray[np.float32]) -> FloatArray:
    return np.mean(vectors, axis=0, dtype=np.float64)
