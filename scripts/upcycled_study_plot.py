"""The plots of run_upcycled_study, drawn without a display.

Source: Yin et al. 2024, figures 2 and 5 (convergence) and 2, right (lambda).
"""

import itertools
import pathlib
from typing import Any

import numpy as np

from scripts import upcycled_study_private_report
from scripts.paired_difference import CONFIDENCE
from scripts.upcycled_study_claims import Budget, Opponent
from scripts.upcycled_study_config import Algorithm, Study
from scripts.upcycled_study_curve import Curve
from scripts.upcycled_study_findings import (
    GENERATED,
    Findings,
    build_lambda_table,
    build_table,
)
from scripts.upcycled_study_report import describe_loss, join
from simulation import plot

_COLORS = {
    Algorithm.FEDAVG: "tab:gray",
    Algorithm.FEDPROX: "tab:blue",
    Algorithm.UPCYCLED: "tab:red",
}
_MU_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")
_LABELS = {"train_loss": "training loss", "train_accuracy": "training accuracy"}


def save_plots(path: pathlib.Path, findings: Findings) -> list[pathlib.Path]:
    """Draws the plots of the study into a folder, and returns their files."""
    config = findings.config
    if config.kind is Study.CLAIMS:
        return [_save_claims(path / "claims.png", findings)]
    if config.kind is Study.PRIVATE:
        return [_save_private(path / "private.png", findings)]
    files = [
        _save_convergence(
            path / f"convergence_{data}_mu{mu!r}.png", findings, data=data, mu=mu
        )
        for data, mu in itertools.product(config.data, config.mu)
    ]
    if config.kind is Study.FIGURES:
        files.append(_save_sweep(path / "lambda.png", findings))
    return files


def _save_convergence(
    path: pathlib.Path, findings: Findings, *, data: str, mu: float
) -> pathlib.Path:
    """Draws training loss and accuracy against server steps and client rounds."""
    figure, axes = _start_figure(2, 2, size=(9, 6), findings=findings, data=data)
    settings = [(Algorithm.FEDAVG, 0.0)]
    settings += [(Algorithm.FEDPROX, mu), (Algorithm.UPCYCLED, mu)]
    for algorithm, strength in settings:
        curves = findings.list_curves(data, algorithm, mu=strength)
        label = algorithm.title + (f", mu = {mu:g}" if strength else "")
        for row, metric in zip(axes, _LABELS, strict=True):
            for axis, get in zip(row, (_get_steps, _get_rounds), strict=True):
                points = [get(curve, metric) for curve in curves]
                values = np.stack([y for _, y in points])
                _draw_band(axis, points[0][0], values, label, _COLORS[algorithm])
    for row, label in zip(axes, _LABELS.values(), strict=True):
        for axis, unit in zip(row, ("server step", "round with clients"), strict=True):
            axis.set(xlabel=unit, ylabel=label)
    axes[0][0].legend(fontsize="small")
    return _save(figure, path)


def _save_sweep(path: pathlib.Path, findings: Findings) -> pathlib.Path:
    """Draws test accuracy against lambda, a panel a data set, a line for each mu."""
    config = findings.config
    count = len(config.data)
    figure, axes = _start_figure(
        1, count, size=(1 + 3.4 * count, 3.6), findings=findings
    )
    rows = build_lambda_table(findings)
    baseline = {
        (row.data, row.mu): row.test.mean
        for row in build_table(findings)
        if row.algorithm is Algorithm.FEDPROX
    }
    for axis, data in zip(axes[0], config.data, strict=True):
        for mu, color in zip(config.mu, itertools.cycle(_MU_COLORS), strict=False):
            found = [row for row in rows if (row.data, row.mu) == (data, mu)]
            axis.errorbar(
                [row.lambda_value for row in found],
                [row.test.mean for row in found],
                [row.test.stddev or 0.0 for row in found],
                label=f"mu = {mu:g}",
                color=color,
                marker=".",
                capsize=2,
            )
            axis.axhline(baseline[data, mu], color=color, linestyle=":", lw=1)
        axis.set_xscale("log")
        axis.set(xlabel="lambda", ylabel="test accuracy, %", title=data)
    axes[0][0].legend(fontsize="small", title="dotted: FedProx")
    return _save(figure, path)


def _save_claims(path: pathlib.Path, findings: Findings) -> pathlib.Path:
    """Draws the intervals of test accuracy, a panel for each opponent and budget."""
    height = max(6.0, 1.5 + 0.5 * len(findings.factors))
    figure, axes = _start_figure(2, 2, size=(10, height), findings=findings)
    for row, opponent in zip(axes, Opponent, strict=True):
        for axis, budget in zip(row, Budget, strict=True):
            found = [
                one
                for one in findings.comparisons
                if (one.opponent, one.budget) == (opponent, budget)
                and one.metric == "test_accuracy"
            ]
            places = np.arange(len(found))
            means = np.array([100 * one.difference.mean for one in found])
            ends = [
                [100 * one.difference.low, 100 * one.difference.high] for one in found
            ]
            axis.errorbar(
                means,
                places,
                xerr=np.abs(np.array(ends).T - means),
                fmt=".",
                capsize=2,
                color="tab:red",
            )
            axis.axvline(0, color="black", lw=0.8)
            axis.set_yticks(places, [f"{one.data}, {one.mu:g}" for one in found])
            axis.invert_yaxis()
            axis.set_title(
                f"against {opponent.value},\n{budget.value}", fontsize="small"
            )
            axis.set_xlabel(
                f"test accuracy, points: Upcycled-FL minus opponent, {CONFIDENCE:.0%}",
                fontsize="small",
            )
    return _save(figure, path)


def _save_private(path: pathlib.Path, findings: Findings) -> pathlib.Path:
    """Draws accuracy against epsilon, the paper's figure 3."""
    config = findings.config
    size = (1 + 3.2 * len(config.data), 0.8 + 2.8 * len(config.noises))
    figure, axes = _start_figure(
        len(config.noises), len(config.data), size=size, findings=findings
    )
    upcycled_study_private_report.draw(axes, config, findings.private_rows)
    return _save(figure, path)


def _get_steps(curve: Curve, metric: str) -> tuple[np.ndarray, np.ndarray]:
    return curve.list_steps(metric)


def _get_rounds(curve: Curve, metric: str) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(curve.num_rounds + 1), curve.values[metric]


def _draw_band(
    axis: Any, places: np.ndarray, values: np.ndarray, label: str, color: str
) -> None:
    """Draws the mean over seeds, and the range."""
    axis.plot(places, values.mean(axis=0), label=label, color=color, lw=1.2)
    if len(values) > 1:
        low, high = values.min(axis=0), values.max(axis=0)
        axis.fill_between(places, low, high, color=color, alpha=0.2, lw=0)


def _start_figure(
    num_rows: int,
    num_columns: int,
    *,
    size: tuple[float, float],
    findings: Findings,
    data: str | None = None,
) -> tuple[Any, Any]:
    """Returns a figure whose title says what was trained on which data."""
    figure = plot.start_figure(*size)
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    config = findings.config
    kind = GENERATED if findings.is_generated else "data"
    names = data or ", ".join(config.data)
    rates = sorted({rate for n, rate in findings.rates.items() if data in (None, n)})
    figure.suptitle(
        f"{kind}: {names}; seeds {join(config.seeds)}; client learning rate "
        f"{join(rates)}\nloss: {describe_loss(config)}",
        fontsize="small",
    )
    return figure, axes


def _save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    plot.save_figure(figure, path, dpi=110)
    return path
