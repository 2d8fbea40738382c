"""Tests for text: against TFF's preprocessing, by hand, and of real files."""

import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_federated.python.simulation.baselines.stackoverflow import (
    tag_prediction_preprocessing,
    word_prediction_preprocessing,
)

from simulation.population import layout
from simulation.population.federated_data import DataError
from simulation.sources import leaf, stack_exchange
from simulation.sources.source import TEST, TRAIN, VALIDATION
from simulation.tasks import TaskOptions, load_task, texts
from tests.simulation.tasks import files

_REAL = pathlib.Path(__file__).parents[4] / "shared" / "data"
POSTS = files.draw_posts()
VOCABULARY = ["the", "cat", "sat", "."]
SPLITS = {TRAIN: 0, VALIDATION: 1, TEST: 2}


@pytest.fixture
def load(data_dir):
    return lambda name, **options: load_task(
        name, TaskOptions(data_dir=data_dir, **options)
    )


def number(words) -> dict[str, int]:
    return {word: index + 1 for index, word in enumerate(words)}


def count_words(rows) -> dict[str, int]:
    """Returns the counts of the training sentences."""
    counts: dict[str, int] = {}
    for _, split, features in rows:
        if split == TRAIN:
            for word in features["tokens"].decode().split():
                counts[word] = counts.get(word, 0) + 1
    return counts


def rank(counts) -> list[str]:
    return [word for word, _ in sorted(counts.items(), key=lambda x: (-x[1], x[0]))]


def convert_with_tff(dataset, words, *, length=20):
    """Returns x and y of TFF's next-word preprocessing."""
    to_ids = word_prediction_preprocessing.build_to_ids_fn(words, length)
    batches = word_prediction_preprocessing.batch_and_split(
        dataset.map(to_ids), length, 10_000
    )
    ((x, y),) = batches.as_numpy_iterator()
    return x, y


def build_sentences(lengths, words) -> list[bytes]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(words, size=length)).encode() for length in lengths]


class TestNextWord:
    def test_by_hand(self):
        # 1 to 4 are words, 5 another, 6 the beginning, 7 the end.
        tokens = np.array([b"cat . dog", b"the cat sat . the cat"], object)
        x, y = texts.decode_sentences(
            {"tokens": tokens}, ids=number(VOCABULARY), sequence_length=5
        )
        assert x.tolist() == [[6, 2, 4, 5, 7], [6, 1, 2, 3, 4]]
        assert y.tolist() == [[2, 4, 5, 7, 0], [1, 2, 3, 4, 1]]
        assert x.dtype == y.dtype == np.int32

    @pytest.mark.parametrize("length", [1, 2, 5, 20])
    def test_ids_are_tffs(self, length):
        sentences = build_sentences(
            [1, 2, 4, 5, 6, 19, 20, 21, 50], [*VOCABULARY, "dog", "THE"]
        )
        x, y = texts.decode_sentences(
            {"tokens": np.array(sentences, object)},
            ids=number(VOCABULARY),
            sequence_length=length,
        )
        dataset = tf.data.Dataset.from_tensor_slices({"tokens": sentences})
        their_x, their_y = convert_with_tff(dataset, VOCABULARY, length=length)
        assert x.tolist() == their_x.tolist() and y.tolist() == their_y.tolist()
        special = word_prediction_preprocessing.get_special_tokens(4)
        assert set(x[:, 0]) == {special.beginning_of_sentence}
        assert special.out_of_vocab == [5]

    @pytest.mark.parametrize("split", SPLITS)
    @pytest.mark.parametrize("size", [5, 10_000])
    def test_tff_reads_the_same_from_the_file(self, split, size, load, data_dir):
        task = load("stackoverflow_word", vocabulary_size=size)
        data = {TRAIN: task.train, VALIDATION: task.validation, TEST: task.test}[split]
        theirs = tff.simulation.datasets.stackoverflow.load_data(str(data_dir))
        theirs = theirs[SPLITS[split]]
        assert list(data.client_ids) == theirs.client_ids
        words = rank(count_words(POSTS))[:size]
        for client_id in data.client_ids:
            dataset = theirs.create_tf_dataset_for_client(client_id)
            # For training the first 256 of a user, as in the published experiments.
            limit = 256 if split == TRAIN else -1
            their_x, their_y = convert_with_tff(dataset.take(limit), words)
            x, y = data.load(client_id)
            assert x.tolist() == their_x.tolist()
            assert y.tolist() == their_y.tolist()

    def test_users_and_sentences(self, load):
        task = load("stackoverflow_word")
        assert task.train.client_ids == ("many", "some")
        assert task.train.count("many") == 256 < files.MANY_SENTENCES
        assert task.test.count("many") == 7 + files.MANY_SENTENCES
        assert task.validation.client_ids == ("held",)
        assert task.eval_examples == 10_000 and task.metric == "accuracy"

    def test_vocabulary_and_caveat(self, load):
        words = rank(count_words(POSTS))
        assert len(words) > 20
        for size in (5, 10_000):
            task = load("stackoverflow_word", vocabulary_size=size)
            known = min(size, len(words))
            (caveat,) = task.caveats
            assert f"the {known} words of the vocabulary" in caveat
            # V words, others, beginning, end, padding: by 96 before and 97 behind.
            others = 4 * 670 * (96 + 670 + 1) + 671 * 96
            parameters = others + (known + 4) * (96 + 97)
            assert task.build_model().num_parameters == parameters
        identities = [
            load("stackoverflow_word", vocabulary_size=size).identity for size in (5, 6)
        ]
        assert identities[0] != identities[1]

    def test_made_up_sentences_are_tffs(self, load):
        task = load("stackoverflow_word", synthetic_data=True)
        datasets = tff.simulation.datasets.stackoverflow
        data, words = datasets.get_synthetic(), datasets.get_synthetic_word_counts()
        for client_id in data.client_ids:
            dataset = data.create_tf_dataset_for_client(client_id)
            their_x, their_y = convert_with_tff(dataset, list(words))
            x, y = task.train.load(client_id)
            assert x.tolist() == their_x.tolist() and y.tolist() == their_y.tolist()


