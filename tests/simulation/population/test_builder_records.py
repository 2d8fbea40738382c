"""Tests for imports done again, over others, and of bad records."""

import hashlib

import numpy as np
import pytest

from simulation.population import builder, manifest, split
from simulation.population.federated_data import DataError
from simulation.sources.source import (
    TEST,
    TRAIN,
    VALIDATION,
    Feature,
    Kind,
    SourceError,
)
from tests.simulation.population.toy_source import (
    BY_EXAMPLE,
    BY_USER,
    BYTES,
    INT,
    NAME,
    build_job,
    build_source,
    list_names,
    make_many,
    read_labels,
    read_rows,
    record,
)


class TestPresent:
    @pytest.fixture
    def job(self, tmp_path, out):
        read = build_source(tmp_path, make_many(20))
        job = build_job(read, rule=BY_EXAMPLE)
        builder.build_population(job, out)
        return job

    def test_the_same_again_is_there(self, job, out):
        before = read_rows(out / NAME)
        outcome = builder.build_population(job, out)
        assert outcome.was_there
        assert outcome.path == out / NAME
        assert outcome.manifest.splits["train"]["users"] == 20
        assert job.source.num_reads == 1
        assert read_rows(out / NAME) == before

    def build_changed(self, job, changes):
        return builder.Import(**(vars(job) | changes))

    @pytest.mark.parametrize(
        "changes",
        [
            {"options": {"size": 2}},
            {"options": {}},
            {"kind": "other"},
            {"skip_bad": True},
            {"rule": BY_USER},
            {"rule": split.SplitRule(**(vars(BY_EXAMPLE) | {"seed": 1}))},
            {"rule": split.SplitRule(**(vars(BY_EXAMPLE) | {"test_fraction": 0.3}))},
        ],
    )
    def test_other_options_are_refused_and_may_replace(self, job, out, changes):
        before = read_rows(out / NAME)
        changed = self.build_changed(job, changes)
        match = "data.sqlite is there, made of other files or with other options.*give "
        with pytest.raises(DataError, match=match + "--overwrite"):
            builder.build_population(changed, out)
        assert job.source.num_reads == 1
        assert read_rows(out / NAME) == before
        outcome = builder.build_population(changed, out, overwrite=True)
        assert not outcome.was_there
        assert job.source.num_reads == 2
        assert builder.build_population(changed, out).was_there
        with pytest.raises(DataError, match="--overwrite"):
            builder.build_population(job, out)

    def test_another_file_is_refused(self, job, out):
        job.source.path.write_text("changed")
        with pytest.raises(DataError, match="--overwrite"):
            builder.build_population(job, out)

    def test_the_same_file_elsewhere_is_the_same(self, job, out, tmp_path):
        moved = tmp_path / "moved" / job.source.path.name
        moved.parent.mkdir()
        job.source.path = job.source.path.rename(moved)
        assert builder.build_population(job, out).was_there

    @pytest.mark.parametrize("damage", [None, "", "{}", "[]"])
    def test_without_a_sound_manifest(self, job, out, damage):
        path = out / "data.manifest.json"
        path.unlink()
        if damage is not None:
            path.write_text(damage)
        with pytest.raises(
            DataError, match="or without its manifest; give --overwrite"
        ):
            builder.build_population(job, out)
        builder.build_population(job, out, overwrite=True)
        assert builder.build_population(job, out).was_there

    def test_files_of_one_name_and_moves_between_folders(self, tmp_path, out):
        read = build_source(tmp_path, make_many(20))
        paths = [tmp_path / name / "1.png" for name in ("cat", "dog")]
        for path in paths:
            path.parent.mkdir()
            path.write_text(f"a {path.parent.name}")
        read.more = tuple(paths)
        job = build_job(read, rule=BY_EXAMPLE)
        outcome = builder.build_population(job, out)
        texts = {"input.txt": "an input", "cat/1.png": "a cat", "dog/1.png": "a dog"}
        assert outcome.manifest.files == {
            name: hashlib.sha256(text.encode()).hexdigest()
            for name, text in texts.items()
        }
        assert builder.build_population(job, out).was_there
        # The first is not the last of its name.
        paths[0].write_text("a lynx")
        with pytest.raises(DataError, match="--overwrite"):
            builder.build_population(job, out)
        paths[0].write_text("a dog")
        paths[1].write_text("a cat")
        with pytest.raises(DataError, match="--overwrite"):
            builder.build_population(job, out)

    def test_the_manifest_says_what_it_is(self, job, out):
        found = manifest.read_manifest(out / "data.manifest.json")
        assert found.source == "list"
        digest = hashlib.sha256(b"an input").hexdigest()
        assert found.files == {"input.txt": digest}
        assert found.options["options"] == {"size": 1}
        assert found.options["split"] == "example"
        assert found.features == {"label": INT}
        assert (found.classes, found.num_classes) == (None, 20)
        assert (found.skipped, found.num_skipped) == ((), 0)

    def test_classes_with_names(self, tmp_path, out):
        read = build_source(tmp_path, [record("a", TRAIN, label=1)])
        job = build_job(read, classes=("cat", "dog", "cow"))
        found = builder.build_population(job, out).manifest
        assert (found.classes, found.num_classes) == (("cat", "dog", "cow"), 3)

    def test_no_labels(self, tmp_path, out):
        read = build_source(
            tmp_path, [record("a", TRAIN, text=b"")], kinds={"text": BYTES}
        )
        found = builder.build_population(build_job(read), out).manifest
        assert (found.classes, found.num_classes) == (None, None)


