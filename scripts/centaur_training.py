"""One run of run_centaur: distributed_training's, with a model for each client."""

import dataclasses
import functools
from collections.abc import Mapping

import tensorflow_federated as tff

from centaur import algorithms, personal_data
from centaur.diagnosis import MeasuringFactory
from centaur.local_training import Phase
from centaur.personal_evaluation import PersonalEvaluation, PersonalEvaluator
from centaur.split_model import SplitModel, build_split_model
from scripts import distributed_training
from scripts.centaur_config import CentaurConfig, Method
from scripts.mechanism_plan import MechanismPlan
from scripts.training_config import TrainingConfig
from scripts.training_program import Program, ProgramParts
from simulation import cohort, learning, seeds, training
from simulation.model import Model
from simulation.tasks.task import Task

_CAVEATS = (
    "mean accuracies over clients, and every choice of settings by them: they are "
    "exact functions of private data",
)
_HEAD_CAVEAT = (
    "the clients' own heads: all users' models together are joint-DP only, that is, "
    "user i's own model is not private against whoever is given it; heads that are "
    "written, to heads.npz and beside checkpoints, are the users' own and never a part "
    "of model.npz"
)

_SHARE_CAVEAT = (
    "other clients as those who look: each knows its own share of the noise and, from "
    "its scale, how many joined; joint DP is claimed against those alone who are given "
    "models and heads, and no share of the noise"
)


def run(config: CentaurConfig) -> distributed_training.RunOutcome:
    """Trains as configured, prints what it does, and writes the run folder.

    Raises:
        UserError: For anything the user can mend.
    """
    return distributed_training.run(config, PROGRAM)


def _build_parts(
    config: TrainingConfig,
    task: Task,
    model: Model,
    cohorts: cohort.CohortSampler,
    open_root: seeds.RootSeed,
) -> ProgramParts:
    del cohorts
    assert isinstance(config, CentaurConfig)
    data = personal_data.split_personal_data(
        task,
        validation_fraction=config.validation_fraction,
        seed=config.data_seed,
        hold_mb=config.hold_mb,
    )
    split = build_split_model(model, config.split_layer)
    algorithm = build_algorithm(config, split)
    weights = training.build_initial_weights(model, open_root)
    evaluation = PersonalEvaluation(
        algorithm.final_fit,
        shared=algorithm.initialize_global(weights),
        own=algorithm.initialize_own_head(weights),
        train=data.train,
        batch_size=config.batch_size,
        root=open_root,
        num_kept_weights=split.num_head_weights,
    )
    return ProgramParts(
        algorithm=algorithm,
        wrap_factory=functools.partial(_measure_updates, split)
        if config.measure_updates
        else None,
        lines=_describe(config, algorithm, split),
        caveats=_list_caveats(config),
        task=dataclasses.replace(
            task,
            train=data.train,
            validation=data.validation,
            test=data.test,
            description=f"{task.description}; {data.description}",
            identity=data.identity,
        ),
        evaluator=PersonalEvaluator(
            evaluation,
            validation=data.validation,
            test=data.test if config.evaluate_test else None,
            names=("loss", *model.metrics),
        ),
    )


def _list_caveats(config: CentaurConfig) -> list[str]:
    """Returns what a mechanism's epsilon does not cover."""
    caveats = list(_CAVEATS)
    if config.method_kind is not Method.STAND_ALONE:
        caveats.append(_HEAD_CAVEAT)
        if config.mechanism in ("ddgauss", "skellam"):
            caveats.append(_SHARE_CAVEAT)
    return caveats


def _measure_updates(
    split: SplitModel, plan: MechanismPlan
) -> learning.AggregationFactory:
    """Returns the mechanism's factory, with measurements of the updates."""
    parameters = plan.parameters
    return MeasuringFactory(
        plan.factory,
        l2_clip=None if parameters is None else parameters.l2_clip,
        central_stddev=0.0 if parameters is None else parameters.central_stddev,
        num_representation_weights=split.num_representation_weights,
    )


