"""Tests of what run_upcycled_study is made of: runs, files, choices, verdicts."""

import dataclasses

import numpy as np
import pytest

from scripts import (
    upcycled_study_claims,
    upcycled_study_data,
    upcycled_study_paper,
)
from scripts.upcycled_study_claims import Budget, Opponent, Verdict
from scripts.upcycled_study_config import (
    Algorithm,
    Run,
    list_factor_runs,
    list_selection_runs,
)
from scripts.upcycled_study_curve import METRICS, Curve, read_curve
from scripts.upcycled_study_paper import Accuracy
from tests.scripts.upcycled_studies import (
    NUM_FEATURES,
    NUM_USERS,
    make_arrays,
    parse,
    write_files,
)


def build_curve(rounds: int, *, is_upcycled: bool = False, **ends: float) -> Curve:
    """Returns a curve of zeros, but for the last round."""
    values = {name: np.zeros(rounds + 1) for name in METRICS}
    for name, end in ends.items():
        values[name][-1] = end
    return Curve(values=values, odd_values=values if is_upcycled else None)


class TestRun:
    def test_keys_differ_where_runs_do(self):
        base = Run(
            data="iid", algorithm=Algorithm.FEDPROX, mu=0.1, client_lr=0.05, seed=1,
            rounds=2,
        )  # fmt: skip
        others = [
            dataclasses.replace(base, **change)
            for change in (
                {"data": "0_0"},
                {"algorithm": Algorithm.FEDAVG, "mu": 0.0},
                {"algorithm": Algorithm.UPCYCLED, "lambda_value": 0.1},
                {"algorithm": Algorithm.UPCYCLED, "lambda_value": 0.10000001},
                {"mu": 0.10000001},
                {"server_factor": 2.0},
                {"client_lr": 0.1},
                {"seed": 2},
            )
        ]
        assert len({base.key, *(other.key for other in others)}) == 9

    @pytest.mark.parametrize(
        "choices",
        [
            {"algorithm": Algorithm.FEDAVG, "mu": 0.1},
            {"algorithm": Algorithm.FEDPROX},
            {"algorithm": Algorithm.FEDPROX, "mu": 0.1, "lambda_value": 0.1},
            {"algorithm": Algorithm.UPCYCLED, "mu": 0.1},
            {"algorithm": Algorithm.FEDAVG, "server_factor": 2.0},
        ],
    )
    def test_what_does_not_go_together(self, choices):
        with pytest.raises(ValueError, match="must be"):
            Run(data="iid", client_lr=0.05, seed=1, rounds=2, **choices)


class TestPaper:
    @pytest.mark.parametrize(
        ("table", "key", "train", "test"),
        [
            ("PAPER", ("iid", "fedavg", 0.0), 97.80, 97.51),
            ("PAPER", ("iid", "fedprox", 0.3), 95.18, 94.88),
            ("PAPER", ("0_0", "upcycled", 0.1), 84.41, 82.44),
            ("PAPER", ("0.5_0.5", "upcycled", 0.3), 82.14, 83.74),
            ("PAPER", ("1_1", "fedprox", 1.0), 75.69, 76.58),
            ("PROGRAM", ("iid", "upcycled", 1.0), 93.60, 93.85),
            ("PROGRAM", ("0.5_0.5", "fedprox", 0.5), 81.23, 81.66),
            ("PROGRAM", ("1_1", "fedavg", 0.0), 77.18, 78.17),
        ],
    )
    def test_numbers(self, table, key, train, test):
        assert getattr(upcycled_study_paper, table)[key] == Accuracy(train, test)

    def test_sizes(self):
        assert len(upcycled_study_paper.PAPER) == 36
        assert len(upcycled_study_paper.PROGRAM) == 28


class TestVerdict:
    # Half widths: t of 2 and 4 degrees of freedom at 97.5 %, times sd / sqrt(n).
    @pytest.mark.parametrize(
        ("differences", "mean", "half", "verdict"),
        [
            ([1, 2, 3], 2, 4.302652729749464 / 3**0.5, "undecided"),
            ([2, 3, 4], 3, 4.302652729749464 / 3**0.5, "leads"),
            ([-2, -3, -4], -3, 4.302652729749464 / 3**0.5, "trails"),
            ([0, 1, 2, 3, 4], 2, 2.7764451051977987 / 2**0.5, "leads"),
            ([0, 0], 0, 0, "undecided"),
        ],
    )
    def test_by_hand(self, differences, mean, half, verdict):
        found = upcycled_study_claims.compute_interval(differences)
        expected = (mean, mean - half, mean + half)
        assert (found.mean, found.low, found.high) == pytest.approx(expected, rel=1e-9)
        judged = upcycled_study_claims.judge(found, larger_is_better=True)
        assert judged is Verdict(verdict)
        mirrored = {"leads": "trails", "trails": "leads", "undecided": "undecided"}
        judged = upcycled_study_claims.judge(found, larger_is_better=False)
        assert judged is Verdict(mirrored[verdict])

    def test_one_seed_gives_no_interval(self):
        with pytest.raises(ValueError, match="`differences` must be at least 2"):
            upcycled_study_claims.compute_interval([1.0])