class TestSkipBad:
    KINDS = {"label": INT, "x": Feature(kind=Kind.FLOAT, shape=(2,))}

    def make(self, user: str, label=0, x=(1.0, 2.0), **more):
        return record(user, TRAIN, label=label, x=np.array(x), **more)

    def make_bad(self) -> list:
        lacking = record("lacking", TRAIN, label=3)
        return [
            self.make("a", 1),
            SourceError("line 2", "is no line"),
            self.make("wide", 99, x=[1.0, 2.0, 3.0]),
            self.make("", 99),
            lacking,
            self.make("b", 2),
            self.make("more", 99, surplus=1),
            self.make("huge", 2**70),
            self.make("word", "7"),
            self.make("\ud800", 99),
            self.make("nul\0", 99),
            SourceError("line 12", "is damaged \ud800"),
            self.make("a", 3),
        ]

    REASONS = [
        "line 2: is no line",
        "line 12: is damaged",
        "of wide: `x` must have shape (2,). Found (3,).",
        "of : the user must not be empty. Found ''.",
        "of lacking: an example must have the features ['label', 'x']. Found ['lab",
        "of more: an example must have the features ['label', 'x']. Found ['label', 's",
        "of huge: `label` must be int64: Value out of range: 1180591620717411303424",
        "of word: `label` must be int64: 'str' object cannot be interpreted",
        "of ?: the user must be Unicode without NUL. Found '\\ud800'.",
        "of nul\0: the user must be Unicode without NUL. Found 'nul\\x00'.",
    ]

    def check(self, outcome) -> None:
        assert read_labels(outcome.path) == {"train": {"a": [1, 3], "b": [2]}}
        found = outcome.manifest
        assert found.num_skipped == len(found.skipped) == len(self.REASONS)
        for told, reason in zip(found.skipped, self.REASONS, strict=True):
            assert told.startswith(reason)
        # Not those of records that were left out.
        assert found.num_classes == 4
        path = outcome.path.with_name("data.manifest.json")
        assert manifest.read_manifest(path) == found

    def test_counts_and_lists(self, tmp_path, out):
        read = build_source(tmp_path, self.make_bad(), kinds=self.KINDS)
        job = build_job(read, skip_bad=True)
        self.check(builder.build_population(job, out))
        self.check(builder.build_population(job, out))

    @pytest.mark.parametrize("after", [1, 3, 6, 10, 12])
    def test_also_over_an_interruption(self, tmp_path, out, after):
        items = [*self.make_bad()[:after], KeyboardInterrupt()]
        read = build_source(tmp_path, items, kinds=self.KINDS)
        with pytest.raises(KeyboardInterrupt):
            builder.build_population(build_job(read, skip_bad=True), out)
        read = build_source(tmp_path, self.make_bad(), kinds=self.KINDS)
        self.check(builder.build_population(build_job(read, skip_bad=True), out))

    @pytest.mark.parametrize("index", [1, 2, 3, 4, 6, 7, 8, 9, 10, 11])
    def test_each_ends_an_import_that_may_not(self, tmp_path, out, index):
        items = [self.make("a"), self.make_bad()[index]]
        read = build_source(tmp_path, items, kinds=self.KINDS)
        with pytest.raises(SourceError, match="^(of|line) "):
            builder.build_population(build_job(read), out)
        assert list_names(out) == []

    def test_not_all_are_listed(self, tmp_path, out):
        errors = [SourceError(f"line {n}", "is wrong") for n in range(1_500)]
        read = build_source(tmp_path, [record("a", TRAIN), *errors])
        found = builder.build_population(build_job(read, skip_bad=True), out).manifest
        assert found.num_skipped == 1_500
        assert len(found.skipped) == 1_000
        assert found.skipped[-1] == "line 999: is wrong"

    def test_all_are_bad(self, tmp_path, out):
        read = build_source(tmp_path, [SourceError("line 1", "is wrong"), record("")])
        with pytest.raises(DataError, match="would have no examples at all"):
            builder.build_population(build_job(read, skip_bad=True), out)
        assert list_names(out) == []


