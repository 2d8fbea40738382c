"""The privacy of a training run for every client."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from distributed_dp.accounting import validation
from upcycled_fl.accounting import wording
from upcycled_fl.accounting.epsilon import (
    check_conversion,
    compute_objective_epsilon,
    compute_output_rho,
    convert_rho,
)
from upcycled_fl.accounting.parameters import (
    Accountant,
    AnyPerturbation,
    Conversion,
    ObjectivePerturbation,
    OutputPerturbation,
)
from upcycled_fl.accounting.statement import ClientPrivacyStatement

IntArray = npt.NDArray[np.int64]


def compute_privacy(
    perturbation: AnyPerturbation | Sequence[AnyPerturbation],
    *,
    num_examples: npt.ArrayLike,
    num_releases: npt.ArrayLike,
    accountant: Accountant,
    delta: float | None = None,
    conversion: Conversion = Conversion.MOMENTS,
) -> ClientPrivacyStatement:
    """Returns epsilon of every client, and what it rests on.

    Releases compose: Renyi curves add up under output perturbation, epsilons under
    objective perturbation. For noise that changes from round to round give one
    perturbation a round and the participation as `num_releases`.

    Args:
      perturbation: one, or P of them that differ only in their noise.
      num_examples: [N], |D_i|, taken as public; no client is empty.
      num_releases: [N], or [P, N] with P perturbations: the odd steps that a client
        took part in (for a baseline: all its steps). See `count_client_releases`.
      accountant: what epsilon rests on.
      delta: in (0, 1) for output perturbation; None for objective perturbation.
      conversion: for output perturbation.

    Returns:
      The statement; epsilons are inf where there is no noise.

    Raises:
      ValueError: for values out of range, perturbations that differ in more than
        noise, or an accountant whose assumptions do not hold.
    """
    parts = _check_parts(perturbation)
    sizes, releases = check_clients(
        num_examples, num_releases, num_perturbations=len(parts)
    )
    epsilons = compute_epsilons(
        parts,
        sizes,
        releases,
        accountant=accountant,
        delta=delta,
        conversion=conversion,
    )
    first = parts[0]
    words = "; then ".join(
        dict.fromkeys(wording.describe_perturbation(part) for part in parts)
    )
    return ClientPrivacyStatement(
        accountant=accountant.value,
        perturbation=words,
        epsilons=tuple(epsilons),
        delta=0.0 if delta is None else delta,
        adjacency=wording.describe_adjacency(first, accountant),
        num_releases=tuple(int(count) for count in releases.sum(axis=0)),
        bound=wording.describe_bound(first, accountant, conversion),
        assumptions=wording.list_assumptions(first, accountant),
        standing=wording.describe_standing(first, accountant),
    )


def compute_epsilons(
    parts: Sequence[AnyPerturbation],
    sizes: IntArray,
    releases: IntArray,
    *,
    accountant: Accountant,
    delta: float | None,
    conversion: Conversion,
) -> list[float]:
    """Returns one epsilon per client; equal clients are computed once.

    Args:
      parts: P perturbations of one kind.
      sizes: [N].
      releases: [P, N].
      accountant: as in `compute_privacy`.
      delta: as in `compute_privacy`.
      conversion: as in `compute_privacy`.
    """
    is_output = isinstance(parts[0], OutputPerturbation)
    _check_delta(delta, is_output=is_output)
    check_conversion(accountant, conversion)
    found: dict[tuple[int, ...], float] = {}
    epsilons = []
    for column in np.vstack([sizes, releases]).T:
        key = tuple(int(value) for value in column)
        if key not in found:
            cost = math.fsum(
                _compute_cost(part, key[0], count, accountant)
                for part, count in zip(parts, key[1:], strict=True)
            )
            if is_output and delta is not None:
                cost = convert_rho(cost, delta=delta, conversion=conversion)
            found[key] = cost
        epsilons.append(found[key])
    return epsilons


def check_clients(
    num_examples: npt.ArrayLike, num_releases: npt.ArrayLike, *, num_perturbations: int
) -> tuple[IntArray, IntArray]:
    """Returns sizes [N] and releases [P, N]; raises for other shapes or values."""
    sizes = np.asarray(num_examples)
    if sizes.ndim != 1 or not sizes.size or not _are_integers(sizes, low=1):
        raise ValueError(
            "`num_examples` must hold one integer of at least 1 per client; leave out "
            f"empty clients. Found {num_examples!r}."
        )
    releases = np.asarray(num_releases)
    if releases.ndim == 1 and num_perturbations == 1:
        releases = releases[np.newaxis]
    expected = (num_perturbations, sizes.size)
    if releases.shape != expected or not _are_integers(releases, low=0):
        raise ValueError(
            "`num_releases` must hold integers of at least 0, of shape [clients] or "
            f"[perturbations, clients] (here {expected!r}). Found {num_releases!r}."
        )
    return sizes.astype(np.int64), releases.astype(np.int64)


def _are_integers(array: npt.NDArray, *, low: int) -> bool:
    return bool(np.issubdtype(array.dtype, np.integer) and np.all(array >= low))


def _check_parts(
    perturbation: AnyPerturbation | Sequence[AnyPerturbation],
) -> list[AnyPerturbation]:
    parts: list[AnyPerturbation]
    if isinstance(perturbation, (OutputPerturbation, ObjectivePerturbation)):
        parts = [perturbation]
    else:
        parts = list(perturbation)
    if {type(part) for part in parts} not in (
        {OutputPerturbation},
        {ObjectivePerturbation},
    ):
        raise ValueError(
            "`perturbation` must be OutputPerturbation or ObjectivePerturbation, all "
            f"of one kind. Found {perturbation!r}."
        )
    if len({_get_shared(part) for part in parts}) != 1:
        raise ValueError(
            "`perturbation` must differ in `local_stddev` or `noise_rate` alone from "
            f"round to round. Found {perturbation!r}."
        )
    return parts


def _get_shared(part: AnyPerturbation) -> tuple[object, ...]:
    """Returns what the words of a statement are about, besides the noise."""
    if isinstance(part, OutputPerturbation):
        return (part.l2_clip, part.minimiser)
    return (part.mu, part.loss, part.residual, part.bound)


def _check_delta(delta: float | None, *, is_output: bool) -> None:
    if is_output:
        validation.check_delta(delta)
    elif delta is not None:
        raise ValueError(
            "`delta` must be None for objective perturbation, which is pure DP. "
            f"Found {delta!r}."
        )


def _compute_cost(
    part: AnyPerturbation, num_examples: int, num_releases: int, accountant: Accountant
) -> float:
    """Returns what adds up: A for the Gaussian, epsilon for objective perturbation."""
    if isinstance(part, ObjectivePerturbation):
        return compute_objective_epsilon(
            part,
            num_examples=num_examples,
            num_releases=num_releases,
            accountant=accountant,
        )
    return compute_output_rho(
        part,
        num_examples=num_examples,
        num_releases=num_releases,
        accountant=accountant,
    )
