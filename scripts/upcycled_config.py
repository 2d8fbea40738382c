"""The configuration of run_upcycled_fl: TrainingConfig, and its own flags."""

import dataclasses

from scripts import flags as run_flags
from scripts.training_config import TrainingConfig
from upcycled_fl import accounting, schedule

ALGORITHMS = ("fedavg", "fednova", "scaffold", "feddyn", "pfedme")
_DEFAULT_LAMBDA = 0.12
# What upcycled_fl.exact_solver takes; it would bring TensorFlow along.
MIN_TOLERANCE = 1e-8
# The flag of each perturbation's noise.
_NOISE_FIELDS = {"output": "client_stddev", "objective": "objective_rate"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpcycledConfig(TrainingConfig):
    """What a run is told. The fields are the flags of scripts/run_upcycled_fl.py."""

    upcycled: bool
    upcycled_lambda: float | None
    lambda_schedule: str
    upcycled_coefficient: float | None
    algorithm: str
    pfedme_penalty: float
    pfedme_steps: int
    pfedme_lr: float
    perturbation: str
    client_accountant: str
    model_clip: float
    client_stddev: float | None
    objective_rate: float | None
    client_epsilon: float | None
    client_epsilon_target: str
    client_delta: float
    local_solver: str
    gradient_tolerance: float
    residual_rate: float | None
    unmet_assumptions: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("upcycled_lambda", "upcycled_coefficient"):
            if getattr(self, name) is not None and not self.upcycled:
                raise ValueError(
                    f"`{name}` must be unset with --noupcycled. Found "
                    f"{getattr(self, name)!r}."
                )
        if self.lambda_schedule != "constant" and not self.upcycled:
            raise ValueError(
                "`lambda_schedule` must be constant with --noupcycled. Found "
                f"{self.lambda_schedule!r}."
            )
        if self.upcycled_lambda is not None and self.upcycled_coefficient is not None:
            raise ValueError(
                "`upcycled_coefficient` must be unset where `upcycled_lambda` is "
                f"given. Found {self.upcycled_coefficient!r}."
            )
        if self.upcycled_lambda is not None and self.upcycled_lambda < 0:
            raise ValueError(
                f"`upcycled_lambda` must be >= 0. Found {self.upcycled_lambda!r}."
            )
        coefficient = self.upcycled_coefficient
        if coefficient is not None and not 0 <= coefficient < 1:
            raise ValueError(
                f"`upcycled_coefficient` must be in [0, 1). Found {coefficient!r}."
            )
        self._check_algorithm()
        self.build_schedule()
        self._check_perturbation()

    @property
    def accountant(self) -> accounting.Accountant:
        """What the clients' own epsilons rest on."""
        return accounting.Accountant(self.client_accountant)

    @property
    def is_exact(self) -> bool:
        """Whether clients minimise to a tolerance."""
        return self.local_solver == "exact"

    def _check_algorithm(self) -> None:
        run_flags.check_positive(self, "pfedme_penalty", "pfedme_steps", "pfedme_lr")
        if self.algorithm == "feddyn" and not self.proximal_mu:
            raise ValueError(
                "`proximal_mu` must be positive for feddyn: it is its alpha. Found "
                f"{self.proximal_mu!r}."
            )
        if self.algorithm == "pfedme" and self.proximal_mu:
            raise ValueError(
                "`proximal_mu` must be 0 for pfedme, whose pull is `pfedme_penalty`, "
                "and `upcycled_coefficient` given for even steps. Found "
                f"{self.proximal_mu!r}."
            )
        if self.algorithm == "fednova" and self.mechanism != "none":
            raise ValueError(
                "`algorithm` must not be fednova under a mechanism: clients send a "
                "number of steps beside the update, which a joint clip would let "
                "outweigh it; or set mechanism=none. Found 'fednova'."
            )

    def _check_perturbation(self) -> None:
        run_flags.check_positive(self, "model_clip", "gradient_tolerance")
        for name in ("model_clip", "client_stddev"):
            if (getattr(self, name) or 0) > run_flags.LARGEST_CLIP:
                raise ValueError(
                    f"`{name}` must be at most {run_flags.LARGEST_CLIP:g}, or float32 "
                    f"cannot hold what comes of it. Found {getattr(self, name)!r}."
                )
        if self.gradient_tolerance < MIN_TOLERANCE:
            raise ValueError(
                f"`gradient_tolerance` must be at least {MIN_TOLERANCE:g}: below, the "
                f"solution cannot be checked. Found {self.gradient_tolerance!r}."
            )
        for name in ("client_stddev", "objective_rate", "client_epsilon"):
            if getattr(self, name) is not None:
                run_flags.check_positive(self, name)
        if self.residual_rate is not None:
            run_flags.check_positive(self, "residual_rate")
        if not 0 < self.client_delta < 1:
            raise ValueError(
                f"`client_delta` must be in (0, 1). Found {self.client_delta!r}."
            )
        wanted = _NOISE_FIELDS.get(self.perturbation)
        for name in _NOISE_FIELDS.values():
            if name != wanted and getattr(self, name) is not None:
                raise ValueError(
                    f"`{name}` must be unset with perturbation={self.perturbation}. "
                    f"Found {getattr(self, name)!r}."
                )
        if wanted is None:
            for name, default in (
                ("client_epsilon", None),
                ("local_solver", "sgd"),
                ("client_accountant", "as_published"),
                ("unmet_assumptions", False),
            ):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"`{name}` must be {default} without a perturbation. Found "
                        f"{getattr(self, name)!r}."
                    )
            return
        if self.residual_rate is not None and not (
            self.is_exact and self.perturbation == "objective"
        ):
            raise ValueError(
                "`residual_rate` must be unset unless perturbation is objective and "
                f"local_solver exact. Found {self.residual_rate!r}."
            )
        noise = getattr(self, wanted)
        if (noise is None) == (self.client_epsilon is None):
            raise ValueError(
                f"`{wanted}` or `client_epsilon` must be given with perturbation="
                f"{self.perturbation}, and not both. Found {noise!r} and "
                f"{self.client_epsilon!r}."
            )
        self._check_solver()

    def _check_solver(self) -> None:
        if self.algorithm != "fedavg":
            raise ValueError(
                "`algorithm` must be fedavg (FedAvg, FedProx) with a perturbation: "
                "the accountants know no other that sends or keeps something else. "
                f"Found {self.algorithm!r}."
            )
        if self.perturbation == "objective" and not self.proximal_mu:
            raise ValueError(
                "`proximal_mu` must be positive for objective perturbation. Found "
                f"{self.proximal_mu!r}."
            )
        if self.perturbation == "objective":
            self._check_objective_accountant()
        if self.compare_central:
            raise ValueError(
                "`compare_central` must be off with a perturbation: two models would "
                "be released of the same examples. Found True."
            )
        if not self.is_exact:
            return
        if not self.proximal_mu or self.straggler_rate:
            raise ValueError(
                "`proximal_mu` must be positive and `straggler_rate` 0 for the exact "
                f"solver. Found {self.proximal_mu!r} and {self.straggler_rate!r}."
            )
        if self.accountant is not accounting.Accountant.PROVEN:
            raise ValueError(
                "`client_accountant` must be proven for the exact solver: the others "
                "leave out that its solution is one up to a tolerance. Found "
                f"{self.client_accountant!r}."
            )
        if self.client_failure != "raise":
            raise ValueError(
                "`client_failure` must be raise for the exact solver: who fails "
                f"depends on data. Found {self.client_failure!r}."
            )

    def _check_objective_accountant(self) -> None:
        if self.client_accountant == "replace_one_average":
            raise ValueError(
                "`client_accountant` must be as_published or proven for objective "
                "perturbation. Found 'replace_one_average'."
            )
        if self.client_accountant == "proven" and not self.is_exact:
            raise ValueError(
                "`local_solver` must be exact for a proven epsilon of objective "
                "perturbation, whose theorem is about the exact minimiser; or set "
                f"client_accountant=as_published. Found {self.local_solver!r}."
            )

    def build_schedule(self) -> schedule.Schedule | None:
        """Returns the schedule of the even steps; None for the baseline alone.

        Raises:
            ValueError: If there is no proximal term and no coefficient.
        """
        if not self.upcycled:
            return None
        if self.upcycled_coefficient is not None:
            if self.lambda_schedule != "constant":
                raise ValueError(
                    "`lambda_schedule` must be constant with `upcycled_coefficient`. "
                    f"Found {self.lambda_schedule!r}."
                )
            return schedule.ConstantCoefficient(coefficient=self.upcycled_coefficient)
        if not self.proximal_mu:
            raise ValueError(
                "`proximal_mu` must be positive: the coefficient mu / (mu + lambda) "
                "would be 0; without a proximal term give `upcycled_coefficient`. "
                f"Found {self.proximal_mu!r}."
            )
        value = self.upcycled_lambda
        value = _DEFAULT_LAMBDA if value is None else value
        if self.lambda_schedule == "increasing":
            return schedule.IncreasingLambda(mu=self.proximal_mu, initial_lambda=value)
        return schedule.ConstantLambda(mu=self.proximal_mu, lambda_value=value)
