"""Tests for the files of words, tags and vectors that tasks of text read."""

import pathlib
import re

import numpy as np
import pytest

from simulation.population.federated_data import DataError
from simulation.tasks import texts


class TestReadWords:
    def write(self, folder, content) -> pathlib.Path:
        path = folder / "words"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
    def test_the_first_ones(self, size, tmp_path):
        # The characters of the third take `splitlines` for ends of lines.
        words = ["the", "#", "a\x85b\x0bc\u2028d", "é"]
        path = self.write(tmp_path, "".join(f"{word} 12\n" for word in words))
        assert texts.read_words(path, size) == words[:size]

    def test_a_last_line_without_an_end(self, tmp_path):
        assert texts.read_words(self.write(tmp_path, "a 2\nb 1"), 9) == ["a", "b"]

    @pytest.mark.parametrize(
        "line",
        ["word", "word ", "word many", " 3", "", "word -1", "word 1.5", "word ²"],
    )
    def test_another_line(self, line, tmp_path):
        path = self.write(tmp_path, f"the 9\na 5\n{line}\nz 1\n")
        place = re.escape(f"{path}, line 3 must be a word and its count. Found ")
        with pytest.raises(DataError, match=place + re.escape(repr(line))):
            texts.read_words(path, 10)
        # What comes behind the words that are wanted is not looked at.
        assert texts.read_words(path, 2) == ["the", "a"]

    def test_a_word_twice(self, tmp_path):
        # Their ids would be those of others.
        path = self.write(tmp_path, "the 9\na 5\nthe 3\n")
        with pytest.raises(DataError, match=r"words, line 3 must .*Found 'the' twice"):
            texts.read_words(path, 10)

    @pytest.mark.parametrize("content", ["", "\n"])
    def test_no_word(self, content, tmp_path):
        with pytest.raises(DataError, match="words must have words. Found none"):
            texts.read_words(self.write(tmp_path, content), 10)

    def test_no_file_and_no_text(self, tmp_path):
        with pytest.raises(DataError, match="absent must be readable text. Found"):
            texts.read_words(tmp_path / "absent", 10)
        with pytest.raises(DataError, match="words must be readable text. Found"):
            texts.read_words(self.write(tmp_path, b"\xff\xfe 3\n"), 10)


class TestReadTags:
    def write(self, folder, content) -> pathlib.Path:
        path = folder / "tags"
        path.write_text(content)
        return path

    @pytest.mark.parametrize("size", [1, 3, 10])
    def test_the_most_frequent_ones(self, size, tmp_path):
        path = self.write(tmp_path, '{"b": 2, "rare": 1, "a": 2, "vb . net": 30}')
        expected = ["vb . net", "a", "b", "rare"][:size]
        assert texts.read_tags(path, size) == expected

    @pytest.mark.parametrize(
        "content",
        ["", "[", "[1, 2]", "3", "null", '"tags"', '{"a": "many"}', '{"a": []}'],
    )
    def test_another_form(self, content, tmp_path):
        path = self.write(tmp_path, content)
        with pytest.raises(DataError, match="tags must be a JSON object of counts: "):
            texts.read_tags(path, 10)

    def test_no_tag_and_no_file(self, tmp_path):
        with pytest.raises(DataError, match="tags must have tags. Found none"):
            texts.read_tags(self.write(tmp_path, "{}"), 10)
        with pytest.raises(DataError, match="absent must be readable text"):
            texts.read_tags(tmp_path / "absent", 10)


class TestReadEmbedding:
    def write(self, folder, content) -> pathlib.Path:
        path = folder / "vectors"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def test_padding_words_and_others(self, tmp_path):
        path = self.write(
            tmp_path, "the 1 -2.5 3e1\n\x85 0 1 2\ncat 5 4.5 1\nz 9 9 9\n"
        )
        words, matrix = texts.read_embedding(path, 3)
        assert words == ["the", "\x85", "cat"]
        assert matrix.dtype == np.float32
        assert matrix.tolist() == [
            [0, 0, 0],
            [1, -2.5, 30],
            [0, 1, 2],
            [5, 4.5, 1],
            # The mean of what was read.
            [2, 1, 11],
        ]

    def test_of_a_word_twice_the_first_counts(self, tmp_path):
        path = self.write(tmp_path, "the 1\ncat 3\nthe 100\nsat 5\n")
        words, matrix = texts.read_embedding(path, 3)
        assert words == ["the", "cat", "sat"]
        assert matrix[:, 0].tolist() == [0, 1, 3, 5, 3]

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("word 1 2", "as many finite numbers as the other lines have. Found 2"),
            ("word 1 2 3 4", "as many finite numbers as the other lines .* Found 4"),
            ("word", "Found 0"),
            ("", "Found 0"),
            ("word 1 nan 3", "finite"),
            ("word 1 inf 3", "finite"),
            ("word 1 x 3", "could not convert string to float: 'x'"),
            ("word 1  3", "could not convert string to float: ''"),
        ],
    )
    def test_another_line(self, line, reason, tmp_path):
        # The second word is there twice, so that lines are not words.
        path = self.write(tmp_path, f"a 1 2 3\na 4 5 6\nb 1 2 3\n{line}\nz 1 2 3\n")
        with pytest.raises(DataError, match=f"vectors, line 4.*{reason}"):
            texts.read_embedding(path, 10)
        assert texts.read_embedding(path, 2)[0] == ["a", "b"]

    def test_no_text(self, tmp_path):
        path = self.write(tmp_path, b"a 1 2\n\xff 1 2\n")
        with pytest.raises(DataError, match="vectors, line .* or later: .*utf-8"):
            texts.read_embedding(path, 10)

    def test_no_word_and_no_file(self, tmp_path):
        with pytest.raises(DataError, match="vectors must have words. Found none"):
            texts.read_embedding(self.write(tmp_path, ""), 10)
        with pytest.raises(
            DataError,
            match="`embedding_file` must be readable. Found .*absent: No such",
        ):
            texts.read_embedding(tmp_path / "absent", 10)
        with pytest.raises(DataError, match="`embedding_file` must be readable"):
            texts.read_embedding(tmp_path, 10)
