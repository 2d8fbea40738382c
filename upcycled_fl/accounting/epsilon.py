"""Epsilon of one client: theorem C.1, theorem C.2, and what is proven.

The published proofs, read closely. C.1 takes a clipped SGD model for an average of
|D_i| terms of norm <= tau, one per example; takes the other terms to sum to zero
"without loss of generality" while an example is added, and keeps the divisor. C.2 has
M + 1 terms for M odd steps (its sum starts at m = 0), needs l'' >= 0, and could have
log(1 + x) for 2.8 x. Here M is the number of releases.
"""

import math

from distributed_dp.accounting import conversion as gaussian
from distributed_dp.accounting import validation
from upcycled_fl.accounting.parameters import (
    Accountant,
    Conversion,
    ObjectiveBound,
    ObjectivePerturbation,
    OutputPerturbation,
)


def compute_output_sensitivity(
    perturbation: OutputPerturbation, *, num_examples: int, accountant: Accountant
) -> float:
    """Returns the L2 sensitivity of the clipped model that an accountant assumes.

    AS_PUBLISHED: tau / |D_i|. REPLACE_ONE_AVERAGE: 2 tau / |D_i|. PROVEN: 2 tau, and
    with a minimiser the lesser of that and 2 (u_1 / |D_i| + g) / mu.
    """
    validation.check_choice("accountant", accountant, kind=Accountant)
    check_num_examples(num_examples)
    tau = perturbation.l2_clip
    if accountant is Accountant.AS_PUBLISHED:
        return tau / num_examples
    if accountant is Accountant.REPLACE_ONE_AVERAGE:
        return 2 * tau / num_examples
    exact = perturbation.minimiser
    if exact is None:
        return 2 * tau
    distance = exact.lipschitz / num_examples + exact.gradient_tolerance
    return min(2 * tau, 2 * distance / exact.mu)


def compute_output_rho(
    perturbation: OutputPerturbation,
    *,
    num_examples: int,
    num_releases: int,
    accountant: Accountant,
) -> float:
    """Returns A = M s^2 / (2 sigma^2) for sensitivity s: the Renyi curve is A a."""
    validation.check_integer("num_releases", num_releases, low=0)
    sensitivity = compute_output_sensitivity(
        perturbation, num_examples=num_examples, accountant=accountant
    )
    if num_releases == 0:
        return 0.0
    if perturbation.local_stddev == 0:
        return math.inf
    ratio = sensitivity / perturbation.local_stddev
    return num_releases * (ratio * ratio / 2)


def convert_rho(rho: float, *, delta: float, conversion: Conversion) -> float:
    """Returns epsilon at delta of Gaussians whose Renyi curves add up to rho a."""
    validation.check_delta(delta)
    validation.check_choice("conversion", conversion, kind=Conversion)
    if rho == 0:
        return 0.0
    if math.isinf(rho):
        return math.inf
    if conversion is Conversion.MOMENTS:
        return 2 * math.sqrt(rho * math.log(1 / delta)) + rho
    return gaussian.compute_epsilon_analytic_gaussian(
        delta, noise_multiplier=1 / math.sqrt(2 * rho)
    )


def compute_output_epsilon(
    perturbation: OutputPerturbation,
    *,
    num_examples: int,
    num_releases: int,
    delta: float,
    accountant: Accountant,
    conversion: Conversion = Conversion.MOMENTS,
) -> float:
    """Returns epsilon of one client's M releases under output perturbation.

    Source: AS_PUBLISHED, theorem C.1; the others see `compute_output_sensitivity`.

    Guarantees: PROVEN holds for any two datasets (2 tau; even with every example
    replaced), or for two that differ in one example (with a minimiser).
    Not guaranteed: AS_PUBLISHED and REPLACE_ONE_AVERAGE, for clipped SGD models.

    Args:
      perturbation: clip and noise.
      num_examples: |D_i|, taken as public.
      num_releases: M, the odd steps that the client took part in.
      delta: in (0, 1).
      accountant: what is assumed of the sensitivity.
      conversion: MOMENTS for AS_PUBLISHED.
    """
    check_conversion(accountant, conversion)
    rho = compute_output_rho(
        perturbation,
        num_examples=num_examples,
        num_releases=num_releases,
        accountant=accountant,
    )
    return convert_rho(rho, delta=delta, conversion=conversion)


