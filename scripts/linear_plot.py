"""The figure of run_linear_representation: four panels."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts import linear_results as names
from scripts.linear_config import LinearConfig
from scripts.linear_sweeps import read_adjacency
from simulation import plot

_MARKERS = {
    names.CENTAUR: ("o", "tab:blue"),
    names.NORMAL_EQUATIONS: ("s", "tab:orange"),
    names.WHOLE_MATRIX: ("^", "tab:green"),
    names.RANDOM_START: ("x", "tab:red"),
}


def save_plot(
    path: pathlib.Path,
    config: LinearConfig,
    results: names.Results,
    summary: dict[str, Any],
) -> None:
    """Draws distance by round, both floors and the starts, and writes them whole.

    Args:
        path: The PNG file.
        config: The configuration.
        results: What was measured.
        summary: What `linear_report.summarize` returned.
    """
    figure = plot.start_figure(10, 7.5)
    axes = figure.subplots(2, 2)
    _draw_curves(axes[0, 0], config, results)
    _draw_epsilons(axes[0, 1], results, summary)
    _draw_dims(axes[1, 0], results, summary)
    _draw_starts(axes[1, 1], results, summary["starts"])
    for axis in axes.flat:
        axis.grid(alpha=0.3, which="both")
    figure.suptitle(
        f"Linear representation learning, n = {config.num_users}, k = {config.rank}, "
        f"delta = {config.delta:g}, {read_adjacency(config).value}",
        fontsize=10,
    )
    plot.save_figure(figure, path)


def _draw_curves(axis: Any, config: LinearConfig, results: names.Results) -> None:
    groups = [("no privacy", results.select("epsilon", names.NO_PRIVACY))]
    groups += [
        (
            f"epsilon = {epsilon:g}",
            [
                run
                for run in results.select("epsilon", names.CENTAUR)
                if run.epsilon == epsilon
            ],
        )
        for epsilon in config.epsilons
    ]
    for label, runs in groups:
        mean = np.mean([run.distances for run in runs], axis=0)
        style = "--" if label == "no privacy" else "-"
        axis.semilogy(range(len(mean)), mean, style, label=label)
    axis.set(
        xlabel="round",
        ylabel="distance to B*",
        title=f"d = {config.dim}, mean over repeats",
    )
    axis.legend(fontsize=7)


def _draw_epsilons(axis: Any, results: names.Results, summary: dict[str, Any]) -> None:
    for method in (names.CENTAUR, names.RANDOM_START):
        runs = [run for run in results.select("epsilon", method) if run.started]
        marker, color = _MARKERS[method]
        x, y = [run.epsilon for run in runs], [run.floor for run in runs]
        axis.loglog(x, y, marker, color=color, label=method, alpha=0.7)
    _label_values(
        axis, [run.epsilon for run in results.select("epsilon", names.CENTAUR)]
    )
    fit = summary["floor_against_epsilon"]["fit"]
    axis.set(
        xlabel="epsilon",
        ylabel="floor of the distance",
        title="no fit" if fit is None else f"exponent {fit['exponent']:.2f}",
    )
    axis.legend(fontsize=7)


def _draw_dims(axis: Any, results: names.Results, summary: dict[str, Any]) -> None:
    for method, found in summary["floor_against_dim"].items():
        runs = [
            run
            for run in results.select("dim", method)
            if run.started and np.isfinite(run.epsilon)
        ]
        marker, color = _MARKERS[method]
        label = method
        if found["fit"] is not None:
            label += f": exponent {found['fit']['exponent']:.2f}"
        x, y = [run.dim for run in runs], [run.floor for run in runs]
        axis.loglog(x, y, marker, color=color, label=label, alpha=0.7)
    _label_values(axis, [run.dim for run in results.select("dim", names.CENTAUR)])
    axis.set(xlabel="d", ylabel="floor of the distance", title="same n and epsilon")
    axis.legend(fontsize=7)


def _draw_starts(axis: Any, results: names.Results, found: dict[str, Any]) -> None:
    for way in found["rates"]:
        values = np.sort([start.distances[way] for start in results.starts])
        shares = np.arange(1, len(values) + 1) / len(values)
        kept = np.isfinite(values)
        axis.step(values[kept], shares[kept], where="post", label=way)
    for limit in (found["trial_distance"], found["radius"]):
        axis.axvline(limit, color="gray", linestyle=":")
    axis.set(
        xlabel="distance of the start to B*",
        ylabel="share of starts",
        title=f"{found['count']} starts",
        xlim=(0, 1),
        ylim=(0, 1.02),
    )
    axis.legend(fontsize=7)


def _label_values(axis: Any, values: Sequence[float]) -> None:
    """Puts the logarithmic axis's labels where something was measured."""
    ticks = sorted(set(values))
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)
