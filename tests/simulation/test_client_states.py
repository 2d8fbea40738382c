"""Tests of what clients keep: packed, in the training loop, and in checkpoints."""

import contextlib
import dataclasses
import shutil

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from simulation import (
    checkpoint,
    client_states,
    cohort,
    execution,
    learning,
    ledger,
    seeds,
    table,
    training,
)
from simulation.algorithm import Conclusion, FederatedAveraging, compute_update
from simulation.client_state_process import ClientStateProcess
from tests.simulation import toys

ROOT = seeds.build_root_seed(11)
TOTAL_ROUNDS = 6
# Awkward in file names, formats and encodings.
IDS = ("a", "", 'quo"te\\', "zwölf 十二 🦉", "ids", "part0", "x" * 5000, "new\nline\0")


def build_states(ids=IDS) -> client_states.ClientStates:
    initial = (np.zeros([2, 3], np.float32), np.int64(-1), np.zeros([0], np.int8))
    states = client_states.ClientStates(initial=initial)
    rng = np.random.default_rng(1)
    new = [
        (rng.normal(size=[2, 3]).astype(np.float32), np.int64(k), initial[2])
        for k in range(len(ids))
    ]
    return states.replace(ids, new)


def compare(one, two) -> bool:
    """Whether two states of a client are the same bits."""
    return len(one) == len(two) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(one, two, strict=True)
    )


def compare_all(one, two) -> bool:
    """Whether the same clients kept the same bits."""
    return one.kept.keys() == two.kept.keys() and all(
        compare(one.kept[key], two.kept[key]) for key in one.kept
    )


