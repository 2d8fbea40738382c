"""Writes the BUILD files from the sources that are there.

`make build-files` runs it. Each folder is one Bazel package: one library of its
modules, one test per test module, one binary per module that can be run. Imports give
the dependencies between folders; what requirements.txt installs is no Bazel target.
"""

import argparse
import ast
import pathlib
import sys
from collections.abc import Iterator, Sequence

HEADER = "# Written by `make build-files`. Do not edit.\n"
# Sources that are listed but not Python.
DATA_SUFFIXES = (".flags", ".ipynb")
# A test module run by Python alone would define its tests and pass.
TEST_MAIN = pathlib.Path("tests", "run_with_pytest.py")
SKIPPED_FOLDERS = frozenset({"__pycache__", "build", "dist", "runs"})


def find_folders(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders under `root` that hold sources, sorted, without `root`."""
    return sorted(_walk(root))


def compute_build_files(root: pathlib.Path) -> dict[pathlib.Path, str]:
    """Returns the text of each BUILD file by its path, relative to `root`."""
    folders = {folder.relative_to(root) for folder in find_folders(root)}
    return {
        folder / "BUILD": _render_folder(root, folder, folders=folders)
        for folder in sorted(folders)
    }


def find_stale(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the BUILD files that are missing, outdated or left without sources."""
    texts = compute_build_files(root)
    stale = [
        path
        for path, text in texts.items()
        if not (root / path).is_file() or (root / path).read_text("utf-8") != text
    ]
    tops = {path.parts[0] for path in texts if len(path.parts) > 1}
    left = (path for top in tops for path in (root / top).rglob("BUILD"))
    stale += [path.relative_to(root) for path in left if _is_left(path, root, texts)]
    return sorted(stale)


def write_build_files(root: pathlib.Path) -> list[pathlib.Path]:
    """Writes the stale BUILD files, removes those left over and returns both."""
    texts = compute_build_files(root)
    stale = find_stale(root)
    for path in stale:
        if path in texts:
            (root / path).write_text(texts[path], "utf-8")
        else:
            (root / path).unlink()
    return stale


def _is_left(
    path: pathlib.Path, root: pathlib.Path, texts: dict[pathlib.Path, str]
) -> bool:
    relative = path.relative_to(root)
    return relative not in texts and path.read_text("utf-8").startswith(HEADER)


def _walk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    for child in folder.iterdir():
        skipped = child.name.startswith(".") or child.name in SKIPPED_FOLDERS
        if skipped or not child.is_dir() or (child / "pyvenv.cfg").exists():
            continue
        if _list_sources(child):
            yield child
        yield from _walk(child)


def _list_sources(folder: pathlib.Path) -> list[str]:
    suffixes = (".py", *DATA_SUFFIXES)
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.is_file() and path.suffix in suffixes
    )


def _render_folder(
    root: pathlib.Path, folder: pathlib.Path, *, folders: set[pathlib.Path]
) -> str:
    names = _list_sources(root / folder)
    data = [name for name in names if name.endswith(DATA_SUFFIXES)]
    tests = [name for name in names if name.startswith("test_")]
    library = [name for name in names if name not in data + tests]

    def find_deps(*files: str) -> list[str]:
        imported = (
            _find_imported(root / folder / name, folder, folders) for name in files
        )
        found = {path for paths in imported for path in paths} - {folder}
        return [f"//{path.as_posix()}" for path in sorted(found)]

    rules = ['package(default_visibility = ["//visibility:public"])']
    if data:
        rules.append(_render_rule("filegroup", name="data", srcs=data))
    if TEST_MAIN.name in names:
        rules.append(f'exports_files(["{TEST_MAIN.name}"])')
    if library:
        deps = find_deps(*library)
        rules.append(
            _render_rule("py_library", name=folder.name, srcs=library, deps=deps)
        )
    own = [f":{folder.name}"] if library else []
    rules += [
        _render_rule("py_binary", name=pathlib.Path(name).stem, srcs=[name], deps=own)
        for name in library
        if _is_program(root / folder / name)
    ]
    shared = [f"//{TEST_MAIN.parent.as_posix()}"]
    rules += [_render_test(name, shared + own + find_deps(name)) for name in tests]
    return HEADER + "\n" + "\n\n".join(rules) + "\n"


def _render_test(name: str, deps: list[str]) -> str:
    main = f"//{TEST_MAIN.parent.as_posix()}:{TEST_MAIN.name}"
    return _render_rule(
        "py_test",
        name=pathlib.Path(name).stem,
        srcs=[name, main],
        main=main,
        args=[f"$(rootpath {name})"],
        deps=deps,
    )


def _render_rule(kind: str, **attributes: str | list[str]) -> str:
    lines = [f"{kind}("]
    for key, value in attributes.items():
        if isinstance(value, str):
            lines.append(f'    {key} = "{value}",')
        elif value:
            lines.append(f"    {key} = {_render_list(value, indent=4)},")
    return "\n".join([*lines, ")"])


def _render_list(items: Sequence[str], *, indent: int) -> str:
    if len(items) == 1:
        return f'["{items[0]}"]'
    margin = " " * indent
    body = "".join(f'{margin}    "{item}",\n' for item in items)
    return f"[\n{body}{margin}]"


def _is_program(path: pathlib.Path) -> bool:
    return 'if __name__ == "__main__":' in path.read_text("utf-8")


def _find_imported(
    path: pathlib.Path, folder: pathlib.Path, folders: set[pathlib.Path]
) -> Iterator[pathlib.Path]:
    """Yields the folders that the module at `path` imports from."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = folder.parts[: len(folder.parts) - node.level + 1]
            base = ".".join(parts) if node.level else ""
            prefix = ".".join(part for part in (base, node.module) if part)
            modules = [f"{prefix}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            candidate = pathlib.Path(*module.split("."))
            parents = [candidate, *candidate.parents]
            yield from [parent for parent in parents if parent in folders][:1]


def main(arguments: Sequence[str]) -> int:
    """Writes the BUILD files, or with `--check` names the stale ones and returns 1."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path.cwd())
    options = parser.parse_args(arguments)
    if options.check:
        stale = find_stale(options.root)
        for path in stale:
            print(f"{path} is stale: run `make build-files`.", file=sys.stderr)
        return 1 if stale else 0
    for path in write_build_files(options.root):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
