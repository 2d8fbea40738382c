"""The privacy that each client has by its own noise: what it costs, and who pays."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from scripts.mechanism_plan import SEEDED_NOTE
from scripts.upcycled_config import UpcycledConfig
from simulation import cohort, ledger, table
from simulation.linear_models import ONE_OUTPUT
from simulation.model import Model
from simulation.tasks.task import Task
from upcycled_fl import accounting

_SLACK = 1e-9
_NOT_MET = "assumptions known not to hold"
# What the noise on an inexact solution costs a round, unless its rate is given.
_RESIDUAL_EPSILON = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientPrivacyPlan:
    """The example-level privacy of the clients of a run.

    Attributes:
        perturbation: The clients' noise.
        accountant: What every epsilon rests on.
        delta: Of output perturbation; None for objective perturbation.
        num_examples: int64[N], the clients' numbers of examples, public.
        budget: The epsilon that the target may not pass, or None.
        target: The largest of the clients' epsilons, or their mean.
        problems: What is known not to hold of the theorem that is used.
        caveats: What the data keep the statement from covering.
    """

    perturbation: accounting.OutputPerturbation | accounting.ObjectivePerturbation
    accountant: accounting.Accountant
    delta: float | None
    num_examples: np.ndarray
    budget: float | None
    target: accounting.EpsilonTarget
    problems: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()

    def compute_statement(
        self, num_releases: np.ndarray
    ) -> accounting.ClientPrivacyStatement:
        """Returns what is claimed after each client's number of releases, int64[N]."""
        statement = accounting.compute_privacy(
            self.perturbation,
            num_examples=self.num_examples,
            num_releases=num_releases,
            accountant=self.accountant,
            delta=self.delta,
            conversion=accounting.choose_conversion(self.accountant),
        )
        standing = statement.standing
        if self.problems:
            standing = f"{standing}; {_NOT_MET}"
        return dataclasses.replace(
            statement,
            standing=standing,
            assumptions=(
                *statement.assumptions,
                *(f"NOT MET: {problem}" for problem in self.problems),
            ),
            not_covered=(*statement.not_covered, *self.caveats),
        )

    def charge(self, num_releases: np.ndarray) -> Mapping[str, table.Scalar]:
        """Returns the columns of metrics.csv, each with its accountant beside it.

        Raises:
            BudgetExceededError: If that many releases pass the budget.
        """
        statement = self.compute_statement(num_releases)
        self._check_budget(statement)
        return {
            "client_epsilon_mean": statement.epsilon_mean,
            "client_epsilon_min": statement.epsilon_min,
            "client_epsilon_max": statement.epsilon_max,
            "client_delta": statement.delta,
            "client_accountant": statement.accountant,
            "client_standing": statement.standing or "proven",
        }

    def _check_budget(self, statement: accounting.ClientPrivacyStatement) -> None:
        if self.budget is None:
            return
        epsilon = statement.epsilon_max
        if self.target is accounting.EpsilonTarget.MEAN:
            epsilon = statement.epsilon_mean
        if epsilon > self.budget * (1 + _SLACK):
            raise ledger.BudgetExceededError(
                f"the next round would bring the clients' {self.target.value} epsilon "
                f"to {statement.describe_epsilon(epsilon)}, past the budget of "
                f"{self.budget:.6g}"
            )

    @property
    def accountant_name(self) -> str:
        """The accountant's name, and whether its assumptions are known not to hold."""
        name = self.accountant.value
        return f"{name}, {_NOT_MET}" if self.problems else name

    def describe_noise(self) -> str:
        """Returns the noise and the accountant, for the first lines of a run."""
        part = self.perturbation
        if isinstance(part, accounting.OutputPerturbation):
            text = (
                f"output: models clipped to {part.l2_clip:g}, Gaussian noise of "
                f"standard deviation {part.local_stddev:.6g} a coordinate"
            )
        else:
            text = f"objective: noise of rate alpha = {part.noise_rate:.6g}"
            if part.residual is not None:
                text += (
                    f", and of rate {part.residual.rate:.6g} on the solution, whose "
                    f"gradient is below {part.residual.gradient_tolerance:g}"
                )
        if self.budget is not None:
            text += (
                f"; for a {self.target.value} epsilon of {self.budget:g}, which no "
                "round may pass"
            )
        return f"{text}; accountant {self.accountant_name}"


