"""Tests for the names of files and splits."""

import pytest

from simulation.population import layout
from simulation.sources.source import TEST, TRAIN, VALIDATION


class TestNames:
    @pytest.mark.parametrize(
        ("known", "stem"),
        [
            (layout.EMNIST, "emnist_all"),
            (layout.CIFAR100, "cifar100"),
            (layout.STACKOVERFLOW, "stackoverflow"),
            (layout.PLAIN, "data"),
        ],
    )
    def test_files(self, known, stem):
        assert known.file_name == f"{stem}.sqlite"
        assert known.manifest_name == f"{stem}.manifest.json"

    def test_counts(self):
        known = layout.STACKOVERFLOW
        assert known.name_count_file("tokens") == "stackoverflow.word_count"
        assert known.name_count_file("tags") == "stackoverflow.tag_count"
        assert known.name_count_file("title") == "stackoverflow.title_count"
        assert layout.PLAIN.name_count_file("tokens") == "data.tokens_count"


class TestSplits:
    @pytest.mark.parametrize("split", [TRAIN, VALIDATION, TEST])
    @pytest.mark.parametrize("label", [0, 9])
    def test_a_digit_is_in_two(self, split, label):
        expected = {f"digits_only_{split}", f"all_{split}"}
        assert set(layout.EMNIST.name_splits(split, label)) == expected

    @pytest.mark.parametrize("label", [10, 61, None])
    def test_a_letter_is_in_one(self, label):
        assert layout.EMNIST.name_splits(TRAIN, label) == ("all_train",)

    @pytest.mark.parametrize(
        ("known", "validation"),
        [
            (layout.PLAIN, "validation"),
            (layout.CIFAR100, "validation"),
            (layout.STACKOVERFLOW, "heldout"),
        ],
    )
    def test_of_the_others(self, known, validation):
        names = [known.name_splits(name, 3) for name in (TRAIN, VALIDATION, TEST)]
        assert names == [("train",), (validation,), ("test",)]


class TestRename:
    def test_keeps_all_but_the_name(self):
        mine = layout.rename(layout.STACKOVERFLOW, "beer_2")
        assert mine.file_name == "beer_2.sqlite"
        assert mine.name_count_file("tokens") == "beer_2.word_count"
        assert mine.name_splits(VALIDATION, None) == ("heldout",)

    def test_none_leaves_it(self):
        assert layout.rename(layout.EMNIST, None) is layout.EMNIST

    @pytest.mark.parametrize(
        "name", ["", "Beer", "a/b", "..", "_a", "a.b", "a b", "a\n", "\u00e9", "a-b"]
    )
    def test_no_name(self, name):
        with pytest.raises(ValueError, match="`name` must be made of lower-case"):
            layout.rename(layout.PLAIN, name)
