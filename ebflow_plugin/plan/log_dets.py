"""The choice of how the gradients of the log-determinants of linear steps are computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from ebflow_plugin.plan.matrices import FullConvStep, FullLinearStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Shape, Shapes, Step

LOG_DETS = ("exact", "stochastic", "relative", "auto")

# The cost of a log-determinant, in products, above which "auto" estimates it: about where, measured, an estimate with
# its solves and its noise begins to pay. A batch of 100 takes 300 products, forward and backward.
TOO_MANY_PRODUCTS = 150.0


def log_det_methods(plan: Plan, event_shape: Shape, log_det: str) -> Mapping[LinearStep, str]:
    r"""How the gradient of the log-det of each linear step is computed: ``exact``, ``stochastic`` or ``relative``.

    ========== =============================================================================================
    log_det
    ========== =============================================================================================
    exact      all of them exact
    stochastic estimated if the exact one costs more than a product with a vector, as all dense ones do
    relative   the relative gradient for each ``FullLinear`` in its forward direction
    auto       relative for those, stochastic for convolutions whose determinant costs more than 150 products
    ========== =============================================================================================

    Example:
        >>> import ebflow_plugin as ebf
        >>> from ebflow_nflows import FullConv2d
        >>> from nflows import distributions, flows
        >>> model = ebf.wrap(flows.Flow(FullConv2d(3, kernel_size=3), distributions.StandardNormal([3, 32, 32])))
        >>> list(log_det_methods(model.plan, (3, 32, 32), "auto").values())
        ['stochastic']
    """
    return {
        step: _method(step, shapes, log_det)
        for step, shapes in plan.shapes(event_shape)
        if isinstance(step, LinearStep)
    }


def has_relative_gradient(step: Step) -> TypeGuard[FullLinearStep]:
    """Whether a step is a FullLinear in its forward direction."""
    return isinstance(step, FullLinearStep) and not step.inverted


def _method(step: LinearStep, shapes: Shapes, log_det: str) -> str:
    if log_det in ("relative", "auto") and has_relative_gradient(step):
        return "relative"
    if log_det == "stochastic" or (log_det == "auto" and isinstance(step, FullConvStep)):
        operator = step.operator(shapes)
        limit = 1.0 if log_det == "stochastic" else TOO_MANY_PRODUCTS
        if operator is not None and operator.cost.operations > limit * operator.times * operator.operations:
            return "stochastic"
    return "exact"
