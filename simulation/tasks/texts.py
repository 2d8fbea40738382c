"""Stack Overflow and any other Stack Exchange site, and Sent140."""

import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_federated as tff

from simulation import text_models
from simulation.population import layout as layouts
from simulation.population.federated_data import DataError, Examples
from simulation.population.sql_data import SqlData
from simulation.sources.source import Feature, Kind
from simulation.tasks import stored
from simulation.tasks.options import TaskOptions
from simulation.tasks.task import Task

VOCABULARY_SIZE, NUM_TAGS = 10_000, 500
# Reddi et al. 2021 and the distributed-DP experiments.
_SENTENCE_LENGTH, _MAX_EXAMPLES, _EVAL_EXAMPLES = 20, 256, 10_000
_BAG_LENGTH = 100
_TWEET_LENGTH = 25
_TEXT = Feature(kind=Kind.BYTES)
_STACK_EXCHANGE_COMMAND = (
    "python -m scripts.prepare_data --format=stack_exchange --input=Posts.xml"
)
_SENT140_COMMAND = (
    "python -m scripts.prepare_data --format=leaf --leaf_dataset=sent140 "
    "--input=<folder all_data>"
)


def describe_vocabulary(words: Sequence[str], what: str = "words") -> str:
    """Returns what a privacy statement leaves out where these were counted."""
    return (
        f"the {len(words):,} {what} of the vocabulary, which were counted on the "
        "training examples themselves and are taken for public"
    )


def build_stackoverflow_word(options: TaskOptions) -> Task:
    """Returns the task `stackoverflow_word`: the next word of a sentence."""
    name = "stackoverflow_word"
    options.check_taken(name, "synthetic_data", "data_name", "vocabulary_size")
    words = _Words(options)
    decode = functools.partial(
        decode_sentences, ids=words.ids, sequence_length=_SENTENCE_LENGTH
    )
    return words.build_task(
        name,
        what="next word of sentences",
        features={"tokens": _TEXT},
        decode=decode,
        models={
            "lstm": functools.partial(
                text_models.build_next_word_lstm, len(words.ids), _SENTENCE_LENGTH
            )
        },
        metric="accuracy",
        caveats=(words.caveat,),
    )


def build_stackoverflow_tag(options: TaskOptions) -> Task:
    """Returns the task `stackoverflow_tag`: the tags of a question or answer."""
    name = "stackoverflow_tag"
    options.check_taken(name, "synthetic_data", "data_name", "vocabulary_size")
    words = _Words(options)
    tags = words.read_tags()
    decode = functools.partial(
        decode_bags, ids=words.ids, tags=tags, sequence_length=_BAG_LENGTH
    )
    return words.build_task(
        name,
        what=f"{len(tags)} tags of sentences and their titles",
        features={"tokens": _TEXT, "title": _TEXT, "tags": _TEXT},
        decode=decode,
        models={
            "logistic_regression": functools.partial(
                text_models.build_tag_regression,
                len(words.ids),
                len(tags),
                sequence_length=_BAG_LENGTH,
            )
        },
        metric="recall_at_5",
        caveats=(words.caveat, describe_vocabulary(tags, "tags")),
    )


def build_sent140(options: TaskOptions) -> Task:
    """Returns the task `sent140`: whether a tweet is positive."""
    options.check_taken("sent140", "data_name", "vocabulary_size", "embedding_file")
    layout = layouts.rename(layouts.PLAIN, options.data_name or "sent140")
    path = stored.find_file(options, layout, fetch=None, command=_SENT140_COMMAND)
    identity = stored.identify(path)
    size = options.vocabulary_size or VOCABULARY_SIZE
    embedding: np.ndarray | None = None
    caveats: tuple[str, ...] = ()
    if options.embedding_file is not None:
        words, embedding = read_embedding(options.embedding_file, size)
        identity["embedding"] = _digest(embedding.tobytes())
        identity["vocabulary"] = digest_words(words)
        how = f"vectors of {len(words):,} words from {options.embedding_file}"
    else:
        words = read_words(path.with_name(layout.name_count_file("tokens")), size)
        identity["vocabulary"] = digest_words(words)
        caveats = (describe_vocabulary(words),)
        how = f"learned vectors of {len(words):,} words"
    ids = {word: index + 1 for index, word in enumerate(words)}
    decode = functools.partial(
        decode_labelled, ids=ids, sequence_length=_TWEET_LENGTH, feature="tokens"
    )
    features = {"tokens": _TEXT, "label": Feature(kind=Kind.INT64)}
    train, test = (
        SqlData(path=path, split=split, features=features, decode=decode)
        for split in ("train", "test")
    )
    return Task(
        name="sent140",
        description=(
            f"the sentiment of tweets from {stored.describe(path, layout)}; {how}"
        ),
        train=stored.hold(train, options),
        test=stored.hold(test, options),
        has_test_users=True,
        models={
            "lstm": functools.partial(
                text_models.build_sentiment_lstm,
                len(words),
                _TWEET_LENGTH,
                embedding=embedding,
            )
        },
        metric="accuracy",
        identity=identity,
        caveats=caveats,
    )


