"""Tests for what run_upcycled_fl refuses: by its flags, and once it has the data."""

import dataclasses
import re

import numpy as np
import pytest

from scripts import distributed_training, upcycled_config
from simulation import process, tasks
from tests.scripts import upcycled_runs
from tests.scripts.upcycled_runs import NO_NOISE, OBJECTIVE, OUTPUT, PROVEN, parse
from upcycled_fl import exact_solver

PFEDME = ("--algorithm=pfedme", "--proximal_mu=0", "--upcycled_coefficient=0.5")
RATE = "--objective_rate=20"

EXACT = ("--local_solver=exact", "--straggler_rate=0", "--client_accountant=proven")


def refuse(arguments, *parts: str) -> None:
    """Checks that the flags are refused, and the whole message."""
    with pytest.raises(ValueError) as caught:
        parse(*arguments)
    for part in parts:
        assert re.search(part, str(caught.value)), str(caught.value)


class TestAlgorithms:
    @pytest.mark.parametrize("name", ["pfedme_penalty", "pfedme_steps", "pfedme_lr"])
    @pytest.mark.parametrize("value", ["0", "-1"])
    def test_rates_of_pfedme(self, name, value):
        refuse(
            [*PFEDME, f"--{name}={value}"],
            rf"^`{name}` must be positive and finite. Found {value}",
        )

    def test_feddyn_needs_its_alpha(self):
        arguments = ["--algorithm=feddyn", "--upcycled_coefficient=0.5"]
        refuse(
            [*arguments, "--proximal_mu=0"],
            "^`proximal_mu` must be positive for feddyn: it is its alpha. Found 0.0.$",
        )
        assert parse(*arguments).proximal_mu == 0.3

    def test_pfedme_has_its_own_pull(self):
        refuse(
            ["--algorithm=pfedme"],
            "^`proximal_mu` must be 0 for pfedme, whose pull is `pfedme_penalty`, and "
            "`upcycled_coefficient` given for even steps. Found 0.3.$",
        )
        assert parse(*PFEDME).algorithm == "pfedme"

    @pytest.mark.parametrize("mechanism", ["ddgauss", "skellam", "gaussian"])
    def test_fednova_sends_what_a_joint_clip_would_spoil(self, mechanism):
        arguments = [f"--mechanism={mechanism}", "--client_weighting=uniform"]
        refuse(
            ["--algorithm=fednova", *arguments],
            "^`algorithm` must not be fednova under a mechanism: .*; or set "
            "mechanism=none. Found 'fednova'.$",
        )
        for algorithm in ("fedavg", "scaffold", "feddyn"):
            parse(f"--algorithm={algorithm}", *arguments)


