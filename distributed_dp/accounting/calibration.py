"""Calibration: the least noise, and the finest grid, for a target epsilon."""

import dataclasses
import functools
import math
from collections.abc import Callable

from distributed_dp.accounting import search, validation
from distributed_dp.accounting.cohort import CohortScheme, compute_cohort_bounds
from distributed_dp.accounting.cost import (
    PrivacyCost,
    build_quantile,
    check_charges,
    compute_cost,
)
from distributed_dp.accounting.mode import Mode, resolve_mode
from distributed_dp.accounting.parameters import (
    MAX_BITS,
    Accountant,
    Accounting,
    AmplificationBound,
    DDGaussParameters,
    DistributedParameters,
    GaussianParameters,
    Mechanism,
    NormBound,
    Parameters,
    SkellamParameters,
)
from distributed_dp.accounting.release import QuantileRelease

# Half the width of the search, in natural logarithms of the noise multiplier.
_LOG_RANGE = 23.0
# Relative accuracy of the noise multiplier.
_TOLERANCE = 1e-7

_CLASSES: dict[Mechanism, type[DDGaussParameters] | type[SkellamParameters]] = {
    Mechanism.DDGAUSS: DDGaussParameters,
    Mechanism.SKELLAM: SkellamParameters,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Grid:
    """The part of a distributed mechanism that is fixed before sigma is."""

    l2_clip: float
    bits: int
    padded_dim: int
    clients_per_round: int
    beta: float
    num_stddevs: float
    rho: float
    norm_bound: NormBound

    def __post_init__(self) -> None:
        validation.check_positive("l2_clip", self.l2_clip)
        validation.check_integer("bits", self.bits, low=1, high=MAX_BITS)
        validation.check_integer("padded_dim", self.padded_dim, low=1)
        validation.check_beta(self.beta)
        validation.check_positive("num_stddevs", self.num_stddevs)
        validation.check_positive("rho", self.rho)
        validation.check_choice("norm_bound", self.norm_bound, kind=NormBound)

    @property
    def slack(self) -> float:
        """4**B - k^2 n, which must be positive for the rounding noise to fit."""
        return 4.0**self.bits - self.num_stddevs**2 * self.clients_per_round


def calibrate(
    mechanism: Mechanism,
    scheme: CohortScheme,
    *,
    epsilon: float,
    delta: float,
    num_rounds: int,
    l2_clip: float,
    bits: int | None = None,
    padded_dim: int | None = None,
    beta: float = math.exp(-0.5),
    num_stddevs: float = 4,
    rho: float = 1.0,
    norm_bound: NormBound = NormBound.WORST_CASE,
    accounting: Accounting = Accounting.PROVEN,
    bound: AmplificationBound | None = None,
    quantile_noise_multiplier: float | None = None,
    quantile_contribution: int = 1,
    accountant: Accountant = Accountant.RDP,
) -> Parameters:
    """Returns the parameters with the least noise that reach epsilon.

    Source: Kairouz, Liu, Steinke 2021, section on parameter selection: gamma and sigma
    solve 2^B gamma = 2 k sqrt(rho c^2 n^2 / d + (gamma^2/4 + sigma^2) n); n^2 is n
    under the optimistic norm bound. Given sigma, gamma has a closed form; along it
    epsilon decreases in sigma, so sigma is found by a root search.

    Guarantees: `compute_privacy` of the result at the same arguments is at most
    `epsilon`; the noise is within a relative 1e-6 of the least that is.

    Args:
      mechanism: which noise.
      scheme: the sampler.
      epsilon: the target, positive.
      delta: in (0, 1).
      num_rounds: T.
      l2_clip: c, in units of x.
      bits: B; needed by the distributed mechanisms.
      padded_dim: d, after the rotation's padding; needed by the same.
      beta: of the conditional rounding.
      num_stddevs: k, standard deviations of a summed coordinate in half the modulus.
      rho: spread of the rotation; 1 for Hadamard.
      norm_bound: what to assume of the norm of the sum.
      accounting: as in `compute_privacy`.
      bound: as in `compute_privacy`.
      quantile_noise_multiplier: as in `compute_privacy`.
      quantile_contribution: as in `compute_privacy`.
      accountant: as in `compute_privacy`.

    Returns:
      The mechanism's parameters.

    Raises:
      ValueError: for values out of range, a mode that does not match, or if no noise
        reaches the target (naming bits, n and k).
    """
    mode = resolve_mode(
        mechanism, scheme, accounting=accounting, bound=bound, accountant=accountant
    )
    validation.check_positive("epsilon", epsilon)
    quantile = build_quantile(quantile_noise_multiplier, quantile_contribution)
    build = _get_builder(
        mechanism,
        scheme,
        l2_clip=l2_clip,
        bits=bits,
        padded_dim=padded_dim,
        beta=beta,
        num_stddevs=num_stddevs,
        rho=rho,
        norm_bound=norm_bound,
    )

    def compute(mode: Mode, log_multiplier: float) -> PrivacyCost:
        return compute_cost(
            build(math.exp(log_multiplier)),
            scheme,
            mode=mode,
            num_rounds=num_rounds,
            delta=delta,
            quantile=quantile,
        )

    limit = compute(mode, _LOG_RANGE)
    if not limit.epsilon <= epsilon:
        largest = build(math.exp(_LOG_RANGE))
        _raise_infeasible(
            largest,
            scheme,
            epsilon=epsilon,
            delta=delta,
            limit=limit,
            num_stddevs=num_stddevs,
            quantile=quantile,
        )
    start = 0.0
    if accountant is Accountant.PLD:
        # RDP is faster, and never below PLD: its answer is a close upper end.
        by_rdp = dataclasses.replace(mode, accountant=Accountant.RDP)
        start = _find_log_multiplier(functools.partial(compute, by_rdp), epsilon)
    in_mode = functools.partial(compute, mode)
    return build(math.exp(_find_log_multiplier(in_mode, epsilon, start=start)))


def compute_granularity(
    local_stddev: float,
    *,
    l2_clip: float,
    bits: int,
    padded_dim: int,
    clients_per_round: int,
    num_stddevs: float = 4,
    rho: float = 1.0,
    norm_bound: NormBound = NormBound.WORST_CASE,
) -> float:
    """Returns gamma such that k standard deviations fit in half the modulus.

    Source: Kairouz, Liu, Steinke 2021, solved for gamma:
    gamma^2 = 4 k^2 (rho c^2 n^2 / d + sigma^2 n) / (4^B - k^2 n).

    Args:
      local_stddev: sigma, in units of x.
      l2_clip: c, in units of x.
      bits: B.
      padded_dim: d.
      clients_per_round: n.
      num_stddevs: k.
      rho: spread of the rotation.
      norm_bound: what to assume of the norm of the sum.

    Returns:
      gamma, in units of x.

    Raises:
      ValueError: if 4^B <= k^2 n: the rounding noise alone does not fit.
    """
    validation.check_non_negative("local_stddev", local_stddev)
    validation.check_integer("clients_per_round", clients_per_round, low=1)
    grid = _Grid(
        l2_clip=l2_clip,
        bits=bits,
        padded_dim=padded_dim,
        clients_per_round=clients_per_round,
        beta=0.0,
        num_stddevs=num_stddevs,
        rho=rho,
        norm_bound=norm_bound,
    )
    _check_slack(grid)
    return _compute_granularity(grid, local_stddev)


def _compute_granularity(grid: _Grid, local_stddev: float) -> float:
    signal = compute_signal_variance(
        grid.l2_clip,
        grid.clients_per_round,
        padded_dim=grid.padded_dim,
        rho=grid.rho,
        norm_bound=grid.norm_bound,
    )
    spread = math.hypot(
        math.sqrt(signal), local_stddev * math.sqrt(grid.clients_per_round)
    )
    return 2 * grid.num_stddevs * spread / math.sqrt(grid.slack)


def compute_signal_variance(
    l2_clip: float,
    clients_per_round: int,
    *,
    padded_dim: int,
    rho: float,
    norm_bound: NormBound,
) -> float:
    """Returns rho c^2 n^2 / d (worst case) or rho c^2 n / d (optimistic)."""
    power = 2 if norm_bound is NormBound.WORST_CASE else 1
    return rho * l2_clip**2 * clients_per_round**power / padded_dim


def _get_builder(
    mechanism: Mechanism,
    scheme: CohortScheme,
    *,
    l2_clip: float,
    bits: int | None,
    padded_dim: int | None,
    beta: float,
    num_stddevs: float,
    rho: float,
    norm_bound: NormBound,
) -> Callable[[float], Parameters]:
    """Returns the map from the noise multiplier to the parameters."""
    count = scheme.clients_per_round
    if mechanism is Mechanism.GAUSSIAN:
        validation.check_positive("l2_clip", l2_clip)
        return lambda multiplier: GaussianParameters(
            l2_clip=l2_clip, noise_multiplier=multiplier, clients_per_round=count
        )
    grid = _Grid(
        l2_clip=l2_clip,
        bits=_get_required("bits", bits),
        padded_dim=_get_required("padded_dim", padded_dim),
        clients_per_round=count,
        beta=beta,
        num_stddevs=num_stddevs,
        rho=rho,
        norm_bound=norm_bound,
    )
    _check_slack(grid)

    def build(multiplier: float) -> Parameters:
        local_stddev = multiplier * l2_clip / math.sqrt(count)
        return _CLASSES[mechanism](
            l2_clip=l2_clip,
            granularity=_compute_granularity(grid, local_stddev),
            local_stddev=local_stddev,
            beta=beta,
            bits=grid.bits,
            padded_dim=grid.padded_dim,
            clients_per_round=count,
        )

    return build


def _get_required(name: str, value: int | None) -> int:
    if value is None:
        raise ValueError(
            f"`{name}` must be given for the distributed mechanisms. Found {value!r}."
        )
    return value


def _check_slack(grid: _Grid) -> None:
    if grid.slack > 0:
        return
    count, width = grid.clients_per_round, grid.num_stddevs
    needed = math.log2(width * math.sqrt(count))
    raise ValueError(
        f"`bits` must exceed log2(k sqrt(n)) = {needed:.2f} "
        f"for n = {count} and k = {width:g}; raise `bits`, or lower n or k "
        f"(`num_stddevs`). Found bits = {grid.bits!r}."
    )


def _find_log_multiplier(
    compute: Callable[[float], PrivacyCost], epsilon: float, *, start: float = 0.0
) -> float:
    """Returns the least log noise multiplier, near enough, that reaches epsilon."""

    def compute_excess(log_multiplier: float) -> float:
        found = compute(log_multiplier).epsilon
        return math.log(max(found, 1e-300) / epsilon) if found < math.inf else found

    low, high, step = start, start, 0.25
    while compute_excess(high) > 0:
        low, high = high, min(_LOG_RANGE, high + step)
        step *= 2
    step = 0.25
    while low > -_LOG_RANGE and compute_excess(low) <= 0:
        low, high = max(-_LOG_RANGE, low - step), low
        step *= 2
    if compute_excess(low) <= 0:
        return low
    return search.find_safe_root(compute_excess, low, high, tolerance=_TOLERANCE)


def _raise_infeasible(
    largest: Parameters,
    scheme: CohortScheme,
    *,
    epsilon: float,
    delta: float,
    limit: PrivacyCost,
    num_stddevs: float,
    quantile: QuantileRelease | None,
) -> None:
    """Raises, naming the knob to turn, given the parameters of endless noise."""
    count = scheme.clients_per_round
    check_charges(limit, delta)
    reached = f"however much noise is added epsilon stays at {limit.epsilon:.4g}"
    if not isinstance(largest, DistributedParameters):
        raise ValueError(f"`epsilon` is not reached: {reached}. Found {epsilon!r}.")
    high = compute_cohort_bounds(scheme).high
    local_scale = largest.central_scale / math.sqrt(high)
    multiplier = largest.central_scale / largest.l2_sensitivity
    hint = ""
    if quantile is not None:
        hint = (
            "; or the quantile's noise (`quantile_noise_multiplier` "
            f"{quantile.noise_multiplier:g}, `quantile_contribution` "
            f"{quantile.contribution}) is too small or its shares too coarse"
        )
    raise ValueError(
        f"`epsilon` is not reached with bits = {largest.bits}, n = {count} and k = "
        f"{num_stddevs:g}: {reached}, because rounding to a grid so coarse that the "
        f"sum fits in 2**{largest.bits} limits the noise to {multiplier:.3g} "
        f"sensitivities and a share's scale to {local_scale:.3g} grid steps (at "
        f"{high} clients). "
        "Raise `bits` (they must exceed log2(k z sqrt(d)) for a noise multiplier z), "
        f"lower `num_stddevs` (k) or n{hint}. Found {epsilon!r}."
    )