class TestTags:
    TAGS = ["git", "sql", "vb . net", "css", "c++"]

    def check(self, x, y, dataset, words, tags):
        """Compares with TFF's bags, but for words behind the 100th."""
        to_ids = tag_prediction_preprocessing.build_to_ids_fn(words, tags)
        for ids, found, (bag, their_tags) in zip(
            x, y, dataset.map(to_ids).as_numpy_iterator(), strict=True
        ):
            counts = np.bincount(ids, minlength=len(words) + 1)[1:]
            share = counts / max(counts.sum(), 1)
            np.testing.assert_allclose(share, bag, rtol=1e-6)
            assert found.tolist() == their_tags.tolist()

    def test_by_hand(self):
        x, y = texts.decode_bags(
            {
                "tokens": np.array([b"dog cat cat", b"dog", b"sat . the cat"], object),
                "title": np.array([b"the end", b"", b"the cat"], object),
                "tags": np.array([b"sql|css", b"rust", b"vb . net|git|rust"], object),
            },
            ids=number(VOCABULARY),
            tags=self.TAGS,
            sequence_length=4,
        )
        # "dog" and "end" leave no trace; the third has more than four.
        assert x.tolist() == [[2, 2, 1, 0], [0, 0, 0, 0], [3, 4, 1, 2]]
        assert y.tolist() == [[0, 1, 0, 1, 0], [0] * 5, [1, 0, 1, 0, 0]]
        assert x.dtype == np.int32 and y.dtype == np.float32

    @pytest.mark.parametrize("size", [5, 10_000])
    def test_tff_reads_the_same_from_the_file(self, size, load, data_dir):
        task = load("stackoverflow_tag", vocabulary_size=size)
        words = rank(count_words(POSTS))[:size]
        tags = json.loads((data_dir / "stackoverflow.tag_count").read_text())
        theirs, _, _ = tff.simulation.datasets.stackoverflow.load_data(str(data_dir))
        x, y = task.train.load("many")
        dataset = theirs.create_tf_dataset_for_client("many").take(256)
        self.check(x, y, dataset, words, list(tags))
        assert y.sum() > 256
        # Of the 120 words and the title, the first 100 that are known.
        x, _ = task.train.load("some")
        last = files.gather(POSTS, TRAIN)["some"]
        found = (last["tokens"][-1] + b" " + last["title"][-1]).decode().split()
        known = [words.index(word) + 1 for word in found if word in words]
        assert (len(known) > 100) == (size > 5)
        assert x[-1].tolist() == (known + [0] * 100)[:100]

    def test_made_up_sentences_are_tffs(self, load):
        task = load("stackoverflow_tag", synthetic_data=True)
        datasets = tff.simulation.datasets.stackoverflow
        data = datasets.get_synthetic()
        words = list(datasets.get_synthetic_word_counts())
        tags = list(datasets.get_synthetic_tag_counts())
        for client_id in data.client_ids:
            dataset = data.create_tf_dataset_for_client(client_id)
            self.check(*task.train.load(client_id), dataset, words, tags)

    def test_caveats(self, load):
        task = load("stackoverflow_tag")
        assert [caveat.split(" of ")[0] for caveat in task.caveats] == [
            "the 40 words",
            "the 7 tags",
        ]
        assert task.metric == "recall_at_5"


