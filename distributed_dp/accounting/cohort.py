"""Who is sampled: the cohort scheme and the plausible range of the cohort's size."""

import dataclasses

from scipy import stats

from distributed_dp.accounting import validation
from distributed_dp.accounting.parameters import Sampling

OVERFLOW_TAIL = 1e-15
UNDERFLOW_TAIL = 1e-9


@dataclasses.dataclass(frozen=True)
class CohortScheme:
    """How a round's cohort is drawn from the population.

    Attributes:
      sampling: POISSON (each user joins with probability n / N) or FIXED (n users
        without replacement).
      num_clients: N, the number of users in the population.
      clients_per_round: n, the expected (POISSON) or exact (FIXED) cohort size.
    """

    sampling: Sampling
    num_clients: int
    clients_per_round: int

    def __post_init__(self) -> None:
        validation.check_choice("sampling", self.sampling, kind=Sampling)
        validation.check_integer("num_clients", self.num_clients, low=1)
        validation.check_integer("clients_per_round", self.clients_per_round, low=1)
        if self.clients_per_round > self.num_clients:
            raise ValueError(
                "`clients_per_round` must be at most `num_clients` "
                f"({self.num_clients!r}). Found {self.clients_per_round!r}."
            )

    @property
    def sampling_rate(self) -> float:
        """q = n / N."""
        return self.clients_per_round / self.num_clients


@dataclasses.dataclass(frozen=True, kw_only=True)
class CohortBounds:
    """The range of cohort sizes that the local noise is scaled for.

    With K joined clients a share's scale is central_scale / sqrt(clamp(K, low, high)).
    Below `low` the server adds the missing shares inside Z_m; above `high`
    there is more noise than promised, and that event's probability is charged to delta.

    Attributes:
      low: the largest size (at least 1) that K falls short of with probability at most
        UNDERFLOW_TAIL.
      high: the smallest size that K exceeds with probability at most OVERFLOW_TAIL
        when a given user joins.
      overflow_probability: per round, P[Binomial(N - 1, q) >= high]: K > high is
        possible only if the *other* users number at least `high`, an event whose
        probability is the same with and without the user.
      underflow_probability: per round, P[K < low].
    """

    low: int
    high: int
    overflow_probability: float
    underflow_probability: float


def compute_cohort_bounds(
    scheme: CohortScheme, num_rounds: int | None = None
) -> CohortBounds:
    """Returns the plausible range of the cohort's size.

    The bounds depend on the scheme alone, so that the noise which a client adds never
    depends on how long training runs.

    Args:
      scheme: the cohort scheme.
      num_rounds: if given, T times the overflow probability must stay below 1e-9.

    Returns:
      low = high = n for FIXED.

    Raises:
      ValueError: if so many rounds are planned that the overflow is not negligible.
    """
    bounds = _compute_bounds(scheme)
    if num_rounds is not None:
        validation.check_integer("num_rounds", num_rounds, low=1)
        if num_rounds * bounds.overflow_probability > 1e-9:
            raise ValueError(
                "`num_rounds` must be at most "
                f"{int(1e-9 / bounds.overflow_probability)} for the cohort's tail to "
                f"be negligible. Found {num_rounds!r}."
            )
    return bounds


def _compute_bounds(scheme: CohortScheme) -> CohortBounds:
    expected, rate = scheme.clients_per_round, scheme.sampling_rate
    if scheme.sampling is Sampling.FIXED or rate == 1:
        return CohortBounds(
            low=expected,
            high=expected,
            overflow_probability=0.0,
            underflow_probability=0.0,
        )
    others = stats.binom(scheme.num_clients - 1, rate)
    everyone = stats.binom(scheme.num_clients, rate)
    # sf(k - 1) = P[others >= k]. isf and ppf only start the search.
    high = max(1, int(others.isf(OVERFLOW_TAIL)))
    while high > 1 and others.sf(high - 2) <= OVERFLOW_TAIL:
        high -= 1
    while others.sf(high - 1) > OVERFLOW_TAIL:
        high += 1
    low = min(high, max(1, int(everyone.ppf(UNDERFLOW_TAIL))))
    while low > 1 and everyone.cdf(low - 1) > UNDERFLOW_TAIL:
        low -= 1
    while low < high and everyone.cdf(low) <= UNDERFLOW_TAIL:
        low += 1
    return CohortBounds(
        low=low,
        high=high,
        overflow_probability=float(others.sf(high - 1)),
        underflow_probability=float(everyone.cdf(low - 1)),
    )
