"""Which theorem applies: sampler, accountant and bound; a mismatch is refused."""

import dataclasses
import enum

from distributed_dp.accounting import validation
from distributed_dp.accounting.cohort import CohortScheme
from distributed_dp.accounting.parameters import (
    Accountant,
    Accounting,
    AmplificationBound,
    Mechanism,
    Sampling,
)


class Amplification(enum.Enum):
    """How one release is amplified by sampling; values are printed."""

    SYMMETRIC = (
        "Poisson amplification for symmetric noise "
        "(docs/privacy.md, after Mironov, Talwar, Zhang 2019)"
    )
    PUBLISHED = "Poisson amplification for any mechanism (Zhu, Wang 2019, theorem 5)"
    REPLACE_ONE = (
        "amplification without replacement "
        "(Wang, Balle, Kasiviswanathan 2019, theorem 9), sensitivities doubled"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """A consistent choice of adjacency, amplification and accountant.

    Attributes:
      adjacency: in words.
      sensitivity_factor: 1, or 2 for replace-one.
      amplification: the theorem.
      accountant: the accountant.
      as_published: whether the theorem is not one about the sampler that runs.
    """

    adjacency: str
    sensitivity_factor: int
    amplification: Amplification
    accountant: Accountant
    as_published: bool


def resolve_mode(
    mechanism: Mechanism,
    scheme: CohortScheme,
    *,
    accounting: Accounting,
    bound: AmplificationBound | None,
    accountant: Accountant,
) -> Mode:
    """Returns the mode that the choices name.

    Raises:
      ValueError: if the sampler does not match the accountant or the bound.
    """
    validation.check_choice("mechanism", mechanism, kind=Mechanism)
    validation.check_choice("accounting", accounting, kind=Accounting)
    validation.check_choice("accountant", accountant, kind=Accountant)
    if bound is not None:
        validation.check_choice("bound", bound, kind=AmplificationBound)
    published = accounting is Accounting.AS_PUBLISHED
    _check_accountant(mechanism, scheme, published, accountant)
    if mechanism is Mechanism.GAUSSIAN and bound is not None:
        raise ValueError(
            "`bound` must be None for the central Gaussian, whose accountant is its "
            f"own. Found {bound.value!r}."
        )
    if scheme.sampling is Sampling.POISSON:
        if published:
            raise ValueError(
                "`accounting` must be 'proven' when cohorts are Poisson: the published "
                "bound is proven there, choose it by bound='published'. "
                f"Found {accounting.value!r}."
            )
        return Mode(
            adjacency="add or remove one user",
            sensitivity_factor=1,
            amplification=_get_poisson(bound or AmplificationBound.SYMMETRIC),
            accountant=accountant,
            as_published=False,
        )
    if published:
        return _resolve_fixed_as_published(mechanism, bound, accountant)
    if bound is not None:
        raise ValueError(
            "`bound` must be None for fixed-size cohorts with proven accounting: "
            "Poisson bounds do not describe them; sample Poisson or account "
            f"'as_published'. Found {bound.value!r}."
        )
    return Mode(
        adjacency="replace one user",
        sensitivity_factor=2,
        amplification=Amplification.REPLACE_ONE,
        accountant=accountant,
        as_published=False,
    )


def _resolve_fixed_as_published(
    mechanism: Mechanism, bound: AmplificationBound | None, accountant: Accountant
) -> Mode:
    if bound is AmplificationBound.SYMMETRIC:
        raise ValueError(
            "`bound` must be 'published' (or None) for accounting 'as_published'. "
            f"Found {bound.value!r}."
        )
    # The papers account their central Gaussian by its own Poisson-sampled curve.
    central = mechanism is Mechanism.GAUSSIAN
    return Mode(
        adjacency="zero out one user's update",
        sensitivity_factor=1,
        amplification=(Amplification.SYMMETRIC if central else Amplification.PUBLISHED),
        accountant=accountant,
        as_published=True,
    )


def _get_poisson(bound: AmplificationBound) -> Amplification:
    if bound is AmplificationBound.PUBLISHED:
        return Amplification.PUBLISHED
    return Amplification.SYMMETRIC


def _check_accountant(
    mechanism: Mechanism, scheme: CohortScheme, published: bool, accountant: Accountant
) -> None:
    if accountant is Accountant.RDP:
        return
    if mechanism is not Mechanism.GAUSSIAN:
        raise ValueError(
            f"`accountant` must be 'rdp' for the {mechanism.value} mechanism. "
            f"Found {accountant.value!r}."
        )
    if accountant is Accountant.ANALYTIC and scheme.sampling_rate != 1:
        raise ValueError(
            "`accountant` can be 'analytic' only if everyone takes part, q = 1 "
            f"(here q = {scheme.sampling_rate!r}). Found {accountant.value!r}."
        )
    proven_fixed = scheme.sampling is Sampling.FIXED and not published
    if accountant is Accountant.PLD and proven_fixed:
        raise ValueError(
            "`accountant` must be 'rdp' (or 'analytic' at q = 1) for fixed-size "
            f"cohorts with proven accounting. Found {accountant.value!r}."
        )
