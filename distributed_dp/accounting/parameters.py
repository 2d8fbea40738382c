"""What a mechanism is told: frozen, validated parameters and the enums of choices."""

import dataclasses
import enum
import math
from typing import ClassVar

from distributed_dp.accounting import validation

MAX_BITS = 53  # Every integer below 2**53 is a float64.


class Mechanism(enum.Enum):
    """The noise that is added."""

    DDGAUSS = "ddgauss"
    SKELLAM = "skellam"
    GAUSSIAN = "gaussian"


class Sampling(enum.Enum):
    """How the cohort of a round is drawn."""

    POISSON = "poisson"
    FIXED = "fixed"


class Accounting(enum.Enum):
    """Whether epsilon is a theorem for the sampler that runs, or the papers' custom."""

    PROVEN = "proven"
    AS_PUBLISHED = "as_published"


class AmplificationBound(enum.Enum):
    """The bound used for Poisson sampling (docs/privacy.md, "Amplification")."""

    SYMMETRIC = "symmetric"
    PUBLISHED = "published"


class NormBound(enum.Enum):
    """What calibration assumes of the norm of the sum: c n, or c sqrt(n)."""

    WORST_CASE = "worst_case"
    OPTIMISTIC = "optimistic"


class Accountant(enum.Enum):
    """The accountant; the distributed mechanisms know RDP only."""

    RDP = "rdp"
    PLD = "pld"
    ANALYTIC = "analytic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedParameters:
    """Parameters of a mechanism whose noise is the sum of the clients' shares.

    Grid units are multiples of `granularity`: the integers that are sent.

    Attributes:
      l2_clip: c, the bound on a client's L2 norm, in units of x.
      granularity: gamma, the grid's step, in units of x.
      local_stddev: sigma, the standard deviation of one share per coordinate when
        `clients_per_round` clients join, in units of x. 0 means no noise.
      beta: the conditional rounding's bias parameter; 0 accepts every draw.
      bits: B; sums are taken modulo 2**B.
      padded_dim: d, the length of the rotated vector.
      clients_per_round: n, the (expected) number of clients in a round.
    """

    l2_clip: float
    granularity: float
    local_stddev: float
    beta: float
    bits: int
    padded_dim: int
    clients_per_round: int

    def __post_init__(self) -> None:
        validation.check_positive("l2_clip", self.l2_clip)
        validation.check_positive("granularity", self.granularity)
        validation.check_non_negative("local_stddev", self.local_stddev)
        validation.check_beta(self.beta)
        validation.check_integer("bits", self.bits, low=1, high=MAX_BITS)
        validation.check_integer("padded_dim", self.padded_dim, low=1)
        validation.check_integer("clients_per_round", self.clients_per_round, low=1)

    @property
    def modulus(self) -> int:
        """m = 2**bits."""
        return 2 ** int(self.bits)

    @property
    def local_scale(self) -> float:
        """Standard deviation of one share, in grid units."""
        return self.local_stddev / self.granularity

    @property
    def central_stddev(self) -> float:
        """Standard deviation of the noise of the sum, in units of x."""
        return math.sqrt(self.clients_per_round) * self.local_stddev

    @property
    def central_scale(self) -> float:
        """Standard deviation of the noise of the sum, in grid units."""
        return self.central_stddev / self.granularity

    @property
    def noise_multiplier(self) -> float:
        """central_stddev / l2_clip."""
        return self.central_stddev / self.l2_clip

    @property
    def scaled_l2_clip(self) -> float:
        """c / gamma, the clip in grid units."""
        return self.l2_clip / self.granularity

    @property
    def max_squared_norm(self) -> float:
        """The largest squared norm of an accepted integer vector, in grid units.

        Source: Kairouz, Liu, Steinke 2021, the conditional rounding's acceptance rule.
        """
        return compute_max_squared_norm(
            self.scaled_l2_clip, self.padded_dim, beta=self.beta
        )

    @property
    def l2_sensitivity(self) -> float:
        """Delta_2 of one user's vector against zero, in grid units."""
        return math.sqrt(self.max_squared_norm)

    @property
    def l1_sensitivity(self) -> float:
        """Delta_1 of one user's vector against zero, in grid units.

        An integer vector y has ||y||_1 <= ||y||_2^2, besides the Cauchy-Schwarz bound.
        """
        return min(
            math.sqrt(self.padded_dim) * self.l2_sensitivity, self.max_squared_norm
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDGaussParameters(DistributedParameters):
    """The distributed discrete Gaussian (Kairouz, Liu, Steinke 2021)."""

    mechanism: ClassVar[Mechanism] = Mechanism.DDGAUSS


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkellamParameters(DistributedParameters):
    """The distributed Skellam mechanism (Agarwal, Kairouz, Liu 2021)."""

    mechanism: ClassVar[Mechanism] = Mechanism.SKELLAM


@dataclasses.dataclass(frozen=True, kw_only=True)
class GaussianParameters:
    """The central Gaussian: continuous noise added once to the sum.

    Attributes:
      l2_clip: c, the bound on a client's L2 norm, in units of x.
      noise_multiplier: central_stddev / l2_clip. 0 means no noise.
      clients_per_round: n, the (expected) number of clients in a round.
    """

    mechanism: ClassVar[Mechanism] = Mechanism.GAUSSIAN

    l2_clip: float
    noise_multiplier: float
    clients_per_round: int

    def __post_init__(self) -> None:
        validation.check_positive("l2_clip", self.l2_clip)
        validation.check_non_negative("noise_multiplier", self.noise_multiplier)
        validation.check_integer("clients_per_round", self.clients_per_round, low=1)

    @property
    def central_stddev(self) -> float:
        """Standard deviation of the noise of the sum, in units of x."""
        return self.noise_multiplier * self.l2_clip


Parameters = DDGaussParameters | SkellamParameters | GaussianParameters


def compute_max_squared_norm(scaled_l2_clip: float, dim: int, *, beta: float) -> float:
    """Returns the conditional rounding's bound on the squared norm, in grid units.

    Source: Kairouz, Liu, Steinke 2021, equation of the acceptance rule:
    min{ (c + sqrt(d))^2, c^2 + d/4 + sqrt(2 log(1/beta)) (c + sqrt(d)/2) }.

    Guarantees: a draw exceeds it with probability at most `beta`; beta = 0 gives the
    first bound, which no draw exceeds.

    Args:
      scaled_l2_clip: c / gamma.
      dim: d, the length of the vector.
      beta: in [0, 1).

    Returns:
      The bound, a float.
    """
    validation.check_non_negative("scaled_l2_clip", scaled_l2_clip)
    validation.check_integer("dim", dim, low=1)
    validation.check_beta(beta)
    root = math.sqrt(dim)
    always = (scaled_l2_clip + root) ** 2
    if beta == 0:
        return always
    deviation = math.sqrt(-2 * math.log(beta)) * (scaled_l2_clip + root / 2)
    return min(always, scaled_l2_clip**2 + dim / 4 + deviation)
