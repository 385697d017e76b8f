"""Which code and which data a cell is of: a digest of what computes it, for its key, and the commit, for its reader."""

from __future__ import annotations

import ast
import hashlib
import subprocess
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("ebflow_plugin", "ebflow_nflows", "ebflow_normflows", "ebflow_zuko", "ebflow_examples")
# What only shows numbers: another picture of the same numbers is no other recipe.
SHOWING = {f"ebflow_examples.{name}" for name in ("cli", "bench", "console", "plots", "demo", "profiler")}
HERE = "ebflow_examples.reproduce."  # of which only these count, and what an experiment has of other experiments
COMPUTING = {f"{HERE}{name}" for name in ("common", "timed", "table2_report")}


def recipe(made: Any, data: str) -> str:
    """A digest of all that decides the numbers of an experiment, but for the settings of its cells.

    That is all code of ours without comments and docstrings, but for what only shows numbers, and for the experiments
    that this one does not use; and the user's own files, if the data are such. Libraries of others are not part of it:
    a cell records their versions.

    Arguments:
        made: The module of the experiment.
        data: The name of its data.

    Example:
        >>> from ebflow_examples.reproduce import race, tablea3
        >>> recipe(race, "mnist") == recipe(race, "mnist"), recipe(race, "mnist") == recipe(tablea3, "mnist")
        (True, False)
    """
    used = {getattr(each, "__name__", "") for each in (made, *vars(made).values()) if isinstance(each, ModuleType)}
    found = hashlib.sha256()
    for name, file in _modules().items():
        parts = name.split(".")
        shows = not SHOWING.isdisjoint(".".join(parts[:end]) for end in range(len(parts) + 1))
        if not shows and (not name.startswith(HERE) or name in used | COMPUTING):
            found.update(f"{name} {_code(file)} ".encode())
    for file in _files(Path(data).expanduser()):
        found.update(f"{file} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]


@cache
def _modules() -> dict[str, Path]:
    """The files of all our modules, by name."""
    found = {}
    for package in PACKAGES:
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for file in _files(Path(folder)):
                if file.suffix == ".py":
                    found[".".join((package, *file.relative_to(folder).with_suffix("").parts))] = file
    return found


@cache
def _code(file: Path) -> str:
    """A digest of the code of a module, without comments and docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
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
