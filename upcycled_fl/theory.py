"""Convergence: the constants of lemma 4.5, the bound of theorem 4.6, dissimilarity.

Symbols: F_i client i's loss, f = sum_i p_i F_i, w^t the global model after step t;
L, B, rho, mu and K are the fields of `ProblemConstants`; c_m = mu / (mu + lambda_m).

Lemma 4.5: E f(w^{2m+1}) <= f(w^{2m-1}) - C_1 ||grad f(w^{2m-1})||^2 + C_2 h1_m
+ C_3 h2_m, with h1_m = ||grad f(w^{2m-1})|| ||w^{2m-1} - w^{2m-2}|| and
h2_m = ||w^{2m-1} - w^{2m-2}||^2; the expectation is over the K clients of step 2m+1.
"""

import dataclasses
import enum
import math

import numpy as np
import numpy.typing as npt

from distributed_dp.accounting import validation

FloatArray = npt.NDArray[np.float64]


class ConstantsForm(enum.Enum):
    """Which form of eq. 10-12.

    The published proof has two slips, both visible in the units. Lemma D.1 bounds
    <grad f, Phi> by (1/mu) ||grad f|| ||Phi|| instead of ||grad f|| ||Phi||; lemma D.2
    drops the factor L of L E||w^{2m+1} - w~^{2m+1}||^2 in its last step. Hence:

    AS_PUBLISHED: eq. 10-12 as printed. For mu <= 1 the first slip errs on the safe
      side, and the second does no harm where the drawn average is unbiased, since
      then E f(w) - f(w~) <= (L/2) E||w - w~||^2 is below the terms in sqrt(2/K) alone.
      For mu > 1 the inequality is false in general (tests: two identical quadratics).
    CORRECTED: both slips mended; holds for every mu.
    """

    AS_PUBLISHED = "as_published"
    CORRECTED = "corrected"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProblemConstants:
    """What assumptions 4.2 and 4.4 name.

    Attributes:
      smoothness: L > 0; every F_i has an L-Lipschitz gradient.
      dissimilarity: B >= 1; E_i ||grad F_i(w)||^2 <= B^2 ||grad f(w)||^2 for all w.
      strong_convexity: rho in (0, mu + L]; F_i + mu/2 ||w - w'||^2 is rho-strongly
        convex (rho = mu for convex F_i).
      mu: weight of the proximal term, positive.
      clients_per_round: K >= 1, drawn independently with probabilities p_i (or K of
        equally weighted clients without replacement) and averaged with equal weights.
    """

    smoothness: float
    dissimilarity: float
    strong_convexity: float
    mu: float
    clients_per_round: int

    def __post_init__(self) -> None:
        for name in ("smoothness", "dissimilarity", "strong_convexity", "mu"):
            validation.check_positive(name, getattr(self, name))
        validation.check_integer("clients_per_round", self.clients_per_round, low=1)
        if self.dissimilarity < 1:
            raise ValueError(
                "`dissimilarity` must be at least 1, which Jensen's inequality gives "
                f"(1: identical gradients). Found {self.dissimilarity!r}."
            )
        if self.strong_convexity > self.mu + self.smoothness:
            raise ValueError(
                "`strong_convexity` must be at most `mu` + `smoothness` "
                f"({self.mu + self.smoothness!r}): a curvature cannot exceed its upper "
                f"bound; lower it. Found {self.strong_convexity!r}."
            )


def compute_c1(
    constants: ProblemConstants, *, form: ConstantsForm = ConstantsForm.CORRECTED
) -> float:
    """Returns C_1, which may be negative and does not depend on lambda.

    Source: eq. 10: 1/mu - L B/(mu^2 rho) - L B^2/(2 rho^2) - 2 B^2/(K rho^2)
    - sqrt(2/K) (2 L B + rho) B / rho^2. Corrected: L B/(mu rho), 2 L B^2/(K rho^2).
    """
    big_l, big_b, rho, mu, share = _unpack(constants)
    drift, spread = _compute_factors(constants, form)
    return (
        1 / mu
        - big_l * big_b / (mu * rho) * drift
        - big_l * big_b**2 / (2 * rho**2)
        - share * big_b**2 / rho**2 * spread
        - math.sqrt(share) * (2 * big_l * big_b + rho) * big_b / rho**2
    )


