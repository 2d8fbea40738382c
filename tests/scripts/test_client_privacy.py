"""Tests for the clients' own privacy in a run: what it costs, by hand, and who pays."""

import contextlib
import dataclasses
import math

import numpy as np
import pytest
from scipy import special, stats

from scripts import client_privacy
from scripts.mechanism_plan import SEEDED_NOTE
from simulation import cohort, ledger, seeds
from simulation.tasks import load_task
from tests.scripts import upcycled_runs
from tests.scripts.upcycled_runs import (
    OBJECTIVE,
    OUTPUT,
    PROVEN,
    parse,
    read_rows,
    read_summary,
)
from upcycled_fl import accounting

SIGMA, CLIP, DELTA = 0.8, 10.0, 1e-3
NOISE = f"--client_stddev={SIGMA}"
EVERYBODY = ("--clients_per_round=30", "--straggler_rate=0")
ALPHA, MU = 20.0, 0.3
RATE = f"--objective_rate={ALPHA}"
PUBLISHED = "as published, not proven for clipped SGD models"
# Rounding of float64 in sums.
EXACT = 1e-12


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return upcycled_runs.Runner(tmp_path_factory.mktemp("private"))


def load_sizes(name: str = "synthetic_20") -> np.ndarray:
    train = load_task(name).train
    return np.array([len(train.load(client_id)[1]) for client_id in train.client_ids])


def build_cohorts(clients_per_round: int = 9, seed: int | None = 1):
    return cohort.FixedCohort(
        client_ids=load_task("synthetic_20").train.client_ids,
        clients_per_round=clients_per_round,
        root=seeds.build_root_seed(seed),
    )


def count_rounds(num_rounds: int, **options) -> np.ndarray:
    """Returns the rounds that each client joins, from the cohorts."""
    cohorts = build_cohorts(**options)
    joined = [cohorts.select(number) for number in range(num_rounds)]
    return np.array([sum(c in names for names in joined) for c in cohorts.client_ids])


def compute_output(counts, sizes, *, sigma=SIGMA, factor=1.0) -> np.ndarray:
    """Theorem C.1."""
    a = counts * (factor * CLIP) ** 2 / (2 * sigma**2 * sizes**2)
    return 2 * np.sqrt(a * math.log(1 / DELTA)) + a


def compute_delta(ratio: float, epsilon: float) -> float:
    """Returns delta of Gaussians whose means are `ratio` deviations apart."""
    tail = special.log_ndtr(-ratio / 2 - epsilon / ratio)
    return stats.norm.cdf(ratio / 2 - epsilon / ratio) - math.exp(epsilon + tail)


def compute_objective(counts, sizes, *, u_1, u_2) -> np.ndarray:
    """Theorem C.2."""
    return counts * (2 * ALPHA * u_1 * MU + 2.8 * u_2) / (sizes * MU)


def read_columns(row: dict[str, str]) -> list[float]:
    return [float(row[f"client_epsilon_{name}"]) for name in ("mean", "min", "max")]


def summarize(epsilons: np.ndarray) -> list[float]:
    return [epsilons.mean(), epsilons.min(), epsilons.max()]


