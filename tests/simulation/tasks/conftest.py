"""Fixtures that the tests of tasks share: a folder of toy files, and no network."""

import pathlib
import urllib.request

import pytest

from tests.simulation.tasks import files


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fails a test that asks for anything from elsewhere."""

    def refuse(url, *_, **__):
        pytest.fail(f"a test must not fetch {url}")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> pathlib.Path:
    """The files of all tasks that need some."""
    folder = tmp_path_factory.mktemp("data")
    files.write_emnist(folder)
    files.write_cifar(folder, 10)
    files.write_cifar(folder, 100)
    files.write_posts(folder)
    files.write_tweets(folder)
    files.write_own(folder, [[float(index), 1.0, -2.5] for index in range(12)])
    return folder
