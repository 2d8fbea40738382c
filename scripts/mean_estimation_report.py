"""What the mean-estimation study prints and draws."""

import collections
import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from distributed_dp import accounting
from scripts.field_list import format_fields
from scripts.mean_estimation import CENTRAL_DRAWS, CONFIDENCE
from scripts.mean_estimation_config import StudyConfig
from scripts.mean_estimation_plan import Plan, compute_statements
from scripts.mean_estimation_rows import INFEASIBLE, Row
from simulation import plot, seeds

_LABEL_WIDTH = 22
_FIELD_WIDTH = 21
_EPSILONS_A_BLOCK = 4
# A bound farther than this from the central Gaussian says nothing: it is left out.
_INFORMATIVE = 100.0
_METRIC = "MSE = ||estimate - mean||^2 / d, of the mean of the n vectors, a coordinate"
_CENTRAL = "central Gaussian, same accountant"
_ANALYTIC = "analytic Gaussian (expected)"
_GROUP = ("mechanism", "rotation", "norm_bound", "num_clients", "dim", "clip")
_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")


def describe_run(
    config: StudyConfig,
    plans: Sequence[Plan],
    *,
    root: seeds.RootSeed,
    folder: pathlib.Path,
) -> str:
    """Returns the first lines: what the run will do."""
    infeasible = sum(plan.problem is not None for plan in plans)
    distributed = [
        f"{_join(config.mechanism)}; rotation {_join(config.rotation)}; norm bound "
        f"{_join(config.norm_bound)}",
        f"k = {_join(config.num_stddevs)}; B = {_join(config.bits)} bits; beta = "
        f"{config.beta:.4g}",
    ]
    lines = {
        "task": f"mean of n = {_join(config.num_clients)} vectors, uniform on the "
        f"sphere of radius c = {_join(config.clip)} in d = {_join(config.dim)} "
        f"dimensions; {config.repeats} repeats",
        "error": _METRIC,
        "mechanism": "\n".join(distributed),
        "privacy": f"epsilon = {_join(config.epsilon)} at delta = {config.delta:g}; "
        "one release (T = 1) to which everyone contributes\n(q = 1, N = n), add or "
        "remove one user, RDP",
        "compared": f"with the central Gaussian by RDP, on the same vectors "
        f"({CENTRAL_DRAWS} draws a repeat), and the\nanalytic one (Balle and Wang "
        "2018)",
        "cells": f"{len(plans)}"
        + (f", {infeasible} of them infeasible" if infeasible else ""),
        "secrecy": "simulated: secure sums are plain sums, no cryptography is run",
        "randomness": root.description,
        "output": str(folder),
    }
    return format_fields(lines)


def describe_results(
    config: StudyConfig,
    plans: Sequence[Plan],
    rows: Sequence[Row],
    *,
    files: Sequence[pathlib.Path],
    seconds: float,
) -> str:
    """Returns the last lines: what came out, and where it lies."""
    blocks = [
        "ratio = MSE / MSE of the central Gaussian by the same accountant, "
        f"[{CONFIDENCE:.0%} interval over {config.repeats} repeats]"
    ]
    groups: dict[tuple[Any, ...], list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in _GROUP)].append(row)
    blocks += [_format_group(group) for group in groups.values()]
    problems = _describe_problems(rows)
    if problems:
        blocks.append(problems)
    blocks += [
        "\n".join([_describe_example(plan), *map(str, statements)])
        for plan, statements in _compute_examples(config, plans)
    ]
    lines = {
        "wall time": f"{seconds:.1f} s",
        "files": "\n".join(str(file) for file in files),
    }
    return "\n\n".join([*blocks, format_fields(lines)])


def summarize_results(
    config: StudyConfig, plans: Sequence[Plan], rows: Sequence[Row]
) -> dict[str, Any]:
    """Returns the results as JSON values."""
    return {
        "task": "mean estimation",
        "metric": _METRIC,
        "ratio": "mse / central_mse, the central Gaussian by the same accountant",
        "confidence": CONFIDENCE,
        "repeats": config.repeats,
        "central_draws_per_repeat": CENTRAL_DRAWS,
        "privacy": [
            {
                "example": _describe_example(plan),
                "statements": [statement.to_dict() for statement in statements],
            }
            for plan, statements in _compute_examples(config, plans)
        ],
        "cells": [dict(row) for row in rows],
    }


