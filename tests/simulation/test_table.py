"""Tests for tables: the same values give the same bytes, and come back."""

import numpy as np
import pytest

from simulation.table import Table, format_scalar


def test_csv_of_known_values():
    table = Table().append({"round": 1, "loss": 0.1, "text": "a, b", "missing": None})
    assert table.to_csv() == 'round,loss,text,missing\n1,0.1,"a, b",\n'


def test_round_trip_and_columns():
    table = Table()
    for number in range(3):
        table = table.append({"round": number, "value": 1 / (number + 3)})
    again = Table.from_csv(table.to_csv())
    assert again.to_csv() == table.to_csv()
    assert len(again) == 3
    assert [float(value) for value in again.read_column("value")] == [1 / 3, 1 / 4, 0.2]


def test_empty_table_round_trips():
    assert Table.from_csv(Table().to_csv()).columns == ()


def test_floats_keep_every_bit():
    value = np.float32(0.1)
    assert float(format_scalar(value)) == float(value)
    assert format_scalar(np.float64(0.1)) == "0.1"
    assert format_scalar(np.int32(3)) == "3"
    assert format_scalar(True) == "True"


def test_appending_leaves_the_table_as_it_was():
    table = Table().append({"round": 1})
    table.append({"round": 2})
    assert len(table) == 1


def test_other_columns_are_refused():
    with pytest.raises(ValueError, match="must have the columns"):
        Table().append({"a": 1}).append({"b": 1})


def test_a_torn_row_is_refused():
    with pytest.raises(ValueError, match="equally many fields"):
        Table.from_csv("a,b\n1,2\n3\n")
