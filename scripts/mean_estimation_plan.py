"""From a cell of the mean-estimation study to its mechanism: calibrated, with codec."""

import dataclasses
from typing import cast

from distributed_dp import accounting
from distributed_dp.encoding import Codec
from distributed_dp.noise import DiscreteGaussianShares, SkellamShares
from distributed_dp.rotation import RotationKind, build_rotation
from scripts.mean_estimation_config import Cell, Setting

IntegerParameters = accounting.DDGaussParameters | accounting.SkellamParameters

_SHARES = {
    accounting.Mechanism.DDGAUSS: DiscreteGaussianShares,
    accounting.Mechanism.SKELLAM: SkellamShares,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A cell with its mechanism.

    Attributes:
        cell: The point of the grid.
        parameters: Its parameters; None where it is infeasible.
        codec: Encoder and decoder; None for the central Gaussian and where infeasible.
        problem: Why it is infeasible; None where it is not.
    """

    cell: Cell
    parameters: accounting.Parameters | None
    codec: Codec | None
    problem: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """The central Gaussians that reach a setting's epsilon in one release.

    Attributes:
        same_accountant: Calibrated by RDP, as the distributed mechanisms are.
        analytic: Calibrated exactly (Balle and Wang 2018).
    """

    same_accountant: accounting.GaussianParameters
    analytic: accounting.GaussianParameters


def build_scheme(setting: Setting) -> accounting.CohortScheme:
    """Returns the sampler of one release to which everyone contributes: q = 1."""
    count = setting.num_clients
    return accounting.CohortScheme(accounting.Sampling.POISSON, count, count)


def build_baseline(setting: Setting, *, delta: float) -> Baseline:
    """Returns the central Gaussians of a setting."""
    rdp, analytic = (
        cast(
            accounting.GaussianParameters,
            accounting.calibrate(
                accounting.Mechanism.GAUSSIAN,
                build_scheme(setting),
                epsilon=setting.epsilon,
                delta=delta,
                num_rounds=1,
                l2_clip=setting.clip,
                accountant=accountant,
            ),
        )
        for accountant in (accounting.Accountant.RDP, accounting.Accountant.ANALYTIC)
    )
    return Baseline(same_accountant=rdp, analytic=analytic)


def build_plan(cell: Cell, *, delta: float, beta: float) -> Plan:
    """Calibrates a cell's mechanism and builds its codec.

    What the library refuses (no noise reaches epsilon with so few bits, or there are so
    many that a share leaves int32) becomes the plan's `problem`.
    """
    if cell.mechanism is accounting.Mechanism.GAUSSIAN:
        central = build_baseline(cell.setting, delta=delta).same_accountant
        return Plan(cell=cell, parameters=central, codec=None, problem=None)
    try:
        parameters = calibrate_distributed(cell, delta=delta, beta=beta)
        codec = build_codec(cell, parameters)
    except ValueError as error:
        return Plan(cell=cell, parameters=None, codec=None, problem=str(error))
    return Plan(cell=cell, parameters=parameters, codec=codec, problem=None)


def calibrate_distributed(
    cell: Cell, *, delta: float, beta: float
) -> IntegerParameters:
    """Returns the parameters of a cell with a distributed mechanism.

    Raises:
        ValueError: If no noise reaches epsilon, naming bits, n and k.
    """
    if cell.num_stddevs is None or cell.norm_bound is None:
        raise ValueError(f"`cell` must have a k and a norm bound. Found {cell!r}.")
    rotation = build_rotation(RotationKind(cell.rotation), cell.setting.dim)
    parameters = accounting.calibrate(
        cell.mechanism,
        build_scheme(cell.setting),
        epsilon=cell.setting.epsilon,
        delta=delta,
        num_rounds=1,
        l2_clip=cell.setting.clip,
        bits=cell.bits,
        padded_dim=rotation.padded_dim,
        beta=beta,
        num_stddevs=cell.num_stddevs,
        norm_bound=cell.norm_bound,
    )
    return cast(IntegerParameters, parameters)


def compute_statements(
    plan: Plan, *, delta: float
) -> list[accounting.PrivacyStatement]:
    """Returns the analyst's view of a cell, and the server's where it has one.

    Empty for an infeasible cell.
    """
    parameters, setting = plan.parameters, plan.cell.setting
    if parameters is None:
        return []
    statements = [
        accounting.compute_privacy(
            parameters, build_scheme(setting), num_rounds=1, delta=delta
        )
    ]
    if not isinstance(parameters, accounting.GaussianParameters):
        statements.append(
            accounting.compute_server_privacy(
                parameters,
                num_rounds=1,
                num_shares=setting.num_clients,
                max_shares=setting.num_clients,
                delta=delta,
                num_clients=setting.num_clients,
            )
        )
    return statements


def build_codec(cell: Cell, parameters: IntegerParameters) -> Codec:
    """Returns the codec that the cell's clients and server run.

    Raises:
        ValueError: If the grid is too fine for its arithmetic.
    """
    count = cell.setting.num_clients
    return Codec(
        parameters=parameters,
        rotation=build_rotation(RotationKind(cell.rotation), cell.setting.dim),
        noise=_SHARES[cell.mechanism](parameters.central_scale, low=count, high=count),
    )
