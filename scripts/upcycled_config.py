"""The configuration of run_upcycled_fl: TrainingConfig, and the even steps."""

import dataclasses

from scripts.training_config import TrainingConfig
from upcycled_fl import schedule

_DEFAULT_LAMBDA = 0.12


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpcycledConfig(TrainingConfig):
    """What a run is told. The fields are the flags of scripts/run_upcycled_fl.py."""

    upcycled: bool
    upcycled_lambda: float | None
    lambda_schedule: str
    upcycled_coefficient: float | None

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
        self.build_schedule()

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
