"""Tests of the rounds of CENTAUR and its baselines against the papers, in NumPy."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from simulation import execution
from simulation.client_training import LocalLoop
from tests.centaur import papers
from tests.centaur.centaur_cases import (
    ALL,
    CASES,
    HEAD,
    INITIAL,
    SHARED,
    STACK_SIZES,
    Case,
    build_process,
    flatten,
    follow,
    measure,
    run,
)

# Rounding leaves 3e-7; the least wrong program is 1,000 times as far.
FAR = 3e-6
WITH_STATE = {"client", "paper", "authors"}


@pytest.fixture(scope="module", autouse=True)
def engine():
    return execution.set_execution_context()


@pytest.fixture(scope="module")
def runs(engine):
    """The rounds of a case, run once."""
    return functools.cache(lambda name: run(CASES[name]))


def find_far(case, found, wanted, far=FAR):
    """What of the rounds is not the papers': (round, "held" or a client)."""
    apart = []
    for number, (one, two) in enumerate(zip(found, wanted, strict=True)):
        if measure(one.held, two.held) > far:
            apart.append((number, "held"))
        if case.kind in WITH_STATE:
            assert set(one.kept) == set(two.kept)
            apart += [
                (number, index)
                for index, own in two.kept.items()
                if measure(one.kept[index], own) > far
            ]
        else:
            assert not one.kept
    return apart


class HeadLast(papers.Centaur):
    """The head after the representation, over its new features."""

    def work(self, client, held, own):
        b = self.move(client, held, own)
        epochs = client.epochs[: self.head.epochs]
        return papers.subtract(b, held), papers.fit_head(
            self.head, b, client, own, epochs, []
        )


class OldHead(papers.Centaur):
    """The representation is trained with the head of before."""

    def work(self, client, held, own):
        _, new = super().work(client, held, own)
        return papers.subtract(self.move(client, held, own), held), new


class StaleFeatures(papers.Centaur):
    """A head is fitted over the features of the first representation."""

    def work(self, client, held, own):
        epochs = client.epochs[: self.head.epochs]
        w = papers.fit_head(self.head, self.start(), client, own, epochs, [])
        return papers.subtract(self.move(client, held, w), held), w


class MovingFeatures(papers.Centaur):
    """The head is fitted while the representation moves too, and is set back."""

    def work(self, client, held, own):
        def compute(theta, rows):
            return papers.compute_gradients(theta, client.x[rows], client.y[rows])

        epochs = client.epochs[: self.head.epochs]
        theta = self.head.run([*held, *own], epochs, compute)
        w = theta[self.count :]
        return papers.subtract(self.move(client, held, w), held), w


class MovingHead(papers.Centaur):
    """The head moves with the representation."""

    def work(self, client, held, own):
        def compute(theta, rows):
            return papers.compute_gradients(theta, client.x[rows], client.y[rows])

        _, w = super().work(client, held, own)
        epochs = client.epochs[self.head.epochs :]
        theta = self.shared.run([*held, *w], epochs, compute)
        return papers.subtract(theta[: self.count], held), theta[self.count :]


class NeighboursHead(papers.Centaur):
    """Clients of 5 and 8 examples begin with each other's head."""

    def work(self, client, held, own):
        known = self.__dict__.setdefault("known", {})
        size = len(client.y)
        found = super().work(client, held, known.get({5: 8, 8: 5}.get(size), own))
        known[size] = found[1]
        return found


class KeptSpeed(papers.Centaur):
    """The momentum of the representation goes on in the next round."""

    def move(self, client, held, w):
        b, speeds = list(held), self.__dict__.setdefault("speeds", {})
        speed = speeds.get(len(client.y), [0.0] * len(b))
        for rows in [rows for e in client.epochs[self.head.epochs :] for rows in e]:
            gradients = papers.compute_gradients(
                [*b, *w], client.x[rows], client.y[rows]
            )
            for k in range(len(b)):
                pulled = gradients[k] + self.shared.decay * b[k]
                speed[k] = self.shared.momentum * speed[k] + pulled
                b[k] = b[k] - self.shared.lr * speed[k]
        speeds[len(client.y)] = speed
        return b


class DecayedSum(papers.SummedHeads):
    """Weight decay of the sum of both heads, in the step of the client's own."""

    def work(self, client, held, own):
        b, v = held[: self.count], held[self.count :]
        start = papers.add(own, v)
        epochs = client.epochs[:1]
        u = papers.subtract(papers.fit_head(self.head, b, client, start, epochs, []), v)
        update, _ = super().work(client, held, u)
        return update, u


