"""What a comparison prints and draws."""

from __future__ import annotations

import math
import pathlib
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from centaur.diagnosis import PARTS
from scripts.centaur_comparison_config import ComparisonConfig, Point
from scripts.centaur_comparison_runs import Outcome, Stamp
from scripts.centaur_config import Method
from scripts.field_list import format_fields
from simulation import plot

if TYPE_CHECKING:
    from scripts.centaur_comparison import Choice, Comparison, Findings
    from scripts.centaur_comparison_diagnosis import Diagnosis

_WIDTH = 88
_UNTUNED = "not the tuning"
_COVERED = {
    Method.CENTAUR: "the representation sent",
    Method.PPSGD_PAPER: "the representation sent",
    Method.PPSGD_AUTHORS: "the shared model sent",
    Method.FEDAVG_FB: "the shared model sent",
    Method.PMTL_FT: "the shared model sent",
}
_NOTES = (
    "epsilon is of the sequence of models that the server releases. It covers neither "
    "settings chosen on private validation data, nor mean accuracies, nor other runs: "
    "what every run costs adds up.",
    "Clients' own models: all of them together are joint-DP only; user i's own head is "
    "not private against whoever is given it.",
    "All runs are seeded: no epsilon holds against those who know the seeds, or see "
    "several of these models.",
)
_NOT_PRIVATE = (
    "Exact functions of private data, covered by no epsilon: for the simulation alone."
)


def list_notes(config: ComparisonConfig) -> tuple[str, ...]:
    """Returns what no figure of a comparison should be read without."""
    where = (
        "each epsilon of the table"
        if config.tune_each_epsilon
        else f"epsilon {config.tuned_epsilons[0]:g}"
    )
    return (
        *_NOTES,
        f"Settings were chosen on seed {config.tuning_seed} at {where}, by the mean "
        "over clients on their validation parts; the test parts had no part in it, and "
        "that seed is not reported.",
        "All seeds have the same clients with the same examples (--data_seed): "
        "intervals are over initial models, batches and noise, not over data.",
    )


def name_covered(method: Method, epsilon: float | None) -> str:
    """Returns what epsilon covers, and that it does not cover the tuning."""
    if method is Method.STAND_ALONE:
        return f"nothing is sent; {_UNTUNED}"
    if epsilon is not None and math.isinf(epsilon):
        return f"nothing, there is no noise; {_UNTUNED}"
    return f"{_COVERED[method]}, {_UNTUNED}"


def describe_start(config: ComparisonConfig, stamp: Stamp) -> str:
    """Returns the first lines: what is compared, and with which budgets."""
    points = [
        f"{method.title} {len(config.list_points(method, tuned))}"
        for method in config.method_kinds
        for tuned in [config.get_tuned_epsilon(method, config.tuned_epsilons[0])]
    ]
    lines = {
        "task": f"{config.task}: {stamp.description}",
        "users": f"{stamp.num_clients:,}; participation {config.participation:g}; "
        f"{config.total_rounds} rounds; {config.mechanism}",
        "epsilons": f"{_join(config.epsilons)} at delta = "
        f"{config.resolve_delta(stamp.num_clients):.4g}",
        "seeds": f"{_join(config.seeds)}; {config.tuning_seed} for tuning",
        "tuning": f"at epsilon {_join(config.tuned_epsilons)}; points of the grid: "
        + ", ".join(points),
        "output": str(config.folder),
    }
    if config.tune_each_epsilon and math.inf in config.epsilons:
        lines["tuning"] += "; at epsilon inf fewer, as nothing is clipped there"
    return format_fields(lines)


def describe(findings: Findings, files: Sequence[pathlib.Path]) -> str:
    """Returns everything that is printed at the end."""
    config = findings.config
    blocks = [
        _describe_choices(findings.choices),
        *(_describe_epsilon(findings, epsilon) for epsilon in config.epsilons),
    ]
    if findings.diagnoses:
        blocks.append(_describe_diagnoses(findings.diagnoses))
    blocks.append("\n".join(textwrap.fill(note, _WIDTH) for note in list_notes(config)))
    blocks.append(format_fields({"files": "\n".join(map(str, files))}))
    return "\n" + "\n\n".join(blocks)