class TestChoices:
    CONFIG = parse("--study=claims", "--data=iid,0_0", "--mu=0.1,1", "--total_rounds=4")

    def build_curves(self, runs, compute_loss, compute_accuracy):
        return {
            run.key: build_curve(
                4, train_loss=compute_loss(run), test_accuracy=compute_accuracy(run)
            )
            for run in runs
        }

    def test_client_rate_follows_the_mean_training_loss_alone(self):
        best = {"iid": 0.02, "0_0": 0.2}
        runs = list_selection_runs(self.CONFIG)
        assert {run.seed for run in runs} == {100}
        assert {run.algorithm for run in runs} == {Algorithm.FEDPROX}

        def compute_loss(run):
            # At mu = 1 alone another rate would be best.
            off = -0.3 if run.mu == 1 and run.client_lr == 0.01 else 0.2
            return abs(np.log(run.client_lr / best[run.data])) + off

        rng = np.random.default_rng(0)
        for _ in range(5):
            curves = self.build_curves(runs, compute_loss, lambda _: rng.uniform())
            found = upcycled_study_claims.choose_client_rates(self.CONFIG, curves)
            assert found == best
        # The losses decide: turned round, others are chosen.
        curves = self.build_curves(runs, lambda r: -compute_loss(r), lambda _: 0.0)
        found = upcycled_study_claims.choose_client_rates(self.CONFIG, curves)
        assert found != best

    def test_server_factor_follows_the_training_loss_alone(self):
        best = {("iid", 0.1): 1.0, ("iid", 1.0): 2.5, ("0_0", 0.1): 1.5}
        best["0_0", 1.0] = 2.0
        rates = {"iid": 0.02, "0_0": 0.2}
        runs = list_factor_runs(self.CONFIG, rates)
        assert {(run.data, run.client_lr) for run in runs} == set(rates.items())
        assert {run.seed for run in runs} == {100}
        rng = np.random.default_rng(0)
        for _ in range(5):
            curves = self.build_curves(
                runs,
                lambda run: abs(run.server_factor - best[run.data, run.mu]),
                lambda _: rng.uniform(),
            )
            found = upcycled_study_claims.choose_server_factors(
                self.CONFIG, rates, curves
            )
            assert found == best

    def test_a_diverged_rate_is_not_chosen(self):
        runs = list_selection_runs(self.CONFIG)
        curves = self.build_curves(
            runs, lambda r: r.client_lr if r.client_lr > 0.01 else np.nan, lambda _: 0.0
        )
        found = upcycled_study_claims.choose_client_rates(self.CONFIG, curves)
        assert set(found.values()) == {0.02}
        curves = self.build_curves(runs, lambda _: np.inf, lambda _: 0.0)
        with pytest.raises(ValueError, match="`client_lr_grid` for the data iid must"):
            upcycled_study_claims.choose_client_rates(self.CONFIG, curves)

    def test_a_given_rate_is_taken(self):
        config = dataclasses.replace(self.CONFIG, client_lr=0.3)
        assert list_selection_runs(config) == []
        found = upcycled_study_claims.choose_client_rates(config, {})
        assert found == {"iid": 0.3, "0_0": 0.3}


class TestComparison:
    def test_rounds_and_signs(self):
        config = parse(
            "--study=claims", "--data=iid", "--mu=1", "--seeds=1,2", "--total_rounds=4"
        )
        rates, factors = {"iid": 0.05}, {("iid", 1.0): 2.0}
        curves = {}
        for seed in config.seeds:
            common = {"mu": 1.0, "client_lr": 0.05, "seed": seed}
            for algorithm, factor, start in (
                (Algorithm.UPCYCLED, 1.0, 10),
                (Algorithm.FEDPROX, 1.0, 20),
                (Algorithm.FEDPROX, 2.0, 30),
            ):
                one = config.build_run("iid", algorithm, server_factor=factor, **common)
                # A value that tells algorithm, round and seed.
                line = start + 0.1 * np.arange(5.0) + 0.001 * seed
                curves[one.key] = Curve(
                    values={name: line for name in METRICS},
                    odd_values={name: line + 100 for name in METRICS}
                    if algorithm is Algorithm.UPCYCLED
                    else None,
                )
        found = {
            (one.opponent, one.budget, one.metric): one
            for one in upcycled_study_claims.compare(config, rates, factors, curves)
        }
        assert len(found) == 8
        for opponent, factor, gap in (
            (Opponent.FEDPROX, 1, 10),
            (Opponent.TUNED, 2, 20),
        ):
            # Round 4 against round 4; and round 2, four steps, against round 4.
            for budget, rounds, lost in (
                (Budget.CLIENT_ROUNDS, (4, 4), 0.0),
                (Budget.SERVER_STEPS, (2, 4), 0.2),
            ):
                accuracy = found[opponent, budget, "test_accuracy"]
                assert accuracy.difference.mean == pytest.approx(-gap - lost)
                assert (accuracy.rounds, accuracy.server_factor) == (rounds, factor)
                assert accuracy.verdict is Verdict.TRAILS
                loss = found[opponent, budget, "train_loss"]
                assert loss.verdict is Verdict.LEADS
        counts = upcycled_study_claims.count_verdicts(list(found.values()))
        key = (Opponent.TUNED, Budget.SERVER_STEPS, "test_accuracy")
        assert counts[key] == {
            Verdict.LEADS: 0,
            Verdict.TRAILS: 1,
            Verdict.UNDECIDED: 0,
        }


