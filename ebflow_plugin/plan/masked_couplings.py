r"""Masked affine couplings in closed form: with a mask b in place of indices, and two networks, s and t, of b · x.

.. math:: y = bx + (1 - b)(x\,e^{s} + t), \qquad \log|\det| = \sum (1 - b)\,s

As in :mod:`~.couplings`, they are sequences of operations: a split, those of the networks, and a merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.plan.couplings import as_one, inside_of, reduced
from ebflow_plugin.plan.networks import Network, Operation
from ebflow_plugin.plan.step import Expandable, Expansion
from ebflow_plugin.plan.values import summed

__all__ = ["masked_coupling"]


def masked_coupling(mask: Tensor, scales: Any, shifts: Any, *, divide: bool) -> Sequence[Expandable | Network] | None:
    r"""The operations of a masked coupling; None in the cases of :func:`~.couplings.coupling`.

    Arguments:
        mask: The mask b, with a batch dimension and any values.
        scales: The network s; None for s = 0.
        shifts: The network t; None for t = 0.
        divide: Whether it is :math:`y = bx + (1 - b)(x - t)\,e^{-s}`.
    """
    if scales is None and shifts is None:
        return None  # the identity
    operations: list[Expandable | Network] = [_masked_split(mask, (scales is not None) + (shifts is not None))]
    for network in (shifts, scales):
        if network is None:
            continue
        inside = inside_of(network, conditional=False)
        if inside is None:
            return None
        if len(operations) > 1:
            operations.append(SWAP)
        operations += as_one(inside, network)
    return *operations, _masked_merge(mask, scales is not None, shifts is not None, divide)


SWAP = Operation(
    lambda x, context: Expansion(x[::-1], lambda tangent: tangent[::-1], lambda adjoint: adjoint[::-1]),
    takes=2,
    gives=2,
)


def _masked_split(mask: Tensor, networks: int) -> Operation:
    """Splits x into x, and one copy of b · x for each network."""

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        if x.dim() != mask.dim():
            raise InputError(f"a mask of shape {tuple(mask.shape[1:])} got x of shape {tuple(x.shape)}")
        return x, *[mask * x] * networks

    def pull(adjoint: tuple[Tensor, ...]) -> Tensor:
        own, *others = adjoint
        return own + mask * sum(others[1:], others[0])

    return Operation(lambda x, context: Expansion(forward(x), forward, pull), gives=1 + networks)


def _masked_merge(mask: Tensor, scaling: bool, shifting: bool, divide: bool) -> Operation:
    """Merges x, t and s (if they exist, with s on top) to y."""
    free = 1 - mask

    def parts(x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return x[0], x[1] if shifting else None, x[-1] if scaling else None

    def expand(x: tuple[Tensor, ...], context: Tensor | None) -> Expansion:
        own, shift, log = parts(x)
        if shift is not None:
            shift = _finite_or_nan(shift)
        if log is not None:
            log = -_finite_or_nan(log) if divide else _finite_or_nan(log)
        scale = None if log is None else log.exp()
        c = own if shift is None or not divide else own - shift
        stretched = c if scale is None else c * scale
        changed = stretched if shift is None or divide else stretched + shift

        def moved(tangent: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
            """The tangents of c, of t if it is added, and of ± s."""
            dx, dt, dlog = parts(tangent)
            if dlog is not None and divide:
                dlog = -dlog
            return (dx - dt, None, dlog) if dt is not None and divide else (dx, dt, dlog)

        def push(tangent: tuple[Tensor, ...]) -> Tensor:
            dc, dt, dlog = moved(tangent)
            dy = dc if scale is None or dlog is None else torch.addcmul(dc * scale, stretched, dlog)
            return mask * tangent[0] + free * (dy if dt is None else dy + dt)

        def pull(adjoint: Tensor) -> tuple[Tensor, ...]:
            to_y = free * adjoint
            to_c = to_y if scale is None else to_y * scale
            back = [mask * adjoint + to_c]
            if shift is not None:
                back.append(reduced(-to_c if divide else to_y, shift))
            if log is not None:
                to_log = reduced(to_y * stretched - free, log)
                back.append(-to_log if divide else to_log)
            return tuple(back)

        def curvature(adjoint: Tensor, tangent: tuple[Tensor, ...]) -> Tensor:
            dc, _, dlog = moved(tangent)
            assert scale is not None
            assert dlog is not None
            return summed(free * adjoint * dlog * torch.addcmul(2.0 * dc * scale, stretched, dlog))

        value = mask * own + free * changed
        if log is None:
            return Expansion(value, push, pull)
        return Expansion(value, push, pull, curvature, lambda: summed(free * log))

    return Operation(expand, takes=1 + scaling + shifting)


def _finite_or_nan(h: Tensor) -> Tensor:
    """Replaces infinities by NaN, as normflows does."""
    return h + 0.0 * h.detach()