class _Words:
    """The sentences of a site, and the vocabulary of its words."""

    def __init__(self, options: TaskOptions) -> None:
        self._options = options
        self._path: pathlib.Path | None = None
        self._layout = layouts.rename(layouts.STACKOVERFLOW, options.data_name)
        self._datasets = tff.simulation.datasets.stackoverflow
        size = options.vocabulary_size or VOCABULARY_SIZE
        if options.synthetic_data:
            words = list(self._datasets.get_synthetic_word_counts())[:size]
        else:
            self._path = stored.find_file(
                options,
                self._layout,
                fetch=lambda folder: self._datasets.load_data(cache_dir=folder),
                command=_STACK_EXCHANGE_COMMAND,
            )
            words = read_words(self._find_counts("tokens"), size)
        self.ids = {word: index + 1 for index, word in enumerate(words)}
        self._digest = digest_words(words)
        self.caveat = describe_vocabulary(words)

    def read_tags(self) -> list[str]:
        """Returns the most frequent tags."""
        if self._path is None:
            return list(self._datasets.get_synthetic_tag_counts())[:NUM_TAGS]
        return read_tags(self._find_counts("tags"), NUM_TAGS)

    def build_task(
        self,
        name: str,
        *,
        what: str,
        features: Mapping[str, Feature],
        decode: Callable[[Mapping[str, np.ndarray]], Examples],
        **fields: Any,
    ) -> Task:
        """Returns a task on the sentences."""
        if self._path is None:
            tiny = self._datasets.get_synthetic()
            return stored.build_tiny_task(name, tiny, decode, **fields)
        train, validation, test = (
            SqlData(
                path=self._path,
                split=split,
                features=features,
                decode=decode,
                max_examples=_MAX_EXAMPLES if split == "train" else None,
            )
            for split in ("train", "heldout", "test")
        )
        return Task(
            name=name,
            description=(
                f"{what} from {stored.describe(self._path, self._layout)}, "
                f"vocabulary of {len(self.ids):,} words, of a user the first "
                f"{_MAX_EXAMPLES} sentences"
            ),
            train=stored.hold(train, self._options),
            validation=validation,
            test=stored.hold(test, self._options),
            has_test_users=True,
            eval_examples=_EVAL_EXAMPLES,
            identity={
                **stored.identify(self._path),
                "vocabulary": self._digest,
            },
            **fields,
        )

    def _find_counts(self, feature: str) -> pathlib.Path:
        """Returns the file with the counts: ours beside the data, or TFF's."""
        assert self._path is not None
        name = self._layout.name_count_file(feature)
        # TFF's archives are unpacked there.
        for folder in (self._path.parent, self._path.parent / "datasets"):
            if (folder / name).is_file():
                return folder / name
        fetched = self._path.parent / "datasets" / name
        load = {
            "tokens": self._datasets.load_word_counts,
            "tags": self._datasets.load_tag_counts,
        }[feature]
        named, why = "", "TFF has no such counts to fetch"
        if self._options.data_name is not None:
            named = f" --name={self._options.data_name}"
        else:
            try:
                with stored.short_timeout():
                    load(cache_dir=str(self._path.parent))
                if fetched.is_file():
                    return fetched
                why = "Keras put what it fetched elsewhere"
            # Keras raises a bare Exception where it cannot fetch.
            except Exception as error:
                why = f"it cannot be fetched: {error}"
        raise DataError(
            f"`data_dir` must hold {name} beside {self._path.name}. Found none in "
            f"{self._path.parent}, and {why}. Make both with: "
            f"{_STACK_EXCHANGE_COMMAND}{named}"
        )


def read_words(path: pathlib.Path, size: int) -> list[str]:
    """Returns the most frequent words of a file of lines "word count".

    Raises:
        DataError: If there is no such file, or a line is of another form.
    """
    # A set that keeps the order. Ids count the words, so that none may come twice.
    words: dict[str, None] = {}
    # Not `splitlines`: a word may hold what that takes for the end of a line.
    lines = _read_text(path).removesuffix("\n").split("\n")
    for number, line in enumerate(lines[:size], 1):
        if lines == [""]:
            raise DataError(f"{path} must have words. Found none.")
        word, _, count = line.rpartition(" ")
        if not word or not count.isdecimal():
            raise DataError(
                f"{path}, line {number} must be a word and its count. Found {line!r}."
            )
        if word in words:
            raise DataError(
                f"{path}, line {number} must have another word. Found {word!r} twice."
            )
        words[word] = None
    return list(words)


