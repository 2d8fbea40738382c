"""Speed of the mechanism's ops, as ratios of medians inside one run.

  python -m benchmarks.ops
  python -m benchmarks.ops --dim=262144 --repeats=11 --output=ops.json

Compared with the published algorithms, written anew here: the iterated 2 x 2
Walsh-Hadamard transform, and rejection from a discrete Laplace proposal (Canonne,
Kamath, Steinke 2020, algorithm 3, in the vectorised floating-point form that federated
learning code uses). Everything runs on the same tensors, interleaved, so that a noisy
machine hits all alike. A Python call of a compiled function costs about 0.4 ms on its
own; names with "in a graph" are times per step of 10 steps in one call, as in the graph
of a client, where that cost does not fall on a single op. Runtime: about 30 seconds on
2 cores.
"""

import concurrent.futures
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf  # noqa: E402
from absl import flags  # noqa: E402

from distributed_dp.accounting import DDGaussParameters  # noqa: E402
from distributed_dp.discrete_gaussian import (  # noqa: E402
    build_discrete_gaussian_sampler,
)
from distributed_dp.encoding import Codec  # noqa: E402
from distributed_dp.noise import DiscreteGaussianShares  # noqa: E402
from distributed_dp.rotation import RotationKind, build_rotation  # noqa: E402
from distributed_dp.skellam import build_skellam_sampler  # noqa: E402
from simulation import process  # noqa: E402

FLAGS = flags.FLAGS
GRAPH_STEPS = 10
Timed = Callable[[], object]


def define_flags() -> None:
    """Defines the program's flags."""
    flags.DEFINE_integer("dim", 1 << 20, "length for rotation and sampler", 2)
    flags.DEFINE_integer("update_dim", 1_018_174, "length of the encoded update", 2)
    flags.DEFINE_integer("repeats", 21, "interleaved repetitions", 1)
    flags.DEFINE_string("output", None, "JSON file for the figures")


def rotate_by_butterflies(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Random signs, then Walsh-Hadamard by log2(d) steps with the 2 x 2 matrix."""
    dim = x.shape[0]
    butterfly = tf.constant([[1.0, 1.0], [1.0, -1.0]])
    uniform = tf.random.stateless_uniform([dim], seed)
    signs = tf.sign(uniform - 0.5)

    def step(index: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = tf.matmul(tf.reshape(x, [-1, 2]), butterfly)
        x = tf.transpose(tf.reshape(x, [1, dim // 2, 2]), [0, 2, 1])
        return index + 1, tf.ensure_shape(x, [1, 2, dim // 2])

    x = tf.reshape(x * signs, [1, 2, dim // 2])
    num_steps = int(math.log2(dim))
    _, x = tf.while_loop(lambda index, _: index < num_steps, step, (tf.constant(0), x))
    return tf.reshape(x, [dim]) / math.sqrt(dim)


def sample_by_laplace_rejection(scale: int, num: int, seed: tf.Tensor) -> tf.Tensor:
    """Discrete Gaussian of integer scale by rejection from a discrete Laplace."""
    rate = tf.constant(1.0 / scale, tf.float64)
    total = tf.constant(0)
    kept = tf.zeros([0], tf.int64)
    tries = tf.constant(0)

    def draw_geometric(stream: int, count: tf.Tensor, tries: tf.Tensor) -> tf.Tensor:
        uniform = tf.random.stateless_uniform(
            [count], seed + tf.stack([stream, tries]), dtype=tf.float64
        )
        return tf.cast(tf.floor(-tf.math.log1p(-uniform) / rate), tf.int64)

    def draw(total: tf.Tensor, kept: tf.Tensor, tries: tf.Tensor) -> tuple:
        count = tf.maximum(
            1000, tf.cast(1.5 * tf.cast(num - total, tf.float32), tf.int32)
        )
        proposed = draw_geometric(1, count, tries) - draw_geometric(2, count, tries)
        distance = tf.cast(tf.square(tf.abs(proposed) - scale), tf.float64)
        accept = tf.exp(-distance / (2.0 * scale**2))
        uniform = tf.random.stateless_uniform(
            [count], seed + tf.stack([3, tries]), dtype=tf.float64
        )
        accepted = tf.boolean_mask(proposed, uniform < accept)
        kept = tf.concat([kept, accepted], axis=0)
        return tf.size(kept), kept, tries + 1

    _, kept, _ = tf.while_loop(
        lambda total, kept, tries: total < num,
        draw,
        (total, kept, tries),
        shape_invariants=(total.shape, tf.TensorShape([None]), tries.shape),
    )
    return kept[:num]


def build_codec(dim: int) -> Codec:
    """The EMNIST setting of Kairouz, Liu, Steinke 2021 at epsilon 3 and 16 bits."""
    rotation = build_rotation(RotationKind.HADAMARD, dim)
    parameters = DDGaussParameters(
        l2_clip=0.03,
        granularity=6.8139e-6,
        local_stddev=0.00557422,
        beta=math.exp(-0.5),
        bits=16,
        padded_dim=rotation.padded_dim,
        clients_per_round=100,
    )
    noise = DiscreteGaussianShares(parameters.central_scale, low=60, high=180)
    return Codec(parameters=parameters, rotation=rotation, noise=noise)


def build_candidates(dim: int, update_dim: int) -> dict[str, Timed]:
    """Returns what is timed, by name; each call runs a compiled function once."""
    seed = tf.constant([3, 4])
    x = tf.random.stateless_normal([dim], seed)
    update = tf.random.stateless_normal([update_dim], seed) * (0.03 / update_dim**0.5)
    rotation = build_rotation(RotationKind.HADAMARD, dim)
    scale = 818
    gaussian = build_discrete_gaussian_sampler([scale**2])
    skellam = build_skellam_sampler([scale**2])
    codec = build_codec(update_dim)
    joined = tf.constant(100, tf.int64)

    def encode(update: tf.Tensor, rotation_seed: tf.Tensor, noise_seed: tf.Tensor):
        return codec.encode(
            update,
            l2_clip=codec.parameters.l2_clip,
            joined=joined,
            rotation_seed=rotation_seed,
            noise_seed=noise_seed,
        ).residues

    def compile_ops(function: Callable, *args: tf.Tensor) -> Timed:
        compiled = tf.function(function, autograph=False)
        return lambda: compiled(*args)

    def compile_xla(function: Callable, *args: tf.Tensor) -> Timed:
        compiled = tf.function(function, autograph=False, jit_compile=True)
        return lambda: compiled(*args)

    def compile_steps(rotate: Callable) -> Timed:
        def apply_steps(v: tf.Tensor) -> tf.Tensor:
            for step in range(GRAPH_STEPS):
                v = rotate(v, seed + step)
            return v

        return compile_ops(apply_steps, x)

    def sample(sampler) -> Callable:
        return lambda stream: sampler.sample([dim], stream)

    return {
        "copy x + 1": compile_ops(lambda v: v + 1.0, update),
        "rotation, 2 x 2 steps": compile_ops(rotate_by_butterflies, x, seed),
        "rotation, ours": compile_ops(rotation.rotate, x, seed),
        "rotation, ours, XLA": compile_xla(rotation.rotate, x, seed),
        "rotation, 2 x 2 steps, in a graph": compile_steps(rotate_by_butterflies),
        "rotation, ours, in a graph": compile_steps(rotation.rotate),
        "sampler, Laplace rejection": compile_ops(
            lambda stream: sample_by_laplace_rejection(scale, dim, stream), seed
        ),
        "sampler, discrete Gaussian": compile_ops(sample(gaussian), seed),
        "sampler, discrete Gaussian, XLA": compile_xla(sample(gaussian), seed),
        "sampler, Skellam": compile_ops(sample(skellam), seed),
        "sampler, Skellam, XLA": compile_xla(sample(skellam), seed),
        "encode": compile_ops(encode, update, seed, seed + 1),
        "encode, XLA": compile_xla(encode, update, seed, seed + 1),
    }


def time_interleaved(candidates: dict[str, Timed], repeats: int) -> dict[str, float]:
    """Returns the median seconds of each candidate after one warm-up call."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for repeat in range(repeats + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {
        name: statistics.median(values)
        / (GRAPH_STEPS if name.endswith("in a graph") else 1)
        for name, values in times.items()
    }


