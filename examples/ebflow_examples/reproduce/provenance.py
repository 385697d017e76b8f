"""Which code and which data a cell is of: a digest of what computes it, for its key, and the commit, for its reader."""

from __future__ import annotations

import ast
import hashlib
import subprocess
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("ebflow_plugin", "ebflow_nflows", "ebflow_normflows", "ebflow_zuko", "ebflow_examples")
# What only shows numbers: another picture of the same numbers is no other recipe.
SHOWING = {f"ebflow_examples.{name}" for name in ("cli", "console", "plots", "bench.report", "reproduce")} | {
    f"ebflow_examples.reproduce.{name}" for name in ("output", "paper", "provenance")
}


def recipe(made: Any, data: str) -> str:
    """A digest of all that decides the numbers of an experiment, but for the settings of its cells.

    That is the code of its module and of all modules of ours that this imports, without comments and docstrings; and
    the user's own files, if the data are such. Libraries of others are not part of it: a cell records their versions.

    Arguments:
        made: The module of the experiment.
        data: The name of its data.

    Example:
        >>> from ebflow_examples.reproduce import race, tablea3
        >>> recipe(race, "mnist") == recipe(race, "mnist"), recipe(race, "mnist") == recipe(tablea3, "mnist")
        (True, False)
    """
    found = hashlib.sha256()
    for name in sorted(_needed(getattr(made, "__name__", ""))):
        found.update(f"{name} {_code(name)} ".encode())
    for file in _files(Path(data).expanduser()):
        found.update(f"{file} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]


@cache
def _needed(start: str) -> set[str]:
    """A module, and those of ours that it imports, and these in turn; without those that only show numbers."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in seen and name not in SHOWING and _source(name) is not None:
            seen.add(name)
            waiting += _imports(name)
    return seen


@cache
def _source(name: str) -> Path | None:
    """The file of a module of ours; None if there is no such module."""
    package, *rest = name.split(".")
    if package not in PACKAGES:
        return None
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    place = Path(next(iter(found.submodule_search_locations))).joinpath(*rest)
    return next((path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()), None)


@cache
def _tree(name: str) -> ast.Module:
    path = _source(name)
    assert path is not None
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _imports(name: str) -> list[str]:
    """What a module imports; names of a package that are no modules are among them."""
    found: list[str] = []
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
    return found


@cache
def _code(name: str) -> str:
    """A digest of the code of a module, without comments and docstrings."""
    tree = _tree(name)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    return [path] if path.is_file() else []


@cache
def commit() -> str:
    """The commit of our code, with a + if files were changed since; the version, if it is in no checkout.

    Example:
        >>> commit() != ""
        True
    """
    here = Path(__file__).resolve()
    try:
        _git("ls-files", "--error-unmatch", str(here))  # else it is installed in the folder of another project
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":(top)*.py")
        return _git("rev-parse", "--short=10", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return f"version {version('ebflow-plugin')}"


def _git(*words: str) -> str:
    folder = str(Path(__file__).resolve().parent)
    return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True).stdout.strip()
