"""Small dumps as Stack Exchange writes them, and what is read of them."""

import pathlib
from xml.sax import saxutils

from simulation.sources import source, stack_exchange


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