class TestEpsilons:
    ROUNDS = "--total_rounds=3"

    def test_output_perturbation_is_theorem_c1(self, run):
        outcome, _ = run(*OUTPUT, NOISE, self.ROUNDS)
        found, sizes = read_summary(outcome)["client_privacy"], load_sizes()
        counts = count_rounds(3)
        assert found["num_releases"] == counts.tolist()
        expected = compute_output(counts, sizes)
        assert found["epsilons"] == pytest.approx(expected, rel=EXACT)
        for name, value in zip(
            ("mean", "min", "max"), summarize(expected), strict=True
        ):
            assert found[f"epsilon_{name}"] == pytest.approx(value, rel=EXACT)
        assert found["delta"] == DELTA
        # Everybody in every round, sigma squared, replacing, the server's steps.
        for wrong in (
            compute_output(3, sizes),
            compute_output(counts, sizes, sigma=SIGMA**2),
            compute_output(counts, sizes, factor=2),
            compute_output(2 * counts, sizes),
        ):
            assert found["epsilons"] != pytest.approx(wrong, rel=0.05)

    def test_the_columns_grow_as_clients_join(self, run):
        outcome, _ = run(*OUTPUT, NOISE, self.ROUNDS)
        sizes, rows = load_sizes(), read_rows(outcome)
        for number, row in enumerate(rows, start=1):
            expected = compute_output(count_rounds(number), sizes)
            assert read_columns(row) == pytest.approx(summarize(expected), rel=EXACT)
            assert float(row["client_delta"]) == DELTA
            # Nothing is claimed of the whole user.
            assert row["epsilon"] == "inf"
        means = [read_columns(row)[0] for row in rows]
        assert means[0] < means[1] < means[2]

    def test_the_other_accountants(self):
        sizes, counts = load_sizes(), count_rounds(3)
        plan, _ = plan_privacy(
            *OUTPUT, NOISE, "--client_accountant=replace_one_average"
        )
        found = plan.compute_statement(counts)
        expected = compute_output(counts, sizes, factor=2)
        assert found.epsilons == pytest.approx(expected, rel=EXACT)
        # The exact curve of Gaussians whose models are 2 tau apart.
        plan, _ = plan_privacy(
            *OUTPUT, "--client_stddev=40", "--client_accountant=proven"
        )
        found = plan.compute_statement(counts)
        for count, epsilon in zip(counts, found.epsilons, strict=True):
            ratio = 2 * CLIP * math.sqrt(count) / 40
            if not count:
                assert epsilon == 0
                continue
            assert compute_delta(ratio, epsilon) == pytest.approx(DELTA, rel=1e-6)

    def test_proven_output_perturbation_of_exact_minimisers(self):
        """Models are 2 (u_1 / |D_i| + g) / mu apart where that is less than 2 tau."""
        exact = [f for f in PROVEN if "perturbation" not in f]
        tolerance = 0.01
        arguments = (*exact, "--perturbation=output", "--gradient_tolerance=0.01")
        plan, _ = plan_privacy(*arguments, "--client_stddev=4", "--model_clip=0.05")
        found = plan.compute_statement(count_rounds(3)).epsilons
        sizes = load_sizes("synthetic_20_binary")
        apart = np.minimum(2 * 0.05, 2 * (1 / sizes + tolerance) / MU)
        assert len(np.unique(apart)) > 2 and np.sum(apart == 0.1) > 2
        for count, distance, epsilon in zip(count_rounds(3), apart, found, strict=True):
            if count:
                ratio = distance * math.sqrt(count) / 4
                assert compute_delta(ratio, epsilon) == pytest.approx(DELTA, rel=1e-6)

    def test_objective_perturbation_is_theorem_c2(self, run):
        outcome, _ = run(*OBJECTIVE, RATE, *EVERYBODY)
        found = read_summary(outcome)["client_privacy"]
        # Of a softmax with two outputs.
        expected = compute_objective(2, load_sizes(), u_1=2**0.5, u_2=0.5)
        assert found["epsilons"] == pytest.approx(expected, rel=EXACT)
        assert found["delta"] == 0
        assert read_columns(read_rows(outcome)[0]) == pytest.approx(
            [value / 2 for value in summarize(expected)], rel=EXACT
        )


class TestUpcycling:
    """A round is one release, whatever the server does afterwards."""

    @pytest.mark.parametrize(
        "arguments",
        [(*OUTPUT, NOISE), (*OBJECTIVE, RATE)],
        ids=["output", "objective"],
    )
    def test_rounds_cost_the_same_and_server_steps_half(self, run, arguments):
        upcycled, _ = run(*arguments, *EVERYBODY)
        baseline, _ = run(*arguments, *EVERYBODY, "--noupcycled", "--total_rounds=4")
        two, four = (
            [read_columns(row) for row in read_rows(outcome)]
            for outcome in (upcycled, baseline)
        )
        assert two == four[:2]
        # 2 and 4 steps by the server.
        for number in (1, 2):
            ours, theirs = two[number - 1], four[2 * number - 1]
            if arguments[1].endswith("objective"):
                half = [value / 2 for value in theirs]
            else:
                half = summarize(compute_output(number, load_sizes()))
                double = summarize(compute_output(2 * number, load_sizes()))
                assert theirs == pytest.approx(double, rel=EXACT)
            assert ours == pytest.approx(half, rel=EXACT)


