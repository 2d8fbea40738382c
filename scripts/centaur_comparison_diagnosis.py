"""Why one method leads: what its clients send, over the rounds of one run.

The run is one of those that are reported, made once more under an aggregator that
measures, too. All of it is exact functions of private data.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from centaur.diagnosis import MEASURED
from scripts import centaur_comparison_runs
from scripts.centaur_comparison_config import (
    DIAGNOSED,
    ComparisonConfig,
    Point,
    Run,
)
from scripts.centaur_config import Method
from simulation import run_folder, table

_NAME = "diagnosis.csv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was measured of a run.

    Attributes:
        run: The run.
        rows: Of each round what `MeasuringFactory` measured, by name; a part's name
            and its measurement's are joined by "/".
    """

    run: Run
    rows: tuple[Mapping[str, float], ...]

    def average(self) -> dict[str, float]:
        """Returns the means over rounds, by name."""
        return {
            name: float(np.mean([row[name] for row in self.rows]))
            for name in self.rows[0]
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the run, and the means over rounds, as JSON values."""
        return {
            "method": self.run.method.value,
            "epsilon": self.run.epsilon,
            "seed": self.run.seed,
            **self.run.point,
            "means_over_rounds": self.average(),
        }


def plan_runs(config: ComparisonConfig, points: Mapping[Method, Point]) -> list[Run]:
    """Returns the runs that are made once more: see `ComparisonConfig.diagnose`.

    They are those of the first seed, at the epsilon that is shown of all.

    Args:
        config: The comparison.
        points: The settings of each method that is measured.
    """
    epsilon, seed = config.shown_epsilon, config.seeds[0]
    runs = [config.plan_run(method, epsilon, seed, p) for method, p in points.items()]
    return [dataclasses.replace(run, measures=True) for run in runs]


def list_methods(config: ComparisonConfig) -> list[Method]:
    """Returns the methods that are measured."""
    if not config.diagnose:
        return []
    return [method for method in DIAGNOSED if method in config.method_kinds]


def read(folder: pathlib.Path, run: Run) -> Diagnosis:
    """Returns what was measured of a finished run.

    Raises:
        UserError: If its table cannot be read.
    """
    rows = centaur_comparison_runs.read_metrics(folder / run.name)
    prefix = f"{MEASURED}/"
    columns = {
        name.removeprefix(prefix): [_to_number(cell) for cell in rows.read_column(name)]
        for name in rows.columns
        if name.startswith(prefix)
    }
    values = zip(*columns.values(), strict=True)
    return Diagnosis(
        run=run, rows=tuple(dict(zip(columns, row, strict=True)) for row in values)
    )


def write(folder: pathlib.Path, diagnoses: Sequence[Diagnosis]) -> list[pathlib.Path]:
    """Writes a row a round and method. Returns the file."""
    rows = table.Table()
    for row in _list_rows(diagnoses):
        rows = rows.append(row)
    run_folder.write_text(folder / _NAME, rows.to_csv())
    return [folder / _NAME]


def _list_rows(diagnoses: Sequence[Diagnosis]) -> Iterator[dict[str, table.Scalar]]:
    names = dict.fromkeys(name for one in diagnoses for name in one.rows[0])
    for one in diagnoses:
        for number, row in enumerate(one.rows):
            yield {
                "method": one.run.method.value,
                "epsilon": one.run.epsilon,
                "seed": one.run.seed,
                "round": number + 1,
                **{name: row.get(name) for name in names},
            }


def _to_number(cell: str) -> float:
    return float(cell) if cell else math.nan
