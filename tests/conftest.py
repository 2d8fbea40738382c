"""What all tests share: quiet TensorFlow, seeds, and no process left behind.

Seeds. A test that draws takes `seed`, an int32[2] seed for `tf.random.stateless_*`,
or `rng`, a NumPy generator. Both follow from one root seed and the test's own id, so
that a test draws the same whatever else runs. The root seed is 0; `--vary-seed` draws
a fresh one, and `--root-seed=N` repeats it. pytest prints the root seed at the start.
"""

import hashlib
import os
import secrets
import signal

# TensorFlow reads it when it is imported, which is later than this.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import psutil
import pytest

_FIXED_ROOT_SEED = 0
_ROOT_SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("seeds")
    group.addoption(
        "--vary-seed", action="store_true", help="draw a fresh root seed and print it"
    )
    group.addoption(
        "--root-seed", type=int, default=None, help="repeat the run with this root seed"
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So a shell starts what runs in its background. TFF ends its worker by SIGINT,
        # and waits: a worker that inherits this would never end.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        root_seed = config.workerinput["root_seed"]
    elif config.getoption("--root-seed") is not None:
        root_seed = config.getoption("--root-seed")
    elif config.getoption("--vary-seed"):
        root_seed = secrets.randbits(31)
    else:
        root_seed = _FIXED_ROOT_SEED
    config.stash[_ROOT_SEED] = root_seed


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Hands the root seed to a process of pytest-xdist."""
    node.workerinput["root_seed"] = node.config.stash[_ROOT_SEED]


def pytest_report_header(config: pytest.Config) -> str:
    return f"root seed: {config.stash[_ROOT_SEED]}"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the workers of TFF, which outlive pytest and hold its output open."""
    for child in psutil.Process().children(recursive=True):
        if child.name().startswith("worker_binary"):
            # Its exit status is left for TFF, which asks for it in the end.
            child.kill()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A NumPy generator with the test's own stream."""
    root_seed = request.config.stash[_ROOT_SEED]
    name = hashlib.sha256(request.node.nodeid.encode()).digest()
    return np.random.default_rng([root_seed, int.from_bytes(name, "big")])


@pytest.fixture
def seed(rng: np.random.Generator) -> np.ndarray:
    """An int32[2] seed for `tf.random.stateless_*`, the test's own."""
    return rng.integers(0, 2**31, size=2, dtype=np.int32)
