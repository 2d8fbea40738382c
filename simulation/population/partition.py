"""Divides labelled examples that have no users among clients.

Sources: Hsu, Qi and Brown 2019 (Dirichlet); McMahan et al. 2017 and the CENTAUR
experiments (shards of classes); Li and McCallum 2006 as TFF's CIFAR-100 uses it
(Pachinko allocation: Dirichlet over coarse labels, then over the labels under each).

Every partition is drawn once; other examples, those for the test, then follow each
client's own distribution of classes. No example has two clients.
"""

import copy
import dataclasses
import enum
import functools
from collections.abc import Callable

import numpy as np

_COARSE_ALPHA, _FINE_ALPHA = 0.1, 10.0


class PartitionKind(enum.Enum):
    """How classes are spread over clients."""

    DIRICHLET = "dirichlet"
    SHARDS = "shards"
    PACHINKO = "pachinko"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition of examples among clients.

    Attributes:
        kind: How classes are spread.
        num_clients: The number of clients.
        alpha: DIRICHLET: the concentration of each class where classes are balanced
            (Hsu et al.'s over the number of classes); small is heterogeneous.
        classes_per_client: SHARDS: the shards of a client, each of one class.
        seed: Decides everything.
    """

    kind: PartitionKind
    num_clients: int
    alpha: float = 0.1
    classes_per_client: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_clients < 1:
            raise ValueError(f"`num_clients` must be >= 1. Found {self.num_clients!r}.")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(
                f"`alpha` must be positive and finite. Found {self.alpha!r}."
            )
        if self.classes_per_client < 1:
            raise ValueError(
                f"`classes_per_client` must be >= 1. Found {self.classes_per_client!r}."
            )

    @property
    def description(self) -> str:
        """What it is, in words."""
        how = {
            PartitionKind.DIRICHLET: f"Dirichlet({self.alpha:g}) over the classes",
            PartitionKind.SHARDS: f"at most {self.classes_per_client} classes a client",
            PartitionKind.PACHINKO: (
                f"Pachinko allocation ({_COARSE_ALPHA:g} over coarse labels, "
                f"{_FINE_ALPHA:g} over the labels under each)"
            ),
        }[self.kind]
        return f"{self.num_clients} clients, {how}, seed {self.seed}"

    def divide(
        self, labels: np.ndarray, *, coarse: np.ndarray | None = None
    ) -> "Division":
        """Divides examples, those for training or all there are.

        All clients get equally many: the number of examples over that of clients,
        rounded down, or, of SHARDS, what their shards hold, which is less where classes
        are unbalanced. Examples that are left over belong to nobody.

        Args:
            labels: The class of each example.
            coarse: The coarse label of each, for PACHINKO.

        Raises:
            ValueError: If there are fewer examples than clients, or coarse labels are
                missing, or the examples cannot make up the shards, or are of fewer
                classes than a client has shards.
        """
        if len(labels) < self.num_clients:
            raise ValueError(
                "`num_clients` must be at most the number of examples to divide, "
                f"{len(labels)}. Found {self.num_clients!r}."
            )
        rng = np.random.default_rng([self.seed, *self.kind.value.encode()])
        num_classes = int(labels.max()) + 1
        if self.kind is PartitionKind.SHARDS:
            owners = self._draw_shards(labels, num_classes, rng)
            deal = functools.partial(_deal_shards, owners=owners)
            return Division(rows=deal(labels, rng=rng), deal=deal, rng=rng)
        wishes = self._draw_wishes(labels, coarse, num_classes, rng)
        rows = _allocate(labels, wishes=wishes, rng=rng)
        # What clients got, not what they wished for: classes were used up.
        counts = [np.bincount(labels[row], minlength=num_classes) for row in rows]
        deal = functools.partial(_allocate_known, counts=np.array(counts))
        return Division(rows=rows, deal=deal, rng=rng)

    def _draw_wishes(
        self,
        labels: np.ndarray,
        coarse: np.ndarray | None,
        num_classes: int,
        rng: np.random.Generator,
    ) -> np.ndarray:
        """Returns each client's distribution over classes, [num_clients, classes]."""
        if self.kind is PartitionKind.DIRICHLET:
            prior = np.bincount(labels, minlength=num_classes) / len(labels)
            present = prior > 0
            wishes = np.zeros([self.num_clients, num_classes])
            wishes[:, present] = _draw_dirichlet(
                self.alpha * prior[present] * present.sum(), self.num_clients, rng
            )
            return wishes
        if coarse is None:
            raise ValueError(
                "`partition` pachinko must have coarse labels, as CIFAR-100 has. Found "
                "none."
            )
        parents = np.full(num_classes, -1)
        parents[labels] = coarse
        groups = [np.flatnonzero(parents == name) for name in np.unique(coarse)]
        wishes = np.zeros([self.num_clients, num_classes])
        tops = _draw_dirichlet(
            np.full(len(groups), _COARSE_ALPHA), self.num_clients, rng
        )
        for group, top in zip(groups, tops.T, strict=True):
            below = _draw_dirichlet(
                np.full(len(group), _FINE_ALPHA), self.num_clients, rng
            )
            wishes[:, group] = top[:, np.newaxis] * below
        return wishes

    def _draw_shards(
        self, labels: np.ndarray, num_classes: int, rng: np.random.Generator
    ) -> list[list[int]]:
        """Returns the class of each of every client's shards.

        Each class is cut in shards of one size, the largest that gives all clients
        theirs; a client's shards are of different classes as far as that goes.
        """
        counts = np.bincount(labels, minlength=num_classes)
        num_present = np.count_nonzero(counts)
        if self.classes_per_client > num_present:
            raise ValueError(
                "`classes_per_client` must be at most the number of classes, "
                f"{num_present}. Found {self.classes_per_client!r}."
            )
        wanted = self.num_clients * self.classes_per_client
        size = len(labels) // wanted
        while size and (counts // size).sum() < wanted:
            size -= 1
        if not size:
            raise ValueError(
                "`classes_per_client` times `num_clients` must be at most the number "
                f"of examples to divide, {len(labels)}. Found {wanted}."
            )
        left = counts // size
        # The surplus goes from the largest classes, of equal ones from any.
        for _ in range(int(left.sum()) - wanted):
            left[rng.choice(np.flatnonzero(left == left.max()))] -= 1
        owners: list[list[int]] = []
        for client in range(self.num_clients):
            # First what must go: a class with as many shards as clients are left.
            ties = rng.permutation(num_classes)
            order = ties[np.argsort(-left[ties], kind="stable")]
            forced = [c for c in order if left[c] >= self.num_clients - client]
            others = [c for c in order if 0 < left[c] < self.num_clients - client]
            weights = left[others] / max(left[others].sum(), 1)
            need = max(0, self.classes_per_client - len(forced))
            drawn = min(need, len(others))
            chosen = forced[: self.classes_per_client]
            if drawn:
                chosen += list(rng.choice(others, size=drawn, replace=False, p=weights))
            left[chosen] -= 1
            while len(chosen) < self.classes_per_client:
                chosen.append(int(np.argmax(left)))
                left[chosen[-1]] -= 1
            owners.append([int(c) for c in chosen])
        return owners


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """Examples divided among clients.

    Attributes:
        rows: Each client's rows, increasing.
        deal: Divides other examples by the clients' distributions of classes.
        rng: What is left of the randomness.
    """

    rows: list[np.ndarray]
    deal: Callable[..., list[np.ndarray]]
    rng: np.random.Generator

    def follow(self, labels: np.ndarray) -> list[np.ndarray]:
        """Returns the test examples' rows of each client, always the same ones.

        Examples of classes that no client trains on belong to nobody.

        Raises:
            ValueError: If they are too few for every client to get one.
        """
        rows = self.deal(labels, rng=copy.deepcopy(self.rng))
        if not all(map(len, rows)):
            raise ValueError(
                "`num_clients` must be small enough for each client to get a test "
                f"example of each class it has. Found {len(rows)} clients, and "
                f"{len(labels)} test examples."
            )
        return rows


def _draw_dirichlet(
    concentration: np.ndarray, size: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns rows that sum to 1, also where all gammas underflow to 0."""
    drawn = rng.standard_gamma(concentration, [size, len(concentration)])
    sums = drawn.sum(axis=1, keepdims=True)
    empty = sums[:, 0] <= 0
    drawn[empty, rng.integers(len(concentration), size=int(empty.sum()))] = 1.0
    return drawn / drawn.sum(axis=1, keepdims=True)


def _allocate_known(
    labels: np.ndarray, *, counts: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Draws by the examples of each class that each client has, [clients, classes].

    Examples of classes that no client has are left out.
    """
    known = np.flatnonzero(np.isin(labels, np.flatnonzero(counts.any(axis=0))))
    rows = _allocate(labels[known], wishes=counts, rng=rng)
    return [known[row] for row in rows]


def _allocate(
    labels: np.ndarray, *, wishes: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Draws equally many examples for each client, without replacement.

    A class that is used up is left out, and the wishes for the others are scaled up; a
    client whose classes are all used up takes of the class there is most of.
    """
    num_clients, num_classes = wishes.shape
    pools = [
        list(rng.permutation(np.flatnonzero(labels == c))) for c in range(num_classes)
    ]
    share = sum(map(len, pools)) // num_clients
    rows: list[list[int]] = [[] for _ in range(num_clients)]
    for client in rng.permutation(num_clients):
        while len(rows[client]) < share:
            left = np.array([len(pool) for pool in pools])
            odds = wishes[client] * (left > 0)
            if odds.sum() <= 0:
                most = rng.choice(np.flatnonzero(left == left.max()))
                odds = np.eye(num_classes)[most]
            need = share - len(rows[client])
            drawn = np.minimum(rng.multinomial(need, odds / odds.sum()), left)
            for c in np.flatnonzero(drawn):
                rows[client] += [pools[c].pop() for _ in range(drawn[c])]
    return [np.sort(np.array(row, int)) for row in rows]


def _deal_shards(
    labels: np.ndarray, *, owners: list[list[int]], rng: np.random.Generator
) -> list[np.ndarray]:
    """Returns each client's rows: a shard of every class that it owns one of."""
    classes = np.concatenate([np.array(owned) for owned in owners])
    shards = np.bincount(classes)
    counts = np.bincount(labels, minlength=len(shards))
    size = int(min(counts[c] // shards[c] for c in np.unique(classes)))
    pools = {
        c: list(rng.permutation(np.flatnonzero(labels == c))) for c in set(classes)
    }
    return [
        np.sort(np.array([pools[c].pop() for c in owned for _ in range(size)], int))
        for owned in owners
    ]
