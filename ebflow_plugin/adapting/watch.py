"""The detection of changes to a flow since it was walked.

A user may replace a layer, append one, patch a method or hook a container at any time. Each public call of a model
looks for that once, by comparing identities, classes and sizes, so that all of them act on the current flow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep

__all__ = ["Watch"]

# Values that steps read on each call: a module that counts its calls, say, does not change the plan.
_READ_EACH_CALL = (Tensor, int, float, complex, type(None), dict, list, tuple, set)


class Watch:
    """Detects changes of modules: of their class, members, hooks, and attributes that decide how they act.

    Arguments:
        parts: The modules.
        buffers: A module whose buffers are watched too.

    Example:
        >>> net = nn.Sequential(nn.Tanh())
        >>> watch = Watch([net])
        >>> watch.unchanged()
        True
        >>> net.append(nn.Tanh()) is net, watch.unchanged()
        (True, False)
    """

    def __init__(self, parts: list[Any], buffers: nn.Module | None = None) -> None:
        self._classes = [(part, type(part)) for part in parts]
        self._sizes: list[tuple[dict[Any, Any], int]] = []
        self._members: list[tuple[dict[Any, Any], Any, Any]] = []
        for part in parts:
            attributes = vars(part)
            chosen = {name: value for name, value in attributes.items() if _decides(name, value)}
            self._record(attributes, chosen)
            if isinstance(part, nn.Module):
                self._record(part._modules, part._modules)
                self._record(part._forward_hooks, {})
                self._record(part._forward_pre_hooks, {})
        if buffers is not None:
            self._record(buffers._buffers, buffers._buffers)

    @classmethod
    def of(cls, plan: Plan, flow: nn.Module, buffers: nn.Module) -> Watch:
        """Watches the modules that a plan of the flow was built from."""
        return cls(_arrangement(plan, flow), buffers)

    def _record(self, held: Any, members: Any) -> None:
        self._sizes.append((held, len(held)))
        self._members.extend((held, name, value) for name, value in members.items())

    def unchanged(self) -> bool:
        """Whether nothing has changed."""
        if not all(type(part) is kind for part, kind in self._classes):
            return False
        if not all(len(held) == size for held, size in self._sizes):
            return False
        return all(held.get(name) is value for held, name, value in self._members)


def _decides(name: str, value: Any) -> bool:
    """Whether an attribute may decide how a module acts: a string, a flag, a function, an object."""
    if isinstance(value, bool):
        return name != "training"  # read on each call
    return not isinstance(value, _READ_EACH_CALL)


def _arrangement(plan: Plan, flow: nn.Module) -> list[Any]:
    """The flow, the containers of its steps and its base, these themselves, and the submodules of linear steps."""
    owners = {""}
    for part in plan.parts():
        names = part.path.split(".")
        owners.update(".".join(names[:depth]) for depth in range(1, len(names)))
    known = dict(flow.named_modules(remove_duplicate=False))
    parts: dict[int, Any] = {}

    def members() -> Iterator[Any]:
        for owner in owners:
            if owner in known:
                yield known[owner]
                yield from known[owner].children()
        for part in plan.parts():
            yield part.module
            if isinstance(part, LinearStep) and isinstance(part.module, nn.Module) and part.path not in owners:
                yield from part.module.modules()

    for member in members():
        if hasattr(member, "__dict__"):
            parts[id(member)] = member
    return list(parts.values())