class TestPerturbations:
    @pytest.mark.parametrize("value", ["0", "-0.5", "inf", "nan"])
    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("model_clip", [*OUTPUT, NO_NOISE]),
            ("client_stddev", OUTPUT),
            ("client_epsilon", OUTPUT),
            ("client_epsilon", OBJECTIVE),
            ("objective_rate", OBJECTIVE),
            ("gradient_tolerance", [*PROVEN, RATE]),
            ("residual_rate", [*PROVEN, RATE]),
        ],
    )
    def test_values_out_of_range(self, name, arguments, value):
        rule = "positive and finite" if value in ("0", "-0.5") else "finite"
        refuse(
            [*arguments, f"--{name}={value}"],
            rf"^`{name}` must be {rule}. Found {float(value)}.$",
        )
        parse(*arguments, f"--{name}=0.5")

    @pytest.mark.parametrize("value", ["0", "1", "-0.1", "1.5"])
    def test_delta(self, value):
        refuse(
            [*OUTPUT, NO_NOISE, f"--client_delta={value}"],
            rf"^`client_delta` must be in \(0, 1\). Found {float(value)}.$",
        )

    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            (["--client_stddev=0.25"], "client_stddev"),
            (["--objective_rate=0.25"], "objective_rate"),
            ([*OUTPUT, "--objective_rate=0.25"], "objective_rate"),
            ([*OBJECTIVE, "--client_stddev=0.25"], "client_stddev"),
        ],
    )
    def test_noise_of_another_perturbation(self, arguments, name):
        kind = parse_kind(arguments)
        refuse(
            arguments,
            f"^`{name}` must be unset with perturbation={kind}. Found 0.25.$",
        )

    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ("--client_epsilon=2", "`client_epsilon` must be None .* Found 2.0."),
            ("--local_solver=exact", "`local_solver` must be sgd .* Found 'exact'."),
        ],
    )
    def test_what_no_perturbation_has(self, argument, message):
        refuse([argument], f"^{message}$", "without a perturbation")

    @pytest.mark.parametrize(
        ("arguments", "noise"),
        [
            (OUTPUT, "client_stddev"),
            (OBJECTIVE, "objective_rate"),
            (PROVEN, "objective_rate"),
        ],
    )
    def test_noise_or_an_epsilon_and_not_both(self, arguments, noise):
        kind = parse_kind(arguments)
        rule = (
            f"^`{noise}` or `client_epsilon` must be given with perturbation={kind}, "
            "and not both. Found "
        )
        refuse(arguments, rule + "None and None.$")
        both = [f"--{noise}=0.5", "--client_epsilon=2"]
        refuse([*arguments, *both], rule + "0.5 and 2.0.$")
        for argument in both:
            parse(*arguments, argument)

    @pytest.mark.parametrize("name", ["fednova", "scaffold", "feddyn", "pfedme"])
    @pytest.mark.parametrize(
        "arguments", [[*OUTPUT, NO_NOISE], [*OBJECTIVE, RATE]], ids=["output", "obj"]
    )
    def test_another_algorithm(self, name, arguments):
        arguments = [*arguments, *PFEDME] if name == "pfedme" else arguments
        refuse(
            [*arguments, f"--algorithm={name}"],
            r"^`algorithm` must be fedavg \(FedAvg, FedProx\) with a perturbation: .* "
            f"Found '{name}'.$",
        )

    def test_objective_perturbation_needs_mu(self):
        baseline = ["--noupcycled", "--proximal_mu=0"]
        refuse(
            [*OBJECTIVE, RATE, *baseline],
            "^`proximal_mu` must be positive for objective perturbation. Found 0.0.$",
        )
        parse(*OUTPUT, NO_NOISE, *baseline)

    @pytest.mark.parametrize(
        "arguments", [[*OUTPUT, NO_NOISE], [*OBJECTIVE, RATE]], ids=["output", "obj"]
    )
    def test_two_models_of_the_same_examples(self, arguments):
        private = ["--mechanism=ddgauss", "--client_weighting=uniform"]
        refuse(
            [*arguments, *private, "--compare_central"],
            "^`compare_central` must be off with a perturbation: .* Found True.$",
        )
        parse(*arguments, *private)

    @pytest.mark.parametrize(
        ("arguments", "found"),
        [
            ([*PROVEN, "--straggler_rate=0.5"], "0.3 and 0.5"),
            (
                [*OUTPUT, NO_NOISE, "--local_solver=exact", "--noupcycled"]
                + ["--proximal_mu=0", "--straggler_rate=0"],
                "0.0 and 0.0",
            ),
        ],
    )
    def test_the_exact_solver_has_mu_and_no_stragglers(self, arguments, found):
        noise = [] if NO_NOISE in arguments else [RATE]
        refuse(
            [*arguments, *noise],
            "^`proximal_mu` must be positive and `straggler_rate` 0 for the exact "
            f"solver. Found {found}.$",
        )

    def test_accountants_of_objective_perturbation(self):
        refuse(
            [*OBJECTIVE, RATE, "--client_accountant=replace_one_average"],
            "^`client_accountant` must be as_published or proven for objective .* "
            "Found 'replace_one_average'.$",
        )
        refuse(
            [*PROVEN, RATE, "--local_solver=sgd"],
            "^`local_solver` must be exact for a proven epsilon of objective .* or set "
            "client_accountant=as_published. Found 'sgd'.$",
        )

    @pytest.mark.parametrize(
        "arguments",
        [
            [*OBJECTIVE, RATE],
            [*OUTPUT, NO_NOISE, "--local_solver=exact", "--straggler_rate=0"],
        ],
        ids=["sgd", "output"],
    )
    def test_noise_on_a_solution_where_there_is_none(self, arguments):
        refuse(
            [*arguments, "--residual_rate=0.5"],
            "^`residual_rate` must be unset unless perturbation is objective and "
            "local_solver exact. Found 0.5.$",
        )


