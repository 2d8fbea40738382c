"""The exact minimiser of a client's problem, for guarantees that need it.

Source: Yin et al. 2024 (Upcycled-FL), theorem C.2, whose proof maps the noise to the
minimiser one to one. For one-output logistic regression (`simulation.linear_models`)
Newton's method finds it, up to a gradient of known norm.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping

import tensorflow as tf

from simulation.linear_models import (
    compute_logistic_loss,
    compute_one_output_accuracy,
    scale_features,
)
from simulation.model import Weights

Sums = Mapping[str, tf.Tensor]
# (weights, examples, batches, seed, shift=None) -> (trained weights, sums).
Solve = Callable[..., tuple[Weights, Sums]]

DEFAULT_TOLERANCE = 1e-4
"""Float32 weights of norm 1e3 round by up to 6e-5; with mu <= 1 the gradient's norm
changes by at most (1/4 + 1) times that."""

MIN_TOLERANCE = 1e-8
"""Where the returned weights can still be checked."""

# More than the check's float64 arithmetic errs, with less than 1e6 examples and weights
# of norm less than 1e4 in 100 dimensions.
_ARITHMETIC_ERROR = 1e-9

_MAX_STEPS = 100
# Newton's steps end below this part of the tolerance; the rest is for rounding.
_SOLVED = 1e-3
# Lengths that are tried for a long Newton step, beside the one that is always safe.
_LENGTHS = (1.0, 0.5, 0.25, 0.125)


def build_exact_solver(*, mu: float, tolerance: float = DEFAULT_TOLERANCE) -> Solve:
    """Returns the solver of one-output logistic regression.

    It minimises f(w) = mean loss + mu / 2 ||w - w_0||^2 + <shift, w>, where w_0 are the
    weights that it is given and the mean is over the client's examples.

    The loss is generalised self-concordant: |l'''| <= l'' and ||z|| <= 1, so that a
    step of t times Newton's p changes f by at most -t d^2 + d^2 (e^(r t) - r t - 1) /
    r^2, with r = ||p|| and d^2 = p^T H p (Sun and Tran-Dinh 2019, nu = 2). t = 1 lowers
    f by d^2 / 4 at least where r <= 1, and t = log(1 + r) / r lowers it always; another
    length is taken where it lowers f more.

    Guarantees: the gradient of f at the weights returned, which are float32, has a norm
    of at most `tolerance`, for every dataset and shift; f is that of the features as
    `scale_features` returns them. Where that does not hold, as when weights are too
    large for float32 to be so close, the op raises.
    Not guaranteed: that an error tells nothing of the data.

    Args:
        mu: Weight of the proximal term, positive.
        tolerance: The `gradient_tolerance` of `accounting.ExactMinimiser` and
            `accounting.ResidualNoise`.

    Returns:
        solve(weights, examples, batches, seed, shift=None), to be used in place of
        `client_training.build_training`'s: of `batches` only the largest entry is used,
        the number of examples, and `seed` is not. The sums are those of the weights
        given, before training. No examples, or a result beyond the tolerance, is an
        InvalidArgumentError.

    Raises:
        ValueError: If `mu` is not positive, or `tolerance` below MIN_TOLERANCE.
    """
    if not 0 < mu < math.inf:
        raise ValueError(f"`mu` must be positive and finite. Found {mu!r}.")
    if not MIN_TOLERANCE <= tolerance < math.inf:
        raise ValueError(
            f"`tolerance` must be finite and >= {MIN_TOLERANCE!r}, which float64 "
            f"arithmetic can check. Found {tolerance!r}."
        )

    def solve(
        weights: Weights,
        examples: Mapping[str, tf.Tensor],
        batches: tf.Tensor,
        seed: tf.Tensor,
        shift: Weights | None = None,
    ) -> tuple[Weights, Sums]:
        del seed
        (initial,) = weights
        (linear,) = (tf.zeros_like(initial),) if shift is None else shift
        count = tf.reduce_max(batches)
        positive = tf.debugging.assert_positive(
            count, message="a client must have examples"
        )
        with tf.control_dependencies([positive]):
            count = tf.identity(count)
        features = scale_features(examples["x"][:count])
        labels = examples["y"][:count]
        signs = tf.where(tf.equal(labels, 1), 1.0, -1.0)
        problem = _Problem(
            signed=tf.cast(features * signs[:, tf.newaxis], tf.float64),
            initial=tf.cast(initial, tf.float64),
            shift=tf.cast(linear, tf.float64),
            mu=mu,
        )
        solved = _minimise(problem, target=_SOLVED * tolerance)
        trained = _round_and_check(problem, solved, tolerance)
        return (trained,), _compute_sums(features, labels, initial)

    return solve


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Problem:
    """f with its derivatives, in float64.

    Attributes:
        signed: (2 y - 1) z of each example, [examples, dim]: all that the loss needs.
        initial: w_0, [dim].
        shift: [dim].
        mu: Weight of the proximal term.
    """

    signed: tf.Tensor
    initial: tf.Tensor
    shift: tf.Tensor
    mu: float

    @property
    def count(self) -> tf.Tensor:
        """The number of examples."""
        return tf.cast(tf.shape(self.signed)[0], tf.float64)

    def compute_values(self, points: tf.Tensor) -> tf.Tensor:
        """Returns f at points [k, dim], less <shift, initial>: [k]."""
        margins = tf.matmul(points, self.signed, transpose_b=True)
        losses = tf.reduce_sum(tf.nn.softplus(-margins), axis=1) / self.count
        moved = points - self.initial
        squares = tf.reduce_sum(tf.square(moved), axis=1)
        return losses + self.mu / 2 * squares + tf.linalg.matvec(moved, self.shift)

    def compute_gradient(self, point: tf.Tensor) -> tf.Tensor:
        """Returns the gradient at a point, [dim]."""
        margins = tf.linalg.matvec(self.signed, point)
        pulls = tf.linalg.matvec(self.signed, tf.sigmoid(-margins), transpose_a=True)
        return -pulls / self.count + self.mu * (point - self.initial) + self.shift

    def compute_hessian(self, point: tf.Tensor) -> tf.Tensor:
        """Returns the Hessian at a point, [dim, dim]."""
        margins = tf.linalg.matvec(self.signed, point)
        curvatures = tf.sigmoid(margins) * tf.sigmoid(-margins)
        scaled = self.signed * curvatures[:, tf.newaxis]
        hessian = tf.matmul(scaled, self.signed, transpose_a=True) / self.count
        return tf.linalg.set_diag(hessian, tf.linalg.diag_part(hessian) + self.mu)


def _minimise(problem: _Problem, target: float) -> tf.Tensor:
    """Returns where the gradient's norm is at most `target`, or where steps ran out."""

    def is_rough(number: tf.Tensor, point: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        del point
        return tf.logical_and(number < _MAX_STEPS, tf.norm(gradient) > target)

    def step(
        number: tf.Tensor, point: tf.Tensor, gradient: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        hessian = problem.compute_hessian(point)
        newton = -tf.linalg.solve(hessian, gradient[:, tf.newaxis])[:, 0]
        length = tf.norm(newton)
        safe = tf.math.log1p(length) / tf.maximum(length, 1.0)
        lengths = tf.stack([*(tf.constant(t, tf.float64) for t in _LENGTHS), safe])
        values = problem.compute_values(point + lengths[:, tf.newaxis] * newton)
        best = tf.gather(lengths, tf.argmin(values))
        # Values near the minimum differ by less than rounding.
        point += tf.where(length <= 1.0, tf.ones_like(best), best) * newton
        return number + 1, point, problem.compute_gradient(point)

    start = problem.initial
    _, point, _ = tf.while_loop(
        is_rough, step, (tf.constant(0), start, problem.compute_gradient(start))
    )
    return point


def _round_and_check(
    problem: _Problem, solved: tf.Tensor, tolerance: float
) -> tf.Tensor:
    """Returns the point in float32; raises where its gradient is too large."""
    trained = tf.cast(solved, tf.float32)
    norm = tf.norm(problem.compute_gradient(tf.cast(trained, tf.float64)))
    # Not so for NaN either.
    is_exact = tf.debugging.assert_less_equal(
        norm + _ARITHMETIC_ERROR,
        tf.constant(tolerance, tf.float64),
        message="the gradient's norm must be within `tolerance`, which is too small "
        "for float32 weights of this norm: raise it",
    )
    with tf.control_dependencies([is_exact]):
        return tf.identity(trained)


def _compute_sums(features: tf.Tensor, labels: tf.Tensor, vector: tf.Tensor) -> Sums:
    """Returns the sums of `client_training`, at one point."""
    outputs = tf.linalg.matvec(features, vector)
    return collections.OrderedDict(
        num_examples=tf.cast(tf.shape(labels)[0], tf.float32),
        loss=tf.reduce_sum(compute_logistic_loss(labels, outputs)),
        accuracy=tf.reduce_sum(compute_one_output_accuracy(labels, outputs)),
    )
