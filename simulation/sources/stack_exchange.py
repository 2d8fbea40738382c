"""Sentences of Stack Exchange posts, as a data dump has them in its `Posts.xml`.

The features are those of TFF's Stack Overflow data (`load_data` documents them).
"""

import bz2
import contextlib
import dataclasses
import datetime
import gzip
import html
import importlib
import importlib.util
import io
import lzma
import pathlib
import re
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from xml.parsers import expat

from simulation.sources import sentence
from simulation.sources.source import (
    TEST,
    TRAIN,
    VALIDATION,
    Feature,
    Kind,
    OnBad,
    Record,
    Source,
    SourceError,
    Value,
)

_QUESTION, _ANSWER = "1", "2"
_POSTS = "Posts.xml"
_BLOCK_BYTES = 2**16
# A post has at most 30,000 characters; more than this is no dump.
_MAX_ROW_BYTES = 2**24
_UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)

_INTEGER = re.compile(r"-?[0-9]{1,18}")
_ANGLE_TAGS = re.compile(r"(?:<[^<>|]+>)*")
_BAR_TAGS = re.compile(r"\|(?:[^<>|]+\|)+")
_TAG = re.compile(r"[^<>|]+")


class StackExchangeSource(Source):
    """Sentences of the questions and answers of one `Posts.xml`.

    A user's id is `OwnerUserId`. An answer has its question's title and tags, both
    empty where the question isn't in the dump; its score and date are its own. Titles
    are tokenised like bodies, tags are as in the dump. Code is left out.

    The memory is bounded: what is known of the questions lies in a temporary SQLite
    database, and a .7z is unpacked into a temporary folder.

    Not guaranteed: that sentences are divided as in TFF's data; its rule is not public.
    """

    def __init__(
        self, *, path: pathlib.Path | str, test_from: str | None = None
    ) -> None:
        """Checks that the file is there and can be unpacked.

        Args:
            path: `Posts.xml`, also as .gz, .xz or .bz2, or a .7z that has it.
            test_from: None divides by user: VALIDATION where the id % 10 is 0, TEST
                where it is 1, else TRAIN. An ISO date divides as TFF does: VALIDATION
                where the id % 10 is 0, else TRAIN before the date (UTC) and TEST from
                it on.

        Raises:
            SourceError: If there is no such file, or py7zr is needed and not installed.
            ValueError: If the date is none.
        """
        self._path = pathlib.Path(path)
        self._test_from = None
        if test_from is not None:
            try:
                self._test_from = _parse_date(test_from)
            except (ValueError, OverflowError):
                raise ValueError(
                    "`test_from` must be an ISO date, as 2018-01-01, or None. "
                    f"Found {test_from!r}."
                ) from None
        if not self._path.is_file():
            raise SourceError(str(self._path), "must be a file. Found none.")
        if _is_archive(self._path) and importlib.util.find_spec("py7zr") is None:
            raise SourceError(
                str(self._path),
                f"reading a .7z needs py7zr. Install py7zr, or unpack {_POSTS}.",
            )
        self._num_without_owner = 0

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        return (self._path,)

    @property
    def features(self) -> Mapping[str, Feature]:
        return {
            "creation_date": Feature(kind=Kind.BYTES),
            "score": Feature(kind=Kind.INT64),
            "tags": Feature(kind=Kind.BYTES),
            "title": Feature(kind=Kind.BYTES),
            "tokens": Feature(kind=Kind.BYTES),
            "type": Feature(kind=Kind.BYTES),
        }

    @property
    def separators(self) -> Mapping[str, str]:
        return {"tokens": " ", "tags": "|"}

    @property
    def num_without_owner(self) -> int:
        """Questions and answers that the latest `read` left out: nobody's."""
        return self._num_without_owner

    def read(self, on_bad: OnBad) -> Iterator[Record]:
        self._num_without_owner = 0
        with contextlib.ExitStack() as stack:
            try:
                path = stack.enter_context(_unpack(self._path))
            except SourceError as error:
                on_bad(error)
                return
            dump = _Dump(path=path, name=str(self._path))
            questions = stack.enter_context(contextlib.closing(_Questions(dump)))
            for row in _read_rows(dump, on_bad):
                try:
                    records = self._read_post(row, questions)
                except SourceError as error:
                    on_bad(error)
                    continue
                yield from records

    def _read_post(self, row: "_Row", questions: "_Questions") -> list[Record]:
        """Returns a row's sentences; remembers a question."""
        row.get_integer("Id")
        kind = row.get("PostTypeId")
        if kind == _QUESTION:
            tags, title = questions.add(row)
        elif kind != _ANSWER:
            return []
        owner = row.attributes.get("OwnerUserId")
        if owner is None:
            self._num_without_owner += 1
            return []
        user = row.get_integer("OwnerUserId")
        date = row.get_date("CreationDate")
        score = row.get_integer("Score")
        body = row.get("Body")
        if kind == _ANSWER:
            tags, title = questions.find(row.get_integer("ParentId"))
        try:
            sentences = sentence.extract_sentences(body)
        except ValueError as error:
            raise SourceError(row.place, f"`Body`: {error}") from None
        shared: dict[str, Value] = {
            "creation_date": _format_date(date).encode(),
            "score": score,
            "tags": tags,
            "title": title,
            "type": b"question" if kind == _QUESTION else b"answer",
        }
        split = self._choose_split(user, date)
        return [
            Record(
                client_id=str(user),
                features={**shared, "tokens": " ".join(tokens).encode()},
                place=row.place,
                split=split,
            )
            for tokens in sentences
        ]

    def _choose_split(self, user: int, date: datetime.datetime) -> str:
        if user % 10 == 0:
            return VALIDATION
        if self._test_from is None:
            return TEST if user % 10 == 1 else TRAIN
        return TRAIN if date < self._test_from else TEST


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Dump:
    """A file that needs no unpacking but its own compression, and its name."""

    path: pathlib.Path
    name: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A row of a dump."""

    attributes: Mapping[str, str]
    name: str
    line: int

    @property
    def place(self) -> str:
        place = f"{self.name}, line {self.line}"
        row_id = self.attributes.get("Id")
        return place if row_id is None else f"{place}, row Id={row_id}"

    def get(self, attribute: str) -> str:
        value = self.attributes.get(attribute)
        if value is None:
            raise SourceError(
                self.place,
                f"a post must have `{attribute}`. Found {', '.join(self.attributes)}.",
            )
        return value

    def get_integer(self, attribute: str) -> int:
        value = self.get(attribute)
        if not _INTEGER.fullmatch(value):
            raise SourceError(
                self.place, f"`{attribute}` must be an integer. Found {value!r}."
            )
        return int(value)

    def get_date(self, attribute: str) -> datetime.datetime:
        value = self.get(attribute)
        try:
            return _parse_date(value)
        except (ValueError, OverflowError):
            raise SourceError(
                self.place, f"`{attribute}` must be an ISO date. Found {value!r}."
            ) from None

    def get_tags(self) -> bytes:
        value = self.attributes.get("Tags", "")
        if not _ANGLE_TAGS.fullmatch(value) and not _BAR_TAGS.fullmatch(value):
            raise SourceError(
                self.place, f"`Tags` must be <a><b> or |a|b|. Found {value!r}."
            )
        return "|".join(_TAG.findall(value)).encode()


class _Questions:
    """The tags and titles of the questions, by their ids.

    The first question of an id counts. A parent that hasn't come yet is looked for in
    the rest of the dump, once.
    """

    def __init__(self, dump: _Dump) -> None:
        self._dump = dump
        self._complete = False
        # With an empty name SQLite keeps it in memory while it is small, then on disk.
        self._database = sqlite3.connect(
            "", isolation_level=None, check_same_thread=False
        )
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute(
            "CREATE TABLE questions (id INTEGER PRIMARY KEY, tags BLOB, title BLOB)"
        )
        self._database.execute("BEGIN")

    def add(self, row: _Row) -> tuple[bytes, bytes]:
        """Remembers a question; returns its tags and title."""
        title = html.unescape(row.attributes.get("Title", ""))
        found = row.get_tags(), " ".join(sentence.tokenize(title)).encode()
        self._database.execute(
            "INSERT OR IGNORE INTO questions VALUES (?, ?, ?)",
            (row.get_integer("Id"), *found),
        )
        return found

    def find(self, question_id: int) -> tuple[bytes, bytes]:
        """Returns the tags and title of a question; empty where there is none."""
        found = self._select(question_id)
        if found is None and not self._complete:
            # What is wrong there is told when the reading gets to it.
            for row in _read_rows(self._dump, on_bad=lambda error: None):
                if row.attributes.get("PostTypeId") == _QUESTION:
                    with contextlib.suppress(SourceError):
                        self.add(row)
            self._complete = True
            found = self._select(question_id)
        return (b"", b"") if found is None else found

    def close(self) -> None:
        self._database.close()

    def _select(self, question_id: int) -> tuple[bytes, bytes] | None:
        query = "SELECT tags, title FROM questions WHERE id = ?"
        return self._database.execute(query, (question_id,)).fetchone()


class _RowParser:
    """Finds the rows of a dump in its bytes. Refuses a document type.

    It is expat itself and not ElementTree, which hides lines and declarations. Without
    a document type there are no entities that could grow.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._rows: list[_Row] = []
        self._bad: list[SourceError] = []
        self._depth = 0
        self._num_bytes = 0
        self._parser = expat.ParserCreate()
        self._parser.StartDoctypeDeclHandler = self._refuse
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end

    @property
    def line(self) -> int:
        """The line that was reached."""
        return self._parser.CurrentLineNumber

    def feed(self, block: bytes) -> None:
        """Reads on; an empty block is the end. What it found is taken with `take`.

        Raises:
            SourceError: If the file is not the dump of a site's posts.
        """
        self._num_bytes += len(block)
        try:
            self._parser.Parse(block, not block)
        except expat.ExpatError as error:
            raise SourceError(
                f"{self._name}, line {error.lineno}",
                f"must be well-formed XML. Found {expat.ErrorString(error.code)}.",
            ) from None
        except (LookupError, ValueError) as error:
            if isinstance(error, SourceError):
                raise
            raise SourceError(
                f"{self._name}, line {self.line}", f"must be XML. Found {error}."
            ) from None
        if self._num_bytes - max(self._parser.CurrentByteIndex, 0) > _MAX_ROW_BYTES:
            raise SourceError(
                f"{self._name}, line {self.line}",
                f"a row must have at most {_MAX_ROW_BYTES} bytes. Found more.",
            )

    def take(self) -> tuple[list[_Row], list[SourceError]]:
        """Returns the rows and the bad elements since the last time."""
        rows, self._rows = self._rows, []
        bad, self._bad = self._bad, []
        return rows, bad

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        place = f"{self._name}, line {self.line}"
        if self._depth == 1 and tag != "posts":
            raise SourceError(place, f"the root must be <posts>. Found <{tag}>.")
        if self._depth == 2 and tag == "row":
            self._rows.append(
                _Row(attributes=attributes, name=self._name, line=self.line)
            )
        elif self._depth > 1:
            self._bad.append(
                SourceError(place, f"<posts> must have rows alone. Found <{tag}>.")
            )

    def _end(self, tag: str) -> None:
        self._depth -= 1

    def _refuse(self, name: str, *_: object) -> None:
        raise SourceError(
            f"{self._name}, line {self.line}",
            f"must have no document type: it could define entities. Found {name!r}.",
        )


