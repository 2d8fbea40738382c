"""The training loop: rounds, metrics, checkpoints, and a ledger that says when to stop.

What a round reads depends on (root seed, round) alone, and what it writes is committed
together: a training that was interrupted and resumed with the same root seed leaves the
same metrics.csv, ledger and state, bit for bit, as one that was not.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow_federated as tff

from simulation import (
    checkpoint,
    client_data,
    client_states,
    cohort,
    execution,
    ledger,
    process,
    progress,
    round_evaluation,
    run_folder,
    seeds,
    table,
    training_output,
)
from simulation.model import Model, compute_means
from simulation.population import held_data
from simulation.tasks.task import Task

METRICS_NAME = "metrics.csv"
_JOURNAL_NAME = "ledger.json"
_CHECKPOINTS_NAME = "checkpoints"
# Between two looks at the progress, on a terminal and in a log.
_TERMINAL_SECONDS, _LOG_SECONDS = 0.2, 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train.

    Attributes:
        total_rounds: The number T of rounds.
        batch_size: Examples in a client's batch.
        client_epochs: A client's passes over its examples in a round.
        dropout_rate: The probability that a client that joined never reports.
        straggler_rate: The probability that a client makes fewer epochs than it should.
        eval_every: Rounds between evaluations; the last round is always evaluated.
        checkpoint_every: Rounds between checkpoints; the last round always has one.
        diagnostics: Whether to record exact functions of private data: losses,
            accuracies, cohort sizes, and what the aggregator measured.
    """

    total_rounds: int
    batch_size: int
    client_epochs: int = 1
    dropout_rate: float = 0.0
    straggler_rate: float = 0.0
    eval_every: int = 1
    checkpoint_every: int = 1
    diagnostics: bool = True

    def __post_init__(self) -> None:
        for name in (
            "total_rounds",
            "batch_size",
            "client_epochs",
            "eval_every",
            "checkpoint_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be >= 1. Found {getattr(self, name)!r}."
                )
        if not 0 <= self.dropout_rate < 1:
            raise ValueError(
                f"`dropout_rate` must be in [0, 1). Found {self.dropout_rate!r}."
            )
        if not 0 <= self.straggler_rate <= 1:
            raise ValueError(
                f"`straggler_rate` must be in [0, 1]. Found {self.straggler_rate!r}."
            )


class ClientTerms(Protocol):
    """What the loop needs to know of privacy that clients have each for itself."""

    def charge(self, num_releases: np.ndarray) -> Mapping[str, table.Scalar]:
        """Returns columns of metrics.csv, whose names do not depend on anything.

        Args:
            num_releases: int64[N], the releases that each client has been part of, in
                the order of the cohorts' clients.

        Raises:
            BudgetExceededError: If that many releases cost too much.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyTerms:
    """What the loop needs to know of a mechanism's privacy.

    Attributes:
        compute_epsilon: The epsilon of a number of rounds; inf without privacy.
        budget: The epsilon that no round may pass, or None.
        epsilon_name: What people are shown beside an epsilon.
        describe: The columns of metrics.csv that say what an epsilon rests on, given
            the number of rounds spent. Their names do not depend on it.
        clients: What clients have for themselves beside it, or None.
    """

    compute_epsilon: Callable[[int], float]
    budget: float | None
    epsilon_name: str = "epsilon"
    describe: Callable[[int], Mapping[str, table.Scalar]]
    clients: ClientTerms | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A training that is ready to run.

    Attributes:
        label: Its name in the progress bar.
        learning_process: The learning process with carried seeds.
        model: The model.
        task: The task.
        cohorts: Selects the clients of a round.
        root: The root of the streams.
        noise_root: The root of the clients' noise, of these settings alone.
        privacy: The terms of the mechanism.
        options: How to train.
        engine: What runs the learning process.
        evaluator: Looks at the model between rounds and at the end.
    """

    label: str
    learning_process: tff.learning.templates.LearningProcess
    model: Model
    task: Task
    cohorts: cohort.CohortSampler
    root: seeds.RootSeed
    noise_root: seeds.RootSeed
    privacy: PrivacyTerms
    options: TrainingOptions
    engine: execution.Execution
    evaluator: round_evaluation.Evaluator


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a training left.

    Attributes:
        weights: The final weights of the model.
        ledger_state: What was spent.
        metrics: The table of all rounds.
        evaluation: What there is to say of the result; None without diagnostics.
        stopped: Why it ended before its last round, or None.
        seconds: Wall time of this process's rounds.
    """

    weights: Sequence[np.ndarray]
    ledger_state: ledger.LedgerState
    metrics: table.Table
    evaluation: round_evaluation.FinalEvaluation | None
    stopped: str | None
    seconds: float

    @property
    def final(self) -> Mapping[str, float] | None:
        """The loss and metrics that the training is judged by."""
        return None if self.evaluation is None else self.evaluation.final


def build_initial_weights(model: Model, root: seeds.RootSeed) -> tuple[np.ndarray, ...]:
    """Returns the model's weights before the first round."""
    rng = seeds.derive_generator(root, purpose=seeds.Purpose.MODEL_INIT)
    return model.initialize(rng)


