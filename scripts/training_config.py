"""The configuration of run_distributed_dp: one field for each flag, validated."""

import dataclasses
import math
from typing import Any

from distributed_dp.accounting import (
    Accountant,
    Accounting,
    AmplificationBound,
    CohortScheme,
    Mechanism,
    Sampling,
)
from scripts import flags as run_flags

# Where data are and an output goes does not decide what is in it; the data's identity
# is recorded.
_LOCATION_FIELDS = (
    "output_root",
    "experiment",
    "seed",
    "ray_address",
    "data_dir",
    "hold_mb",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What a run is told. The fields are the flags of scripts/run_distributed_dp.py."""

    task: str
    model: str | None
    data_dir: str | None
    synthetic_data: bool
    data_seed: int
    data_name: str | None
    partition: str | None
    num_clients: int | None
    data_alpha: float | None
    data_beta: float | None
    classes_per_client: int | None
    test_fraction: float | None
    vocabulary_size: int | None
    embedding_file: str | None
    eval_examples: int | None
    hold_mb: int
    clients_per_round: int
    total_rounds: int
    client_lr: float
    client_momentum: float
    proximal_mu: float
    straggler_rate: float
    client_weighting: str
    batch_size: int
    client_epochs: int
    server_optimizer: str
    server_lr: float
    server_momentum: float
    server_epsilon: float
    dropout_rate: float
    mechanism: str
    epsilon: float
    delta: float | None
    clip: float
    bits: int
    beta: float
    num_stddevs: float
    rotation: str
    sampling: str
    accounting: str
    bound: str | None
    central_accountant: str | None
    adaptive_clip: bool
    target_quantile: float
    clip_lr: float
    quantile_noise_multiplier: float | None
    compare_central: bool
    diagnostics: str
    eval_every: int
    checkpoint_every: int
    engine: str
    device: str
    client_failure: str
    ray_address: str | None
    seed: int | None
    output_root: str
    experiment: str | None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"`{name}` must be finite. Found {value!r}.")
        run_flags.check_positive(
            self,
            "epsilon",
            "clip",
            "num_stddevs",
            "client_lr",
            "server_lr",
            "server_epsilon",
            "clients_per_round",
            "total_rounds",
            "batch_size",
            "client_epochs",
            "eval_every",
            "checkpoint_every",
        )
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"`delta` must be in (0, 1). Found {self.delta!r}.")
        for name in ("server_momentum", "client_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be in [0, 1). Found {getattr(self, name)!r}."
                )
        if self.proximal_mu < 0:
            raise ValueError(f"`proximal_mu` must be >= 0. Found {self.proximal_mu!r}.")
        if not 0 <= self.straggler_rate <= 1:
            raise ValueError(
                f"`straggler_rate` must be in [0, 1]. Found {self.straggler_rate!r}."
            )
        if self.client_weighting != "uniform" and self.mechanism != "none":
            raise ValueError(
                "`client_weighting` must be uniform under a mechanism, whose "
                f"sensitivity it would break; or set mechanism=none. Found "
                f"{self.client_weighting!r}."
            )
        if not 0 <= self.dropout_rate < 1:
            raise ValueError(
                f"`dropout_rate` must be in [0, 1). Found {self.dropout_rate!r}."
            )
        if not 0 <= self.beta < 1:
            raise ValueError(f"`beta` must be in [0, 1). Found {self.beta!r}.")
        run_flags.check_clip(self.clip)
        if not 1 <= self.bits <= run_flags.MAX_BITS:
            raise ValueError(
                f"`bits` must be between 1 and {run_flags.MAX_BITS}. "
                f"Found {self.bits!r}."
            )
        if self.experiment is not None:
            run_flags.check_experiment(self.experiment)
        if not 0 <= self.target_quantile <= 1:
            raise ValueError(
                f"`target_quantile` must be in [0, 1]. Found {self.target_quantile!r}."
            )
        if self.quantile_noise_multiplier is not None:
            run_flags.check_positive(self, "quantile_noise_multiplier")
        if self.adaptive_clip and self.mechanism not in ("ddgauss", "skellam"):
            raise ValueError(
                "`adaptive_clip` must be off unless the mechanism is ddgauss or "
                f"skellam. Found mechanism={self.mechanism!r}."
            )
        if self.ray_address is not None and self.engine != "ray":
            raise ValueError(
                "`ray_address` must be unset unless engine is ray. Found "
                f"engine={self.engine!r}."
            )
        if not self.output_root:
            raise ValueError("`output_root` must not be empty.")
        run_flags.build_task_options(self)

    @property
    def mechanism_kind(self) -> Mechanism | None:
        """The mechanism; None for no privacy."""
        return None if self.mechanism == "none" else Mechanism(self.mechanism)

    @property
    def sampling_kind(self) -> Sampling:
        """The sampler."""
        return Sampling(self.sampling)

    @property
    def accounting_kind(self) -> Accounting:
        """The standing of the bound."""
        return Accounting(self.accounting)

    @property
    def bound_kind(self) -> AmplificationBound | None:
        """The bound of Poisson amplification; None for the accounting's default."""
        return None if self.bound is None else AmplificationBound(self.bound)

    @property
    def central_accountant_kind(self) -> Accountant:
        """The accountant of the central Gaussian."""
        if self.central_accountant is not None:
            return Accountant(self.central_accountant)
        tight = (
            self.sampling_kind is Sampling.POISSON
            and self.bound is None
            and not self.adaptive_clip
        )
        return Accountant.PLD if tight else Accountant.RDP

    @property
    def label(self) -> str:
        """What a run folder is called, before the digest of its settings."""
        return f"{self.task}-{self.mechanism}"

    @property
    def epochs_per_round(self) -> int:
        """A client's passes over its examples in a round, of whatever it trains."""
        return self.client_epochs

    @property
    def keeps_diagnostics(self) -> bool:
        """Whether exact functions of private data are recorded."""
        return self.diagnostics == "on"

    def build_scheme(self, num_clients: int) -> CohortScheme:
        """Returns who is sampled out of a number of clients."""
        return CohortScheme(self.sampling_kind, num_clients, self.clients_per_round)

    def resolve_delta(self, num_clients: int) -> float:
        """Returns delta, 1 / N where it is unset."""
        return 1 / num_clients if self.delta is None else self.delta

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that decide the result."""
        values = dataclasses.asdict(self)
        for name in _LOCATION_FIELDS:
            del values[name]
        return values
