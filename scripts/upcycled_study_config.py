"""The configuration of run_upcycled_study, one field for each flag, and its runs."""

import dataclasses
import enum
import itertools
import math
from collections.abc import Mapping
from typing import Any

from scripts import axis_flag
from scripts import flags as run_flags
from scripts.upcycled_study_paper import DATA_NAMES, LAMBDAS

# Where an output goes does not decide what is in it; of files the digest does.
_LOCATION_FIELDS = ("output_root", "experiment", "data_folder")
_AXES = (
    "data",
    "mu",
    "seeds",
    "client_lr_grid",
    "server_factor_grid",
    "lambda_grid",
)


class Study(enum.Enum):
    """What is measured.

    TABLE1: The paper's Table 1, synthetic data.
    CLAIMS: Whether Upcycled-FL leads FedProx with and without a server learning rate.
    FIGURES: Convergence, and the effect of lambda.
    PRIVATE: Accuracy and epsilon under clients' own noise, the paper's figure 3.
    """

    TABLE1 = "table1"
    CLAIMS = "claims"
    FIGURES = "figures"
    PRIVATE = "private"


class Noise(enum.Enum):
    """Where clients add noise of their own."""

    OUTPUT = "output"
    OBJECTIVE = "objective"


class Loss(enum.Enum):
    """What clients minimise.

    CROSS_ENTROPY: Cross entropy of the softmax of the model's outputs.
    DOUBLE_SOFTMAX: The authors' program's: of the softmax of that softmax.
    """

    CROSS_ENTROPY = "cross_entropy"
    DOUBLE_SOFTMAX = "double_softmax"


class InitialWeights(enum.Enum):
    """The weights before the first round.

    ZEROS: Zero.
    UNIFORM: PyTorch's default, in +-1 / sqrt(number of features), for each seed.
    """

    ZEROS = "zeros"
    UNIFORM = "uniform"


class Algorithm(enum.Enum):
    """What is trained. FedProx may have a server learning rate."""

    FEDAVG = "fedavg"
    FEDPROX = "fedprox"
    UPCYCLED = "upcycled"

    @property
    def title(self) -> str:
        """Its name in outputs."""
        return _TITLES[self]


