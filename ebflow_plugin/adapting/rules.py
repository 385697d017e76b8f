"""The rules of classes: how modules of a class act, from an adapter's table or registered by users."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError, UnknownNameError, suggest
from ebflow_plugin.linalg.memo import own_tensors
from ebflow_plugin.plan.registry import Registry
from ebflow_plugin.plan.smooth_modules import Smoothness
from ebflow_plugin.plan.smoothness import REGISTERED_NETWORKS
from ebflow_plugin.plan.step import LinearStep, NonlinearStep, Shape, Shapes, Step
from ebflow_plugin.plan.values import Value


@dataclass(frozen=True)
class Child:
    """One member of a container, in the order of the container's own forward.

    Attributes:
        name: The path of the member in the container, dotted; empty for the container itself.
        module: The member.
        inverted: Whether the container's forward runs the member's inverse.
        step: A step to use without walking into the member (a split, say).
    """

    name: str
    module: Any
    inverted: bool = False
    step: type[Step] | None = None


@dataclass(frozen=True)
class Container:
    """The rule of a class that only composes its members."""

    children: Callable[[Any], Iterable[Child]]

    @classmethod
    def of_list(cls, name: str) -> Container:
        """The rule of a class with a list of members, in the order of its forward."""
        return cls(lambda module: (Child(f"{name}.{place}", one) for place, one in enumerate(getattr(module, name))))

    @classmethod
    def of_one(cls, name: str, inverted: bool = False) -> Container:
        """The rule of a class around one member."""
        return cls(lambda module: [Child(name, getattr(module, name), inverted)])


@dataclass(frozen=True)
class RegisteredRule:
    """The rule of a class that a user registered, with functions in place of the module's own methods."""

    linear: bool
    apply: Callable[..., Tensor] | None = None
    invert: Callable[..., Tensor] | None = None
    log_det: Callable[..., Tensor | float] | None = None
    cost: str = "its own"
    smoothness: Smoothness = Smoothness.UNKNOWN


# A function returns the rule of a given module, or None for an unknown one.
Rule = type[Step] | Container | RegisteredRule | Callable[[Any], "Rule | None"]
REGISTERED: Registry[type, Container | RegisteredRule] = Registry("rule")


def registered_smoothness(cls: type) -> Smoothness | None:
    """The registered smoothness of a class; None if the class is not registered, or is a container."""
    rule = REGISTERED.get(cls)
    return rule.smoothness if isinstance(rule, RegisteredRule) else None


class SeenShapesStep(Step):
    """A step of unknown output shapes, which records those of the data that pass through it.

    A custom reshape is an example: later steps need its output shape for their log-dets.
    """

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        self._seen: dict[Shapes, Shapes] = {}

    def encode(self, x: Any, context: Tensor | None) -> tuple[Any, Tensor | None]:
        value, log_det = super().encode(x, context)  # type: ignore[safe-super]
        if not torch.compiler.is_compiling():
            self._seen[_event_shapes(x)] = _event_shapes(value)
        return value, log_det

    def shapes(self, shapes: Shapes, *, back: bool = False) -> Shapes:
        if back:
            return super().shapes(shapes, back=True)
        if shapes not in self._seen and self.n_out != self.n_in:
            raise InputError(
                f"{self.where} has unknown output shapes until data pass through it: compute an energy first"
            )
        return self._seen.get(shapes, shapes)


def _copied(value: Value) -> Value:
    return value.clone() if isinstance(value, Tensor) else tuple(part.clone() for part in value)


def _event_shapes(value: Value) -> Shapes:
    return tuple(tuple(part.shape[1:]) for part in ((value,) if isinstance(value, Tensor) else value))


class OpaqueStep(SeenShapesStep, NonlinearStep):
    """A module of unknown class, with its own log-det. It receives a copy of its input, since it may write into it.

    An adapter derives from this, and from its class that calls the library's modules.
    """

    registered_smoothness: Smoothness = Smoothness.UNKNOWN
    inside: tuple[Step, ...] = ()  # steps of the library among the submodules, which may be refused

    def call_forward(self, x: Any, context: Tensor | None) -> tuple[Any, Any]:
        return super().call_forward(_copied(x), context)  # type: ignore[safe-super]

    def call_inverse(self, y: Any, context: Tensor | None) -> tuple[Any, Any]:
        return super().call_inverse(_copied(y), context)  # type: ignore[safe-super]

    def refusal(self) -> str | None:
        for step in self.inside:
            why = step.refusal()
            if why is not None:
                return f"holds {step.class_name} at {step.path!r}: {why}"
        return super().refusal()

    @property
    def smoothness(self) -> Smoothness:
        return self.registered_smoothness


