"""Lines of names and values, as the programs' first and last ones are."""

from collections.abc import Mapping

_WIDTH = 12


def format_fields(fields: Mapping[str, str]) -> str:
    """Returns a line for each name, the values in one column, their lines indented."""
    rows = []
    for name, text in fields.items():
        first, *rest = text.split("\n")
        rows.append(f"{name:<{_WIDTH}}{first}")
        rows.extend(" " * _WIDTH + line for line in rest)
    return "\n".join(rows)