def read_tags(path: pathlib.Path, size: int) -> list[str]:
    """Returns the most frequent tags of a JSON object of counts.

    Raises:
        DataError: If there is no such file, or it is of another form.
    """
    try:
        counts = dict(json.loads(_read_text(path)))
        ranked = sorted(counts, key=lambda tag: (-counts[tag], tag))
    except (TypeError, ValueError) as error:
        raise DataError(f"{path} must be a JSON object of counts: {error}.") from error
    if not ranked:
        raise DataError(f"{path} must have tags. Found none.")
    return ranked[:size]


def read_embedding(path: pathlib.Path, size: int) -> tuple[list[str], np.ndarray]:
    """Returns the first words of a file of vectors, and the vectors of all ids.

    Args:
        path: Lines of a word and its numbers, divided by spaces, as GloVe's. Of a word
            that comes twice the first line counts.
        size: The most words.

    Returns:
        The words, and float32[len(words) + 2, dimension]: zeros for padding first, and
        last, for other words, the mean.

    Raises:
        DataError: If there is no such file, or a line is of another form.
    """
    words: dict[str, None] = {}
    rows: list[np.ndarray] = []
    number = 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if len(words) == size:
                    break
                word, *numbers = line.rstrip("\n").split(" ")
                vector = np.array(numbers, np.float32)
                wrong = not len(vector) or not np.all(np.isfinite(vector))
                if wrong or (rows and len(vector) != len(rows[0])):
                    raise DataError(
                        f"{path}, line {number} must be a word and as many finite "
                        f"numbers as the other lines have. Found {len(vector)}."
                    )
                if word not in words:
                    words[word] = None
                    rows.append(vector)
    except OSError as error:
        raise DataError(
            f"`embedding_file` must be readable. Found {path}: {error.strerror}."
        ) from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        # What cannot be decoded is in the block after the last line that was read.
        after = " or later" if isinstance(error, UnicodeDecodeError) else ""
        raise DataError(f"{path}, line {number}{after}: {error}.") from error
    if not rows:
        raise DataError(f"{path} must have words. Found none.")
    matrix = np.stack(rows)
    table = np.concatenate([np.zeros_like(matrix[:1]), matrix, [matrix.mean(0)]])
    return list(words), table


def decode_sentences(
    features: Mapping[str, np.ndarray], *, ids: Mapping[str, int], sequence_length: int
) -> Examples:
    """Returns x and y of next-word prediction, int32[n, sequence_length].

    As TFF's preprocessing: the sentence is cut to `sequence_length` words, an end is
    put behind it where there is room, the beginning before it, and y is x one word
    later. Ids are 0 for padding, V + 1 for other words, V + 2 the beginning, V + 3 the
    end.
    """
    other, beginning, end = (len(ids) + extra for extra in (1, 2, 3))
    table = np.zeros([len(features["tokens"]), sequence_length + 1], np.int32)
    for row, sentence in zip(table, features["tokens"], strict=True):
        found = [ids.get(word, other) for word in _split(sentence)[:sequence_length]]
        found = [beginning, *found, end][: sequence_length + 1]
        row[: len(found)] = found
    return table[:, :-1], table[:, 1:]


def decode_bags(
    features: Mapping[str, np.ndarray],
    *,
    ids: Mapping[str, int],
    tags: Sequence[str],
    sequence_length: int,
) -> Examples:
    """Returns the ids of an example's words and title, and which tags it has.

    Words that are not in the vocabulary are left out, as in TFF's preprocessing.

    Returns:
        int32[n, sequence_length] with 0 behind the ids, and float32[n, len(tags)].
    """
    positions = {tag: index for index, tag in enumerate(tags)}
    x = np.zeros([len(features["tokens"]), sequence_length], np.int32)
    y = np.zeros([len(x), len(tags)], np.float32)
    columns = (features[name] for name in ("tokens", "title", "tags"))
    for row, (tokens, title, tagged) in enumerate(zip(*columns, strict=True)):
        words = _split(tokens) + _split(title)
        known = [ids[word] for word in words if word in ids][:sequence_length]
        x[row, : len(known)] = known
        found = (positions.get(tag) for tag in tagged.decode("utf-8").split("|"))
        y[row, [index for index in found if index is not None]] = 1.0
    return x, y


def decode_labelled(
    features: Mapping[str, np.ndarray],
    *,
    ids: Mapping[str, int],
    sequence_length: int,
    feature: str,
) -> Examples:
    """Returns the ids of sentences, int32[n, sequence_length], and labels, int32[n]."""
    x = np.zeros([len(features[feature]), sequence_length], np.int32)
    for row, sentence in zip(x, features[feature], strict=True):
        words = _split(sentence)[:sequence_length]
        row[: len(words)] = [ids.get(word, len(ids) + 1) for word in words]
    return x, features["label"].astype(np.int32)


def digest_words(words: Sequence[str]) -> str:
    """Returns what tells a vocabulary from another."""
    return _digest("\n".join(words).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _split(text: bytes) -> list[str]:
    return text.decode("utf-8").split()


def _read_text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} must be readable text. Found {error}.") from error
