"""The configuration of run_centaur_comparison: a run's, and what is compared and tuned.

The rule of the budget is in `scripts/run_centaur_comparison.py`.
"""

import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from scripts.axis_flag import check_axis
from scripts.centaur_config import OWN_FIELDS, CentaurConfig, Method

MIN_SEEDS = 2
# Whose updates --diagnose measures.
DIAGNOSED = (Method.CENTAUR, Method.FEDAVG_FB, Method.PPSGD_AUTHORS)
_DEFAULT_FOLDER = "centaur_comparison"
# Settings of one run, by the names of their flags.
Point = Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a comparison.

    Attributes:
        method: What is trained.
        epsilon: Its budget; inf for no noise, None where nothing is sent.
        seed: Its root seed.
        point: Its settings.
        is_trial: Whether it is one that settings are chosen by.
        measures: Whether it is one that is made once more, to measure what is sent.
    """

    method: Method
    epsilon: float | None
    seed: int
    point: Point
    is_trial: bool = False
    measures: bool = False

    @property
    def is_private(self) -> bool:
        """Whether there is noise."""
        return self.epsilon is not None and math.isfinite(self.epsilon)

    @property
    def name(self) -> str:
        """The name of its folder."""
        parts = ["tuning"] * self.is_trial + ["diagnosis"] * self.measures
        parts.append(self.method.value)
        if self.epsilon is not None:
            parts.append(f"epsilon{self.epsilon:g}")
        parts += [f"{name}{value:g}" for name, value in self.point.items()]
        return "-".join([*parts, f"seed{self.seed}"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonConfig(CentaurConfig):
    """What a comparison is told: all of a run, and what is compared and tuned."""

    # Of each run another.
    method: str = dataclasses.field(init=False, default=Method.CENTAUR.value)
    epsilon: float = dataclasses.field(init=False, default=1.0)
    seed: int | None = dataclasses.field(init=False, default=None)
    measure_updates: bool = dataclasses.field(init=False, default=False)
    evaluate_test: bool = dataclasses.field(init=False, default=True)
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    tuning_seed: int
    epsilons: tuple[float, ...]
    tuning_epsilon: float | None
    tune_each_epsilon: bool
    grid_client_lrs: tuple[float, ...] | None
    grid_head_lrs: tuple[float, ...] | None
    grid_clips: tuple[float, ...] | None
    grid_stand_alone_lrs: tuple[float, ...] | None
    grid_stand_alone_epochs: tuple[int, ...] | None
    diagnose: bool
    parallel_runs: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("methods", "seeds", "epsilons"):
            check_axis(name, getattr(self, name))
        if len(self.seeds) < MIN_SEEDS:
            raise ValueError(
                f"`seeds` must be at least {MIN_SEEDS}, for an interval. Found "
                f"{self.seeds!r}."
            )
        if self.tuning_seed in self.seeds:
            raise ValueError(
                "`tuning_seed` must not be among `seeds`, which are reported. Found "
                f"{self.tuning_seed!r}."
            )
        if not all(epsilon > 0 for epsilon in self.epsilons):
            raise ValueError(
                f"`epsilons` must be positive numbers or inf. Found {self.epsilons!r}."
            )
        if self.tuning_epsilon is not None:
            if not self.tuning_epsilon > 0:
                raise ValueError(
                    f"`tuning_epsilon` must be positive. Found {self.tuning_epsilon!r}."
                )
            if math.isinf(self.tuning_epsilon) and self.grid_clips is not None:
                if any(map(math.isfinite, self.epsilons)):
                    raise ValueError(
                        "`tuning_epsilon` must be finite where `grid_clips` has clips "
                        "to choose from: without noise nothing is clipped. Found "
                        f"{self.tuning_epsilon!r}."
                    )
            if self.tune_each_epsilon:
                raise ValueError(
                    "`tuning_epsilon` must be unset with `tune_each_epsilon`. Found "
                    f"{self.tuning_epsilon!r}."
                )
        if self.mechanism == "none":
            raise ValueError(
                "`mechanism` must add noise in a comparison; give `epsilons` an inf "
                "for what is without. Found 'none'."
            )
        if not self.keeps_diagnostics or self.compare_central:
            raise ValueError(
                "`diagnostics` must be on and `compare_central` off in a comparison. "
                f"Found {self.diagnostics!r} and {self.compare_central!r}."
            )
        if self.diagnose and self.adaptive_clip:
            raise ValueError("`diagnose` must be off with `adaptive_clip`. Found True.")
        if self.diagnose and not set(DIAGNOSED).intersection(self.method_kinds):
            names = ", ".join(method.value for method in DIAGNOSED)
            raise ValueError(
                f"`diagnose` must be off without any of the methods {names}. Found "
                f"{self.methods!r}."
            )
        cores = os.cpu_count() or 1
        if self.parallel_runs > cores:
            raise ValueError(
                f"`parallel_runs` must be at most the number of cores, {cores}. Found "
                f"{self.parallel_runs!r}."
            )
        self._check_grids()

    @property
    def method_kinds(self) -> tuple[Method, ...]:
        """What is compared."""
        return tuple(Method(name) for name in self.methods)

    @property
    def tuned_epsilons(self) -> tuple[float, ...]:
        """The epsilons that settings are chosen at."""
        if self.tune_each_epsilon:
            return self.epsilons
        if self.tuning_epsilon is not None:
            return (self.tuning_epsilon,)
        # Without noise there is no clip to choose.
        return (next(filter(math.isfinite, self.epsilons), math.inf),)

    @property
    def shown_epsilon(self) -> float:
        """The epsilon of what is shown of one alone: where settings are chosen."""
        tuned = self.tuned_epsilons[0]
        return tuned if tuned in self.epsilons else self.epsilons[0]

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the comparison, which holds those of its runs."""
        return pathlib.Path(self.output_root) / (self.experiment or _DEFAULT_FOLDER)

    @property
    def budget(self) -> int:
        """The grid points of a method; a clip is among the axes unless none is used."""
        return math.prod(
            len(axis) for axis in self._list_shared_axes(min(self.tuned_epsilons))
        )

    def get_tuned_epsilon(self, method: Method, epsilon: float) -> float | None:
        """Returns where the settings of a method at an epsilon are chosen."""
        if method is Method.STAND_ALONE:
            return None
        return epsilon if self.tune_each_epsilon else self.tuned_epsilons[0]

    def list_axes(
        self, method: Method, epsilon: float | None
    ) -> dict[str, tuple[float, ...]]:
        """Returns the axes of a method's grid: names of flags, and their values.

        Args:
            method: The method.
            epsilon: Where it is tuned, inf without noise; None for STAND_ALONE.
        """
        if method is not Method.STAND_ALONE:
            assert epsilon is not None
            names = ("client_lr", "head_lr", "clip")
            # Nothing is clipped at epsilon inf.
            return dict(zip(names, self._list_shared_axes(epsilon), strict=False))
        rates = self.grid_stand_alone_lrs or self.grid_client_lrs or (self.client_lr,)
        epochs = self.grid_stand_alone_epochs or tuple(
            self.stand_alone_epochs // 2**power
            for power in range(self.budget // len(rates))
        )
        return {"client_lr": rates, "stand_alone_epochs": epochs}

    def list_points(self, method: Method, epsilon: float | None) -> list[Point]:
        """Returns a method's grid. See `list_axes`."""
        axes = self.list_axes(method, epsilon)
        return [
            dict(zip(axes, values, strict=True))
            for values in itertools.product(*axes.values())
        ]

    def plan_run(
        self,
        method: Method,
        epsilon: float,
        seed: int,
        point: Point,
        *,
        is_trial: bool = False,
    ) -> Run:
        """Returns a run: of a point, what there is a use for at an epsilon."""
        if method is Method.STAND_ALONE:
            return Run(
                method=method, epsilon=None, seed=seed, point=point, is_trial=is_trial
            )
        kept = {
            name: value
            for name, value in point.items()
            if name != "clip" or math.isfinite(epsilon)
        }
        return Run(
            method=method, epsilon=epsilon, seed=seed, point=kept, is_trial=is_trial
        )

    def build_run(self, run: Run) -> CentaurConfig:
        """Returns the configuration of one run."""
        values: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(CentaurConfig)
            if field.init
        }
        for name, (methods, default) in OWN_FIELDS.items():
            if run.method not in methods:
                values[name] = default
        if not run.is_private:
            values.update(mechanism="none", adaptive_clip=False)
        if run.method is Method.STAND_ALONE:
            values["total_rounds"] = 1
        if run.is_trial:
            # What is looked at is its end.
            values["eval_every"] = values["total_rounds"]
        values.update(
            run.point,
            method=run.method.value,
            epsilon=run.epsilon if run.is_private else self.epsilon,
            seed=run.seed,
            measure_updates=run.measures,
            # Of a trial nothing but the validation parts is looked at.
            evaluate_test=not run.is_trial,
            output_root=str(self.folder),
            experiment=run.name,
        )
        return CentaurConfig(**values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that decide the result."""
        values = super().to_dict()
        # Of each run another, or without an effect on what it comes to.
        for name in (
            "method",
            "epsilon",
            "measure_updates",
            "evaluate_test",
            "parallel_runs",
        ):
            del values[name]
        return values

    def list_common(self) -> dict[str, Any]:
        """Returns the fields that all runs of a folder have in common."""
        names = {field.name for field in dataclasses.fields(CentaurConfig)}
        return {name: value for name, value in self.to_dict().items() if name in names}

    def _list_shared_axes(self, epsilon: float) -> tuple[tuple[float, ...], ...]:
        """Returns the values of all axes but stand-alone's."""
        clips = () if math.isinf(epsilon) else (self.grid_clips or (self.clip,),)
        return (
            self.grid_client_lrs or (self.client_lr,),
            self.grid_head_lrs or (self.head_lr,),
            *clips,
        )

    def _check_own_fields(self) -> None:
        """Looks at nothing: each method of a comparison takes its own fields."""

    def _check_grids(self) -> None:
        """Raises ValueError for a bad value, or unequal budgets."""
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            if not field.name.startswith("grid_") or values is None:
                continue
            check_axis(field.name, values)
            if not all(0 < value < math.inf for value in values):
                raise ValueError(
                    f"`{field.name}` must hold positive numbers. Found {values!r}."
                )
        for method in self.method_kinds:
            if method is Method.STAND_ALONE:
                self._check_stand_alone_grid()
            for epsilon in self.epsilons:
                tuned = self.get_tuned_epsilon(method, epsilon)
                point = self.list_points(method, tuned)[0]
                # A bad value of a run is found before the first one begins.
                self.build_run(self.plan_run(method, epsilon, self.seeds[0], point))

    def _check_stand_alone_grid(self) -> None:
        axes = self.list_axes(Method.STAND_ALONE, None)
        epochs = axes["stand_alone_epochs"]
        count = len(axes["client_lr"]) * len(epochs)
        if count != self.budget or len(set(epochs)) < len(epochs) or min(epochs) < 1:
            raise ValueError(
                "`grid_stand_alone_epochs` must make as many points with the learning "
                f"rates as other methods have, {self.budget}: give other ones, or "
                "`grid_stand_alone_lrs`, or leave both unset with a "
                "`stand_alone_epochs` that can be halved often enough. Found "
                f"{len(axes['client_lr'])} learning rates and epochs {epochs}."
            )
