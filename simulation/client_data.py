"""A client's data in a round, made where its work runs.

What goes to the client's worker is a key: the client, its seeds of the round, and the
cohort's size. The root that the seeds follow from stays in the training's process.
"""

import dataclasses
from typing import Any

import numpy as np

from simulation import client_training, learning, seeds
from simulation.population.federated_data import FederatedData

# 256 bits.
_BATCH_SEED_WORDS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientKey:
    """A client in a round.

    Attributes:
        client_id: The client.
        batch_seed: uint64[4], decides the order of its examples.
        noise_seed: int32[2], decides its noise.
        training_seed: int32[2], decides its dropout layers.
        num_joined: The clients that joined the round.
        client_state: What the client kept from earlier rounds.
        straggling: None for a client that makes all of its epochs; else a number in
            [0, 1) that decides how many of them it makes.
    """

    client_id: str
    batch_seed: np.ndarray
    noise_seed: np.ndarray
    training_seed: np.ndarray
    num_joined: int
    client_state: tuple[np.ndarray, ...] = ()
    straggling: float | None = None


def derive_key(
    client_id: str,
    *,
    root: seeds.RootSeed,
    noise_root: seeds.RootSeed,
    round_number: int,
    num_joined: int,
    client_state: tuple[np.ndarray, ...] = (),
    straggler_rate: float = 0.0,
) -> ClientKey:
    """Returns the key of a client in a round.

    Args:
        client_id: The client.
        root: The root of the streams.
        noise_root: The root of the clients' noise.
        round_number: The round.
        num_joined: The clients that joined it.
        client_state: What the client kept from earlier rounds.
        straggler_rate: The probability that a client is a straggler, which (root,
            round, client) decide alone: the same ones whatever is trained.
    """

    def derive(stream: seeds.RootSeed, purpose: seeds.Purpose) -> np.ndarray:
        return seeds.derive_seed(
            stream, purpose=purpose, round_number=round_number, client_id=client_id
        )

    return ClientKey(
        client_id=client_id,
        batch_seed=seeds.derive_words(
            root,
            purpose=seeds.Purpose.CLIENT_DATA,
            round_number=round_number,
            client_id=client_id,
            count=_BATCH_SEED_WORDS,
        ),
        noise_seed=derive(noise_root, seeds.Purpose.CLIENT_NOISE),
        training_seed=derive(root, seeds.Purpose.CLIENT_TRAINING),
        num_joined=num_joined,
        client_state=client_state,
        straggling=_draw_straggling(root, round_number, client_id, straggler_rate),
    )


def _draw_straggling(
    root: seeds.RootSeed, round_number: int, client_id: str, rate: float
) -> float | None:
    if not rate:
        return None
    words = seeds.derive_words(
        root,
        purpose=seeds.Purpose.STRAGGLER,
        round_number=round_number,
        client_id=client_id,
        count=2,
    )
    # 53 bits, as of 64 the largest words would round to 1.
    chance, share = ((int(word) >> 11) / 2**53 for word in words)
    return share if chance < rate else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientLoader:
    """Makes clients' data from their keys.

    Attributes:
        data: The task's data.
        batch_size: Examples in a batch.
        num_epochs: Passes over a client's examples.
        padded: Whether clients of similar size get equal shapes, for training in
            stacks.
    """

    data: FederatedData
    batch_size: int
    num_epochs: int
    padded: bool

    def __call__(self, key: ClientKey) -> list[Any]:
        """Returns a client's data: what `learning.build_client_data` does."""
        x, y = self.data.load(key.client_id)
        num_epochs = count_epochs(key, self.num_epochs)
        batches = client_training.draw_batches(
            len(y),
            batch_size=self.batch_size,
            num_epochs=num_epochs,
            rng=build_batch_rng(key.batch_seed),
        )
        examples = {"x": x, "y": y}
        if self.padded:
            examples, batches = client_training.pad_client(
                examples,
                batches,
                num_batches=len(batches) // num_epochs * self.num_epochs,
            )
        return learning.build_client_data(
            examples,
            batches,
            noise_seed=key.noise_seed,
            training_seed=key.training_seed,
            num_joined=key.num_joined,
            client_state=key.client_state,
        )


def build_batch_rng(seed: np.ndarray) -> np.random.Generator:
    """Returns `np.random.default_rng(seed)`, in half the time.

    Args:
        seed: uint64[count]. NumPy takes it apart, number by number, into words of 32
            bits: two of each number, but one where the upper one is 0.
    """
    words = seed.astype("<u8").view("<u4")
    return np.random.default_rng(words if words[1::2].all() else seed)


def count_epochs(key: ClientKey, num_epochs: int) -> int:
    """Returns the epochs that a client makes: a straggler from 1 to one less than all.

    Source: Li et al. 2020 (FedProx) and Upcycled-FL, section 5.
    """
    if key.straggling is None or num_epochs == 1:
        return num_epochs
    return 1 + int(key.straggling * (num_epochs - 1))
