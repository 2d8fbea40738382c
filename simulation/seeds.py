"""Seeds: one root, and a stream for every purpose, round and client.

A stream is named by (root, purpose, round, client id). Its value is a hash of the name,
so it needs no state: a round that is repeated after a crash draws the same numbers, and
two processes that hold the same root agree without talking.
"""

import dataclasses
import enum
import hashlib
import secrets

import numpy as np

_ROOT_BITS = 256
_DOMAIN = b"discreet/seeds/1"


class Purpose(enum.Enum):
    """What a stream is for. The values are hashed: they never change."""

    COHORT = "cohort"
    DROPOUT = "dropout"
    STRAGGLER = "straggler"
    CLIENT_DATA = "client_data"
    CLIENT_TRAINING = "client_training"
    CLIENT_NOISE = "client_noise"
    SERVER_NOISE = "server_noise"
    ROTATION = "rotation"
    MODEL_INIT = "model_init"


@dataclasses.dataclass(frozen=True)
class RootSeed:
    """The root of all streams of a run.

    Attributes:
        value: An integer in [0, 2**256). It determines all noise of the run: whoever
            knows it can subtract the noise, so it is printed only where the user chose
            it.
        reproducible: Whether the user chose the value. A value that the operating
            system drew is kept in memory alone and ends with the process.
    """

    value: int = dataclasses.field(repr=False)
    reproducible: bool

    def __post_init__(self) -> None:
        if not 0 <= self.value < 2**_ROOT_BITS:
            raise ValueError(f"`value` must be in [0, 2**{_ROOT_BITS}).")

    @property
    def description(self) -> str:
        """One sentence for every output of the run."""
        if self.reproducible:
            return (
                f"reproducible: all randomness follows from --seed={self.value}; no "
                "epsilon holds against those who know or guess the seed, or see "
                "another run with it on other data"
            )
        return (
            "not reproducible: all randomness follows from the operating system's "
            "entropy; that of noise and cohorts is stored nowhere"
        )


def build_root_seed(seed: int | None) -> RootSeed:
    """Returns the root for the user's seed, or a fresh one for None.

    Args:
        seed: A non-negative integer below 2**256, or None for 256 bits of the
            operating system's entropy.

    Raises:
        ValueError: If the seed is out of range.
    """
    if seed is None:
        return RootSeed(secrets.randbits(_ROOT_BITS), reproducible=False)
    if not 0 <= seed < 2**_ROOT_BITS:
        raise ValueError(f"`seed` must be in [0, 2**{_ROOT_BITS}). Found {seed!r}.")
    return RootSeed(seed, reproducible=True)


def scope_root(root: RootSeed, scope: str) -> RootSeed:
    """Returns a root whose streams are used within `scope` alone.

    Two runs with one root but different settings must not share noise: the difference
    of what they release would hold the signal without it. Name everything in `scope`
    that decides the signal.
    """
    name = b"".join(
        len(part).to_bytes(4, "little") + part
        for part in (
            _DOMAIN,
            b"scope",
            root.value.to_bytes(_ROOT_BITS // 8, "little"),
            scope.encode(),
        )
    )
    value = int.from_bytes(hashlib.sha256(name).digest(), "little")
    return RootSeed(value, reproducible=root.reproducible)


def derive_seed(
    root: RootSeed,
    *,
    purpose: Purpose,
    round_number: int | None = None,
    client_id: str | None = None,
) -> np.ndarray:
    """Returns the int32[2] seed of one stream, for `tf.random.stateless_*`.

    Guarantees: the seed is a function of the arguments alone. Distinct names are
    hashed from distinct strings, so that two streams agree only if SHA-256 collides
    in 64 bits: with s streams that has probability below s**2 / 2**65.
    """
    digest = hashlib.sha256(_encode(root, purpose, round_number, client_id)).digest()
    return np.frombuffer(digest[:8], dtype="<i4").astype(np.int32)


def derive_words(
    root: RootSeed,
    *,
    purpose: Purpose,
    count: int,
    round_number: int | None = None,
    client_id: str | None = None,
) -> np.ndarray:
    """Returns `count` independent uniform 64-bit words of one stream, uint64[count].

    Source: the extendable output of SHAKE-256. It does not depend on the version of
    NumPy, and the words of one round do not tell those of another.
    """
    name = _encode(root, purpose, round_number, client_id)
    return np.frombuffer(hashlib.shake_256(name).digest(8 * count), dtype="<u8")


def derive_generator(
    root: RootSeed,
    *,
    purpose: Purpose,
    round_number: int | None = None,
    client_id: str | None = None,
) -> np.random.Generator:
    """Returns a NumPy generator that starts from one stream."""
    digest = hashlib.sha256(_encode(root, purpose, round_number, client_id)).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def _encode(
    root: RootSeed, purpose: Purpose, round_number: int | None, client_id: str | None
) -> bytes:
    """Writes a name so that no two names share their bytes (each part has a length)."""
    parts = [
        _DOMAIN,
        root.value.to_bytes(_ROOT_BITS // 8, "little"),
        purpose.value.encode(),
        b"" if round_number is None else str(int(round_number)).encode(),
        b"" if client_id is None else b"=" + client_id.encode(),
    ]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)
