"""What run_linear_representation prints and writes."""

import collections
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from centaur import linear
from distributed_dp.accounting import Accountant
from scripts import linear_results as names
from scripts.field_list import format_fields
from scripts.linear_config import LinearConfig
from scripts.linear_sweeps import read_adjacency
from simulation import seeds, table

# What the paper claims of the floor: exponents, and how far a measured one may lie.
DIM_EXPONENT, DIM_TOLERANCE = 1.0, 0.15
EPSILON_EXPONENT, EPSILON_TOLERANCE = -1.0, 0.15
_LEAST_DIMS = 5
# The contraction is read off rounds that end this many floors away.
_ABOVE_FLOOR = 3.0
_DISTANCE = "distance = ||(I - B B^T) B*||_2, the sine of the largest angle"
_EXACT = (
    "distances, clip shares and norms are exact functions of the users' data, which "
    "epsilon does not cover: they are known because the users are made up"
)


def describe_run(
    config: LinearConfig, *, root: seeds.RootSeed, folder: pathlib.Path, device: str
) -> str:
    """Returns the first lines: what the run will do."""
    adjacency = read_adjacency(config).value
    lines = {
        "task": f"y = <w_i, B*^T x>, n = {config.num_users} users, rank k = "
        f"{config.rank}; {config.repeats} repeats on the same users",
        "error": _DISTANCE,
        "start": f"power method, T_0 = {config.trials} trials of L = {config.steps} "
        f"steps on {config.start_examples} examples,\nzeta_0 = "
        f"{config.start_clip_scale:g} sqrt(d k); a choice among trials",
        "rounds": f"T = {config.rounds}, eta_g = {config.learning_rate:g}, zeta_g = "
        f"{config.clip_scale:g} sqrt(d k); fresh disjoint subsets of\n"
        f"{config.head_examples} and {config.gradient_examples} examples every round, "
        f"of m = {config.examples_per_user}",
        "privacy": f"user level, delta = {config.delta:g}, {config.accountant} "
        f"accounting of start and rounds in one ledger\nadjacency: {adjacency}\n"
        "fresh examples of the same user cost as much as old ones",
        "engine": device,
        "randomness": root.description,
        "output": str(folder),
    }
    return format_fields(lines)


def summarize(
    config: LinearConfig, results: names.Results, root: seeds.RootSeed
) -> dict[str, Any]:
    """Returns everything that is printed, as JSON values."""
    notes = [_EXACT]
    if root.reproducible:
        notes.append(
            "seeded: no epsilon holds against those who know or guess the seed"
        )
    return {
        "metric": _DISTANCE,
        "notes": notes,
        "curves": [_summarize_curve(results, epsilon) for epsilon in config.epsilons],
        "no_privacy": _summarize_free(results),
        "random_start": [
            _summarize_runs(_pick(results, "epsilon", names.RANDOM_START, epsilon))
            for epsilon in config.epsilons
        ],
        "floor_against_epsilon": _judge(
            _fit(results.select("epsilon", names.CENTAUR), "epsilon"),
            EPSILON_EXPONENT,
            EPSILON_TOLERANCE,
        ),
        "noise_against_epsilon": _fit_noise(results),
        "floor_against_dim": {
            method: _judge(
                _fit(results.select("dim", method), "dim"),
                DIM_EXPONENT,
                DIM_TOLERANCE,
            )
            for method in (
                names.CENTAUR,
                names.NORMAL_EQUATIONS,
                names.WHOLE_MATRIX,
            )
        },
        "enough_dims": len(config.dims) >= _LEAST_DIMS,
        "dims": [_summarize_dim(results, dim) for dim in config.dims],
        "starts": _summarize_starts(config, results),
        "privacy": [
            statement.to_dict() for statement in _compute_statements(config, results)
        ],
    }


def describe_results(
    config: LinearConfig,
    results: names.Results,
    summary: dict[str, Any],
    *,
    files: Sequence[pathlib.Path],
    seconds: float,
) -> str:
    """Returns the last lines: what came out, and where it lies."""
    blocks = [
        _describe_curves(config, summary),
        _describe_epsilon(summary),
        _describe_dims(config, summary),
        _describe_starts(config, summary["starts"]),
        "\n".join(map(str, _compute_statements(config, results)[:1])),
        "\n".join(summary["notes"]),
        format_fields(
            {
                "wall time": f"{seconds:.1f} s",
                "files": "\n".join(map(str, files)),
            }
        ),
    ]
    return "\n\n".join(blocks)


