"""The configuration of run_upcycled_comparison: a run's, and what is compared."""

import dataclasses
import enum
import pathlib
from typing import Any

from scripts.upcycled_config import UpcycledConfig

MIN_SEEDS = 2
_DEFAULT_FOLDER = "upcycled_comparison"


class Variant(enum.Enum):
    """What is trained, at the same epsilon and delta each.

    T is `total_rounds`, and half of it the rounds with clients of T server steps of
    Upcycled-FL. TUNED is the baseline with the best server learning rate of the grid.
    """

    BASELINE = "baseline, T rounds"
    UPCYCLED = "Upcycled, T rounds"
    TUNED = "tuned server rate, T rounds"
    BASELINE_HALF = "baseline, T/2 rounds"
    UPCYCLED_HALF = "Upcycled, T/2 rounds"
    TUNED_HALF = "tuned server rate, T/2 rounds"

    @property
    def is_half(self) -> bool:
        """Whether it has half of the rounds with clients."""
        return self.name.endswith("_HALF")

    @property
    def is_upcycled(self) -> bool:
        """Whether the server makes steps of its own."""
        return self.name.startswith("UPCYCLED")

    @property
    def is_tuned(self) -> bool:
        """Whether its server learning rate is chosen."""
        return self.name.startswith("TUNED")


# First minus second; and what both have as much of, beside epsilon and delta.
PAIRS = (
    (Variant.UPCYCLED, Variant.BASELINE, "equal client rounds"),
    (Variant.UPCYCLED, Variant.TUNED, "equal client rounds"),
    (Variant.UPCYCLED_HALF, Variant.BASELINE, "equal server steps"),
    (Variant.UPCYCLED_HALF, Variant.TUNED, "equal server steps"),
    (Variant.UPCYCLED_HALF, Variant.BASELINE_HALF, "equal client rounds, T/2"),
    (Variant.UPCYCLED_HALF, Variant.TUNED_HALF, "equal client rounds, T/2"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonConfig(UpcycledConfig):
    """What a comparison is told: all of a run, its seeds, and the server's rates."""

    seeds: tuple[int, ...]
    tuning_seed: int
    server_lrs: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is not None:
            raise ValueError(
                f"`seed` must be unset: give `seeds`. Found {self.seed!r}."
            )
        if not self.upcycled:
            raise ValueError("`upcycled` must be true in a comparison. Found False.")
        if self.total_rounds < 2 or self.total_rounds % 2:
            raise ValueError(
                f"`total_rounds` must be even. Found {self.total_rounds!r}."
            )
        if len(set(self.seeds)) != len(self.seeds) or len(self.seeds) < MIN_SEEDS:
            raise ValueError(
                f"`seeds` must be at least {MIN_SEEDS} different ones. Found "
                f"{self.seeds!r}."
            )
        if self.tuning_seed in self.seeds:
            raise ValueError(
                "`tuning_seed` must not be among `seeds`, which are reported. Found "
                f"{self.tuning_seed!r}."
            )
        if not self.server_lrs or not all(0 < rate < 1e6 for rate in self.server_lrs):
            raise ValueError(
                f"`server_lrs` must be positive numbers. Found {self.server_lrs!r}."
            )
        if self.perturbation != "none" and (
            self.client_epsilon is None or self.mechanism != "none"
        ):
            raise ValueError(
                "`client_epsilon` must be given with a perturbation in a comparison, "
                "where noise is found for each variant, and mechanism=none. Found "
                f"{self.client_epsilon!r} and mechanism={self.mechanism!r}."
            )
        if not self.keeps_diagnostics or self.compare_central:
            raise ValueError(
                "`diagnostics` must be on and `compare_central` off in a comparison. "
                f"Found {self.diagnostics!r} and {self.compare_central!r}."
            )

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the comparison, which holds those of its runs."""
        return pathlib.Path(self.output_root) / (self.experiment or _DEFAULT_FOLDER)

    def build_run(
        self, variant: Variant, seed: int, *, server_lr: float | None = None
    ) -> UpcycledConfig:
        """Returns the configuration of one run.

        Args:
            variant: What is trained.
            seed: Its root seed.
            server_lr: The chosen rate; None for the one that is given.
        """
        values: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(UpcycledConfig)
        }
        rate = self.server_lr if server_lr is None else server_lr
        values.update(
            seed=seed,
            server_lr=rate,
            output_root=str(self.folder),
            experiment=f"{variant.name.lower()}-server_lr{rate:g}-seed{seed}",
        )
        if variant.is_half:
            values["total_rounds"] = self.total_rounds // 2
        if not variant.is_upcycled:
            values.update(
                upcycled=False,
                upcycled_lambda=None,
                upcycled_coefficient=None,
                lambda_schedule="constant",
            )
        return UpcycledConfig(**values)
