"""One run of run_upcycled_fl: distributed_training's, with the server's own steps."""

import functools
from collections.abc import Mapping

from scripts import client_privacy, distributed_training
from scripts.training_config import TrainingConfig
from scripts.training_program import Program, ProgramParts
from scripts.upcycled_config import UpcycledConfig
from simulation import cohort, seeds
from simulation.algorithm import FederatedAveraging
from simulation.model import Model
from simulation.tasks.task import Task
from upcycled_fl import baselines, finalizer, schedule
from upcycled_fl.private_averaging import PrivateAveraging

_KEPT_CAVEATS = (
    "what clients keep to themselves (control variates, their own models), which is "
    "made of their own data: it is never sent, but this simulation holds it in its "
    "checkpoints and measures clients' own models",
)


def run(config: UpcycledConfig) -> distributed_training.RunOutcome:
    """Trains as configured, prints what it does, and writes the run folder.

    Raises:
        UserError: For anything the user can mend.
    """
    return distributed_training.run(config, _PROGRAM)


def _build_parts(
    config: TrainingConfig,
    task: Task,
    model: Model,
    cohorts: cohort.CohortSampler,
    open_root: seeds.RootSeed,
) -> ProgramParts:
    del open_root
    assert isinstance(config, UpcycledConfig)
    noise = client_privacy.build_client_privacy(config, task, model, cohorts)
    algorithm = _build_algorithm(config, task, noise)
    coefficients = _compute_coefficients(config)
    wrap = None
    if coefficients is not None:
        wrap = functools.partial(
            finalizer.build_upcycled_finalizer, coefficients=coefficients
        )
    return ProgramParts(
        algorithm=algorithm,
        wrap_finalizer=wrap,
        lines=_describe(config, algorithm, coefficients),
        client_privacy=noise,
        caveats=_KEPT_CAVEATS if algorithm.keeps_state else (),
    )


def _build_algorithm(
    config: UpcycledConfig, task: Task, noise: client_privacy.ClientPrivacyPlan | None
) -> FederatedAveraging:
    mu = config.proximal_mu
    participation = config.clients_per_round / task.num_clients
    if noise is not None:
        return PrivateAveraging(proximal_strength=mu, perturbation=noise.perturbation)
    if config.algorithm == "fednova":
        return baselines.FedNova(proximal_strength=mu)
    if config.algorithm == "scaffold":
        return baselines.Scaffold(proximal_strength=mu, participation=participation)
    if config.algorithm == "feddyn":
        return baselines.FedDyn(proximal_strength=mu, participation=participation)
    if config.algorithm == "pfedme":
        return baselines.PFedMe(
            penalty=config.pfedme_penalty,
            personal_steps=config.pfedme_steps,
            local_lr=config.pfedme_lr,
        )
    return FederatedAveraging(proximal_strength=mu)


def _compute_coefficients(config: UpcycledConfig) -> list[float] | None:
    rule = config.build_schedule()
    if rule is None:
        return None
    return schedule.compute_coefficient_table(rule, config.total_rounds).tolist()


def _describe(
    config: UpcycledConfig,
    algorithm: FederatedAveraging,
    coefficients: list[float] | None,
) -> Mapping[str, str]:
    lines = {"algorithm": algorithm.name}
    if config.is_exact:
        lines["clients"] = (
            "minimise their problem, with a proximal term of mu = "
            f"{config.proximal_mu:g}, to a gradient of norm "
            f"{config.gradient_tolerance:g}, weighted {config.client_weighting}"
        )
    if coefficients is None:
        return {**lines, "upcycled": "no even steps: the baseline alone"}
    first, last = coefficients[0], coefficients[-1]
    value = f"{first:.4g}" if first == last else f"{first:.4g} to {last:.4g}"
    text = f"an even step by the server alone after every round, coefficient {value}"
    if config.mechanism_kind is not None or config.perturbation != "none":
        text += "; it uses released results alone and is not charged"
    return {**lines, "upcycled": text}


_PROGRAM = Program(name="run_upcycled_fl", build_parts=_build_parts)
