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
from xml.sax import saxutils

import pytest

from simulation.sources import source, stack_exchange

REAL = pathlib.Path(__file__).parents[4] / "shared" / "data" / "stackexchange"
FEATURES = ["creation_date", "score", "tags", "title", "tokens", "type"]


def write_row(**attributes: object) -> str:
    """Returns a row; None leaves a default attribute out."""
    defaults = {
        "Id": 1,
        "PostTypeId": 1,
        "CreationDate": "2017-05-06T07:08:09.100",
        "Score": 5,
        "Body": "<p>Hello.</p>",
        "OwnerUserId": 12,
    }
    pairs = (defaults | attributes).items()
    return "  <row {} />\n".format(
        " ".join(f"{k}={saxutils.quoteattr(str(v))}" for k, v in pairs if v is not None)
    )


def write_dump(folder: pathlib.Path, *rows: str, name: str = "Posts.xml"):
    text = '\ufeff<?xml version="1.0" encoding="utf-8"?>\n<posts>\n{}</posts>\n'
    path = folder / name
    path.write_text(text.format("".join(rows)), encoding="utf-8")
    return path


def read(path: pathlib.Path, **options):
    """Returns the records and the errors of a dump."""
    bad: list[source.SourceError] = []
    reader = stack_exchange.StackExchangeSource(path=path, **options)
    return list(reader.read(bad.append)), bad


def read_tokens(path: pathlib.Path) -> list[bytes]:
    records, bad = read(path)
    assert not bad
    return [record.features["tokens"] for record in records]