_TITLES = {
    Algorithm.FEDAVG: "FedAvg",
    Algorithm.FEDPROX: "FedProx",
    Algorithm.UPCYCLED: "Upcycled-FL",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training of a study.

    Attributes:
        data: The data set, one of DATA_NAMES.
        algorithm: What is trained.
        client_lr: The learning rate of the clients.
        seed: The root seed: cohorts, stragglers, batches.
        rounds: Rounds with clients.
        mu: The strength of the proximal term; 0 for FedAvg alone.
        lambda_value: lambda of the even steps; None without them.
        server_factor: The server's learning rate; 1 is the baseline itself.
        noise: Where clients add noise; None for none.
        noise_level: sigma of output noise, alpha of the objective's.
    """

    data: str
    algorithm: Algorithm
    client_lr: float
    seed: int
    rounds: int
    mu: float = 0.0
    lambda_value: float | None = None
    server_factor: float = 1.0
    noise: Noise | None = None
    noise_level: float | None = None

    def __post_init__(self) -> None:
        if (self.mu == 0) is not (self.algorithm is Algorithm.FEDAVG):
            raise ValueError(
                f"`mu` must be 0 for FedAvg and positive for others. Found {self.mu!r}."
            )
        if (self.lambda_value is None) is (self.algorithm is Algorithm.UPCYCLED):
            raise ValueError(
                "`lambda_value` must be given for Upcycled-FL alone. Found "
                f"{self.lambda_value!r}."
            )
        if self.server_factor != 1 and self.algorithm is not Algorithm.FEDPROX:
            raise ValueError(
                "`server_factor` must be 1 except for FedProx. Found "
                f"{self.server_factor!r}."
            )

    @property
    def key(self) -> str:
        """Its name among the runs of a study, and that of its file."""
        parts = [self.data, self.algorithm.value]
        if self.mu:
            parts.append(f"mu{self.mu!r}")
        if self.lambda_value is not None:
            parts.append(f"lambda{self.lambda_value!r}")
        if self.server_factor != 1:
            parts.append(f"server{self.server_factor!r}")
        if self.noise is not None:
            parts.append(f"{self.noise.value}{self.noise_level!r}x{self.rounds}")
        return "-".join([*parts, f"lr{self.client_lr!r}", f"seed{self.seed}"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """What a study is told. The fields are the flags of run_upcycled_study."""

    study: str
    data_folder: str | None
    data: tuple[str, ...]
    mu: tuple[float, ...]
    upcycled_lambda: tuple[float, ...] | None
    seeds: tuple[int, ...]
    client_lr_grid: tuple[float, ...]
    server_factor_grid: tuple[float, ...]
    lambda_grid: tuple[float, ...]
    loss: str
    client_lr: float | None
    initial_weights: str
    selection_seed: int
    total_rounds: int
    clients_per_round: int
    client_epochs: int
    batch_size: int
    data_seed: int
    straggler_rate: float
    client_momentum: float
    noises: tuple[str, ...]
    noise_levels: tuple[float, ...]
    baseline_noise_levels: tuple[float, ...]
    model_clip: float
    client_delta: float
    equal_epsilon: bool
    output_root: str
    experiment: str | None

    def __post_init__(self) -> None:
        for name in _AXES:
            axis_flag.check_axis(name, getattr(self, name))
        for data in self.data:
            if data not in DATA_NAMES:
                raise ValueError(
                    f"`data` must be one of {', '.join(DATA_NAMES)}. Found {data!r}."
                )
        for name in ("mu", "client_lr_grid", "server_factor_grid", "lambda_grid"):
            for value in getattr(self, name):
                _check_positive(name, value)
        if self.client_lr is not None:
            _check_positive("client_lr", self.client_lr)
        for name in (
            "total_rounds",
            "clients_per_round",
            "client_epochs",
            "batch_size",
        ):
            run_flags.check_positive(self, name)
        for name in ("straggler_rate", "client_momentum"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"`{name}` must be in [0, 1). Found {value!r}.")
        for name in ("selection_seed", "data_seed"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"`{name}` must be >= 0. Found {getattr(self, name)!r}."
                )
        self._check_lambda()
        if self.selection_seed in self.seeds:
            raise ValueError(
                "`selection_seed` must not be among `seeds`: learning rates are chosen "
                f"on runs that are not reported. Found {self.selection_seed!r}."
            )
        if self.kind in (Study.CLAIMS, Study.PRIVATE):
            self._check_claims()
        for name in ("noise_levels", "baseline_noise_levels"):
            if len(getattr(self, name)) != len(self.noises):
                raise ValueError(
                    f"`{name}` must have a value for each of `noises`. Found "
                    f"{getattr(self, name)!r}."
                )
            for value in getattr(self, name):
                _check_positive(name, value)
        _check_positive("model_clip", self.model_clip)
        if not 0 < self.client_delta < 1:
            raise ValueError(
                f"`client_delta` must be in (0, 1). Found {self.client_delta!r}."
            )
        if self.experiment is not None:
            run_flags.check_experiment(self.experiment)
        if not self.output_root:
            raise ValueError("`output_root` must not be empty.")

    @property
    def kind(self) -> Study:
        """The study."""
        return Study(self.study)

    @property
    def lambdas(self) -> Mapping[float, float]:
        """lambda of each mu."""
        if self.upcycled_lambda is None:
            return {mu: LAMBDAS[mu] for mu in self.mu}
        return dict(zip(self.mu, self.upcycled_lambda, strict=True))

    @property
    def is_authors_setting(self) -> bool:
        """Whether loss, learning rate and work are those of the paper's Table 1.

        The loss is the authors' program's, which the paper does not name.
        """
        return (
            self.loss == Loss.DOUBLE_SOFTMAX.value
            and self.client_lr == 0.05
            and (self.total_rounds, self.clients_per_round) == (80, 9)
            and (self.client_epochs, self.batch_size) == (20, 32)
            and (self.straggler_rate, self.client_momentum) == (0.9, 0.5)
            and all(LAMBDAS.get(mu) == value for mu, value in self.lambdas.items())
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that decide the result."""
        values = dataclasses.asdict(self)
        for name in _LOCATION_FIELDS:
            del values[name]
        return values

    def build_run(self, data: str, algorithm: Algorithm, **choices: Any) -> Run:
        """Returns a run of the study's rounds, Upcycled-FL's with the lambda of mu."""
        if algorithm is Algorithm.UPCYCLED and "lambda_value" not in choices:
            choices["lambda_value"] = self.lambdas[choices["mu"]]
        choices.setdefault("rounds", self.total_rounds)
        return Run(data=data, algorithm=algorithm, **choices)

    def _check_lambda(self) -> None:
        if self.upcycled_lambda is None:
            for mu in self.mu:
                if mu not in LAMBDAS:
                    raise ValueError(
                        "`upcycled_lambda` must be given where the paper has none, a "
                        f"value for each mu. Found mu = {mu!r}."
                    )
            return
        if len(self.upcycled_lambda) != len(self.mu):
            raise ValueError(
                f"`upcycled_lambda` must have a value for each of {len(self.mu)} mu. "
                f"Found {self.upcycled_lambda!r}."
            )
        for value in self.upcycled_lambda:
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"`upcycled_lambda` must be finite and >= 0. Found {value!r}."
                )

    def _check_claims(self) -> None:
        if len(self.seeds) < 2:
            raise ValueError(
                f"`seeds` must be at least 2 for --study={self.study}, or there is no "
                f"interval. Found {self.seeds!r}."
            )
        if self.total_rounds % 2:
            raise ValueError(
                f"`total_rounds` must be even for --study={self.study}: at equal "
                "server steps Upcycled-FL has half of the rounds. Found "
                f"{self.total_rounds!r}."
            )