def tabulate_curves(results: names.Results) -> table.Table:
    """Returns the distance of every run by round."""
    rows = table.Table()
    for run in results.runs:
        for number, distance in enumerate(run.distances):
            rows = rows.append({**_get_key(run), "round": number, "distance": distance})
    return rows


def tabulate_floors(results: names.Results) -> table.Table:
    """Returns a row for every run."""
    rows = table.Table()
    for run in results.runs:
        rows = rows.append(
            {
                **_get_key(run),
                "noise_multiplier": run.noise_multiplier,
                "started": run.started,
                "start_distance": run.start_distance,
                "floor": run.floor,
                "clipped": run.clipped,
                "start_clipped": run.start_clipped,
                "largest_over_clip": run.largest,
            }
        )
    return rows


def tabulate_starts(results: names.Results) -> table.Table:
    """Returns a row for every start of the success rates."""
    rows = table.Table()
    for start in results.starts:
        rows = rows.append(
            {
                "start": start.index,
                "has_majority": start.has_majority,
                **{f"distance, {way}": start.distances[way] for way in start.distances},
                "clipped": start.clipped,
            }
        )
    return rows


def _get_key(run: names.Run) -> dict[str, table.Scalar]:
    return {
        "sweep": run.sweep,
        "method": run.method,
        "dim": run.dim,
        "epsilon": run.epsilon,
        "repeat": run.repeat,
    }


def _pick(
    results: names.Results, sweep: str, method: str, epsilon: float
) -> list[names.Run]:
    return [r for r in results.select(sweep, method) if r.epsilon == epsilon]


def _summarize_runs(runs: Sequence[names.Run]) -> dict[str, Any]:
    started = [run for run in runs if run.started]
    floors = [run.floor for run in started]
    return {
        "epsilon": runs[0].epsilon,
        "dim": runs[0].dim,
        "noise_multiplier": runs[0].noise_multiplier,
        "runs": len(runs),
        "without_majority": len(runs) - len(started),
        "start_distance": float(np.mean([run.start_distance for run in runs])),
        "floor": float(np.mean(floors)) if floors else None,
        "floor_stddev": float(np.std(floors, ddof=1)) if len(floors) > 1 else None,
        "clipped": max(run.clipped for run in runs),
        "start_clipped": max(run.start_clipped for run in runs),
        "largest_over_clip": max(run.largest for run in runs),
    }


def _summarize_curve(results: names.Results, epsilon: float) -> dict[str, Any]:
    runs = _pick(results, "epsilon", names.CENTAUR, epsilon)
    return _summarize_runs(runs) | {"contraction": _measure_contraction(runs)}


def _measure_contraction(runs: Sequence[names.Run]) -> float | None:
    factors = [
        factor
        for run in runs
        if run.started
        and (
            factor := linear.compute_contraction(
                run.distances, least=_ABOVE_FLOOR * run.floor
            )
        )
    ]
    return float(np.mean(factors)) if factors else None


def _summarize_free(results: names.Results) -> dict[str, Any]:
    runs = results.select("epsilon", names.NO_PRIVACY)
    # Without noise the floor is float32's.
    return _summarize_runs(runs) | {"contraction": _measure_contraction(runs)}


def _summarize_dim(results: names.Results, dim: int) -> dict[str, Any]:
    methods = (names.CENTAUR, names.NORMAL_EQUATIONS, names.WHOLE_MATRIX)
    found = {
        method: [run for run in results.select("dim", method) if run.dim == dim]
        for method in methods
    }
    rows: dict[str, Any] = {"dim": dim}
    for method, runs in found.items():
        (free,) = [run for run in runs if math.isinf(run.epsilon)]
        private = [run for run in runs if not math.isinf(run.epsilon)]
        rows[method] = _summarize_runs(private) | {"floor_without_noise": free.floor}
    return rows