class TestPapers:
    @pytest.mark.parametrize("name", CASES)
    def test_rounds_are_the_papers(self, runs, name):
        case = CASES[name]
        assert find_far(case, runs(name), follow(case)) == []

    @pytest.mark.parametrize(
        ("name", "changes"),
        [
            # As many epochs of the head as of the representation, and back.
            (
                "centaur",
                {
                    "head": {"epochs": SHARED["epochs"]},
                    "shared": {"epochs": HEAD["epochs"]},
                },
            ),
            ("centaur", {"head": {"epochs": 3}, "shared": {"epochs": 3}}),
            ("centaur", {"head": {"momentum": 0.0}}),
            ("centaur", {"head": {"decay": 0.0}}),
            ("centaur", {"head": {"lr": SHARED["lr"]}}),
            ("centaur", {"shared": {"momentum": 0.0}}),
            ("centaur", {"shared": {"decay": 0.0}}),
            ("centaur", {"shared": {"lr": HEAD["lr"]}}),
            ("centaur", {"server_lr": 1.0}),
            ("centaur", {"divisor": 4}),
            ("centaur", {"keeps": False}),
            ("centaur", {"build": HeadLast}),
            ("centaur", {"build": OldHead}),
            ("centaur", {"build": StaleFeatures}),
            ("centaur", {"build": MovingFeatures}),
            ("centaur", {"build": MovingHead}),
            ("centaur", {"build": NeighboursHead}),
            ("centaur", {"build": KeptSpeed}),
            ("centaur_clip", {"clip": None}),
            ("centaur_clip", {"clip": 0.28}),
            ("centaur_deep", {"build": MovingHead}),
            ("centaur_deep", {"build": StaleFeatures}),
            ("refit", {"keeps": True}),
            ("ppsgd_paper", {"head": {"steps": None}}),
            ("ppsgd_paper", {"shared": {"steps": None}}),
            ("ppsgd_paper", {"head": {"steps": None}, "shared": {"steps": None}}),
            ("ppsgd_authors", {"head": {"steps": 1}}),
            ("ppsgd_authors", {"head": {"decay": 0.0}}),
            ("ppsgd_authors", {"shared": {"decay": 0.0}}),
            ("ppsgd_authors", {"build": DecayedSum}),
            ("fedavg_fb", {"strength": 0.1}),
            ("fedavg_fb", {"shared": {"decay": 0.0}}),
            # (lambda / 2) ||.||^2.
            ("pmtl_ft", {"strength": 0.35}),
            ("pmtl_ft", {"strength": 1.4}),
            ("pmtl_ft", {"shared": {"momentum": 0.0}}),
            ("pmtl_ft", {"shared": {"decay": 0.0}}),
        ],
    )
    def test_others_are_told_apart(self, runs, name, changes):
        case = CASES[name]
        far = find_far(case, runs(name), follow(case, **changes), far=1_000 * FAR)
        assert (len(case.cohorts) - 1, "held") in far

    def test_the_representation_is_clipped_as_one(self, runs, monkeypatch):
        case, norms, shorten = CASES["centaur_clip"], [], papers.shorten

        def watch(update, clip):
            norms.append(np.linalg.norm(flatten(update)))
            return shorten(update, clip)

        monkeypatch.setattr(papers, "shorten", watch)
        follow(case)
        # Some are clipped, and some are not.
        assert sum(norm > 1.2 * case.clip for norm in norms) >= 2
        assert sum(norm < 0.8 * case.clip for norm in norms) >= 2

        def shorten_apart(update, clip):
            return [shorten([part], clip)[0] for part in update]

        monkeypatch.setattr(papers, "shorten", shorten_apart)
        assert find_far(case, runs("centaur_clip"), follow(case), far=1_000 * FAR)

    @pytest.mark.parametrize(
        "name",
        [
            "centaur",
            *(
                pytest.param(name, marks=pytest.mark.slow)
                for name in CASES
                if name != "centaur"
            ),
        ],
    )
    def test_a_stack_of_clients_does_the_same(self, name, monkeypatch):
        """Of unequal numbers of batches, which are padded to one."""
        case = dataclasses.replace(CASES[name], sizes=STACK_SIZES, cohorts=ALL[:2])
        stacked, run_stack = [], LocalLoop.run_stack

        def watch(self, *arguments):
            stacked.append(self)
            return run_stack(self, *arguments)

        monkeypatch.setattr(LocalLoop, "run_stack", watch)
        monkeypatch.delattr(LocalLoop, "run")
        found = run(case, stackable=True)
        assert stacked
        wanted = follow(case)
        assert find_far(case, found, wanted) == []
        # Another program is not theirs.
        other = follow(case, shared={"decay": 0.0})
        assert (1, "held") in find_far(case, found, other, far=1_000 * FAR)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["centaur_deep", "refit", "ppsgd_authors"])
    @pytest.mark.parametrize("stackable", [False, True])
    def test_tffs_runtime_does_the_same(self, name, stackable):
        case = dataclasses.replace(CASES[name], cohorts=CASES[name].cohorts[:2])
        with execution.use_execution_context(execution.Engine.TFF):
            found = run(case, stackable=stackable)
        assert find_far(case, found, follow(case)) == []