class TestPacking:
    def test_a_round_trip(self):
        states = build_states()
        fresh = client_states.ClientStates(initial=states.initial)
        again = fresh.unpack(states.pack())
        assert compare_all(again, states) and list(again.kept) == list(IDS)
        assert all(compare(again.get(i), states.get(i)) for i in (*IDS, "new"))
        # Not what was there before.
        assert compare_all(build_states(["other"]).unpack(states.pack()), states)

    def test_many_parts_keep_their_order(self):
        initial = tuple(np.float32(0) for _ in range(12))
        states = client_states.ClientStates(initial=initial)
        states = states.replace(["a"], [tuple(np.float32(k) for k in range(12))])
        again = client_states.ClientStates(initial=initial).unpack(states.pack())
        assert [float(part) for part in again.get("a")] == list(range(12))

    def test_nothing_is_kept_before_the_first_round(self):
        fresh = client_states.ClientStates(initial=build_states().initial)
        again = fresh.unpack(fresh.pack())
        assert again.kept == {} and again.get("a") is fresh.initial
        nothing = client_states.ClientStates()
        assert nothing.pack() == {} and nothing.unpack({}).kept == {}

    @pytest.mark.parametrize(
        "initial",
        [
            (),
            (np.zeros([2, 3], np.float32),),
            (np.zeros([2, 3], np.float64), np.int64(0), np.zeros([0], np.int8)),
            (np.zeros([3, 2], np.float32), np.int64(0), np.zeros([0], np.int8)),
            (np.int64(0), np.zeros([2, 3], np.float32), np.zeros([0], np.int8)),
            (*build_states().initial, np.float32(0)),
        ],
        ids=["none", "fewer", "dtype", "shape", "order", "more"],
    )
    @pytest.mark.parametrize("ids", [IDS, ()], ids=["kept", "nobody"])
    def test_another_structure_is_refused(self, initial, ids):
        other = client_states.ClientStates(initial=initial)
        with pytest.raises(ValueError, match="client states of another structure"):
            other.unpack(build_states(ids).pack())
        with pytest.raises(ValueError, match="client states of another structure"):
            build_states().unpack(other.pack())

    @pytest.mark.parametrize("damage", ["rows", "missing", "no ids", "ids", "json"])
    def test_damage_is_refused(self, damage):
        states = build_states()
        packed = states.pack()
        if damage == "rows":
            packed["part0"] = packed["part0"][:-1]
        elif damage == "missing":
            del packed["part1"]
        elif damage == "no ids":
            del packed["ids"]
        elif damage == "ids":
            packed["ids"] = np.frombuffer(b'["a"]', np.uint8)
        else:
            packed["ids"] = packed["ids"][:-1]
        with pytest.raises(ValueError):
            states.unpack(packed)

    def test_replace_is_pure(self):
        states = build_states(["a", "b"])
        before = {key: tuple(map(np.copy, s)) for key, s in states.kept.items()}
        new = states.replace(["b", "c"], [states.initial, states.get("a")])
        assert list(states.kept) == ["a", "b"]
        assert all(compare(states.kept[key], before[key]) for key in before)
        assert new.get("a") is states.get("a")
        assert compare(new.get("b"), states.initial)
        assert compare(new.get("c"), states.get("a"))

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_state_that_is_not_finite_is_not_taken(self, value):
        states = build_states(["a"])
        broken = tuple(np.copy(part) for part in states.initial)
        position = next(n for n, part in enumerate(broken) if part.dtype.kind == "f")
        broken[position].flat[0] = value
        new = states.replace(["a", "b", "c"], [broken, broken, states.initial])
        assert new.get("a") is states.get("a")
        assert list(new.kept) == ["a", "c"]

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_a_state_for_each_client(self, count):
        states = build_states()
        with pytest.raises(ValueError):
            states.replace(["a", "b"], [states.initial] * count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remembering(FederatedAveraging):
    """Clients keep half of what they kept plus their update, which shifts their
    gradients, and count the rounds that they took part in."""

    width: int = 1

    def initialize_client_state(self, weights):
        zeros = tuple(np.zeros_like(weight) for weight in weights)
        return (*zeros, np.zeros([self.width], np.int32))

    def compute_shift(self, context):
        return context.state[:-1]

    def conclude(self, context, carried):
        update = compute_update(context.initial, carried)
        kept = zip(context.state[:-1], update, strict=True)
        state = (*(0.5 * old + part for old, part in kept), context.state[-1] + 1)
        return Conclusion(update=update, state=state)


def build_process(algorithm):
    model = toys.build_toy_model(dropout=True)
    return learning.build_learning_process(
        model,
        toys.CarriedMeanFactory(3.0, noise_stddev=0.1),
        algorithm,
        client_optimizer=tff.learning.optimizers.build_sgdm(0.2),
        server_optimizer=tff.learning.optimizers.build_sgdm(1.0, momentum=0.9),
        initial_weights=training.build_initial_weights(model, ROOT),
    )


@pytest.fixture(scope="module")
def learning_process(engine):
    return build_process(Remembering())


@pytest.fixture(scope="module")
def build_training(learning_process, toy_task, engine):
    def build(**fields) -> training.Training:
        planned = toys.build_toy_training(
            learning_process,
            toy_task,
            engine,
            root=ROOT,
            total_rounds=TOTAL_ROUNDS,
            batch_size=2,
            client_epochs=2,
            dropout_rate=0.3,
            checkpoint_every=2,
        )
        return dataclasses.replace(planned, **fields)

    return build


def change_options(planned, **options):
    options = dataclasses.replace(planned.options, **options)
    return dataclasses.replace(planned, options=options)


class Killed(BaseException):
    """Stands for kill -9."""


@dataclasses.dataclass(frozen=True)
class KillingCohorts:
    """Ends the process in a round."""

    inner: cohort.PoissonCohort
    last: int

    @property
    def client_ids(self):
        return self.inner.client_ids

    def select(self, round_number):
        if round_number == self.last:
            raise Killed
        return self.inner.select(round_number)


def run_until(planned, folder, last):
    killing = KillingCohorts(planned.cohorts, last)
    with contextlib.suppress(Killed):
        training.run_training(dataclasses.replace(planned, cohorts=killing), folder)
        raise AssertionError("not killed")


def load(planned, folder) -> checkpoint.Checkpoint:
    """The latest checkpoint."""
    process = planned.learning_process
    initial = getattr(process, "initial_client_state", ())
    return checkpoint.CheckpointFolder(folder / "checkpoints").load_latest(
        checkpoint.Checkpoint(
            state=process.initialize(),
            ledger_state=ledger.build_ledger_state(
                toys.NUM_CLIENTS, planned.options.total_rounds
            ),
            metrics=table.Table(),
            clients=client_states.ClientStates(initial=initial),
        )
    )


def select_survivors(planned, round_number):
    """Who takes part in a round to its end."""
    return cohort.select_survivors(
        planned.cohorts.select(round_number),
        root=ROOT,
        round_number=round_number,
        rate=planned.options.dropout_rate,
    )


def count_rounds(states) -> dict[str, int]:
    return {client_id: int(state[-1][0]) for client_id, state in states.kept.items()}


@pytest.fixture(scope="module")
def finished(build_training, tmp_path_factory):
    """A folder that a run left, and its result."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, training.run_training(build_training(), folder)


class TestTraining:
    @pytest.mark.parametrize("rounds", [(1,), (3, 3, 5)])
    def test_a_killed_run_goes_on_as_if_nothing_happened(
        self, build_training, finished, tmp_path, rounds
    ):
        folder, whole = finished
        planned = build_training()
        for number in rounds:
            run_until(planned, tmp_path, number)
            assert load(planned, tmp_path).ledger_state.rounds_completed == (
                number // 2 * 2
            )
        result = training.run_training(planned, tmp_path)
        for name in ("metrics.csv", "ledger.json"):
            assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
        assert compare(result.weights, whole.weights)
        one, two = load(planned, tmp_path), load(planned, folder)
        assert compare_all(one.clients, two.clients) and one.clients.kept
        tf.nest.map_structure(np.testing.assert_array_equal, one.state, two.state)

    def test_forgotten_states_are_told_apart(
        self, build_training, finished, tmp_path, monkeypatch
    ):
        """What a resumed run would leave if its checkpoints were without them."""
        folder, whole = finished
        planned = build_training()
        run_until(planned, tmp_path, 3)
        unpack = client_states.ClientStates.unpack

        def forget(states, arrays):
            return dataclasses.replace(unpack(states, arrays), kept={})

        with monkeypatch.context() as patch:
            patch.setattr(client_states.ClientStates, "unpack", forget)
            result = training.run_training(planned, tmp_path)
        assert not compare(result.weights, whole.weights)
        ours = load(planned, tmp_path).clients
        assert not compare_all(ours, load(planned, folder).clients)

    def test_who_drops_out_or_does_not_join_keeps_its_state(
        self, build_training, tmp_path
    ):
        planned = change_options(build_training(), checkpoint_every=1)
        expected = dict.fromkeys(planned.cohorts.client_ids, 0)
        before = client_states.ClientStates(
            initial=planned.learning_process.initial_client_state
        )
        dropped_with_state = 0
        for number in range(TOTAL_ROUNDS):
            if number + 1 < TOTAL_ROUNDS:
                run_until(planned, tmp_path, number + 1)
            else:
                training.run_training(planned, tmp_path)
            after = load(planned, tmp_path).clients
            survivors = select_survivors(planned, number)
            joined = planned.cohorts.select(number)
            dropped_with_state += len((set(joined) - set(survivors)) & set(before.kept))
            for client_id in expected:
                took_part = client_id in survivors
                expected[client_id] += took_part
                same = compare(before.get(client_id), after.get(client_id))
                assert same is not took_part
            assert count_rounds(after) == {k: n for k, n in expected.items() if n}
            before = after
        assert dropped_with_state
        assert len(set(expected.values())) > 1

    def test_a_client_whose_work_fails_keeps_its_state(
        self, build_training, toy_task, tmp_path
    ):
        planned = change_options(build_training(), dropout_rate=0.0, checkpoint_every=1)

        def make(client_id):
            x, y = toys.load_toy_client(client_id)
            # Images of another shape.
            return (np.concatenate([x, x], -1) if client_id == "3" else x), y

        run_until(planned, tmp_path, 3)
        before = load(planned, tmp_path).clients
        train = dataclasses.replace(toy_task.train, make=make)
        choice = execution.ClientFailure.DROP
        with execution.use_execution_context(client_failure=choice) as engine:
            task = dataclasses.replace(toy_task, train=train)
            failing = dataclasses.replace(planned, task=task, engine=engine)
            training.run_training(failing, tmp_path)
        after = load(planned, tmp_path).clients
        joined = [planned.cohorts.select(number) for number in range(3, TOTAL_ROUNDS)]
        assert "3" in before.kept and any("3" in ids for ids in joined)
        assert compare(before.get("3"), after.get("3"))
        counts = count_rounds(before)
        for client_id in sorted({c for ids in joined for c in ids} - {"3"}):
            rounds = sum(client_id in ids for ids in joined)
            expected = counts.get(client_id, 0) + rounds
            assert count_rounds(after)[client_id] == expected


class TestFiles:
    """What the clients keep lies beside the checkpoints, and they know it."""

    def test_the_files_are_those_of_the_checkpoints(self, finished):
        folder, _ = finished
        versions = {p.name for p in (folder / "checkpoints").glob("round_*")}
        files = {p.stem for p in (folder / "checkpoints_clients").iterdir()}
        assert files == versions and len(files) == 2

    def test_no_checkpoint_holds_them(self, finished, build_training):
        folder, _ = finished
        kept = load(build_training(), folder).clients.kept
        state = next(iter(kept.values()))[0].tobytes()
        inside = [p for p in (folder / "checkpoints").rglob("*") if p.is_file()]
        assert inside and not any(state in p.read_bytes() for p in inside)
        beside = (folder / "checkpoints_clients").iterdir()
        assert any(state in p.read_bytes() for p in beside)

    @pytest.mark.parametrize("harm", ["missing", "damaged", "another"])
    def test_a_file_that_is_not_the_checkpoints_is_refused(
        self, build_training, tmp_path, harm
    ):
        planned = build_training()
        run_until(planned, tmp_path, 5)
        folder = tmp_path / "checkpoints_clients"
        last, first = folder / "round_4.npz", folder / "round_2.npz"
        if harm == "missing":
            last.unlink()
        elif harm == "another":
            last.write_bytes(first.read_bytes())
        else:
            content = bytearray(last.read_bytes())
            content[len(content) // 2] ^= 1
            last.write_bytes(bytes(content))
        with pytest.raises(checkpoint.CheckpointError, match="round_4"):
            load(planned, tmp_path)
        shutil.rmtree(tmp_path / "checkpoints" / "round_4")
        assert load(planned, tmp_path).ledger_state.rounds_completed == 2


class TestOtherProcesses:
    """Their server's states are alike: the clients' alone tell them apart."""

    @pytest.fixture(scope="class")
    def others(self, engine):
        return {
            "wider": build_process(Remembering(width=2)),
            "none": build_process(FederatedAveraging()),
        }

    @pytest.mark.parametrize("name", ["wider", "none"])
    def test_a_checkpoint_is_refused(
        self, build_training, others, finished, tmp_path, name
    ):
        planned = build_training()
        other = build_training(learning_process=others[name])
        kinds = [isinstance(p, ClientStateProcess) for p in others.values()]
        assert kinds == [True, False]
        run_until(other, tmp_path, 3)
        for run, folder in ((other, finished[0]), (planned, tmp_path)):
            with pytest.raises(
                checkpoint.CheckpointError,
                match="does not fit .* client states of another structure",
            ):
                training.run_training(run, folder)
