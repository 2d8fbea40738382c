"""The seeds that tests/conftest.py hands to tests."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]


def read_root_seed(*options: str) -> int:
    """Returns the root seed that a run of pytest with `options` reports."""
    command = [sys.executable, "-m", "pytest", "--collect-only", __file__, *options]
    # The plugins of `make test` play no part and take long to load.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    output = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    ).stdout
    return int(re.search(r"^root seed: (\d+)$", output, re.MULTILINE)[1])


def test_root_seed_is_fixed_unless_asked_for() -> None:
    assert read_root_seed() == 0
    assert read_root_seed("--root-seed=7") == 7
    assert read_root_seed("--vary-seed") != read_root_seed("--vary-seed")


def test_seed_is_for_stateless_ops(seed: np.ndarray) -> None:
    assert seed.dtype == np.int32
    assert seed.shape == (2,)