def save_plot(path: pathlib.Path, findings: Findings) -> None:
    """Draws utility against epsilon, and the validation metric by round."""
    figure = plot.start_figure(10.5, 4)
    left, right = figure.subplots(1, 2)
    _draw_utility(left, findings)
    _draw_curves(right, findings)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize=7)
    plot.save_figure(figure, path)


def _describe_choices(choices: Sequence[Choice]) -> str:
    lines = ["Chosen by the mean validation metric over clients, from as many points:"]
    for one in choices:
        where = "" if one.epsilon is None else f"epsilon {one.epsilon:g}"
        lines.append(
            f"  {one.method.title:<16}{where:<13}{len(one.validation):>3} points: "
            f"{_format_point(one.point)}; {one.best:.4f}"
        )
        if one.edges:
            edges = ", ".join(f"{name} ({end})" for name, end in one.edges.items())
            lines.append(f"  {'':<16}on the edge of its grid: {edges}")
    return "\n".join(lines)


def _describe_epsilon(findings: Findings, epsilon: float) -> str:
    """Returns the table of one epsilon, and CENTAUR's differences there."""
    config, metric = findings.config, findings.outcomes[0].metric
    budget = (
        "Without noise" if math.isinf(epsilon) else f"Budget epsilon <= {epsilon:g}"
    )
    lines = [
        f"{budget}. Test {metric}: mean over clients, +- standard deviation over "
        f"{len(config.seeds)} seeds",
        f"  {'':<16}{f'test {metric}':>18}{'over clients':>14}{'worst tenth':>13}"
        f"{'clipped':>9}  {'epsilon':<19}epsilon covers",
    ]
    for method in config.method_kinds:
        own = _select(findings.outcomes, method, epsilon)
        lines.append(
            f"  {method.title:<16}{_mean(own, 'test'):>8.4f} +- {_spread(own):.4f}"
            f"{_mean(own, 'test_stddev'):>14.4f}{_mean(own, 'worst_tenth'):>13.4f}"
            f"{_format_share(own):>9}  {_format_epsilon(own[0]):<19}"
            f"{name_covered(method, epsilon)}"
        )
    pairs = [one for one in findings.comparisons if one.epsilon == epsilon]
    if pairs:
        lines.append("  CENTAUR minus each, paired by seed, 95 % t interval:")
    lines += [_describe_pair(one) for one in pairs]
    return "\n".join(lines)


def _describe_pair(one: Comparison) -> str:
    found = one.difference
    covered = name_covered(Method.CENTAUR, one.epsilon)
    return (
        f"    {one.opponent.title:<16}{found.mean:+.4f} ({found.low:+.4f} to "
        f"{found.high:+.4f})  {one.verdict.value:<11}epsilon {one.epsilon:g} covers "
        f"{covered}"
    )


def _describe_diagnoses(diagnoses: Sequence[Diagnosis]) -> str:
    """Returns the means over rounds, of the whole update and of its parts."""
    first = diagnoses[0].run
    lines = [
        f"What clients send: means over the rounds of one run each (seed {first.seed}, "
        f"epsilon {first.epsilon:g}). {_NOT_PRIVATE}",
        f"  {'':<16}{'part':<16}{'norm':>9}{'after clip':>12}{'clipped':>9}"
        f"{'agreement':>11}{'signal/noise':>14}{'first round':>13}{'last':>8}",
    ]
    for one in diagnoses:
        means = one.average()
        for part in PARTS:
            if f"{part}/mean_norm" not in means:
                lines.append(f"  {'':<16}{part:<16}{'not sent':>9}")
                continue
            name = f"{part}/signal_to_noise"
            title = one.run.method.title if part == "whole" else ""
            share = f"{means['fraction_clipped']:.3f}" if part == "whole" else ""
            lines.append(
                f"  {title:<16}{part:<16}{means[f'{part}/mean_norm']:>9.4f}"
                f"{means[f'{part}/clipped_norm']:>12.4f}{share:>9}"
                f"{means[f'{part}/agreement']:>11.3f}{means[name]:>14.3f}"
                f"{one.rows[0][name]:>13.3f}{one.rows[-1][name]:>8.3f}"
            )
    lines += [
        "  agreement: the norm of the sum of clipped updates over the sum of their "
        "norms.",
        "  signal/noise: the norm of the mean clipped update over that of the noise in "
        "the mean.",
    ]
    return "\n".join(lines)