class TestFurtherRefusals:
    @pytest.mark.parametrize("name", ["model_clip", "client_stddev"])
    def test_what_float32_cannot_hold(self, name):
        noise = [] if name == "client_stddev" else ["--client_stddev=1"]
        arguments = [*OUTPUT, *noise]
        refuse(
            [*arguments, f"--{name}=1e16"],
            rf"^`{name}` must be at most 1e\+15, .* Found 1e\+16.$",
        )
        parse(*arguments, f"--{name}=1e15")

    def test_a_tolerance_that_cannot_be_checked(self):
        refuse(
            [*PROVEN, RATE, "--gradient_tolerance=1e-9"],
            "^`gradient_tolerance` must be at least 1e-08: .* Found 1e-09.$",
        )
        parse(*PROVEN, RATE, "--gradient_tolerance=1e-8")
        assert upcycled_config.MIN_TOLERANCE == exact_solver.MIN_TOLERANCE

    @pytest.mark.parametrize("kind", ["output", "objective"])
    def test_an_exact_solver_without_its_tolerance_in_the_bound(self, kind):
        noise = NO_NOISE if kind == "output" else RATE
        arguments = [*PROVEN, f"--perturbation={kind}", noise]
        refuse(
            [*arguments, "--client_accountant=as_published"],
            "^`client_accountant` must be proven for the exact solver: .* Found "
            "'as_published'.$",
        )
        parse(*arguments)

    def test_clients_that_may_fail_by_their_data(self):
        refuse(
            [*PROVEN, RATE, "--client_failure=drop"],
            "^`client_failure` must be raise for the exact solver: .* Found 'drop'.$",
        )
        parse(*OUTPUT, NO_NOISE, "--client_failure=drop")

    @pytest.mark.parametrize(
        ("argument", "name"),
        [
            ("--client_accountant=proven", "client_accountant"),
            ("--unmet_assumptions", "unmet_assumptions"),
        ],
    )
    def test_words_about_noise_where_there_is_none(self, argument, name):
        refuse([argument], f"^`{name}` must be .* without a perturbation. Found ")


def parse_kind(arguments) -> str:
    (kind,) = [a.split("=")[1] for a in arguments if "--perturbation" in a] or ["none"]
    return kind


