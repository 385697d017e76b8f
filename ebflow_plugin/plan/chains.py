r"""A network as one function of values, tangents and adjoints, with a hand-written gradient.

For the operations of :mod:`~ebflow_plugin.plan.networks`, autograd would run thousands of small products. Here a chain
of linear layers and activations is two functions, each with its gradient in closed form:

- forwards, on the stacked rows :math:`(u, \dot u_1, \dots)`, with one product per matrix. An activation maps them to
  :math:`(f, f'\dot u)`, and stores :math:`P = f'` and :math:`M = f''\dot u^2`.
- backwards, on the adjoint: :math:`\lambda \mapsto P\lambda` at an activation, which adds :math:`\lambda^\top M` to the
  second derivative.

The gradient of the first is

.. math:: \bar u = f'\bar f + f''(\bar P + \textstyle\sum \dot u\,\bar{\dot f}) + f'''\sum \dot u^2 \bar M, \qquad
          \bar{\dot u} = f'\bar{\dot f} + 2 f'' \dot u \bar M

If a gradient is differentiated again, autograd does it, on the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

__all__ = ["ACTIVATION", "COPY", "LINEAR", "SUM", "Chain", "Derivatives", "Layer", "backwards", "forwards", "is_curved"]

Derivatives = Callable[[Tensor], Iterator[Tensor]]  # yields f, f', f'' and f'''; may stop if the rest is 0
Tensors = tuple[Tensor, ...]
LINEAR, ACTIVATION, COPY, SUM = "linear", "activation", "copy", "sum"


@dataclass(frozen=True)
class Layer:
    """One layer of a chain.

    Attributes:
        kind: ``linear``, ``activation``, ``copy`` (of the top of a stack) or ``sum`` (of its two top tensors).
        derivatives: The derivatives of an activation.
    """

    kind: str
    derivatives: Derivatives | None = None


@dataclass(frozen=True)
class Chain:
    """The layers, the number of rows of a batch, and the number of tangents stacked below its values."""

    layers: tuple[Layer, ...]
    rows: int
    tangents: int


def forwards(chain: Chain, stacked: Tensor, weights: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensors:
    """The output values and tangents, stacked; then P of each activation, and M of each with a second derivative.

    Arguments:
        chain: The layers.
        stacked: Values, and below them tangents, with shape ``((1 + K)·B, features)``.
        weights: The matrix of each linear layer.
        offsets: The offset of each linear layer: a bias, or a row for each sample.
    """
    outputs: Tensors = _Forwards.apply(chain, len(weights), stacked, *weights, *offsets)
    return outputs


def backwards(chain: Chain, adjoint: Tensor, weights: Sequence[Tensor], stored: Sequence[Tensor]) -> Tensors:
    """The adjoint of the input; with tangents, also the contributions to second derivatives, shape ``(K, B)``.

    Arguments:
        chain: The layers.
        adjoint: The adjoint of the output, the derivative of the energy, with shape ``(B, features)``.
        weights: The matrix of each linear layer.
        stored: P and M of :func:`forwards`.
    """
    outputs: Tensors = _Backwards.apply(chain, len(weights), adjoint, *weights, *stored)
    return outputs


def _run_forwards(chain: Chain, count: int, *tensors: Tensor) -> tuple[Tensors, list[tuple[Any, ...]]]:
    """The outputs, and for each layer the tensors for its gradient."""
    stacked, weights, offsets = tensors[0], iter(tensors[1 : 1 + count]), iter(tensors[1 + count :])
    rows, order = chain.rows, 4 if chain.tangents else 3
    memory: list[tuple[Any, ...]] = []
    stack, slopes, bent = [stacked], [], []
    for layer in chain.layers:
        if layer.kind == LINEAR:
            x, weight, offset = stack.pop(), next(weights), next(offsets)
            y = x @ weight.T
            y[:rows] += offset
            stack.append(y)
            memory.append((x, weight, offset.dim()))
        elif layer.kind == ACTIVATION:
            assert layer.derivatives is not None
            x = stack.pop()
            value, slope, *more = islice(layer.derivatives(x[:rows]), order)
            slopes.append(slope)
            if chain.tangents:
                tangents = x[rows:].view(chain.tangents, *slope.shape)
                stack.append(torch.cat((value[None], slope * tangents)).flatten(0, 1))
                if more:
                    bent.append(more[0] * tangents * tangents)
            else:
                stack.append(value)
            memory.append((x, slope.detach(), *more))  # detached: an output that its own node holds is never freed
        elif layer.kind == COPY:
            stack.append(stack[-1])
            memory.append(())
        else:
            stack.append(stack.pop() + stack.pop())
            memory.append(())
    return (stack[0], *slopes, *bent), memory


def _run_backwards(chain: Chain, count: int, *tensors: Tensor) -> tuple[Tensors, list[tuple[Any, ...]]]:
    """The outputs, and for each layer, from the last to the first, the tensors for its gradient."""
    adjoint, weights, stored = tensors[0], list(tensors[1 : 1 + count]), tensors[1 + count :]
    active = sum(layer.kind == ACTIVATION for layer in chain.layers)
    slopes, bent = list(stored[:active]), list(stored[active:])
    curved = [bool(chain.tangents) and is_curved(layer) for layer in chain.layers if layer.kind == ACTIVATION]
    memory: list[tuple[Any, ...]] = []
    stack = [adjoint]
    curvature = adjoint.new_zeros(chain.tangents, chain.rows)
    for layer in reversed(chain.layers):
        if layer.kind == LINEAR:
            weight, y = weights.pop(), stack.pop()
            stack.append(y @ weight)
            memory.append((y, weight))
        elif layer.kind == ACTIVATION:
            slope, bend, y = slopes.pop(), bent.pop() if curved.pop() else None, stack.pop()
            if bend is not None:
                curvature = curvature + (y * bend).sum(-1)
            stack.append(y * slope)
            memory.append((y, slope, bend))
        elif layer.kind == COPY:
            stack.append(stack.pop() + stack.pop())
            memory.append(())
        else:
            stack.append(stack[-1])
            memory.append(())
    return ((stack[0], curvature) if chain.tangents else (stack[0],)), memory


def is_curved(layer: Layer) -> bool:
    """Whether an activation has a second derivative other than 0."""
    return layer.derivatives is not None and not getattr(layer.derivatives, "straight", False)


class _Forwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: Chain, count: int, *tensors: Tensor) -> Tensors:
        outputs, ctx.memory = _run_forwards(chain, count, *tensors)
        ctx.chain, ctx.count = chain, count
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.shape = outputs[0].shape
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _again(_run_forwards, ctx, gradients)
        chain, rows = ctx.chain, ctx.chain.rows
        active = sum(layer.kind == ACTIVATION for layer in chain.layers)
        to_slopes, to_bends = list(gradients[1 : 1 + active]), list(gradients[1 + active :])
        weights: list[Tensor | None] = []
        offsets: list[Tensor | None] = []
        stack = [tensors[0].new_zeros(ctx.shape) if gradients[0] is None else gradients[0]]
        for layer, stored in zip(reversed(chain.layers), reversed(ctx.memory), strict=True):
            if layer.kind == LINEAR:
                x, weight, dim = stored
                g = stack.pop()
                weights.append(g.T @ x)
                offsets.append(g[:rows].sum(0) if dim == 1 else g[:rows])
                stack.append(g @ weight)
            elif layer.kind == ACTIVATION:
                stack.append(_activation_gradient(chain, stored, stack.pop(), to_slopes.pop(), to_bends))
            elif layer.kind == COPY:
                stack.append(stack.pop() + stack.pop())
            else:
                stack.append(stack[-1])
        return None, None, stack[0], *reversed(weights), *reversed(offsets)


def _activation_gradient(
    chain: Chain, stored: tuple[Any, ...], g: Tensor, to_slope: Tensor | None, to_bends: list[Tensor | None]
) -> Tensor:
    """The gradient with respect to the input values and tangents of an activation."""
    x, slope, *more = stored
    rows = chain.rows
    result = torch.empty_like(g)
    own = torch.mul(g[:rows], slope, out=result[:rows])
    if not chain.tangents:
        if more and to_slope is not None:
            own.addcmul_(to_slope, more[0])
        return result
    tangents, to_tangents = x[rows:].view(chain.tangents, *slope.shape), g[rows:].view(chain.tangents, *slope.shape)
    moved = torch.mul(to_tangents, slope, out=result[rows:].view(chain.tangents, *slope.shape))
    if not more:
        return result
    to_bend = to_bends.pop()
    first = (to_tangents * tangents).sum(0) if chain.tangents > 1 else to_tangents[0] * tangents[0]
    if to_slope is not None:
        first += to_slope
    own.addcmul_(first, more[0])
    if to_bend is not None:
        scaled = to_bend * tangents
        moved.addcmul_(scaled, more[0], value=2.0)
        scaled *= tangents
        own.addcmul_(scaled.sum(0) if chain.tangents > 1 else scaled[0], more[1])
    return result


class _Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: Chain, count: int, *tensors: Tensor) -> Tensors:
        outputs, ctx.memory = _run_backwards(chain, count, *tensors)
        ctx.chain, ctx.count = chain, count
        ctx.save_for_backward(*tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # raises if a weight was changed in place
        if torch.is_grad_enabled():
            return _again(_run_backwards, ctx, gradients)
        chain = ctx.chain
        weights, slopes, bent = [], [], []
        stack = [gradients[0]]
        of_curvature = gradients[1][..., None] if chain.tangents else None
        for layer, stored in zip(chain.layers, reversed(ctx.memory), strict=True):
            if layer.kind == LINEAR:
                y, weight = stored
                g = stack.pop()
                weights.append(y.T @ g)
                stack.append(g @ weight.T)
            elif layer.kind == ACTIVATION:
                y, slope, bend = stored
                g = stack.pop()
                slopes.append(g * y)
                back = g * slope
                if bend is not None:
                    assert of_curvature is not None
                    bent.append(of_curvature * y)
                    if chain.tangents > 1:
                        back += (of_curvature * bend).sum(0)
                    else:
                        back.addcmul_(of_curvature[0], bend[0])
                stack.append(back)
            elif layer.kind == COPY:
                stack.append(stack[-1])
            else:
                stack.append(stack.pop() + stack.pop())
        return None, None, stack[0], *weights, *slopes, *bent


def _again(run: Callable[..., tuple[Tensors, Any]], ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The gradient by autograd, which can be differentiated again."""
    # Views, so that no gradient passes from one input to another one that it was computed from.
    inputs = tuple(each.view_as(each) for each in ctx.saved_tensors)
    wanted = [each for each in inputs if each.requires_grad]
    outputs, _ = run(ctx.chain, ctx.count, *inputs)
    pairs = [(one, two) for one, two in zip(outputs, gradients, strict=True) if two is not None and one.requires_grad]
    computed = iter(
        torch.autograd.grad(
            [one for one, _ in pairs], wanted, [two for _, two in pairs], create_graph=True, materialize_grads=True
        )
    )
    return None, None, *(next(computed) if each.requires_grad else None for each in inputs)