def _read_rows(dump: _Dump, on_bad: OnBad) -> Iterator[_Row]:
    """Yields the rows of a dump up to where it is damaged."""
    parser = _RowParser(dump.name)
    try:
        file = _open(dump.path)
    except OSError as error:
        on_bad(SourceError(dump.name, f"must be readable. Found {error}."))
        return
    with file:
        while True:
            damage, block = None, b""
            try:
                block = file.read1(_BLOCK_BYTES)
                parser.feed(block)
            except SourceError as error:
                damage = error
            except _UNREADABLE as error:
                damage = SourceError(
                    f"{dump.name}, line {parser.line}",
                    f"must be whole. Found {type(error).__name__}: {error}.",
                )
            rows, bad = parser.take()
            yield from rows
            for reason in bad:
                on_bad(reason)
            if damage is not None:
                on_bad(damage)
            if damage is not None or not block:
                return


def _open(
    path: pathlib.Path,
) -> io.BufferedReader | gzip.GzipFile | lzma.LZMAFile | bz2.BZ2File:
    """Returns a file whose `read1` gives what there is before it fails."""
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path)
        case ".xz":
            return lzma.open(path)
        case ".bz2":
            return bz2.open(path)
    return path.open("rb")


def _is_archive(path: pathlib.Path) -> bool:
    return path.suffix.lower() == ".7z"


