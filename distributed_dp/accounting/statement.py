"""What is claimed: an epsilon together with everything it rests on."""

import dataclasses
import math
from typing import Any

AS_PUBLISHED_WORDS = "as published, not a proven bound for this sampler"

NOT_COVERED = (
    "diagnostics, losses, accuracies, the cohort's size K, fractions clipped and the "
    "time that rounds took, in logs, CSV and TensorBoard: exact functions of private "
    "data, for the simulation only",
    "selection of models or hyperparameters on private validation data",
    "other runs on the same data: what every run costs adds up",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyStatement:
    """An (epsilon, delta) claim. `str()` prints all of it, `to_dict()` is for JSON.

    Attributes:
      view: against whom: the analyst of the released models, or the server.
      mechanism: the noise.
      epsilon: at least 0; inf where nothing can be claimed.
      delta: all of it, charges included.
      adjacency: which change of the data epsilon is about.
      sampler: how cohorts are drawn, in words.
      sampling_rate: q.
      num_rounds: T.
      order: the Renyi order that gave epsilon; None for accountants without orders.
      bound: the theorem used, in words.
      accountant: in words.
      sampler_charge: the part of delta spent on the inexact noise sampler.
      overflow_charge: the part of delta spent on cohorts above the largest size.
      assumptions: what must hold, one sentence each.
      not_covered: what epsilon does not cover.
      num_clients: N, for delta * N.
      as_published: whether this is the papers' custom rather than a proven bound.
    """

    view: str
    mechanism: str
    epsilon: float
    delta: float
    adjacency: str
    sampler: str
    sampling_rate: float
    num_rounds: int
    order: float | None
    bound: str
    accountant: str
    sampler_charge: float
    overflow_charge: float
    assumptions: tuple[str, ...]
    not_covered: tuple[str, ...] = NOT_COVERED
    num_clients: int
    as_published: bool

    def __str__(self) -> str:
        order = "none" if self.order is None else f"{self.order:.6g}"
        lines = [
            f"Privacy, {self.view}: epsilon = {self.epsilon:.6g} at delta = "
            f"{self.delta:.6g} (delta * N = {self.delta * self.num_clients:.4g})",
            f"  mechanism: {self.mechanism}",
            f"  adjacency: {self.adjacency}",
            f"  sampler: {self.sampler}, q = {self.sampling_rate:.6g}, "
            f"N = {self.num_clients}",
            f"  rounds: T = {self.num_rounds}",
            f"  bound: {self.bound}",
            f"  accountant: {self.accountant}, order = {order}",
            f"  charged to delta: noise sampler {self.sampler_charge:.3g}, "
            f"cohort tail {self.overflow_charge:.3g}",
        ]
        if self.as_published:
            lines.append(f"  standing: {AS_PUBLISHED_WORDS}")
        lines += [f"  assumes: {text}" for text in self.assumptions]
        lines += [f"  does not cover: {text}" for text in self.not_covered]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; an infinite epsilon becomes the string "inf"."""
        values = dataclasses.asdict(self)
        values["assumptions"] = list(self.assumptions)
        values["not_covered"] = list(self.not_covered)
        values["delta_times_num_clients"] = self.delta * self.num_clients
        if math.isinf(self.epsilon):
            values["epsilon"] = "inf"
        if self.as_published:
            values["standing"] = AS_PUBLISHED_WORDS
        return values
