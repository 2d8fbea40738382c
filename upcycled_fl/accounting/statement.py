"""What is claimed of every client: epsilons together with what they rest on."""

import dataclasses
import math
from typing import Any

AS_PUBLISHED_OUTPUT_WORDS = "as published, not proven for clipped SGD models"
AS_PUBLISHED_OBJECTIVE_WORDS = "as published, not proven for models trained by SGD"
AVERAGING_WORDS = "averaging assumption, not proven for clipped SGD models"

NOT_COVERED = (
    "the sizes |D_i|, which are public, and who took part in which round",
    "anything else that leaves the client: losses, accuracies, control variates, the "
    "number of epochs run, whether the solver converged",
    "selection of models or hyperparameters (the clip, alpha, learning rates) on "
    "private data; other runs on the same data: what every run costs adds up",
    "more than one example of a client, unless the bound says so",
    "floating point: noise is real-valued in theory",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientPrivacyStatement:
    """Example-level (epsilon, delta) of every client. `str()` prints all of it.

    Attributes:
      accountant: as_published, replace_one_average or proven.
      perturbation: output or objective, with its noise, in words.
      epsilons: one per client, in the order given; 0 for one that never took part.
      delta: of each; 0 under objective perturbation.
      adjacency: which change of D_i epsilon is about.
      num_releases: M_i, one per client.
      bound: the theorem used, in words.
      assumptions: what must hold, one sentence each.
      not_covered: what epsilon does not cover.
      standing: the label of a number that is not proven; None for PROVEN.
    """

    accountant: str
    perturbation: str
    epsilons: tuple[float, ...]
    delta: float
    adjacency: str
    num_releases: tuple[int, ...]
    bound: str
    assumptions: tuple[str, ...]
    not_covered: tuple[str, ...] = NOT_COVERED
    standing: str | None

    @property
    def is_proven(self) -> bool:
        """Whether epsilon is a theorem under the assumptions listed."""
        return self.standing is None

    @property
    def epsilon_mean(self) -> float:
        """The mean over clients, the paper's eps-bar. No client's guarantee."""
        return math.fsum(self.epsilons) / len(self.epsilons)

    @property
    def epsilon_min(self) -> float:
        """The least epsilon of a client."""
        return min(self.epsilons)

    @property
    def epsilon_max(self) -> float:
        """The largest epsilon of a client: what holds for every client."""
        return max(self.epsilons)

    def describe_epsilon(self, epsilon: float) -> str:
        """Returns the number with its accountant and, if not proven, its label."""
        standing = "" if self.standing is None else f": {self.standing}"
        return f"{epsilon:.6g} ({self.accountant}{standing})"

    def __str__(self) -> str:
        releases = self.num_releases
        lines = [
            f"Privacy of each of {len(self.epsilons)} clients' examples, accountant "
            f"{self.accountant}, delta = {self.delta:.6g}",
            f"  mean epsilon: {self.describe_epsilon(self.epsilon_mean)}",
            f"  min epsilon: {self.describe_epsilon(self.epsilon_min)}",
            f"  max epsilon: {self.describe_epsilon(self.epsilon_max)}",
            f"  perturbation: {self.perturbation}",
            f"  adjacency: {self.adjacency}",
            f"  releases per client: {min(releases)} to {max(releases)}",
            f"  bound: {self.bound}",
        ]
        lines += [f"  assumes: {text}" for text in self.assumptions]
        lines += [f"  does not cover: {text}" for text in self.not_covered]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; an infinite epsilon becomes the string "inf"."""
        values = dataclasses.asdict(self)
        values["epsilons"] = [_to_plain(epsilon) for epsilon in self.epsilons]
        for name in ("epsilon_mean", "epsilon_min", "epsilon_max"):
            values[name] = _to_plain(getattr(self, name))
        for name in ("num_releases", "assumptions", "not_covered"):
            values[name] = list(values[name])
        values["is_proven"] = self.is_proven
        return values


def _to_plain(epsilon: float) -> float | str:
    return "inf" if math.isinf(epsilon) else epsilon
