"""The configuration of run_mean_estimation, one field for each flag, and its grid."""

import dataclasses
import itertools
import math
from typing import Any

from distributed_dp.accounting import Mechanism, NormBound
from scripts import axis_flag
from scripts import flags as run_flags

MECHANISMS = tuple(mechanism.value for mechanism in Mechanism)
NORM_BOUNDS = tuple(bound.value for bound in NormBound)
# The values of distributed_dp.rotation.RotationKind, whose module needs TensorFlow.
ROTATIONS = (
    "hadamard",
    "hadamard_power_of_two",
    "dft",
    "dft_uniform_phase",
    "identity",
)
# Where an output goes, and how many threads made it, does not decide what is in it.
_LOCATION_FIELDS = ("output_root", "experiment", "seed", "workers")
_GRID_FIELDS = (
    "mechanism",
    "rotation",
    "norm_bound",
    "num_clients",
    "dim",
    "clip",
    "num_stddevs",
    "bits",
    "epsilon",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the central Gaussian depends on, too.

    Attributes:
        num_clients: n, all of whom take part.
        dim: d, the length of the vectors.
        clip: c, the clip and the norm of every vector.
        epsilon: The target.
    """

    num_clients: int
    dim: int
    clip: float
    epsilon: float

    @property
    def population(self) -> tuple[int, int, float]:
        """What the vectors depend on: (n, d, c)."""
        return self.num_clients, self.dim, self.clip

    @property
    def key(self) -> str:
        """Its name among the streams of randomness."""
        return f"n={self.num_clients}/d={self.dim}/c={self.clip!r}/eps={self.epsilon!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the grid.

    Attributes:
        mechanism: The noise.
        rotation: The flattening, a value of RotationKind; None for the Gaussian.
        norm_bound: What calibration assumes of the sum; None for the Gaussian.
        setting: Clients, dimension, clip and epsilon.
        num_stddevs: k; None for the Gaussian.
        bits: B; None for the Gaussian.
    """

    mechanism: Mechanism
    rotation: str | None
    norm_bound: NormBound | None
    setting: Setting
    num_stddevs: float | None
    bits: int | None

    @property
    def key(self) -> str:
        """Its name among the streams of randomness: no two cells share one."""
        bound = None if self.norm_bound is None else self.norm_bound.value
        return (
            f"{self.mechanism.value}/{self.rotation}/{bound}/k={self.num_stddevs!r}/"
            f"B={self.bits!r}/{self.setting.key}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """What a study is told. The fields are the flags of run_mean_estimation.

    A tuple is an axis of the grid; every combination is measured.
    """

    mechanism: tuple[str, ...]
    rotation: tuple[str, ...]
    norm_bound: tuple[str, ...]
    num_clients: tuple[int, ...]
    dim: tuple[int, ...]
    clip: tuple[float, ...]
    num_stddevs: tuple[float, ...]
    bits: tuple[int, ...]
    epsilon: tuple[float, ...]
    delta: float
    beta: float
    repeats: int
    seed: int | None
    workers: int | None
    output_root: str
    experiment: str | None

    def __post_init__(self) -> None:
        for name in _GRID_FIELDS:
            axis_flag.check_axis(name, getattr(self, name))
        _check_choices("mechanism", self.mechanism, MECHANISMS)
        _check_choices("rotation", self.rotation, ROTATIONS)
        _check_choices("norm_bound", self.norm_bound, NORM_BOUNDS)
        for name in ("num_clients", "dim"):
            _check_range(name, getattr(self, name), low=1)
        _check_range("bits", self.bits, low=1, high=run_flags.MAX_BITS)
        for name in ("clip", "num_stddevs", "epsilon"):
            for value in getattr(self, name):
                if not 0 < value < math.inf:
                    raise ValueError(
                        f"`{name}` must be positive and finite. Found {value!r}."
                    )
        if not 0 < self.delta < 1:
            raise ValueError(f"`delta` must be in (0, 1). Found {self.delta!r}.")
        if not 0 <= self.beta < 1:
            raise ValueError(f"`beta` must be in [0, 1). Found {self.beta!r}.")
        if self.repeats < 2:
            raise ValueError(
                "`repeats` must be at least 2, or there is no interval. Found "
                f"{self.repeats!r}."
            )
        if self.workers is not None:
            run_flags.check_positive(self, "workers")
        for value in self.clip:
            run_flags.check_clip(value)
        if self.experiment is not None:
            run_flags.check_experiment(self.experiment)
        if not self.output_root:
            raise ValueError("`output_root` must not be empty.")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that decide the result."""
        values = dataclasses.asdict(self)
        for name in _LOCATION_FIELDS:
            del values[name]
        return values


def build_cells(config: StudyConfig) -> list[Cell]:
    """Returns the points of the grid, in the order of the CSV.

    The central Gaussian has no rotation, norm bound, k or bits: it appears once for
    each of the other axes.
    """
    cells = []
    for mechanism in map(Mechanism, config.mechanism):
        central = mechanism is Mechanism.GAUSSIAN
        none = (None,)
        rotations: tuple[str | None, ...] = none if central else config.rotation
        bounds: tuple[NormBound | None, ...] = (
            none if central else tuple(map(NormBound, config.norm_bound))
        )
        widths: tuple[float | None, ...] = none if central else config.num_stddevs
        bits: tuple[int | None, ...] = none if central else config.bits
        for rotation, bound in itertools.product(rotations, bounds):
            for population in itertools.product(
                config.num_clients, config.dim, config.clip
            ):
                for width, count, epsilon in itertools.product(
                    widths, bits, config.epsilon
                ):
                    cells.append(
                        Cell(
                            mechanism=mechanism,
                            rotation=rotation,
                            norm_bound=bound,
                            setting=Setting(*population, epsilon),
                            num_stddevs=width,
                            bits=count,
                        )
                    )
    return cells


def _check_choices(
    name: str, values: tuple[str, ...], choices: tuple[str, ...]
) -> None:
    for value in values:
        if value not in choices:
            raise ValueError(
                f"`{name}` must be one of {', '.join(choices)}. Found {value!r}."
            )


def _check_range(
    name: str, values: tuple[int, ...], *, low: int, high: int | None = None
) -> None:
    for value in values:
        if value < low or (high is not None and value > high):
            rule = f"at least {low}" if high is None else f"in [{low}, {high}]"
            raise ValueError(f"`{name}` must be {rule}. Found {value!r}.")
