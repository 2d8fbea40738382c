"""A table of a run's rounds, written as CSV: the same rounds give the same bytes."""

import csv
import io
import numbers
from collections.abc import Mapping, Sequence

Scalar = str | bool | int | float | None


class Table:
    """Rows with the same columns, in the order of the first row."""

    def __init__(
        self, columns: Sequence[str] = (), rows: Sequence[Sequence[str]] = ()
    ) -> None:
        self._columns = tuple(columns)
        self._rows = tuple(tuple(row) for row in rows)

    @classmethod
    def from_csv(cls, text: str) -> "Table":
        """Reads what `to_csv` wrote.

        Raises:
            ValueError: If a row has another number of fields than the header.
        """
        lines = list(csv.reader(io.StringIO(text)))
        if not lines:
            return cls()
        if any(len(line) != len(lines[0]) for line in lines):
            raise ValueError("`text` must have equally many fields in every row.")
        return cls(lines[0], lines[1:])

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns; empty before the first row."""
        return self._columns

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, row: Mapping[str, Scalar]) -> "Table":
        """Returns the table with one more row.

        Raises:
            ValueError: If the row's columns are not the table's.
        """
        columns = tuple(row)
        if self._rows and columns != self._columns:
            raise ValueError(
                f"`row` must have the columns {self._columns}. Found {columns}."
            )
        fields = tuple(format_scalar(value) for value in row.values())
        return Table(columns, (*self._rows, fields))

    def read_column(self, name: str) -> list[str]:
        """Returns one column's fields, as they are in the CSV."""
        index = self._columns.index(name)
        return [row[index] for row in self._rows]

    def to_csv(self) -> str:
        """Returns the table as CSV, with a header unless there is no column."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        if self._columns:
            writer.writerow(self._columns)
            writer.writerows(self._rows)
        return buffer.getvalue()


def format_scalar(value: Scalar) -> str:
    """Returns a value as a field: floats in full precision, None empty."""
    if value is None:
        return ""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, numbers.Integral):
        return str(int(value))
    return repr(float(value))
