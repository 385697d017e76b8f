r"""Affine couplings in closed form: a network h(a) of some features scales and shifts the others.

.. math:: y = c\,e^{L} + q, \qquad \log|\det| = \sum L

with :math:`c = b,\ q = t` in one direction and :math:`c = b - t,\ q = 0` in the other, where the shift t and the
log-scale L are computed from h. A coupling is a sequence of operations: a split, those of the network
(:mod:`~.networks`), and a merge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebflow_plugin.errors import InputError
from ebflow_plugin.plan.derivatives import transformed
from ebflow_plugin.plan.networks import Network, Operation, follow, followed, without_context
from ebflow_plugin.plan.step import Expandable, Expansion
from ebflow_plugin.plan.values import summed

__all__ = [
    "FIRST_SECOND",
    "INTERLEAVED",
    "PAIR",
    "Halves",
    "LogScale",
    "affine",
    "coupling",
    "exponential_scale",
    "indexed",
    "shifted",
    "sigmoid_scale",
]


class LogScale(NamedTuple):
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


class Halves(NamedTuple):
    """A split of features into two parts, and its inverse.

    Attributes:
        apart: Returns the conditioning features and those to transform; or the shifts and the scales.
        together: The inverse of ``apart``.
        tensors: The number of tensors before the split: 1, or 2 if a step works on a pair.
    """

    apart: Callable[[Any], tuple[Tensor, Tensor]]
    together: Callable[[Tensor, Tensor], Any]
    tensors: int = 1


FIRST_SECOND = Halves(lambda h: h.tensor_split(2, dim=1), lambda t, u: torch.cat((t, u), dim=1))
INTERLEAVED = Halves(lambda h: (h[:, 0::2], h[:, 1::2]), lambda t, u: torch.stack((t, u), dim=2).flatten(1, 2))
PAIR = Halves(lambda pair: pair, lambda a, b: (a, b), 2)


def indexed(constant: Tensor, changed: Tensor) -> Halves:
    """The features with these indices in the second dimension.

    Example:
        >>> halves = indexed(torch.tensor([1]), torch.tensor([0, 2]))
        >>> a, b = halves.apart(torch.tensor([[5, 6, 7]]))
        >>> a, b, halves.together(a, b)
        (tensor([[6]]), tensor([[5, 7]]), tensor([[5, 6, 7]]))
    """
    order = torch.cat((constant, changed))
    places, sizes = torch.argsort(order), [len(constant), len(changed)]

    def apart(x: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[1] != len(order):
            raise InputError(f"a coupling of {len(order)} features got x of shape {tuple(x.shape)}")
        a, b = x.index_select(1, order).split(sizes, dim=1)
        return a, b

    return Halves(apart, lambda a, b: torch.cat((a, b), dim=1).index_select(1, places))


def coupling(
    halves: Halves, network: nn.Module, merge: Operation, *, conditional: bool = True
) -> Sequence[Expandable | Network] | None:
    """A coupling as operations; None if its network is not of known layers, or in ``torch.func`` and ``torch.compile``.

    Arguments:
        halves: How the features are taken apart.
        network: What makes shifts and scales of the features that decide.
        merge: :func:`affine` or :func:`shifted`.
        conditional: Whether the library hands the context to the network.
    """
    inside = None if transformed() else followed(follow(network))
    if inside is None:
        return None
    if not conditional:
        inside = [without_context(each) for each in inside]
    # Functions with a gradient by hand know nothing of autocast.
    device = next((parameter.device.type for parameter in network.parameters()), "cpu")
    one = all(each.layer is not None for each in inside) and not torch.is_autocast_enabled(device)
    return split(halves), *((Network(inside),) if one else inside), merge


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

    def pull(adjoint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = halves.apart(adjoint)
        return a, b, b if sign > 0 else -b

    return Operation(lambda x, context: Expansion(forward(x), forward, pull), takes=3, gives=halves.tensors)


def affine(halves: Halves, layout: Halves, log_scale: Callable[[Tensor], LogScale], divide: bool) -> Operation:
    """a, b and h to a and b · exp(L) + t, or with ``divide`` to a and (b - t) · exp(-L)."""

    def expand(x: tuple[Tensor, Tensor, Tensor], context: Tensor | None) -> Expansion:
        a, b, h = x
        shift, u = layout.apart(h)
        log, slope, bend = log_scale(u)
        if divide:
            log, slope, bend = -log, -slope, -bend
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
            to_u = (to_y * stretched - 1.0) * slope
            return to_a, to_c, layout.together(-to_c if divide else to_y, to_u)

        def curvature(adjoint: Tensor, tangent: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            _, to_y = halves.apart(adjoint)
            dc, dlog, _, du = moved(tangent)
            total = to_y * dlog * torch.addcmul(2.0 * dc * scale, stretched, dlog)
            if isinstance(bend, Tensor):
                total = total + (to_y * stretched - 1.0) * bend * du.square()
            return summed(total)

        return Expansion(value, push, pull, curvature, lambda: summed(log))

    return Operation(expand, takes=3, gives=halves.tensors)
