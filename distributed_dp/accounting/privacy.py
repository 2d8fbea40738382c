"""The privacy of a training run: epsilon for the analyst and for the server."""

import math

from distributed_dp.accounting import validation, wording
from distributed_dp.accounting.cohort import CohortScheme
from distributed_dp.accounting.conversion import REAL_ORDERS
from distributed_dp.accounting.cost import (
    build_quantile,
    check_charges,
    check_cohort,
    compute_cost,
    convert,
)
from distributed_dp.accounting.mode import resolve_mode
from distributed_dp.accounting.parameters import (
    Accountant,
    Accounting,
    AmplificationBound,
    DDGaussParameters,
    Parameters,
    SkellamParameters,
)
from distributed_dp.accounting.release import build_release
from distributed_dp.accounting.sampler import Draws
from distributed_dp.accounting.statement import PrivacyStatement

ANALYST = "analyst of the released models"
SERVER = "the server itself"


def compute_privacy(
    parameters: Parameters,
    scheme: CohortScheme,
    *,
    num_rounds: int,
    delta: float,
    accounting: Accounting = Accounting.PROVEN,
    bound: AmplificationBound | None = None,
    quantile_noise_multiplier: float | None = None,
    quantile_contribution: int = 1,
    accountant: Accountant = Accountant.RDP,
) -> PrivacyStatement:
    """Returns the analyst's view of `num_rounds` rounds.

    The analyst sees the released sums (models), not who took part. The noise of every
    round is the full central one: where fewer shares arrive, the server adds the rest
    inside Z_m, before centring and decoding.

    Modes (a mismatch raises): POISSON with PROVEN accounting is true add/remove under
    either bound; FIXED with PROVEN is replace-one; FIXED with AS_PUBLISHED is the
    papers' custom, printed as such.

    Args:
      parameters: the mechanism; its `clients_per_round` must be the scheme's.
      scheme: the sampler.
      num_rounds: T.
      delta: of the whole claim. Part of it pays for the noise sampler and for cohorts
        above the largest plausible size; the rest is converted.
      accounting: PROVEN, or AS_PUBLISHED for fixed-size cohorts.
      bound: for Poisson; None means SYMMETRIC (PROVEN) or PUBLISHED (AS_PUBLISHED).
      quantile_noise_multiplier: for adaptive clipping: the standard deviation of the
        noise on the sum of the indicators over one client's largest contribution.
      quantile_contribution: the integer u of the indicators -u and +u; a larger one
        makes the noise shares of that coordinate finer.
      accountant: RDP; or, for the central Gaussian, PLD or (at q = 1) ANALYTIC.

    Returns:
      The statement; its epsilon is inf where nothing can be claimed (no noise, hardly
      any, or shares too coarse for their sum to resemble a discrete Gaussian).

    Raises:
      ValueError: for values out of range, a mode that does not match, or a delta that
        the charges use up whatever the noise.
    """
    mode = resolve_mode(
        parameters.mechanism,
        scheme,
        accounting=accounting,
        bound=bound,
        accountant=accountant,
    )
    check_cohort(parameters, scheme)
    quantile = build_quantile(quantile_noise_multiplier, quantile_contribution)
    cost = compute_cost(
        parameters,
        scheme,
        mode=mode,
        num_rounds=num_rounds,
        delta=delta,
        quantile=quantile,
    )
    check_charges(cost, delta)
    return PrivacyStatement(
        view=ANALYST,
        mechanism=wording.describe_mechanism(parameters.mechanism),
        epsilon=cost.epsilon,
        delta=delta,
        adjacency=mode.adjacency,
        sampler=wording.describe_sampler(scheme),
        sampling_rate=scheme.sampling_rate,
        num_rounds=num_rounds,
        order=cost.order,
        bound=wording.describe_bound(parameters, scheme, mode),
        accountant=wording.describe_accountant(mode.accountant),
        sampler_charge=cost.sampler_charge,
        overflow_charge=cost.overflow_charge,
        assumptions=wording.list_assumptions(parameters, scheme, mode, quantile),
        num_clients=scheme.num_clients,
        as_published=mode.as_published,
    )


def compute_server_privacy(
    parameters: DDGaussParameters | SkellamParameters,
    *,
    num_rounds: int,
    num_shares: float,
    max_shares: int,
    delta: float,
    num_clients: int,
    quantile_noise_multiplier: float | None = None,
    quantile_contribution: int = 1,
) -> PrivacyStatement:
    """Returns the server's own view, or that of anyone who knows the cohorts.

    Adjacency is zero-out (the user's noise share stays), nothing is amplified, and only
    the shares of surviving clients count: the server knows what it added itself.

    Args:
      parameters: the distributed mechanism.
      num_rounds: the largest number of rounds that any one user joined.
      num_shares: shares added by surviving clients in each of these rounds, in units
        of the parameters' share (variance local_stddev^2): with K joined, K' survivors
        and the share scaled to K, this is n K' / max(K, low). A fraction is allowed.
      max_shares: the largest number of clients whose noise is summed in a round
        (Poisson: the cohort bounds' `high`; fixed: the cohort); decides how coarse one
        share can be.
      delta: of the whole claim.
      num_clients: N, for delta * N.
      quantile_noise_multiplier: as in `compute_privacy`.
      quantile_contribution: as in `compute_privacy`.

    Returns:
      The statement.

    Raises:
      ValueError: for values out of range, or a delta that the charges use up.
    """
    if not isinstance(parameters, (DDGaussParameters, SkellamParameters)):
        raise ValueError(
            "`parameters` must be a distributed mechanism's: the server of a central "
            f"one sees the sum without noise. Found {parameters!r}."
        )
    validation.check_integer("num_rounds", num_rounds, low=1)
    validation.check_positive("num_shares", num_shares)
    validation.check_delta(delta)
    validation.check_integer("num_clients", num_clients, low=1)
    validation.check_integer("max_shares", max_shares, low=1)
    # A share at the largest cohort is the smallest one.
    shares = max(num_shares, max_shares)
    finest = max(parameters.clients_per_round, max_shares)
    local_stddev = parameters.central_stddev / math.sqrt(finest)
    release = build_release(
        parameters,
        num_shares=shares,
        local_stddev=local_stddev,
        central_stddev=math.sqrt(num_shares) * parameters.local_stddev,
        quantile=build_quantile(quantile_noise_multiplier, quantile_contribution),
    )
    cost = convert(
        [(REAL_ORDERS, num_rounds * release.base_curve(REAL_ORDERS))],
        delta=delta,
        release=release,
        draws=Draws(num_rounds=num_rounds, shares_per_round=shares, sampling_rate=1.0),
        overflow_charge=0.0,
    )
    check_charges(cost, delta)
    return PrivacyStatement(
        view=SERVER,
        mechanism=wording.describe_mechanism(parameters.mechanism),
        epsilon=cost.epsilon,
        delta=delta,
        adjacency="zero out one user's update",
        sampler="cohorts known, nothing amplified",
        sampling_rate=1.0,
        num_rounds=num_rounds,
        order=cost.order,
        bound=f"{wording.describe_base(parameters)}; {num_shares:g} shares",
        accountant="RDP",
        sampler_charge=cost.sampler_charge,
        overflow_charge=0.0,
        assumptions=(
            *wording.COMMON_ASSUMPTIONS,
            f"no user joins more than {num_rounds} rounds, and in each of them "
            f"surviving honest clients add the noise of {num_shares:g} shares",
        ),
        num_clients=num_clients,
        as_published=False,
    )
