"""CENTAUR and what it is compared with in NumPy, as the papers describe them.

A model is dense layers with ReLU between them and a softmax at the end: a list of
float64 arrays, kernel and bias of one layer after the other. Its first arrays are the
representation b, its last the head w. A client is its examples and, in every round,
epochs of batches, each an array of indices.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

Arrays = list[np.ndarray]
Epochs = Sequence[Sequence[np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Client:
    """A client's data in a round."""

    x: np.ndarray
    y: np.ndarray
    epochs: Epochs


def propagate(weights: Arrays, x: np.ndarray, *, ends: bool) -> list[np.ndarray]:
    """The inputs of every layer, and the outputs of the last. Where the model does not
    end with these layers, the last has a ReLU too."""
    found = [x]
    for index in range(0, len(weights), 2):
        z = found[-1] @ weights[index] + weights[index + 1]
        is_last = ends and index + 2 == len(weights)
        found.append(z if is_last else np.maximum(z, 0.0))
    return found


def compute_odds(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def compute_losses(weights: Arrays, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    odds = compute_odds(propagate(weights, x, ends=True)[-1])
    return -np.log(odds[np.arange(len(y)), y])


def compute_gradients(weights: Arrays, x: np.ndarray, y: np.ndarray) -> Arrays:
    """Of the mean cross entropy."""
    *inputs, logits = propagate(weights, x, ends=True)
    error = compute_odds(logits)
    error[np.arange(len(y)), y] -= 1.0
    error /= len(y)
    found: Arrays = []
    for index in reversed(range(len(inputs))):
        kernel = weights[2 * index]
        found[:0] = [inputs[index].T @ error, error.sum(axis=0)]
        error = (error @ kernel.T) * (inputs[index] > 0)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd:
    """SGD with momentum and weight decay, on `epochs` of batches or, if that is less,
    `steps` of them."""

    lr: float
    epochs: int
    momentum: float = 0.0
    decay: float = 0.0
    steps: int | None = None

    def run(
        self,
        start: Arrays,
        epochs: Epochs,
        compute: Callable[[Arrays, np.ndarray], Arrays],
    ) -> Arrays:
        """Where it gets from `start`, at rest at first."""
        assert len(epochs) == self.epochs
        weights = [part.astype(np.float64) for part in start]
        speed = [np.zeros_like(part) for part in weights]
        for rows in [rows for epoch in epochs for rows in epoch][: self.steps]:
            gradients = compute(weights, rows)
            for k, gradient in enumerate(gradients):
                pulled = gradient + self.decay * weights[k]
                speed[k] = self.momentum * speed[k] + pulled
                weights[k] = weights[k] - self.lr * speed[k]
        return weights


def fit_head(
    sgd: Sgd, b: Arrays, client: Client, start: Arrays, epochs: Epochs, base: Arrays
) -> Arrays:
    """A head over the features that b makes of the examples once. What is fitted is
    added to `base`, which stays; [] for nothing."""
    features = propagate(b, client.x, ends=False)[-1]

    def compute(own: Arrays, rows: np.ndarray) -> Arrays:
        head = add(own, base) if base else own
        return compute_gradients(head, features[rows], client.y[rows])

    return sgd.run(start, epochs, compute)


def add(one: Arrays, two: Arrays) -> Arrays:
    return [a + b for a, b in zip(one, two, strict=True)]


def subtract(one: Arrays, two: Arrays) -> Arrays:
    return [a - b for a, b in zip(one, two, strict=True)]


def shorten(update: Arrays, clip: float | None) -> Arrays:
    """clip(x; zeta) of the paper, of all arrays as one vector."""
    if clip is None:
        return update
    norm = np.sqrt(sum(np.sum(part**2) for part in update))
    return [part * min(1.0, clip / norm) for part in update]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A federated program: what the server holds, and what clients do and keep.

    Attributes:
        initial: The whole model before the first round.
        count: How many of its arrays are the representation.
        shared: How what the server holds is trained.
        final: How a head is fitted in the end.
    """

    initial: Arrays
    count: int
    shared: Sgd
    final: Sgd

    def start(self) -> Arrays:
        """What the server holds at first."""
        return list(self.initial)

    def start_own(self) -> Arrays:
        """What a client has that took no part yet."""
        return []

    def work(self, client: Client, held: Arrays, own: Arrays) -> tuple[Arrays, Arrays]:
        """What a client sends of `held`, and keeps."""
        raise NotImplementedError

    def personalize(self, client: Client, held: Arrays, own: Arrays) -> Arrays:
        """The client's own model in the end."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Centaur(Program):
    """Shen et al. 2023, algorithms 1 and 2; PPSGD is the one with a single step each.

    Attributes:
        head: How the head is fitted in a round.
        keeps: Whether a head begins where the client's last one ended.
    """

    head: Sgd
    keeps: bool = True

    def start(self):
        return list(self.initial[: self.count])

    def start_own(self):
        return list(self.initial[self.count :])

    def work(self, client, held, own):
        w = own if self.keeps else self.start_own()
        w = fit_head(self.head, held, client, w, client.epochs[: self.head.epochs], [])
        b = self.move(client, held, w)
        return subtract(b, held), w

    def move(self, client: Client, held: Arrays, w: Arrays) -> Arrays:
        """SGD of the representation with the head fixed."""

        def compute(b: Arrays, rows: np.ndarray) -> Arrays:
            whole = compute_gradients([*b, *w], client.x[rows], client.y[rows])
            return whole[: len(b)]

        return self.shared.run(held, client.epochs[self.head.epochs :], compute)

    def personalize(self, client, held, own):
        w = own if self.keeps else self.start_own()
        return [*held, *fit_head(self.final, held, client, w, client.epochs, [])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummedHeads(Program):
    """PPSGD as the authors of CENTAUR ran it: the head of client i is v + u_i, of which
    u_i stays with it; an epoch of u_i, then an epoch of (b, v)."""

    head: Sgd

    def start_own(self):
        return [np.zeros_like(part) for part in self.initial[self.count :]]

    def work(self, client, held, own):
        b, v = held[: self.count], held[self.count :]
        u = fit_head(self.head, b, client, own, client.epochs[: self.head.epochs], v)

        def compute(theta: Arrays, rows: np.ndarray) -> Arrays:
            model = [*theta[: self.count], *add(theta[self.count :], u)]
            return compute_gradients(model, client.x[rows], client.y[rows])

        theta = self.shared.run(held, client.epochs[self.head.epochs :], compute)
        return subtract(theta, held), u

    def personalize(self, client, held, own):
        b, v = held[: self.count], held[self.count :]
        return [*b, *add(v, fit_head(self.final, b, client, own, client.epochs, v))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole(Program):
    """DP-FedAvg of the whole model (Yu et al. 2020), or with a positive `strength` PMTL
    (Hu et al. 2021): the loss plus strength ||theta - theta_global||^2. Afterwards each
    client fits the head of the common model over its frozen base."""

    strength: float = 0.0

    def work(self, client, held, own):
        def compute(theta: Arrays, rows: np.ndarray) -> Arrays:
            gradients = compute_gradients(theta, client.x[rows], client.y[rows])
            pulls = [2 * self.strength * part for part in subtract(theta, held)]
            return add(gradients, pulls)

        return subtract(self.shared.run(held, client.epochs, compute), held), []

    def personalize(self, client, held, own):
        b, w = held[: self.count], held[self.count :]
        return [*b, *fit_head(self.final, b, client, w, client.epochs, [])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandAlone(Program):
    """Each client by itself: SGD of the whole model, from the same start."""

    def work(self, client, held, own):
        return [np.zeros_like(part) for part in held], []

    def personalize(self, client, held, own):
        def compute(theta: Arrays, rows: np.ndarray) -> Arrays:
            return compute_gradients(theta, client.x[rows], client.y[rows])

        return self.final.run(self.initial, client.epochs, compute)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Left:
    """What a round leaves: what the server holds, and what clients keep."""

    held: Arrays
    kept: dict[int | str, Arrays]


def run_rounds(
    program: Program,
    rounds: Sequence[dict],
    *,
    divisor: float,
    server_lr: float = 1.0,
    clip: float | None = None,
) -> list[Left]:
    """b <- b + eta_g / (p_g n) sum_i clip(b_i - b), over the clients of each round."""
    held, kept, found = program.start(), {}, []
    for clients in rounds:
        new, total = dict(kept), [np.zeros_like(part) for part in held]
        for name, client in clients.items():
            own = kept.get(name, program.start_own())
            update, new[name] = program.work(client, held, own)
            total = add(total, shorten(update, clip))
        held = add(held, [server_lr / divisor * part for part in total])
        kept = new
        found.append(Left(held=held, kept=kept))
    return found
