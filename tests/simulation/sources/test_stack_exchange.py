"""Tests for Stack Exchange's dumps: small ones written here, and two real ones."""

import bz2
import collections
import gzip
import importlib.machinery
import lzma
import pathlib
import shutil
import sys
import tracemalloc
import types

import pytest

from simulation.sources import source, stack_exchange
from tests.simulation.sources import dumps

REAL = pathlib.Path(__file__).parents[4] / "shared" / "data" / "stackexchange"
FEATURES = ["creation_date", "score", "tags", "title", "tokens", "type"]


def read_tokens(path: pathlib.Path) -> list[bytes]:
    records, bad = dumps.read(path)
    assert not bad
    return [record.features["tokens"] for record in records]


class TestRecords:
    def test_a_question_and_its_answer(self, tmp_path):
        path = dumps.write_dump(
            tmp_path,
            dumps.write_row(
                Title="What's <b> &amp; C#?",
                Tags="<c#><vb.net>",
                Body="<p>One. Two.</p><pre><code>x = 1</code></pre>",
            ),
            dumps.write_row(
                Id=2,
                PostTypeId=2,
                ParentId=1,
                OwnerUserId=7,
                Score=-3,
                Body="<p>See http://a.org/b.</p>",
                CreationDate="2018-01-02T00:00:00.000",
            ),
        )
        records, bad = dumps.read(path)
        assert not bad
        shared = {"tags": b"c#|vb.net", "title": b"what's < b > & c # ?"}
        first = shared | {
            "creation_date": b"2017-05-06 07:08:09.1 UTC",
            "score": 5,
            "tokens": b"one .",
            "type": b"question",
        }
        assert records[0].features == first
        assert records[1].features == first | {"tokens": b"two ."}
        assert records[2].features == shared | {
            "creation_date": b"2018-01-02 00:00:00 UTC",
            "score": -3,
            "tokens": b"see <URL> .",
            "type": b"answer",
        }
        assert [record.client_id for record in records] == ["12", "12", "7"]
        assert records[0].place == f"{path}, line 3, row Id=1"
        assert records[2].place == f"{path}, line 4, row Id=2"

    def test_the_features_are_those_of_tff(self, tmp_path):
        reader = stack_exchange.StackExchangeSource(path=dumps.write_dump(tmp_path))
        assert sorted(reader.features) == FEATURES
        assert reader.features["score"].kind is source.Kind.INT64
        kinds = {reader.features[n].kind for n in FEATURES if n != "score"}
        assert kinds == {source.Kind.BYTES}
        assert reader.separators == {"tokens": " ", "tags": "|"}
        assert reader.files == (tmp_path / "Posts.xml",)

    @pytest.mark.parametrize(
        ("tags", "expected"),
        [
            ("<a><b-c>", b"a|b-c"),
            ("|a|b-c|", b"a|b-c"),
            ("<a>", b"a"),
            ("|a|", b"a"),
            ("", b""),
            (None, b""),
        ],
    )
    def test_both_forms_of_tags(self, tmp_path, tags, expected):
        records, bad = dumps.read(
            dumps.write_dump(tmp_path, dumps.write_row(Tags=tags))
        )
        assert not bad
        assert records[0].features["tags"] == expected

    def test_an_answer_before_its_question_inherits_too(self, tmp_path):
        answer = {"PostTypeId": 2, "ParentId": 5}
        path = dumps.write_dump(
            tmp_path,
            dumps.write_row(Id=1, **answer),
            dumps.write_row(Id=5, Tags="<a>", Title="First"),
            dumps.write_row(Id=5, Tags="<b>", Title="Second"),
            dumps.write_row(Id=6, **answer),
            # An answer is no question, and this one's isn't there.
            dumps.write_row(Id=7, PostTypeId=2, ParentId=1),
        )
        records, bad = dumps.read(path)
        assert not bad
        titles = [record.features["title"] for record in records]
        assert titles == [b"first", b"first", b"second", b"first", b""]
        assert [record.features["tags"] for record in records[-2:]] == [b"a", b""]

    def test_a_question_of_nobody_still_has_answers(self, tmp_path):
        path = dumps.write_dump(
            tmp_path,
            dumps.write_row(OwnerUserId=None, Tags="<a>"),
            dumps.write_row(Id=2, PostTypeId=2, ParentId=1),
            dumps.write_row(Id=3, PostTypeId=2, ParentId=1, OwnerUserId=None),
            dumps.write_row(Id=4, PostTypeId=5, OwnerUserId=None),
        )
        bad: list[source.SourceError] = []
        reader = stack_exchange.StackExchangeSource(path=path)
        for _ in range(2):
            records = list(reader.read(bad.append))
            assert [record.features["tags"] for record in records] == [b"a"]
            # Not 3: the other kinds of posts are nobody's by nature.
            assert reader.num_without_owner == 2
        assert not bad

    def test_other_kinds_of_posts_and_empty_ones_are_left_out(self, tmp_path):
        others = [dumps.write_row(Id=k, PostTypeId=k, Body=None) for k in range(3, 9)]
        empty = dumps.write_row(Id=10, Body="<pre>x = 1</pre><p>\u65e5</p>")
        assert read_tokens(dumps.write_dump(tmp_path, *others, empty)) == []

    @pytest.mark.parametrize(
        ("compress", "name"),
        [
            (gzip.compress, "Posts.xml.gz"),
            (lzma.compress, "Posts.xml.xz"),
            (bz2.compress, "Posts.xml.bz2"),
        ],
    )
    def test_compressed(self, tmp_path, compress, name):
        plain = dumps.write_dump(tmp_path, dumps.write_row())
        path = tmp_path / name
        path.write_bytes(compress(plain.read_bytes()))
        assert read_tokens(path) == [b"hello ."]


