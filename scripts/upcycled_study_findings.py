"""What a study of run_upcycled_study found: means over seeds, beside the paper's."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from scripts import upcycled_study_paper
from scripts.upcycled_study_claims import Comparison
from scripts.upcycled_study_config import Algorithm, Run, StudyConfig
from scripts.upcycled_study_curve import Curve
from scripts.upcycled_study_data import StudyData
from scripts.upcycled_study_private import PrivateRow

GENERATED = "GENERATED data, not the authors'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What was trained and found.

    Attributes:
        config: The configuration.
        data: The data sets, by name.
        rates: The client learning rate of each data set.
        factors: FedProx's server learning rate for each (data, mu), of claims alone.
        runs: The runs, by their keys.
        curves: What they left, by their keys.
        comparisons: Those of claims; none of other studies.
        private_rows: Those of the private study; none of other studies.
    """

    config: StudyConfig
    data: Mapping[str, StudyData]
    rates: Mapping[str, float]
    factors: Mapping[tuple[str, float], float]
    runs: Mapping[str, Run]
    curves: Mapping[str, Curve]
    comparisons: Sequence[Comparison]
    private_rows: Sequence[PrivateRow] = ()

    @property
    def is_generated(self) -> bool:
        """Whether the data are made up here."""
        return any(one.is_generated for one in self.data.values())

    def list_curves(
        self,
        data: str,
        algorithm: Algorithm,
        *,
        mu: float = 0.0,
        lambda_value: float | None = None,
        server_factor: float = 1.0,
    ) -> list[Curve]:
        """Returns the curves of a setting, one a reported seed.

        Args:
            data: The data set.
            algorithm: What was trained.
            mu: The strength of the proximal term.
            lambda_value: lambda; None for that of mu.
            server_factor: The server's learning rate.
        """
        choices = {} if lambda_value is None else {"lambda_value": lambda_value}
        return [
            self.curves[
                self.config.build_run(
                    data,
                    algorithm,
                    mu=mu,
                    client_lr=self.rates[data],
                    server_factor=server_factor,
                    seed=seed,
                    **choices,
                ).key
            ]
            for seed in self.config.seeds
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and standard deviation over seeds, in percent.

    Attributes:
        mean: The mean.
        stddev: The standard deviation; None of one seed.
    """

    mean: float
    stddev: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRow:
    """Final accuracies of one setting.

    Attributes:
        data: The data set.
        algorithm: What was trained.
        mu: The strength of the proximal term.
        lambda_value: lambda; None without even steps.
        train: Training accuracy.
        test: Test accuracy.
        paper: What the paper has, where it has the setting.
        program: What the authors' program gave, likewise.
    """

    data: str
    algorithm: Algorithm
    mu: float
    lambda_value: float | None
    train: Spread
    test: Spread
    paper: upcycled_study_paper.Accuracy | None = None
    program: upcycled_study_paper.Accuracy | None = None

    @property
    def title(self) -> str:
        """Its name in outputs."""
        return self.algorithm.title + (f", mu = {self.mu:g}" if self.mu else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap:
    """The row whose mean is farthest from a reference.

    Attributes:
        row: The row.
        part: "train" or "test".
        points: Ours minus the reference, in percentage points.
    """

    row: TableRow
    part: str
    points: float


def build_table(findings: Findings) -> list[TableRow]:
    """Returns Table 1: for each data set FedAvg, then each mu of the others."""
    config, rows = findings.config, []
    settings = [(Algorithm.FEDAVG, 0.0)]
    settings += itertools.product((Algorithm.FEDPROX, Algorithm.UPCYCLED), config.mu)
    for data, (algorithm, mu) in itertools.product(config.data, settings):
        curves = findings.list_curves(data, algorithm, mu=mu)
        is_upcycled = algorithm is Algorithm.UPCYCLED
        key = (data, algorithm.value, mu)
        rows.append(
            TableRow(
                data=data,
                algorithm=algorithm,
                mu=mu,
                lambda_value=config.lambdas[mu] if is_upcycled else None,
                train=_compute_spread(curves, "train_accuracy"),
                test=_compute_spread(curves, "test_accuracy"),
                paper=upcycled_study_paper.PAPER.get(key),
                program=upcycled_study_paper.PROGRAM.get(key),
            )
        )
    return rows


def build_lambda_table(findings: Findings) -> list[TableRow]:
    """Returns Upcycled-FL at every mu and lambda of the grid."""
    config = findings.config
    rows = []
    for data, mu, value in itertools.product(
        config.data, config.mu, config.lambda_grid
    ):
        curves = findings.list_curves(
            data, Algorithm.UPCYCLED, mu=mu, lambda_value=value
        )
        rows.append(
            TableRow(
                data=data,
                algorithm=Algorithm.UPCYCLED,
                mu=mu,
                lambda_value=value,
                train=_compute_spread(curves, "train_accuracy"),
                test=_compute_spread(curves, "test_accuracy"),
            )
        )
    return rows


def find_largest_gap(rows: Sequence[TableRow], reference: str) -> Gap | None:
    """Returns the largest difference to "paper" or "program"; None without any."""
    gaps = [
        Gap(row=row, part=part, points=getattr(row, part).mean - getattr(found, part))
        for row in rows
        for part in ("train", "test")
        if (found := getattr(row, reference)) is not None
    ]
    return max(gaps, key=lambda gap: abs(gap.points)) if gaps else None


def _compute_spread(curves: Sequence[Curve], metric: str) -> Spread:
    values = [100 * curve.get(metric) for curve in curves]
    stddev = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(mean=float(np.mean(values)), stddev=stddev)
