"""Tests for files: found, fetched whole or not at all, missed with one error."""

import contextlib
import hashlib
import io
import lzma
import pathlib
import socket
import sqlite3
import urllib.error
import urllib.request

import numpy as np
import pytest
import tensorflow_federated as tff

from simulation.population import layout, sql_data
from simulation.population.federated_data import DataError
from simulation.population.partition import PartitionKind
from simulation.tasks import TaskOptions, load_task, stored
from tests.simulation.tasks import files

# Of each task that needs a file: its name, and what its command must say.
NEEDED = {
    "emnist_character": ("emnist_all.sqlite", "--leaf_dataset=femnist"),
    "emnist_digits": ("emnist_all.sqlite", "--leaf_dataset=femnist"),
    "emnist_letters": ("emnist_all.sqlite", "--leaf_dataset=femnist"),
    "femnist_af": ("emnist_all.sqlite", "--leaf_dataset=femnist"),
    "cifar10": ("cifar10.sqlite", "--input=cifar-10-python.tar.gz"),
    "cifar100": ("cifar100.sqlite", "--input=cifar-100-python.tar.gz"),
    "stackoverflow_word": ("stackoverflow.sqlite", "--format=stack_exchange"),
    "stackoverflow_tag": ("stackoverflow.sqlite", "--format=stack_exchange"),
    "sent140": ("sent140.sqlite", "--leaf_dataset=sent140"),
    "own": ("mine.sqlite", "--format=<csv, npz, ...>"),
}
LOADERS = [
    getattr(tff.simulation.datasets, name)
    for name in ("emnist", "cifar100", "stackoverflow")
]


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def load(name: str, folder: pathlib.Path, **options):
    if name == "own":
        options.setdefault("data_name", "mine")
    return load_task(name, TaskOptions(data_dir=folder, **options))


class TestMissing:
    @pytest.mark.parametrize("name", NEEDED)
    def test_one_error_says_what_where_and_how(self, name, tmp_path, offline):
        with pytest.raises(DataError) as caught:
            load(name, tmp_path / "new")
        message = str(caught.value)
        file_name, command = NEEDED[name]
        assert f"`data_dir` must hold {file_name}" in message
        assert str(tmp_path / "new" / file_name) in message
        assert "python -m scripts.prepare_data" in message and command in message
        has_loader = name not in ("cifar10", "sent140", "own")
        assert ("no route to host" in message) == has_loader
        assert ("TFF has no such data" in message) != has_loader
        assert caught.value.__context__ is None
        # Nothing that looks like data stays behind.
        assert not list(tmp_path.rglob("*.*"))

    @pytest.mark.parametrize("name", sorted(set(NEEDED) - {"own"}))
    def test_a_file_with_a_name_is_never_fetched(self, name, tmp_path):
        # `no_network` fails a test that asks.
        with pytest.raises(DataError, match="no_such.sqlite.*--name=no_such"):
            load(name, tmp_path, data_name="no_such")

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("x")
        with pytest.raises(DataError, match="cannot be fetched: .*file"):
            load("emnist_digits", tmp_path / "file" / "data")


class TestPresent:
    @pytest.mark.parametrize("name", NEEDED)
    def test_nothing_is_fetched(self, name, data_dir, monkeypatch):
        def refuse(*_, **__):
            pytest.fail("the data are there")

        for loader in LOADERS:
            monkeypatch.setattr(loader, "load_data", refuse)
        for counts in ("load_word_counts", "load_tag_counts"):
            monkeypatch.setattr(tff.simulation.datasets.stackoverflow, counts, refuse)
        assert load(name, data_dir).num_clients > 0


class _Stream(io.BytesIO):
    """What `urlopen` returns: headers, and bytes that may end in an error."""

    def __init__(self, content: bytes, error: BaseException | None = None) -> None:
        super().__init__(content)
        self.headers = {"content-length": str(len(content))}
        self._error = error

    def read(self, size=-1):
        found = super().read(size)
        if not found and self._error is not None:
            raise self._error
        return found