def _fit(runs: Sequence[names.Run], name: str) -> linear.PowerLaw | None:
    """Fits the floors of private runs that started; None if too few did.

    One point a value, the geometric mean: its repetitions have users and B* in common,
    and are no independent points.
    """
    floors: dict[float, list[float]] = collections.defaultdict(list)
    for run in runs:
        if run.started and not math.isinf(run.epsilon):
            floors[float(getattr(run, name))].append(run.floor)
    if len(floors) < 3:
        return None
    means = [float(stats.gmean(values)) for values in floors.values()]
    return linear.fit_power_law(list(floors), means)


def _fit_noise(results: names.Results) -> float:
    """Returns the exponent of the rounds' noise multiplier against epsilon."""
    noise = {
        run.epsilon: run.noise_multiplier
        for run in results.select("epsilon", names.CENTAUR)
    }
    x, y = np.log(list(noise)), np.log(list(noise.values()))
    return float(np.polyfit(x, y, 1)[0])


def _judge(
    fit: linear.PowerLaw | None, exponent: float, tolerance: float
) -> dict[str, Any]:
    """Returns a fit, and whether its exponent is where the paper has CENTAUR's."""
    claim = {"expected": exponent, "tolerance": tolerance}
    if fit is None:
        return claim | {"fit": None, "inside": None}
    return claim | {
        "fit": {
            "exponent": fit.exponent,
            "stderr": fit.stderr,
            "interval": [fit.low, fit.high],
            "num_points": fit.num_points,
        },
        "inside": abs(fit.exponent - exponent) <= tolerance,
    }


def _summarize_starts(config: LinearConfig, results: names.Results) -> dict[str, Any]:
    radius = linear.compute_radius(config.trial_distance)
    limits = {"trial_distance": config.trial_distance, "radius": radius}
    rates: dict[str, Any] = {}
    for way in (names.SINGLE, names.BOOSTED, names.SAME_BUDGET):
        rates[way] = {
            name: vars(
                linear.compute_rate(
                    [start.distances[way] <= limit for start in results.starts]
                )
            )
            for name, limit in limits.items()
        }
    return {
        **limits,
        "count": len(results.starts),
        "without_majority": sum(not start.has_majority for start in results.starts),
        "clipped": max(start.clipped for start in results.starts),
        "rates": rates,
    }


def _compute_statements(config: LinearConfig, results: names.Results) -> list[Any]:
    """Returns the claim of one run of each kind of ledger, CENTAUR's first."""
    runs = [
        *_pick(results, "dim", names.CENTAUR, config.dim_epsilon)[:1],
        *_pick(results, "dim", names.NORMAL_EQUATIONS, config.dim_epsilon)[:1],
        *_pick(results, "dim", names.WHOLE_MATRIX, config.dim_epsilon)[:1],
        *_pick(results, "epsilon", names.RANDOM_START, config.epsilons[0])[:1],
    ]
    notes: tuple[str, ...] = (
        "whoever sees several runs of this study: they are repetitions on the same "
        "users, and each epsilon is that of its own run alone",
    )
    if config.seed is not None:
        notes += (
            "those who know or guess the seed of this run, which stands in config.json",
        )
    return [
        linear.compute_statement(
            run.ledger,
            num_users=config.num_users,
            delta=config.delta,
            adjacency=read_adjacency(config),
            accountant=Accountant(config.accountant),
            notes=notes,
        )
        for run in runs
        if run.ledger is not None
    ]


def _describe_curves(config: LinearConfig, summary: dict[str, Any]) -> str:
    lines = [
        f"Distance to B* at d = {config.dim}, means over repeats (floor: last "
        f"{config.floor_rounds} of {config.rounds} rounds; factor: a round's, above "
        f"{_ABOVE_FLOOR:g} floors)",
        f"{'':<14}{'epsilon':>8}{'sigma_g':>9}{'start':>9}{'factor':>8}"
        f"{'floor':>21}{'clipped':>9}{'max/zeta':>9}{'no majority':>13}",
    ]
    rows = [(names.NO_PRIVACY, summary["no_privacy"])]
    rows += [(names.CENTAUR, row) for row in summary["curves"]]
    rows += [(names.RANDOM_START, row) for row in summary["random_start"]]
    for name, row in rows:
        factor = row.get("contraction")
        lines.append(
            f"{name:<14}{row['epsilon']:>8g}{row['noise_multiplier']:>9.4g}"
            f"{row['start_distance']:>9.4f}"
            + (f"{factor:>8.3f}" if factor is not None else f"{'-':>8}")
            + f"{_format_floor(row):>21}{row['clipped']:>9.2g}"
            f"{row['largest_over_clip']:>9.2f}"
            f"{row['without_majority']:>7} of {row['runs']}"
        )
    return "\n".join(lines)


