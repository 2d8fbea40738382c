"""Tests of run_centaur: methods against NumPy, labels, resuming, privacy."""

import contextlib
import dataclasses
import json
import subprocess

import numpy as np
import pytest

from centaur import personal_data
from scripts.centaur_config import Method
from simulation import client_states, ledger, process, training
from simulation.population.federated_data import ArrayData
from tests.centaur import papers
from tests.centaur.centaur_cases import measure
from tests.scripts import centaur_runs, runs
from tests.scripts.centaur_runs import (
    COMMAND,
    EXTRA,
    SIZES,
    build_program,
    follow,
    read_bytes,
    read_heads,
    read_model,
    read_summary,
    read_table,
)

METHODS = tuple(method.value for method in Method)
SOME = "--participation=0.6"
NAMES = ("model.npz", "heads.npz", "metrics.csv")
FAR = 3e-6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return centaur_runs.Runner(tmp_path_factory.mktemp("centaur"))


@pytest.fixture(scope="module")
def run_method(run):
    def run_once(method, *arguments):
        extra = EXTRA.get(method, ())
        return run(f"--method={method}", SOME, *extra, *arguments)

    return run_once


def follow_method(method, **changes):
    options = {"num_rounds": 1} if method == "stand_alone" else {}
    for name in ("participation", "server_lr", "divisor"):
        if name in changes:
            options[name] = changes.pop(name)
    options = {"participation": 0.6} | options
    return follow(build_program(method, **changes), **options)


class TestMethods:
    @pytest.mark.parametrize("method", METHODS)
    def test_they_are_the_papers(self, run_method, method):
        outcome, _ = run_method(method)
        wanted = follow_method(method)
        assert measure(read_model(outcome.folder), wanted.held) < FAR
        heads = read_heads(outcome.folder)
        assert list(heads) == list(SIZES)
        for client_id, model in wanted.models.items():
            assert measure(heads[client_id], model[4:]) < FAR
        rows = read_table(outcome.folder / "test_users_own_models.csv")
        assert [row["client_id"] for row in rows] == list(SIZES)
        losses = {}
        for row in rows:
            x, y = centaur_runs.draw_client(1, row["client_id"])
            model, x = wanted.models[row["client_id"]], x.reshape([len(y), -1])
            losses[row["client_id"]] = papers.compute_losses(model, x, y).mean()
            assert float(row["loss"]) == pytest.approx(
                losses[row["client_id"]], rel=1e-5
            )
            odds = papers.propagate(model, x, ends=True)[-1]
            accuracy = np.mean(np.argmax(odds, axis=1) == y)
            assert float(row["accuracy"]) == pytest.approx(accuracy)
        (result,) = outcome.results.values()
        mean = np.mean(list(losses.values()))
        assert result.final["loss"] == pytest.approx(mean, rel=1e-5)

    def test_not_all_take_part_and_some_come_back(self):
        """Without that the tests above would see less."""
        one, two = follow_method("centaur").cohorts
        assert set(one) & set(two) and set(one) - set(two)
        assert set(SIZES) - set(one) - set(two)

    @pytest.mark.parametrize(
        ("method", "changes"),
        [
            ("centaur", {"head": {"lr": 0.1}}),
            ("centaur", {"head": {"momentum": 0.8}}),
            ("centaur", {"head": {"decay": 0.0}}),
            ("centaur", {"head": {"epochs": 2}, "shared": {"epochs": 3}}),
            ("centaur", {"shared": {"lr": 0.3}}),
            ("centaur", {"shared": {"momentum": 0.5}}),
            ("centaur", {"shared": {"decay": 0.0}}),
            ("centaur", {"keeps": False}),
            ("centaur", {"server_lr": 1.0}),
            # The clients that came, or all, for those that were expected.
            ("centaur", {"divisor": 5}),
            ("centaur", {"participation": 1.0}),
            ("ppsgd_paper", {"head": {"lr": 0.3}}),
            ("ppsgd_paper", {"head": {"steps": None}}),
            ("ppsgd_authors", {"head": {"lr": 0.3}}),
            ("ppsgd_authors", {"build": papers.Centaur}),
            ("pmtl_ft", {"strength": 0.3}),
            ("pmtl_ft", {"strength": 1.2}),
            ("fedavg_fb", {"strength": 0.1}),
            ("fedavg_fb", {"shared": {"decay": 0.0}}),
        ],
    )
    def test_others_are_told_apart(self, run_method, method, changes):
        model = read_model(run_method(method)[0].folder)[:4]
        other = follow_method(method, **changes).held[:4]
        assert measure(model, other) > 100 * FAR

    @pytest.mark.parametrize(
        ("method", "final"),
        [
            ("centaur", {"decay": 0.0}),
            ("centaur", {"lr": 0.1}),
            ("ppsgd_paper", {"lr": 0.2}),
            ("ppsgd_authors", {"lr": 0.2}),
            ("fedavg_fb", {"momentum": 0.8}),
            ("pmtl_ft", {"decay": 0.0}),
            ("stand_alone", {"lr": 0.3}),
            ("stand_alone", {"epochs": 3}),
            ("stand_alone", {"momentum": 0.5}),
            ("stand_alone", {"decay": 0.0}),
        ],
    )
    def test_other_fits_are_told_apart(self, run_method, method, final):
        heads = read_heads(run_method(method)[0].folder)
        other = follow_method(method, final=final).models
        for client_id, model in other.items():
            assert measure(heads[client_id], model[4:]) > 100 * FAR

    def test_refit_forgets(self, run):
        outcome, _ = run(SOME, "--head_state=refit")
        wanted = follow_method("centaur", keeps=False)
        assert measure(read_model(outcome.folder), wanted.held) < FAR
        heads = read_heads(outcome.folder)
        for client_id, model in wanted.models.items():
            assert measure(heads[client_id], model[4:]) < FAR
        assert not (outcome.folder / "checkpoints_clients").exists()

    @pytest.mark.parametrize("method", METHODS)
    def test_between_rounds_the_validation_parts_are_reported(self, run_method, method):
        outcome, out = run_method(method)
        rows = read_table(outcome.folder / "metrics.csv")
        assert not [name for name in rows[0] if name.startswith("test_")]
        name = "validation_users_own_models.csv"
        losses = [float(row["loss"]) for row in read_table(outcome.folder / name)]
        assert float(rows[-1]["validation_loss"]) == pytest.approx(np.mean(losses))
        assert "each with its own model" in out and "on their validation parts" in out
        summary = read_summary(outcome)
        spread = summary["validation_users_own_models"]["loss"]
        assert spread["mean"] == pytest.approx(np.mean(losses))
        assert spread["stddev"] > 0


