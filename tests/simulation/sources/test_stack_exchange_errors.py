"""Tests for Stack Exchange's dumps that are wrong: rows, and files that are damaged."""

import bz2
import gzip
import lzma

import pytest

from simulation.sources import source, stack_exchange
from tests.simulation.sources import dumps


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
        path = dumps.write_dump(
            tmp_path, dumps.write_row(), dumps.write_row(**row), dumps.write_row(Id=3)
        )
        records, bad = dumps.read(path)
        assert [record.place[-4:] for record in records] == ["Id=1", "Id=3"]
        (error,) = bad
        assert error.place == f"{path}, line 4, row Id={row['Id']}"
        assert error.reason.startswith(reason)

    def test_without_an_id(self, tmp_path):
        path = dumps.write_dump(tmp_path, dumps.write_row(Id=None), dumps.write_row())
        records, (error,) = dumps.read(path)
        assert len(records) == 1
        assert str(error).startswith(f"{path}, line 3: a post must have `Id`. Found ")

    def test_what_is_no_row(self, tmp_path):
        path = dumps.write_dump(tmp_path, "<user Id='1'/>\n", dumps.write_row())
        records, (error,) = dumps.read(path)
        assert len(records) == 1
        expected = f"{path}, line 3: <posts> must have rows alone. Found <user>."
        assert str(error) == expected

    def test_what_on_bad_raises_ends_the_reading(self, tmp_path):
        def refuse(error: source.SourceError) -> None:
            raise error

        path = dumps.write_dump(tmp_path, dumps.write_row(Score="x"), dumps.write_row())
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
        return [dumps.write_row(Id=i, Body=body) for i, body in enumerate(bodies, 1)]

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
        data = compress(dumps.write_dump(tmp_path, *rows).read_bytes())
        path = tmp_path / f"Posts.xml{suffix}"
        path.write_bytes(data[: len(data) * 9 // 10])
        records, (error,) = dumps.read(path)
        # What came before is read.
        assert 1000 < len(records) < 300 * 99
        assert error.place.startswith(f"{path}, line ")
        assert error.reason.startswith("must be whole. Found EOFError")

    def test_truncated_plain(self, tmp_path):
        path = dumps.write_dump(tmp_path, dumps.write_row(), dumps.write_row(Id=2))
        path.write_bytes(path.read_bytes()[:-20])
        records, (error,) = dumps.read(path)
        assert len(records) == 1
        assert error.place == f"{path}, line 4"
        assert error.reason.startswith("must be well-formed XML. Found ")

    def test_damaged_gz(self, tmp_path, rows):
        data = bytearray(gzip.compress(dumps.write_dump(tmp_path, *rows).read_bytes()))
        data[len(data) // 2 :] = bytes(len(data) // 2)
        path = tmp_path / "Posts.xml.gz"
        path.write_bytes(data)
        _, (error,) = dumps.read(path)
        assert error.place.startswith(f"{path}, line ")
        assert error.reason.startswith("must be ")

    def test_no_gz(self, tmp_path):
        path = dumps.write_dump(tmp_path, dumps.write_row(), name="Posts.xml.gz")
        records, (error,) = dumps.read(path)
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
        path = dumps.write_dump(
            tmp_path, dumps.write_row(), middle, dumps.write_row(Id=3)
        )
        records, (error,) = dumps.read(path)
        assert len(records) == 1
        assert error.place in (f"{path}, line 4", f"{path}, line 5")
        assert error.reason.startswith(reason)

    def test_not_utf8(self, tmp_path):
        path = dumps.write_dump(
            tmp_path, dumps.write_row(), dumps.write_row(Id=2, Body="caf\u00e9")
        )
        path.write_bytes(path.read_bytes().replace("\u00e9".encode(), b"\xe9"))
        records, (error,) = dumps.read(path)
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
        records, (error,) = dumps.read(path)
        assert not records
        assert error.place == f"{path}, line 1"
        assert error.reason.startswith(reason)

    @pytest.mark.parametrize(
        "declaration",
        ["<!DOCTYPE posts>", '<!DOCTYPE posts [<!ENTITY a "&b;&b;"><!ENTITY b "bb">]>'],
    )
    def test_a_document_type_is_refused(self, tmp_path, declaration):
        path = tmp_path / "Posts.xml"
        path.write_text(f"{declaration}\n<posts>\n{dumps.write_row(Body='X')}</posts>")
        records, (error,) = dumps.read(path)
        assert not records
        assert error.place == f"{path}, line 1"
        assert error.reason.startswith("must have no document type")

    def test_a_row_without_end(self, tmp_path, monkeypatch):
        monkeypatch.setattr(stack_exchange, "_MAX_ROW_BYTES", 2**18)
        path = dumps.write_dump(
            tmp_path, dumps.write_row(), dumps.write_row(Body="x" * 2**20)
        )
        records, (error,) = dumps.read(path)
        assert len(records) == 1
        assert error.reason.startswith("a row must have at most 262144 bytes")

    @pytest.mark.parametrize("name", ["Posts.xml", "."])
    def test_no_file(self, tmp_path, name):
        with pytest.raises(source.SourceError, match="must be a file. Found none"):
            stack_exchange.StackExchangeSource(path=tmp_path / name)