def _describe_epsilon(summary: dict[str, Any]) -> str:
    return (
        "Floor against epsilon: "
        + _format_fit(summary["floor_against_epsilon"])
        + "\n  (the calibrated noise itself has exponent "
        f"{summary['noise_against_epsilon']:.3f} over these epsilons)"
    )


def _describe_dims(config: LinearConfig, summary: dict[str, Any]) -> str:
    lines = [
        f"Floor against d at n = {config.num_users}, epsilon = {config.dim_epsilon:g}; "
        "thresholds "
        f"{config.clip_scale:g} sqrt(d k), and {config.matrix_clip_scale:g} d k for "
        "the methods that release a whole quadratic",
    ]
    for method in summary["floor_against_dim"]:
        lines.append(
            f"{method:<17}{'d':>5}{'start':>9}{'floor':>21}{'without noise':>15}"
            f"{'clipped':>10}{'max/zeta':>10}{'start clipped':>15}{'no majority':>13}"
        )
        for row in summary["dims"]:
            found = row[method]
            lines.append(
                f"{'':<17}{row['dim']:>5}{found['start_distance']:>9.4f}"
                f"{_format_floor(found):>21}{found['floor_without_noise']:>15.2g}"
                f"{found['clipped']:>10.2g}"
                f"{found['largest_over_clip']:>10.2f}{found['start_clipped']:>15.2g}"
                f"{found['without_majority']:>7} of {found['runs']}"
            )
        lines.append("  " + _format_fit(summary["floor_against_dim"][method]))
    if not summary["enough_dims"]:
        lines.append(f"Fewer than {_LEAST_DIMS} values of d: no claim is tested.")
    return "\n".join(lines)


def _describe_starts(config: LinearConfig, found: dict[str, Any]) -> str:
    lines = [
        f"Success of {found['count']} starts: n = {config.boost_users}, d = "
        f"{config.boost_dim}, L = {config.boost_steps}, epsilon = "
        f"{config.boost_epsilon:g} for T_0 = {config.boost_trials} trials; "
        f"{found['without_majority']} without majority; clipped "
        f"{found['clipped']:.2g}",
        f"{'':<28}{'distance <= ' + format(found['trial_distance'], 'g'):>26}"
        f"{'distance <= ' + format(found['radius'], '.3f'):>26}",
    ]
    for way, rates in found["rates"].items():
        cells = [
            f"{rate['rate']:.3f} [{rate['low']:.3f}, {rate['high']:.3f}]"
            for rate in rates.values()
        ]
        lines.append(f"{way:<28}" + "".join(f"{cell:>26}" for cell in cells))
    lines.append(
        "The second is what the choice vouches for if most trials keep the first. "
        "'one trial' has the noise of a boosted trial; the last the noise that "
        "one may have for all the epsilon. The intervals take starts for independent; "
        f"each {config.boost_group} of them have their users in common."
    )
    return "\n".join(lines)


def _format_floor(row: dict[str, Any]) -> str:
    if row["floor"] is None:
        return "-"
    if row["floor_stddev"] is None:
        return f"{row['floor']:.3g}"
    return f"{row['floor']:.3g} +- {row['floor_stddev']:.2g}"


def _format_fit(found: dict[str, Any]) -> str:
    fit = found["fit"]
    claim = f"{found['expected']:g} +- {found['tolerance']:g}"
    if fit is None:
        return f"exponent not measured (starts at fewer than 3 values); claim {claim}"
    low, high = fit["interval"]
    verdict = "inside" if found["inside"] else "outside"
    return (
        f"exponent {fit['exponent']:.3f} (standard error {fit['stderr']:.3f}, 95 % "
        f"{low:.3f} to {high:.3f}, {fit['num_points']} values): {verdict} {claim}"
    )