def run_training(training: Training, folder: pathlib.Path) -> TrainingResult:
    """Runs a training to its end, from its latest checkpoint where there is one.

    Args:
        training: The training.
        folder: Where metrics.csv, checkpoints and the rest go.

    Raises:
        CheckpointError: If the latest checkpoint is damaged.
        LedgerError: If the ledger's journal is damaged.
        Terminated: After a signal, with the last completed round saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    loop = _Loop(training, folder)
    stopped = loop.run()
    return TrainingResult(
        weights=loop.weights,
        ledger_state=loop.ledger.state,
        metrics=loop.current.metrics,
        evaluation=loop.evaluate_final() if training.options.diagnostics else None,
        stopped=stopped,
        seconds=time.monotonic() - started,
    )


class _Loop:
    """The state of a running training, and its files."""

    def __init__(self, training: Training, folder: pathlib.Path) -> None:
        self._training = training
        self._folder = folder
        self._checkpoints = checkpoint.CheckpointFolder(folder / _CHECKPOINTS_NAME)
        self._clients = {
            client_id: index
            for index, client_id in enumerate(training.cohorts.client_ids)
        }
        self._load = client_data.ClientLoader(
            data=training.task.train,
            batch_size=training.options.batch_size,
            num_epochs=training.options.client_epochs,
            padded=training.model.stackable,
        )
        initial = checkpoint.Checkpoint(
            state=training.learning_process.initialize(),
            ledger_state=ledger.build_ledger_state(
                len(self._clients), training.options.total_rounds
            ),
            metrics=table.Table(),
            clients=client_states.ClientStates(
                initial=getattr(training.learning_process, "initial_client_state", ())
            ),
        )
        _check_ledger_is_there(folder)
        self.current = self._checkpoints.load_latest(initial)
        self._saved_rounds = self.current.ledger_state.rounds_completed
        self.ledger = ledger.PrivacyLedger(
            self.current.ledger_state,
            compute_epsilon=training.privacy.compute_epsilon,
            budget=training.privacy.budget,
            journal_path=folder / _JOURNAL_NAME,
            reproducible=training.root.reproducible,
        )
        self._releases = training_output.Releases(
            folder, keeps_times=training.options.diagnostics
        )
        # Rows after the checkpoint belong to rounds that will be run again.
        self._write_metrics()

    def run(self) -> str | None:
        """Runs the rounds that are left. Returns why it stopped early, or None."""
        options = self._training.options
        done = self.ledger.state.rounds_completed
        with progress.show_progress(
            self._training.label,
            done,
            options.total_rounds,
            unit="round",
            terminal_seconds=_TERMINAL_SECONDS,
            log_seconds=_LOG_SECONDS,
        ) as bar:
            try:
                self._training.engine.watch_clients(training_output.ClientProgress(bar))
                while self.ledger.state.rounds_completed < options.total_rounds:
                    row = self._run_round()
                    bar.set_postfix_str(
                        training_output.summarize_row(
                            row,
                            self._training.task.metric,
                            self._training.privacy.epsilon_name,
                        ),
                        refresh=False,
                    )
                    bar.update()
            except ledger.BudgetExceededError as error:
                self._save()
                return str(error)
            except process.Terminated as error:
                self._save()
                error.hint = (
                    f"round {self._saved_rounds} of {options.total_rounds} is saved in "
                    f"{self._folder}; the same command goes on from there"
                )
                raise
        return None

    @property
    def weights(self) -> Sequence[np.ndarray]:
        """What the server holds."""
        return self.current.state.global_model_weights.trainable

    def evaluate_final(self) -> round_evaluation.FinalEvaluation:
        """Returns what there is to say of the result."""
        return self._training.evaluator.evaluate_final(
            self.weights,
            self.current.clients,
            num_rounds=self.ledger.state.rounds_completed,
        )

    def _run_round(self) -> Mapping[str, table.Scalar]:
        """Runs one round and commits it. Returns its row of the table."""
        training, options = self._training, self._training.options
        started = time.monotonic()
        joined = training.cohorts.select(self.ledger.state.rounds_completed)
        client_columns = self._charge_clients(joined)
        round_number = self.ledger.open_round()
        survivors = cohort.select_survivors(
            joined,
            root=training.root,
            round_number=round_number,
            rate=options.dropout_rate,
        )
        data = [
            execution.ClientValue(
                self._load,
                client_data.derive_key(
                    client_id,
                    root=training.root,
                    noise_root=training.noise_root,
                    round_number=round_number,
                    num_joined=len(joined),
                    client_state=self.current.clients.get(client_id),
                    straggler_rate=options.straggler_rate,
                ),
            )
            for client_id in survivors
        ]
        self._read_ahead(round_number + 1)
        try:
            output = training.learning_process.next(self.current.state, data)
        except execution.ClientError as error:
            error.add_client_id(survivors[error.client_index])
            raise
        failed = {failure.client_index for failure in training.engine.failures}
        survivors = [c for index, c in enumerate(survivors) if index not in failed]
        kept = self._keep_states(output, survivors)
        row = self._build_row(
            output, kept, round_number, len(joined), len(survivors), client_columns
        )
        with process.defer_signals():
            self.ledger.close_round(
                [self._clients[client_id] for client_id in joined],
                num_survivors=len(survivors),
                record_clients=options.diagnostics,
            )
            self.current = checkpoint.Checkpoint(
                state=output.state,
                ledger_state=self.ledger.state,
                metrics=self.current.metrics.append(row),
                clients=kept,
            )
            completed = round_number + 1
            last = completed == options.total_rounds
            if last or completed % options.checkpoint_every == 0:
                self._save()
            self._write_metrics()
            self._releases.release(row, completed, time.monotonic() - started)
        return row

    def _charge_clients(self, joined: Sequence[str]) -> Mapping[str, table.Scalar]:
        """Returns what the next round costs its clients, in columns of its row."""
        terms = self._training.privacy.clients
        if terms is None:
            return {}
        recorded = self._training.options.diagnostics
        counts = ledger.count_client_releases(self.ledger.state, recorded=recorded)
        clients = [self._clients[client_id] for client_id in joined]
        counts[clients if recorded else slice(None)] += 1
        return terms.charge(counts)

    def _keep_states(
        self, output: Any, client_ids: Sequence[str]
    ) -> client_states.ClientStates:
        """Returns what the clients keep after a round, those that took part anew."""
        kept = self.current.clients
        if not kept.initial:
            return kept
        return kept.replace(client_ids, output.client_states)

    def _read_ahead(self, round_number: int) -> None:
        """Begins to read what the clients of a round need, while others work."""
        training = self._training
        data = training.task.train
        on_workers = training.engine.engine is execution.Engine.RAY
        if round_number < training.options.total_rounds and not on_workers:
            if isinstance(data, held_data.HeldData):
                data.read_ahead(training.cohorts.select(round_number))

    def _build_row(
        self,
        output: Any,
        kept: client_states.ClientStates,
        round_number: int,
        num_joined: int,
        num_survivors: int,
        client_columns: Mapping[str, table.Scalar],
    ) -> Mapping[str, table.Scalar]:
        """Returns the row of a round that ended but is not counted yet."""
        training, options = self._training, self._training.options
        completed = round_number + 1
        spent = self.ledger.state.rounds_spent + 1
        row: dict[str, table.Scalar] = {"round": completed}
        if options.diagnostics:
            row["clients_joined"] = num_joined
            row["clients_reporting"] = num_survivors
            row.update(_average_clients(output.metrics["client_work"]))
            evaluated = (
                completed % options.eval_every == 0 or completed == options.total_rounds
            )
            found: Mapping[str, table.Scalar] = {}
            if evaluated:
                found = training.evaluator.evaluate_round(
                    output.state.global_model_weights.trainable,
                    kept,
                    num_rounds=completed,
                )
            row.update((name, found.get(name)) for name in training.evaluator.columns)
        row.update(_flatten_measurements(output.metrics["aggregator"]))
        row["rounds_spent"] = spent
        row["epsilon"] = training.privacy.compute_epsilon(spent)
        row.update(training.privacy.describe(spent))
        row.update(client_columns)
        row["reproducible"] = training.root.reproducible
        if training.task.is_synthetic:
            row["synthetic_data"] = True
        return row

    def _save(self) -> None:
        completed = self.current.ledger_state.rounds_completed
        if completed > self._saved_rounds:
            with process.defer_signals():
                self._checkpoints.save(self.current)
                self._saved_rounds = completed

    def _write_metrics(self) -> None:
        run_folder.write_text(
            self._folder / METRICS_NAME, self.current.metrics.to_csv()
        )


def _check_ledger_is_there(folder: pathlib.Path) -> None:
    """Raises LedgerError where rounds were run and nothing says what they spent."""
    metrics = folder / METRICS_NAME
    if (folder / _JOURNAL_NAME).exists() or not metrics.exists():
        return
    if len(metrics.read_bytes().splitlines()) > 1:
        raise ledger.LedgerError(
            f"{metrics} has rounds, but the journal {folder / _JOURNAL_NAME} is "
            "missing: what was spent is unknown. Begin a new run in another folder"
        )


def _average_clients(sums: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns training means over examples; None for a round without any."""
    return {f"train_{name}": value for name, value in compute_means(sums).items()}


def _flatten_measurements(measurements: Any) -> dict[str, table.Scalar]:
    """Returns the aggregator's scalars by name, nested names joined by "/"."""
    flat: dict[str, table.Scalar] = {}
    if isinstance(measurements, Mapping):
        for name, value in measurements.items():
            if isinstance(value, Mapping):
                nested = _flatten_measurements(value)
                flat.update({f"{name}/{key}": entry for key, entry in nested.items()})
            elif np.size(value):
                flat[name] = np.asarray(value).item()
    return flat
