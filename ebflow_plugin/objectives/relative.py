r"""The relative gradient of unconstrained dense layers: a step whose backward pass computes it."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ebflow_plugin.errors import InputError
from ebflow_plugin.plan.log_dets import has_relative_gradient
from ebflow_plugin.plan.matrices import FullConvStep, FullLinearStep, MatrixStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Shape


class RelativeStep(LinearStep):
    """A FullLinear in its forward direction, with the relative gradient of its weight and a log-det of value 0."""

    def __init__(self, step: FullLinearStep) -> None:
        super().__init__(step.module, step.path)

    def apply(self, x: Tensor) -> Tensor:
        module: Any = self.module
        y: Tensor = _RelativeProduct.apply(x, module.weight)
        return y if module.bias is None else y + module.bias

    def invert(self, y: Tensor) -> Tensor:
        module: Any = self.module
        right, weight = y if module.bias is None else y - module.bias, module.weight
        # A zero, by which the gradient in W is -(δ W⁻¹)ᵀ (y W): the plain one, -(δ W⁻¹)ᵀ x, times WᵀW.
        right = right - nn.functional.linear((right @ weight).detach(), weight - weight.detach())
        with torch.no_grad():  # constant factors
            solver = module.lu.solver(weight)
        x: Tensor = solver(right.flatten(0, -2)).reshape(y.shape)
        return x

    def log_abs_det(self, shape: Shape) -> Tensor:
        weight: Any = self.module.weight
        halves = (weight * weight.detach()).sum()  # with the gradient W = W⁻ᵀ WᵀW
        return (halves - halves.detach()) * prod(shape[:-1])


class _RelativeProduct(Function):
    """x Wᵀ, with the gradient in W multiplied by WᵀW: O(B·D²), since δᵀx WᵀW = δᵀ((x Wᵀ) W)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = nn.functional.linear(x, weight)
        ctx.save_for_backward(y, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, Tensor | None]:
        y, weight = ctx.saved_tensors
        same = weight.to(delta.dtype)  # under autocast, y and its gradient are in half precision
        grad_x = delta @ same if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        return grad_x, (delta.flatten(0, -2).mT @ (y.flatten(0, -2) @ same)).to(weight.dtype)


def relative_plan(plan: Plan, strict: bool = True) -> Plan:
    """The same plan, with the relative gradient in each dense layer.

    Arguments:
        plan: The plan.
        strict: Whether every expensive linear step must have a relative gradient.

    Raises:
        InputError: If ``strict``, and another linear step has an expensive log-det, or there is no dense layer.
    """
    steps = tuple(RelativeStep(step) if has_relative_gradient(step) else step for step in plan.steps)
    refused = [
        f"{step.where}: {'runs backwards' if step.inverted else 'no FullLinear'}"
        for step in steps
        if isinstance(step, (MatrixStep, FullConvStep))
    ]
    if strict and refused:
        raise InputError(
            f"log_det='relative' has no relative gradient for {len(refused)} of {len(steps)} steps\n  "
            + "\n  ".join(refused)
            + "\nUse log_det='exact' or 'auto', or FullLinear layers in the density direction "
            "(ebflow_plugin.unconstrain(flow))."
        )
    if strict and not any(isinstance(step, RelativeStep) for step in steps):
        raise InputError("log_det='relative' is for flows with FullLinear layers, and this one has none")
    return replace(plan, steps=steps)
