"""The linear method as NumPy loops over users, in float64."""

import numpy as np

from centaur import linear


def fix_signs(matrix: np.ndarray) -> np.ndarray:
    """Returns Gram-Schmidt's Q, whose R has a positive diagonal by construction."""
    columns: list[np.ndarray] = []
    for column in matrix.T.astype(np.float64):
        # Twice, for rounding.
        for _ in range(2):
            for other in columns:
                column = column - other * (other @ column)
        columns.append(column / np.linalg.norm(column))
    return np.stack(columns, axis=1)


def clip(value: np.ndarray, limit: float) -> np.ndarray:
    norm = np.sqrt(np.sum(value**2))
    return value * min(1.0, limit / norm)


def compute_gradient(
    b: np.ndarray, w: np.ndarray, x: np.ndarray, y: np.ndarray
) -> np.ndarray:
    total = np.zeros_like(b)
    for inputs, output in zip(x, y, strict=True):
        residual = w @ (b.T @ inputs) - output
        total += residual * np.outer(inputs, w)
    return total / len(x)


def take_round(b, subsets, limit, rate) -> np.ndarray:
    """Returns B after a round; subsets has (x1, y1, x2, y2) of each user."""
    total = np.zeros_like(b)
    for x1, y1, x2, y2 in subsets:
        design = x1 @ b
        head = np.linalg.solve(design.T @ design, design.T @ y1)
        total += clip(compute_gradient(b, head, x2, y2), limit)
    return fix_signs(b - rate * total / len(subsets))


def build_moments(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns M_i of each user, [n, d, d]."""
    found = []
    for inputs, outputs in zip(x, y, strict=True):
        found.append(
            sum(v**2 * np.outer(u, u) for u, v in zip(inputs, outputs, strict=True))
            / len(inputs)
        )
    return np.stack(found)


def make_users(
    rng: np.random.Generator,
    *,
    num_users: int = 12,
    dim: int = 6,
    rank: int = 2,
    examples: int = 30,
    start: int = 8,
    head: int = 6,
    gradient: int = 5,
    users_per_block: int = 3,
):
    """Returns stored users, their client values, B*, x and y."""
    truth = linear.sample_orthonormal(rng, dim, rank)
    x = rng.standard_normal((num_users, examples, dim)).astype(np.float32)
    heads = rng.standard_normal((num_users, rank))
    y = np.einsum("nmd,dk,nk->nm", x, truth, heads).astype(np.float32)
    users = linear.StoredUsers(
        problem=linear.LinearProblem(num_users=num_users, dim=dim, rank=rank),
        subsets=linear.Subsets(start=start, head=head, gradient=gradient),
        examples_per_user=examples,
        users_per_block=users_per_block,
    )
    seeds = linear.build_block_seeds(rng, num_users // users_per_block)
    return users, users.build_blocks(x, y, seeds), truth, x, y


def read_subsets(users, blocks, number: int) -> list[tuple[np.ndarray, ...]]:
    """Returns (x1, y1, x2, y2) of every user, as the round reads them."""
    found = []
    for block in blocks:
        first, second = users.read_round(block, np.int64(number))
        parts = [np.asarray(part, np.float64) for part in (*first, *second)]
        found.extend(zip(*parts, strict=True))
    return found