def _draw_utility(axes: Any, findings: Findings) -> None:
    """Draws the mean test metric against the budget, on a logarithmic axis."""
    config = findings.config
    finite = sorted(epsilon for epsilon in config.epsilons if math.isfinite(epsilon))
    # What is without noise stands beside the axis.
    beyond = 4 * finite[-1] if finite else 1.0
    for method, color in _list_colors(config):
        style = {"color": color, "capsize": 3, "marker": "o", "markersize": 4}
        if method is Method.STAND_ALONE:
            own = _select(findings.outcomes, method, math.inf)
            axes.axhline(
                _mean(own, "test"), color=color, linestyle="--", label=method.title
            )
            continue
        found = [_select(findings.outcomes, method, epsilon) for epsilon in finite]
        axes.errorbar(
            finite,
            [_mean(own, "test") for own in found],
            yerr=[_spread(own) for own in found],
            label=method.title,
            **style,
        )
        if math.inf in config.epsilons:
            own = _select(findings.outcomes, method, math.inf)
            axes.errorbar([beyond], [_mean(own, "test")], yerr=[_spread(own)], **style)
    axes.set_xscale("log")
    ticks = {epsilon: f"{epsilon:g}" for epsilon in finite}
    if math.inf in config.epsilons:
        ticks[beyond] = "no noise"
    axes.set_xticks(list(ticks), list(ticks.values()), minor=False)
    axes.minorticks_off()
    axes.set(
        xlabel="epsilon of what is sent, not of the tuning",
        ylabel=f"test {findings.outcomes[0].metric}, mean over clients",
    )


def _draw_curves(axes: Any, findings: Findings) -> None:
    """Draws the mean validation metric by round, at one epsilon."""
    config = findings.config
    epsilon = config.shown_epsilon
    for method, color in _list_colors(config):
        own = _select(findings.outcomes, method, epsilon)
        if method is Method.STAND_ALONE:
            axes.axhline(_mean(own, "validation"), color=color, linestyle="--")
            continue
        curves = [dict(one.curve) for one in own]
        rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
        means = [np.mean([curve[number] for curve in curves]) for number in rounds]
        axes.plot(rounds, means, color=color, marker="o" if len(rounds) == 1 else "")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(
        xlabel=f"round, at epsilon {epsilon:g}",
        ylabel=f"validation {findings.outcomes[0].metric}, mean over clients and seeds",
    )


def _list_colors(config: ComparisonConfig) -> Iterator[tuple[Method, str]]:
    for method in config.method_kinds:
        yield method, f"C{list(Method).index(method)}"


def _select(
    outcomes: Sequence[Outcome], method: Method, epsilon: float
) -> list[Outcome]:
    """Returns a method's runs at an epsilon, or all where it has none."""
    return [
        one
        for one in outcomes
        if one.run.method is method and one.run.epsilon in (epsilon, None)
    ]


def _mean(outcomes: Sequence[Outcome], name: str) -> float:
    return float(np.mean([getattr(one, name) for one in outcomes]))


def _spread(outcomes: Sequence[Outcome]) -> float:
    """Returns the standard deviation of the test metric over seeds."""
    return float(np.std([one.test for one in outcomes], ddof=1))


def _format_share(outcomes: Sequence[Outcome]) -> str:
    shares = [one.fraction_clipped for one in outcomes]
    known = [share for share in shares if share is not None]
    return f"{np.mean(known):.3f}" if known else "-"


def _format_epsilon(one: Outcome) -> str:
    if one.epsilon is None:
        return "-"
    if one.standing is None:
        return f"{one.epsilon:g}"
    return f"{one.epsilon:.4g} ({one.standing})"


def _format_point(point: Point) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in point.items())


def _join(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
