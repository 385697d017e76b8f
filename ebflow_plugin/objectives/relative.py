r"""The relative gradient of unconstrained dense layers: a step whose backward pass computes it."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ebflow_plugin.errors import InputError
from ebflow_plugin.plan.costs import is_dense
from ebflow_plugin.plan.matrices import FullStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Shape

__all__ = ["RelativeStep", "relative_plan"]


class RelativeStep(LinearStep):
    """A FullLinear in its forward direction, with the relative gradient of its weight and a log-det of value 0."""

    def __init__(self, step: FullStep) -> None:
        super().__init__(step.module, step.path)

    def apply(self, x: Tensor) -> Tensor:
        module: Any = self.module
        y: Tensor = _RelativeProduct.apply(x, module.weight)
        return y if module.bias is None else y + module.bias

    def invert(self, y: Tensor) -> Tensor:
        inverse: Tensor = self.module.invert(y)
        return inverse

    def log_abs_det(self, shape: Shape) -> Tensor:
        zero: Tensor = _RelativeLogDet.apply(self.module.weight)
        return zero * prod(shape[:-1])


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
        grad_x = delta @ weight if ctx.needs_input_grad[0] else None
        grad_weight = delta.flatten(0, -2).mT @ (y.flatten(0, -2) @ weight) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


class _RelativeLogDet(Function):
    """log|det W| with the value 0, and its gradient multiplied by WᵀW: W⁻ᵀ WᵀW = W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Tensor:
        weight: Tensor = ctx.saved_tensors[0]
        return scale * weight


def relative_plan(plan: Plan, strict: bool = True) -> Plan:
    """The same plan, with the relative gradient in each dense layer.

    Arguments:
        plan: The plan.
        strict: Whether every expensive linear step must have a relative gradient.

    Raises:
        InputError: If ``strict``, and another linear step has an expensive log-det, or there is no dense layer.
    """
    steps = tuple(RelativeStep(step) if is_dense(step) else step for step in plan.steps)
    refused = [
        f"{step.where}: {'runs backwards' if step.inverted else 'no FullLinear'}"
        for step in steps
        if isinstance(step, LinearStep) and not isinstance(step, RelativeStep) and _is_expensive(step)
    ]
    if strict and refused:
        raise InputError(
            f"RelativeML has no relative gradient for {len(refused)} of {len(steps)} steps\n  "
            + "\n  ".join(refused)
            + "\nUse ML, or FullLinear layers in the density direction (ebflow_plugin.unconstrain(flow))."
        )
    if strict and not any(isinstance(step, RelativeStep) for step in steps):
        raise InputError("RelativeML is for flows with FullLinear layers, and this one has none; use ML")
    return replace(plan, steps=steps)


def _is_expensive(step: LinearStep) -> bool:
    return isinstance(step, FullStep) or step.determinant(None) is not None