class TestPublishedSizes:
    @pytest.fixture
    def folder(self, tmp_path) -> pathlib.Path:
        """A file with counts as TFF's archives leave them: beside, in `datasets`."""
        files.write_posts(tmp_path)
        (tmp_path / "datasets").mkdir()
        for suffix, text in (
            ("word_count", "".join(f"word{i} {9**9 - i}\n" for i in range(10_050))),
            ("tag_count", json.dumps({f"tag{i}": i for i in range(600)})),
        ):
            (tmp_path / f"stackoverflow.{suffix}").unlink()
            (tmp_path / "datasets" / f"stackoverflow.{suffix}").write_text(text)
        return tmp_path

    @pytest.mark.parametrize(
        ("name", "parameters"),
        [("stackoverflow_word", 4_050_748), ("stackoverflow_tag", 5_000_500)],
    )
    def test_parameters(self, name, parameters, folder):
        task = load_task(name, TaskOptions(data_dir=folder))
        assert task.build_model().num_parameters == parameters
        assert "10,000 words" in task.description
        # No word of the sentences is known.
        x, _ = task.train.load("some")
        if name == "stackoverflow_word":
            assert set(x[0]) == {10_001, 10_002, 10_003, 0}
        else:
            assert not x.any()


class TestCounts:
    def write(self, folder) -> None:
        files.write_posts(folder)
        (folder / "stackoverflow.word_count").unlink()

    def test_they_are_fetched(self, tmp_path, monkeypatch):
        self.write(tmp_path)

        def fetch(cache_dir):
            (pathlib.Path(cache_dir) / "datasets").mkdir()
            path = pathlib.Path(cache_dir) / "datasets" / "stackoverflow.word_count"
            path.write_text("w3 9\nw1 5\n")

        datasets = tff.simulation.datasets.stackoverflow
        monkeypatch.setattr(datasets, "load_word_counts", fetch)
        options = TaskOptions(data_dir=tmp_path)
        task = load_task("stackoverflow_word", options)
        assert "vocabulary of 2 words" in task.description
        # The second time they are there.
        monkeypatch.setattr(datasets, "load_word_counts", None)
        load_task("stackoverflow_word", options)

    @pytest.mark.parametrize(
        ("fetch", "why"),
        [
            (Exception("URL fetch failure on https://x: None"), "URL fetch failure"),
            (OSError("disk full"), "disk full"),
            (None, "Keras put what it fetched elsewhere"),
        ],
    )
    def test_one_error_says_what_where_and_how(self, fetch, why, tmp_path, monkeypatch):
        self.write(tmp_path)

        def load_counts(cache_dir):
            if fetch is not None:
                raise fetch

        datasets = tff.simulation.datasets.stackoverflow
        monkeypatch.setattr(datasets, "load_word_counts", load_counts)
        with pytest.raises(DataError) as caught:
            load_task("stackoverflow_word", TaskOptions(data_dir=tmp_path))
        message = str(caught.value)
        assert "`data_dir` must hold stackoverflow.word_count beside" in message
        assert str(tmp_path) in message and why in message
        assert "--format=stack_exchange" in message
        assert caught.value.__context__ is None

    def test_those_of_ones_own_site_are_not_fetched(self, tmp_path):
        names = ("tokens", "title", "tags", "creation_date", "type")
        features = {name: files.TEXT for name in names} | {"score": files.NUMBER}
        target = layout.rename(layout.STACKOVERFLOW, "beer")
        files.write(tmp_path, target, POSTS, features)
        # `no_network` fails a test that asks.
        with pytest.raises(DataError, match="beer.word_count.*--name=beer"):
            load_task(
                "stackoverflow_word", TaskOptions(data_dir=tmp_path, data_name="beer")
            )


