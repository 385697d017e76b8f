r"""First and second derivatives of an energy in x.

Sliced score matching needs :math:`\nabla E` and :math:`v^\top \nabla^2 E\, v`. The tangent :math:`\dot x` of the line
:math:`x + tv` is pushed forward through the steps :math:`y = f(x)` together with the value, and the adjoint
:math:`\lambda = \partial E / \partial y` is pulled back through them from the base:

.. math::
    \dot y = f'(x)\,\dot x, \qquad
    \lambda_x = f'(x)^\top \lambda_y - \nabla \log|\det f'(x)|, \qquad
    v^\top \nabla^2 E\, v = \sum_{\text{steps}} \partial_t^2 \left(\lambda_y^\top f(x + t\dot x)
        - \log|\det f'(x + t \dot x)|\right)

(:math:`\lambda_y` is held fixed in the sum; the base adds its own term). A linear step contributes nothing to the sum:
it costs three products, :math:`Wx`, :math:`W\dot x` and :math:`W^\top\lambda`, and the second derivative of the path,
:math:`\ddot x`, is never multiplied by a matrix. An elementwise step has its terms in closed form. All of it is plain
arithmetic, so training needs one backward pass, and no gradient with respect to x.

The first step that is neither ends this: it and all later steps are one function, which autograd differentiates twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from ebflow_plugin.errors import raise_from_step
from ebflow_plugin.linalg.memo import transformed
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import Linearization, Step
from ebflow_plugin.plan.values import Value, pop


class Derivatives(NamedTuple):
    """The derivatives of an energy at a batch of points.

    Attributes:
        gradient: dE/dx, with the shape of x.
        curvatures: The second derivative along each direction, with shape ``(B,)``.
        energy: E(x), with shape ``(B,)``, if it was asked for.
        latents: The outputs of the last steps, which are computed on the way.
    """

    gradient: Tensor
    curvatures: list[Tensor]
    energy: Tensor | None
    latents: tuple[Tensor, ...] = ()


def derivatives(
    plan: Plan,
    x: Tensor,
    context: Tensor | None = None,
    directions: Sequence[Tensor] = (),
    *,
    energy: bool = False,
) -> Derivatives:
    """The gradient of the energy of a plan at x, and its second derivatives along directions.

    The results carry a graph to the parameters if grad mode is on, but not to x.

    Arguments:
        plan: The plan.
        x: Points, with shape ``(B, *)``.
        context: The context, not yet embedded.
        directions: Directions, each with the shape of x.
        energy: Whether to return the energy too, which costs no further pass.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.Tanh(), distributions.StandardNormal([2])))
        >>> result = derivatives(model.plan, torch.zeros(1, 2), directions=[torch.ones(1, 2)])
        >>> result.gradient, result.curvatures  # E = ½ tanh² - log(1 - tanh²) for each entry
        (tensor([[0., 0.]]), [tensor([6.])])
    """
    if plan.embedding is not None:
        context = plan.embed(context)
    stack, tangents = [x.detach()], [[direction.detach()] for direction in directions]
    head: list[tuple[Step, Linearization, list[Value]]] = []  # each step, and the tangents of its input
    for step in plan.steps[: plan.closed_steps]:
        value, *inputs = (one.pop() if step.n_in == 1 else pop(one, step.n_in) for one in (stack, *tangents))
        try:
            at = step.linearize(value, context)
            assert at is not None
            outputs = [at.push(tangent) for tangent in inputs]
        except Exception as error:
            raise_from_step(error, step, value, context)
        # What the curvature alone needs is freed where there is none to compute.
        head.append((step, at if inputs else at._replace(curvature=None), inputs))
        for one, output in zip((stack, *tangents), (at.value, *outputs), strict=True):
            one.extend((output,) if isinstance(output, Tensor) else output)
    latents, total, gaussian = tuple(stack), None, None
    if len(head) == len(plan.steps):
        try:
            gaussian = plan.base.gaussian(context)
        except Exception as error:
            raise_from_step(error, plan.base, latents, context)
    if gaussian is None:
        adjoints, curvatures, total, latents = _by_autograd(plan, len(head), latents, context, tangents)
    else:
        # The base densities of most flows are standard normal: what leaves a tensor as it is, is left out.
        scales = [None if isinstance(std, float) and std == 1.0 else std for _, std in gaussian]
        means = [None if isinstance(mean, float) and mean == 0.0 else mean for mean, _ in gaussian]
        adjoints = [z if mean is None else z - mean for z, mean in zip(latents, means, strict=True)]
        adjoints = [z if std is None else z / std**2 for z, std in zip(adjoints, scales, strict=True)]
        curvatures = []
        for tangent in tangents:
            whitened = [v if std is None else v / std for v, std in zip(tangent, scales, strict=True)]
            curvatures.append(reduce(add, (v.square().flatten(1).sum(1) for v in whitened)))
        if energy:
            total = plan.energy_from(len(head), latents, context)[0]
    while head:
        step, at, inputs = head.pop()
        adjoint = adjoints.pop() if step.n_out == 1 else pop(adjoints, step.n_out)
        try:
            if at.curvature is not None:
                curvatures = [sum_ + at.curvature(adjoint, v) for sum_, v in zip(curvatures, inputs, strict=True)]
            pulled = at.pull(adjoint)
        except Exception as error:
            raise_from_step(error, step, adjoint, context)
        adjoints.extend((pulled,) if isinstance(pulled, Tensor) else pulled)
        if energy and total is not None and at.log_det is not None:
            total = total - at.log_det()
    return Derivatives(adjoints[0], curvatures, total if energy else None, latents)


def _by_autograd(
    plan: Plan, start: int, points: tuple[Tensor, ...], context: Tensor | None, tangents: Sequence[Sequence[Tensor]]
) -> tuple[list[Tensor], list[Tensor], Tensor, tuple[Tensor, ...]]:
    """The steps from ``start`` on, and the base: gradients, curvatures along tangents, the energy and the latents."""
    if transformed():  # neither dynamo nor transforms of torch.func trace torch.autograd.grad
        return _by_transforms(plan, start, points, context, tangents)
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # New tensors: the tangents may depend on those of the stack, and must not depend on these.
        points = tuple(one.view_as(one) if one.requires_grad else one.detach().requires_grad_() for one in points)
        total, latents = plan.energy_from(start, points, context)
        slopes = _gradients(total, points, graph or bool(tangents))
        products = [_gradients(_dots(slopes, tangent), points, graph) for tangent in tangents]
        curvatures = [_dots(one, tangent) for one, tangent in zip(products, tangents, strict=True)]
        return slopes, curvatures, total, latents


def _by_transforms(
    plan: Plan,
    start: int,
    points: tuple[Tensor, ...],
    context: Tensor | None,
    tangents: Sequence[Sequence[Tensor]],
) -> tuple[list[Tensor], list[Tensor], Tensor, tuple[Tensor, ...]]:
    def total(*points: Tensor) -> tuple[Tensor, tuple[Tensor, tuple[Tensor, ...]]]:
        energy, latents = plan.energy_from(start, points, context)
        return energy.sum(), (energy, latents)

    gradient = torch.func.grad(total, argnums=tuple(range(len(points))), has_aux=True)
    slopes, (energy, latents) = gradient(*points)

    def product(tangent: Sequence[Tensor]) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = torch.func.jvp(lambda *at: gradient(*at)[0], points, tuple(tangent))[1]
        return result

    return list(slopes), [_dots(product(tangent), tangent) for tangent in tangents], energy, latents


def _gradients(values: Tensor, points: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
    """The gradient of each sample's value with respect to the sample; zero if it does not depend on it."""
    if not values.requires_grad:
        return [torch.zeros_like(point) for point in points]
    return list(
        torch.autograd.grad(values.sum(), points, create_graph=create_graph, retain_graph=True, materialize_grads=True)
    )


def _dots(many: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    return reduce(add, ((a * b).flatten(1).sum(1) for a, b in zip(many, others, strict=True)))