class TestHeads:
    def test_model_npz_is_the_representation_alone(self, run_method):
        for method in ("centaur", "ppsgd_paper"):
            shapes = [part.shape for part in read_model(run_method(method)[0].folder)]
            assert shapes == [(4, 5), (5,), (5, 6), (6,)]
        # Where all share a head, it is that one.
        authors = run_method("ppsgd_authors")[0].folder
        wanted = follow_method("ppsgd_authors")
        assert measure(read_model(authors)[4:], wanted.held[4:]) < FAR
        for head in read_heads(authors).values():
            assert measure(read_model(authors)[4:], head) > 100 * FAR

    def test_in_checkpoints_they_lie_in_a_file_of_their_own(self, run_method):
        folder = run_method("centaur")[0].folder
        files = sorted((folder / "checkpoints_clients").iterdir())
        assert [file.name for file in files] == ["round_1.npz", "round_2.npz"]
        with np.load(files[-1], allow_pickle=False) as file:
            ids = json.loads(file["ids"].tobytes())
            kept = {name: file["part0"][row] for row, name in enumerate(ids)}
        assert set(kept) == set().union(*follow_method("centaur").cohorts)
        # No checkpoint and no model has any of them.
        others = [
            file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file() and "clients" not in file.parent.name
        ]
        assert len(others) > 5
        for client_id, part in kept.items():
            assert part.tobytes() in files[-1].read_bytes(), client_id
            assert not any(part.tobytes() in content for content in others)

    @pytest.mark.parametrize(
        ("method", "count"),
        [("centaur", 61), ("ppsgd_paper", 61), ("ppsgd_authors", 82)],
    )
    def test_what_is_sent_is_counted(self, run_method, method, count):
        outcome, out = run_method(method)
        assert f"the change of {count} parameters\n" in out
        assert read_summary(outcome)["bits_per_client"] == 32 * count


