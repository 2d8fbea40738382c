"""Fixtures that the tests of the scripts share."""

import pytest

from tests.scripts import runs


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the program in this process, in a folder of the test."""
    monkeypatch.chdir(runs.ROOT)

    def run_once(*arguments: str):
        from scripts import distributed_training

        return distributed_training.run(
            runs.parse(f"--output_root={tmp_path}", *runs.TINY, *arguments)
        )

    return run_once
