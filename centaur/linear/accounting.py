"""The privacy of the start and the rounds together: one ledger of Gaussian releases.

Everyone takes part in every release, so nothing is amplified, and adaptive Gaussian
releases cost what one release costs: with mu^2 = sum of 1 / sigma^2 over releases, RDP
at order a is a mu^2 / 2, and the whole is one Gaussian of noise multiplier 1 / mu. What
happened (`ReleaseLedger`) is kept apart from what it costs (the functions).
"""

from __future__ import annotations

import dataclasses
import enum
import math

import numpy as np

from distributed_dp.accounting import (
    Accountant,
    PrivacyStatement,
    calibrate_analytic_gaussian,
    compute_epsilon_analytic_gaussian,
    compute_epsilon_from_rdp,
    compute_rdp_gaussian,
    search,
    validation,
)

# Of a Gaussian's curve, whose best order is 1 + sqrt(2 log(1 / delta)) / mu about.
_ORDERS = 1 + np.geomspace(1e-3, 1e7, 1501)
NOT_COVERED = (
    "distances to B*, clip counts and norms of contributions: exact functions of the "
    "users' data, measured here because the data are made up",
    "users' heads: each is a function of its user's examples, and stays with the user",
    "other runs on the same users: what every run costs adds up",
)
_ASSUMPTIONS = (
    "the number of users n, the divisor of every mean, is public and fixed",
    "every user takes part in every release: nothing is amplified",
    "a trusted server clips each user's contribution and adds the noise; it is "
    "real-valued in theory and float32 in the simulation, which epsilon does not model",
    "noise streams are independent, perfectly random outputs of the generator",
)


class Adjacency(enum.Enum):
    """Which change of the data epsilon is about; the values are printed.

    ZERO_OUT: One user's contributions become 0, n staying as it is: zeta.
    REPLACE_ONE: One user's data become any others, the paper's definition: 2 zeta.
    """

    ZERO_OUT = "zero out (add or remove) one user, n fixed"
    REPLACE_ONE = "replace one user"

    @property
    def sensitivity_factor(self) -> int:
        """The sensitivity over the clipping threshold."""
        return 2 if self is Adjacency.REPLACE_ONE else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Releases:
    """Releases of the Gaussian mechanism that are alike.

    Attributes:
        purpose: What they were for.
        count: How many.
        noise_multiplier: sigma; the standard deviation over the clipping threshold.
    """

    purpose: str
    count: int
    noise_multiplier: float

    def __post_init__(self) -> None:
        validation.check_integer("count", self.count, low=1)
        validation.check_non_negative("noise_multiplier", self.noise_multiplier)


@dataclasses.dataclass(frozen=True)
class ReleaseLedger:
    """What was released of one population, in order.

    Attributes:
        entries: The releases.
    """

    entries: tuple[Releases, ...] = ()

    def add(
        self, purpose: str, noise_multiplier: float, *, count: int = 1
    ) -> ReleaseLedger:
        """Returns the ledger with more releases."""
        new = Releases(purpose=purpose, count=count, noise_multiplier=noise_multiplier)
        last = self.entries[-1] if self.entries else None
        if last is not None and dataclasses.replace(last, count=count) == new:
            merged = dataclasses.replace(last, count=last.count + count)
            return ReleaseLedger((*self.entries[:-1], merged))
        return ReleaseLedger((*self.entries, new))

    @property
    def count(self) -> int:
        """The number of releases."""
        return sum(entry.count for entry in self.entries)

    @property
    def noise_multiplier(self) -> float:
        """That of the one release which costs as much: 1 / mu; inf of none."""
        if any(entry.noise_multiplier == 0 for entry in self.entries):
            return 0.0
        total = sum(entry.count / entry.noise_multiplier**2 for entry in self.entries)
        return 1 / math.sqrt(total) if total else math.inf


def compute_epsilon(
    ledger: ReleaseLedger,
    *,
    delta: float,
    adjacency: Adjacency,
    accountant: Accountant = Accountant.ANALYTIC,
) -> float:
    """Returns the epsilon of everything in a ledger; inf where noise was missing.

    Args:
        ledger: What happened.
        delta: Of the whole.
        adjacency: Which change of the data.
        accountant: ANALYTIC, exact for Gaussians; or RDP, which is larger.

    Raises:
        ValueError: If delta is out of range or the accountant is another one.
    """
    return _compute_epsilon(
        ledger.noise_multiplier / adjacency.sensitivity_factor, delta, accountant
    )[0]