def plan_privacy(*arguments: str, root_seed: int | None = 1, rounds: int = 3):
    """Returns the plan without a run, and the rounds that each client will join."""
    config = dataclasses.replace(
        parse(f"--total_rounds={rounds}", *arguments), seed=root_seed
    )
    task = load_task(config.task)
    cohorts = build_cohorts(config.clients_per_round, root_seed)
    plan = client_privacy.build_client_privacy(
        config, task, task.build_model(config.model), cohorts
    )
    counts = count_rounds(
        rounds, clients_per_round=config.clients_per_round, seed=root_seed
    )
    return plan, counts


def get_noise(plan) -> float:
    part = plan.perturbation
    if isinstance(part, accounting.OutputPerturbation):
        return part.local_stddev
    return 1 / part.noise_rate


class TestCalibration:
    @pytest.mark.parametrize("target", ["max", "mean"])
    @pytest.mark.parametrize(
        "arguments",
        [
            OUTPUT,
            (*OUTPUT, "--client_accountant=replace_one_average"),
            (*OUTPUT, "--client_accountant=proven"),
            OBJECTIVE,
            PROVEN,
        ],
        ids=["output", "replace_one", "proven_output", "objective", "proven"],
    )
    def test_there_and_back(self, arguments, target):
        noises = []
        for epsilon in (1.0, 2.0, 8.0):
            plan, counts = plan_privacy(
                *arguments,
                f"--client_epsilon={epsilon}",
                f"--client_epsilon_target={target}",
            )
            statement = plan.compute_statement(counts)
            found = getattr(statement, f"epsilon_{target}")
            assert epsilon * (1 - 1e-3) <= found <= epsilon
            # The other figure is another one.
            other = statement.epsilon_mean + statement.epsilon_max - found
            assert abs(other - epsilon) > 0.1 * epsilon
            assert plan.budget == epsilon
            plan.charge(counts)
            noises.append(get_noise(plan))
        assert noises[0] > 1.2 * noises[1] > 1.2 * 1.2 * noises[2]

    def test_sigma_by_hand(self):
        plan, counts = plan_privacy(*OUTPUT, "--client_epsilon=2")
        # A = (sqrt(L + eps) - sqrt(L))^2.
        log = math.log(1 / DELTA)
        a = (math.sqrt(log + 2) - math.sqrt(log)) ** 2
        largest = np.max(np.sqrt(counts) / load_sizes())
        assert get_noise(plan) == pytest.approx(CLIP * largest / math.sqrt(2 * a))

    def test_a_run_spends_what_it_may(self, run):
        outcome, out = run(*OUTPUT, "--client_epsilon=2", "--total_rounds=3")
        summary = read_summary(outcome)
        assert summary["rounds_completed"] == 3 and summary["stopped"] is None
        assert 2 * (1 - 1e-3) <= summary["client_privacy"]["epsilon_max"] <= 2
        plan, _ = plan_privacy(*OUTPUT, "--client_epsilon=2")
        assert f"standard deviation {get_noise(plan):.6g} a coordinate" in out

    def test_cohorts_that_the_seed_has_not_decided(self):
        """Without a seed, or a record of who joined, noise is for all rounds: a run
        that is taken up again must find the same."""
        target = (*OUTPUT, "--client_epsilon=2")
        everybody, _ = plan_privacy(*target, "--clients_per_round=30")
        unseeded = [plan_privacy(*target, root_seed=None)[0] for _ in range(2)]
        off = [
            plan_privacy(*target, "--diagnostics=off", root_seed=seed)[0]
            for seed in (1, 2)
        ]
        assert {get_noise(plan) for plan in (*unseeded, *off)} == {get_noise(everybody)}
        seeded = [plan_privacy(*target, root_seed=seed)[0] for seed in (1, 2)]
        assert get_noise(seeded[0]) != get_noise(seeded[1])
        assert max(map(get_noise, seeded)) < get_noise(everybody)


class Killed(BaseException):
    """Stands for kill -9: nothing may run afterwards."""


