"""Tests for the training loop, on a toy task: resuming, budgets, what is written."""

import contextlib
import csv
import dataclasses
import json
import math
import pathlib
import shutil
import signal

import numpy as np
import pytest
import tensorflow_federated as tff

from simulation import (
    checkpoint,
    cohort,
    execution,
    learning,
    ledger,
    process,
    seeds,
    training,
)
from tests.simulation import toys

pytestmark = pytest.mark.usefixtures("engine")

TOTAL_ROUNDS = 7
ROOT = seeds.build_root_seed(11)
FRESH = seeds.build_root_seed(None)


@pytest.fixture(scope="module")
def learning_process(engine):
    model = toys.build_toy_model(dropout=True)
    return learning.build_federated_averaging(
        model,
        toys.CarriedMeanFactory(3.0, noise_stddev=0.1),
        client_optimizer=tff.learning.optimizers.build_sgdm(0.2),
        server_optimizer=tff.learning.optimizers.build_sgdm(1.0, momentum=0.9),
        initial_weights=training.build_initial_weights(model, ROOT),
    )


@pytest.fixture(scope="module")
def build_training(learning_process, toy_task, engine):
    def build(*, root=ROOT, budget=None, **options) -> training.Training:
        options = {
            "total_rounds": TOTAL_ROUNDS,
            "batch_size": 2,
            "client_epochs": 2,
            "dropout_rate": 0.2,
            "eval_every": 3,
            "checkpoint_every": 2,
            **options,
        }
        return toys.build_toy_training(
            learning_process, toy_task, engine, root=root, budget=budget, **options
        )

    return build


class Killed(BaseException):
    """Stands for kill -9: nothing may run afterwards."""


@contextlib.contextmanager
def ending_in_round(number: int, error: BaseException):
    """Raises `error` while the clients of the round work."""
    with pytest.MonkeyPatch.context() as patch:
        select = cohort.select_survivors

        def failing(joined, *, round_number, **choices):
            if round_number == number:
                raise error
            return select(joined, round_number=round_number, **choices)

        # The round is in the journal by then.
        patch.setattr(cohort, "select_survivors", failing)
        with contextlib.suppress(type(error)):
            yield


