"""Plots of trainings, drawn without a display."""

import io
import pathlib
from collections.abc import Mapping
from typing import Any

from simulation import run_folder, table


def save_training_plot(
    path: pathlib.Path,
    tables: Mapping[str, table.Table],
    *,
    column: str,
    title: str,
    epsilon_column: str = "epsilon",
    epsilon_name: str = "epsilon",
) -> None:
    """Draws a metric against the round and epsilon, and writes it whole.

    Args:
        path: The PNG file.
        tables: The metrics of each training, by label.
        column: The column that is drawn, such as "test_accuracy".
        title: The title of the figure.
        epsilon_column: The column of the epsilon.
        epsilon_name: What stands at the axis of epsilon.
    """
    figure = start_figure(9, 3.6)
    axes = figure.subplots(1, 2, sharey=True)
    for label, metrics in tables.items():
        if column not in metrics.columns:
            continue
        points = [
            (int(number), float(value), float(epsilon))
            for number, value, epsilon in zip(
                metrics.read_column("round"),
                metrics.read_column(column),
                metrics.read_column(epsilon_column),
                strict=True,
            )
            if value
        ]
        if not points:  # Stopped by its budget before the first evaluation.
            continue
        rounds, values, epsilons = (list(axis) for axis in zip(*points, strict=True))
        # A line of one point is not seen.
        marker = "o" if len(rounds) == 1 else ""
        axes[0].plot(rounds, values, label=label, marker=marker)
        axes[1].plot(epsilons, values, label=label, marker=marker)
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].set(xlabel="round", ylabel=column.replace("_", " ", 1))
    axes[1].set(xlabel=f"{epsilon_name} spent")
    for axis in axes:
        axis.grid(alpha=0.3)
    if axes[0].lines:
        axes[0].legend(loc="lower right")
    figure.suptitle(title)
    save_figure(figure, path)


def start_figure(width: float, height: float) -> Any:
    """Returns an empty matplotlib figure of a size in inches, without a display."""
    import matplotlib.backends.backend_agg as agg
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
    agg.FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: pathlib.Path, *, dpi: int = 120) -> None:
    """Writes a figure whole, as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    run_folder.write_bytes(path, buffer.getvalue())