class TestSplit:
    def get_splits(self, folder: pathlib.Path, **options) -> list[str | None]:
        rows = [
            dumps.write_row(Id=2 * user + late, OwnerUserId=user, CreationDate=date)
            for user in (10, 11, 12)
            for late, date in enumerate(["2017-12-31T23:59:59.999", "2018-01-01"])
        ]
        records, bad = dumps.read(dumps.write_dump(folder, *rows), **options)
        assert not bad
        return [record.split for record in records]

    def test_by_user(self, tmp_path):
        expected = ["validation", "test", "train"]
        splits = self.get_splits(tmp_path)
        assert splits[::2] == splits[1::2] == expected

    @pytest.mark.parametrize("cut", ["2018-01-01", "2018-01-01T01:00:00+01:00"])
    def test_by_date_as_tff_does(self, tmp_path, cut):
        splits = self.get_splits(tmp_path, test_from=cut)
        assert splits == ["validation"] * 2 + ["train", "test"] * 2

    @pytest.mark.parametrize("cut", ["", "January", "2018-13-01"])
    def test_no_date(self, tmp_path, cut):
        path = dumps.write_dump(tmp_path)
        with pytest.raises(ValueError, match="`test_from` must be an ISO date"):
            stack_exchange.StackExchangeSource(path=path, test_from=cut)


