"""The package's front: lazy, complete, and light."""

import importlib
import pathlib
import subprocess
import sys

import pytest

import distributed_dp

_ROOT = pathlib.Path(__file__).parents[2]


def _list_loaded(statement: str) -> set[str]:
    """Returns the heavy packages that a fresh interpreter has after `statement`."""
    program = (
        f"import sys\n{statement}\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=_ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    heavy = {"numpy", "scipy", "tensorflow", "tensorflow_federated"}
    return heavy & set(result.stdout.splitlines()[-1].split())


def test_importing_the_package_loads_nothing() -> None:
    assert _list_loaded("import distributed_dp") == set()


def test_the_accounting_loads_no_tensorflow() -> None:
    loaded = _list_loaded("import distributed_dp; distributed_dp.accounting")
    assert loaded == {"numpy", "scipy"}


def test_the_mechanisms_load_no_tff() -> None:
    loaded = _list_loaded(
        "import distributed_dp as d; d.Codec; d.sample_discrete_gaussian; "
        "d.sample_skellam; d.build_rotation; d.AdaptiveClip; d.SkellamShares"
    )
    assert loaded == {"numpy", "scipy", "tensorflow"}


@pytest.mark.parametrize("name", distributed_dp.__all__)
def test_every_public_name_resolves(name: str) -> None:
    found = getattr(distributed_dp, name)
    if name == "accounting":
        assert found is importlib.import_module("distributed_dp.accounting")
        return
    assert found.__name__ == name
    assert found.__module__.startswith("distributed_dp.")
    assert found.__doc__
    assert getattr(distributed_dp, name) is found


def test_names_are_listed_once_and_sorted() -> None:
    assert distributed_dp.__all__ == sorted(set(distributed_dp.__all__))
    assert dir(distributed_dp) == distributed_dp.__all__


def test_other_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = distributed_dp.Nothing
    with pytest.raises(ImportError):
        importlib.import_module("distributed_dp.nothing")


def test_every_module_is_importable() -> None:
    folder = pathlib.Path(distributed_dp.__file__).parent
    for path in folder.glob("*.py"):
        if path.stem != "__init__":
            module = importlib.import_module(f"distributed_dp.{path.stem}")
            assert module.__doc__