@pytest.fixture(scope="module")
def robbed(tmp_path_factory):
    """An unseeded run whose second round was lost, taken up again."""
    folder = tmp_path_factory.mktemp("robbed")
    arguments = (*OUTPUT, *EVERYBODY, "--client_epsilon=2", "--total_rounds=3")
    close = ledger.PrivacyLedger.close_round

    def fail(self, *args, **kwargs):
        if self.state.rounds_completed == 1:
            raise Killed
        return close(self, *args, **kwargs)

    runner = upcycled_runs.Runner(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upcycled_runs, "TINY", upcycled_runs.TINY[:-1])
        with contextlib.suppress(Killed), pytest.MonkeyPatch.context() as kill:
            kill.setattr(ledger.PrivacyLedger, "close_round", fail)
            runner(*arguments)
        return runner(*arguments)


class TestBudget:
    def test_a_lost_round_ends_a_run_before_the_round_that_would_pass(self, robbed):
        outcome, out = robbed
        (result,) = outcome.results.values()
        state, summary = result.ledger_state, read_summary(outcome)
        assert (state.rounds_completed, state.rounds_lost) == (2, 1)
        assert summary["rounds_completed"] == 2 and summary["rounds_spent"] == 3
        assert len(read_rows(outcome)) == 2
        # Three releases are what was planned for.
        found = summary["client_privacy"]
        assert found["num_releases"] == [3] * 30
        assert 2 * (1 - 1e-3) <= found["epsilon_max"] <= 2
        assert read_columns(read_rows(outcome)[-1])[2] == found["epsilon_max"]
        plan, _ = plan_privacy(*OUTPUT, *EVERYBODY, "--client_epsilon=2")
        fourth = plan.compute_statement(np.full(30, 4)).epsilon_max
        assert fourth > 2.3
        message = (
            "the next round would bring the clients' max epsilon to "
            f"{fourth:.6g} (as_published: {PUBLISHED}), past the budget of 2"
        )
        assert summary["stopped"] == message
        assert f"stopped early: {message}" in out
        assert "1 rounds were lost in a crash" in out

    @pytest.mark.parametrize("target", ["max", "mean"])
    def test_one_release_too_many(self, target):
        plan, counts = plan_privacy(
            *OUTPUT, "--client_epsilon=2", f"--client_epsilon_target={target}"
        )
        state = dataclasses.replace(
            ledger.build_ledger_state(30, 3), join_counts=counts, rounds_completed=3
        )
        plan.charge(ledger.count_client_releases(state, recorded=True))
        lost = dataclasses.replace(state, rounds_lost=1)
        too_many = ledger.count_client_releases(lost, recorded=True)
        assert too_many.tolist() == (counts + 1).tolist()
        with pytest.raises(
            ledger.BudgetExceededError,
            match=f"{target} epsilon .* past the budget of 2",
        ):
            plan.charge(too_many)
        # A plan that was given its noise has no budget.
        plan, _ = plan_privacy(*OUTPUT, NOISE)
        plan.charge(1000 * counts)

    def test_only_the_target_counts(self):
        mean, counts = plan_privacy(
            *OUTPUT, "--client_epsilon=2", "--client_epsilon_target=mean"
        )
        assert mean.compute_statement(counts).epsilon_max > 2.5
        mean.charge(counts)
        # One more for the smallest client alone.
        more = counts + (load_sizes() == load_sizes().min())
        with pytest.raises(ledger.BudgetExceededError, match="mean epsilon"):
            mean.charge(more)


class TestDiagnosticsOff:
    def test_every_client_pays_for_every_round(self, run):
        outcome, _ = run(*OUTPUT, NOISE, "--diagnostics=off")
        found, sizes = read_summary(outcome)["client_privacy"], load_sizes()
        assert found["num_releases"] == [2] * 30
        assert found["epsilons"] == pytest.approx(compute_output(2, sizes), rel=EXACT)
        for number, row in enumerate(read_rows(outcome), start=1):
            expected = summarize(compute_output(number, sizes))
            assert read_columns(row) == pytest.approx(expected, rel=EXACT)
        # More than those who joined would.
        assert compute_output(count_rounds(2), sizes).mean() < 0.6 * expected[0]
        assert "clients_joined" not in row


