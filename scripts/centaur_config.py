"""The configuration of run_centaur: TrainingConfig, and its own flags."""

import dataclasses
import enum
from typing import Any

from distributed_dp.accounting import Accountant, CohortScheme, Sampling
from scripts import flags as run_flags
from scripts.training_config import TrainingConfig


class Method(enum.Enum):
    """What is trained."""

    CENTAUR = "centaur"
    FEDAVG_FB = "fedavg_fb"
    PPSGD_PAPER = "ppsgd_paper"
    PPSGD_AUTHORS = "ppsgd_authors"
    PMTL_FT = "pmtl_ft"
    STAND_ALONE = "stand_alone"

    @property
    def title(self) -> str:
        """Its name for people."""
        return {
            Method.CENTAUR: "CENTAUR",
            Method.FEDAVG_FB: "DP-FedAvg-fb",
            Method.PPSGD_PAPER: "PPSGD (paper)",
            Method.PPSGD_AUTHORS: "PPSGD (authors)",
            Method.PMTL_FT: "PMTL-ft",
            Method.STAND_ALONE: "stand-alone",
        }[self]

    @property
    def fits_head_in_rounds(self) -> bool:
        """Whether a client fits a head of its own in every round."""
        return self in (Method.CENTAUR, Method.PPSGD_PAPER, Method.PPSGD_AUTHORS)


# What a method takes beside the flags of all, with the value that leaves it alone.
OWN_FIELDS: dict[str, tuple[tuple[Method, ...], Any]] = {
    "head_state": ((Method.CENTAUR,), "client"),
    "pmtl_lambda": ((Method.PMTL_FT,), 1.0),
    "ppsgd_head_lr": ((Method.PPSGD_PAPER, Method.PPSGD_AUTHORS), None),
    "stand_alone_epochs": ((Method.STAND_ALONE,), 200),
}


# The embedded digits' model, and how they are divided, unless something else is said.
_DIGITS_MODEL = "small_mlp"
_DIGITS_PARTITION = {
    "partition": "shards",
    "num_clients": 100,
    "classes_per_client": 3,
    "test_fraction": 0.2,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CentaurConfig(TrainingConfig):
    """What a run is told. The fields are the flags of scripts/run_centaur.py.

    `clients_per_round` follows from `participation` and the number of clients.
    """

    clients_per_round: int = dataclasses.field(init=False, default=1)
    method: str
    split_layer: str | None
    head_state: str
    participation: float
    validation_fraction: float
    head_epochs: int
    head_lr: float
    head_momentum: float
    weight_decay: float
    pmtl_lambda: float
    ppsgd_head_lr: float | None
    stand_alone_epochs: int
    measure_updates: bool
    evaluate_test: bool

    def __post_init__(self) -> None:
        if self.task == "digits":
            # Its own users have no test data.
            defaults = _DIGITS_PARTITION if self.partition is None else {}
            for name, value in {"model": _DIGITS_MODEL, **defaults}.items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, value)
        super().__post_init__()
        run_flags.check_positive(self, "head_epochs", "head_lr", "stand_alone_epochs")
        if not 0 < self.participation <= 1:
            raise ValueError(
                "`participation` must be in (0, 1]: the expected part of the clients "
                f"in a round. Found {self.participation!r}."
            )
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                "`validation_fraction` must be in (0, 1): settings are chosen by the "
                f"validation parts alone. Found {self.validation_fraction!r}."
            )
        if not 0 <= self.head_momentum < 1:
            raise ValueError(
                f"`head_momentum` must be in [0, 1). Found {self.head_momentum!r}."
            )
        if self.weight_decay < 0:
            raise ValueError(
                f"`weight_decay` must be >= 0. Found {self.weight_decay!r}."
            )
        if self.ppsgd_head_lr is not None:
            run_flags.check_positive(self, "ppsgd_head_lr")
        if self.pmtl_lambda < 0:
            raise ValueError(f"`pmtl_lambda` must be >= 0. Found {self.pmtl_lambda!r}.")
        if self.proximal_mu:
            raise ValueError(
                "`proximal_mu` must be 0: the pull of pmtl_ft is `pmtl_lambda`. Found "
                f"{self.proximal_mu!r}."
            )
        if self.client_weighting != "uniform":
            raise ValueError(
                f"`client_weighting` must be uniform. Found {self.client_weighting!r}."
            )
        if self.eval_examples is not None:
            raise ValueError(
                "`eval_examples` must be unset: every client's own model is tested on "
                f"its whole test part. Found {self.eval_examples!r}."
            )
        if self.measure_updates and (self.adaptive_clip or not self.keeps_diagnostics):
            raise ValueError(
                "`measure_updates` must be off with `adaptive_clip`, and with "
                "`diagnostics` off. Found True."
            )
        self._check_own_fields()
        self._check_sampler()
        self._check_stand_alone()

    @property
    def method_kind(self) -> Method:
        """What is trained."""
        return Method(self.method)

    @property
    def label(self) -> str:
        """What a run folder is called, before the digest of its settings."""
        return f"{self.task}-{self.method}-{self.mechanism}"

    @property
    def epochs_per_round(self) -> int:
        """A client's passes over its examples in a round, its head's too."""
        if self.method_kind is Method.STAND_ALONE:
            return self.stand_alone_epochs
        if self.method_kind is Method.CENTAUR:
            return self.head_epochs + self.client_epochs
        if self.method_kind.fits_head_in_rounds:
            # PPSGD's head and representation: an epoch each, and the final fit.
            return 2 + self.head_epochs
        return self.client_epochs + self.head_epochs

    def build_scheme(self, num_clients: int) -> CohortScheme:
        """Returns who is sampled out of a number of clients.

        Raises:
            ValueError: If the participation is of less than one client.
        """
        expected = round(self.participation * num_clients)
        if expected < 1:
            raise ValueError(
                "`participation` must be of one client in a round at least. Found "
                f"{self.participation!r} of {num_clients} clients."
            )
        return CohortScheme(self.sampling_kind, num_clients, expected)

    @property
    def central_accountant_kind(self) -> Accountant:
        """The accountant of the central Gaussian."""
        is_exact = (
            self.central_accountant is None
            and self.sampling_kind is Sampling.FIXED
            and self.participation == 1
        )
        return Accountant.ANALYTIC if is_exact else super().central_accountant_kind

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that decide the result."""
        values = super().to_dict()
        del values["clients_per_round"]
        return values

    def _check_own_fields(self) -> None:
        """Raises ValueError where the method does not take what is given."""
        for name, (methods, default) in OWN_FIELDS.items():
            if self.method_kind not in methods and getattr(self, name) != default:
                wanted = "unset" if default is None else default
                raise ValueError(
                    f"`{name}` must be {wanted} for the method {self.method}. Found "
                    f"{getattr(self, name)!r}."
                )

    def _check_sampler(self) -> None:
        """Raises ValueError where the accountant is not the sampler's."""
        if self.central_accountant == "pld" and self.sampling_kind is Sampling.FIXED:
            raise ValueError(
                "`central_accountant` must be rdp for fixed sampling, or analytic at "
                "participation 1: pld accounts for Poisson-sampled cohorts. Found "
                "'pld'."
            )

    def _check_stand_alone(self) -> None:
        if self.method_kind is not Method.STAND_ALONE:
            return
        for name, wanted in (("mechanism", "none"), ("total_rounds", 1)):
            if getattr(self, name) != wanted:
                raise ValueError(
                    f"`{name}` must be {wanted} for the method stand_alone, whose "
                    f"clients send nothing. Found {getattr(self, name)!r}."
                )