class TestFetch:
    @pytest.fixture(scope="class")
    def archive(self, tmp_path_factory) -> bytes:
        folder = tmp_path_factory.mktemp("archive")
        files.write_emnist(folder)
        content = (folder / "emnist_all.sqlite").read_bytes()
        return lzma.compress(content, format=lzma.FORMAT_ALONE)

    def serve(self, monkeypatch, content, error=None) -> list[str]:
        asked = []

        def open_url(url, *_, **__):
            asked.append((url, socket.getdefaulttimeout()))
            return _Stream(content, error)

        monkeypatch.setattr(urllib.request, "urlopen", open_url)
        return asked

    def test_the_whole_is_kept(self, archive, tmp_path, monkeypatch):
        asked = self.serve(monkeypatch, archive)
        before = socket.getdefaulttimeout()
        task = load("emnist_digits", tmp_path / "new")
        assert [path.name for path in (tmp_path / "new").iterdir()] == [
            "emnist_all.sqlite"
        ]
        assert task.train.count("f1_digits") == 3
        load("emnist_character", tmp_path / "new")
        ((url, timeout),) = asked
        assert url.endswith("/emnist_all.sqlite.lzma")
        # A server that says nothing is given up, and others wait as before.
        assert timeout is not None and 0 < timeout <= 60
        assert socket.getdefaulttimeout() == before

    @pytest.mark.parametrize(
        "error", [ConnectionResetError("reset"), TimeoutError("timed out"), None]
    )
    def test_half_of_it_is_not(self, error, archive, tmp_path, monkeypatch):
        # Without an error the server just ends early, which TFF does not notice.
        self.serve(monkeypatch, archive[: len(archive) // 2], error)
        with pytest.raises(DataError, match="emnist_all.sqlite.*cannot be fetched"):
            load("emnist_digits", tmp_path)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("content", [b"", b"<html>Sign in first.</html>"])
    def test_something_else_is_not(self, content, tmp_path, monkeypatch):
        self.serve(monkeypatch, content)
        with pytest.raises(DataError, match="emnist_all.sqlite.*cannot be fetched"):
            load("emnist_digits", tmp_path)
        assert not list(tmp_path.iterdir())

    def test_an_interrupt_goes_through_and_leaves_nothing(
        self, archive, tmp_path, monkeypatch
    ):
        self.serve(monkeypatch, archive[:1000], KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            load("emnist_digits", tmp_path)
        assert not list(tmp_path.iterdir())
        assert socket.getdefaulttimeout() is None

    def test_a_loader_that_leaves_no_file(self, tmp_path, monkeypatch):
        monkeypatch.setattr(
            tff.simulation.datasets.cifar100, "load_data", lambda cache_dir: None
        )
        with pytest.raises(DataError, match="cifar100.sqlite.*cannot be fetched"):
            load("cifar100", tmp_path)


class TestIdentity:
    def test_it_names_file_and_content(self, data_dir):
        path = data_dir / "emnist_all.sqlite"
        assert stored.identify(path) == {
            "file": "emnist_all.sqlite",
            "digest": sql_data.compute_digest(path),
        }

    def test_a_file_of_tffs_needs_no_manifest(self, tmp_path):
        path = tmp_path / "cifar100.sqlite"
        path.write_bytes(b"12345")
        assert stored.identify(path) == {
            "file": "cifar100.sqlite",
            "digest": hashlib.sha256(b"12345").hexdigest()[:32],
        }

    def test_what_lies_beside_it_does_not_count(self, tmp_path):
        files.write_cifar(tmp_path, 10)
        path = tmp_path / "cifar10.sqlite"
        before = stored.identify(path)
        (tmp_path / "cifar10.manifest.json").unlink()
        assert stored.identify(path) == before

    def test_other_data_of_the_same_size_have_another(self, tmp_path):
        found = []
        for content in (b"12345", b"12346"):
            (tmp_path / "cifar100.sqlite").write_bytes(content)
            found.append(stored.identify(tmp_path / "cifar100.sqlite"))
        assert found[0]["file"] == found[1]["file"]
        assert found[0]["digest"] != found[1]["digest"]

    @pytest.mark.parametrize("name", list(NEEDED))
    def test_every_task_of_a_file_has_it(self, data_dir, name):
        file_name, _ = NEEDED[name]
        task = load(name, data_dir)
        found = {key: task.identity[key] for key in ("file", "digest")}
        assert found == stored.identify(data_dir / file_name)


class TestHold:
    def test_megabytes(self, data_dir):
        held = load("cifar10", data_dir, hold_mb=0).train
        held.load("user_0")
        assert held.num_bytes == 0
        held = load("cifar10", data_dir, hold_mb=1).train
        x, y = held.load("user_0")
        assert held.num_bytes == x.nbytes + y.nbytes <= 1 << 20

    def test_held_examples_are_those_of_the_file(self, data_dir):
        held = load("cifar10", data_dir).train
        fresh = load("cifar10", data_dir, hold_mb=0).train
        for _ in range(2):
            for one, other in zip(
                held.load("user_1"), fresh.load("user_1"), strict=True
            ):
                assert np.array_equal(one, other)


class TestSynthetic:
    @pytest.mark.parametrize(
        ("name", "clients"),
        [
            ("emnist_character", 2),
            ("emnist_digits", 2),
            ("cifar100", 2),
            ("stackoverflow_word", 3),
            ("stackoverflow_tag", 3),
        ],
    )
    def test_it_says_so(self, name, clients, tmp_path):
        task = load(name, tmp_path, synthetic_data=True)
        assert "SYNTHETIC" in task.name and name in task.name
        assert "SYNTHETIC" in task.description and f"not {name}" in task.description
        assert task.num_clients == clients
        assert task.identity == {"synthetic_data": True}
        model = task.build_model()
        for client_id in task.train.client_ids:
            for part, spec in zip(
                task.train.load(client_id), model.example_spec.values(), strict=True
            ):
                assert spec.shape.is_compatible_with(part.shape)
                assert spec.dtype == part.dtype
        # It needs no folder, and makes none.
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("name", sorted(NEEDED))
    def test_real_data_do_not(self, name, data_dir):
        task = load(name, data_dir)
        assert "SYNTHETIC" not in task.name + task.description


class TestDivide:
    def test_what_cannot_be_divided_is_one_data_error(self, data_dir):
        with pytest.raises(DataError, match="`num_clients` must be at most.*81"):
            load("cifar10", data_dir, partition=PartitionKind.DIRICHLET, num_clients=81)
        with pytest.raises(DataError, match="pachinko must have coarse labels"):
            load("cifar10", data_dir, partition=PartitionKind.PACHINKO)

    def test_a_file_without_such_examples(self, tmp_path):
        rows = [row for row in files.draw_characters() if row[2]["label"] < 10]
        features = {
            "pixels": files.Feature(kind=files.Kind.FLOAT, shape=(28, 28)),
            "label": files.NUMBER,
        }
        files.write(tmp_path, layout.EMNIST, rows, features)
        with pytest.raises(
            DataError, match="emnist_all.sqlite must have such examples"
        ):
            load("femnist_af", tmp_path)


def test_a_file_that_is_damaged_is_one_data_error(tmp_path):
    (tmp_path / "emnist_all.sqlite").write_bytes(b"not a data base, but a file " * 9)
    with pytest.raises(DataError, match="emnist_all.sqlite must be a SQLite file"):
        load("emnist_digits", tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "cifar10.sqlite")) as other:
        other.execute("CREATE TABLE something (x INTEGER)")
    with pytest.raises(DataError, match="cifar10.sqlite must be a SQLite file"):
        load("cifar10", tmp_path)
