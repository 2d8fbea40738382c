"""Tests for reading a JSON document value by value, whatever the blocks."""

import gzip
import json
import pathlib
import tracemalloc

import pytest

from simulation.sources import json_reader

DOCUMENT = {
    "a": [1, [2.5, {"b": ']}"\\'}], None],
    "caf\u00e9 \u65e5": {"x": "\\\\", "y": [], "z": {}},
    "s": "text with [ and {",
    "n": -12.5e3,
    "t": True,
    "last": [[]],
}


@pytest.fixture(params=[1, 2, 3, 7, 2**20])
def block(request, monkeypatch) -> int:
    """Blocks of every small size: a value may be cut anywhere."""
    monkeypatch.setattr(json_reader, "_BLOCK_CHARACTERS", request.param)
    return request.param


def write(folder: pathlib.Path, text: str | bytes) -> pathlib.Path:
    path = folder / "a.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read_all(path: pathlib.Path) -> dict:
    with json_reader.JsonReader(path) as reader:
        found = {key: reader.read_value() for key in reader.read_keys()}
        reader.check_end()
    return found


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_values_are_those_of_json(tmp_path, block, indent, ascii_only):
    text = json.dumps(DOCUMENT, indent=indent, ensure_ascii=ascii_only)
    assert read_all(write(tmp_path, f"\ufeff {text}\n")) == DOCUMENT


def test_values_are_skipped(tmp_path, block):
    path = write(tmp_path, json.dumps(DOCUMENT))
    for wanted in DOCUMENT:
        found = {}
        with json_reader.JsonReader(path) as reader:
            for key in reader.read_keys():
                if key == wanted:
                    found[key] = reader.read_value()
                else:
                    reader.skip_value()
            reader.check_end()
        assert found == {wanted: DOCUMENT[wanted]}


def test_objects_are_entered(tmp_path, block):
    path = write(tmp_path, '{ "a" : { "b" : 1 , "c" : [ 2 ] } , "d" : { } }')
    found = []
    with json_reader.JsonReader(path) as reader:
        for outer in reader.read_keys():
            found.append(outer)
            found += [(key, reader.read_value()) for key in reader.read_keys()]
        reader.check_end()
    assert found == ["a", ("b", 1), ("c", [2]), "d"]


@pytest.mark.parametrize(
    ("text", "offset", "reason"),
    [
        ("", 0, "must have '{'. Found 'its end'."),
        ("[1]", 0, "must have '{'. Found '['."),
        ('{"a": 1', 7, "must have ',' or '}'. Found 'its end'."),
        ('{"a": [1, 2', 11, "must be whole. Found its end within a value."),
        ('{"a": "bcd', 10, "must be whole. Found its end within a value."),
        ('{"a": ', 6, "must be whole. Found its end."),
        ('{"a" 1}', 5, "must have ':'. Found '1'."),
        ('{"a": 1 "b": 2}', 8, "must have ',' or '}'. Found '\"'."),
        ('{"a": 1,}', 8, "must be JSON. Found Expecting value."),
        ('{"a": [1 2]}', 9, "must be JSON. Found Expecting ',' delimiter."),
        ('{"a": [1}}', 8, "must be JSON. Found Expecting ',' delimiter."),
        ('{"a": tru}', 6, "must be JSON. Found Expecting value."),
        ("{1: 2}", 2, "a key must be a string. Found 1."),
        ('{"a": 1} {', 9, "must end here. Found '{'."),
        ('{"a": ' + "[" * 9**5 + "]" * 9**5, 6, "must be JSON. Found maximum"),
        ('{"a": ' + "1" * 5000 + "}", 6, "must be JSON. Found Exceeds the limit"),
    ],
)
def test_damage_is_told_with_its_offset(tmp_path, text, offset, reason):
    path = write(tmp_path, text)
    with pytest.raises(json_reader.DamageError) as caught:
        read_all(path)
    assert caught.value.place == f"{path}, character {offset}"
    assert caught.value.reason.startswith(reason)


def test_damage_is_told_with_what_is_being_read(tmp_path):
    path = write(tmp_path, '{"a": [1')
    with json_reader.JsonReader(path) as reader:
        reader.within = "user 'u'"
        with pytest.raises(json_reader.DamageError, match="a.json, user 'u', char"):
            next(reader.read_keys())
            reader.read_value()


def test_what_comes_before_damage_is_read(tmp_path):
    data = gzip.compress(json.dumps({"a": 1, "b": list(range(9**5))}).encode())
    path = tmp_path / "a.json.gz"
    path.write_bytes(data[:-100])
    with json_reader.JsonReader(path) as reader:
        keys = reader.read_keys()
        assert (next(keys), reader.read_value(), next(keys)) == ("a", 1, "b")
        with pytest.raises(json_reader.DamageError, match="whole. Found EOFError"):
            reader.read_value()


@pytest.mark.parametrize("num_before", [0, 1, 6])
def test_bytes_that_are_not_utf8(tmp_path, block, num_before):
    text = '{"a": "' + "\u00e9" * num_before
    path = write(tmp_path, text.encode() + b'\xff"}')
    with pytest.raises(json_reader.DamageError) as caught:
        read_all(path)
    byte = 7 + 2 * num_before
    assert (
        caught.value.reason
        == f"must be UTF-8. Found invalid start byte at byte {byte}."
    )


def test_a_character_that_is_cut(tmp_path):
    path = write(tmp_path, b'{"a": "\xc3')
    with pytest.raises(
        json_reader.DamageError, match="unexpected end of data at byte 7"
    ):
        read_all(path)


def test_no_gz(tmp_path):
    path = tmp_path / "a.json.gz"
    path.write_text("{}")
    with pytest.raises(
        json_reader.DamageError, match="must be whole. Found BadGzipFile"
    ):
        read_all(path)


def test_no_file(tmp_path):
    with pytest.raises(json_reader.DamageError, match="must be readable"):
        json_reader.JsonReader(tmp_path / "a.json")


def test_a_value_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(json_reader, "_BLOCK_CHARACTERS", 2**10)
    monkeypatch.setattr(json_reader, "_MAX_VALUE_CHARACTERS", 2**12)
    path = write(tmp_path, '{"a": "' + "x" * 2**14)
    with pytest.raises(json_reader.DamageError, match="must have at most 4096 char"):
        read_all(path)
    assert read_all(write(tmp_path, '{"a": "xy"}')) == {"a": "xy"}


def test_skipping_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(json_reader, "_BLOCK_CHARACTERS", 2**14)
    path = write(tmp_path, json.dumps({"a": [["x" * 1000] * 10] * 400, "b": 2}))
    tracemalloc.start()
    try:
        with json_reader.JsonReader(path) as reader:
            keys = reader.read_keys()
            next(keys)
            reader.skip_value()
            assert (next(keys), reader.read_value()) == ("b", 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**18 < path.stat().st_size / 8
