"""A flow as the last walk found it, and how a model notices that the flow is another one by now.

A user may replace a layer, append one, patch a method or put a hook on a container at any time. Every public method of
a model reads the plan from here, so that all of them act on the flow as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Generator, Tensor, nn

from ebflow_plugin.adapting.adapter import Adapter
from ebflow_plugin.adapting.discovery import Found
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.preprocessing import DequantizeStep, boundary, preprocessing_steps, refuse_trainable
from ebflow_plugin.plan.step import LinearStep

__all__ = ["Options", "Walked", "walk"]

# Values that steps read anew at each call: a module that counts its calls is not another one after each.
_READ_ANEW = (Tensor, int, float, complex, type(None), dict, list, tuple, set)


@dataclass(frozen=True)
class Options:
    """What :func:`wrap` was asked for: enough to walk the flow, or a copy of it, again."""

    match_after: str | int | None = "auto"
    preprocess: tuple[nn.Module, ...] = ()
    overrides: dict[str, str] = field(default_factory=dict)
    check_finite: bool = False

    def plan(self, found: Found) -> Plan:
        """The plan of a flow, with the preprocessing in front."""
        plan = found.adapter.plan(found.flow, self.overrides)
        added = preprocessing_steps(self.preprocess)
        return replace(plan, steps=(*added, *plan.steps)) if added else plan


class Walked:
    """What one walk found.

    Attributes:
        adapter: What walked the flow.
        bare: The plan of the flow alone, with the preprocessing.
        plan: The plan of the model.
        start: The index of the step where the matched variable begins.
        prefix: The steps in front of it.
        core: The same of the matched variable; itself where nothing is in front of it.
        dequantize: The one random step, which a generator draws for, if the plan begins with it.
        anchor: The name of the flow's largest parameter, which tells its device and dtype; some are of a dtype of
            their own (the mixture of normflows, a number inside Residual).
    """

    def __init__(self, found: Found, bare: Plan, plan: Plan, start: int, watch: Watch) -> None:
        self.adapter: Adapter = found.adapter
        self.bare, self.plan, self.start = bare, plan, start
        self.prefix = replace(plan, steps=plan.steps[:start])
        sizes = {name: p.numel() for name, p in found.flow.named_parameters() if p.is_floating_point()}
        self.anchor: str | None = max(sizes, key=sizes.__getitem__, default=None)
        first = plan.steps[0] if plan.steps else None
        self.dequantize = first if isinstance(first, DequantizeStep) else None
        self._watch = watch
        self.core: Walked = self
        if start:
            after, whole = (replace(one, steps=one.steps[start:]) for one in (bare, plan))
            self.core = Walked(found, after, whole, 0, watch)

    def to_matched(self, x: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """The matched variable, and the log-det of the way to it, with shape ``(B,)``."""
        if not self.prefix.steps:
            return x, x.new_zeros(len(x))
        refuse_trainable(self.prefix)
        u, start = (x, 0) if self.dequantize is None else (self.dequantize.dequantize(x, generator), 1)
        (matched,), log_det = self.prefix.encode(u, start=start)
        total = x.new_zeros(len(x)) if log_det is None else log_det
        for _, constant in self.prefix.log_dets(tuple(x.shape[1:]), x):
            total = total + constant
        return matched, total

    def drawing(self, generator: Generator | None) -> Plan:
        """The bare plan, with a generator that draws the noise of a Dequantize."""
        if self.dequantize is None or generator is None:
            return self.bare
        return replace(self.bare, steps=(self.dequantize.drawing(generator), *self.bare.steps[1:]))

    def is_current(self) -> bool:
        """Whether the flow is still what was walked. Compares identities and sizes alone."""
        return self._watch.unchanged()


def walk(
    found: Found, options: Options, holder: nn.Module, appended: Callable[[Plan], tuple[LinearStep, ...]]
) -> Walked:
    """Walks a flow.

    Arguments:
        found: The flow, and the adapter that knows it.
        options: What :func:`wrap` was asked for.
        holder: Holds in its buffers what the appended steps are made of (a calibration).
        appended: Returns the steps after those of the flow, given its plan.
    """
    bare = plan = options.plan(found)
    watch = Watch([*_arrangement(bare, found.flow), holder], holder)
    more = appended(bare)
    if more:
        plan = replace(bare, steps=(*bare.steps, *more))
    return Walked(found, bare, plan, boundary(bare, options.match_after), watch)


class Watch:
    """Remembers modules as they are: their class, members, hooks, and attributes that decide how they act.

    Arguments:
        parts: The modules.
        holder: One whose buffers are watched too.

    Example:
        >>> net = nn.Sequential(nn.Tanh())
        >>> watch = Watch([net])
        >>> watch.unchanged()
        True
        >>> net.append(nn.Tanh()) is net, watch.unchanged()
        (True, False)
    """

    def __init__(self, parts: list[Any], holder: nn.Module | None = None) -> None:
        self._classes = [(part, type(part)) for part in parts]
        self._sizes: list[tuple[dict[Any, Any], int]] = []
        self._members: list[tuple[dict[Any, Any], Any, Any]] = []
        for part in parts:
            attributes = vars(part)
            chosen = {name: value for name, value in attributes.items() if _decides(name, value)}
            self._keep(attributes, chosen)
            if isinstance(part, nn.Module):
                self._keep(part._modules, part._modules)
                self._keep(part._forward_hooks, {})
                self._keep(part._forward_pre_hooks, {})

        if holder is not None:
            self._keep(holder._buffers, holder._buffers)

    def _keep(self, held: Any, members: Any) -> None:
        self._sizes.append((held, len(held)))
        self._members.extend((held, name, value) for name, value in members.items())

    def unchanged(self) -> bool:
        """Whether all of it is as it was."""
        if not all(type(part) is kind for part, kind in self._classes):
            return False
        if not all(len(held) == size for held, size in self._sizes):
            return False
        return all(held.get(name) is value for held, name, value in self._members)


def _decides(name: str, value: Any) -> bool:
    """Whether an attribute may decide how a module acts: a word, a flag, a function, an object."""
    if isinstance(value, bool):
        return name != "training"  # asked at each call
    return not isinstance(value, _READ_ANEW)


def _arrangement(plan: Plan, flow: nn.Module) -> list[Any]:
    """The flow, what holds its steps and its base, these themselves, and what is inside of linear steps."""
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
