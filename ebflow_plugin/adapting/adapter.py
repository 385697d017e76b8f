"""Adapter: the interface to one flow library, which walks its flows by the rules of their classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ebflow_plugin.adapting.rules import (
    REGISTERED,
    Container,
    OpaqueStep,
    RegisteredLinearStep,
    RegisteredRule,
    Rule,
)
from ebflow_plugin.errors import UnknownNameError, UnsupportedStepError, suggest
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.registry import altered_part, resolve
from ebflow_plugin.plan.step import LinearStep, Step


class Adapter(ABC):
    """Turns the flows of one library into plans.

    Attributes:
        name: The name of the library.
        flows: A description of the objects that can be wrapped, for error messages.
        models: The names of their classes, a subclass before its parent.
        packages: The packages that the library's classes come from.
        rules: The rule of each class of the library, by class name.
        opaque: The step of a module of unknown class.
        inverted: Whether the density direction is a module's ``inverse``.
        density_methods: The methods of a flow that define its density.
        inverters: The containers whose forward is the inverse of their member. :func:`~ebflow_plugin.unconstrain`
            replaces them together with the member.
        constrained: The linear classes that :func:`~ebflow_plugin.unconstrain` replaces, each with a function that
            returns a module's number of features and whether these are channels of images, or None to leave it.
    """

    name: str
    flows: str
    models: tuple[str, ...]
    packages: tuple[str, ...]
    rules: Mapping[str, Rule]
    opaque: type[OpaqueStep]
    density_methods: tuple[str, ...] = ("log_prob",)
    inverted: bool = False
    inverters: tuple[str, ...] = ()
    constrained: Mapping[str, Callable[[Any], tuple[int, bool] | None]] = MappingProxyType({})

    def is_flow(self, model: object) -> bool:
        """Whether the object is a flow of this library, with a density."""
        return is_a(model, self.models, self.packages)

    @property
    def installed(self) -> bool:
        """Whether the library, or a fork of it, can be imported."""
        own = type(self).__module__.partition(".")[0]  # the adapter's own layers are not the library
        return any(find_spec(package) is not None for package in self.packages if package != own)

    def rule(self, cls: type) -> Rule | None:
        """The rule of exactly this class, if it belongs to the library."""
        return self.rules.get(cls.__name__) if comes_from(cls, self.packages) else None

    @abstractmethod
    def plan(self, flow: Any, overrides: Mapping[str, str] | None = None) -> Plan:
        """Walks the flow, and returns its plan."""

    def own_log_prob(self, flow: Any, x: Tensor, context: Tensor | None) -> Tensor:
        """The library's own ``log_prob``, the reference of the invariant."""
        self.release(flow)
        return flow.log_prob(x) if context is None else flow.log_prob(x, context)

    def release(self, flow: nn.Module) -> None:
        """Empties caches of the library's modules, whose graphs cannot be copied. Does nothing by default."""

    def refuse_own_density(
        self, flow: object, methods: tuple[str, ...] | None = None, packages: tuple[str, ...] | None = None
    ) -> None:
        """Raises if the density of a flow is overridden: it may then not be that of its transforms and its base.

        Arguments:
            flow: The flow.
            methods: The methods that define its density; ``density_methods`` by default.
            packages: The packages that may define them; those of the library by default.
        """
        for name in methods or self.density_methods:
            owner = next((parent for parent in type(flow).__mro__ if name in vars(parent)), None)
            if name in vars(flow) or (owner is not None and not comes_from(owner, packages or self.packages)):
                raise UnsupportedStepError(
                    f"{type(flow).__name__} overrides {name}, so its density may not be that of its transforms and "
                    "base distribution. Wrap a plain flow of the library with the same parts instead."
                )

    def full_layer(self, features: int, images: bool) -> nn.Module:
        """A FullLinear, or a 1 × 1 FullConv2d, of this library: by default that of the adapter's module ``layers``."""
        layers = import_module(f"{type(self).__module__.partition('.')[0]}.layers")
        return layers.FullConv2d(features, kernel_size=1) if images else layers.FullLinear(features)

    @abstractmethod
    def inverse_of(self, module: nn.Module) -> nn.Module:
        """The library's container whose forward is the inverse of a module."""

    def unit(self, flow: nn.Module, path: str, inverted: bool) -> tuple[str, bool]:
        """The module to replace for the step at a path, and whether data passes through its inverse.

        It includes containers that only invert the module: the full layer then has the inverse matrix.
        """
        parent = path.rpartition(".")[0]
        while parent and type(flow.get_submodule(parent)).__name__ in self.inverters:
            path, inverted = parent, not inverted
            parent = path.rpartition(".")[0]
        return path, inverted

    def walk(self, module: Any, path: str, inverted: bool, overrides: Mapping[str, str]) -> Iterator[Step]:
        """Yields the steps of a module in density order, walking into containers.

        Arguments:
            module: A transform of the library.
            path: Its path in the flow.
            inverted: Whether data passes through its inverse.
            overrides: The user's ``"linear"`` or ``"nonlinear"``, by path.
        """
        rule: type[Step] | Container | RegisteredRule | None
        if path in overrides:
            rule, why = RegisteredRule(linear=overrides[path] == "linear"), "override"
        else:
            rule, why = self._rule_of(module)
        if isinstance(rule, Container):
            children = list(rule.children(module))
            for child in reversed(children) if inverted else children:
                child_path = ".".join(part for part in (path, child.name) if part)
                child_inverted = inverted != child.inverted
                if child.step is not None and child_path not in overrides:
                    yield child.step(child.module, child_path, child_inverted)
                else:
                    yield from self.walk(child.module, child_path, child_inverted, overrides)
        elif isinstance(rule, RegisteredRule):
            yield self._registered(rule, module, path, inverted, why)
        elif rule is not None:
            yield rule(module, path, inverted)
        else:
            step = self._opaque(module, path, inverted)
            step.known, step.reason = False, why or "unknown class"
            yield step

    def _rule_of(self, module: Any) -> tuple[type[Step] | Container | RegisteredRule | None, str]:
        """The rule of a module's class, or of a parent that it acts as; or None, and why there is none."""
        rules = {cls: REGISTERED.get(cls) or self.rule(cls) for cls in type(module).__mro__}
        rule: Rule | None
        rule, why = resolve(module, rules.get)
        while rule is not None and not isinstance(rule, (type, Container, RegisteredRule)):  # a function of the module
            rule = rule(module)
        if isinstance(rule, type) and issubclass(rule, LinearStep) and (part := altered_part(module)) is not None:
            return None, f"unknown: {part} inside it is hooked or patched"  # a linear step would not call it
        return rule, why

    def _opaque(self, module: Any, path: str, inverted: bool = False) -> OpaqueStep:
        """The step of a module that is not walked into, with the library's own steps among its submodules."""
        step = self.opaque(module, path, inverted)
        inside = module.named_modules() if isinstance(module, nn.Module) else ()
        step.inside = tuple(inner for name, part in inside if name for inner in self._own_step(part, f"{path}.{name}"))
        return step

    def _own_step(self, module: nn.Module, path: str) -> Iterator[Step]:
        rule = self.rule(type(module))
        while rule is not None and not isinstance(rule, (type, Container, RegisteredRule)):
            rule = rule(module)
        if isinstance(rule, type):
            yield rule(module, path)

    def check_overrides(self, overrides: Mapping[str, str] | None, flow: nn.Module) -> Mapping[str, str]:
        """Returns the overrides; raises if one has an unknown path, or is neither ``linear`` nor ``nonlinear``."""
        overrides = overrides or {}
        paths = {name for name, _ in flow.named_modules()}
        for path, word in overrides.items():
            if path not in paths:
                raise UnknownNameError(f"overrides name no module {path!r} of the flow. {suggest(path, paths - {''})}")
            if word not in ("linear", "nonlinear"):
                raise UnknownNameError(f"overrides[{path!r}] is {word!r}. Valid names: linear, nonlinear.")
        return overrides

    def _registered(self, rule: RegisteredRule, module: Any, path: str, inverted: bool, why: str) -> Step:
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


def is_a(thing: object, names: Collection[str], packages: tuple[str, ...]) -> bool:
    """Whether an object's class, or a parent of it, has one of these names and comes from one of these packages.

    Classes are matched by name, so that an adapter need not import its library.

    Example:
        >>> is_a(nn.Tanh(), ["Module"], ("torch",)), is_a(nn.Tanh(), ["ReLU"], ("torch",))
        (True, False)
    """
    return any(parent.__name__ in names and comes_from(parent, packages) for parent in type(thing).__mro__)
