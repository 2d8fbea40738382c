"""What the accountants are told: the perturbation, the loss, and the choices."""

import dataclasses
import enum
import math

import numpy as np
import numpy.typing as npt

from distributed_dp.accounting import validation

# A norm of 1 that was computed in float32 may exceed 1 by less than this.
_NORM_SLACK = 1e-6


class Perturbation(enum.Enum):
    """Where the client's noise is added."""

    OUTPUT = "output"
    OBJECTIVE = "objective"


class Accountant(enum.Enum):
    """What epsilon rests on; its name goes with every number."""

    AS_PUBLISHED = "as_published"
    REPLACE_ONE_AVERAGE = "replace_one_average"
    PROVEN = "proven"


class Conversion(enum.Enum):
    """From the Gaussian's Renyi curve A a to epsilon at delta.

    MOMENTS: 2 sqrt(A log(1/delta)) + A, theorem C.1's own closed form.
    ANALYTIC: the exact curve of one Gaussian (Balle, Wang 2018), which Gaussians
      compose to, adaptively too (Dong, Roth, Su 2019); never above MOMENTS.
    """

    MOMENTS = "moments"
    ANALYTIC = "analytic"


class ObjectiveBound(enum.Enum):
    """The bound on the ratio of the Jacobian's determinants, x = u_2 / (|D_i| mu).

    THEOREM: 2.8 x, theorem C.2.
    DETERMINANT: log(1 + x). Either Hessian is H_0 + (c / |D_i|) x x^T with the same
      H_0 >= mu I and 0 <= c <= u_2, ||x|| <= 1, so that each determinant lies in
      det(H_0) [1, 1 + x] (matrix determinant lemma).
    """

    THEOREM = "theorem"
    DETERMINANT = "determinant"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactMinimiser:
    """For output perturbation: the client minimises a convex loss to a tolerance.

    Two minimisers of mean loss + mu/2 ||w - w'||^2 over datasets that differ in one
    example are at most 2 u_1 / (|D_i| mu) apart, and a point whose gradient has norm g
    at most g / mu from its minimiser. Clipping is a projection on a ball and keeps
    distances from growing.

    Attributes:
      lipschitz: u_1; the loss of every possible example is convex and u_1-Lipschitz.
      mu: weight of the proximal term, positive.
      gradient_tolerance: g, the bound on the gradient's norm, errors of arithmetic
        included, at what the solver returns on every dataset.
    """

    lipschitz: float
    mu: float
    gradient_tolerance: float

    def __post_init__(self) -> None:
        validation.check_positive("lipschitz", self.lipschitz)
        validation.check_positive("mu", self.mu)
        validation.check_non_negative("gradient_tolerance", self.gradient_tolerance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputPerturbation:
    """The local model is clipped in L2 norm, and Gaussian noise added.

    Attributes:
      l2_clip: tau, the largest norm of a local model.
      local_stddev: sigma, the noise's standard deviation in each coordinate; 0 is
        no noise and epsilon = inf.
      minimiser: what PROVEN may use beyond the clip; None for SGD.
    """

    l2_clip: float
    local_stddev: float
    minimiser: ExactMinimiser | None = None

    def __post_init__(self) -> None:
        validation.check_positive("l2_clip", self.l2_clip)
        validation.check_non_negative("local_stddev", self.local_stddev)
        if self.minimiser is not None:
            validation.check_choice("minimiser", self.minimiser, kind=ExactMinimiser)

    @property
    def kind(self) -> Perturbation:
        """Perturbation.OUTPUT."""
        return Perturbation.OUTPUT


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearModelLoss:
    """A loss l(<w, x>, y) of a generalised linear model.

    Attributes:
      lipschitz: u_1; |l'| <= u_1, so that the gradient's norm is at most u_1 ||x||.
      curvature: u_2; 0 <= l'' <= u_2 (theorem C.2 says |l''|, and its proof needs
        l'' >= 0).
      num_outputs: 1; with more, the Hessian of one example has a higher rank.
      max_feature_norm: bound on ||x||, the bias's constant feature included.
    """

    lipschitz: float
    curvature: float
    num_outputs: int
    max_feature_norm: float

    def __post_init__(self) -> None:
        validation.check_positive("lipschitz", self.lipschitz)
        validation.check_positive("curvature", self.curvature)
        validation.check_integer("num_outputs", self.num_outputs, low=1)
        validation.check_positive("max_feature_norm", self.max_feature_norm)


# One-output logistic regression, log(1 + exp(-y <w, x>)) with y in {-1, 1}.
LOGISTIC_LOSS = LinearModelLoss(
    lipschitz=1.0, curvature=0.25, num_outputs=1, max_feature_norm=1.0
)


# Softmax regression with two outputs, which theorem C.2 is not about.
SOFTMAX_LOSS = LinearModelLoss(
    lipschitz=math.sqrt(2), curvature=0.5, num_outputs=2, max_feature_norm=1.0
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualNoise:
    """Noise on the perturbed problem's approximate solution, to cover the residual.

    The solver's point w is within r = g / mu of the exact minimiser w*. With Z of
    density proportional to exp(-beta ||z||), the laws of w + Z and w* + Z given w and
    w* have a density ratio within exp(+-beta r); w* + Z is post-processing of w*.
    Releasing w + Z therefore costs 2 beta g / mu more than releasing w*.

    Attributes:
      gradient_tolerance: g, the bound on the norm of the perturbed objective's
        gradient, errors of arithmetic included, at what the solver returns, for every
        dataset and noise.
      rate: beta; ||Z|| is Gamma(shape = dim, rate = beta), the direction uniform.
    """

    gradient_tolerance: float
    rate: float

    def __post_init__(self) -> None:
        validation.check_positive("gradient_tolerance", self.gradient_tolerance)
        validation.check_positive("rate", self.rate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectivePerturbation:
    """<n, w> is added to the local objective, n of density ~ exp(-alpha ||n||).

    Attributes:
      noise_rate: alpha; ||n|| is Gamma(shape = dim, rate = alpha), the direction
        uniform. A larger rate is less noise.
      mu: weight of the proximal term, positive.
      loss: u_1 and u_2, and whether the model is a one-output linear one.
      residual: the noise that covers an inexact solution; None for SGD, which then
        has no proven epsilon.
      bound: on the determinants' ratio; AS_PUBLISHED is THEOREM.
    """

    noise_rate: float
    mu: float
    loss: LinearModelLoss = LOGISTIC_LOSS
    residual: ResidualNoise | None = None
    bound: ObjectiveBound = ObjectiveBound.THEOREM

    def __post_init__(self) -> None:
        validation.check_positive("noise_rate", self.noise_rate)
        validation.check_positive("mu", self.mu)
        validation.check_choice("loss", self.loss, kind=LinearModelLoss)
        if self.residual is not None:
            validation.check_choice("residual", self.residual, kind=ResidualNoise)
        validation.check_choice("bound", self.bound, kind=ObjectiveBound)

    @property
    def kind(self) -> Perturbation:
        """Perturbation.OBJECTIVE."""
        return Perturbation.OBJECTIVE


AnyPerturbation = OutputPerturbation | ObjectivePerturbation


def check_feature_norms(features: npt.ArrayLike) -> None:
    """Raises unless every feature vector has norm at most 1.

    Args:
      features: [examples, num_features]; a bias is a constant feature among them.

    Raises:
      ValueError: with the largest norm found.
    """
    array = np.asarray(features, dtype=np.float64)
    if array.ndim != 2 or not np.all(np.isfinite(array)):
        raise ValueError(
            "`features` must be finite, of shape [examples, num_features]. Found shape "
            f"{array.shape!r}."
        )
    largest = float(np.max(np.linalg.norm(array, axis=1), initial=0.0))
    if largest > 1 + _NORM_SLACK:
        raise ValueError(
            "`features` must have norm at most 1, the bias's constant included; scale "
            "each example by a rule that does not look at the others. Found "
            f"{largest!r}."
        )