class TestArchive:
    @pytest.fixture
    def py7zr(self, monkeypatch):
        """A stand-in whose archives are folders' names in a text file."""

        class SevenZipFile:
            def __init__(self, path):
                self.folder = pathlib.Path(path.read_text())
                if not self.folder.name:
                    raise module.exceptions.ArchiveError("not a 7z file")

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def getnames(self):
                return [path.name for path in self.folder.iterdir()]

            def extract(self, path, targets):
                for name in targets:
                    shutil.copy(self.folder / name, path)

        module = types.ModuleType("py7zr")
        module.__spec__ = importlib.machinery.ModuleSpec("py7zr", None)
        module.SevenZipFile = SevenZipFile
        module.exceptions = types.SimpleNamespace(
            ArchiveError=type("ArchiveError", (Exception,), {}),
            AbsolutePathError=type("AbsolutePathError", (Exception,), {}),
            PasswordRequired=type("PasswordRequired", (Exception,), {}),
        )
        monkeypatch.setitem(sys.modules, "py7zr", module)

    @pytest.fixture
    def path(self, tmp_path) -> pathlib.Path:
        path = tmp_path / "beer.7z"
        (tmp_path / "in").mkdir()
        path.write_text(str(tmp_path / "in"))
        return path

    def test_needs_py7zr(self, path, monkeypatch):
        monkeypatch.setitem(sys.modules, "py7zr", None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        match = "beer.7z: reading a .7z needs py7zr. Install py7zr, or unpack Posts.xml"
        with pytest.raises(source.SourceError, match=match):
            stack_exchange.StackExchangeSource(path=path)

    def test_posts_are_unpacked(self, tmp_path, path, py7zr):
        dumps.write_dump(tmp_path / "in", dumps.write_row())
        dumps.write_dump(tmp_path / "in", name="Users.xml")
        records, bad = dumps.read(path)
        assert not bad
        assert [record.place for record in records] == [f"{path}, line 3, row Id=1"]

    def test_without_posts(self, path, py7zr):
        records, (error,) = dumps.read(path)
        assert not records
        assert str(error) == f"{path}: must have one Posts.xml. Found 0."

    def test_no_archive(self, path, py7zr):
        path.write_text("")
        records, (error,) = dumps.read(path)
        assert not records
        assert str(error).startswith(f"{path}: must be a whole .7z. Found ArchiveErr")

    def test_a_real_archive(self, tmp_path):
        py7zr = pytest.importorskip("py7zr", reason="py7zr is not installed")
        path = tmp_path / "site.7z"
        with py7zr.SevenZipFile(path, "w") as archive:
            archive.write(dumps.write_dump(tmp_path, dumps.write_row()), "Posts.xml")
        assert read_tokens(path) == [b"hello ."]
        path.write_bytes(path.read_bytes()[:-30])
        records, (error,) = dumps.read(path)
        assert not records
        assert error.reason.startswith("must be a whole .7z")


class TestStreaming:
    def test_the_first_record_needs_no_more_than_a_block(self, tmp_path, monkeypatch):
        body = "<p>Hello.</p>" * 100
        rows = [dumps.write_row(Id=i, Body=body) for i in range(1, 2000)]
        path = dumps.write_dump(tmp_path, *rows)
        opened = []
        original = pathlib.Path.open

        def open_and_keep(self, *args, **options):
            opened.append(original(self, *args, **options))
            return opened[-1]

        reader = stack_exchange.StackExchangeSource(path=path)
        monkeypatch.setattr(pathlib.Path, "open", open_and_keep)
        records = reader.read(pytest.fail)
        next(records)
        assert sum(file.tell() for file in opened) < 2**18 < path.stat().st_size
        records.close()
        assert all(file.closed for file in opened)

    def test_the_memory_is_flat(self, tmp_path):
        body = f"<p>Hello.</p><pre>{'x' * 20_000}</pre>"
        rows = (dumps.write_row(Id=i, Body=body) for i in range(1, 500))
        path = dumps.write_dump(tmp_path, *rows)
        reader = stack_exchange.StackExchangeSource(path=path)
        tracemalloc.start()
        try:
            num_records = sum(1 for _ in reader.read(pytest.fail))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert num_records == 499
        assert peak < 2**21 < path.stat().st_size / 4


@pytest.mark.parametrize(
    ("site", "num_users", "num_without_owner"),
    [("beer", 781, 10), ("quantumcomputing", 332, 2)],
)
def test_real_dumps(site, num_users, num_without_owner):
    path = REAL / site / "Posts.xml.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    bad: list[source.SourceError] = []
    reader = stack_exchange.StackExchangeSource(path=path)
    records = list(reader.read(bad.append))
    assert not bad
    splits = collections.defaultdict(set)
    for record in records:
        splits[record.client_id].add(record.split)
        assert sorted(record.features) == FEATURES
        # Every question of these sites is in their dumps.
        assert record.features["tags"] and record.features["title"]
    assert len(splits) == num_users
    assert reader.num_without_owner == num_without_owner
    assert all(len(of_user) == 1 for of_user in splits.values())
    tokens = [record.features["tokens"] for record in records]
    assert all(text.isascii() and text == b" ".join(text.split()) for text in tokens)
    words = collections.Counter(b" ".join(tokens).split())
    assert {word for word, _ in words.most_common(12)} >= {b"the", b",", b".", b"a"}
    assert not any(b"://" in word or word.startswith(b"www.") for word in words)