@contextlib.contextmanager
def _unpack(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a dump's file; one of a .7z lies in a temporary folder meanwhile.

    Raises:
        SourceError: If the archive cannot be read or has no `Posts.xml`.
    """
    if not _is_archive(path):
        yield path
        return
    py7zr = importlib.import_module("py7zr")
    with tempfile.TemporaryDirectory() as folder:
        try:
            with py7zr.SevenZipFile(path) as archive:
                names = archive.getnames()
                found = [n for n in names if pathlib.PurePosixPath(n).name == _POSTS]
                if len(found) != 1:
                    raise SourceError(
                        str(path), f"must have one {_POSTS}. Found {len(found)}."
                    )
                archive.extract(path=folder, targets=found)
        except (
            py7zr.exceptions.ArchiveError,
            py7zr.exceptions.AbsolutePathError,
            py7zr.exceptions.PasswordRequired,
            *_UNREADABLE,
        ) as error:
            raise SourceError(
                str(path),
                f"must be a whole .7z. Found {type(error).__name__}: {error}.",
            ) from error
        yield pathlib.Path(folder, found[0])


def _parse_date(text: str) -> datetime.datetime:
    """Returns an ISO date in UTC, without a zone."""
    date = datetime.datetime.fromisoformat(text)
    if date.tzinfo is not None:
        date = date.astimezone(datetime.UTC).replace(tzinfo=None)
    return date


def _format_date(date: datetime.datetime) -> str:
    """Returns a date as TFF's data has it, as 2008-08-10 08:28:52.1 UTC."""
    text = date.isoformat(sep=" ")
    return (text.rstrip("0") if date.microsecond else text) + " UTC"
