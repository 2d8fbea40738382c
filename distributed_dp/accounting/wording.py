"""The words of a statement: sampler, bound, accountant and assumptions."""

from distributed_dp.accounting.cohort import CohortScheme, compute_cohort_bounds
from distributed_dp.accounting.mode import Amplification, Mode
from distributed_dp.accounting.parameters import (
    Accountant,
    DistributedParameters,
    Mechanism,
    Parameters,
    Sampling,
)
from distributed_dp.accounting.release import QuantileRelease
from distributed_dp.accounting.statement import AS_PUBLISHED_WORDS

_MECHANISMS = {
    Mechanism.DDGAUSS: "distributed discrete Gaussian",
    Mechanism.SKELLAM: "distributed Skellam",
    Mechanism.GAUSSIAN: "central Gaussian",
}

_BASES = {
    Mechanism.DDGAUSS: "Kairouz, Liu, Steinke 2021, proposition 14",
    Mechanism.SKELLAM: "Agarwal, Kairouz, Liu 2021, theorem 3.5",
    Mechanism.GAUSSIAN: "Renyi divergence of Gaussians",
}

_ACCOUNTANTS = {
    Accountant.RDP: "RDP, at integer orders where amplified",
    Accountant.PLD: "PLD (dp_accounting)",
    Accountant.ANALYTIC: "analytic Gaussian (Balle, Wang 2018)",
}

COMMON_ASSUMPTIONS = (
    "secure aggregation reveals nothing but the sum modulo 2**bits, and every client "
    "that takes part clips, rounds and adds its noise honestly",
    "noise streams are independent, perfectly random outputs of the generator (seeds "
    "have 64 bits: that two of s streams agree has a probability of the order of "
    "s^2 / 2^64, which is not charged)",
)


def describe_mechanism(mechanism: Mechanism) -> str:
    """Returns the mechanism's name in words."""
    return _MECHANISMS[mechanism]


def describe_base(parameters: Parameters) -> str:
    """Returns the theorem behind the curve without sampling."""
    return _BASES[parameters.mechanism]


def describe_accountant(accountant: Accountant) -> str:
    """Returns the accountant's name in words."""
    return _ACCOUNTANTS[accountant]


def describe_sampler(scheme: CohortScheme) -> str:
    """Returns how cohorts are drawn."""
    if scheme.sampling is Sampling.POISSON:
        return (
            "Poisson: each user joins independently, "
            f"{scheme.clients_per_round} expected"
        )
    return f"fixed: {scheme.clients_per_round} users without replacement"


def describe_bound(parameters: Parameters, scheme: CohortScheme, mode: Mode) -> str:
    """Returns the theorems behind the analyst's epsilon."""
    if mode.accountant is not Accountant.RDP:
        words = "exact for the Gaussian, rounded up"
        if mode.accountant is Accountant.PLD:
            words = "Poisson-sampled Gaussian, discretised pessimistically"
    elif scheme.sampling_rate == 1:
        words = f"{describe_base(parameters)}; not amplified, q = 1"
        if mode.sensitivity_factor == 2:
            words += ", sensitivities doubled"
    else:
        words = f"{_describe_moments(parameters, mode)}; {mode.amplification.value}"
    if mode.as_published:
        words += f"; {AS_PUBLISHED_WORDS}"
    return words


def _describe_moments(parameters: Parameters, mode: Mode) -> str:
    symmetric = mode.amplification is Amplification.SYMMETRIC
    if symmetric and parameters.mechanism is Mechanism.DDGAUSS:
        return (
            "moments of one discrete Gaussian, and the closeness of the summed shares "
            "to it"
        )
    return describe_base(parameters)


def list_assumptions(
    parameters: Parameters,
    scheme: CohortScheme,
    mode: Mode,
    quantile: QuantileRelease | None,
) -> tuple[str, ...]:
    """Returns what the analyst's epsilon rests on."""
    lines = [
        "the analyst knows neither who took part in a round nor any share of the noise",
        "the sum is divided by the expected cohort size "
        f"{scheme.clients_per_round}, never by a count",
    ]
    if isinstance(parameters, DistributedParameters):
        lines = [*COMMON_ASSUMPTIONS, *lines]
        lines.append(
            "noise that the arrived clients' shares leave missing is added by the "
            "server modulo 2**bits, before centring and decoding, and not disclosed"
        )
        if scheme.sampling is Sampling.POISSON:
            high = compute_cohort_bounds(scheme).high
            lines.append(
                "shares and what the server adds carry the same noise for every cohort "
                f"of up to {high} clients; larger cohorts are charged to delta"
            )
    else:
        lines.append(
            "a trusted server clips and adds the noise; it is real-valued in theory "
            "and float32 in the simulation, which epsilon does not model"
        )
    if scheme.sampling is Sampling.POISSON:
        lines.append("every user joins each round independently of all else")
    elif mode.as_published:
        lines.append(
            "the sampler is treated as if Poisson, which fixed-size cohorts are not"
        )
    else:
        lines.append("each cohort is uniform among those of its size")
    if quantile is not None:
        lines.append(
            "the adaptive clip's quantile is released with its own noise, standard "
            f"deviation {quantile.noise_multiplier:g} times one contribution of "
            f"{quantile.contribution}"
        )
    return tuple(lines)
