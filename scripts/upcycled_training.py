"""One run of run_upcycled_fl: distributed_training's, with the server's own steps."""

import functools
from collections.abc import Mapping

from scripts import distributed_training
from scripts.training_config import TrainingConfig
from scripts.upcycled_config import UpcycledConfig
from simulation import learning
from upcycled_fl import finalizer, schedule


def run(config: UpcycledConfig) -> distributed_training.RunOutcome:
    """Trains as configured, prints what it does, and writes the run folder.

    Raises:
        UserError: For anything the user can mend.
    """
    return distributed_training.run(config, _PROGRAM)


def _compute_coefficients(config: TrainingConfig) -> list[float] | None:
    assert isinstance(config, UpcycledConfig)
    rule = config.build_schedule()
    if rule is None:
        return None
    return schedule.compute_coefficient_table(rule, config.total_rounds).tolist()


def _wrap_finalizer(config: TrainingConfig) -> learning.WrapFinalizer | None:
    coefficients = _compute_coefficients(config)
    if coefficients is None:
        return None
    return functools.partial(
        finalizer.build_upcycled_finalizer, coefficients=coefficients
    )


def _describe(config: TrainingConfig) -> Mapping[str, str]:
    coefficients = _compute_coefficients(config)
    if coefficients is None:
        return {"upcycled": "no even steps: the baseline alone"}
    first, last = coefficients[0], coefficients[-1]
    value = f"{first:.4g}" if first == last else f"{first:.4g} to {last:.4g}"
    text = f"an even step by the server alone after every round, coefficient {value}"
    if config.mechanism_kind is not None:
        text += "; it uses released results alone and is not charged"
    return {"upcycled": text}


_PROGRAM = distributed_training.Program(
    name="run_upcycled_fl", wrap_finalizer=_wrap_finalizer, describe=_describe
)
