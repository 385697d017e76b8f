r"""Maximum likelihood by the relative gradient, for dense layers without constraints."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, TypeGuard, Unpack

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ebflow_plugin.errors import InputError
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives.base import Common, Objective
from ebflow_plugin.plan.matrices import FullStep
from ebflow_plugin.plan.plan import LinearStep, Plan, Shape, Step

__all__ = ["RelativeML"]


class RelativeML(Objective):
    r"""Maximum likelihood with the relative gradient of every dense layer (Gresele et al. 2020; the paper's Table 4).

    The gradient in the weight W of each ``FullLinear`` is multiplied by :math:`W^T W` on the right. That leaves a
    direction of descent, and makes the determinant's part trivial:

    .. math:: \frac{\partial}{\partial W}\left(\mathbb{E}[E(x)] - \log|\det W|\right) W^T W
              = \mathbb{E}\left[\delta\, (W^T W x)^T\right] - W,
              \qquad \delta = \frac{\partial E}{\partial (W x)}

    ``backward()`` leaves it in ``weight.grad``, at :math:`O(B D^2)`. All other parameters get the gradient of maximum
    likelihood. The *value* is that of :class:`ML` without the log-determinants of the dense layers, which are never
    computed: it falls without bound as they grow, and is no likelihood. Follow ``model.log_prob`` instead.

    Cost: one energy, and two more products for each dense layer in the backward pass. Use it to compare with score
    matching. Adaptive optimisers rescale the gradient once more; the original work used plain ones too.

    Arguments:
        model: What :func:`~ebflow_plugin.wrap` returns. Its linear steps are ``FullLinear`` layers in their forward
            direction, or have a cheap log-det, which is included as it is.
        common: ``generator``, ``energy_weight`` and ``reduction`` of :class:`Objective`.

    Raises:
        InputError: If a linear step has an expensive log-det and no relative gradient; it lists all of them.

    References:
        Relative gradient optimization of the Jacobian term in unsupervised deep learning (Gresele et al., 2020),
        https://arxiv.org/abs/2006.15090

    Example:
        >>> import ebflow_plugin as ebf
        >>> import torch
        >>> from ebflow_nflows import FullLinear
        >>> from nflows import distributions, flows
        >>> model = ebf.wrap(flows.Flow(FullLinear(2), distributions.StandardNormal([2])))
        >>> RelativeML(model)(torch.randn(5, 2)).backward()
        >>> model.flow._transform.weight.grad.shape
        torch.Size([2, 2])
    """

    in_data_space = True

    def __init__(self, model: EBFlow, **common: Unpack[Common]) -> None:
        super().__init__(model, **common)
        relative_plan(model.core.plan)

    def per_sample(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        plan = relative_plan(self.model.core.plan)
        plan.refuse()
        energy = plan.energy(x, context)
        values = energy
        for _, log_det in plan.log_dets(tuple(x.shape[1:]), x):
            values = values - log_det
        return values, energy


class RelativeStep(LinearStep):
    """A FullLinear in its forward direction, with the relative gradient for its weight. Its log-det counts as 0."""

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
        of_x = delta @ weight if ctx.needs_input_grad[0] else None
        of_weight = delta.flatten(0, -2).mT @ (y.flatten(0, -2) @ weight) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


class _RelativeLogDet(Function):
    """log|det W|, with 0 for its value, and its gradient multiplied by WᵀW: W⁻ᵀ WᵀW = W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Tensor:
        weight: Tensor = ctx.saved_tensors[0]
        return scale * weight


def relative_plan(plan: Plan) -> Plan:
    """The same plan, with the relative gradient in each dense layer.

    Raises:
        InputError: If there is none, or another linear step with an expensive log-det.
    """
    steps = tuple(RelativeStep(step) if _is_dense(step) else step for step in plan.steps)
    refused = [
        f"{step.where}: {'runs backwards' if step.inverted else 'no FullLinear'}"
        for step in steps
        if isinstance(step, LinearStep) and not isinstance(step, RelativeStep) and _is_expensive(step)
    ]
    if refused:
        raise InputError(
            f"RelativeML has no relative gradient for {len(refused)} of {len(steps)} steps\n  "
            + "\n  ".join(refused)
            + "\nUse ML, or FullLinear layers in the density direction (ebflow_plugin.unconstrain(flow))."
        )
    if not any(isinstance(step, RelativeStep) for step in steps):
        raise InputError("RelativeML is for flows with FullLinear layers, and this one has none; use ML")
    return replace(plan, steps=steps)


def _is_dense(step: Step) -> TypeGuard[FullStep]:
    return isinstance(step, FullStep) and step.determinant(None) is not None and not step.inverted


def _is_expensive(step: LinearStep) -> bool:
    return isinstance(step, FullStep) or step.determinant(None) is not None
