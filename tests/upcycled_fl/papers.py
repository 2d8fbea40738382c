"""FedNova, SCAFFOLD, FedDyn and pFedMe in NumPy, as the papers' algorithms have them.

Weights are one float64 vector: those of softmax regression, kernel first. A client is
its examples and a list of batches, each an array of indices.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Vector = np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Client:
    """A client's data in a round."""

    x: np.ndarray
    y: np.ndarray
    batches: Sequence[np.ndarray]
    num_classes: int

    def compute_gradient(self, vector: Vector, rows: np.ndarray) -> Vector:
        """The gradient of the mean cross entropy over the rows."""
        x, y = self.x[rows], self.y[rows]
        split = x.shape[1] * self.num_classes
        kernel, bias = vector[:split].reshape([x.shape[1], -1]), vector[split:]
        logits = x @ kernel + bias
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        error = odds / odds.sum(axis=1, keepdims=True)
        error[np.arange(len(rows)), y] -= 1
        error /= len(rows)
        return np.concatenate([(x.T @ error).ravel(), error.sum(axis=0)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Local SGD with momentum, which all but pFedMe share."""

    lr: float
    momentum: float = 0.0
    mu: float = 0.0
    server_lr: float = 1.0

    def start(self, x: Vector) -> tuple[Any, Any]:
        """The server's and a client's state before the first round."""
        return np.zeros_like(x), np.zeros_like(x)

    def descend(
        self, client: Client, x: Vector, term: Callable[[Vector], Any]
    ) -> tuple[Vector, np.ndarray]:
        """Where SGD from x gets, with `term` added to the gradients of the loss that
        it meets, and these."""
        w, speed, met = x.copy(), np.zeros_like(x), []
        for rows in client.batches:
            met.append(client.compute_gradient(w, rows))
            speed = self.momentum * speed + met[-1] + term(w)
            w = w - self.lr * speed
        return w, np.array(met).reshape([-1, len(x)])

    def unroll(self, steps: int) -> Vector:
        """a, with (start - end) = lr sum_j a_j g_j: what each gradient alone, of size
        1 and followed by zeros, moves in the end."""
        found = np.zeros(steps)
        for j in range(steps):
            moved = speed = 0.0
            for k in range(steps):
                speed = self.momentum * speed + float(k == j) + self.mu * moved
                moved -= self.lr * speed
            found[j] = -moved / self.lr
        return found


class FedNova(Rule):
    """Wang et al. 2020, equations 6-8, and section 4 for momentum and a proximal term:
    x+ = x - tau_eff sum_i p_i lr d_i, d_i = G_i a_i / ||a_i||_1,
    tau_eff = sum_i p_i ||a_i||_1."""

    def work(self, client, x, shared, state):
        y, met = self.descend(client, x, lambda w: self.mu * (w - x))
        a = self.unroll(len(met))
        np.testing.assert_allclose(x - y, self.lr * a @ met, rtol=1e-9, atol=1e-12)
        norm = np.sum(np.abs(a))
        # In units of the learning rate, as it is sent.
        d = a @ met / norm if len(met) else np.zeros_like(x)
        return (d, np.array([self.lr * norm])), state

    def serve(self, x, shared, mean):
        d, norm = mean
        return x - self.server_lr * norm * d, shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaffold(Rule):
    """Karimireddy et al. 2020, algorithm 1 with option II."""

    share: float

    def work(self, client, x, shared, state):
        y, met = self.descend(client, x, lambda w: shared - state + self.mu * (w - x))
        if not len(met):
            new = state
        elif self.momentum or self.mu:
            # The mean of the gradients, weighted as they are in y.
            a = self.unroll(len(met))
            new = a @ met / np.sum(a)
        else:
            new = state - shared + (x - y) / (len(met) * self.lr)
        return (x - y, new - state), new

    def serve(self, x, shared, mean):
        return x - self.server_lr * mean[0], shared + self.share * mean[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedDyn(Rule):
    """Acar et al. 2021, algorithm 1; mu is its alpha."""

    share: float

    def work(self, client, x, shared, state):
        y, _ = self.descend(client, x, lambda w: -state + self.mu * (w - x))
        return (x - y,), state - self.mu * (y - x)

    def serve(self, x, shared, mean):
        mean_of_models = x - mean[0]
        h = shared - self.mu * self.share * (mean_of_models - x)
        return mean_of_models - h / self.mu, h


@dataclasses.dataclass(frozen=True, kw_only=True)
class PFedMe(Rule):
    """T. Dinh et al. 2020, algorithm 1; the server's rate is beta."""

    penalty: float
    personal_steps: int
    local_lr: float

    def start(self, x):
        return np.zeros_like(x), x

    def work(self, client, x, shared, state):
        w, theta, speed = x, x, np.zeros_like(x)
        for rows in client.batches:
            for _ in range(self.personal_steps):
                gradient = client.compute_gradient(theta, rows)
                gradient = gradient + self.penalty * (theta - w)
                speed = self.momentum * speed + gradient
                theta = theta - self.lr * speed
            w = w - self.local_lr * self.penalty * (w - theta)
        return (x - w,), theta

    def serve(self, x, shared, mean):
        mean_of_models = x - mean[0]
        return (1 - self.server_lr) * x + self.server_lr * mean_of_models, shared


def run_rounds(
    rule: Any,
    x: Vector,
    rounds: Sequence[dict[int, Client]],
    *,
    by_examples: bool,
    send: Callable[[Vector], Vector] = lambda message: message,
) -> list[tuple[Vector, Any, dict[int, Any]]]:
    """The weights, the server's state and the clients' states after each round.

    Args:
        rule: The algorithm.
        x: The weights before the first round.
        rounds: The clients of each round.
        by_examples: Whether p_i are the parts of the examples, or equal.
        send: What the server gets of a client's whole message, one vector.
    """
    shared, start = rule.start(x)
    states: dict[int, Any] = {}
    found = []
    for clients in rounds:
        sizes = [len(c.y) if by_examples else 1 for c in clients.values()]
        total: Any = 0.0
        new = dict(states)
        for size, (index, client) in zip(sizes, clients.items(), strict=True):
            message, new[index] = rule.work(client, x, shared, states.get(index, start))
            total += size / sum(sizes) * send(np.concatenate(message))
        ends = np.cumsum([len(part) for part in message])[:-1]
        x, shared = rule.serve(x, shared, np.split(total, ends))
        states = new
        found.append((x, shared, states))
    return found
