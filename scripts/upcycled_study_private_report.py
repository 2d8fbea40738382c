"""What run_upcycled_study prints and draws of clients' own noise."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.paired_difference import CONFIDENCE, Verdict
from scripts.upcycled_study_config import Noise, StudyConfig
from scripts.upcycled_study_private import (
    QUESTIONS,
    PrivateComparison,
    PrivateRow,
    Role,
)

_PROVEN = (
    "No figure here is proven but those called so. Output noise: the proven\n"
    "sensitivity is 2 tau, whatever |D|. Objective noise: theorem C.2 is about the\n"
    "exact minimiser of a one-output linear model with ||x|| <= 1, and this is SGD on\n"
    "a softmax regression without that: its figures rest on nothing. For proven ones\n"
    "see scripts/run_upcycled_fl.py --local_solver=exact."
)


def describe(
    config: StudyConfig,
    rows: Sequence[PrivateRow],
    comparisons: Sequence[PrivateComparison],
) -> list[str]:
    """Returns the tables, as blocks of lines."""
    blocks = [_PROVEN]
    for noise in (Noise(name) for name in config.noises):
        blocks.append(
            _describe_rows(noise, [row for row in rows if row.noise is noise])
        )
        found = [one for one in comparisons if one.noise is noise]
        blocks.append(_describe_comparisons(config, noise, found))
    return blocks


def count_claims(
    comparisons: Sequence[PrivateComparison],
) -> dict[Role, dict[Verdict, int]]:
    """Returns how many (data, mu) have each verdict, by opponent."""
    counts: dict[Role, dict[Verdict, int]] = {}
    for one in comparisons:
        found = counts.setdefault(one.opponent, dict.fromkeys(Verdict, 0))
        found[one.verdict] += 1
    return counts


def summarize(
    rows: Sequence[PrivateRow], comparisons: Sequence[PrivateComparison]
) -> dict[str, Any]:
    """Returns the same as JSON values."""
    return {
        "private_note": _PROVEN.replace("\n", " "),
        "private": [
            {
                "data": row.data,
                "noise": row.noise.value,
                "mu": row.mu,
                "title": row.role.value,
                "rounds": row.rounds,
                "noise_level": row.noise_level,
                "server_factor": row.server_factor,
                "test_accuracy": list(row.accuracy),
                "epsilons": {
                    name: dataclasses.asdict(found)
                    for name, found in row.epsilons.items()
                },
            }
            for row in rows
        ],
        "comparisons": [
            {
                "data": one.data,
                "noise": one.noise.value,
                "mu": one.mu,
                "opponent": one.opponent.value,
                "at": QUESTIONS[one.opponent],
                "difference": dataclasses.asdict(one.difference),
                "verdict": one.verdict.value,
                "largest_epsilons_as_published": list(one.epsilons),
            }
            for one in comparisons
        ],
    }


def draw(axes: Any, config: StudyConfig, rows: Sequence[PrivateRow]) -> None:
    """Draws test accuracy against epsilon, a row a noise, a column a data set."""
    for axis_row, name in zip(axes, config.noises, strict=True):
        for axis, data in zip(axis_row, config.data, strict=True):
            _draw_one(
                axis, [r for r in rows if (r.data, r.noise.value) == (data, name)]
            )
            axis.set_title(f"{data}, {name} noise", fontsize="small")
    axes[0][0].legend(fontsize="x-small")


def _draw_one(axis: Any, rows: Sequence[PrivateRow]) -> None:
    seen: set[Role] = set()
    for row in rows:
        values = 100 * np.array(row.accuracy)
        axis.errorbar(
            [row.epsilons["as_published"].largest],
            [values.mean()],
            [values.std(ddof=1)],
            fmt="o",
            capsize=3,
            color=f"C{list(Role).index(row.role)}",
            label=None if row.role in seen else row.role.value,
        )
        seen.add(row.role)
    axis.tick_params(labelsize="x-small")
    axis.set_xlabel(
        "largest epsilon of a client,\nas published, not proven", fontsize="small"
    )
    axis.set_ylabel("test accuracy, %", fontsize="small")


def _describe_rows(noise: Noise, rows: Sequence[PrivateRow]) -> str:
    level = "sigma" if noise is Noise.OUTPUT else "alpha"
    accountants = list(rows[0].epsilons)
    lines = [
        f"{noise.value.capitalize()} noise: test accuracy, %, mean +- standard "
        "deviation over seeds; epsilon of a client:",
        "mean over clients and seeds, no client's guarantee [least, largest of any]",
    ]
    lines += [f"  {name}: {rows[0].epsilons[name].standing}" for name in accountants]
    lines.append(
        f"  {'data':<9}{'mu':>5}  {'':<28}{'rounds':>6}{level:>9}{'server':>8}"
        f"  {'accuracy':<16}" + "".join(f"{name:<27}" for name in accountants)
    )
    for row in rows:
        values = 100 * np.array(row.accuracy)
        fields = [
            f"{one.mean:.4g} [{one.least:.3g}, {one.largest:.4g}]"
            for one in row.epsilons.values()
        ]
        text = (
            f"  {row.data:<9}{row.mu:>5g}  {row.role.value:<28}{row.rounds:>6}"
            f"{row.noise_level:>9.4g}{row.server_factor:>8g}  "
            f"{values.mean():.2f} +- {values.std(ddof=1):<7.2f}"
            + "".join(f"{field:<27}" for field in fields)
        )
        lines.append(text.rstrip())
    return "\n".join(lines)


def _describe_comparisons(
    config: StudyConfig, noise: Noise, found: Sequence[PrivateComparison]
) -> str:
    lines = [
        f"{noise.value.capitalize()} noise: Upcycled-FL minus its opponent, points of "
        f"test accuracy [{CONFIDENCE:.0%} t interval], {len(config.seeds)} seeds;",
        "epsilon: the largest of a client in any seed, as published, not proven: "
        "Upcycled-FL's, the opponent's",
    ]
    for one in found:
        low, mean, high = (
            100 * value
            for value in (one.difference.low, one.difference.mean, one.difference.high)
        )
        ours, theirs = one.epsilons
        lines.append(
            f"  {one.data:<9}{one.mu:>5g}  {one.opponent.value:<28}"
            f"{f'{mean:+.2f} [{low:+.2f}, {high:+.2f}]':<28}{one.verdict.value:<11}"
            f"epsilon {ours:.4g}, {theirs:.4g}: {one.order}"
        )
    lines.append("  Verdicts: leads / trails / undecided")
    for role, counts in count_claims(found).items():
        numbers = " / ".join(str(counts[verdict]) for verdict in Verdict)
        lines.append(f"    {role.value} ({QUESTIONS[role]}): {numbers}")
    if config.equal_epsilon:
        lines.append(
            f"  Server rates: least training loss on seed {config.selection_seed}, "
            "which no epsilon covers."
        )
    return "\n".join(lines)
