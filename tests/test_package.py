"""The package as a whole: what it exports, what it imports, and whether it is clean."""

import ast
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ebflow_plugin as ebf

ROOT = Path(__file__).parent.parent
NOT_MADE_BY_HAND = (  # but returned, given to a callback, or derived from
    ebf.Adapter,
    ebf.CalibrationReport,
    ebf.Chains,
    ebf.CoverageReport,
    ebf.EBFlow,
    ebf.Event,
    ebf.FlowReport,
    ebf.MetropolisChain,
    ebf.Plan,
    ebf.Step,
    ebf.VerificationReport,
    ebf.WeightedSamples,
)


def test_all_has_no_duplicates_and_everything_in_it_exists():
    assert len(ebf.__all__) == len(set(ebf.__all__))
    for name in ebf.__all__:
        assert hasattr(ebf, name), name


@pytest.mark.parametrize("name", [name for name in ebf.__all__ if not name.startswith("__")])
def test_public_names_have_a_docstring_with_an_example(name):
    thing = getattr(ebf, name)
    doc = inspect.getdoc(thing) or ""
    assert doc, name
    if inspect.isclass(thing) and (issubclass(thing, Exception) or thing in NOT_MADE_BY_HAND):
        return
    if inspect.ismodule(thing):
        return
    assert ">>>" in doc, f"{name} has no example"


def test_importing_a_package_imports_no_flow_library():
    """One process for all: importing torch takes longer than all of the rest."""
    code = (
        "import importlib, sys\n"
        "for package in ('ebflow_plugin', 'ebflow_nflows', 'ebflow_normflows', 'ebflow_zuko'):\n"
        "    importlib.import_module(package)\n"
        "    print(*{'nflows', 'normflows', 'zuko', 'glasflow', 'scipy'} & set(sys.modules), end='')"
    )
    here = ROOT / "adapters"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=here)
    assert done.stdout == ""


def test_the_core_never_imports_an_adapter():
    for file in (ROOT / "ebflow_plugin").rglob("*.py"):
        code = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith((">>>", "...")))
        found = re.search(
            r"^\s*(from|import) (nflows|normflows|zuko|ebflow_nflows|ebflow_normflows|ebflow_zuko)", code, re.MULTILINE
        )
        assert not found, file


def test_modules_are_small():
    for folder in ("ebflow_plugin", "adapters", "examples", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            assert len(file.read_text().splitlines()) <= (420 if folder == "tests" else 450), file


def test_tests_mirror_the_packages():
    """Each folder of tests has its package, and each file is named after a module of it, or after the room itself."""
    files = list((ROOT / "tests").glob("ebflow_*/**/test_*.py"))
    assert len(files) > 90
    for file in files:
        room = file.parent.relative_to(ROOT / "tests")
        places = [folder / room for folder in (ROOT, ROOT / "adapters", ROOT / "examples")]
        inside = [path for place in places if (place / "__init__.py").is_file() for path in place.iterdir()]
        names = {room.name, *(path.stem for path in inside)}
        subject = file.stem.removeprefix("test_")
        assert inside, file
        assert any(subject == name or subject.startswith(f"{name}_") for name in names), file


def test_every_module_imports():
    for file in (ROOT / "ebflow_plugin").rglob("*.py"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        importlib.import_module(name)


def imports_of(file, names):
    """The modules of ours that a file imports, also in functions and behind TYPE_CHECKING."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in names)
        elif isinstance(node, ast.ImportFrom):
            inner = (f"{node.module}.{each.name}" for each in node.names)
            yield from (each if each in names else node.module for each in inner)


def test_no_module_imports_itself_by_way_of_others():
    files = {}
    for root in (ROOT, ROOT / "adapters", ROOT / "examples"):
        for file in root.glob("ebflow_*/**/*.py"):
            files[".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = file
    graph = {name: set(imports_of(file, files)) & set(files) - {name} for name, file in files.items()}
    assert len(graph) > 100
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError shows the way around


@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "mypy"])
def test_clean(command):
    command = [sys.executable, "-m", *command.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_shows_what_the_code_does():
    """The table and the before/after of the README are those of examples/wrap_nflows.py."""
    readme = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(import torch.*?)```", readme, re.DOTALL).group(1)
    assert len(code.splitlines()) <= 15
    scope: dict = {}
    exec(code, scope)  # our own README
    assert scope["loss"].isfinite()
    table = re.search(r"<!-- table -->\n```text\n(.*?)```", readme, re.DOTALL).group(1)
    assert str(scope["model"].report).strip() == table.strip()
