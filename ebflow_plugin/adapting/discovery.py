"""How a model becomes a plan: the rules of classes, the Adapter that walks a model by them, and how one is found.

An adapter knows one flow library. It is an object, named by the entry-point group ``ebflow_plugin.adapters`` and
loaded on the first :func:`~ebflow_plugin.wrap`, so that the core imports no flow library.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from inspect import signature
from types import MappingProxyType, ModuleType
from typing import Any

from torch import Tensor, nn

from ebflow_plugin.adapting.teaching import REGISTERED, Container, OpaqueStep, Registered, RegisteredLinearStep, Rule
from ebflow_plugin.errors import (
    AdapterError,
    AdapterWarning,
    InputError,
    NotAFlowError,
    UnknownNameError,
    UnsupportedStepError,
    suggest,
)
from ebflow_plugin.plan.energy_model import EnergyModel
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.registry import altered_part, resolve
from ebflow_plugin.plan.step import LinearStep, Step

__all__ = ["Adapter", "EnergyModel", "Found", "adapters", "comes_from", "find_flow", "takes_context"]


class Adapter(ABC):
    """What turns the flows of one library into plans.

    Attributes:
        name: The library, as messages call it.
        flows: What can be wrapped, for the message about an object that cannot.
        packages: The packages that the library's classes come from.
        rules: The rule of each class of the library, by its name.
        opaque: How the library calls a module whose inside nobody knows.
        inverted: Whether the density direction is a module's ``inverse``.
        density_methods: The methods of a flow that make up its density.
        constrained: The linear classes that :func:`~ebflow_plugin.unconstrain` replaces, each with a function that
            tells a module's number of features and whether these are channels of images; None to leave it.
    """

    name: str
    flows: str
    packages: tuple[str, ...]
    rules: Mapping[str, Rule]
    opaque: type[OpaqueStep]
    density_methods: tuple[str, ...] = ("log_prob",)
    inverted: bool = False
    constrained: Mapping[str, Callable[[Any], tuple[int, bool] | None]] = MappingProxyType({})

    @abstractmethod
    def is_flow(self, model: object) -> bool:
        """Whether the object is a flow of this library: one with a density."""

    @property
    def installed(self) -> bool:
        """Whether the library, or another one that is made of its classes, can be imported."""
        own = type(self).__module__.partition(".")[0]  # our layers for the library are not the library
        return any(find_spec(package) is not None for package in self.packages if package != own)

    def rule(self, cls: type) -> Rule | None:
        """The rule of exactly this class, if it is one of the library's."""
        return self.rules.get(cls.__name__) if self.ours(cls) else None

    def ours(self, cls: type) -> bool:
        """Whether a class comes from the library."""
        return comes_from(cls, self.packages)

    @abstractmethod
    def plan(self, flow: Any, overrides: Mapping[str, str] | None = None) -> Plan:
        """Walks the flow."""

    def own_log_prob(self, flow: Any, x: Tensor, context: Tensor | None) -> Tensor:
        """The library's own ``log_prob``, which the invariant is checked against."""
        result: Tensor = flow.log_prob(x) if context is None else flow.log_prob(x, context)
        return result

    def release(self, flow: nn.Module) -> None:
        """Drops what linear layers keep between calls (``using_cache``): graphs, which cannot be copied."""
        for module in flow.modules():
            invalidate = getattr(getattr(module, "cache", None), "invalidate", None)
            if self.ours(type(module)) and callable(invalidate):
                invalidate()

    def refuse_own_density(
        self, flow: object, methods: tuple[str, ...] | None = None, packages: tuple[str, ...] | None = None
    ) -> None:
        """Raises if somebody overrode the density of a flow: it is then not that of its transforms and its base.

        Arguments:
            flow: The flow.
            methods: The methods that make up its density; those of the library's flows by default.
            packages: Where these may come from; the library by default.
        """
        for name in methods or self.density_methods:
            owner = next((parent for parent in type(flow).__mro__ if name in vars(parent)), None)
            if name in vars(flow) or (owner is not None and not comes_from(owner, packages or self.packages)):
                raise UnsupportedStepError(
                    f"{type(flow).__name__} overrides {name}, so its density may not be that of its transforms and "
                    "base distribution. Wrap a plain flow of the library with the same parts instead."
                )

    @abstractmethod
    def full_layer(self, features: int, images: bool) -> nn.Module:
        """A FullLinear, or a 1 × 1 FullConv2d, of this library."""

    @abstractmethod
    def inverse_of(self, module: nn.Module) -> nn.Module:
        """The library's container that runs a module backwards."""

    def unit(self, flow: nn.Module, path: str, inverted: bool) -> tuple[str, bool]:
        """The module to replace when the step at a path is, and whether data passes through its inverse."""
        return path, inverted

    def walk(self, module: Any, path: str, inverted: bool, overrides: Mapping[str, str]) -> Iterator[Step]:
        """Returns the steps of a module in density order, walking into containers.

        Arguments:
            module: A transform of the library.
            path: Where it stands in the flow.
            inverted: Whether data passes through its inverse.
            overrides: ``"linear"`` or ``"nonlinear"`` by path, where the user knows better.
        """
        if path in overrides:
            rule: Rule | None = Registered(linear=overrides[path] == "linear")
            why = "override"
        else:
            rule, why = resolve(module, lambda cls: REGISTERED.get(cls) or self.rule(cls))
        while rule is not None and not isinstance(rule, (type, Container, Registered)):
            rule = rule(module)
        if isinstance(rule, type) and issubclass(rule, LinearStep) and (part := altered_part(module)) is not None:
            rule, why = None, f"unknown: {part} inside of it was hooked or patched"  # which linear steps never call
        if isinstance(rule, Container):
            children = list(rule.children(module))
            for child in reversed(children) if inverted else children:
                below = ".".join(part for part in (path, child.name) if part)
                turned = inverted != child.inverted
                if child.step is not None and below not in overrides:
                    yield child.step(child.module, below, turned)
                else:
                    yield from self.walk(child.module, below, turned, overrides)
        elif isinstance(rule, Registered):
            yield self._registered(rule, module, path, inverted, why)
        elif rule is not None:
            yield rule(module, path, inverted)
        else:
            step = self._opaque(module, path, inverted)
            step.known, step.reason = False, why or "unknown class"
            yield step

    def _opaque(self, module: Any, path: str, inverted: bool = False) -> OpaqueStep:
        """The step of a module whose inside nobody walks, with the library's own steps that it holds somewhere."""
        step = self.opaque(module, path, inverted)
        inside = module.named_modules() if isinstance(module, nn.Module) else ()
        step.inside = tuple(found for name, part in inside if name for found in self._own_step(part, f"{path}.{name}"))
        return step

    def _own_step(self, module: nn.Module, path: str) -> Iterator[Step]:
        rule = self.rule(type(module))
        while rule is not None and not isinstance(rule, (type, Container, Registered)):
            rule = rule(module)
        if isinstance(rule, type):
            yield rule(module, path)

    def check_overrides(self, overrides: Mapping[str, str], flow: nn.Module) -> None:
        """Refuses overrides with a path that the flow does not have, or a word that means nothing."""
        paths = {name for name, _ in flow.named_modules()}
        for path, word in overrides.items():
            if path not in paths:
                raise UnknownNameError(f"overrides name no module {path!r} of the flow. {suggest(path, paths - {''})}")
            if word not in ("linear", "nonlinear"):
                raise UnknownNameError(f"overrides[{path!r}] is {word!r}. Valid names: linear, nonlinear.")

    def _registered(self, rule: Registered, module: Any, path: str, inverted: bool, why: str) -> Step:
        if rule.linear:
            return RegisteredLinearStep(self._opaque(module, path), rule, path, inverted)
        step = self._opaque(module, path, inverted)
        step.reason = why or "registered by the user"
        step.registered_smoothness = rule.smoothness
        return step


