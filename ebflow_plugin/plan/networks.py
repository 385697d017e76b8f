r"""Networks inside steps as lists of operations with closed-form derivatives: linear layers and activations.

A network of known layers is a list of operations on a stack of tensors, each with an :class:`~.step.Expansion`: its
value, the push of a tangent, the pull of an adjoint, and its contribution to a second derivative. So a coupling needs
no second backward pass: an activation :math:`f` pushes :math:`f'\dot u`, pulls :math:`f'\lambda` and contributes
:math:`\lambda^\top (f''\dot u^2)`; a linear layer is three products.

Layers are recognised by their exact class. Hooks, patches, parametrisations and subclasses make a network opaque: then
:func:`followed` returns None, and autograd differentiates it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebflow_plugin.plan.activations import FUNCTIONS, MODULES
from ebflow_plugin.plan.chains import ACTIVATION, LINEAR, Chain, Derivatives, Layer, backwards, forwards, is_curved
from ebflow_plugin.plan.registry import changes_the_map
from ebflow_plugin.plan.step import Expansion
from ebflow_plugin.plan.values import summed

__all__ = [
    "COPY",
    "SUM",
    "Network",
    "Opaque",
    "Operation",
    "Passage",
    "activated",
    "acts_as_its_class",
    "convolution",
    "follow",
    "follow_class",
    "followed",
    "gated",
    "linear",
    "without_context",
]


class Opaque(Exception):
    """A part of a network has an unknown class, or does not act as its class does."""


@dataclass(frozen=True)
class Operation:
    """An operation that pops tensors from a stack, and pushes its outputs.

    Attributes:
        expand: Computes the expansion from the input tensors and the context.
        takes: The number of input tensors.
        gives: The number of output tensors.
        layer: The operation as a layer of a chain (:mod:`~ebflow_plugin.plan.chains`), if it can be one.
        weight: The matrix of a linear layer.
        bias: Its bias.
        conditioned: Whether the context, if there is one, is appended to its input.
    """

    expand: Callable[[Any, Tensor | None], Expansion]
    takes: int = 1
    gives: int = 1
    layer: Layer | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    conditioned: bool = False


class Passage(NamedTuple):
    """The forward pass of values and tangents through an operation, and its backward pass.

    Attributes:
        value: The output.
        tangents: The tangents of the output.
        pull: Maps the adjoint of the output to that of the input, and to the contributions to the second derivative
            along each tangent; None for no contributions.
        curved: Whether it contributes to the second derivative.
        log_det: Computes the log-det, with shape ``(B,)``. None for linear parts.
    """

    value: Any
    tangents: Sequence[Any]
    pull: Callable[[Any], tuple[Any, Sequence[Tensor] | None]]
    curved: bool
    log_det: Callable[[], Tensor] | None = None


class Network:
    """The operations of a network as one: a chain of linear layers and activations, with a hand-written gradient."""

    takes = gives = 1

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations

    def passed(self, x: Tensor, tangents: Sequence[Tensor], context: Tensor | None) -> Passage:
        """Pushes values and tangents through the chain, which acts on the last dimension of its input."""
        width, leading = x.shape[-1], x.shape[:-1]
        weights, offsets = [], []
        for each in self.operations:
            if each.weight is not None:
                weight, offset = each.weight, each.bias
                if each.conditioned and context is not None:
                    weight, own = weight[:, :width], weight[:, width:]
                    offset = F.linear(_like(context, x), own, offset)
                    if offset.shape[:-1] != leading or len(leading) > 1:
                        offset = offset.expand(*leading, -1).flatten(0, -2)
                weights.append(weight)
                offsets.append(weight.new_zeros(1) if offset is None else offset)
        layers = tuple(each.layer for each in self.operations if each.layer is not None)
        rows = [one.flatten(0, -2) for one in (x, *tangents)]  # no change, except for images
        chain = Chain(layers, len(rows[0]), len(tangents))
        stacked, *stored = forwards(chain, torch.cat(rows) if tangents else rows[0], weights, offsets)
        value, *pushed = stacked.unflatten(0, (1 + len(tangents), chain.rows)).unbind() if tangents else (stacked,)
        if len(leading) > 1:
            value, *pushed = (one.unflatten(0, leading) for one in (value, *pushed))

        def pull(adjoint: Tensor) -> tuple[Tensor, Sequence[Tensor] | None]:
            back, *curvatures = backwards(chain, adjoint.flatten(0, -2), weights, stored)
            if len(leading) > 1:
                back = back.unflatten(0, leading)
                curvatures = [one.unflatten(1, leading).flatten(2).sum(2) for one in curvatures]
            return back, curvatures[0].unbind() if curvatures else None

        return Passage(value, pushed, pull, any(is_curved(layer) for layer in layers))


# --- operations ----------------------------------------------------------------------------------------------------


def linear(weight: Tensor, bias: Tensor | None, conditioned: bool = False) -> Operation:
    """W x + b, on vectors; if it is conditioned, the context is appended to x."""

    def expand(x: Tensor, context: Tensor | None) -> Expansion:
        own, value = weight, x
        if conditioned and context is not None:
            own = weight[:, : x.shape[-1]]
            value = torch.cat((x, _like(context, x).expand(*x.shape[:-1], -1)), dim=-1)
        y = F.linear(value, weight, bias)
        return Expansion(y, lambda tangent: F.linear(tangent, own), lambda adjoint: adjoint @ own)

    return Operation(expand, layer=Layer(LINEAR), weight=weight, bias=bias, conditioned=conditioned)


def convolution(layer: nn.Conv2d) -> Operation:
    """A convolution with stride 1 and zero padding.

    Raises:
        Opaque: If it has another stride or padding.
    """
    weight, bias, padding, dilation, groups = layer.weight, layer.bias, layer.padding, layer.dilation, layer.groups
    if layer.padding_mode != "zeros" or isinstance(padding, str) or tuple(layer.stride) != (1, 1):
        raise Opaque

    def forward(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.conv2d(x, weight, bias, 1, padding, dilation, groups)

    def pull(adjoint: Tensor) -> Tensor:
        return F.conv_transpose2d(adjoint, weight, None, 1, padding, 0, groups, dilation)

    return Operation(lambda x, context: Expansion(forward(x, bias), forward, pull))


def _like(context: Tensor, x: Tensor) -> Tensor:
    """The context, with integers in the dtype of x, as after a concatenation with x."""
    return context if context.is_floating_point() else context.to(x.dtype)


def gated(gate: Callable[[Tensor | None], Tensor | None]) -> Operation:
    """Multiplies x by a gate, elementwise, which depends only on the context; None means the identity."""

    def expand(x: Tensor, context: Tensor | None) -> Expansion:
        factor = gate(context)
        if factor is None:
            return Expansion(x, lambda tangent: tangent, lambda adjoint: adjoint)
        return Expansion(x * factor, lambda tangent: tangent * factor, lambda adjoint: adjoint * factor)

    return Operation(expand)


def activated(derivatives: Derivatives) -> Operation:
    """f(x), elementwise.

    Arguments:
        derivatives: Yields f and its first three derivatives at a point; only the first if f is piecewise linear.
    """

    def expand(x: Tensor, context: Tensor | None) -> Expansion:
        value, slope, *bend = islice(derivatives(x), 3)

        def curvature(adjoint: Tensor, tangent: Tensor) -> Tensor:
            return summed(adjoint * bend[0] * tangent * tangent)

        return Expansion(
            value,
            push=lambda tangent: tangent * slope,
            pull=lambda adjoint: adjoint * slope,
            curvature=curvature if bend else None,
        )

    return Operation(expand, layer=Layer(ACTIVATION, derivatives))


def without_context(operation: Operation) -> Operation:
    """The same operation for a library that does not pass the context to its networks."""
    if operation.layer is not None and not operation.conditioned:
        return operation  # it does not use a context
    return replace(operation, expand=lambda x, context: operation.expand(x, None), conditioned=False)


COPY = Operation(
    lambda x, context: Expansion((x, x), lambda dx: (dx, dx), lambda dy: dy[0] + dy[1]), gives=2, layer=Layer("copy")
)
SUM = Operation(
    lambda x, context: Expansion(x[0] + x[1], lambda dx: dx[0] + dx[1], lambda dy: (dy, dy)),
    takes=2,
    layer=Layer("sum"),
)


# --- following -----------------------------------------------------------------------------------------------------

Follow = Callable[[Any], Iterable[Operation]]


def followed(networks: Iterable[Operation]) -> list[Operation] | None:
    """The operations as a list, or None if one of the parts is opaque.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        >>> len(followed(follow(net))), followed(follow(nn.LayerNorm(2)))
        (2, None)
    """
    try:
        return list(networks)
    except Opaque:
        return None


def follow(part: Any, conditioned: bool = False) -> Iterator[Operation]:
    """The operations of a layer, a network or an activation function.

    Arguments:
        part: A module, or a function.
        conditioned: Whether the context, if there is one, is appended to the input of the part, a linear layer.

    Raises:
        Opaque: If the part is unknown, when the iteration reaches it.
    """
    if not isinstance(part, nn.Module):
        derivatives = FUNCTIONS.get(part)
        if derivatives is None:
            raise Opaque
        yield activated(derivatives)
        return
    if not acts_as_its_class(part):
        raise Opaque
    cls = type(part)
    if cls in MODULES:
        derivatives = MODULES[cls](part)
        if derivatives is None or getattr(part, "inplace", False):  # in place, it would change its input
            raise Opaque
        yield activated(derivatives)
    elif isinstance(part, nn.Linear) and cls is nn.Linear:
        yield linear(part.weight, part.bias, conditioned)
    elif isinstance(part, nn.Conv2d) and cls is nn.Conv2d and not conditioned:
        yield convolution(part)
    elif cls is nn.Sequential:
        for member in part._modules.values():
            yield from follow(member)
    elif cls is nn.Dropout:
        if part.training and part.p:
            raise Opaque
    elif cls is not nn.Identity:
        known = _CLASSES.get((cls.__module__.partition(".")[0], cls.__name__))
        if known is None:
            raise Opaque
        yield from known(part)


def acts_as_its_class(module: nn.Module) -> bool:
    """Whether a module is neither hooked nor patched; its submodules are not checked."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    if type(module).__module__.startswith("torch.nn."):  # called for each layer of each batch: check a single name
        return "forward" not in module.__dict__
    return changes_the_map(module, type(module)) is None


_CLASSES: dict[tuple[str, str], Follow] = {}


def follow_class(package: str, name: str, how: Follow) -> None:
    """Registers the operations of a network class of a flow library, by its exact name. For adapters.

    Example:
        >>> follow_class("my_flows", "MyNet", lambda net: follow(net.layers))
    """
    _CLASSES[package, name] = how