class RegisteredLinearStep(SeenShapesStep, LinearStep):
    """A module registered as affine in x. The module's own methods are used where no function is registered."""

    reason = "registered by the user"

    def __init__(self, module: NonlinearStep, rule: RegisteredRule, path: str, inverted: bool) -> None:
        super().__init__(module.module, path, inverted)
        self._caller, self._rule = module, rule
        self.cost = rule.cost

    def refusal(self) -> str | None:
        return self._caller.refusal()

    @property
    def class_name(self) -> str:
        return self._caller.class_name

    def apply(self, x: Tensor) -> Tensor:
        if self._rule.apply is not None:
            return self._rule.apply(self.module, x)
        return self._caller.call_forward(x, None)[0]

    def invert(self, y: Tensor) -> Tensor:
        if self._rule.invert is not None:
            return self._rule.invert(self.module, y)
        return self._caller.call_inverse(y, None)[0]

    def log_abs_det(self, shape: Shape) -> Tensor | float:
        return self._log_abs_det(shape, None)

    def log_det(self, shapes: Shapes, like: Tensor | None = None) -> Tensor | float:
        own = self._log_abs_det(self.own_input(shapes), like)
        return -own if self.inverted else own

    def _log_abs_det(self, shape: Shape, like: Tensor | None) -> Tensor | float:
        if self._rule.log_det is not None:
            return self._rule.log_det(self.module, shape)
        anchor = next(filter(Tensor.is_floating_point, own_tensors(self.module)), like)
        zero = torch.zeros(1, *shape) if anchor is None else anchor.new_zeros(1, *shape)
        log_det = self._caller.call_forward(zero, None)[1]
        return log_det.reshape(-1)[0] if isinstance(log_det, Tensor) else float(log_det)


def register_linear(
    cls: type,
    *,
    apply: Callable[..., Tensor] | None = None,
    invert: Callable[..., Tensor] | None = None,
    log_det: Callable[..., Tensor | float] | None = None,
    cost: str = "its own",
    force: bool = False,
) -> type:
    """Registers a class as affine in x, so that its log-det belongs to log Z and not to the energy.

    Exact types only: a subclass that overrides a method is unknown again. Also works as a decorator. A linear step
    receives no context: if the map depends on a context, so does its log-det, and the class is nonlinear.

    Arguments:
        cls: The class of transforms.
        apply: ``apply(module, x)``, the forward map without its log-det. By default the module's own forward is
            called and its log-det dropped: correct, but not cheaper.
        invert: ``invert(module, y)``; by default the module's own inverse.
        log_det: ``log_det(module, event_shape)``, log|det| of the forward map; by default what the module's forward
            returns for a zero input. It is called for each ``log_prob``, and not cached, since its dependencies are
            unknown.
        cost: The cost of the log-det, for the report.
        force: Replaces an existing registration.

    Example:
        >>> from torch import nn
        >>> class Shift(nn.Module):
        ...     def forward(self, x, context=None):
        ...         return x + 1.0, x.new_zeros(len(x))
        >>> register_linear(Shift, log_det=lambda module, shape: 0.0) is Shift
        True
    """
    REGISTERED.add(cls, RegisteredRule(True, apply, invert, log_det, cost), force)
    REGISTERED_NETWORKS.pop(cls, None)
    return cls


def register_nonlinear(cls: type, *, smoothness: str = "unknown", force: bool = False) -> type:
    """Registers a class as nonlinear: it keeps its own log-det, as an unknown class does, without the warning.

    The class of a network inside couplings can be registered too. The smoothness of a custom ``forward`` is unknown,
    and SSM warns that the coupling may not be smooth until it is registered as smooth.

    Arguments:
        cls: The class of transforms, or of networks inside them.
        smoothness: ``"smooth"`` if its score is continuous, ``"score jumps"``, ``"density jumps"`` or ``"unknown"``.
        force: Replaces an existing registration.

    Example:
        >>> from torch import nn
        >>> class Warp(nn.Module):
        ...     def forward(self, x, context=None):
        ...         return x.sinh(), x.cosh().log().sum(-1)
        >>> register_nonlinear(Warp, smoothness="smooth") is Warp
        True
    """
    try:
        kind = Smoothness(smoothness)
    except ValueError:
        raise UnknownNameError(f"unknown smoothness {smoothness!r}. {suggest(smoothness, list(Smoothness))}") from None
    REGISTERED.add(cls, RegisteredRule(False, smoothness=kind), force)
    REGISTERED_NETWORKS.add(cls, kind, force=True)
    return cls


def register_container(
    cls: type, children: Callable[[Any], Iterable[tuple[str, Any] | Child]], *, force: bool = False
) -> type:
    """Registers a class that only composes its members, so that each of them is walked and classified.

    Arguments:
        cls: The class of transforms.
        children: ``children(module)`` returns ``(name, member)`` pairs in the order of the module's own forward;
            ``name`` is the dotted path from the module to the member. A :class:`Child` has more options than a pair.
        force: Replaces an existing registration.

    Example:
        >>> from torch import nn
        >>> class Pair(nn.Module):
        ...     pass
        >>> register_container(Pair, lambda pair: [("first", pair.first), ("second", pair.second)]) is Pair
        True
    """

    def listed(module: Any) -> Iterator[Child]:
        return (child if isinstance(child, Child) else Child(*child) for child in children(module))

    REGISTERED.add(cls, Container(listed), force)
    REGISTERED_NETWORKS.pop(cls, None)
    return cls
