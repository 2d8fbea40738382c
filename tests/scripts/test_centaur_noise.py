"""Tests of the noise that CENTAUR's programs need, and of what they refuse to claim."""

import pytest

from distributed_dp import accounting
from scripts.mechanism_plan import build_plans
from simulation import process, seeds
from tests.scripts import centaur_runs

NUM_CLIENTS, DIM = 1000, 235_920
SETTING = ("--epsilon=1", "--delta=1e-5", "--total_rounds=40", "--clip=0.25")
DDGAUSS = ("--mechanism=ddgauss", "--num_stddevs=4")


def plan(*arguments, num_clients=NUM_CLIENTS, clients_keep_state=True):
    (found,) = build_plans(
        centaur_runs.parse(*SETTING, *arguments),
        num_clients=num_clients,
        dim=DIM,
        root=seeds.build_root_seed(0),
        clients_keep_state=clients_keep_state,
    )
    return found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], 23.59),
        (["--central_accountant=analytic"], 23.59),
        (["--central_accountant=rdp"], 25.58),
        (["--sampling=fixed"], 47.19),
        (["--sampling=fixed", "--central_accountant=rdp"], 51.17),
        ([*DDGAUSS, "--bits=20"], 25.62),
        ([*DDGAUSS, "--bits=18"], 26.13),
        ([*DDGAUSS, "--bits=16"], 42.93),
    ],
)
def test_noise_multipliers(arguments, expected):
    """The table of docs/centaur.md."""
    found = plan(*arguments).parameters.noise_multiplier
    assert found == pytest.approx(expected, abs=6e-3)


class TestAmplification:
    def test_fixed_cohorts_of_clients_with_state_are_refused(self):
        with pytest.raises(ValueError, match="^`sampling` must be poisson.*Found 'f"):
            plan("--sampling=fixed", "--participation=0.5")

    @pytest.mark.parametrize(
        ("arguments", "state"),
        [
            (["--sampling=fixed", "--participation=0.5"], False),
            (["--sampling=fixed"], True),
            (["--participation=0.5"], True),
            (["--mechanism=none", "--sampling=fixed", "--participation=0.5"], True),
        ],
    )
    def test_what_is_proven_is_not(self, arguments, state):
        plan(*arguments, num_clients=200, clients_keep_state=state)

    def test_what_is_as_published_says_so(self):
        published = (
            *("--sampling=fixed", "--participation=0.5"),
            "--accounting=as_published",
        )
        found = plan(*published)
        assert found.standing is accounting.Accounting.AS_PUBLISHED
        assert any("what clients keep" in text for text in found.not_covered)
        forgets = plan(*published, clients_keep_state=False)
        assert not any("what clients keep" in text for text in forgets.not_covered)

    @pytest.mark.parametrize(
        ("method", "refused"),
        [
            (["--method=centaur"], True),
            (["--method=ppsgd_paper"], True),
            (["--method=ppsgd_authors"], True),
            (["--head_state=refit"], False),
            (["--method=fedavg_fb"], False),
        ],
    )
    def test_the_program(self, tmp_path, method, refused):
        arguments = (
            *method,
            "--total_rounds=1",
            "--mechanism=gaussian",
            "--epsilon=50",
            "--sampling=fixed",
            "--participation=0.6",
        )
        if refused:
            with pytest.raises(process.UserError, match="`sampling` must be poisson"):
                centaur_runs.run(tmp_path, *arguments)
            assert not (tmp_path / "run").exists()
        else:
            outcome, _ = centaur_runs.run(tmp_path, *arguments)
            statement = centaur_runs.read_summary(outcome)["privacy"][0]
            assert statement["epsilon"] <= 50 and statement["sampling_rate"] == 0.6