@pytest.fixture(scope="module")
def finished(build_training, tmp_path_factory) -> pathlib.Path:
    """A folder that a run left, not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    training.run_training(build_training(), folder)
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> pathlib.Path:
    """A copy of it."""
    return pathlib.Path(shutil.copytree(finished, tmp_path / "copied"))


def read_outputs(folder: pathlib.Path, result: training.TrainingResult) -> dict:
    return {
        "metrics": (folder / "metrics.csv").read_bytes(),
        "journal": (folder / "ledger.json").read_bytes(),
        "ledger": {
            name: value.tolist()
            for name, value in ledger.pack_ledger_state(result.ledger_state).items()
        },
        "weights": [weight.tobytes() for weight in result.weights],
        "final": dict(result.final),
    }


class TestReproducible:
    @pytest.fixture
    def whole(self, build_training, copied):
        # A finished run is read, not run again.
        return self.run_again(build_training, copied)

    def run_again(self, build_training, folder):
        return read_outputs(folder, training.run_training(build_training(), folder))

    def test_the_same_seed_gives_the_same_files(self, build_training, tmp_path, whole):
        assert self.run_again(build_training, tmp_path / "again") == whole

    def test_another_seed_gives_another_file(self, build_training, tmp_path, whole):
        other = build_training(root=seeds.build_root_seed(12))
        training.run_training(other, tmp_path / "other")
        assert (tmp_path / "other" / "metrics.csv").read_bytes() != whole["metrics"]

    @pytest.mark.parametrize("rounds", [(0,), (1,), (5,), (6,), (3, 4, 4, 6)])
    def test_a_killed_run_goes_on_as_if_nothing_happened(
        self, build_training, tmp_path, whole, rounds
    ):
        for number in rounds:
            with ending_in_round(number, Killed()):
                training.run_training(build_training(), tmp_path / "killed")
        assert self.run_again(build_training, tmp_path / "killed") == whole

    def test_a_finished_run_is_not_run_again(self, build_training, copied, whole):
        for number in range(TOTAL_ROUNDS):
            with ending_in_round(number, RuntimeError("a round was run")):
                assert self.run_again(build_training, copied) == whole


class TestFreshNoise:
    def test_lost_rounds_are_paid_for_and_the_run_ends_earlier(
        self, build_training, tmp_path
    ):
        planned = build_training(root=FRESH, budget=0.25 * TOTAL_ROUNDS)
        with ending_in_round(5, Killed()):
            training.run_training(planned, tmp_path)
        # Saved after 4 rounds; the fifth and the sixth had begun.
        again = build_training(
            root=seeds.build_root_seed(None), budget=0.25 * TOTAL_ROUNDS
        )
        result = training.run_training(again, tmp_path)
        assert result.ledger_state.rounds_lost == 2
        assert result.ledger_state.rounds_completed == TOTAL_ROUNDS - 2
        assert result.ledger_state.rounds_spent == TOTAL_ROUNDS
        assert "budget" in result.stopped
        assert result.metrics.read_column("epsilon")[-1] == str(0.25 * TOTAL_ROUNDS)
        assert result.metrics.read_column("reproducible") == ["False"] * 5
        # The result of a run that its budget ended is saved, and stays.
        assert training.run_training(again, tmp_path).stopped == result.stopped

    def test_no_root_is_in_any_file(self, build_training, tmp_path):
        training.run_training(build_training(root=FRESH), tmp_path)
        needles = [
            str(FRESH.value).encode(),
            f"{FRESH.value:x}".encode(),
            FRESH.value.to_bytes(32, "little"),
            FRESH.value.to_bytes(32, "big"),
        ]
        for file in tmp_path.rglob("*"):
            if file.is_file():
                content = file.read_bytes()
                assert not any(needle in content for needle in needles), file


class TestSignals:
    def test_the_last_completed_round_is_saved(self, build_training, tmp_path):
        error = process.Terminated(signal.SIGTERM)
        with ending_in_round(5, error):
            training.run_training(build_training(), tmp_path)
        assert "round 5 of 7 is saved" in error.hint
        with ending_in_round(4, AssertionError("round 4 was run again")):
            training.run_training(build_training(), tmp_path)


class TestFiles:
    def test_rows_and_columns(self, build_training, copied):
        result = training.run_training(build_training(), copied)
        table = result.metrics
        assert table.read_column("round") == [str(n + 1) for n in range(TOTAL_ROUNDS)]
        evaluated = [value != "" for value in table.read_column("test_accuracy")]
        assert evaluated == [False, False, True, False, False, True, True]
        assert float(table.read_column("test_loss")[-1]) == result.final["loss"]
        joined = [int(value) for value in table.read_column("clients_joined")]
        reporting = [int(value) for value in table.read_column("clients_reporting")]
        assert joined == result.ledger_state.cohort_sizes.tolist()
        assert reporting == result.ledger_state.survivor_counts.tolist()
        assert any(r < j for r, j in zip(reporting, joined, strict=True))
        assert "joined" in table.columns and "seconds" not in table.columns
        assert json.loads((copied / "ledger.json").read_text())["rounds_spent"] == 7

    def test_data_that_stand_for_others_say_so_in_every_row(
        self, build_training, toy_task, copied, tmp_path
    ):
        plain = (copied / "metrics.csv").read_text().splitlines()
        assert "synthetic_data" not in plain[0]
        for identity, says in (
            ({"synthetic_data": True}, True),
            ({"synthetic_data": False}, False),
            ({"file": "synthetic_data"}, False),
        ):
            task = dataclasses.replace(toy_task, identity=identity)
            assert task.is_synthetic is says
            one = dataclasses.replace(build_training(total_rounds=2), task=task)
            folder = tmp_path / str(identity)
            folder.mkdir()
            table = training.run_training(one, folder).metrics
            if says:
                assert table.read_column("synthetic_data") == ["True"] * 2
            assert ("synthetic_data" in table.columns) is says

    def test_times_and_events_are_written_beside(self, finished):
        lines = (finished / "timing.csv").read_text().splitlines()
        assert lines[0] == "round,seconds" and len(lines) == TOTAL_ROUNDS + 1
        from tensorboard.backend.event_processing import event_accumulator

        events = event_accumulator.EventAccumulator(str(finished / "tensorboard"))
        events.Reload()
        steps = [event.step for event in events.Tensors("epsilon")]
        assert steps == list(range(1, TOTAL_ROUNDS + 1))

    def test_without_diagnostics_nothing_of_the_clients_is_written(
        self, build_training, tmp_path
    ):
        result = training.run_training(build_training(diagnostics=False), tmp_path)
        assert result.final is None
        forbidden = ("clients_", "train_", "test_")
        assert not [n for n in result.metrics.columns if n.startswith(forbidden)]
        state = checkpoint.CheckpointFolder(tmp_path / "checkpoints").load_latest(
            checkpoint.Checkpoint(
                state=build_training().learning_process.initialize(),
                ledger_state=result.ledger_state,
                metrics=result.metrics,
            )
        )
        assert np.all(state.ledger_state.cohort_sizes == -1)
        assert np.all(state.ledger_state.survivor_counts == -1)
        assert state.ledger_state.join_counts.tolist() == [TOTAL_ROUNDS] * 6


class TestDamage:
    @pytest.mark.parametrize(
        "name", ["saved_model.pb", "variables/variables.index", "variables/variables.d"]
    )
    @pytest.mark.parametrize("how", ["cut", "flip", "remove"])
    def test_a_damaged_checkpoint_is_refused(self, build_training, copied, name, how):
        latest = copied / "checkpoints" / f"round_{TOTAL_ROUNDS}"
        (file,) = latest.glob(f"{name}*")
        content = bytearray(file.read_bytes())
        if how == "remove":
            file.unlink()
        elif how == "cut":
            file.write_bytes(content[: len(content) // 2])
        else:
            # The state's first variable in the data, the header in the others.
            position = len(content) // 3
            content[position] ^= 0xFF
            file.write_bytes(content)
        try:
            result = training.run_training(build_training(), copied)
        except checkpoint.CheckpointError as error:
            assert "is damaged" in str(error) and "\n" not in str(error)
        else:
            # Only where the byte means nothing to the content.
            assert how == "flip" and "saved_model" in name
            assert result.ledger_state.rounds_completed == TOTAL_ROUNDS

    def test_a_checkpoint_of_another_model_is_refused(self, build_training, copied):
        small = dataclasses.replace(
            build_training(), model=toys.build_toy_model(), label="other"
        )
        model = toys.build_logistic_regression(toys.SHAPE, 2)
        other = learning.build_federated_averaging(
            model,
            toys.CarriedMeanFactory(3.0),
            client_optimizer=tff.learning.optimizers.build_sgdm(0.2),
            server_optimizer=tff.learning.optimizers.build_sgdm(1.0, momentum=0.9),
            initial_weights=model.initialize(np.random.default_rng(0)),
        )
        with pytest.raises(checkpoint.CheckpointError, match="another structure"):
            training.run_training(
                dataclasses.replace(small, learning_process=other), copied
            )

    def test_what_a_killed_save_left_is_removed(self, build_training, copied):
        half = copied / "checkpoints" / "round_9_temp1234"
        half.mkdir()
        (half / "saved_model.pb").write_bytes(b"half")
        training.run_training(build_training(), copied)
        assert not half.exists()

    def test_rounds_without_journal_and_checkpoint_are_not_forgotten(
        self, build_training, copied
    ):
        (copied / "ledger.json").unlink()
        shutil.rmtree(copied / "checkpoints")
        with pytest.raises(ledger.LedgerError, match="what was spent is unknown"):
            training.run_training(build_training(), copied)

    def test_a_journal_that_is_gone_is_refused(self, build_training, copied):
        (copied / "ledger.json").unlink()
        with pytest.raises(ledger.LedgerError, match="is missing"):
            training.run_training(build_training(), copied)


class TestClientFailure:
    @pytest.fixture
    def failing(self, build_training, toy_task):
        """Builds a training in which client "3" has images of another shape."""

        def load(client_id: str) -> tuple[np.ndarray, np.ndarray]:
            x, y = toys.load_toy_client(client_id)
            wide = np.concatenate([x, x], axis=-1)
            return (wide, y) if client_id == "3" else (x, y)

        def build(client_failure: execution.ClientFailure) -> training.Training:
            train = dataclasses.replace(toy_task.train, make=load)
            return dataclasses.replace(
                build_training(dropout_rate=0.0),
                task=dataclasses.replace(toy_task, train=train),
                engine=execution.set_execution_context(client_failure=client_failure),
            )

        yield build
        execution.set_execution_context()

    def test_the_client_is_named(self, failing, tmp_path):
        run = failing(execution.ClientFailure.RAISE)
        with pytest.raises(
            execution.ClientError, match=r"^3: client \d+ of \d+ failed"
        ):
            training.run_training(run, tmp_path)

    def test_a_dropped_client_is_a_client_that_dropped_out(self, failing, tmp_path):
        run = failing(execution.ClientFailure.DROP)
        result = training.run_training(run, tmp_path)
        joined = ["3" in run.cohorts.select(number) for number in range(TOTAL_ROUNDS)]
        assert any(joined) and not all(joined)
        state = result.ledger_state
        assert list(state.cohort_sizes - state.survivor_counts) == joined
        reporting = [
            int(row["clients_reporting"])
            for row in csv.DictReader(
                (tmp_path / "metrics.csv").read_text().splitlines()
            )
        ]
        assert reporting == list(state.survivor_counts)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("total_rounds", 0),
        ("batch_size", -1),
        ("client_epochs", 0),
        ("eval_every", 0),
        ("checkpoint_every", 0),
        ("dropout_rate", 1.0),
        ("dropout_rate", math.nan),
    ],
)
def test_options_out_of_range_are_refused(name, value):
    fields = {"total_rounds": 1, "batch_size": 1, name: value}
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        training.TrainingOptions(**fields)
