"""The least noise that keeps the clients' epsilon within a target."""

import dataclasses
import enum
import math

import numpy.typing as npt

from distributed_dp.accounting import search, validation
from upcycled_fl.accounting.parameters import (
    LOGISTIC_LOSS,
    Accountant,
    AnyPerturbation,
    Conversion,
    ExactMinimiser,
    LinearModelLoss,
    ObjectiveBound,
    ObjectivePerturbation,
    OutputPerturbation,
    ResidualNoise,
)
from upcycled_fl.accounting.privacy import IntArray, check_clients, compute_epsilons

# alpha below this is noise without end: what epsilon is left there is not alpha's.
_LEAST_RATE = 1e-12


class EpsilonTarget(enum.Enum):
    """Which figure of the clients' epsilons is calibrated."""

    MEAN = "mean"
    MAX = "max"


def calibrate_output_perturbation(
    *,
    epsilon: float,
    delta: float,
    l2_clip: float,
    num_examples: npt.ArrayLike,
    num_releases: npt.ArrayLike,
    accountant: Accountant,
    conversion: Conversion = Conversion.MOMENTS,
    minimiser: ExactMinimiser | None = None,
    target: EpsilonTarget = EpsilonTarget.MAX,
) -> OutputPerturbation:
    """Returns output perturbation with the least sigma for the target, rounded up.

    Guarantees: `compute_privacy` of the result has `target` at most `epsilon`.

    Args:
      epsilon: positive.
      delta: in (0, 1).
      l2_clip: tau.
      num_examples: [N], |D_i|.
      num_releases: [N], the odd steps that each client takes part in.
      accountant: what epsilon rests on.
      conversion: MOMENTS for AS_PUBLISHED.
      minimiser: what PROVEN may use beyond the clip.
      target: MAX over clients, or MEAN (the paper's eps-bar).

    Raises:
      ValueError: for values out of range, or if no client releases anything.
    """
    sizes, releases = _check(epsilon, num_examples, num_releases, target)
    template = OutputPerturbation(
        l2_clip=l2_clip, local_stddev=l2_clip, minimiser=minimiser
    )

    def build(log_ratio: float) -> OutputPerturbation:
        stddev = l2_clip * math.exp(log_ratio)
        return dataclasses.replace(template, local_stddev=stddev)

    def compute_excess(log_ratio: float) -> float:
        found = compute_epsilons(
            [build(log_ratio)],
            sizes,
            releases,
            accountant=accountant,
            delta=delta,
            conversion=conversion,
        )
        return _compute_target(found, target) - epsilon

    low, high = -1.0, 1.0
    while compute_excess(high) > 0:
        high += 1
    while compute_excess(low) <= 0:
        low -= 1
    return build(search.find_safe_root(compute_excess, low, high))


def calibrate_objective_perturbation(
    *,
    epsilon: float,
    mu: float,
    num_examples: npt.ArrayLike,
    num_releases: npt.ArrayLike,
    accountant: Accountant,
    loss: LinearModelLoss = LOGISTIC_LOSS,
    residual: ResidualNoise | None = None,
    bound: ObjectiveBound = ObjectiveBound.THEOREM,
    target: EpsilonTarget = EpsilonTarget.MAX,
) -> ObjectivePerturbation:
    """Returns objective perturbation with the largest alpha for the target.

    Guarantees: `compute_privacy` of the result has `target` at most `epsilon`.

    Args:
      epsilon: positive.
      mu: weight of the proximal term, positive.
      num_examples: [N], |D_i|.
      num_releases: [N], the odd steps that each client takes part in.
      accountant: AS_PUBLISHED or PROVEN.
      loss: u_1 and u_2.
      residual: needed for PROVEN.
      bound: on the determinants' ratio.
      target: MAX over clients, or MEAN (the paper's eps-bar).

    Raises:
      ValueError: for values out of range, if no client releases anything, or if what
        does not depend on alpha alone exceeds `epsilon`.
    """
    sizes, releases = _check(epsilon, num_examples, num_releases, target)

    def build(log_scale: float) -> ObjectivePerturbation:
        return ObjectivePerturbation(
            noise_rate=math.exp(-log_scale),
            mu=mu,
            loss=loss,
            residual=residual,
            bound=bound,
        )

    def compute_excess(log_scale: float) -> float:
        part: AnyPerturbation = build(log_scale)
        found = compute_epsilons(
            [part],
            sizes,
            releases,
            accountant=accountant,
            delta=None,
            conversion=Conversion.MOMENTS,
        )
        return _compute_target(found, target) - epsilon

    highest = -math.log(_LEAST_RATE)
    if compute_excess(highest) > 0:
        raise ValueError(
            "`epsilon` must exceed what the curvature and the residual cost at any "
            f"noise ({compute_excess(highest) + epsilon:.6g}); raise `mu`, or take "
            f"fewer releases. Found {epsilon!r}."
        )
    low, high = -1.0, 1.0
    while compute_excess(high) > 0:
        high += 1
    while compute_excess(low) <= 0:
        low -= 1
    return build(search.find_safe_root(compute_excess, low, high))


def _check(
    epsilon: float,
    num_examples: npt.ArrayLike,
    num_releases: npt.ArrayLike,
    target: EpsilonTarget,
) -> tuple[IntArray, IntArray]:
    validation.check_positive("epsilon", epsilon)
    validation.check_choice("target", target, kind=EpsilonTarget)
    sizes, releases = check_clients(num_examples, num_releases, num_perturbations=1)
    if not releases.any():
        raise ValueError(
            "`num_releases` must be positive for some client: without a release no "
            f"noise is needed. Found {num_releases!r}."
        )
    return sizes, releases


def _compute_target(epsilons: list[float], target: EpsilonTarget) -> float:
    if target is EpsilonTarget.MAX:
        return max(epsilons)
    return math.fsum(epsilons) / len(epsilons)