class TestSent140:
    def test_by_hand(self, load):
        task = load("sent140", vocabulary_size=3)
        # happy 31, so 4, and of sad and today, once each, the first by the alphabet.
        so, happy, sad, other = 2, 1, 3, 4
        x, y = task.train.load("u1")
        assert x[0].tolist() == [so, so, so, happy, other] + [0] * 20
        assert x[1].tolist() == [so, sad] + [0] * 23
        assert y.tolist() == [1, 0]
        assert x.dtype == y.dtype == np.int32
        assert task.train.load("u2")[0].tolist() == [[happy] * 25]
        assert task.test.load("u2")[0][0].tolist() == [other] * 3 + [0] * 22
        assert not task.test.load("u3")[0].any()
        (caveat,) = task.caveats
        assert "the 3 words of the vocabulary" in caveat
        parameters = (3 + 2) * 300 + 351_490
        assert task.build_model().num_parameters == parameters

    def write_vectors(self, folder, scale=1.0) -> pathlib.Path:
        path = folder / f"vectors_{scale}.txt"
        rows = {"sad": [1, 2], "never": [3, -4], "so": [5, 8]}
        path.write_text(
            "".join(
                f"{word} {a * scale} {b * scale}\n" for word, (a, b) in rows.items()
            )
        )
        return path

    def test_given_vectors_are_constants(self, load, tmp_path):
        path = self.write_vectors(tmp_path)
        task = load("sent140", embedding_file=path)
        x, _ = task.train.load("u1")
        # In the order of that file; "happy" and "today" are not in it.
        assert x[0].tolist() == [3, 3, 3, 4, 4] + [0] * 20
        assert x[1].tolist() == [3, 1] + [0] * 23
        # Counted on nobody's examples.
        assert task.caveats == ()
        assert str(path) in task.description
        model = task.build_model()
        # Two LSTMs of 128 units on 2 and 128 numbers, and a dense layer of 2.
        parameters = 4 * 128 * (2 + 128 + 1) + 4 * 128 * (128 + 128 + 1) + 129 * 2
        assert model.num_parameters == parameters
        other = load("sent140", embedding_file=self.write_vectors(tmp_path, 2.0))
        assert other.identity != task.identity
        weights = model.initialize(np.random.default_rng(0))
        one, two = (
            built.predict(weights, x, None).numpy()
            for built in (model, other.build_model())
        )
        assert np.abs(one - two).max() > 1e-3
        again = load("sent140", embedding_file=path)
        assert again.identity == task.identity
        # The same vectors of other words are told by the words.
        renamed = tmp_path / "renamed.txt"
        renamed.write_text(path.read_text().replace("never", "happy"))
        words = load("sent140", embedding_file=renamed).identity
        assert words["embedding"] == task.identity["embedding"]
        assert words["vocabulary"] != task.identity["vocabulary"]
        assert other.identity["vocabulary"] == task.identity["vocabulary"]
        same = again.build_model().predict(weights, x, None).numpy()
        assert np.array_equal(one, same)

    def test_fewer_vectors(self, load, tmp_path):
        task = load(
            "sent140", embedding_file=self.write_vectors(tmp_path), vocabulary_size=1
        )
        assert task.train.load("u1")[0][1, :3].tolist() == [2, 1, 0]

    def test_without_counts(self, tmp_path):
        files.write_tweets(tmp_path, counted=None)
        with pytest.raises(DataError, match=r"sent140.tokens_count must be readable"):
            load_task("sent140", TaskOptions(data_dir=tmp_path))


def fail(error):
    raise error


@pytest.mark.skipif(
    not (_REAL / "sent140").is_dir(), reason=f"the real tweets are absent: {_REAL}"
)
def test_real_tweets(tmp_path):
    reader = leaf.LeafSource(path=_REAL / "sent140", dataset=leaf.LeafDataset.SENT140)
    rows = [
        (record.client_id, (TRAIN, TEST)[index % 10 == 9], dict(record.features))
        for index, record in enumerate(reader.read(fail))
    ]
    files.write(
        tmp_path, files.SENT140, rows, reader.features, counted=reader.separators
    )
    task = load_task("sent140", TaskOptions(data_dir=tmp_path, vocabulary_size=2_000))
    train = files.gather(rows, TRAIN)
    assert set(task.train.client_ids) == set(train)
    words = rank(count_words(rows))[:2_000]
    ids = number(words)
    known = 0
    for client_id in task.train.client_ids[:200]:
        x, y = task.train.load(client_id)
        assert y.tolist() == train[client_id]["label"].tolist()
        for row, sentence in zip(x, train[client_id]["tokens"], strict=True):
            found = [ids.get(word, 2_001) for word in sentence.decode().split()][:25]
            assert row.tolist() == found + [0] * (25 - len(found))
            known += sum(word <= 2_000 for word in found)
    assert known > 1_000


@pytest.mark.skipif(
    not (_REAL / "stackexchange").is_dir(), reason=f"the real posts are absent: {_REAL}"
)
def test_real_posts_as_tff_reads_them(tmp_path):
    (path,) = (_REAL / "stackexchange" / "beer").rglob("Posts.xml*")
    reader = stack_exchange.StackExchangeSource(path=path, test_from=None)
    rows = [
        (record.client_id, record.split, dict(record.features))
        for record in reader.read(fail)
    ]
    files.write(
        tmp_path,
        layout.STACKOVERFLOW,
        rows,
        reader.features,
        counted=reader.separators,
    )
    task = load_task("stackoverflow_word", TaskOptions(data_dir=tmp_path))
    theirs, _, _ = tff.simulation.datasets.stackoverflow.load_data(str(tmp_path))
    words = texts.read_words(tmp_path / "stackoverflow.word_count", 10_000)
    client_id = max(task.train.client_ids, key=task.train.count)
    dataset = theirs.create_tf_dataset_for_client(client_id).take(256)
    x, y = task.train.load(client_id)
    their_x, their_y = convert_with_tff(dataset, words)
    assert len(x) > 20
    assert x.tolist() == their_x.tolist() and y.tolist() == their_y.tolist()
