"""The result of walking a flow, and the detection of changes to the flow since.

A user may replace a layer, append one, patch a method or hook a container at any time. Every public method of a model
reads the plan from here, so that all of them act on the current flow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Generator, Tensor, nn

from ebflow_plugin.adapting.adapter import Adapter
from ebflow_plugin.adapting.discovery import Found
from ebflow_plugin.plan.inputs import check_input, refuse_non_finite
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.preprocessing import DequantizeStep, boundary, preprocessing_steps, refuse_trainable
from ebflow_plugin.plan.step import LinearStep

__all__ = ["Options", "Walked", "walk"]

# Values that steps read on each call: a module that counts its calls, say, does not change the plan.
_READ_EACH_CALL = (Tensor, int, float, complex, type(None), dict, list, tuple, set)


@dataclass(frozen=True)
class Options:
    """The options of :func:`wrap`, with which the flow, or a copy of it, can be walked again."""

    match_after: str | int | None = "auto"
    preprocess: tuple[nn.Module, ...] = ()
    overrides: dict[str, str] = field(default_factory=dict)
    check_finite: bool = False

    def plan(self, found: Found) -> Plan:
        """The plan of a flow, with the added preprocessing in front."""
        plan = found.adapter.plan(found.flow, self.overrides)
        added = preprocessing_steps(self.preprocess)
        return replace(plan, steps=(*added, *plan.steps)) if added else plan


class Walked:
    """The result of one walk.

    Attributes:
        adapter: The adapter of the flow.
        bare: The plan of the flow with its preprocessing, without appended steps (a calibration).
        plan: The plan of the model.
        start: The index of the step where the matched variable begins.
        prefix: The steps before it.
        core: The same for the matched variable; ``self`` if no step is before it.
        dequantize: The first step if it is a Dequantize, the one random step.
        anchor: The name of the flow's largest parameter, which has the device and dtype of the flow; others may have
            another dtype (the mixture of normflows, a number inside Residual).
    """

    def __init__(
        self, found: Found, bare: Plan, plan: Plan, start: int, watch: Watch, check_finite: bool = False
    ) -> None:
        self.adapter: Adapter = found.adapter
        self._flow, self._check_finite = found.flow, check_finite
        self.bare, self.plan, self.start = bare, plan, start
        self.prefix = replace(plan, steps=plan.steps[:start])
        sizes = {name: p.numel() for name, p in found.flow.named_parameters() if p.is_floating_point()}
        self.anchor: str | None = max(sizes, key=sizes.__getitem__, default=None)
        first = plan.steps[0] if plan.steps else None
        self.dequantize = first if isinstance(first, DequantizeStep) else None
        self._watch = watch
        self.core: Walked = self
        if start:
            core_bare, core_plan = (replace(one, steps=one.steps[start:]) for one in (bare, plan))
            self.core = Walked(found, core_bare, core_plan, 0, watch, check_finite)

    def like(self) -> Tensor | None:
        """A parameter with the device and dtype of the flow, looked up each time: it may be moved or swapped."""
        if self.anchor is None:
            return None
        owner, _, name = self.anchor.rpartition(".")
        anchor: Tensor | None = getattr(self._flow.get_submodule(owner), name, None)
        return anchor

    def check(self, x: Tensor, context: Tensor | None) -> Tensor:
        """Raises on input that the flow cannot take, and returns x; integers for a Dequantize get the flow's dtype."""
        x = check_input(x, context, self.plan.event_shape, self.like(), integers=self.dequantize is not None)
        if self._check_finite:
            refuse_non_finite("x", x)
            if context is not None:
                refuse_non_finite("context", context)
        return x

    def energy(self, x: Tensor, context: Tensor | None, generator: Generator | None) -> Tensor:
        """The energy of checked data, with shape ``(B,)``."""
        plan = self.plan
        plan.refuse()
        if x.shape[0] == 0:
            return x.flatten(1).sum(1)
        x, start, surplus = self.drawn(x, generator)
        energy = plan.energy_from(start, (x,), plan.embed(context))
        return energy if surplus is None else energy - surplus

    def drawn(self, x: Tensor, generator: Generator | None) -> tuple[Tensor, int, Tensor | None]:
        """Applies a Dequantize: the value, the index of the next step, and the log-det of the noise."""
        if self.dequantize is None:
            return x, 0, None
        u, surplus = self.dequantize.dequantize(x, generator)
        return u, 1, surplus

    def to_matched(self, x: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """The matched variable, and the log-det of the preprocessing, with shape ``(B,)``."""
        if not self.prefix.steps:
            return x, x.new_zeros(len(x))
        refuse_trainable(self.prefix)
        u, start, surplus = self.drawn(x, generator)
        (matched,), log_det = self.prefix.encode(u, start=start)
        total = x.new_zeros(len(x)) if log_det is None else log_det
        if surplus is not None:
            total = total + surplus
        for _, constant in self.prefix.log_dets(tuple(x.shape[1:]), x):
            total = total + constant
        return matched, total

    def drawing(self, generator: Generator | None) -> Plan:
        """The bare plan, with a generator for the noise of a Dequantize."""
        if self.dequantize is None or generator is None:
            return self.bare
        return replace(self.bare, steps=(self.dequantize.drawing(generator), *self.bare.steps[1:]))

    def is_current(self) -> bool:
        """Whether the flow is unchanged since the walk. Compares only identities and sizes."""
        return self._watch.unchanged()


def walk(
    found: Found, options: Options, holder: nn.Module, appended: Callable[[Plan], tuple[LinearStep, ...]]
) -> Walked:
    """Walks a flow.

    Arguments:
        found: The flow, and its adapter.
        options: The options of :func:`wrap`.
        holder: The module whose buffers hold the tensors of the appended steps (a calibration).
        appended: Returns the steps to append to those of the flow, given its plan.
    """
    bare = plan = options.plan(found)
    watch = Watch([*_arrangement(bare, found.flow), holder], holder)
    more = appended(bare)
    if more:
        plan = replace(bare, steps=(*bare.steps, *more))
    return Walked(found, bare, plan, boundary(bare, options.match_after), watch, options.check_finite)


class Watch:
    """Detects changes of modules: of their class, members, hooks, and attributes that decide how they act.

    Arguments:
        parts: The modules.
        holder: A module whose buffers are watched too.

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
            self._record(attributes, chosen)
            if isinstance(part, nn.Module):
                self._record(part._modules, part._modules)
                self._record(part._forward_hooks, {})
                self._record(part._forward_pre_hooks, {})

        if holder is not None:
            self._record(holder._buffers, holder._buffers)

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
