r"""Affine couplings in closed form: a network h(a) of some features scales and shifts the others.

.. math:: y = c\,e^{L} + q, \qquad \log|\det| = \sum L

with :math:`c = b,\ q = t` in one direction and :math:`c = b - t,\ q = 0` in the other, where the shift t and the
log-scale L are computed from h. A coupling is a sequence of operations: a split, those of the network
(:mod:`~.networks`), and a merge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebflow_plugin.errors import InputError
from ebflow_plugin.plan.derivatives import transformed
from ebflow_plugin.plan.networks import Network, Operation, follow, followed, linear, without_context
from ebflow_plugin.plan.step import Expandable, Expansion
from ebflow_plugin.plan.values import summed

__all__ = [
    "FIRST_SECOND",
    "INTERLEAVED",
    "INTERLEAVED_LAST",
    "PAIR",
    "Halves",
    "LogScale",
    "affine",
    "as_one",
    "coupling",
    "exponential_scale",
    "indexed",
    "inside_of",
    "negative_scale",
    "reduced",
    "shifted",
    "sigmoid_scale",
    "soft_clipped_scale",
]


@dataclass(frozen=True)
class LogScale:
    """A log-scale L as an elementwise function of a network's output, with its derivatives.

    Attributes:
        value: L.
        slope: L'; a number means the same value everywhere.
        bend: L''.
    """

    value: Tensor
    slope: Tensor | float
    bend: Tensor | float


def exponential_scale(u: Tensor) -> LogScale:
    """L = u."""
    return LogScale(u, 1.0, 0.0)


def sigmoid_scale(u: Tensor, floor: float = 0.0) -> LogScale:
    """L = log(sigmoid(u + 2) + floor), the scale of Glow.

    Example:
        >>> sigmoid_scale(torch.tensor([-2.0]))
        LogScale(value=tensor([-0.6931]), slope=tensor([0.5000]), bend=tensor([-0.2500]))
    """
    if floor == 0.0:
        value = F.logsigmoid(u + 2.0)
        share = value.exp()
        return LogScale(value, 1.0 - share, (share - 1.0) * share)
    share = torch.sigmoid(u + 2.0)
    scale = share + floor
    bell = share * (1.0 - share)
    slope = bell / scale
    return LogScale(scale.log(), slope, slope * (1.0 - 2.0 * share - slope))


def negative_scale(log_scale: Callable[[Tensor], LogScale]) -> Callable[[Tensor], LogScale]:
    """The log-scale -L, for a coupling that divides by a scale.

    Example:
        >>> negative_scale(exponential_scale)(torch.tensor([2.0]))
        LogScale(value=tensor([-2.]), slope=-1.0, bend=-0.0)
    """

    def negative(u: Tensor) -> LogScale:
        scale = log_scale(u)
        return LogScale(-scale.value, -scale.slope, -scale.bend)

    return negative


def soft_clipped_scale(u: Tensor, bound: float) -> LogScale:
    """L = u / (1 + |u| / bound), the scale of zuko.

    Example:
        >>> soft_clipped_scale(torch.tensor([2.0]), 2.0)
        LogScale(value=tensor([1.]), slope=tensor([0.2500]), bend=tensor([-0.1250]))
    """
    share = 1.0 / (1.0 + u.abs() / bound)
    slope = share * share
    return LogScale(u * share, slope, (-2.0 / bound) * u.sign() * slope * share)


@dataclass(frozen=True)
class Halves:
    """A split of features into two parts, and its inverse.

    Attributes:
        apart: Returns the conditioning features and those to transform; or the shifts and the scales.
        together: The inverse of ``apart``.
        tensors: The number of tensors before the split: 1, or 2 if a step works on a pair.
    """

    apart: Callable[[Any], tuple[Tensor, Tensor]]
    together: Callable[[Tensor, Tensor], Any]
    tensors: int = 1


def _pairs(h: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    if h.shape[dim] % 2:  # a library may have one more shift than scales
        even, odd = (torch.arange(start, h.shape[dim], 2, device=h.device) for start in (0, 1))
        return h.index_select(dim, even), h.index_select(dim, odd)
    # One unbind, not two slices: its backward needs no sum of two gradients.
    first, second = h.unflatten(dim, (h.shape[dim] // 2, 2)).unbind(dim + 1 if dim >= 0 else dim)
    return first, second


FIRST_SECOND = Halves(lambda h: h.tensor_split(2, dim=1), lambda t, u: torch.cat((t, u), dim=1))
INTERLEAVED = Halves(lambda h: _pairs(h, 1), lambda t, u: torch.stack((t, u), dim=2).flatten(1, 2))
INTERLEAVED_LAST = Halves(lambda h: _pairs(h, -1), lambda t, u: torch.stack((t, u), dim=-1).flatten(-2))
PAIR = Halves(lambda pair: pair, lambda a, b: (a, b), 2)


def indexed(constant: Tensor, changed: Tensor, dim: int = 1) -> Halves:
    """A split by indices along a dimension, the second one by default.

    Example:
        >>> halves = indexed(torch.tensor([1]), torch.tensor([0, 2]))
        >>> a, b = halves.apart(torch.tensor([[5, 6, 7]]))
        >>> a, b, halves.together(a, b)
        (tensor([[6]]), tensor([[5, 7]]), tensor([[5, 6, 7]]))
    """
    order = torch.cat((constant, changed))
    places, sizes = torch.argsort(order), [len(constant), len(changed)]

    def apart(x: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[dim] != len(order):
            raise InputError(f"a coupling of {len(order)} features got x of shape {tuple(x.shape)}")
        a, b = x.index_select(dim, order).split(sizes, dim=dim)
        return a, b

    return Halves(apart, lambda a, b: torch.cat((a, b), dim=dim).index_select(dim, places))


def coupling(
    halves: Halves, network: nn.Module, merge: Operation, *, conditional: bool = True, appended: bool = False
) -> Sequence[Expandable | Network] | None:
    """The operations of a coupling; None if its network is opaque, or in ``torch.func`` and ``torch.compile``.

    Arguments:
        halves: The split of the features.
        network: The network that computes shifts and scales from the conditioning features.
        merge: :func:`affine` or :func:`shifted`.
        conditional: Whether the library passes the context to the network.
        appended: Whether it appends the context to the conditioning features instead.
    """
    inside = inside_of(network, conditional and not appended)
    if inside is None:
        return None
    if appended:
        weight = inside[0].weight if inside else None
        if weight is None:
            return None  # only a linear layer can separate the context from the features
        inside = [linear(weight, inside[0].bias, conditioned=True), *inside[1:]]
    return split(halves), *as_one(inside, network), merge


def inside_of(network: Any, conditional: bool) -> list[Operation] | None:
    """The operations of a network, or None if it is opaque, or takes no context where the library passes one."""
    refuses = conditional and type(network).__module__.startswith("torch.nn.")  # its forward has a single input
    inside = None if refuses or transformed() else followed(follow(network))
    return inside if conditional or inside is None else [without_context(each) for each in inside]


def as_one(inside: list[Operation], network: Any) -> Sequence[Expandable | Network]:
    """The operations of a network as one, if they are a chain."""
    # Functions with a hand-written gradient do not support autocast.
    parameters = network.parameters() if isinstance(network, nn.Module) else iter(())
    device = next((parameter.device.type for parameter in parameters), "cpu")
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    one = all(each.layer is not None for each in inside) and not autocast
    return (Network(inside),) if one else inside


def split(halves: Halves) -> Operation:
    """Splits x into a and b, and copies a for the network."""

    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = halves.apart(x)
        return a, b, a

    def pull(adjoint: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        a, b, again = adjoint
        return halves.together(a + again, b)

    return Operation(lambda x, context: Expansion(forward(x), forward, pull), takes=halves.tensors, gives=3)


def shifted(halves: Halves, sign: float) -> Operation:
    """a, b and h to a and b ± h: a coupling whose log-det is 0."""

    def forward(x: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        a, b, h = x
        return halves.together(a, b + h if sign > 0 else b - h)

    def expand(x: tuple[Tensor, Tensor, Tensor], context: Tensor | None) -> Expansion:
        def pull(adjoint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            a, b = halves.apart(adjoint)
            return a, reduced(b, x[1]), reduced(b if sign > 0 else -b, x[2])

        return Expansion(forward(x), forward, pull)

    return Operation(expand, takes=3, gives=halves.tensors)


def affine(halves: Halves, layout: Halves, log_scale: Callable[[Tensor], LogScale], divide: bool) -> Operation:
    """a, b and h to a and b · exp(L) + t, or with ``divide`` to a and (b - t) · exp(-L)."""

    def expand(x: tuple[Tensor, Tensor, Tensor], context: Tensor | None) -> Expansion:
        a, b, h = x
        shift, u = layout.apart(h)
        at = negative_scale(log_scale)(u) if divide else log_scale(u)
        log, slope, bend = at.value, at.slope, at.bend
        scale = log.exp()
        c = b - shift if divide else b
        stretched = c * scale
        value = halves.together(a, stretched if divide else stretched + shift)

        def moved(tangent: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            """The tangents of c, of L, of t and of u."""
            _, db, dh = tangent
            dt, du = layout.apart(dh)
            return (db - dt if divide else db), du * slope, dt, du

        def push(tangent: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            dc, dlog, dt, _ = moved(tangent)
            dy = torch.addcmul(dc * scale, stretched, dlog)
            return halves.together(tangent[0], dy if divide else dy + dt)

        def pull(adjoint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            to_a, to_y = halves.apart(adjoint)
            to_c = to_y * scale
            to_u = (reduced(to_y * stretched, u) - 1.0) * slope
            to_shift = reduced(-to_c if divide else to_y, shift)
            return to_a, reduced(to_c, b), layout.together(to_shift, to_u)

        def curvature(adjoint: Tensor, tangent: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            _, to_y = halves.apart(adjoint)
            dc, dlog, _, du = moved(tangent)
            total = to_y * dlog * torch.addcmul(2.0 * dc * scale, stretched, dlog)
            if isinstance(bend, Tensor):
                more = (reduced(to_y * stretched, u) - 1.0) * bend * du.square()
                return summed(total + more) if more.shape == total.shape else summed(total) + summed(more)
            return summed(total)

        return Expansion(value, push, pull, curvature, lambda: summed(log))

    return Operation(expand, takes=3, gives=halves.tensors)


def reduced(adjoint: Tensor, to: Tensor) -> Tensor:
    """The adjoint of a tensor that was broadcast: a network may make one shift for many features."""
    return adjoint if adjoint.shape == to.shape else adjoint.sum_to_size(to.shape)
