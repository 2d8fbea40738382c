"""Tests of tables: the values of CSV and Parquet, and errors with their line."""

import gzip
import sys

import numpy as np
import pytest

from simulation.sources import source, table
from simulation.sources.source import SourceError

_TEXT = """user,age,title,kind,height
ann,1.5,Hello,dog,-2
bob,2,"a, ""b""
c",cat,1e3
ann,0,,dog,.5
"""


def _raise(error):
    raise error


def _write(path, text, *, pack=False):
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if pack else data)
    return path


def _build(path, **options):
    defaults = {"user_column": "user", "label_column": "kind"}
    return table.TableSource(path=path, **(defaults | options))


def _read(path, **options):
    return list(_build(path, **options).read(_raise))


def _read_with_errors(path, **options):
    errors = []
    return list(_build(path, **options).read(errors.append)), errors


class TestCsv:
    @pytest.mark.parametrize("pack", [False, True])
    def test_records(self, tmp_path, pack):
        path = _write(tmp_path / "t", _TEXT, pack=pack)
        read = _build(path, text_columns=("title",))
        assert read.files == (path,)
        assert read.classes == ("cat", "dog")
        assert dict(read.features) == {
            "x": source.Feature(kind=source.Kind.FLOAT, shape=(2,)),
            "title": source.Feature(kind=source.Kind.BYTES),
            "label": source.Feature(kind=source.Kind.INT64),
        }
        records = list(read.read(_raise))
        assert [r.client_id for r in records] == ["ann", "bob", "ann"]
        assert [r.features["label"] for r in records] == [1, 0, 1]
        assert [r.features["title"] for r in records] == [b"Hello", b'a, "b"\nc', b""]
        assert {r.split for r in records} == {None}
        # Age before height, as in the file.
        x = [r.features["x"].tolist() for r in records]
        assert x == [[1.5, -2.0], [2.0, 1000.0], [0.0, 0.5]]
        assert {r.features["x"].dtype for r in records} == {np.dtype(np.float32)}
        # The second row has two lines.
        assert [r.place for r in records] == [f"{path}, line {n}" for n in (2, 3, 5)]

    def test_order_of_feature_columns(self, tmp_path):
        path = _write(tmp_path / "t", _TEXT)
        (first, *_) = _read(path, feature_columns=("height", "age"))
        assert first.features["x"].tolist() == [-2.0, 1.5]
        assert "title" not in first.features

    def test_texts_alone(self, tmp_path):
        path = _write(tmp_path / "t", _TEXT)
        read = _build(path, feature_columns=(), text_columns=("title", "age"))
        assert set(read.features) == {"title", "age", "label"}
        record = next(iter(read.read(_raise)))
        assert record.features == {"title": b"Hello", "age": b"1.5", "label": 1}

    def test_mark_of_utf_8_line_ends_and_blank_lines(self, tmp_path):
        text = "\ufeffuser,kind,x\r\nann,1,2\r\n\r\nbj\u00f6rn,0,3\r\n\r\n"
        records = _read(_write(tmp_path / "t", text))
        assert [r.client_id for r in records] == ["ann", "bj\u00f6rn"]
        assert [r.place[-6:] for r in records] == ["line 2", "line 4"]

    def test_splits(self, tmp_path):
        text = "user,kind,x,part\na,1,0,test\na,1,0,train\nb,0,0,validation\n"
        records = _read(_write(tmp_path / "t", text), split_column="part")
        assert [r.split for r in records] == ["test", "train", "validation"]
        assert records[0].features["x"].shape == (1,)

    def test_integer_labels_stay(self, tmp_path):
        text = "user,kind,x\na,7,0\na, -3 ,0\na,12.0,0\na,+5,0\n"
        path = _write(tmp_path / "t", text)
        assert _build(path).classes is None
        # Not numbered by rank, nor sorted as text.
        assert [r.features["label"] for r in _read(path)] == [7, -3, 12, 5]

    def test_one_name_makes_all_labels_names(self, tmp_path):
        text = "user,kind,x\na,10,0\na,9,0\na,other,0\n"
        path = _write(tmp_path / "t", text)
        assert _build(path).classes == ("10", "9", "other")
        assert [r.features["label"] for r in _read(path)] == [0, 1, 2]

    def test_integer_beyond_int64_is_a_name(self, tmp_path):
        path = _write(tmp_path / "t", "user,kind,x\na,9223372036854775808,0\na,2,0\n")
        assert _build(path).classes == ("2", "9223372036854775808")

    def test_given_labels_have_their_order(self, tmp_path):
        path = _write(tmp_path / "t", _TEXT)
        options = {"labels": ("dog", "cat"), "feature_columns": ("age",)}
        records = _read(path, **options)
        assert [r.features["label"] for r in records] == [0, 1, 0]
        assert _build(path, **options).classes == ("dog", "cat")

    def test_many_integers_are_fine(self, tmp_path, monkeypatch):
        monkeypatch.setattr(table, "_MAX_CLASSES", 3)
        lines = [f"a,{n},0" for n in range(9)]
        path = _write(tmp_path / "t", "\n".join(["user,kind,x", *lines]))
        assert len(_read(path)) == 9
        _write(path, "\n".join(["user,kind,x", *lines, "a,name,0"]))
        with pytest.raises(SourceError, match="at most 3 labels"):
            _read(path)