def build_algorithm(
    config: CentaurConfig, split: SplitModel
) -> algorithms.PersonalAlgorithm:
    """Returns what the method is, of a configuration and its model."""
    method = config.method_kind
    head = Phase(
        optimizer=_build_sgd(config.head_lr, config.head_momentum),
        num_epochs=config.head_epochs,
        weight_decay=config.weight_decay,
    )
    if method is Method.CENTAUR:
        return algorithms.build_centaur_algorithm(
            split,
            head=head,
            shared_epochs=config.client_epochs,
            weight_decay=config.weight_decay,
            head_state=algorithms.HeadState(config.head_state),
        )
    if method in (Method.PPSGD_PAPER, Method.PPSGD_AUTHORS):
        rate = config.ppsgd_head_lr or config.head_lr
        is_paper = method is Method.PPSGD_PAPER
        mode = algorithms.PpsgdMode
        return algorithms.build_ppsgd_algorithm(
            split,
            mode=mode.PAPER if is_paper else mode.AUTHORS,
            head=dataclasses.replace(
                head, optimizer=_build_sgd(rate, config.head_momentum)
            ),
            weight_decay=config.weight_decay,
            final_head=head,
        )
    if method is Method.STAND_ALONE:
        whole = Phase(
            optimizer=_build_sgd(config.client_lr, config.client_momentum),
            num_epochs=config.stand_alone_epochs,
            weight_decay=config.weight_decay,
        )
        return algorithms.StandAlone(split=split, final_head=head, whole=whole)
    # lambda ||.||^2 is a proximal term of mu = 2 lambda.
    pull = 2 * config.pmtl_lambda if method is Method.PMTL_FT else 0.0
    return algorithms.WholeModel(
        title=method.title,
        split=split,
        final_head=head,
        proximal_strength=pull,
        weight_decay=config.weight_decay,
    )


def _build_sgd(rate: float, momentum: float) -> tff.learning.optimizers.Optimizer:
    return tff.learning.optimizers.build_sgdm(rate, momentum=momentum or None)


def _describe(
    config: CentaurConfig,
    algorithm: algorithms.PersonalAlgorithm,
    split: SplitModel,
) -> Mapping[str, str]:
    method = config.method_kind
    parts = (
        f"{split.num_representation_parameters:,} parameters of the representation, "
        f"{split.num_head_parameters:,} of the head, which begins at layer "
        f"{split.split_layer!r}"
    )
    decay = f"weight decay {config.weight_decay:g}, batch {config.batch_size}"
    momentum = f"momentum {config.client_momentum:g}"
    head = (
        f"{config.head_epochs} epoch(s) of its head at {config.head_lr:g}, momentum "
        f"{config.head_momentum:g}"
    )
    rounds = {
        Method.CENTAUR: (
            f"{head}, over frozen features, from its "
            f"{'last one' if config.head_state == 'client' else 'initial state'}; "
            f"{config.client_epochs} epoch(s) of the representation at "
            f"{config.client_lr:g}, {momentum}"
        ),
        Method.PPSGD_PAPER: (
            "one step of its head and one of the representation at "
            f"{config.client_lr:g}"
        ),
        Method.PPSGD_AUTHORS: (
            "one epoch of its own head, on top of a shared one, and one of the shared "
            f"model at {config.client_lr:g}, {momentum}"
        ),
        Method.FEDAVG_FB: (
            f"{config.client_epochs} epoch(s) of the whole model at "
            f"{config.client_lr:g}, {momentum}"
        ),
        Method.PMTL_FT: (
            f"{config.client_epochs} epoch(s) of the whole model at "
            f"{config.client_lr:g}, {momentum}, pulled with lambda = "
            f"{config.pmtl_lambda:g}"
        ),
        Method.STAND_ALONE: (
            "send nothing: the one round is empty; each trains a whole model for "
            f"{config.stand_alone_epochs} epoch(s) at {config.client_lr:g}, {momentum}"
        ),
    }[method]
    if method in (Method.PPSGD_PAPER, Method.PPSGD_AUTHORS):
        rounds += f", the head at {config.ppsgd_head_lr or config.head_lr:g}"
    sent = "nothing"
    if method is not Method.STAND_ALONE:
        count = algorithm.count_sent(split.model.num_parameters)
        sent = f"the change of {count:,} parameters"
    own = head if method is not Method.STAND_ALONE else "as trained"
    return {
        "method": algorithm.name,
        "split": parts,
        "clients": f"{rounds}; {decay}",
        "sent": sent,
        "own models": f"{own}; made on a client's training part alone",
        "evaluated": _describe_evaluated(config),
    }


def _describe_evaluated(config: CentaurConfig) -> str:
    if not config.keeps_diagnostics:
        return "nothing"
    text = "each client's own model, on its own validation "
    if config.evaluate_test:
        return f"{text}and test parts"
    return f"{text}part; test parts left alone"


PROGRAM = Program(name="run_centaur", build_parts=_build_parts)
