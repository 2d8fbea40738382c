"""Tests for the ledger: nothing released goes uncounted, and the budget holds."""

import json

import numpy as np
import pytest

from simulation import ledger


def build_ledger(folder, *, state=None, budget=None, reproducible=False):
    return ledger.PrivacyLedger(
        state or ledger.build_ledger_state(num_clients=4, total_rounds=6),
        compute_epsilon=lambda rounds: 0.5 * rounds,
        budget=budget,
        journal_path=folder / "ledger.json",
        reproducible=reproducible,
    )


def run_rounds(book, count, *, joined=(0, 2)):
    for _ in range(count):
        book.open_round()
        book.close_round(joined, num_survivors=len(joined), record_clients=True)


class TestCounting:
    def test_rounds_joins_and_sizes_are_counted(self, tmp_path):
        book = build_ledger(tmp_path)
        run_rounds(book, 2)
        run_rounds(book, 1, joined=(2,))
        assert book.state.rounds_spent == 3
        assert book.state.join_counts.tolist() == [2, 0, 3, 0]
        assert book.state.cohort_sizes.tolist() == [2, 2, 1, -1, -1, -1]
        assert book.state.most_rounds_joined == 3
        assert book.epsilon == 1.5

    def test_an_empty_cohort_is_a_release_that_nobody_joined(self, tmp_path):
        book = build_ledger(tmp_path)
        run_rounds(book, 1, joined=())
        assert book.state.rounds_spent == 1
        assert book.state.most_rounds_joined == 0

    def test_without_records_every_client_counts_as_one_that_joined(self, tmp_path):
        book = build_ledger(tmp_path)
        book.open_round()
        book.close_round([1], num_survivors=1, record_clients=False)
        assert book.state.join_counts.tolist() == [1, 1, 1, 1]
        assert np.all(book.state.cohort_sizes == -1)


class TestBudget:
    def test_the_round_that_would_pass_it_is_refused_before_it_is_written(
        self, tmp_path
    ):
        book = build_ledger(tmp_path, budget=1.4)
        run_rounds(book, 2)
        journal = (tmp_path / "ledger.json").read_bytes()
        with pytest.raises(ledger.BudgetExceededError, match="release 3 .* 1.5"):
            book.open_round()
        assert (tmp_path / "ledger.json").read_bytes() == journal
        assert book.state.rounds_spent == 2

    def test_a_budget_that_is_met_exactly_is_not_passed(self, tmp_path):
        run_rounds(build_ledger(tmp_path, budget=1.5), 3)

    def test_an_infinite_epsilon_passes_every_budget(self, tmp_path):
        book = ledger.PrivacyLedger(
            ledger.build_ledger_state(1, 1),
            compute_epsilon=lambda _: float("inf"),
            budget=1e300,
            journal_path=tmp_path / "ledger.json",
            reproducible=True,
        )
        with pytest.raises(ledger.BudgetExceededError):
            book.open_round()

    def test_a_negative_budget_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="`budget` must be >= 0"):
            build_ledger(tmp_path, budget=-1.0)


class TestCrash:
    """The process dies in round 4, with a checkpoint of round 2."""

    @pytest.fixture
    def checkpoint(self, tmp_path):
        book = build_ledger(tmp_path)
        run_rounds(book, 2)
        state = book.state
        run_rounds(book, 1)
        book.open_round()
        return state

    def test_fresh_noise_pays_for_the_lost_rounds_too(self, tmp_path, checkpoint):
        book = build_ledger(tmp_path, state=checkpoint)
        assert book.state.rounds_lost == 2
        assert book.state.rounds_spent == 4
        # Who was in the lost rounds is unknown: everyone may have been.
        assert book.state.most_rounds_joined == 4
        assert book.open_round() == 2

    def test_fresh_noise_ends_before_the_budget_is_passed(self, tmp_path, checkpoint):
        book = build_ledger(tmp_path, state=checkpoint, budget=3.0)
        run_rounds(book, 2)
        with pytest.raises(ledger.BudgetExceededError):
            book.open_round()

    def test_a_second_crash_adds_to_the_first(self, tmp_path, checkpoint):
        build_ledger(tmp_path, state=checkpoint).open_round()
        book = build_ledger(tmp_path, state=checkpoint)
        assert book.state.rounds_spent == 5

    def test_the_same_noise_is_the_same_release(self, tmp_path, checkpoint):
        book = build_ledger(tmp_path, state=checkpoint, reproducible=True)
        assert book.state.rounds_spent == 2
        assert book.state.rounds_lost == 0

    def test_a_crash_before_the_first_checkpoint_counts(self, tmp_path):
        build_ledger(tmp_path).open_round()
        assert build_ledger(tmp_path).state.rounds_spent == 1

    def test_a_missing_journal_is_refused(self, tmp_path, checkpoint):
        (tmp_path / "ledger.json").unlink()
        with pytest.raises(ledger.LedgerError, match="is missing"):
            build_ledger(tmp_path, state=checkpoint)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"rounds_spent": null}'])
    def test_a_damaged_journal_is_refused(self, tmp_path, checkpoint, text):
        (tmp_path / "ledger.json").write_text(text)
        with pytest.raises(ledger.LedgerError, match="is damaged"):
            build_ledger(tmp_path, state=checkpoint)

    def test_a_journal_behind_its_checkpoint_is_refused(self, tmp_path, checkpoint):
        (tmp_path / "ledger.json").write_text(json.dumps({"rounds_spent": 1}))
        with pytest.raises(ledger.LedgerError, match="fewer than the checkpoint's 2"):
            build_ledger(tmp_path, state=checkpoint)


class TestPacking:
    def test_round_trip(self, tmp_path):
        book = build_ledger(tmp_path)
        run_rounds(book, 3)
        arrays = ledger.pack_ledger_state(book.state)
        again = ledger.pack_ledger_state(ledger.unpack_ledger_state(arrays))
        assert {name: value.tolist() for name, value in arrays.items()} == {
            name: value.tolist() for name, value in again.items()
        }

    def test_missing_or_contradicting_counts_are_refused(self):
        arrays = ledger.pack_ledger_state(ledger.build_ledger_state(2, 3))
        with pytest.raises(ledger.LedgerError, match="counts 4 of 3 rounds"):
            ledger.unpack_ledger_state({**arrays, "rounds_completed": np.int64(4)})
        del arrays["join_counts"]
        with pytest.raises(ledger.LedgerError, match="damaged"):
            ledger.unpack_ledger_state(arrays)