class TestHeads:
    @pytest.mark.parametrize("name", ["centaur_some", "ppsgd_paper", "ppsgd_authors"])
    def test_who_does_not_take_part_keeps_its_head(self, runs, name):
        rounds, cohorts = runs(name), CASES[name].cohorts
        assert set(rounds[0].kept) == set(cohorts[0])
        stayed = 0
        for before, after, cohort in zip(
            rounds[:-1], rounds[1:], cohorts[1:], strict=True
        ):
            for index in before.kept:
                pairs = zip(before.kept[index], after.kept[index], strict=True)
                same = all(np.array_equal(a, b) for a, b in pairs)
                assert same is (index not in cohort)
                stayed += same
        assert stayed

    def test_refit_keeps_nothing(self):
        process = build_process(CASES["refit"])
        assert not CASES["refit"].build_algorithm().keeps_state
        assert not hasattr(process, "initial_client_state")
        assert isinstance(process, tff.learning.templates.LearningProcess)


class TestPpsgd:
    def test_paper_mode_is_centaur_with_one_step_of_each(self):
        """Where one batch holds all of a client's examples, an epoch is a step."""
        one = dataclasses.replace(
            CASES["centaur_some"],
            head=HEAD | {"epochs": 1},
            shared=SHARED | {"epochs": 1},
            sizes=(2, 1, 2, 2),
        )
        two = dataclasses.replace(CASES["ppsgd_paper"], sizes=one.sizes)
        for a, b in zip(run(one), run(two), strict=True):
            tf.nest.map_structure(np.testing.assert_array_equal, a.held, b.held)
            assert set(a.kept) == set(b.kept)
            tf.nest.map_structure(np.testing.assert_array_equal, a.kept, b.kept)

    def test_with_more_batches_it_is_not(self, runs):
        one = dataclasses.replace(
            CASES["centaur_some"],
            head=HEAD | {"epochs": 1},
            shared=SHARED | {"epochs": 1},
        )
        far = find_far(one, runs("ppsgd_paper"), follow(one), far=1_000 * FAR)
        assert (0, "held") in far and (0, 2) in far
        # Client 1 has one batch.
        assert (0, 1) not in far


class TestStandAlone:
    def test_a_round_is_nothing(self):
        case = Case(kind="stand_alone", cohorts=ALL[:1])
        (left,) = run(case)
        assert not left.kept
        for got, start in zip(left.held, INITIAL, strict=True):
            assert np.array_equal(got, start)

    def test_only_one_epoch_is_drawn_for_it(self):
        assert Case(kind="stand_alone").count_epochs() == 1


class TestBadValues:
    def test_a_proximal_strength_is_none_of_centaurs(self):
        algorithm = CASES["centaur"].build_algorithm()
        with pytest.raises(
            ValueError, match="`proximal_strength` must be 0 for CENTAUR. Found 0.1"
        ):
            dataclasses.replace(algorithm, proximal_strength=0.1)

    @pytest.mark.parametrize("name", ["centaur", "refit", "fedavg_fb"])
    def test_seeds_are_carried(self, name):
        with pytest.raises(
            ValueError, match="`carried_seeds` must be True for .*Found False"
        ):
            build_process(CASES[name], carried_seeds=False)

    @pytest.mark.parametrize(
        ("name", "title"),
        [
            ("centaur", "CENTAUR"),
            ("refit", "CENTAUR"),
            ("ppsgd_paper", "PPSGD (paper)"),
            ("ppsgd_authors", "PPSGD (authors)"),
        ],
    )
    def test_their_names(self, name, title):
        assert CASES[name].build_algorithm().name == title
