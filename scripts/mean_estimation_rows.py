"""The rows of the mean-estimation study: typed values, CSV and back."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from distributed_dp import accounting
from scripts.mean_estimation import (
    FloatArray,
    Measurement,
    compute_mean_interval,
    compute_ratio_interval,
)
from scripts.mean_estimation_config import Cell
from scripts.mean_estimation_plan import Baseline, Plan, build_scheme
from simulation import table

Row = Mapping[str, table.Scalar]

MEASURED = "measured"
INFEASIBLE = "infeasible"

_CELL_TYPES: dict[str, type] = {
    "mechanism": str,
    "rotation": str,
    "norm_bound": str,
    "num_clients": int,
    "dim": int,
    "clip": float,
    "num_stddevs": float,
    "bits": int,
    "epsilon": float,
}
# Errors are of the mean, per coordinate, in units of x squared; `_low` and `_high` are
# the ends of 95 % intervals over the repeats.
_ERROR_TYPES: dict[str, type] = {
    "status": str,
    "repeats": int,
    "mse": float,
    "mse_low": float,
    "mse_high": float,
    "central_mse": float,
    "central_mse_low": float,
    "central_mse_high": float,
    "ratio": float,
    "ratio_low": float,
    "ratio_high": float,
    "central_expected_mse": float,
    "analytic_expected_mse": float,
    "ratio_to_analytic": float,
    "theorem_36_mse": float,
    "wraparound_probability": float,
    "redraws_per_client": float,
}
_MECHANISM_TYPES: dict[str, type] = {
    "padded_dim": int,
    "beta": float,
    "granularity": float,
    "local_stddev": float,
    "local_scale": float,
    "central_stddev": float,
    "noise_multiplier": float,
}
_PRIVACY_TYPES: dict[str, type] = {
    "epsilon_spent": float,
    "delta": float,
    "delta_times_num_clients": float,
    "adjacency": str,
    "sampler": str,
    "sampling_rate": float,
    "num_rounds": int,
    "order": float,
    "bound": str,
    "accountant": str,
    "problem": str,
}
_TYPES = _CELL_TYPES | _ERROR_TYPES | _MECHANISM_TYPES | _PRIVACY_TYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Central:
    """The central Gaussian at one setting.

    Attributes:
        errors: The MSE of each repeat, calibrated by the same accountant, [repeats].
        baseline: Its parameters, and the analytic Gaussian's.
    """

    errors: FloatArray
    baseline: Baseline


def build_row(
    plan: Plan,
    measurement: Measurement | None,
    central: Central,
    *,
    delta: float,
    repeats: int,
) -> Row:
    """Returns the row of a cell; without a measurement, what is known all the same."""
    cell = plan.cell
    row: dict[str, table.Scalar] = dict.fromkeys(_TYPES)
    row.update(zip(_CELL_TYPES, get_cell_fields(cell), strict=True))
    row.update(status=INFEASIBLE, repeats=repeats, delta=delta, problem=plan.problem)
    _fill(row, "central_mse", compute_mean_interval(central.errors))
    for name, parameters in (
        ("central_expected_mse", central.baseline.same_accountant),
        ("analytic_expected_mse", central.baseline.analytic),
    ):
        row[name] = (parameters.central_stddev / cell.setting.num_clients) ** 2
    if plan.parameters is not None:
        row.update(_describe_mechanism(plan))
        row.update(_describe_privacy(plan, delta=delta))
    if measurement is not None:
        row["status"] = MEASURED
        mse = compute_mean_interval(measurement.errors)
        _fill(row, "mse", mse)
        _fill(row, "ratio", compute_ratio_interval(measurement.errors, central.errors))
        row["ratio_to_analytic"] = mse.value / _get_float(row, "analytic_expected_mse")
        row["redraws_per_client"] = measurement.redraws_per_client
    return row


def get_cell_fields(cell: Cell) -> tuple[table.Scalar, ...]:
    """Returns the columns that name a cell."""
    return (
        cell.mechanism.value,
        cell.rotation,
        None if cell.norm_bound is None else cell.norm_bound.value,
        cell.setting.num_clients,
        cell.setting.dim,
        cell.setting.clip,
        cell.num_stddevs,
        cell.bits,
        cell.setting.epsilon,
    )


def get_row_fields(row: Row) -> tuple[table.Scalar, ...]:
    """Returns the same of a row."""
    return tuple(row[name] for name in _CELL_TYPES)


def to_csv(rows: Sequence[Row]) -> str:
    """Returns the rows as CSV."""
    fields = [[table.format_scalar(row[name]) for name in _TYPES] for row in rows]
    return table.Table(tuple(_TYPES), fields).to_csv()


def from_csv(text: str) -> list[Row]:
    """Reads what `to_csv` wrote.

    Raises:
        ValueError: If the columns are others, or a field is none that is written.
    """
    found = table.Table.from_csv(text)
    if found.columns != tuple(_TYPES):
        raise ValueError(f"`text` must have the columns {tuple(_TYPES)}.")
    columns = [found.read_column(name) for name in _TYPES]
    rows: list[Row] = [
        {
            name: None if field == "" else kind(field)
            for (name, kind), field in zip(_TYPES.items(), fields, strict=True)
        }
        for fields in zip(*columns, strict=True)
    ]
    for row in rows:
        _check_row(row)
    return rows


def _check_row(row: Row) -> None:
    """Raises ValueError if a row cannot be one that was written."""
    if row["status"] not in (MEASURED, INFEASIBLE):
        raise ValueError(f"`status` must be one of ours. Found {row['status']!r}.")
    for name in ("mse", "central_mse", "epsilon", "ratio"):
        value = row[name]
        if value is not None and not 0 <= float(value) < math.inf:
            raise ValueError(f"`{name}` must be finite and >= 0. Found {value!r}.")


def _describe_mechanism(plan: Plan) -> dict[str, table.Scalar]:
    parameters, setting = plan.parameters, plan.cell.setting
    values: dict[str, Any] = {
        name: getattr(parameters, name, None) for name in _MECHANISM_TYPES
    }
    bound = plan.cell.norm_bound
    if isinstance(parameters, accounting.DistributedParameters) and bound is not None:
        # Of the sum's d padded coordinates together, so of the mean's no more.
        total = accounting.compute_utility_bound(parameters, norm_bound=bound)
        per_coordinate = total / (setting.num_clients**2 * setting.dim)
        if math.isfinite(per_coordinate):
            values["theorem_36_mse"] = per_coordinate
        values["wraparound_probability"] = accounting.compute_wraparound_probability(
            parameters, norm_bound=bound
        )
    return values


def _describe_privacy(plan: Plan, *, delta: float) -> dict[str, table.Scalar]:
    if plan.parameters is None:
        return {}
    statement = accounting.compute_privacy(
        plan.parameters, build_scheme(plan.cell.setting), num_rounds=1, delta=delta
    )
    return {
        "epsilon_spent": statement.epsilon,
        "delta_times_num_clients": statement.delta * statement.num_clients,
        "adjacency": statement.adjacency,
        "sampler": statement.sampler,
        "sampling_rate": statement.sampling_rate,
        "num_rounds": statement.num_rounds,
        "order": statement.order,
        "bound": statement.bound,
        "accountant": statement.accountant,
    }


def _fill(row: dict[str, table.Scalar], name: str, interval: Any) -> None:
    row[name] = interval.value
    row[f"{name}_low"] = interval.low
    row[f"{name}_high"] = interval.high


def _get_float(row: Row, name: str) -> float:
    value = row[name]
    return float("nan") if value is None else float(value)