def compute_c2(
    constants: ProblemConstants,
    coefficients: npt.ArrayLike,
    *,
    form: ConstantsForm = ConstantsForm.CORRECTED,
) -> FloatArray:
    """Returns C_2 > 0, one value per coefficient.

    Source: eq. 11: (L^2/(mu^2 rho) + (L + mu)/mu^2 + L (L + rho) B/rho^2
    + 4 L B/(K rho^2) + sqrt(2/K) (4 L^2 B + rho L (1 + 2 B))/rho^2) c_m.
    Corrected: L^2/(mu rho) + (L + mu)/mu, and 4 L^2 B/(K rho^2).
    """
    big_l, big_b, rho, mu, share = _unpack(constants)
    drift, spread = _compute_factors(constants, form)
    factor = (
        (big_l**2 / (mu * rho) + (big_l + mu) / mu) * drift
        + big_l * (big_l + rho) * big_b / rho**2
        + 2 * share * big_l * big_b / rho**2 * spread
        + math.sqrt(share)
        * (4 * big_l**2 * big_b + rho * big_l * (1 + 2 * big_b))
        / rho**2
    )
    return factor * _check_coefficients(coefficients)


def compute_c3(
    constants: ProblemConstants,
    coefficients: npt.ArrayLike,
    *,
    form: ConstantsForm = ConstantsForm.CORRECTED,
) -> FloatArray:
    """Returns C_3 > 0, one value per coefficient.

    Source: eq. 12: (L (L + rho)^2/(2 rho^2) + 2 L^2/(K rho^2)
    + 2 sqrt(2/K) L^2 (L + rho)/rho^2) c_m^2. Corrected: 2 L^3/(K rho^2).
    """
    big_l, _, rho, _, share = _unpack(constants)
    _, spread = _compute_factors(constants, form)
    factor = (
        big_l * (big_l + rho) ** 2 / (2 * rho**2)
        + share * big_l**2 / rho**2 * spread
        + 2 * math.sqrt(share) * big_l**2 * (big_l + rho) / rho**2
    )
    return factor * _check_coefficients(coefficients) ** 2


def compute_convergence_bound(
    constants: ProblemConstants,
    coefficients: npt.ArrayLike,
    *,
    initial_gap: float,
    h1: npt.ArrayLike,
    h2: npt.ArrayLike,
    form: ConstantsForm = ConstantsForm.CORRECTED,
) -> float:
    """Returns the bound on the least expected squared gradient at an odd model.

    Source: theorem 4.6:
    (f(w^0) - f* + sum_m C_2(c_m) h1_m + sum_m C_3(c_m) h2_m) / (M C_1).

    Its sum begins at m = 0, where w^{-1} is undefined; with w^{-1} = w^0 the terms
    h1_0 = h2_0 = 0, and m = 1..M remain.

    Guarantees: under the assumptions of `ProblemConstants`, min_{m = 1..M}
    E ||grad f(w^{2m-1})||^2 is at most this.
    Not guaranteed: anything for inexact minimisers, stragglers or private noise; with
    AS_PUBLISHED constants, anything for mu > 1.

    Args:
      constants: of the problem; C_1 must be positive.
      coefficients: [M], c_1, ..., c_M.
      initial_gap: f(w^0) - f*, at least 0.
      h1: [M], (expected) ||grad f(w^{2m-1})|| ||w^{2m-1} - w^{2m-2}||.
      h2: [M], (expected) ||w^{2m-1} - w^{2m-2}||^2.
      form: of the constants.

    Raises:
      ValueError: if C_1 <= 0, or for values out of range.
    """
    validation.check_non_negative("initial_gap", initial_gap)
    c1 = compute_c1(constants, form=form)
    if not c1 > 0:
        raise ValueError(
            "`constants` must make C_1 positive (theorem 4.6); raise `mu` well above "
            "`smoothness` or take more `clients_per_round` (at least 3). Found C_1 = "
            f"{c1!r}."
        )
    c2 = compute_c2(constants, coefficients, form=form)
    c3 = compute_c3(constants, coefficients, form=form)
    if c2.ndim != 1 or not c2.size:
        raise ValueError(f"`coefficients` must have shape [M]. Found {c2.shape!r}.")
    first, second = (
        _check_terms(name, values, c2.shape)
        for name, values in (("h1", h1), ("h2", h2))
    )
    total = initial_gap + float(c2 @ first) + float(c3 @ second)
    return total / (c2.size * c1)