def list_selection_runs(config: StudyConfig) -> list[Run]:
    """Returns FedProx at every client learning rate, on the selection seed."""
    if config.client_lr is not None:
        return []
    return [
        config.build_run(
            data,
            Algorithm.FEDPROX,
            mu=mu,
            client_lr=rate,
            seed=config.selection_seed,
        )
        for data, rate, mu in itertools.product(
            config.data, config.client_lr_grid, config.mu
        )
    ]


def list_table_runs(config: StudyConfig, rates: Mapping[str, float]) -> list[Run]:
    """Returns FedAvg, and FedProx and Upcycled-FL at every mu, for all data and seeds.

    Args:
        config: The configuration.
        rates: The client learning rate of each data set.
    """
    runs = []
    for data, seed in itertools.product(config.data, config.seeds):
        common: dict[str, Any] = {"client_lr": rates[data], "seed": seed}
        runs.append(config.build_run(data, Algorithm.FEDAVG, **common))
        runs += [
            config.build_run(data, algorithm, mu=mu, **common)
            for algorithm in (Algorithm.FEDPROX, Algorithm.UPCYCLED)
            for mu in config.mu
        ]
    return runs


def list_factor_runs(config: StudyConfig, rates: Mapping[str, float]) -> list[Run]:
    """Returns FedProx at every server learning rate, on the selection seed."""
    return [
        config.build_run(
            data,
            Algorithm.FEDPROX,
            mu=mu,
            server_factor=factor,
            client_lr=rates[data],
            seed=config.selection_seed,
        )
        for data, mu, factor in itertools.product(
            config.data, config.mu, config.server_factor_grid
        )
    ]


def list_claim_runs(
    config: StudyConfig,
    rates: Mapping[str, float],
    factors: Mapping[tuple[str, float], float],
) -> list[Run]:
    """Returns Upcycled-FL, FedProx, and FedProx with its factor, each run once."""
    runs = []
    for data, seed, mu in itertools.product(config.data, config.seeds, config.mu):
        common: dict[str, Any] = {"mu": mu, "client_lr": rates[data], "seed": seed}
        runs.append(config.build_run(data, Algorithm.UPCYCLED, **common))
        runs += [
            config.build_run(data, Algorithm.FEDPROX, server_factor=factor, **common)
            for factor in dict.fromkeys((1.0, factors[data, mu]))
        ]
    return runs


def list_lambda_runs(config: StudyConfig, rates: Mapping[str, float]) -> list[Run]:
    """Returns Upcycled-FL at every mu and lambda of the grid, for all data, seeds."""
    return [
        config.build_run(
            data,
            Algorithm.UPCYCLED,
            mu=mu,
            lambda_value=value,
            client_lr=rates[data],
            seed=seed,
        )
        for data, seed, mu, value in itertools.product(
            config.data, config.seeds, config.mu, config.lambda_grid
        )
    ]


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be positive and finite. Found {value!r}.")
