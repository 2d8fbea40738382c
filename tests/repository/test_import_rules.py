"""The import rules of pyproject.toml are complete, reject violations, and are true."""

import pathlib
import shutil
import subprocess
import sys
import tomllib

import grimp
import pytest

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
CONTRACTS = {
    contract["id"]: contract for contract in CONFIG["tool"]["importlinter"]["contracts"]
}
MECHANISMS = CONTRACTS["mechanisms"]["source_modules"]


def test_every_mechanism_is_under_the_contract() -> None:
    graph = grimp.build_graph(
        "distributed_dp", include_external_packages=True, cache_dir=None
    )
    on_tensorflow = graph.find_downstream_modules("tensorflow")
    on_more = set()
    for package in ("tensorflow_federated", "tensorflow_privacy"):
        if package in graph.modules:
            on_more |= graph.find_downstream_modules(package)
    assert on_tensorflow - on_more <= set(MECHANISMS)


class TestContracts:
    """The contracts on a tree of empty modules, with and without one bad import."""

    @pytest.fixture
    def tree(self, tmp_path: pathlib.Path) -> pathlib.Path:
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        names = {*CONFIG["tool"]["importlinter"]["root_packages"]}
        for contract in CONTRACTS.values():
            names.update(contract["source_modules"])
        for name in (*names, "distributed_dp.some_factory"):
            path = tmp_path.joinpath(*name.split("."))
            if ROOT.joinpath(*name.split(".")).is_dir():
                path = path / "__init__"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py").touch()
        return tmp_path

    def run(self, tree: pathlib.Path) -> subprocess.CompletedProcess:
        program = pathlib.Path(sys.executable).with_name("lint-imports")
        command = [str(program), "--no-cache"]
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tree)}
        return subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True
        )

    def test_accept_the_allowed_imports(self, tree: pathlib.Path) -> None:
        for path, text in {
            "distributed_dp/accounting/__init__.py": "import dp_accounting, numpy",
            "distributed_dp/clipping.py": "import tensorflow",
            "distributed_dp/queries.py": "import tensorflow_privacy",
            "distributed_dp/some_factory.py": "import tensorflow_federated",
            "simulation/__init__.py": "import tensorflow_federated",
            "simulation/sources/__init__.py": "import numpy",
            "centaur/algorithms.py": "import simulation, tensorflow_federated",
            "centaur/diagnosis.py": "import distributed_dp",
            "upcycled_fl/accounting/__init__.py": "import dp_accounting, numpy",
            "upcycled_fl/learning.py": "import simulation, tensorflow_federated",
            "scripts/__init__.py": "import simulation, distributed_dp",
        }.items():
            (tree / path).write_text(text)
        result = self.run(tree)
        assert result.returncode == 0, result.stdout

    @pytest.mark.parametrize(
        ("contract", "path", "text"),
        [
            ("accounting", "distributed_dp/accounting/extra.py", "import tensorflow"),
            (
                "accounting",
                "distributed_dp/accounting/extra.py",
                "def f():\n    import tensorflow_federated as tff",
            ),
            ("mechanisms", "distributed_dp/clipping.py", "import tensorflow_federated"),
            ("queries", "distributed_dp/queries.py", "import tensorflow_federated"),
            ("systems", "distributed_dp/extra.py", "import simulation"),
            ("systems", "distributed_dp/extra.py", "import scripts"),
            (
                "simulation",
                "simulation/extra.py",
                "from distributed_dp import clipping",
            ),
            ("simulation", "simulation/extra.py", "import upcycled_fl"),
            ("simulation", "simulation/extra.py", "import centaur"),
            ("simulation", "simulation/extra.py", "import scripts"),
            ("sources", "simulation/sources/extra.py", "import tensorflow"),
            ("centaur", "centaur/extra.py", "import upcycled_fl"),
            ("centaur", "centaur/extra.py", "import scripts"),
            ("upcycled", "upcycled_fl/extra.py", "import centaur"),
            ("upcycled", "upcycled_fl/extra.py", "import scripts"),
            (
                "upcycled_accounting",
                "upcycled_fl/accounting/extra.py",
                "import tensorflow",
            ),
            ("upcycled_accounting", "upcycled_fl/theory.py", "import tensorflow"),
        ],
    )
    def test_reject(
        self, contract: str, path: str, text: str, tree: pathlib.Path
    ) -> None:
        (tree / path).write_text(text)
        result = self.run(tree)
        assert result.returncode == 1, result.stdout
        assert f"{CONTRACTS[contract]['name']} BROKEN" in result.stdout
        assert f"{len(CONTRACTS) - 1} kept, 1 broken" in result.stdout

    def test_reject_what_is_reached_through_others(self, tree: pathlib.Path) -> None:
        (tree / "distributed_dp/accounting/extra.py").write_text(
            "from distributed_dp import clipping"
        )
        (tree / "distributed_dp/clipping.py").write_text("import tensorflow")
        assert f"{CONTRACTS['accounting']['name']} BROKEN" in self.run(tree).stdout


BLOCKER = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
"""


def run_blocked(
    code: str, *, blocked: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a new interpreter in which the packages `blocked` do not exist."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKER.format(blocked=blocked) + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_blocker_blocks() -> None:
    result = run_blocked("import tensorflow.linalg", blocked=("tensorflow",))
    assert result.returncode == 1
    assert "ImportError: tensorflow is blocked" in result.stderr


def test_accounting_imports_without_tensorflow() -> None:
    code = """
import distributed_dp.accounting as package
found = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
modules = [module.name for module in found]
for name in modules:
    importlib.import_module(name)
for name in package.__all__:
    getattr(package, name)
print(len(modules))
"""
    blocked = ("jax", "jaxlib", "keras", "tensorflow", "tensorflow_federated")
    blocked += ("tensorflow_privacy", "tensorflow_probability")
    result = run_blocked(code, blocked=blocked)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 1


def test_mechanisms_import_without_tff() -> None:
    code = f"""
for name in {MECHANISMS!r}:
    importlib.import_module(name)
assert "tensorflow" in sys.modules
"""
    blocked = ("jax", "jaxlib", "tensorflow_federated", "tensorflow_privacy")
    result = run_blocked(code, blocked=blocked)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", ["distributed_dp", "simulation", "scripts"])
def test_package_itself_imports_nothing_heavy(package: str) -> None:
    blocked = ("jax", "matplotlib", "numpy", "scipy", "tensorflow")
    result = run_blocked(
        f"import {package}", blocked=(*blocked, "tensorflow_federated")
    )
    assert result.returncode == 0, result.stderr
