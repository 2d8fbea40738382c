"""The words of a statement."""

from upcycled_fl.accounting.parameters import (
    Accountant,
    AnyPerturbation,
    Conversion,
    ObjectiveBound,
    ObjectivePerturbation,
    OutputPerturbation,
)
from upcycled_fl.accounting.statement import (
    AS_PUBLISHED_OBJECTIVE_WORDS,
    AS_PUBLISHED_OUTPUT_WORDS,
    AVERAGING_WORDS,
)

_ADD_ONE = (
    "neighbouring D_i differ in one example, added (divisor |D_i| kept, as in the "
    "published proof)"
)
_REPLACE_ONE = "neighbouring D_i differ in one example, replaced; |D_i| is public"
_ANY = (
    "neighbouring D_i differ in one example, added or replaced (the bound holds for "
    "any two D_i, even with every example replaced)"
)

_CONVERSIONS = {
    Conversion.MOMENTS: "2 sqrt(A log(1/delta)) + A, the closed form of theorem C.1",
    Conversion.ANALYTIC: "the exact Gaussian curve (Balle, Wang 2018)",
}

_COMMON = (
    "a client's noise is fresh, independent of all else and perfectly random, and "
    "never disclosed",
    "a client releases its perturbed model and nothing else; even steps are computed "
    "from released models alone",
    "who takes part in a round does not depend on data",
)


def describe_standing(
    perturbation: AnyPerturbation, accountant: Accountant
) -> str | None:
    """Returns the label of a number that is not proven."""
    if accountant is Accountant.PROVEN:
        return None
    if accountant is Accountant.REPLACE_ONE_AVERAGE:
        return AVERAGING_WORDS
    if isinstance(perturbation, OutputPerturbation):
        return AS_PUBLISHED_OUTPUT_WORDS
    return AS_PUBLISHED_OBJECTIVE_WORDS


def describe_perturbation(perturbation: AnyPerturbation) -> str:
    """Returns the noise in words."""
    if isinstance(perturbation, OutputPerturbation):
        return (
            f"output, clip tau = {perturbation.l2_clip:g}, Gaussian noise of standard "
            f"deviation sigma = {perturbation.local_stddev:g}"
        )
    words = f"objective, alpha = {perturbation.noise_rate:g}, mu = {perturbation.mu:g}"
    residual = perturbation.residual
    if residual is not None:
        words += f"; output noise of rate {residual.rate:g} for the solver's residual"
    return words


def describe_adjacency(perturbation: AnyPerturbation, accountant: Accountant) -> str:
    """Returns which change of a client's data epsilon is about."""
    if isinstance(perturbation, OutputPerturbation):
        if accountant is Accountant.AS_PUBLISHED:
            return _ADD_ONE
        if accountant is Accountant.PROVEN and perturbation.minimiser is None:
            return _ANY
    return _REPLACE_ONE


def describe_bound(
    perturbation: AnyPerturbation, accountant: Accountant, conversion: Conversion
) -> str:
    """Returns the theorem, and the conversion to epsilon."""
    if isinstance(perturbation, ObjectivePerturbation):
        words = "theorem C.2"
        if accountant is Accountant.PROVEN:
            tight = perturbation.bound is ObjectiveBound.DETERMINANT
            words += ", determinants by log(1 + x)" if tight else ""
            words += ", and 2 beta g / mu for the solver's residual"
        return f"{words}; pure DP"
    if accountant is Accountant.AS_PUBLISHED:
        words = "theorem C.1, sensitivity tau / |D_i|"
    elif accountant is Accountant.REPLACE_ONE_AVERAGE:
        words = "theorem C.1 with sensitivity 2 tau / |D_i|"
    elif perturbation.minimiser is None:
        words = "Gaussians, sensitivity 2 tau"
    else:
        words = (
            "Gaussians, sensitivity the lesser of 2 tau and 2 (u_1 / |D_i| + g) / mu"
        )
    return f"{words}; {_CONVERSIONS[conversion]}"


def list_assumptions(
    perturbation: AnyPerturbation, accountant: Accountant
) -> tuple[str, ...]:
    """Returns what epsilon rests on."""
    if isinstance(perturbation, OutputPerturbation):
        return _list_output_assumptions(perturbation, accountant)
    return _list_objective_assumptions(perturbation, accountant)


def _list_output_assumptions(
    perturbation: OutputPerturbation, accountant: Accountant
) -> tuple[str, ...]:
    lines = [f"every released model is clipped to L2 norm {perturbation.l2_clip:g}"]
    if accountant is not Accountant.PROVEN:
        lines.append(
            "the clipped model is an average of one vector of norm at most tau per "
            "example, which a clipped SGD model is not"
        )
        if accountant is Accountant.AS_PUBLISHED:
            lines.append(
                "the other examples' vectors sum to zero and the divisor stays |D_i|, "
                "as the published proof has it"
            )
    elif perturbation.minimiser is not None:
        exact = perturbation.minimiser
        lines += [
            "the mean loss of the examples is convex and every example's loss "
            f"Lipschitz with u_1 = {exact.lipschitz:g}; nothing in the local objective "
            f"but this and mu/2 ||w - w'||^2, mu = {exact.mu:g}, depends on data",
            "for every D_i the solver returns a point whose gradient has norm at most "
            f"{exact.gradient_tolerance:g}: no stragglers, no fixed number of epochs",
        ]
    return (*lines, *_COMMON)


def _list_objective_assumptions(
    perturbation: ObjectivePerturbation, accountant: Accountant
) -> tuple[str, ...]:
    loss, residual = perturbation.loss, perturbation.residual
    lines = [
        f"a one-output linear model, ||x|| <= 1 with its bias, |l'| <= u_1 = "
        f"{loss.lipschitz:g}, 0 <= l'' <= u_2 = {loss.curvature:g}",
    ]
    if accountant is Accountant.PROVEN and residual is not None:
        lines.append(
            "for every D_i and noise the solver returns a point whose gradient has "
            f"norm at most {residual.gradient_tolerance:g}: no stragglers, no fixed "
            "number of epochs"
        )
    else:
        lines.append(
            "the released model is the exact minimiser, which a few epochs of SGD or "
            "a straggler's do not reach"
        )
    return (*lines, *_COMMON)