class TestWords:
    def test_results(self, run):
        outcome, _ = run(*OUTPUT, NOISE, "--total_rounds=3")
        found = read_summary(outcome)["client_privacy"]
        assert found["accountant"] == "as_published"
        assert found["standing"] == PUBLISHED and found["is_proven"] is False
        assert len(found["epsilons"]) == len(found["num_releases"]) == 30
        assert "theorem C.1" in found["bound"]
        assert SEEDED_NOTE in found["not_covered"]

    def test_the_label_stands_beside_every_number(self, run):
        outcome, out = run(*OUTPUT, NOISE, "--total_rounds=3")
        found = read_summary(outcome)["client_privacy"]
        values = [found[f"epsilon_{name}"] for name in ("mean", "max")]
        for value in values:
            digits = str(value)[:5]
            (line,) = [line for line in out.splitlines() if digits in line]
            assert line.endswith(f"epsilon: {value:.6g} (as_published: {PUBLISHED})")
        for row in read_rows(outcome):
            assert row["client_accountant"] == "as_published"
            assert row["client_standing"] == PUBLISHED
        assert "accountant as_published\n" in out
        # The server's own word on whole users comes first.
        assert "Whole users, clients' own noise alone: epsilon = inf" in out

    def test_an_unseeded_run_has_no_note_on_its_seed(self, robbed):
        outcome, out = robbed
        found = read_summary(outcome)["client_privacy"]
        assert SEEDED_NOTE not in found["not_covered"] and found["not_covered"]
        assert "root seed" not in out.split("Privacy of each of 30 clients")[1]

    def test_assumptions_that_are_known_not_to_hold(self, run):
        outcome, out = run(*OBJECTIVE, RATE, *EVERYBODY)
        found = read_summary(outcome)["client_privacy"]
        standing = (
            "as published, not proven for models trained by SGD; assumptions known not "
            "to hold"
        )
        assert found["standing"] == standing
        problems = [
            note for note in found["assumptions"] if note.startswith("NOT MET: ")
        ]
        assert len(problems) == 2
        assert (
            "logistic_regression is not a linear model with one output" in problems[0]
        )
        assert "features must have norm at most 1" in problems[1]
        for problem in problems:
            assert f"assumes: {problem}" in out
        assert {row["client_standing"] for row in read_rows(outcome)} == {standing}
        assert "accountant as_published, assumptions known not to hold" in out


class TestProven:
    def test_end_to_end(self, run):
        """What C.2 needs holds: one output, scaled features, exact minimisers, and
        noise for what the solver leaves, by default at 0.01 a round."""
        outcome, out = run(*PROVEN, RATE, "--clients_per_round=9")
        found, counts = read_summary(outcome)["client_privacy"], count_rounds(2)
        sizes = load_sizes("synthetic_20_binary")
        expected = compute_objective(counts, sizes, u_1=1, u_2=0.25) + 0.01 * counts
        assert found["epsilons"] == pytest.approx(expected, rel=EXACT)
        assert found["accountant"] == "proven"
        assert found["standing"] is None and found["is_proven"] is True
        assert {row["client_standing"] for row in read_rows(outcome)} == {"proven"}
        assert f"max epsilon: {expected.max():.6g} (proven)\n" in out
        assert "as published" not in out and "as_published" not in out
        # beta = 0.01 mu / (2 g).
        assert "of rate 150 on the solution, whose gradient is below 1e-05" in out
        assert "minimise their problem, with a proximal term of mu = 0.3" in out
        assert not [note for note in found["not_covered"] if "not even" in note]

    def test_the_rate_of_the_noise_on_the_solution(self):
        rates = []
        for arguments in ((), ("--residual_rate=7",), ("--gradient_tolerance=1e-3",)):
            plan, counts = plan_privacy(*PROVEN, RATE, *arguments)
            residual = plan.perturbation.residual
            rates.append(residual.rate)
            sizes = load_sizes("synthetic_20_binary")
            cost = 2 * residual.rate * residual.gradient_tolerance / MU
            expected = compute_objective(counts, sizes, u_1=1, u_2=0.25) + cost * counts
            found = plan.compute_statement(counts).epsilons
            assert found == pytest.approx(expected, rel=EXACT)
        assert rates == pytest.approx([150, 7, 1.5])
