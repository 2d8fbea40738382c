"""Tests for imports that are interrupted, fail, or meet another one."""

import multiprocessing
import os
import pathlib
import sqlite3

import pytest

from simulation import run_folder
from simulation.population import builder, layout, manifest, staging
from simulation.population.federated_data import DataError
from simulation.population.split import SplitBy, SplitRule
from simulation.sources.source import (
    TEST,
    TRAIN,
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


@pytest.fixture
def serialized(monkeypatch) -> list:
    """The examples that were serialised so far."""
    done = []
    original = staging.serialize

    def serialize(features, values):
        done.append(values["label"])
        return original(features, values)

    monkeypatch.setattr(staging, "serialize", serialize)
    return done


class TestResume:
    SIZE = 11_000

    @pytest.fixture(scope="class")
    def whole(self, tmp_path_factory):
        """The rows and the manifest of an import that nothing interrupted."""
        folder = tmp_path_factory.mktemp("whole")
        read = build_source(folder, make_many(self.SIZE))
        outcome = builder.build_population(build_job(read, rule=BY_EXAMPLE), folder)
        return read_rows(outcome.path), outcome.manifest

    def check(self, outcome, whole) -> None:
        folder = outcome.path.parent
        assert (read_rows(outcome.path), outcome.manifest) == whole
        assert not outcome.was_there
        assert list_names(folder) == ["data.manifest.json", NAME]
        assert manifest.read_manifest(folder / "data.manifest.json") == whole[1]

    def interrupt(self, tmp_path, out, after: int, **options) -> None:
        """Begins an import that is interrupted after some records."""
        items = [*make_many(after), KeyboardInterrupt()]
        job = build_job(build_source(tmp_path, items), rule=BY_EXAMPLE)
        with pytest.raises(KeyboardInterrupt):
            builder.build_population(job, out, **options)
        assert list_names(out) == [f"{NAME}.staging"]

    def resume(self, tmp_path, out, **options):
        job = build_job(build_source(tmp_path, make_many(self.SIZE)), rule=BY_EXAMPLE)
        return builder.build_population(job, out, **options)

    @pytest.mark.parametrize("after", [0, 1, 5_000, 7_345, 11_000])
    def test_goes_on_where_it_was(self, tmp_path, out, whole, serialized, after):
        self.interrupt(tmp_path, out, after)
        assert serialized == list(range(after))
        progress: list[int] = []
        outcome = self.resume(tmp_path, out, on_progress=progress.append)
        # Every record once, over both.
        assert serialized == list(range(self.SIZE))
        assert progress == [k for k in (5_000, 10_000) if k > after] + [self.SIZE]
        self.check(outcome, whole)

    def test_several_times(self, tmp_path, out, whole, serialized):
        for after in (10, 5_500, 5_500, 10_999):
            self.interrupt(tmp_path, out, after)
        self.check(self.resume(tmp_path, out), whole)
        assert serialized == list(range(self.SIZE))

    def test_after_the_process_was_killed(self, tmp_path, out, whole, serialized):
        items = [*make_many(7_345), lambda: os._exit(9)]
        job = build_job(build_source(tmp_path, items), rule=BY_EXAMPLE)
        process = multiprocessing.get_context("fork").Process(
            target=builder.build_population, args=(job, out), daemon=True
        )
        process.start()
        process.join(60)
        assert process.exitcode == 9
        assert NAME not in list_names(out)
        self.check(self.resume(tmp_path, out), whole)
        # What was on the disk.
        assert serialized == list(range(5_000, self.SIZE))

    def test_a_signal_while_a_part_is_written(
        self, tmp_path, out, whole, serialized, monkeypatch
    ):
        class Connection(sqlite3.Connection):
            def execute(self, statement, *values):
                result = super().execute(statement, *values)
                if statement == "COMMIT" and len(serialized) == 5_000:
                    raise KeyboardInterrupt
                return result

        connect = sqlite3.connect
        with monkeypatch.context() as patch:
            patch.setattr(
                sqlite3, "connect", lambda *a, **k: connect(*a, factory=Connection, **k)
            )
            with pytest.raises(KeyboardInterrupt):
                self.resume(tmp_path, out)
        self.check(self.resume(tmp_path, out), whole)
        assert serialized == list(range(self.SIZE))

    @pytest.mark.parametrize("when", ["_check", "_format_counts", "Manifest"])
    def test_interrupted_while_the_file_is_written(
        self, tmp_path, out, serialized, monkeypatch, when
    ):
        def fail(*_, **__):
            raise KeyboardInterrupt

        kinds, counted = {"label": INT, "text": BYTES}, {"text": " "}
        records = [record("a", label=n, text=b"x y") for n in range(10)]
        read = build_source(tmp_path, records, kinds=kinds, counted=counted)
        job = build_job(read, rule=BY_EXAMPLE)
        with monkeypatch.context() as patch:
            patch.setattr(builder, when, fail)
            with pytest.raises(KeyboardInterrupt):
                builder.build_population(job, out)
        assert list_names(out) == [f"{NAME}.staging"]
        outcome = builder.build_population(job, out)
        assert serialized == list(range(10))
        assert outcome.manifest.splits["train"]["examples"] == 8
        assert (out / "data.text_count").read_text() == "x 8\ny 8\n"

    @pytest.mark.parametrize(
        "changes",
        [{"options": {"size": 2}}, {"kind": "other"}, {"rule": BY_USER}],
        ids=["options", "kind", "rule"],
    )
    def test_another_import_begins_anew(self, tmp_path, out, serialized, changes):
        self.interrupt(tmp_path, out, 200)
        serialized.clear()
        records = make_many(150)
        job = build_job(
            build_source(tmp_path, records), **({"rule": BY_EXAMPLE} | changes)
        )
        outcome = builder.build_population(job, out)
        assert len(serialized) == 150
        examples = [counts["examples"] for counts in outcome.manifest.splits.values()]
        assert sum(examples) == 150

    def test_a_changed_file_begins_anew(self, tmp_path, out, serialized):
        self.interrupt(tmp_path, out, 200)
        serialized.clear()
        read = build_source(tmp_path, make_many(150))
        read.path.write_text("changed")
        builder.build_population(build_job(read, rule=BY_EXAMPLE), out)
        assert len(serialized) == 150

    def test_the_last_word_is_progress_of_all(self, tmp_path, out):
        progress: list[int] = []
        self.resume(tmp_path, out, on_progress=progress.append)
        assert progress == [5_000, 10_000, self.SIZE]


class TestFailure:
    def test_after_an_error_nothing_is_left(self, tmp_path, out):
        items = [*make_many(6_000), SourceError("line 3", "is wrong")]
        read = build_source(tmp_path, items)
        with pytest.raises(SourceError, match="line 3: is wrong"):
            builder.build_population(build_job(read, rule=BY_EXAMPLE), out)
        assert list_names(out) == []

    @pytest.mark.parametrize("rule", [BY_EXAMPLE, SplitRule(by=SplitBy.SOURCE)])
    def test_no_example_at_all(self, tmp_path, out, rule):
        job = build_job(build_source(tmp_path, []), rule=rule)
        with pytest.raises(
            DataError, match="data.sqlite would have no examples at all"
        ):
            builder.build_population(job, out)
        assert list_names(out) == []

    def replace(self, tmp_path, out, **options):
        """Imports something else over what is there."""
        records = [record("c", TEST, label=2), record("c", TRAIN, label=3)]
        job = build_job(build_source(tmp_path, records), options={"size": 2})
        return builder.build_population(job, out, **options)

    @pytest.mark.parametrize("overwrite", [True, False])
    @pytest.mark.parametrize("failing", [NAME, "data.manifest.json"])
    def test_a_crash_while_files_get_their_names(
        self, tmp_path, out, monkeypatch, serialized, failing, overwrite
    ):
        records = [record("a", TRAIN, label=1), record("b", TEST, label=2)]
        first = build_job(build_source(tmp_path, records))
        old = builder.build_population(first, out).manifest
        whole = self.replace(tmp_path, tmp_path / "whole")
        expected = read_rows(whole.path), whole.manifest
        serialized.clear()
        replace = os.replace

        def crash(source, target):
            if pathlib.Path(target).name == failing:
                raise OSError("no")
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", crash)
            with pytest.raises(OSError, match="no"):
                self.replace(tmp_path, out, overwrite=True)
        # Neither of the two files, which nobody can take for the other one.
        assert list_names(out) == ["data.manifest.json", f"{NAME}.staging"]
        found = manifest.read_manifest(out / "data.manifest.json")
        assert found == (whole.manifest if failing == NAME else old)
        assert serialized == [2, 3]
        # The same command goes on from there; nothing is there to be overwritten.
        outcome = self.replace(tmp_path, out, overwrite=overwrite)
        assert serialized == [2, 3]
        assert not outcome.was_there
        assert (read_rows(out / NAME), outcome.manifest) == expected
        assert manifest.read_manifest(out / "data.manifest.json") == whole.manifest
        assert read_labels(out / NAME) == {"test": {"c": [2]}, "train": {"c": [3]}}
        assert list_names(out) == ["data.manifest.json", NAME]

    def test_a_crash_before_anything_is_replaced_leaves_the_old_one(
        self, tmp_path, out, monkeypatch
    ):
        records = [record("a", TRAIN, label=1), record("b", TEST, label=2)]
        first = build_job(build_source(tmp_path, records))
        before = read_rows(builder.build_population(first, out).path)

        def fail(*_, **__):
            raise OSError("no")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match="no"):
                self.replace(tmp_path, out, overwrite=True)
        assert read_rows(out / NAME) == before
        assert builder.build_population(first, out).was_there

    def test_the_file_gets_its_name_after_all_that_belongs_to_it(
        self, tmp_path, out, monkeypatch
    ):
        read = build_source(
            tmp_path,
            [record("a", TRAIN, text=b"x")],
            kinds={"text": BYTES},
            counted={"text": " "},
        )
        job = build_job(read)
        builder.build_population(job, out)
        named, there = [], []
        replace = os.replace

        def note(source, target):
            there.append((out / NAME).exists())
            named.append(pathlib.Path(target).name)
            replace(source, target)

        monkeypatch.setattr(os, "replace", note)
        changed = builder.Import(**(vars(job) | {"options": {"size": 2}}))
        builder.build_population(changed, out, overwrite=True)
        assert named == ["data.text_count", "data.manifest.json", NAME]
        assert there == [False] * 3

    @pytest.mark.parametrize("full", ["staging", "partial"])
    def test_a_full_disk(self, tmp_path, out, serialized, monkeypatch, full):
        connect = sqlite3.connect

        def connect_to_small(path, **options):
            connection = connect(path, **options)
            if pathlib.Path(path).suffix == f".{full}":
                connection.execute("PRAGMA max_page_count = 30")
            return connection

        job = build_job(build_source(tmp_path, make_many(6_000)), rule=BY_EXAMPLE)
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", connect_to_small)
            match = "data.sqlite cannot be written: database or disk is full"
            with pytest.raises(DataError, match=match):
                builder.build_population(job, out)
        assert list_names(out) == [f"{NAME}.staging"]
        outcome = builder.build_population(job, out)
        assert sum(s["examples"] for s in outcome.manifest.splits.values()) == 6_000
        if full == "partial":
            assert serialized == list(range(6_000))

    def test_a_staging_file_that_is_none(self, tmp_path, out):
        out.mkdir()
        (out / f"{NAME}.staging").write_bytes(b"hello" * 500)
        job = build_job(build_source(tmp_path, make_many(5)), rule=BY_EXAMPLE)
        match = "file is not a database. .*If data.sqlite.staging is damaged, delete it"
        with pytest.raises(DataError, match=match):
            builder.build_population(job, out)
        (out / f"{NAME}.staging").unlink()
        builder.build_population(job, out)

    def test_what_an_earlier_crash_left_half_is_replaced(self, tmp_path, out):
        out.mkdir()
        (out / f"{NAME}.partial").write_bytes(b"hello" * 500)
        job = build_job(build_source(tmp_path, make_many(5)), rule=BY_EXAMPLE)
        builder.build_population(job, out)
        assert list_names(out) == ["data.manifest.json", NAME]

    def test_a_file_that_lacks_what_was_written(self, tmp_path, out):
        lossy = layout.Layout(
            stem="data", name_splits=lambda where, _: (where,) * (where == TRAIN)
        )
        records = [record("a", TRAIN), record("a", TEST)]
        job = build_job(build_source(tmp_path, records), layout=lossy)
        with pytest.raises(DataError, match="data.sqlite must hold Counter"):
            builder.build_population(job, out)
        assert list_names(out) == []

    def test_a_user_in_two_splits(self, tmp_path, out):
        # As many examples of each split as there must be, but not of the right users.
        names = {(TRAIN, 1): (TRAIN, TEST), (TEST, 2): ()}
        mixing = layout.Layout(
            stem="data", name_splits=lambda *key: names.get(key, key[:1])
        )
        rule = SplitRule(by=SplitBy.USER, test_fraction=0.5)
        homes = {where: user for user, where in rule.assign_users("ab").items()}
        records = [record(homes[TRAIN], label=1), record(homes[TEST], label=2)]
        job = build_job(build_source(tmp_path, records), layout=mixing, rule=rule)
        match = f"data.sqlite: user '{homes[TRAIN]}' must be in one split"
        with pytest.raises(DataError, match=match):
            builder.build_population(job, out)
        assert list_names(out) == []


