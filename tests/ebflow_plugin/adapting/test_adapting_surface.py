"""The extension surface: adapters import the core from ``ebflow_plugin.adapting``, and the core knows no library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ebflow_plugin import adapting
from ebflow_plugin.adapting import lazy_layers
from ebflow_plugin.plan.elementwise import clamped_logit_map, logit_map

ADAPTERS = ("ebflow_nflows", "ebflow_normflows", "ebflow_zuko")
ALLOWED = {"ebflow_plugin.adapting", "ebflow_plugin.errors", "ebflow_plugin.layers"}
# What only a library's own classes have, and its adapter, or the steps that adapters share, may look for.
PRIVATE = {"_permutation", "_dim", "lower_entries", "upper_entries", "using_cache", "_distribution", "q0"}


def modules(package: str) -> list[Path]:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return sorted(Path(spec.origin).parent.rglob("*.py"))


def core_imports(path: Path) -> Iterator[tuple[str, str]]:
    """Each name that a file imports from the core, with the module that it comes from; a module has no name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "ebflow_plugin":
            yield from ((f"ebflow_plugin.{alias.name}", "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ebflow_plugin."):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "ebflow_plugin")


@pytest.mark.parametrize("package", ADAPTERS)
def test_an_adapter_imports_the_core_from_one_place(package):
    found = [(path.name, *line) for path in modules(package) for line in core_imports(path)]
    assert any(module == "ebflow_plugin.adapting" for _, module, _ in found)
    assert [line for line in found if line[1] not in ALLOWED] == []
    exported = set(adapting.__all__)
    assert [line for line in found if line[1] == "ebflow_plugin.adapting" and line[2] not in exported] == []


def test_all_that_is_exported_is_there():
    assert len(set(adapting.__all__)) == len(adapting.__all__)
    assert [name for name in adapting.__all__ if not hasattr(adapting, name)] == []


def test_modules_of_the_room_import_from_where_a_name_is_defined():
    found = [(path.name, line) for path in modules("ebflow_plugin.adapting") for line in core_imports(path)]
    assert [line for line in found if line[1][0] == "ebflow_plugin.adapting"] == []


def test_the_core_looks_for_nothing_that_one_library_has():
    found = []
    for path in modules("ebflow_plugin"):
        if path.name == "shared.py" and path.parent.name == "adapting":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in PRIVATE and not is_self(node.value):
                found.append((path.name, node.lineno, node.attr))
            elif isinstance(node, ast.Constant) and node.value in PRIVATE:
                found.append((path.name, node.lineno, node.value))
    assert found == []


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


@pytest.mark.parametrize("package", ADAPTERS)
def test_a_package_of_layers_names_what_it_lacks(package):
    find = lazy_layers(package, ["FullLinear"])
    assert find("FullLinear").__module__ == f"{package}.layers"
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Nothing'"):
        find("Nothing")


def test_a_clamped_logit_is_a_logit_inside_and_constant_outside():
    x = torch.tensor([[0.05, 0.3, 0.95]], dtype=torch.float64, requires_grad=True)
    curve = clamped_logit_map(x, 0.1, 0.9)
    assert torch.equal(curve.value[:, 1], logit_map(x).value[:, 1])
    (slope,) = torch.autograd.grad(curve.value.sum(), x, retain_graph=True)
    (first,) = torch.autograd.grad(curve.log_slope().sum(), x)
    torch.testing.assert_close(curve.slopes()[0], slope)
    torch.testing.assert_close(curve.slopes()[1], first)