class TestLabels:
    """The whole program, twice: what is held out has no part in what is trained."""

    def permute(self, data) -> ArrayData:
        def make(client_id):
            x, y = data.load(client_id)
            return x, (y + 1) % centaur_runs.NUM_CLASSES

        return ArrayData(client_ids=data.client_ids, make=make)

    @pytest.mark.parametrize("method", ["centaur", "stand_alone"])
    def test_of_the_test(self, run_method, tmp_path, method):
        whole, _ = run_method(method)
        task = centaur_runs.build_task()
        task = dataclasses.replace(task, test=self.permute(task.test))
        arguments = (f"--method={method}", SOME, *EXTRA.get(method, ()))
        other, _ = centaur_runs.run(tmp_path, *arguments, task=task)
        assert read_bytes(other, *NAMES) == read_bytes(whole, *NAMES)
        name = "test_users_own_models.csv"
        assert read_bytes(other, name) != read_bytes(whole, name)
        name = "validation_users_own_models.csv"
        assert read_bytes(other, name) == read_bytes(whole, name)

    def run_permuted(self, monkeypatch, folder, part):
        split = personal_data.split_personal_data

        def change(*arguments, **options):
            data = split(*arguments, **options)
            changed = self.permute(getattr(data, part))
            return dataclasses.replace(data, **{part: changed})

        monkeypatch.setattr(personal_data, "split_personal_data", change)
        return centaur_runs.run(folder, "--method=centaur", SOME)[0]

    def test_of_the_validation(self, run_method, tmp_path, monkeypatch):
        whole, _ = run_method("centaur")
        other = self.run_permuted(monkeypatch, tmp_path, "validation")
        names = ("model.npz", "heads.npz", "test_users_own_models.csv")
        assert read_bytes(other, *names) == read_bytes(whole, *names)
        name = "validation_users_own_models.csv"
        assert read_bytes(other, name) != read_bytes(whole, name)

    def test_those_for_training_decide(self, run_method, tmp_path, monkeypatch):
        whole, _ = run_method("centaur")
        other = self.run_permuted(monkeypatch, tmp_path, "train")
        for name in ("model.npz", "heads.npz"):
            assert read_bytes(other, name) != read_bytes(whole, name)


class Killed(BaseException):
    """Stands for kill -9: nothing may run afterwards."""