class TestTwoAtOnce:
    def test_the_second_is_refused(self, tmp_path, out, whole_of_ten):
        told = []

        def begin_another():
            try:
                builder.build_population(job, out)
            except DataError as error:
                told.append(str(error))

        items = [*make_many(5), begin_another, *make_many(10)[5:]]
        job = build_job(build_source(tmp_path, items), rule=BY_EXAMPLE)
        outcome = builder.build_population(job, out)
        assert len(told) == 1
        assert "locked. (Is another import writing it" in told[0]
        assert read_rows(outcome.path) == whole_of_ten

    @pytest.fixture
    def whole_of_ten(self, tmp_path):
        job = build_job(build_source(tmp_path, make_many(10)), rule=BY_EXAMPLE)
        return read_rows(builder.build_population(job, tmp_path / "alone").path)

    def test_others_of_the_same_folder_are_not(self, tmp_path, out):
        def begin_another():
            other = layout.rename(layout.PLAIN, "other")
            job = build_job(inner, rule=BY_EXAMPLE, layout=other)
            builder.build_population(job, out)

        inner = build_source(tmp_path, make_many(7))
        items = [*make_many(5), begin_another]
        outer = build_job(build_source(tmp_path, items), rule=BY_EXAMPLE)
        builder.build_population(outer, out)
        assert list_names(out) == [
            "data.manifest.json",
            "data.sqlite",
            "other.manifest.json",
            "other.sqlite",
        ]


def test_the_writer_of_texts_is_the_run_folders(tmp_path, out, monkeypatch):
    """Whole or not at all, and on the disk."""
    durable = {}
    original = run_folder.write_text

    def write(path, text, **options):
        durable[path.name] = options
        original(path, text, **options)

    monkeypatch.setattr(run_folder, "write_text", write)
    read = build_source(
        tmp_path,
        [record("a", TRAIN, text=b"x")],
        kinds={"text": BYTES},
        counted={"text": " "},
    )
    builder.build_population(build_job(read), out)
    assert durable == {
        "data.text_count": {"durable": True},
        "data.manifest.json": {"durable": True},
    }
