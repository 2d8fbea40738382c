"""JSON documents of any size, read a value at a time."""

import codecs
import gzip
import io
import json
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import Any, NoReturn, Self

from simulation.sources.source import SourceError

_BLOCK_CHARACTERS = 2**20
_MAX_VALUE_CHARACTERS = 2**26
_SPACES = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r'[^\s,:"\[\]{}]*')
# A string, a quotation mark of a string that doesn't end here, or a bracket.
_MARK = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)


class DamageError(SourceError):
    """What is left of a file cannot be read."""


class JsonReader:
    """Reads a JSON document, plain or .gz, a value at a time.

    Every method raises a `DamageError` where the document is no JSON, ends early or is
    no UTF-8; what came before has been read by then. The memory holds one value, which
    may have 2**26 characters. A context that closes the file.

    Attributes:
        within: What is being read, for messages.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.within: str | None = None
        self._name = str(path)
        self._text = ""
        # Of the text, where the next value stands; how many characters came before it.
        self._position = 0
        self._num_before = 0
        self._num_bytes = 0
        self._damage: str | None = None
        self._ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        try:
            self._file: io.BufferedReader | gzip.GzipFile = (
                gzip.open(path) if path.suffix == ".gz" else path.open("rb")
            )
        except OSError as error:
            self._fail(f"must be readable. Found {error}.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read_keys(self) -> Iterator[str]:
        """Yields an object's keys; behind each the value is to be read or skipped."""
        self._take("{")
        if self._peek() == "}":
            self._position += 1
            return
        while True:
            key = self.read_value()
            if not isinstance(key, str):
                self._fail(f"a key must be a string. Found {key!r:.60}.")
            self._take(":")
            yield key
            if self._take(",}") == "}":
                return

    def read_value(self) -> Any:
        """Returns the next value."""
        length = self._measure(keep=True)
        text = self._text[self._position : self._position + length]
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            self._position += error.pos
            self._fail(f"must be JSON. Found {error.msg}.")
        except (RecursionError, ValueError) as error:
            self._fail(f"must be JSON. Found {error}.")
        self._position += length
        return value

    def skip_value(self) -> None:
        """Passes over the next value, of any length."""
        length = self._measure(keep=False)
        self._position += length

    def check_end(self) -> None:
        """Checks that nothing follows."""
        if self._peek():
            self._fail(f"must end here. Found {self._peek()!r}.")

    def _measure(self, *, keep: bool) -> int:
        """Returns the next value's length; forgets its beginning unless it is kept."""
        first = self._peek()
        if not first:
            self._fail("must be whole. Found its end.")
        if first not in '"[{':
            return self._measure_scalar()
        depth = length = 0
        while True:
            for mark in _MARK.finditer(self._text, self._position + length):
                char = self._text[mark.start()]
                if char == '"' and mark.end() == mark.start() + 1:
                    break
                length = mark.end() - self._position
                depth += (char in "[{") - (char in "]}")
                if depth <= 0:
                    return length
            else:
                length = len(self._text) - self._position
            if not keep:
                self._position += length
                length = 0
            if not self._fill():
                self._position = len(self._text)
                self._fail("must be whole. Found its end within a value.")

    def _measure_scalar(self) -> int:
        while True:
            match = _SCALAR.match(self._text, self._position)
            length = match.end() - self._position if match else 0
            if self._position + length < len(self._text) or not self._fill():
                return length

    def _peek(self) -> str:
        """Returns the next character that is no space; none at the end."""
        while True:
            match = _SPACES.match(self._text, self._position)
            self._position = match.end() if match else self._position
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._fill():
                return ""

    def _take(self, chars: str) -> str:
        char = self._peek()
        if not char or char not in chars:
            expected = " or ".join(repr(char) for char in chars)
            self._fail(f"must have {expected}. Found {char or 'its end'!r}.")
        self._position += 1
        return char

    def _fill(self) -> bool:
        """Reads a block more, forgets what was read. False at the end of the file.

        Damage is told when what comes before it has been read.
        """
        self._num_before += self._position
        pieces = [self._text[self._position :]]
        self._position = 0
        num_kept = num_read = len(pieces[0])
        if num_kept > _MAX_VALUE_CHARACTERS:
            self._fail(f"a value must have at most {_MAX_VALUE_CHARACTERS} characters.")
        while num_read < num_kept + _BLOCK_CHARACTERS and not self._ended:
            pieces.append(self._read_block())
            num_read += len(pieces[-1])
        self._text = "".join(pieces)
        if num_read == num_kept and self._damage is not None:
            self._fail(self._damage)
        return num_read > num_kept

    def _read_block(self) -> str:
        num_pending = len(self._decoder.getstate()[0])
        try:
            block = self._file.read1(_BLOCK_CHARACTERS)
            self._ended = not block
            text = self._decoder.decode(block, final=self._ended)
            self._num_bytes += len(block)
            return text
        except UnicodeDecodeError as error:
            byte = self._num_bytes - num_pending + error.start
            self._damage = f"must be UTF-8. Found {error.reason} at byte {byte}."
            text = error.object[: error.start].decode()
        except (OSError, EOFError, zlib.error) as error:
            self._damage = f"must be whole. Found {type(error).__name__}: {error}."
            text = ""
        self._ended = True
        return text

    def _fail(self, reason: str) -> NoReturn:
        within = "" if self.within is None else f", {self.within}"
        offset = self._num_before + self._position
        raise DamageError(f"{self._name}{within}, character {offset}", reason)