class TestCurve:
    def test_steps_of_the_server(self):
        line = np.array([0.0, 2.0, 4.0])
        plain = Curve(values={name: line for name in METRICS}, odd_values=None)
        odd = {name: line - 1 for name in METRICS}
        upcycled = Curve(values=plain.values, odd_values=odd)
        steps, values = upcycled.list_steps("train_loss")
        assert steps.tolist() == [0, 1, 2, 3, 4]
        assert values.tolist() == [0, 1, 2, 3, 4]
        steps, values = plain.list_steps("train_loss")
        assert steps.tolist() == [0, 1, 2] and values.tolist() == [0, 2, 4]

    def test_csv_and_back(self):
        rng = np.random.default_rng(0)
        values = {name: rng.uniform(size=3) for name in METRICS}
        odd = {name: rng.uniform(size=3) for name in METRICS}
        common = {"data": "iid", "client_lr": 0.1, "seed": 1, "rounds": 2, "mu": 1.0}
        run = Run(algorithm=Algorithm.UPCYCLED, lambda_value=0.1, **common)
        found = read_curve(Curve(values=values, odd_values=odd).to_csv(), run)
        for name in METRICS:
            assert np.array_equal(found.values[name], values[name])
            assert np.array_equal(found.odd_values[name], odd[name])
        plain = Run(algorithm=Algorithm.FEDPROX, **common)
        text = Curve(values=values, odd_values=None).to_csv()
        assert read_curve(text, plain).odd_values is None
        with pytest.raises(ValueError, match="rows of the rounds 0 to 2. Found 2"):
            read_curve("".join(text.splitlines(keepends=True)[:-1]), plain)


class TestData:
    def test_files_are_read_by_user(self, tmp_path):
        write_files(tmp_path)
        data = upcycled_study_data.read_file(tmp_path, "0_0")
        arrays = make_arrays(1)
        assert data.train.client_ids == tuple(map(str, range(NUM_USERS)))
        x, y = data.train.load("3")
        kept = arrays["user_train"] == 3
        assert np.array_equal(x[:, :, 0, 0], arrays["x_train"][kept].astype("f"))
        assert np.array_equal(y, arrays["y_train"][kept])
        assert data.shape == (NUM_FEATURES, 2)
        assert not data.is_generated
        assert "synthetic_0_0.npz; 5 users, 80 train, 20 test" in data.description

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"x_train": None}, "it lacks x_train"),
            ({"x_test": np.zeros([20, 3])}, "equally many features. Found 4 and 3"),
            ({"x_train": np.zeros([80])}, r"`x_train` must be numbers of shape"),
            ({"x_train": np.full([80, 4], np.nan)}, "`x_train` must be finite"),
            ({"x_train": np.full([80, 4], 1e300)}, "`x_train` must be finite"),
            ({"y_train": np.zeros(79, int)}, r"`y_train` must be .* \[80\]"),
            ({"y_test": np.zeros(20)}, "`y_test` must be integers"),
            ({"y_train": np.full(80, 10)}, r"`y_train` must be in \[0, 10\)"),
            ({"user_test": np.array([{}] * 20)}, "Object arrays cannot be loaded"),
        ],
    )
    def test_malformed_arrays(self, change, message, tmp_path):
        arrays = {**make_arrays(0), **change}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        np.savez(tmp_path / "synthetic_iid.npz", **arrays)
        with pytest.raises(ValueError, match=f"synthetic_iid.npz.*{message}"):
            upcycled_study_data.read_file(tmp_path, "iid")

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"text"])
    def test_what_is_no_npz_file(self, content, tmp_path):
        (tmp_path / "synthetic_iid.npz").write_bytes(content)
        with pytest.raises(ValueError, match="synthetic_iid.npz must be an .npz file"):
            upcycled_study_data.read_file(tmp_path, "iid")

    def test_a_bare_array(self, tmp_path):
        with open(tmp_path / "synthetic_iid.npz", "wb") as file:
            np.save(file, np.zeros(3))
        with pytest.raises(ValueError, match="holds one array without a name"):
            upcycled_study_data.read_file(tmp_path, "iid")