def compute_dissimilarity(
    gradients: npt.ArrayLike, num_examples: npt.ArrayLike
) -> FloatArray:
    """Returns sqrt(sum_i p_i ||g_i||^2) / ||sum_i p_i g_i||, p_i = |D_i| / sum |D_j|.

    Source: definition 4.1. B is the largest value over all w; over the points at hand
    the largest is a lower bound on it. B is infinite wherever grad f vanishes and
    some client's gradient does not, so that assumption 4.2 fails near the optimum of
    clients that disagree there.

    Args:
      gradients: [..., N, d], grad F_i(w) of N clients; leading axes are points w.
      num_examples: [N], |D_i|, positive.

    Returns:
      [...], at least 1; 1 where all gradients are 0, inf where only their mean is.
    """
    array = np.asarray(gradients, dtype=np.float64)
    sizes = np.asarray(num_examples, dtype=np.float64)
    if array.ndim < 2 or not array.shape[-2] or not np.all(np.isfinite(array)):
        raise ValueError(
            "`gradients` must be finite, of shape [..., clients, dim]. Found shape "
            f"{array.shape!r}."
        )
    if sizes.shape != array.shape[-2:-1] or not np.all(
        (sizes > 0) & np.isfinite(sizes)
    ):
        raise ValueError(
            "`num_examples` must hold one positive size per client of `gradients` "
            f"({array.shape[-2]}). Found {num_examples!r}."
        )
    weights = sizes / sizes.sum()
    # Relative to the largest entry, lest squares overflow or vanish.
    scale = np.max(np.abs(array), axis=(-2, -1))
    array = array / np.where(scale > 0, scale, 1.0)[..., np.newaxis, np.newaxis]
    squared = np.einsum("...nd,...nd,n->...", array, array, weights)
    mean = np.einsum("...nd,n->...d", array, weights)
    squared_mean = np.einsum("...d,...d->...", mean, mean)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.sqrt(squared / squared_mean)
    return np.where(squared > 0, np.maximum(1.0, ratio), 1.0)


def _unpack(constants: ProblemConstants) -> tuple[float, float, float, float, float]:
    """Returns L, B, rho, mu and 2 / K."""
    return (
        constants.smoothness,
        constants.dissimilarity,
        constants.strong_convexity,
        constants.mu,
        2 / constants.clients_per_round,
    )


def _compute_factors(
    constants: ProblemConstants, form: ConstantsForm
) -> tuple[float, float]:
    """Returns what D.1's drift terms and D.2's terms in 2/K are multiplied by."""
    validation.check_choice("form", form, kind=ConstantsForm)
    if form is ConstantsForm.AS_PUBLISHED:
        return 1 / constants.mu, 1.0
    return 1.0, constants.smoothness


def _check_coefficients(coefficients: npt.ArrayLike) -> FloatArray:
    array = np.asarray(coefficients, dtype=np.float64)
    if not np.all((array >= 0) & (array <= 1)):
        raise ValueError(f"`coefficients` must be in [0, 1]. Found {coefficients!r}.")
    return array


def _check_terms(
    name: str, values: npt.ArrayLike, shape: tuple[int, ...]
) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != shape or not np.all((array >= 0) & np.isfinite(array)):
        raise ValueError(
            f"`{name}` must hold one value of at least 0 per coefficient. "
            f"Found {values!r}."
        )
    return array