def compute_objective_epsilon(
    perturbation: ObjectivePerturbation,
    *,
    num_examples: int,
    num_releases: int,
    accountant: Accountant,
) -> float:
    """Returns epsilon of one client's M releases under objective perturbation.

    Source: theorem C.2: M (2 alpha u_1 mu + 2.8 u_2) / (|D_i| mu), delta = 0. PROVEN:
    M (2 alpha u_1 / |D_i| + 2.8 x + 2 beta g / mu), x = u_2 / (|D_i| mu), where
    bound=DETERMINANT has log(1 + x) for 2.8 x.

    Guarantees: PROVEN holds for replacing one example, in exact arithmetic.
    Not guaranteed: AS_PUBLISHED, for anything but the exact minimiser of a one-output
    linear model.

    Args:
      perturbation: noise and loss.
      num_examples: |D_i|, taken as public.
      num_releases: M, the odd steps that the client took part in.
      accountant: AS_PUBLISHED or PROVEN.

    Raises:
      ValueError: for values out of range, or assumptions that do not hold.
    """
    validation.check_integer("num_releases", num_releases, low=0)
    check_objective(perturbation, num_examples=num_examples, accountant=accountant)
    loss, mu = perturbation.loss, perturbation.mu
    ratio = loss.curvature / (num_examples * mu)
    noise = 2 * perturbation.noise_rate * loss.lipschitz / num_examples
    if accountant is Accountant.AS_PUBLISHED:
        return num_releases * (noise + 2.8 * ratio)
    tight = perturbation.bound is ObjectiveBound.DETERMINANT
    determinant = math.log1p(ratio) if tight else 2.8 * ratio
    return num_releases * (noise + determinant + _compute_residual(perturbation))


def check_objective(
    perturbation: ObjectivePerturbation, *, num_examples: int, accountant: Accountant
) -> None:
    """Raises unless theorem C.2's conditions hold as far as they can be checked."""
    validation.check_choice("accountant", accountant, kind=Accountant)
    check_num_examples(num_examples)
    loss, limit = perturbation.loss, 0.5 * num_examples * perturbation.mu
    if accountant is Accountant.REPLACE_ONE_AVERAGE:
        raise ValueError(
            "`accountant` must be AS_PUBLISHED or PROVEN for objective perturbation. "
            f"Found {accountant!r}."
        )
    if loss.curvature > limit:
        raise ValueError(
            f"`curvature` must be at most 0.5 |D_i| mu ({limit!r}); raise `mu`, or "
            f"leave out clients with few examples. Found {loss.curvature!r}."
        )
    if accountant is not Accountant.PROVEN:
        return
    if loss.num_outputs != 1:
        raise ValueError(
            "`num_outputs` must be 1 for PROVEN; use a one-output model or "
            f"AS_PUBLISHED. Found {loss.num_outputs!r}."
        )
    if loss.max_feature_norm > 1:
        raise ValueError(
            "`max_feature_norm` must be at most 1 for PROVEN, the bias included; "
            f"normalise the features. Found {loss.max_feature_norm!r}."
        )
    if perturbation.residual is None:
        raise ValueError(
            "`residual` must be set for PROVEN: the theorem is about the exact "
            "minimiser; solve to a tolerance and add ResidualNoise, or use "
            "AS_PUBLISHED. Found None."
        )


def check_num_examples(num_examples: int) -> None:
    """Raises for an empty client."""
    validation.check_integer("num_examples", num_examples, low=1)


def choose_conversion(accountant: Accountant) -> Conversion:
    """Returns the exact curve for PROVEN, else the published theorem's own form."""
    if accountant is Accountant.PROVEN:
        return Conversion.ANALYTIC
    return Conversion.MOMENTS


def check_conversion(accountant: Accountant, conversion: Conversion) -> None:
    """Raises unless the theorem's own conversion goes with AS_PUBLISHED."""
    validation.check_choice("accountant", accountant, kind=Accountant)
    validation.check_choice("conversion", conversion, kind=Conversion)
    published = accountant is Accountant.AS_PUBLISHED
    if published and conversion is not Conversion.MOMENTS:
        raise ValueError(
            "`conversion` must be MOMENTS for AS_PUBLISHED, as theorem C.1 has it; "
            f"or take another accountant. Found {conversion!r}."
        )


def _compute_residual(perturbation: ObjectivePerturbation) -> float:
    residual = perturbation.residual
    if residual is None:
        return 0.0
    return 2 * residual.rate * residual.gradient_tolerance / perturbation.mu
