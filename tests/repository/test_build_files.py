"""The BUILD files list every source, and Bazel answers queries about them offline."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

from tools import write_build_files

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = write_build_files.find_folders(ROOT)


def read_listed_sources(build_file: pathlib.Path) -> set[str]:
    """Returns the sources that the text of a BUILD file lists, by reading it anew."""
    lists = re.findall(r"srcs = \[(.*?)\]", build_file.read_text("utf-8"), re.DOTALL)
    return set(re.findall(r'"([^"]*)"', "".join(lists)))


def test_the_packages_are_among_the_folders() -> None:
    names = {folder.relative_to(ROOT).as_posix() for folder in FOLDERS}
    assert {
        "benchmarks",
        "configs/distributed_dp",
        "distributed_dp",
        "distributed_dp/accounting",
        "scripts",
        "simulation",
        "tests",
        "tests/repository",
    } <= names


@pytest.mark.parametrize(
    "folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix()
)
def test_every_source_is_listed(folder: pathlib.Path) -> None:
    sources = {path.name for path in folder.iterdir() if path.suffix == ".py"}
    assert sources <= read_listed_sources(folder / "BUILD")


def test_build_files_are_up_to_date() -> None:
    stale = [path.as_posix() for path in write_build_files.find_stale(ROOT)]
    assert not stale, "Run `make build-files`."


class TestWriteBuildFiles:
    @pytest.fixture
    def tree(self, tmp_path: pathlib.Path) -> pathlib.Path:
        sources = {
            "alpha/__init__.py": "",
            "alpha/one.py": "import numpy\nfrom alpha.inner import two\n",
            "alpha/inner/two.py": 'if __name__ == "__main__":\n    pass\n',
            "alpha/presets/small.flags": "--rounds=1\n",
            "tests/conftest.py": "",
            "tests/run_with_pytest.py": "",
            "tests/alpha/test_one.py": "import alpha.one\n",
            ".hidden/three.py": "",
            "venv/pyvenv.cfg": "",
            "venv/lib/four.py": "",
        }
        for name, text in sources.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    def test_writes_one_file_per_folder_and_then_none(self, tree: pathlib.Path) -> None:
        written = write_build_files.write_build_files(tree)
        assert [path.as_posix() for path in written] == [
            "alpha/BUILD",
            "alpha/inner/BUILD",
            "alpha/presets/BUILD",
            "tests/BUILD",
            "tests/alpha/BUILD",
        ]
        assert write_build_files.write_build_files(tree) == []
        assert write_build_files.main(["--check", "--root", str(tree)]) == 0

    def test_rules(self, tree: pathlib.Path) -> None:
        texts = write_build_files.compute_build_files(tree)
        alpha, inner, presets, _, test = texts.values()
        assert 'srcs = [\n        "__init__.py",\n        "one.py",\n    ]' in alpha
        assert 'deps = ["//alpha/inner"]' in alpha
        assert 'py_binary(\n    name = "two"' in inner
        assert 'srcs = ["small.flags"]' in presets
        assert 'py_test(\n    name = "test_one"' in test
        assert 'main = "//tests:run_with_pytest.py"' in test
        assert '"//alpha"' in test and "numpy" not in alpha

    @pytest.mark.parametrize("change", ["added", "removed", "imported", "left"])
    def test_check_rejects(self, change: str, tree: pathlib.Path) -> None:
        write_build_files.write_build_files(tree)
        if change == "added":
            (tree / "alpha/four.py").touch()
        elif change == "removed":
            (tree / "alpha/one.py").unlink()
        elif change == "imported":
            (tree / "alpha/inner/two.py").write_text("import alpha\n")
        else:
            (tree / "alpha/inner/two.py").unlink()
        assert write_build_files.main(["--check", "--root", str(tree)]) == 1
        write_build_files.main(["--root", str(tree)])
        assert (tree / "alpha/inner/BUILD").exists() == (change != "left")
        assert write_build_files.main(["--check", "--root", str(tree)]) == 0


@pytest.mark.skipif(
    shutil.which("bazel") is None,
    reason="bazel is absent (Debian: apt-get install bazel-bootstrap)",
)
def test_bazel_answers_offline(tmp_path: pathlib.Path) -> None:
    # A loopback proxy that nobody listens on: a fetch would fail. Dependencies that
    # Bazel itself adds to a rule would be fetched, so they are not asked for.
    environment = {name: os.environ[name] for name in ("PATH", "HOME")}
    for name in ("http_proxy", "https_proxy"):
        environment[name] = "http://127.0.0.1:9"
    query = "let all = //... in $all + labels(srcs, $all) + labels(deps, $all)"
    # Its own output folder and no server: nothing of Bazel outlives the test.
    options = ["--batch", f"--output_user_root={tmp_path}"]
    result = subprocess.run(
        ["bazel", *options, "query", "--noshow_progress", query],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    labels = set(result.stdout.split())
    for folder in FOLDERS:
        package = folder.relative_to(ROOT).as_posix()
        for source in folder.glob("*.py"):
            assert f"//{package}:{source.name}" in labels
        for source in folder.glob("test_*.py"):
            assert f"//{package}:{source.stem}" in labels