class TestCsvErrors:
    """One bad row in line 3: it is left out, and its place told."""

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ("b,1", "must have 4 fields. Found 2"),
            ("b,1,2,3,4", "must have 4 fields. Found 5"),
            ("b,1,two,3", "'x' must be a finite number of 32 bits. Found 'two'"),
            ("b,1,2,", "'y' must be a finite number of 32 bits. Found ''"),
            ("b,1,2,nan", "Found 'nan'"),
            ("b,1,-inf,3", "Found '-inf'"),
            ("b,1,1e39,3", "Found '1e39'"),
            ("b,1,1_000,3", "Found '1_000'"),
            (",1,2,3", "'user' must name a user"),
            ("  ,1,2,3", "'user' must name a user"),
            ("b,,2,3", "'kind' must be an integer. Found ''"),
            (b"b\xff,1,2,3", "must be UTF-8. Found b'b\\xff'"),
            ('"b"x,1,2,3', "is no row of CSV"),
            ("b,1,2\r7,3", "is no row of CSV"),
        ],
    )
    def test_bad_row(self, tmp_path, row, reason):
        row = row if isinstance(row, bytes) else row.encode()
        text = b"user,kind,x,y\na,1,1,1\n" + row + b"\nc,1,3,3\n"
        path = _write(tmp_path / "t", text)
        records, errors = _read_with_errors(path)
        assert [r.client_id for r in records] == ["a", "c"]
        assert [e.place for e in errors] == [f"{path}, line 3"]
        assert reason in errors[0].reason
        with pytest.raises(SourceError, match="line 3"):
            _read(path)

    def test_quote_that_is_not_closed(self, tmp_path):
        path = _write(tmp_path / "t", 'user,kind,x\na,1,1\nb,1,"2\nc,1,3\n')
        records, errors = _read_with_errors(path)
        assert [r.client_id for r in records] == ["a"]
        assert [e.place for e in errors] == [f"{path}, line 3"]

    def test_long_line_is_not_held(self, tmp_path, monkeypatch):
        monkeypatch.setattr(table, "_MAX_LINE", 64)
        long = "b,1," + "9" * 200
        path = _write(tmp_path / "t", f"user,kind,x\na,1,1\n{long}\nc,1,3\n")
        records, errors = _read_with_errors(path)
        assert [r.client_id for r in records] == ["a", "c"]
        assert errors[0].place == f"{path}, line 3"

    def test_unknown_split(self, tmp_path):
        path = _write(tmp_path / "t", "user,kind,x,part\na,1,0,dev\n")
        with pytest.raises(SourceError, match="line 2: 'part' must be .* Found 'dev'"):
            _read(path, split_column="part")

    def test_unknown_label(self, tmp_path):
        path = _write(tmp_path / "t", _TEXT)
        with pytest.raises(
            SourceError, match="line 3: 'kind' must be one of dog, eel. Found 'cat'"
        ):
            _read(path, labels=("dog", "eel"), feature_columns=("age",))
        many = ("dog", *(f"class{n}" for n in range(30)))
        with pytest.raises(SourceError, match="class18 and 11 more. Found 'cat'"):
            _read(path, labels=many, feature_columns=("age",))

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "is empty"),
            ("\n", "is empty"),
            ("user,x\n", r"must have the columns \['kind'\]. Found \['user', 'x'\]"),
            ("user,kind,x,x\n", r"distinct. Found twice: \['x'\]"),
            (",user,kind,x\n", "column without a name"),
            (b"user,kind,\xff\n", "line 1: must be UTF-8"),
            ('user,"kind"x\n', "line 1: is no CSV"),
        ],
    )
    def test_bad_header(self, tmp_path, text, reason):
        path = _write(tmp_path / "t", text)
        with pytest.raises(SourceError, match=reason) as error:
            _build(path)
        assert error.value.place.startswith(str(path))

    def test_no_rows(self, tmp_path):
        path = _write(tmp_path / "t", "user,kind,x\n")
        with pytest.raises(SourceError, match="t: must hold a row"):
            _read(path)

    def test_absent(self, tmp_path):
        with pytest.raises(SourceError, match="absent: cannot be read"):
            _build(tmp_path / "absent")

    def test_damaged_gzip(self, tmp_path):
        path = _write(tmp_path / "t", "user,kind,x\n" + "a,1,1\n" * 99, pack=True)
        path.write_bytes(path.read_bytes()[:-5])
        _, errors = _read_with_errors(path, labels=("1",))
        assert [e.place.startswith(f"{path}, line ") for e in errors] == [True]
        assert "damaged" in errors[0].reason

    def test_bad_arguments(self, tmp_path):
        path = _write(tmp_path / "t", "user,kind,label,x\n")
        with pytest.raises(ValueError, match="one role. Found .'user'."):
            _build(path, text_columns=("user",))
        with pytest.raises(ValueError, match="one role. Found .'x'."):
            _build(path, text_columns=("x",), feature_columns=("x",))
        for name in ("label", "x"):
            with pytest.raises(ValueError, match=f"must not have '{name}'"):
                _build(path, text_columns=(name,), feature_columns=())
        with pytest.raises(ValueError, match="`labels` must be distinct"):
            _build(path, labels=("a", "a"))
        with pytest.raises(ValueError, match="`labels` must be distinct"):
            _build(path, labels=())
        with pytest.raises(ValueError, match="must name a column. Found none"):
            _build(path, feature_columns=())