def compute_statement(
    ledger: ReleaseLedger,
    *,
    num_users: int,
    delta: float,
    adjacency: Adjacency,
    accountant: Accountant = Accountant.ANALYTIC,
    notes: tuple[str, ...] = (),
) -> PrivacyStatement:
    """Returns the claim about all B that were released, with what it rests on.

    Args:
        ledger: What happened, at least one release.
        num_users: n.
        delta: Of the whole.
        adjacency: Which change of the data.
        accountant: ANALYTIC or RDP.
        notes: What epsilon does not cover, beyond what is always left out.
    """
    if not ledger.entries:
        raise ValueError("`ledger` must hold a release. Found none.")
    epsilon, order = _compute_epsilon(
        ledger.noise_multiplier / adjacency.sensitivity_factor, delta, accountant
    )
    parts = ", ".join(
        f"{entry.count} of the {entry.purpose} at noise multiplier "
        f"{entry.noise_multiplier:.6g}"
        for entry in ledger.entries
    )
    exact = accountant is Accountant.ANALYTIC
    return PrivacyStatement(
        view="whoever sees all B that were released, trials included",
        mechanism="central Gaussian",
        epsilon=epsilon,
        delta=delta,
        adjacency=adjacency.value,
        sampler="everyone takes part in every release",
        sampling_rate=1.0,
        num_rounds=ledger.count,
        order=order,
        bound=f"{parts}: as one Gaussian release at {ledger.noise_multiplier:.6g}; the "
        "choice among trials sees releases alone and is free",
        accountant="analytic Gaussian (Balle, Wang 2018)" if exact else "RDP",
        sampler_charge=0.0,
        overflow_charge=0.0,
        assumptions=_ASSUMPTIONS,
        not_covered=(*NOT_COVERED, *notes),
        num_clients=num_users,
        as_published=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise multipliers of the start and of the rounds.

    Attributes:
        start: sigma_0; None where there is no private start.
        rounds: sigma_g.
    """

    start: float | None
    rounds: float


def calibrate_noise(
    epsilon: float,
    delta: float,
    *,
    adjacency: Adjacency,
    start_releases: int,
    num_rounds: int,
    start_share: float,
    accountant: Accountant = Accountant.ANALYTIC,
) -> Noise:
    """Returns the least noise whose start and rounds together reach epsilon.

    Guarantees: `compute_epsilon` of the ledger of all releases is at most `epsilon`.

    Args:
        epsilon: Positive.
        delta: In (0, 1).
        adjacency: Which change of the data.
        start_releases: T_0 L; 0 for no private start.
        num_rounds: T.
        start_share: The part of mu^2 that the start spends, in (0, 1); not used without
            one.
        accountant: ANALYTIC or RDP.

    Raises:
        ValueError: If a value is out of range.
    """
    validation.check_positive("epsilon", epsilon)
    validation.check_delta(delta)
    validation.check_integer("start_releases", start_releases, low=0)
    validation.check_integer("num_rounds", num_rounds, low=1)
    if not 0 < start_share < 1:
        raise ValueError(f"`start_share` must be in (0, 1). Found {start_share!r}.")
    # A hair more than the least, for the rounding of sums.
    single = _calibrate_single(epsilon, delta, accountant) * (1 + 1e-12)
    single *= adjacency.sensitivity_factor
    if start_releases == 0:
        return Noise(start=None, rounds=single * math.sqrt(num_rounds))
    return Noise(
        start=single * math.sqrt(start_releases / start_share),
        rounds=single * math.sqrt(num_rounds / (1 - start_share)),
    )


def _calibrate_single(epsilon: float, delta: float, accountant: Accountant) -> float:
    """Returns the noise multiplier of one release."""
    if accountant is Accountant.ANALYTIC:
        return calibrate_analytic_gaussian(epsilon, delta, sensitivity=1.0)

    def compute_excess(log_multiplier: float) -> float:
        found, _ = _compute_epsilon(math.exp(log_multiplier), delta, accountant)
        return found - epsilon

    low, high = -1.0, 1.0
    while compute_excess(high) > 0:
        high += 1
    while compute_excess(low) <= 0:
        low -= 1
    return math.exp(search.find_safe_root(compute_excess, low, high))


def _compute_epsilon(
    noise_multiplier: float, delta: float, accountant: Accountant
) -> tuple[float, float | None]:
    """Returns epsilon of one release, and the order where there are orders."""
    validation.check_delta(delta)
    if noise_multiplier == math.inf:
        return 0.0, None
    if accountant is Accountant.ANALYTIC:
        epsilon = compute_epsilon_analytic_gaussian(
            delta, noise_multiplier=noise_multiplier
        )
        return epsilon, None
    if accountant is not Accountant.RDP:
        raise ValueError(
            "`accountant` must be 'analytic' or 'rdp'. Found "
            f"{getattr(accountant, 'value', accountant)!r}."
        )
    if noise_multiplier == 0:
        return math.inf, None
    found = compute_epsilon_from_rdp(
        _ORDERS, compute_rdp_gaussian(_ORDERS, noise_multiplier), delta=delta
    )
    return found.epsilon, found.order
