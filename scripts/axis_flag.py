"""A flag whose value is a list: an axis of a grid."""

from collections.abc import Sequence
from typing import Any

from absl import flags


class _AxisParser(flags.ArgumentParser):
    """Parses values separated by commas; several, or one."""

    def __init__(self, item: flags.ArgumentParser) -> None:
        super().__init__()
        self.syntactic_help = "values separated by commas"
        self._item = item

    def parse(self, argument: str | Sequence[Any]) -> tuple[Any, ...]:
        """Returns the values; a ValueError from the item's parser names the item."""
        if not isinstance(argument, str):
            return tuple(argument)
        if not argument.strip():
            raise ValueError("must be values separated by commas. Found none.")
        return tuple(self._item.parse(part.strip()) for part in argument.split(","))

    def flag_type(self) -> str:
        """Returns the type's name in the help."""
        return f"list of {self._item.flag_type()}"


def define_axis(
    name: str,
    default: str | None,
    text: str,
    *,
    item: flags.ArgumentParser,
    values: flags.FlagValues,
) -> None:
    """Defines a flag whose value is a tuple.

    Args:
        name: The flag.
        default: Its default, as on the command line; None for unset.
        text: Its help.
        item: Parses one of the values.
        values: Where it is defined.
    """
    flags.DEFINE(
        _AxisParser(item),
        name,
        default,
        text,
        flag_values=values,
        serializer=flags.CsvListSerializer(","),
    )


def check_axis(name: str, values: tuple[Any, ...]) -> None:
    """Raises ValueError unless an axis has values, each of them once."""
    if not values:
        raise ValueError(f"`{name}` must hold at least one value. Found {values!r}.")
    if len(set(values)) < len(values):
        raise ValueError(f"`{name}` must hold each value once. Found {values!r}.")
