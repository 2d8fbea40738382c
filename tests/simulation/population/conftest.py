"""Fixtures that the tests of populations share."""

import pathlib

import pytest


@pytest.fixture
def out(tmp_path) -> pathlib.Path:
    return tmp_path / "out"