class TestWithData:
    """What is refused once the data are known, and before anything is written."""

    def refuse(self, folder, arguments, *parts: str) -> None:
        with pytest.raises(process.UserError) as caught:
            upcycled_runs.run(folder, *arguments)
        for part in parts:
            assert re.search(part, str(caught.value)), str(caught.value)
        assert not list(folder.iterdir())

    def test_models_that_the_theorem_is_not_about(self, tmp_path):
        arguments = [f for f in OBJECTIVE if f != "--unmet_assumptions"]
        train = tasks.load_task("synthetic_20").train
        largest = max(
            np.linalg.norm(np.append(example, 1.0))
            for client_id in train.client_ids
            for example in train.load(client_id)[0]
        )
        self.refuse(
            tmp_path,
            [*arguments, RATE],
            "^theorem C.2 does not apply: the model logistic_regression is not a "
            "linear model with one output; ",
            f"at most 1 with the bias's constant, and their largest norm is "
            f"{largest:.4g}. --model=one_output",
            "one_output_logistic_regression meets its assumptions; "
            "`unmet_assumptions` must be true to go on .* Found False.$",
        )

    @pytest.mark.parametrize(("factor", "is_said"), [(0.0, False), (1e-3, True)])
    def test_features_count_with_the_bias(self, tmp_path, monkeypatch, factor, is_said):
        """What is not 0 has norm above 1 beside a constant of 1."""
        replace_clients(monkeypatch, lambda _, x, y: (np.float32(factor) * x, y))
        arguments = [f for f in OBJECTIVE if f != "--unmet_assumptions"]
        with pytest.raises(process.UserError, match="with one output") as caught:
            upcycled_runs.run(tmp_path, *arguments, RATE)
        assert ("features must have norm" in str(caught.value)) is is_said

    @pytest.mark.parametrize("noise", [RATE, "--client_epsilon=5"])
    def test_clients_too_small_for_mu(self, tmp_path, noise):
        # 0.25 <= 0.5 |D_i| mu, and the smallest client has 47 examples.
        arguments = [*PROVEN, noise, "--clients_per_round=30"]
        self.refuse(
            tmp_path,
            [*arguments, "--proximal_mu=0.01"],
            r"`curvature` must be at most 0.5 \|D_i\| mu \(0.23\d*\); raise `mu`, or "
            "leave out clients with few examples. Found 0.25",
        )

    def test_an_epsilon_below_what_the_curvature_costs(self, tmp_path):
        self.refuse(
            tmp_path,
            [*PROVEN, "--client_epsilon=0.01"],
            "^the clients' own privacy: `epsilon` must exceed what the curvature and "
            r"the residual cost at any noise \(0.\d+\); raise `mu`.* Found 0.01.$",
        )

    @pytest.mark.parametrize(
        "arguments",
        [
            [*OBJECTIVE, RATE, *EXACT],
            [*OUTPUT, NO_NOISE, *EXACT],
        ],
        ids=["objective", "output"],
    )
    def test_models_that_the_exact_solver_does_not_know(self, tmp_path, arguments):
        self.refuse(
            tmp_path,
            arguments,
            "^`model` must be one_output_logistic_regression for the exact solver. "
            "Found 'logistic_regression'.$",
        )

    @pytest.mark.parametrize("count", [1, 2])
    def test_clients_without_examples(self, tmp_path, monkeypatch, count):
        def empty(client_id, x, y):
            return (x[:0], y[:0]) if int(client_id[-3:]) in (4, 5)[:count] else (x, y)

        replace_clients(monkeypatch, empty)
        for arguments in ([*OUTPUT, NO_NOISE], [*PROVEN, "--client_epsilon=5"]):
            self.refuse(
                tmp_path,
                arguments,
                "^every client must have an example under a perturbation; .* Found "
                f"none at {count} clients, 'device_004' first.$",
            )


def replace_clients(monkeypatch, change) -> None:
    """Has the program find other training data."""

    def load_task(name, options):
        task = tasks.load_task(name, options)
        make = task.train.make
        train = dataclasses.replace(
            task.train, make=lambda client_id: change(client_id, *make(client_id))
        )
        return dataclasses.replace(task, train=train)

    monkeypatch.setattr(distributed_training, "load_task", load_task)


class TestAfterReview:
    """What was once let through."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["--client_failure=drop"],
                "^`client_failure` must be raise for the exact",
            ),
            (
                ["--client_accountant=as_published"],
                "^`client_accountant` must be proven for the exact solver",
            ),
            (["--gradient_tolerance=1e-12"], "^`gradient_tolerance` must be at least"),
        ],
    )
    def test_the_exact_solver(self, arguments, message):
        refuse([*PROVEN, "--client_epsilon=2", *arguments], message)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--upcycled_lambda=-1"], "^`upcycled_lambda` must be >= 0. Found -1.0.$"),
            (
                ["--upcycled_coefficient=1"],
                r"^`upcycled_coefficient` must be in \[0, 1\). Found 1.0.$",
            ),
            (
                ["--client_accountant=proven"],
                "^`client_accountant` must be as_published",
            ),
            (["--unmet_assumptions"], "^`unmet_assumptions` must be False without"),
            (
                [*OUTPUT, "--client_stddev=1e39"],
                "^`client_stddev` must be at most 1e",
            ),
        ],
    )
    def test_names_are_those_of_the_flags(self, arguments, message):
        refuse(arguments, message)

    def test_the_least_tolerance_is_the_solvers(self):
        assert upcycled_config.MIN_TOLERANCE == exact_solver.MIN_TOLERANCE