def time_alone(run: Timed, repeats: int) -> float:
    """Returns the median seconds of calls in a row: data and memory stay in caches."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_throughput(run: Timed, *, num_calls: int, num_threads: int) -> float:
    """Returns seconds for `num_calls` calls spread over threads."""
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        start = time.perf_counter()
        list(pool.map(lambda _: run(), range(num_calls)))
        return time.perf_counter() - start


def build_report(
    medians: dict[str, float], candidates: dict[str, Timed], repeats: int
) -> dict[str, float]:
    """Returns the ratios that are claimed, by name."""

    def ratio(slow: str, fast: str) -> float:
        return medians[slow] / medians[fast]

    best_encode = min(("encode", "encode, XLA"), key=lambda name: medians[name])
    throughput = statistics.median(
        time_throughput(candidates[best_encode], num_calls=20, num_threads=2)
        for _ in range(max(1, repeats // 5))
    )
    copy = medians["copy x + 1"]
    hot_copy = time_alone(candidates["copy x + 1"], repeats)
    return {
        "rotation speed-up, one call": ratio("rotation, 2 x 2 steps", "rotation, ours"),
        "rotation speed-up, in a graph": ratio(
            "rotation, 2 x 2 steps, in a graph", "rotation, ours, in a graph"
        ),
        "discrete Gaussian speed-up": ratio(
            "sampler, Laplace rejection", "sampler, discrete Gaussian"
        ),
        "discrete Gaussian speed-up, XLA": ratio(
            "sampler, Laplace rejection", "sampler, discrete Gaussian, XLA"
        ),
        "encode over copy": medians["encode"] / copy,
        "encode over copy, XLA": medians["encode, XLA"] / copy,
        "encode over copy alone in a loop": medians[best_encode] / hot_copy,
        "encode latency, ms": 1e3 * medians[best_encode],
        "20 encodes on 2 threads, ms": 1e3 * throughput,
        "20 encodes on 2 threads over 20 copies": throughput / (20 * copy),
    }


def main() -> None:
    """Times, prints, and writes the figures."""
    candidates = build_candidates(FLAGS.dim, FLAGS.update_dim)
    medians = time_interleaved(candidates, FLAGS.repeats)
    report = build_report(medians, candidates, FLAGS.repeats)
    print(f"median of {FLAGS.repeats}, d = {FLAGS.dim}, update {FLAGS.update_dim}")
    for name, seconds in medians.items():
        print(f"  {name:34s} {1e3 * seconds:9.2f} ms")
    for name, value in report.items():
        print(f"  {name:40s} {value:9.2f}")
    if FLAGS.output:
        figures = {"median_seconds": medians, "report": report}
        pathlib.Path(FLAGS.output).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name="ops")
