"""Users of the linear problem, and which of their examples each phase may see.

A client value of TFF stands for a block of users: what it computes is computed for each
user on its own, and each user's contribution is clipped before the block's are added.
One user a block is the federated setting itself; larger ones make simulations fast.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import tensorflow_federated as tff

from centaur.linear import geometry
from distributed_dp.accounting import validation
from distributed_dp.random_bits import fold_in

Block = Mapping[str, Any]


class Examples(NamedTuple):
    """Examples of a block's users, float32: x [users, count, d], y [users, count]."""

    x: tf.Tensor
    y: tf.Tensor


class _Stream(enum.Enum):
    """What a block's streams of randomness are for. The values never change."""

    HEAD = 0
    START = 1
    ROUND = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearProblem:
    """Who takes part, and the shape of what is learned.

    Attributes:
        num_users: n, all of whom take part in every release.
        dim: d, the length of an input.
        rank: k, the number of columns of B.
    """

    num_users: int
    dim: int
    rank: int

    def __post_init__(self) -> None:
        validation.check_integer("num_users", self.num_users, low=1)
        validation.check_integer("dim", self.dim, low=1)
        validation.check_integer("rank", self.rank, low=1)
        if self.rank > self.dim:
            raise ValueError(
                f"`rank` must be at most `dim` ({self.dim}). Found {self.rank!r}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subsets:
    """How many of a user's m examples each phase takes; no two phases share one.

    Source: CENTAUR, section 5, modification 3: S_i^{t,1} and S_i^{t,2}, sampled without
    replacement.

    Attributes:
        start: Of the start, in M_i.
        head: m_1, of one round's least squares.
        gradient: m_2, of one round's gradient.
    """

    start: int
    head: int
    gradient: int

    def __post_init__(self) -> None:
        for name in ("start", "head", "gradient"):
            validation.check_integer(f"{name}_examples", getattr(self, name), low=1)

    def check(self, problem: LinearProblem, num_examples: int, num_rounds: int) -> None:
        """Raises ValueError unless the subsets exist and heads are determined.

        Args:
            problem: The problem.
            num_examples: m, the examples of a user.
            num_rounds: How many rounds must have subsets that no other one has.
        """
        if self.head < problem.rank:
            raise ValueError(
                "`head_examples` must be at least `rank` "
                f"({problem.rank}), or the head is not determined. Found {self.head!r}."
            )
        needed = self.start + num_rounds * (self.head + self.gradient)
        if num_examples < needed:
            raise ValueError(
                f"`examples_per_user` must be at least {needed} for disjoint subsets: "
                f"{self.start} for the start and {self.head} + {self.gradient} in each "
                f"of {num_rounds} rounds; take more, or lower `start_examples`, "
                f"`head_examples`, `gradient_examples` or the rounds. Found "
                f"{num_examples!r}."
            )


class Users(Protocol):
    """Blocks of users as client values, and the examples of each phase."""

    @property
    def problem(self) -> LinearProblem:
        """The problem."""

    @property
    def block_type(self) -> tff.Type:
        """The type of a client value."""

    def read_start(self, block: Block) -> Examples:
        """Returns the examples of the start, in a client's computation."""

    def read_round(self, block: Block, number: tf.Tensor) -> tuple[Examples, Examples]:
        """Returns the disjoint subsets of a round: for the heads, and the gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedUsers:
    """Users whose examples are drawn in the client's computation, from a seed.

    Source: CENTAUR, section 5: y = (w*)^T (B*)^T x without noise, x ~ N(0, I). Here w*
    is uniform on the sphere of radius sqrt(k), so that its second moment is I.

    A user's m examples are a stream that is cut up: each phase of each round has its
    own part, which is drawn when it is needed, and none is used twice.

    Not guaranteed: the draws of x are TensorFlow's, which end at 5.7 standard
    deviations; they are data, not noise.

    Attributes:
        problem: The problem.
        subsets: The sizes of the parts.
        examples_per_user: m.
        num_rounds: T, how many rounds have a part.
        users_per_block: A divisor of the number of users.
    """

    problem: LinearProblem
    subsets: Subsets
    examples_per_user: int
    num_rounds: int
    users_per_block: int

    def __post_init__(self) -> None:
        validation.check_integer("num_rounds", self.num_rounds, low=1)
        self.subsets.check(self.problem, self.examples_per_user, self.num_rounds)
        _check_block_size(self.problem, self.users_per_block)

    @property
    def block_type(self) -> tff.Type:
        """B* and a seed."""
        shape = [self.problem.dim, self.problem.rank]
        return tff.to_type(
            collections.OrderedDict(
                truth=tff.TensorType(np.float32, shape),
                seed=tff.TensorType(np.int32, [2]),
            )
        )

    def build_blocks(
        self, truth: npt.ArrayLike, seeds: npt.ArrayLike
    ) -> list[dict[str, Any]]:
        """Returns the client values.

        Args:
            truth: B*, [d, k] with orthonormal columns.
            seeds: int32[blocks, 2], of each block.
        """
        matrix = geometry.check_orthonormal("truth", truth)
        expected = (self.problem.dim, self.problem.rank)
        if matrix.shape != expected:
            raise ValueError(
                f"`truth` must have the shape {expected}. Found {matrix.shape}."
            )
        pairs = np.asarray(seeds, np.int32)
        count = self.problem.num_users // self.users_per_block
        if pairs.shape != (count, 2):
            raise ValueError(
                f"`seeds` must have the shape {(count, 2)}. Found {pairs.shape}."
            )
        shared = matrix.astype(np.float32)
        return [{"truth": shared, "seed": pair} for pair in pairs]

    def read_start(self, block: Block) -> Examples:
        """Draws the examples of the start."""
        seed = fold_in(block["seed"], _as_int64(_Stream.START.value))
        return self._draw(block, seed, self.subsets.start)

    def read_round(self, block: Block, number: tf.Tensor) -> tuple[Examples, Examples]:
        """Draws the two subsets of a round."""
        seed = fold_in(block["seed"], _as_int64(_Stream.ROUND.value))
        seed = fold_in(seed, tf.cast(number, tf.int64))
        drawn = self._draw(block, seed, self.subsets.head + self.subsets.gradient)
        return _split(drawn, self.subsets)

    def draw_heads(self, block: Block) -> tf.Tensor:
        """Draws w* of the block's users, [users, k] float32."""
        seed = fold_in(block["seed"], _as_int64(_Stream.HEAD.value))
        shape = [self.users_per_block, self.problem.rank]
        heads = tf.random.stateless_normal(shape, seed, alg="philox")
        return tf.sqrt(float(self.problem.rank)) * tf.math.l2_normalize(heads, axis=1)

    def _draw(self, block: Block, seed: tf.Tensor, count: int) -> Examples:
        shape = [self.users_per_block, count, self.problem.dim]
        x = tf.random.stateless_normal(shape, seed, alg="philox")
        features = tf.tensordot(x, block["truth"], 1)
        y = tf.reduce_sum(features * self.draw_heads(block)[:, tf.newaxis, :], axis=2)
        return Examples(x, y)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredUsers:
    """Users who hold their examples: the first of them for the start, others to rounds.

    Every round takes two disjoint subsets, without replacement, of the examples that
    the start leaves; rounds share examples, as in the paper. Fresh ones would not lower
    the cost in user-level privacy.

    Attributes:
        problem: The problem.
        subsets: The sizes of the subsets.
        examples_per_user: m.
        users_per_block: A divisor of the number of users.
    """

    problem: LinearProblem
    subsets: Subsets
    examples_per_user: int
    users_per_block: int

    def __post_init__(self) -> None:
        self.subsets.check(self.problem, self.examples_per_user, 1)
        _check_block_size(self.problem, self.users_per_block)

    @property
    def block_type(self) -> tff.Type:
        """Inputs, outputs and the seed of the choice of subsets."""
        shape = [self.users_per_block, self.examples_per_user]
        return tff.to_type(
            collections.OrderedDict(
                x=tff.TensorType(np.float32, [*shape, self.problem.dim]),
                y=tff.TensorType(np.float32, shape),
                seed=tff.TensorType(np.int32, [2]),
            )
        )

    def build_blocks(
        self, x: npt.ArrayLike, y: npt.ArrayLike, seeds: npt.ArrayLike
    ) -> list[dict[str, Any]]:
        """Returns the client values.

        Args:
            x: [n, m, d].
            y: [n, m].
            seeds: int32[blocks, 2], of each block's choice of subsets.
        """
        inputs, outputs = np.asarray(x, np.float32), np.asarray(y, np.float32)
        shape = (self.problem.num_users, self.examples_per_user)
        for name, array, expected in (
            ("x", inputs, (*shape, self.problem.dim)),
            ("y", outputs, shape),
        ):
            if array.shape != expected:
                raise ValueError(
                    f"`{name}` must have the shape {expected}. Found {array.shape}."
                )
        pairs = np.asarray(seeds, np.int32)
        size = self.users_per_block
        count = self.problem.num_users // size
        if pairs.shape != (count, 2):
            raise ValueError(
                f"`seeds` must have the shape {(count, 2)}. Found {pairs.shape}."
            )
        return [
            {
                "x": inputs[index * size : (index + 1) * size],
                "y": outputs[index * size : (index + 1) * size],
                "seed": pairs[index],
            }
            for index in range(count)
        ]

    def read_start(self, block: Block) -> Examples:
        """Returns the first examples."""
        count = self.subsets.start
        return Examples(block["x"][:, :count], block["y"][:, :count])

    def read_round(self, block: Block, number: tf.Tensor) -> tuple[Examples, Examples]:
        """Returns two disjoint subsets of the others, drawn anew every round."""
        left = self.examples_per_user - self.subsets.start
        keys = tf.random.stateless_uniform(
            [self.users_per_block, left],
            fold_in(block["seed"], tf.cast(number, tf.int64)),
            alg="philox",
        )
        count = self.subsets.head + self.subsets.gradient
        chosen = self.subsets.start + tf.argsort(keys, axis=1)[:, :count]
        drawn = Examples(
            tf.gather(block["x"], chosen, batch_dims=1),
            tf.gather(block["y"], chosen, batch_dims=1),
        )
        return _split(drawn, self.subsets)


def build_block_seeds(
    rng: np.random.Generator, num_blocks: int
) -> npt.NDArray[np.int32]:
    """Draws int32[blocks, 2] seeds."""
    bound = 2**31
    return rng.integers(-bound, bound, size=(num_blocks, 2)).astype(np.int32)


def _split(drawn: Examples, subsets: Subsets) -> tuple[Examples, Examples]:
    count = subsets.head
    return (
        Examples(drawn.x[:, :count], drawn.y[:, :count]),
        Examples(drawn.x[:, count:], drawn.y[:, count:]),
    )


def _as_int64(number: int) -> tf.Tensor:
    return tf.constant(number, tf.int64)


def _check_block_size(problem: LinearProblem, users_per_block: int) -> None:
    validation.check_integer("users_per_block", users_per_block, low=1)
    if problem.num_users % users_per_block:
        raise ValueError(
            f"`users_per_block` must divide `num_users` ({problem.num_users}). Found "
            f"{users_per_block!r}."
        )