class TestLabels:
    LARGEST = 2**20 - 1

    @pytest.mark.parametrize("label", [-1, -(2**63), 2**20, 2**40])
    def test_no_class_of_a_model(self, tmp_path, out, label):
        items = [record("a", TRAIN, label=1), record("b", TRAIN, label=label)]
        read = build_source(tmp_path, items)
        reason = f"of b: the label must be in [0, 1048576). Found {label}."
        with pytest.raises(SourceError) as error:
            builder.build_population(build_job(read), out)
        assert str(error.value) == reason
        assert list_names(out) == []
        found = builder.build_population(build_job(read, skip_bad=True), out).manifest
        assert found.skipped == (reason,)
        # Not the number of classes of what was left out.
        assert found.num_classes == 2

    @pytest.mark.parametrize("label", [0, LARGEST])
    def test_the_least_and_the_largest(self, tmp_path, out, label):
        read = build_source(tmp_path, [record("a", TRAIN, label=label)])
        outcome = builder.build_population(build_job(read), out)
        assert read_labels(outcome.path) == {"train": {"a": [label]}}
        assert outcome.manifest.num_classes == label + 1

    def test_other_features_and_numbers_that_are_no_classes(self, tmp_path, out):
        kinds = {"label": Feature(kind=Kind.FLOAT), "score": INT}
        read = build_source(
            tmp_path, [record("a", TRAIN, label=-1.0, score=-7)], kinds=kinds
        )
        found = builder.build_population(build_job(read), out).manifest
        assert found.num_skipped == 0 and found.num_classes is None


class TestNeedsTest:
    def build(self, folder, out, splits, *, needs_test=True, **options):
        out_of = [record(f"user {n}", where) for n, where in enumerate(splits)]
        job = build_job(build_source(folder, out_of), needs_test=needs_test)
        return builder.build_population(job, out, **options)

    @pytest.mark.parametrize(
        ("splits", "missing"),
        [
            ([TRAIN], TEST),
            ([TRAIN, VALIDATION], TEST),
            ([TEST, TEST], TRAIN),
            ([VALIDATION], TRAIN),
        ],
    )
    def test_one_of_the_two_is_missing(self, tmp_path, out, splits, missing):
        match = (
            "data.sqlite must have examples for training and test. Found none for "
            f"{missing} by --split=source: give another --split"
        )
        with pytest.raises(DataError, match=match):
            self.build(tmp_path, out, splits)
        assert list_names(out) == []
        # Where nobody asks for it, it is no error.
        found = self.build(tmp_path, out, splits, needs_test=False).manifest
        assert set(found.splits) == set(splits)

    def test_both_are_there(self, tmp_path, out):
        found = self.build(tmp_path, out, [TRAIN, TEST]).manifest
        assert set(found.splits) == {TRAIN, TEST}

    def test_users_of_one_example_have_none_for_the_test(self, tmp_path, out):
        items = [record("a", label=0), record("b", label=1)]
        read = build_source(tmp_path, items)
        job = build_job(read, rule=BY_EXAMPLE, needs_test=True)
        with pytest.raises(DataError, match="none for test by --split=example"):
            builder.build_population(job, out)

    def test_what_was_there_stays(self, tmp_path, out):
        path = self.build(tmp_path, out, [TRAIN, TEST]).path
        names, before = list_names(out), read_rows(path)
        (tmp_path / "other").mkdir()
        with pytest.raises(DataError, match="Found none for test"):
            self.build(tmp_path / "other", out, [TRAIN], overwrite=True)
        assert list_names(out) == names and read_rows(path) == before
