"""What run_upcycled_study prints and draws of clients' own noise."""

from collections.abc import Sequence

import numpy as np

from scripts.upcycled_study_claims import CONFIDENCE, Verdict
from scripts.upcycled_study_config import Noise, StudyConfig
from scripts.upcycled_study_private import PrivateComparison, PrivateRow

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
) -> dict[tuple[str, str], dict[Verdict, int]]:
    """Returns how many (data, mu) have each verdict, by question and opponent."""
    counts: dict[tuple[str, str], dict[Verdict, int]] = {}
    for one in comparisons:
        found = counts.setdefault(
            (one.question, one.opponent), dict.fromkeys(Verdict, 0)
        )
        found[one.verdict] += 1
    return counts


def save_plot(
    axes: Sequence[Sequence[object]], config: StudyConfig, rows: Sequence[PrivateRow]
) -> None:
    """Draws test accuracy against mean epsilon, a row a noise, a column a data set."""
    for axis_row, name in zip(axes, config.noises, strict=True):
        for axis, data in zip(axis_row, config.data, strict=True):
            _draw(axis, [r for r in rows if (r.data, r.noise.value) == (data, name)])
            axis.set_title(f"{data}, {name} noise", fontsize="small")  # type: ignore
    axes[0][0].legend(fontsize="x-small")  # type: ignore


def _draw(axis: object, rows: Sequence[PrivateRow]) -> None:
    colors: dict[str, str] = {}
    for row in rows:
        title = row.setting.title
        label = title if title not in colors else None
        colors.setdefault(title, f"C{len(colors)}")
        values = 100 * np.array(row.accuracy)
        epsilon = row.epsilons["as_published"][0]
        axis.errorbar(  # type: ignore
            [epsilon],
            [values.mean()],
            [values.std(ddof=1)],
            fmt="o",
            capsize=3,
            color=colors[title],
            label=label,
        )
    axis.set_xlabel("mean epsilon, as published", fontsize="small")  # type: ignore
    axis.set_ylabel("test accuracy, %", fontsize="small")  # type: ignore


def _describe_rows(noise: Noise, rows: Sequence[PrivateRow]) -> str:
    level = "sigma" if noise is Noise.OUTPUT else "alpha"
    lines = [
        f"{noise.value.capitalize()} noise: test accuracy, %, mean +- standard "
        "deviation over seeds; epsilon of a client: mean [least, largest]",
    ]
    standings = {name: found[3] for row in rows for name, found in row.epsilons.items()}
    lines += [f"  {name}: {standing}" for name, standing in standings.items()]
    lines.append(
        f"  {'data':<9}{'mu':>5}  {'':<28}{'rounds':>6}{level:>8}{'server':>8}"
        f"  {'accuracy':<16}{'as_published':<28}"
        + ("replace_one_average    proven" if noise is Noise.OUTPUT else "")
    )
    for row in rows:
        setting, values = row.setting, 100 * np.array(row.accuracy)
        mean, low, high, _ = row.epsilons["as_published"]
        text = (
            f"  {row.data:<9}{row.mu:>5g}  {setting.title:<28}{setting.rounds:>6}"
            f"{setting.noise_level:>8.3g}{setting.server_factor:>8g}  "
            f"{values.mean():.2f} +- {values.std(ddof=1):<7.2f}"
            f"{f'{mean:.4g} [{low:.3g}, {high:.3g}]':<28}"
        )
        for name in ("replace_one_average", "proven"):
            if name in row.epsilons:
                text += f"{row.epsilons[name][0]:<23.4g}"
        lines.append(text.rstrip())
    return "\n".join(lines)


def _describe_comparisons(
    config: StudyConfig, noise: Noise, found: Sequence[PrivateComparison]
) -> str:
    lines = [
        f"{noise.value.capitalize()} noise: Upcycled-FL minus its opponent, points of "
        f"test accuracy [{CONFIDENCE:.0%} t interval], {len(config.seeds)} seeds"
    ]
    for one in found:
        low, mean, high = (
            100 * value
            for value in (one.difference.low, one.difference.mean, one.difference.high)
        )
        epsilon = "smaller" if one.saves else "equal"
        lines.append(
            f"  {one.data:<9}{one.mu:>5g}  {one.opponent:<28}"
            f"{f'{mean:+.2f} [{low:+.2f}, {high:+.2f}]':<28}{one.verdict.value:<11}"
            f"epsilon {epsilon}; {one.question}"
        )
    lines.append("  Verdicts: leads / trails / undecided")
    for (question, opponent), counts in count_claims(found).items():
        numbers = " / ".join(str(counts[verdict]) for verdict in Verdict)
        lines.append(f"    {question}, {opponent}: {numbers}")
    return "\n".join(lines)