class TestParquet:
    def _write(self, path, columns):
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table(columns), path)
        return path

    def test_records(self, tmp_path):
        path = self._write(
            tmp_path / "t",
            {
                "height": [0.5, -1.0],
                "title": ["Hello", ""],
                "kind": ["dog", "cat"],
                "user": [12, 7],
                "age": [1, 2],
            },
        )
        read = _build(path, text_columns=("title",), feature_columns=("age", "height"))
        assert read.classes == ("cat", "dog")
        records = list(read.read(_raise))
        assert [r.client_id for r in records] == ["12", "7"]
        assert [r.features["title"] for r in records] == [b"Hello", b""]
        assert [r.features["label"] for r in records] == [1, 0]
        x = [r.features["x"].tolist() for r in records]
        assert x == [[1.0, 0.5], [2.0, -1.0]]
        assert records[1].place == f"{path}, row 1"

    def test_row_groups_and_batches_join(self, tmp_path, monkeypatch):
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        monkeypatch.setattr(table, "_PARQUET_ROWS", 4)
        columns = {"user": ["u"] * 23, "kind": range(23), "x": np.arange(23.0)}
        parquet.write_table(pyarrow.table(columns), tmp_path / "t", row_group_size=7)
        records = _read(tmp_path / "t")
        assert [r.features["label"] for r in records] == list(range(23))
        assert [r.features["x"].item() for r in records] == list(range(23))
        assert records[22].place.endswith("row 22")

    @pytest.mark.parametrize(
        ("column", "value", "reason"),
        [
            ("user", None, "'user' must name a user"),
            ("user", " ", "'user' must name a user"),
            ("title", None, "'title' must be text. Found None"),
            ("x", None, "'x' must be a finite number"),
            ("x", float("nan"), "Found nan"),
            ("x", 1e39, r"Found 1e\+39"),
            ("kind", None, "'kind' must be an integer. Found None"),
            ("part", "dev", "'part' must be one of"),
        ],
    )
    def test_bad_row(self, tmp_path, column, value, reason):
        columns = {
            "user": ["a", "b"],
            "title": ["t", "u"],
            "x": [1.0, 2.0],
            "kind": [3, 4],
            "part": ["train", "test"],
        }
        columns[column][1] = value
        path = self._write(tmp_path / "t", columns)
        options = {"text_columns": ("title",), "split_column": "part"}
        records, errors = _read_with_errors(path, **options)
        assert [r.client_id for r in records] == ["a"]
        assert [e.place for e in errors] == [f"{path}, row 1"]
        with pytest.raises(SourceError, match=reason):
            _read(path, **options)

    def test_bytes_are_no_text(self, tmp_path):
        columns = {"user": ["a"], "kind": [1], "title": [b"\xff"]}
        path = self._write(tmp_path / "t", columns)
        with pytest.raises(SourceError, match="row 0: 'title' must be text"):
            _read(path, text_columns=("title",))

    def test_fractional_label(self, tmp_path):
        path = self._write(
            tmp_path / "t", {"user": ["a", "b"], "kind": [1.0, 2.0], "x": [0, 0]}
        )
        assert [r.features["label"] for r in _read(path)] == [1, 2]
        self._write(path, {"user": ["a", "b"], "kind": [1.0, 2.5], "x": [0, 0]})
        assert _build(path).classes == ("1.0", "2.5")

    def test_missing_column(self, tmp_path):
        path = self._write(tmp_path / "t", {"user": ["a"], "x": [1]})
        with pytest.raises(SourceError, match=r"the columns \['kind'\]. Found \['user"):
            _build(path)

    def test_index_of_pandas(self, tmp_path):
        path = self._write(
            tmp_path / "t",
            {"user": ["a"], "kind": [1], "x": [2.0], "__index_level_0__": [5]},
        )
        with pytest.raises(SourceError, match="column without a name, such as an ind"):
            _build(path)
        assert _read(path, feature_columns=("x",))[0].features["x"].tolist() == [2.0]

    def test_no_rows(self, tmp_path):
        path = self._write(tmp_path / "t", {"user": [], "kind": [], "x": []})
        with pytest.raises(SourceError, match="must hold a row"):
            _read(path)

    @pytest.mark.parametrize("part", ["footer", "values"])
    def test_damaged(self, tmp_path, part):
        path = self._write(
            tmp_path / "t",
            {"user": ["a"] * 500, "kind": [1] * 500, "x": np.arange(500.0)},
        )
        data = path.read_bytes()
        if part == "footer":
            path.write_bytes(data[:-20])
            with pytest.raises(SourceError, match="t: is damaged"):
                _build(path)
        else:
            path.write_bytes(data[:4] + b"\xff" * 600 + data[604:])
            records, errors = _read_with_errors(path, labels=("1",))
            assert not records
            assert errors[0].place == f"{path}, row 0"

    def test_without_pyarrow(self, tmp_path, monkeypatch):
        path = tmp_path / "t"
        path.write_bytes(b"PAR1" + bytes(20))
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(SourceError, match="t: .*`pip install pyarrow`"):
            _build(path)
