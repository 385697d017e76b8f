"""Discovery of adapters, and of the flow inside an object.

Adapters are registered in the entry-point group ``ebflow_plugin.adapters`` and loaded on the first
:func:`~ebflow_plugin.wrap`, so that the core imports no flow library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType

from torch import nn

from ebflow_plugin.adapting.adapter import Adapter
from ebflow_plugin.errors import AdapterError, AdapterWarning, InputError, NotAFlowError, warn


@cache
def adapters() -> tuple[Adapter, ...]:
    """Loads every installed adapter; warns about those that cannot be loaded, and skips them."""
    loaded = []
    for point in entry_points(group="ebflow_plugin.adapters"):
        try:
            loaded.append(point.load())
        except Exception as error:  # a broken plug-in must not disable the others
            message = f"adapter {point.name!r} ({point.value}) cannot be loaded: {error}"
            warn(message, AdapterWarning)
    if not loaded:
        raise AdapterError(
            "no adapter is installed: install this package with pip, not by copying it (entry-point group "
            "'ebflow_plugin.adapters')"
        )
    return tuple(loaded)


@dataclass(frozen=True)
class FoundFlow:
    """A flow, its adapter, and its path in the user's object (empty if it is the object)."""

    flow: nn.Module
    adapter: Adapter
    inside: str = ""


def find_flow(model: object) -> FoundFlow:
    """Finds the flow that an object is, or the only one that it holds.

    Raises:
        InputError: If it is, or holds, an EBFlow, whose preprocessing and calibration would be lost.
        NotAFlowError: If it holds no flow, or more than one.
    """
    found = list(_flows_in(model))
    if len(found) == 1:
        return found[0]
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    wanted = "\n  ".join(map(_wanted, adapters()))
    if not found:
        raise NotAFlowError(
            f"{kind} is no flow and holds none in its modules and attributes. These can be wrapped:\n  {wanted}"
        )
    places = "\n  ".join(f"{one.inside or '(itself)'}  {type(one.flow).__name__}" for one in found)
    raise NotAFlowError(f"{kind} holds {len(found)} flows; wrap one of them:\n  {places}")


def _wanted(adapter: Adapter) -> str:
    """The objects that an adapter can wrap, and how to install its library if it is missing."""
    hint = "" if adapter.installed else f" ({adapter.name} is not installed: pip install {adapter.name})"
    return f"{adapter.name}: {adapter.flows}{hint}"


def _flows_in(model: object, depth: int = 2) -> Iterator[FoundFlow]:
    """The outermost flows: the object, or those in its submodules, and in the attributes of objects without modules."""
    if getattr(type(model), "is_ebflow", False):
        raise InputError(
            "expected a flow, but this is an EBFlow, or holds one: its preprocessing and calibration would be lost. "
            "Use that EBFlow, or pass its .flow; if the flow is edited in place (in_place=True), the EBFlow follows."
        )
    for adapter in adapters():
        if adapter.is_flow(model):
            assert isinstance(model, nn.Module)
            yield FoundFlow(model, adapter)
            return
    if isinstance(model, nn.Module):
        members: list[tuple[str, object]] = list(model.named_children())
        depth += 1  # submodules are searched to any depth
    elif depth > 0 and hasattr(model, "__dict__") and not isinstance(model, (type, ModuleType)):
        members = list(vars(model).items())
    else:
        return
    seen: set[int] = set()
    for name, member in members:
        for found in _flows_in(member, depth - 1):
            if id(found.flow) not in seen:
                seen.add(id(found.flow))
                yield replace(found, inside=".".join(part for part in (name, found.inside) if part))
