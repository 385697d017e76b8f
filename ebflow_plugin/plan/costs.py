"""The costs of the log-determinants of linear steps, and the choice of how to compute their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from ebflow_plugin.layers import FullConv2d
from ebflow_plugin.linalg.convolution import bandwidths, structure
from ebflow_plugin.linalg.geometry import Geometry
from ebflow_plugin.plan.matrices import FullStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Shape, Shapes, Step

__all__ = ["LOG_DETS", "Cost", "conv_geometry", "exact_cost", "is_dense", "ways"]

LOG_DETS = ("exact", "stochastic", "relative", "auto")

# The cost of a log-determinant, in products, above which "auto" estimates it: about where, measured, an estimate with
# its solves and its noise begins to pay. A batch of 100 takes 300 products, forward and backward.
TOO_MANY_PRODUCTS = 150.0


@dataclass(frozen=True)
class Cost:
    """The approximate cost of a computation: multiplications, and bytes in double precision."""

    operations: float
    memory: float

    def exceeds(self, other: Cost) -> bool:
        """Whether it needs more multiplications or more memory."""
        return self.operations > other.operations or self.memory > other.memory


def exact_cost(step: LinearStep, shapes: Shapes) -> Cost:
    """The cost of the exact log-det of a step, for inputs with these event shapes."""
    size = step.determinant(shapes)
    if size is None:
        return Cost(0.0, 0.0)
    geometry = conv_geometry(step, step.own_shape(shapes))
    if geometry is not None:
        kind, group = structure(geometry), geometry.group
        channels, rows, columns = group.out_shape
        if kind == "patches":
            return Cost(geometry.groups * channels**3, 32.0 * channels**2)
        if kind == "fourier":
            return Cost(geometry.groups * channels**3 * rows * columns, 32.0 * channels**2 * rows * columns)
        if kind == "band":
            lower, upper = min(bandwidths(group), bandwidths(group.transposed), key=sum)
            return Cost(geometry.groups * group.size * lower * (lower + upper), 16.0 * lower * (lower + upper))
        return Cost(geometry.groups * group.size**3 / 3, 16.0 * group.size**2)
    return Cost(size**3 / 3, 16.0 * size**2)


def conv_geometry(step: LinearStep, shape: Shape) -> Geometry | None:
    """The geometry of a full convolution of images of a shape; None for any other step."""
    return step.module.setting.geometry(shape) if isinstance(step.module, FullConv2d) else None


def ways(plan: Plan, event_shape: Shape, log_det: str) -> Mapping[LinearStep, str]:
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
        >>> list(ways(model.plan, (3, 32, 32), "auto").values())
        ['stochastic']
    """
    return {
        step: _way(step, shapes, log_det) for step, shapes in plan.shapes(event_shape) if isinstance(step, LinearStep)
    }


def is_dense(step: Step) -> TypeGuard[FullStep]:
    """Whether a step is a FullLinear in its forward direction, which has a relative gradient."""
    return isinstance(step, FullStep) and step.determinant(None) is not None and not step.inverted


def _way(step: LinearStep, shapes: Shapes, log_det: str) -> str:
    if log_det in ("relative", "auto") and is_dense(step):
        return "relative"
    if log_det == "stochastic" or (log_det == "auto" and isinstance(step.module, FullConv2d)):
        operator = step.operator(step.own_shape(shapes))
        limit = 1.0 if log_det == "stochastic" else TOO_MANY_PRODUCTS
        if operator is not None and exact_cost(step, shapes).operations > limit * operator.times * operator.operations:
            return "stochastic"
    return "exact"