def _compute_examples(
    config: StudyConfig, plans: Sequence[Plan]
) -> list[tuple[Plan, list[accounting.PrivacyStatement]]]:
    """Returns the statements of the last feasible cell of each mechanism."""
    last = {plan.cell.mechanism: plan for plan in plans if plan.parameters is not None}
    return [
        (plan, compute_statements(plan, delta=config.delta)) for plan in last.values()
    ]


def _describe_example(plan: Plan) -> str:
    cell = plan.cell
    shape = f"n = {cell.setting.num_clients}, epsilon = {cell.setting.epsilon:g}"
    if cell.num_stddevs is not None:
        shape += f", k = {cell.num_stddevs:g}, B = {cell.bits}"
    return (
        f"The whole statement of one cell ({shape}). Another cell's differs in its n, "
        "epsilon, order and charges alone; a cell is one release, and its repeats are "
        "fresh data of the simulation"
    )


def save_plot(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Draws the error against epsilon, a panel for each (n, k), and writes it whole."""
    panels = _group_panels(rows)
    num_columns = max(len(line) for line in panels.values())
    figure = plot.start_figure(1.2 + 3.6 * num_columns, 0.9 + 2.9 * len(panels))
    axes = figure.subplots(len(panels), num_columns, squeeze=False)
    handles: dict[str, Any] = {}
    for line, panel_axes in zip(panels.values(), axes, strict=True):
        for axis in panel_axes[len(line) :]:
            axis.set_axis_off()
        for axis, panel in zip(panel_axes, line.values(), strict=False):
            _draw_panel(axis, panel)
            labels = zip(*axis.get_legend_handles_labels(), strict=True)
            handles |= {label: handle for handle, label in labels}
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside upper center",
        ncols=2 * num_columns - 1,
        fontsize="small",
    )
    plot.save_figure(figure, path)


def _group_panels(
    rows: Sequence[Row],
) -> dict[tuple[Any, ...], dict[Any, list[Row]]]:
    """Returns the rows of each panel: a line a group, a column for each k."""
    panels: dict[tuple[Any, ...], dict[Any, list[Row]]] = {}
    for row in rows:
        line = panels.setdefault(tuple(row[name] for name in _GROUP), {})
        line.setdefault(row["num_stddevs"], []).append(row)
    return panels


def _draw_panel(axis: Any, rows: Sequence[Row]) -> None:
    first = rows[0]
    colors = itertools.cycle(_COLORS)
    for bits in dict.fromkeys(row["bits"] for row in rows):
        label = f"{first['mechanism']}" if bits is None else f"B = {bits}"
        found = [row for row in rows if row["bits"] == bits]
        _draw_line(axis, found, "mse", label=label, color=next(colors))
    _draw_line(axis, rows, "central_mse", label=_CENTRAL, color="black", style="--")
    points = _get_points(rows, "epsilon", "analytic_expected_mse")
    axis.plot(*points, label=_ANALYTIC, color="gray", linestyle=":")
    axis.set_yscale("log")
    title = f"n = {first['num_clients']}, d = {first['dim']}, c = {first['clip']:g}"
    if first["num_stddevs"] is not None:
        title += f", k = {first['num_stddevs']:g}"
    axis.set_title(f"{title}\n{_name_mechanism(first)}", fontsize="small")
    axis.set(xlabel="epsilon", ylabel="MSE")
    axis.grid(alpha=0.3)


def _draw_line(
    axis: Any, rows: Sequence[Row], name: str, *, label: str, color: str, style="-"
) -> None:
    """Draws means and their band. An infeasible cell leaves a gap."""
    points = _get_points(rows, "epsilon", name, f"{name}_low", f"{name}_high")
    epsilons, means, lows, highs = points
    axis.plot(epsilons, means, style, label=label, color=color, marker=".", lw=1.2)
    axis.fill_between(epsilons, lows, highs, color=color, alpha=0.25, lw=0)


def _get_points(rows: Sequence[Row], *names: str) -> list[list[float]]:
    """Returns columns as floats, NaN where a field is empty, by ascending epsilon."""
    by_epsilon = {row["epsilon"]: row for row in rows}
    ordered = [by_epsilon[epsilon] for epsilon in sorted(by_epsilon, key=_to_float)]
    return [[_to_float(row[name]) for row in ordered] for name in names]


def _format_group(rows: Sequence[Row]) -> str:
    """Returns the tables of one (mechanism, rotation, norm bound, n, d, c)."""
    first = rows[0]
    title = (
        f"n = {first['num_clients']}, d = {first['dim']}, c = {first['clip']:g}: "
        f"{_name_mechanism(first)}"
    )
    padded = {row["padded_dim"] for row in rows} - {None, first["dim"]}
    if padded:
        title += f", {padded.pop()} padded coordinates"
    lines = [title]
    epsilons = list(dict.fromkeys(row["epsilon"] for row in rows))
    for start in range(0, len(epsilons), _EPSILONS_A_BLOCK):
        block = epsilons[start : start + _EPSILONS_A_BLOCK]
        lines += _format_block([row for row in rows if row["epsilon"] in block], block)
    return "\n".join(lines)


def _format_block(rows: Sequence[Row], epsilons: Sequence[Any]) -> list[str]:
    by_epsilon = {row["epsilon"]: row for row in reversed(rows)}
    columns = [by_epsilon[epsilon] for epsilon in epsilons]
    central = [f"{_to_float(row['central_mse']):.4g}" for row in columns]
    analytic = [
        _format_number(
            _to_float(row["analytic_expected_mse"]) / _to_float(row["central_mse"])
        )
        for row in columns
    ]
    lines = [
        _format_line("", [f"epsilon {epsilon:g}" for epsilon in epsilons]),
        _format_line("central Gaussian, MSE", central),
        _format_line("analytic Gaussian", analytic),
    ]
    for width, bits in dict.fromkeys((r["num_stddevs"], r["bits"]) for r in rows):
        found = {
            row["epsilon"]: row
            for row in rows
            if (row["num_stddevs"], row["bits"]) == (width, bits)
        }
        cells = [found[epsilon] for epsilon in epsilons]
        label = "Gaussian, once more"
        if bits is not None:
            label = f"k = {width:g}, B = {bits}"
        lines.append(_format_line(label, [_format_ratio(row) for row in cells]))
        bounds = [_format_bound(row) for row in cells]
        if any(bound != "-" for bound in bounds):
            lines.append(_format_line("  at most (thm. 36)", bounds))
    return lines


def _format_ratio(row: Row) -> str:
    if row["status"] == INFEASIBLE:
        return INFEASIBLE
    value, low, high = (
        _format_number(_to_float(row[name]))
        for name in ("ratio", "ratio_low", "ratio_high")
    )
    return f"{value} [{low}, {high}]"


def _format_bound(row: Row) -> str:
    ratio = _to_float(row["theorem_36_mse"]) / _to_float(row["central_mse"])
    return _format_number(ratio) if ratio <= _INFORMATIVE else "-"


def _format_number(value: float) -> str:
    if value < 9.9995:
        return f"{value:.3f}"
    return f"{value:.1f}" if value < 999.95 else f"{value:.3g}"


def _format_line(label: str, fields: Sequence[str]) -> str:
    columns = "".join(field.rjust(_FIELD_WIDTH) for field in fields)
    return f"  {label:<{_LABEL_WIDTH}}{columns}".rstrip()


def _describe_problems(rows: Sequence[Row]) -> str:
    """Returns what is infeasible and why, the first reason for each (n, d, k, B)."""
    problems: dict[tuple[Any, ...], list[Row]] = collections.defaultdict(list)
    for row in rows:
        if row["status"] == INFEASIBLE:
            names = (*_GROUP, "num_stddevs", "bits")
            problems[tuple(row[name] for name in names)].append(row)
    lines = []
    for found in problems.values():
        first = found[0]
        epsilons = ", ".join(f"{_to_float(row['epsilon']):g}" for row in found)
        lines.append(
            f"infeasible: {_name_mechanism(first)}, n = {first['num_clients']}, d = "
            f"{first['dim']}, k = {first['num_stddevs']:g}, B = {first['bits']}, "
            f"epsilon = {epsilons}: {first['problem']}"
        )
    return "\n".join(lines)


def _name_mechanism(row: Row) -> str:
    if row["rotation"] is None:
        return f"{row['mechanism']}"
    bound = str(row["norm_bound"]).replace("_", " ")
    return f"{row['mechanism']}, {row['rotation']}, {bound} norm bound"


def _to_float(value: Any) -> float:
    return math.nan if value is None else float(value)


def _join(values: Sequence[Any]) -> str:
    return ", ".join(f"{v:g}" if isinstance(v, float) else f"{v}" for v in values)