class TestRecords:
    def test_a_question_and_its_answer(self, tmp_path):
        path = write_dump(
            tmp_path,
            write_row(
                Title="What's <b> &amp; C#?",
                Tags="<c#><vb.net>",
                Body="<p>One. Two.</p><pre><code>x = 1</code></pre>",
            ),
            write_row(
                Id=2,
                PostTypeId=2,
                ParentId=1,
                OwnerUserId=7,
                Score=-3,
                Body="<p>See http://a.org/b.</p>",
                CreationDate="2018-01-02T00:00:00.000",
            ),
        )
        records, bad = read(path)
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
        reader = stack_exchange.StackExchangeSource(path=write_dump(tmp_path))
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
        records, bad = read(write_dump(tmp_path, write_row(Tags=tags)))
        assert not bad
        assert records[0].features["tags"] == expected

    def test_an_answer_before_its_question_inherits_too(self, tmp_path):
        answer = {"PostTypeId": 2, "ParentId": 5}
        path = write_dump(
            tmp_path,
            write_row(Id=1, **answer),
            write_row(Id=5, Tags="<a>", Title="First"),
            write_row(Id=5, Tags="<b>", Title="Second"),
            write_row(Id=6, **answer),
            # An answer is no question, and this one's isn't there.
            write_row(Id=7, PostTypeId=2, ParentId=1),
        )
        records, bad = read(path)
        assert not bad
        titles = [record.features["title"] for record in records]
        assert titles == [b"first", b"first", b"second", b"first", b""]
        assert [record.features["tags"] for record in records[-2:]] == [b"a", b""]

    def test_a_question_of_nobody_still_has_answers(self, tmp_path):
        path = write_dump(
            tmp_path,
            write_row(OwnerUserId=None, Tags="<a>"),
            write_row(Id=2, PostTypeId=2, ParentId=1),
            write_row(Id=3, PostTypeId=2, ParentId=1, OwnerUserId=None),
            write_row(Id=4, PostTypeId=5, OwnerUserId=None),
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
        others = [write_row(Id=k, PostTypeId=k, Body=None) for k in range(3, 9)]
        empty = write_row(Id=10, Body="<pre>x = 1</pre><p>\u65e5</p>")
        assert read_tokens(write_dump(tmp_path, *others, empty)) == []

    @pytest.mark.parametrize(
        ("compress", "name"),
        [
            (gzip.compress, "Posts.xml.gz"),
            (lzma.compress, "Posts.xml.xz"),
            (bz2.compress, "Posts.xml.bz2"),
        ],
    )
    def test_compressed(self, tmp_path, compress, name):
        plain = write_dump(tmp_path, write_row())
        path = tmp_path / name
        path.write_bytes(compress(plain.read_bytes()))
        assert read_tokens(path) == [b"hello ."]


class TestSplit:
    def get_splits(self, folder: pathlib.Path, **options) -> list[str | None]:
        rows = [
            write_row(Id=2 * user + late, OwnerUserId=user, CreationDate=date)
            for user in (10, 11, 12)
            for late, date in enumerate(["2017-12-31T23:59:59.999", "2018-01-01"])
        ]
        records, bad = read(write_dump(folder, *rows), **options)
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
        path = write_dump(tmp_path)
        with pytest.raises(ValueError, match="`test_from` must be an ISO date"):
            stack_exchange.StackExchangeSource(path=path, test_from=cut)


class TestBadRows:
    @pytest.mark.parametrize(
        ("attributes", "reason"),
        [
            ({"PostTypeId": None}, "a post must have `PostTypeId`"),
            ({"Body": None}, "a post must have `Body`"),
            ({"CreationDate": None}, "a post must have `CreationDate`"),
            ({"Score": None}, "a post must have `Score`"),
            ({"PostTypeId": 2}, "a post must have `ParentId`"),
            ({"Id": "x"}, "`Id` must be an integer. Found 'x'"),
            ({"Score": "1.5"}, "`Score` must be an integer. Found '1.5'"),
            ({"Score": "1_0"}, "`Score` must be an integer. Found '1_0'"),
            ({"Score": "9" * 19}, "`Score` must be an integer"),
            ({"OwnerUserId": "me"}, "`OwnerUserId` must be an integer"),
            ({"CreationDate": "May"}, "`CreationDate` must be an ISO date"),
            ({"Tags": "a,b"}, "`Tags` must be <a><b> or |a|b|. Found 'a,b'"),
            ({"Tags": "<a>b"}, "`Tags` must be"),
            ({"Body": "<![what[x]]>"}, "`Body`: the text must be HTML"),
        ],
    )
    def test_is_told_with_its_place_and_the_rest_is_read(
        self, tmp_path, attributes, reason
    ):
        row = {"Id": 77} | attributes
        path = write_dump(tmp_path, write_row(), write_row(**row), write_row(Id=3))
        records, bad = read(path)
        assert [record.place[-4:] for record in records] == ["Id=1", "Id=3"]
        (error,) = bad
        assert error.place == f"{path}, line 4, row Id={row['Id']}"
        assert error.reason.startswith(reason)

    def test_without_an_id(self, tmp_path):
        path = write_dump(tmp_path, write_row(Id=None), write_row())
        records, (error,) = read(path)
        assert len(records) == 1
        assert str(error).startswith(f"{path}, line 3: a post must have `Id`. Found ")

    def test_what_is_no_row(self, tmp_path):
        path = write_dump(tmp_path, "<user Id='1'/>\n", write_row())
        records, (error,) = read(path)
        assert len(records) == 1
        expected = f"{path}, line 3: <posts> must have rows alone. Found <user>."
        assert str(error) == expected

    def test_what_on_bad_raises_ends_the_reading(self, tmp_path):
        def refuse(error: source.SourceError) -> None:
            raise error

        path = write_dump(tmp_path, write_row(Score="x"), write_row())
        reader = stack_exchange.StackExchangeSource(path=path)
        with pytest.raises(source.SourceError, match="line 3, row Id=1: `Score`"):
            list(reader.read(refuse))


class TestDamage:
    @pytest.fixture
    def rows(self) -> list[str]:
        # Bodies that compress badly, so that a file is more than a block.
        bodies = [
            "".join(f"<p>{i * j % 9973}</p>" for j in range(300)) for i in range(99)
        ]
        return [write_row(Id=i, Body=body) for i, body in enumerate(bodies, 1)]

    @pytest.mark.parametrize(
        ("compress", "suffix"),
        [
            (gzip.compress, ".gz"),
            (lzma.compress, ".xz"),
            # Blocks of 100 kB: of a block that isn't whole nothing can be read.
            (lambda data: bz2.compress(data, 1), ".bz2"),
        ],
    )
    def test_truncated(self, tmp_path, rows, compress, suffix):
        data = compress(write_dump(tmp_path, *rows).read_bytes())
        path = tmp_path / f"Posts.xml{suffix}"
        path.write_bytes(data[: len(data) * 9 // 10])
        records, (error,) = read(path)
        # What came before is read.
        assert 1000 < len(records) < 300 * 99
        assert error.place.startswith(f"{path}, line ")
        assert error.reason.startswith("must be whole. Found EOFError")

    def test_truncated_plain(self, tmp_path):
        path = write_dump(tmp_path, write_row(), write_row(Id=2))
        path.write_bytes(path.read_bytes()[:-20])
        records, (error,) = read(path)
        assert len(records) == 1
        assert error.place == f"{path}, line 4"
        assert error.reason.startswith("must be well-formed XML. Found ")

    def test_damaged_gz(self, tmp_path, rows):
        data = bytearray(gzip.compress(write_dump(tmp_path, *rows).read_bytes()))
        data[len(data) // 2 :] = bytes(len(data) // 2)
        path = tmp_path / "Posts.xml.gz"
        path.write_bytes(data)
        _, (error,) = read(path)
        assert error.place.startswith(f"{path}, line ")
        assert error.reason.startswith("must be ")

    def test_no_gz(self, tmp_path):
        path = write_dump(tmp_path, write_row(), name="Posts.xml.gz")
        records, (error,) = read(path)
        assert not records
        assert str(error).startswith(f"{path}, line 1: must be whole. Found BadGzip")

    @pytest.mark.parametrize(
        ("middle", "reason"),
        [
            ("  <row Id=2 />\n", "must be well-formed XML. Found not well-formed"),
            ("  <row Id='2' Id='2' />\n", "must be well-formed XML. Found duplicate"),
            ("  </posts>\n", "must be well-formed XML. Found junk after"),
            ("  &nbsp;\n", "must be well-formed XML. Found undefined entity"),
        ],
    )
    def test_not_well_formed(self, tmp_path, middle, reason):
        path = write_dump(tmp_path, write_row(), middle, write_row(Id=3))
        records, (error,) = read(path)
        assert len(records) == 1
        assert error.place in (f"{path}, line 4", f"{path}, line 5")
        assert error.reason.startswith(reason)

    def test_not_utf8(self, tmp_path):
        path = write_dump(tmp_path, write_row(), write_row(Id=2, Body="caf\u00e9"))
        path.write_bytes(path.read_bytes().replace("\u00e9".encode(), b"\xe9"))
        records, (error,) = read(path)
        assert len(records) == 1
        assert error.place == f"{path}, line 4"

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "must be well-formed XML. Found no element found."),
            ("hello", "must be well-formed XML. Found syntax error."),
            ("<users></users>", "the root must be <posts>. Found <users>."),
            ('<?xml version="1.0" encoding="klingon"?><posts/>', "must be "),
        ],
    )
    def test_no_dump(self, tmp_path, text, reason):
        path = tmp_path / "Posts.xml"
        path.write_text(text)
        records, (error,) = read(path)
        assert not records
        assert error.place == f"{path}, line 1"
        assert error.reason.startswith(reason)

    @pytest.mark.parametrize(
        "declaration",
        ["<!DOCTYPE posts>", '<!DOCTYPE posts [<!ENTITY a "&b;&b;"><!ENTITY b "bb">]>'],
    )
    def test_a_document_type_is_refused(self, tmp_path, declaration):
        path = tmp_path / "Posts.xml"
        path.write_text(f"{declaration}\n<posts>\n{write_row(Body='X')}</posts>")
        records, (error,) = read(path)
        assert not records
        assert error.place == f"{path}, line 1"
        assert error.reason.startswith("must have no document type")

    def test_a_row_without_end(self, tmp_path, monkeypatch):
        monkeypatch.setattr(stack_exchange, "_MAX_ROW_BYTES", 2**18)
        path = write_dump(tmp_path, write_row(), write_row(Body="x" * 2**20))
        records, (error,) = read(path)
        assert len(records) == 1
        assert error.reason.startswith("a row must have at most 262144 bytes")

    @pytest.mark.parametrize("name", ["Posts.xml", "."])
    def test_no_file(self, tmp_path, name):
        with pytest.raises(source.SourceError, match="must be a file. Found none"):
            stack_exchange.StackExchangeSource(path=tmp_path / name)


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
        write_dump(tmp_path / "in", write_row())
        write_dump(tmp_path / "in", name="Users.xml")
        records, bad = read(path)
        assert not bad
        assert [record.place for record in records] == [f"{path}, line 3, row Id=1"]

    def test_without_posts(self, path, py7zr):
        records, (error,) = read(path)
        assert not records
        assert str(error) == f"{path}: must have one Posts.xml. Found 0."

    def test_no_archive(self, path, py7zr):
        path.write_text("")
        records, (error,) = read(path)
        assert not records
        assert str(error).startswith(f"{path}: must be a whole .7z. Found ArchiveErr")

    def test_a_real_archive(self, tmp_path):
        py7zr = pytest.importorskip("py7zr", reason="py7zr is not installed")
        path = tmp_path / "site.7z"
        with py7zr.SevenZipFile(path, "w") as archive:
            archive.write(write_dump(tmp_path, write_row()), "Posts.xml")
        assert read_tokens(path) == [b"hello ."]
        path.write_bytes(path.read_bytes()[:-30])
        records, (error,) = read(path)
        assert not records
        assert error.reason.startswith("must be a whole .7z")


class TestStreaming:
    def test_the_first_record_needs_no_more_than_a_block(self, tmp_path, monkeypatch):
        body = "<p>Hello.</p>" * 100
        rows = [write_row(Id=i, Body=body) for i in range(1, 2000)]
        path = write_dump(tmp_path, *rows)
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
        rows = (write_row(Id=i, Body=body) for i in range(1, 500))
        path = write_dump(tmp_path, *rows)
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