def comes_from(cls: type, packages: tuple[str, ...]) -> bool:
    """Whether a class is defined in one of these packages.

    Example:
        >>> comes_from(nn.Tanh, ("torch",)), comes_from(dict, ("torch",))
        (True, False)
    """
    return cls.__module__.partition(".")[0] in packages


def takes_context(function: Callable[..., Any] | None) -> bool:
    """Whether a function can be called with ``context=``.

    Example:
        >>> takes_context(lambda x, context=None: x), takes_context(lambda x: x), takes_context(None)
        (True, False, False)
    """
    if function is None:
        return False
    parameters = signature(function).parameters.values()
    return any(parameter.name == "context" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


@cache
def adapters() -> tuple[Adapter, ...]:
    """Loads every installed adapter; one that cannot be loaded is reported and left out."""
    loaded = []
    for point in entry_points(group="ebflow_plugin.adapters"):
        try:
            loaded.append(point.load())
        except Exception as error:  # a broken plug-in must not take the others down
            message = f"adapter {point.name!r} ({point.value}) cannot be loaded: {error}"
            warnings.warn(message, AdapterWarning, stacklevel=2)
    if not loaded:
        raise AdapterError(
            "no adapter is installed: install this package with pip, not by copying it (entry-point group "
            "'ebflow_plugin.adapters')"
        )
    return tuple(loaded)


@dataclass(frozen=True)
class Found:
    """A flow, the adapter that knows it, and where it stood in the object that was given."""

    flow: nn.Module
    adapter: Adapter
    inside: str = ""


def find_flow(model: object) -> Found:
    """Finds the flow that an object is, or the only one that it holds.

    Raises:
        InputError: If it is, or holds, a flow that is wrapped already: its preprocessing and calibration would be lost.
        NotAFlowError: If there is none, or more than one.
    """
    found = list(_flows_in(model))
    if len(found) == 1:
        return found[0]
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    wanted = "\n  ".join(map(_wanted, adapters()))
    if not found:
        raise NotAFlowError(
            f"{kind} is no flow and holds none in its modules and attributes. What can be wrapped:\n  {wanted}"
        )
    places = "\n  ".join(f"{one.inside or '(itself)'}  {type(one.flow).__name__}" for one in found)
    raise NotAFlowError(f"{kind} holds {len(found)} flows; wrap one of them:\n  {places}")


def _wanted(adapter: Adapter) -> str:
    """What an adapter can wrap, and how to get its library where it is missing."""
    hint = "" if adapter.installed else f" ({adapter.name} is not installed: pip install {adapter.name})"
    return f"{adapter.name}: {adapter.flows}{hint}"


def _flows_in(model: object, depth: int = 2) -> Iterator[Found]:
    """Outermost flows, in the object, in its modules, and in the attributes of objects that are no modules."""
    if isinstance(model, EnergyModel):
        raise InputError(
            "a flow is wanted here, and this is an EBFlow, or holds one: what wrap() and calibrate() put around its "
            "flow would be lost. Go on with that EBFlow, or give its .flow; where that is edited in place "
            "(in_place=True), the EBFlow follows."
        )
    for adapter in adapters():
        if adapter.is_flow(model):
            assert isinstance(model, nn.Module)
            yield Found(model, adapter)
            return
    if isinstance(model, nn.Module):
        members: list[tuple[str, object]] = list(model.named_children())
        depth += 1  # the modules of a model are all walked
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