class TestResuming:
    ROUNDS = 4

    def run_killed(self, folder, *arguments: str, **options) -> None:
        """Ends in the third round, after the clients' work and before it counts."""
        close = ledger.PrivacyLedger.close_round

        def fail(self, *args, **kwargs):
            if self.state.rounds_completed == 2:
                raise Killed
            return close(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(ledger.PrivacyLedger, "close_round", fail)
            centaur_runs.run(folder, *arguments, **options)
        assert len(read_table(folder / "run" / "metrics.csv")) == 2

    @pytest.mark.parametrize(
        "arguments",
        [
            ("--method=centaur",),
            pytest.param(("--method=ppsgd_authors",), marks=pytest.mark.slow),
            pytest.param(
                ("--method=centaur", "--checkpoint_every=2"), marks=pytest.mark.slow
            ),
            pytest.param(
                ("--method=centaur", "--head_state=refit"), marks=pytest.mark.slow
            ),
        ],
        ids=["centaur", "ppsgd_authors", "rarely", "refit"],
    )
    def test_a_killed_run_goes_on_as_if_nothing_happened(
        self, run, tmp_path, arguments
    ):
        arguments = (*arguments, SOME, f"--total_rounds={self.ROUNDS}")
        whole, _ = run(*arguments)
        self.run_killed(tmp_path, *arguments)
        resumed, out = centaur_runs.run(tmp_path, *arguments)
        assert "going on" in out
        names = (
            *NAMES,
            "ledger.json",
            "results.json",
            "test_users_own_models.csv",
            "validation_users_own_models.csv",
        )
        assert read_bytes(resumed, *names) == read_bytes(whole, *names)

    @pytest.mark.slow
    def test_heads_that_are_forgotten_are_noticed(self, run, tmp_path, monkeypatch):
        """What the test above would see."""
        arguments = ("--method=centaur", SOME, f"--total_rounds={self.ROUNDS}")
        whole, _ = run(*arguments)
        self.run_killed(tmp_path, *arguments)
        monkeypatch.setattr(
            client_states.ClientStates, "unpack", lambda states, arrays: states
        )
        resumed, _ = centaur_runs.run(tmp_path, *arguments)
        for name in NAMES:
            assert read_bytes(resumed, name) != read_bytes(whole, name)

    @pytest.mark.parametrize("state", ["client", "refit"])
    def test_a_finished_run_without_a_seed_says_the_same_again(self, tmp_path, state):
        """Heads are fitted once more, but none that another test score follows from."""
        arguments = (f"--head_state={state}", "--participation=0.4")
        names = (*NAMES, "results.json", "test_users_own_models.csv")

        def repeat(folder):
            outcome, out = centaur_runs.run(folder, *arguments, is_seeded=False)
            return read_bytes(outcome, *names), out

        first, _ = repeat(tmp_path / "one")
        again, out = repeat(tmp_path / "one")
        assert "its results once more" in out
        assert again == first
        other, _ = repeat(tmp_path / "other")
        assert all(other[name] != first[name] for name in ("model.npz", "heads.npz"))

    def test_a_run_without_a_seed_keeps_its_initial_head(self, tmp_path, monkeypatch):
        """Those that join after a crash begin where those before it did."""
        built = []
        build = training.build_initial_weights

        def record(*arguments):
            built.append(build(*arguments))
            return built[-1]

        monkeypatch.setattr(training, "build_initial_weights", record)
        arguments = (f"--total_rounds={self.ROUNDS}", SOME)
        self.run_killed(tmp_path, *arguments, is_seeded=False)
        before = built[-1]
        file = tmp_path / "run" / "open_seed.json"
        content = file.read_bytes()
        centaur_runs.run(tmp_path, *arguments, is_seeded=False)
        assert all(map(np.array_equal, built[-1], before))
        assert file.read_bytes() == content

    def test_of_a_seed_that_was_chosen_nothing_more_is_kept(self, run):
        outcome, _ = run("--method=centaur", SOME)
        assert not (outcome.folder / "open_seed.json").exists()

    def test_a_damaged_open_seed_is_refused(self, tmp_path):
        centaur_runs.run(tmp_path, SOME, is_seeded=False)
        (tmp_path / "run" / "open_seed.json").write_text("{}")
        with pytest.raises(process.UserError, match="cannot read .*open_seed.json"):
            centaur_runs.run(tmp_path, SOME, is_seeded=False)


def test_training_that_diverges_is_told(tmp_path):
    outcome, out = centaur_runs.run(
        tmp_path, "--client_lr=1e30", "--participation=1", "--total_rounds=1"
    )
    assert "5 updates were not finite (NaN or infinity) and counted as zero" in out
    assert all(np.all(np.isfinite(part)) for part in read_model(outcome.folder))


PRIVATE = ("--clip=0.2", "--delta=1e-5", "--participation=1", "--bits=18")


class TestMechanisms:
    @pytest.mark.parametrize(
        ("method", "mechanism"),
        [
            ("centaur", "gaussian"),
            *(
                pytest.param(*case, marks=pytest.mark.slow)
                for case in (
                    ("ppsgd_authors", "gaussian"),
                    ("fedavg_fb", "gaussian"),
                    ("centaur", "ddgauss"),
                    ("centaur", "skellam"),
                    ("ppsgd_paper", "ddgauss"),
                )
            ),
        ],
    )
    def test_two_rounds_and_what_is_stated(self, run, method, mechanism):
        outcome, out = run(
            f"--method={method}", f"--mechanism={mechanism}", "--epsilon=8", *PRIVATE
        )
        summary = read_summary(outcome)
        assert summary["rounds_completed"] == 2
        statements = summary["privacy"]
        # Nothing is amplified.
        assert all(statement["sampling_rate"] == 1.0 for statement in statements)
        assert 7.5 < statements[0]["epsilon"] <= 8.0
        for statement in statements:
            assert "user" in statement["adjacency"]
            covered = " ".join(statement["not_covered"])
            for text in (
                "mean accuracies over clients",
                "choice of settings",
                "joint-DP only",
                "user i's own model is not private against whoever is given it",
                "never a part of model.npz",
            ):
                assert text in covered
            # Clients know their own shares.
            is_distributed = mechanism in ("ddgauss", "skellam")
            assert ("and no share of the noise" in covered) is is_distributed
        text = " ".join(out.split())
        assert "joint-DP only" in text and statements[0]["adjacency"] in text
        # There is noise.
        plain = read_model(run(f"--method={method}", "--participation=1")[0].folder)
        assert measure(read_model(outcome.folder), plain) > 0.01

    def test_without_a_mechanism_nothing_is_stated(self, run_method):
        outcome, out = run_method("centaur")
        assert read_summary(outcome)["privacy"] == []
        assert "epsilon = inf" in out


@pytest.mark.slow
def test_the_bare_command_on_fewer_clients(tmp_path):
    done = subprocess.run(
        [
            *COMMAND,
            "--num_clients=8",
            "--total_rounds=2",
            "--head_epochs=2",
            "--seed=1",
            f"--output_root={tmp_path}",
            "--experiment=run",
        ],
        capture_output=True,
        text=True,
        cwd=runs.ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "joint-DP only" in " ".join(done.stdout.split())
    shapes = [part.shape for part in read_model(tmp_path / "run")]
    heads = read_heads(tmp_path / "run")
    assert len(heads) == 8
    assert {part.shape for head in heads.values() for part in head} == {
        (16, 10),
        (10,),
    }
    assert (16, 10) not in shapes and shapes[0][0] == 784