def build_client_privacy(
    config: UpcycledConfig, task: Task, model: Model, cohorts: cohort.CohortSampler
) -> ClientPrivacyPlan | None:
    """Returns the plan of a configuration; None for no perturbation.

    Noise is calibrated for the rounds that each client will join, which the seed has
    decided and data have not. Without diagnostics, which record them, it is for all
    rounds; so it is without a seed, where a run that is taken up again draws other
    cohorts, and must find the same noise.

    Raises:
        ValueError: If a client has no examples, or an assumption does not hold.
    """
    if config.perturbation == "none":
        return None
    if config.is_exact and model.name != ONE_OUTPUT:
        raise ValueError(
            f"`model` must be {ONE_OUTPUT} for the exact solver. Found {model.name!r}."
        )
    sizes = _count_examples(task)
    problems = _list_problems(config, task, model)
    if problems and not config.unmet_assumptions:
        raise ValueError(
            f"theorem C.2 does not apply: {'; '.join(problems)}. "
            "--model=one_output_logistic_regression meets its assumptions; "
            "`unmet_assumptions` must be true to go on with its figure. Found False."
        )
    target = accounting.EpsilonTarget(config.client_epsilon_target)
    releases = np.full(task.num_clients, config.total_rounds)
    if config.keeps_diagnostics and config.seed is not None:
        releases = cohort.count_rounds_joined(cohorts, config.total_rounds)
    caveats = list(task.caveats)
    if config.seed is not None:
        caveats.append(SEEDED_NOTE)
    arguments = (config, model, sizes, releases, target)
    try:
        plan = ClientPrivacyPlan(
            perturbation=_build_output(*arguments)
            if config.perturbation == "output"
            else _build_objective(*arguments),
            accountant=config.accountant,
            delta=config.client_delta if config.perturbation == "output" else None,
            num_examples=sizes,
            budget=config.client_epsilon,
            target=target,
            problems=tuple(problems),
            caveats=tuple(caveats),
        )
        # Whatever the accountant refuses is refused before the first round.
        plan.compute_statement(releases)
    except ValueError as error:
        raise ValueError(f"the clients' own privacy: {error}") from None
    return plan


def _build_output(
    config: UpcycledConfig,
    model: Model,
    sizes: np.ndarray,
    releases: np.ndarray,
    target: accounting.EpsilonTarget,
) -> accounting.OutputPerturbation:
    minimiser = None
    if config.is_exact:
        minimiser = accounting.ExactMinimiser(
            lipschitz=_choose_loss(model).lipschitz,
            mu=config.proximal_mu,
            gradient_tolerance=config.gradient_tolerance,
        )
    if config.client_stddev is not None:
        return accounting.OutputPerturbation(
            l2_clip=config.model_clip,
            local_stddev=config.client_stddev,
            minimiser=minimiser,
        )
    assert config.client_epsilon is not None
    return accounting.calibrate_output_perturbation(
        epsilon=config.client_epsilon,
        delta=config.client_delta,
        l2_clip=config.model_clip,
        num_examples=sizes,
        num_releases=releases,
        accountant=config.accountant,
        conversion=accounting.choose_conversion(config.accountant),
        minimiser=minimiser,
        target=target,
    )


def _build_objective(
    config: UpcycledConfig,
    model: Model,
    sizes: np.ndarray,
    releases: np.ndarray,
    target: accounting.EpsilonTarget,
) -> accounting.ObjectivePerturbation:
    residual, mu = None, config.proximal_mu
    if config.is_exact:
        rate = config.residual_rate
        if rate is None:
            rate = _RESIDUAL_EPSILON * mu / (2 * config.gradient_tolerance)
        residual = accounting.ResidualNoise(
            gradient_tolerance=config.gradient_tolerance, rate=rate
        )
    loss = _choose_loss(model)
    if config.objective_rate is not None:
        return accounting.ObjectivePerturbation(
            noise_rate=config.objective_rate, mu=mu, loss=loss, residual=residual
        )
    assert config.client_epsilon is not None
    return accounting.calibrate_objective_perturbation(
        epsilon=config.client_epsilon,
        mu=mu,
        num_examples=sizes,
        num_releases=releases,
        accountant=config.accountant,
        loss=loss,
        residual=residual,
        target=target,
    )


def _count_examples(task: Task) -> np.ndarray:
    """Returns |D_i|, int64[N].

    Raises:
        ValueError: If a client has none.
    """
    ids = task.train.client_ids
    sizes = np.array([len(task.train.load(client_id)[1]) for client_id in ids])
    empty = [client_id for client_id, size in zip(ids, sizes, strict=True) if not size]
    if empty:
        raise ValueError(
            "every client must have an example under a perturbation; leave empty ones "
            f"out of the data. Found none at {len(empty)} clients, {empty[0]!r} first."
        )
    return sizes.astype(np.int64)


def _list_problems(config: UpcycledConfig, task: Task, model: Model) -> list[str]:
    """Returns what is known not to hold of theorem C.2's assumptions."""
    if config.perturbation != "objective" or model.name == ONE_OUTPUT:
        return []
    problems = [f"the model {model.name} is not a linear model with one output"]
    largest = 0.0
    for client_id in task.train.client_ids:
        x, _ = task.train.load(client_id)
        if not np.issubdtype(x.dtype, np.floating):
            return problems
        flat = x.reshape([len(x), -1]).astype(np.float64)
        norms = np.sqrt(np.sum(flat**2, axis=1) + 1)
        largest = max(largest, float(norms.max(initial=0.0)))
    if largest > 1:
        problems.append(
            "features must have norm at most 1 with the bias's constant, and their "
            f"largest norm is {largest:.4g}"
        )
    return problems


def _choose_loss(model: Model) -> accounting.LinearModelLoss:
    """Returns u_1 and u_2: of one output, else those of a softmax."""
    if model.name == ONE_OUTPUT:
        return accounting.LOGISTIC_LOSS
    # For models that are not linear no theorem says them.
    return accounting.SOFTMAX_LOSS
