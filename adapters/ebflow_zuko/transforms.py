"""The maps and log-dets of the transforms that zuko's lazy modules build, by the exact class of the transform.

A lazy module is called with a context and returns a ``torch.distributions`` transform. Most of these are called here by
their own ``call_and_ladj``. The exceptions are compositions; transforms with a log-det of 0, which is not computed; and
monotonic functions, whose derivatives zuko gets wrong. It treats the derivative of an integral as constant in x, so
second derivatives of SOSPF and UNAF, and of all inverses by bisection, are silently wrong. And it frees the graph of a
function whose parameters and input require no gradient, so that nothing after it can be trained.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ebflow_plugin.adapting import comes_from, known_class, rational_quadratic, summed

PACKAGES = ("zuko", "ebflow_zuko")
ISOMETRIES = ("AdditiveTransform", "IdentityTransform", "PermutationTransform", "RotationTransform")
INTEGRALS = ("UnconstrainedMonotonicTransform", "SOSPolynomialTransform")
# Inverted by bisection, to 1e-6.
BISECTED = (
    *INTEGRALS,
    "MonotonicTransform",
    "BernsteinTransform",
    "BoundedBernsteinTransform",
    "GaussianizationTransform",
)
NEWTON = 1e-4  # the largest Newton correction of a root found by bisection


def ours(cls: type) -> bool:
    """Whether a class comes from zuko, or from here."""
    return comes_from(cls, PACKAGES)


def unwrapped(factory: Any) -> Any:
    """The class or function that builds transforms or distributions, without the partials around it.

    Example:
        >>> unwrapped(partial(torch.add, 1)) is torch.add
        True
    """
    return unwrapped(factory.func) if isinstance(factory, partial) else factory


def known_name(factory: Any) -> str | None:
    """The name of a class or function that builds transforms or distributions, if it is of zuko or of torch.

    Arguments:
        factory: A class, a function, a module, or a partial of one.

    Example:
        >>> known_name(torch.distributions.ExpTransform), known_name(lambda: None)
        ('ExpTransform', None)
    """
    factory = unwrapped(factory)
    if isinstance(factory, nn.Module):
        return known_class(factory, PACKAGES)
    if getattr(factory, "__module__", "").partition(".")[0] not in ("torch", "zuko"):
        return None
    return getattr(factory, "__name__", None)


def forward(transform: Any, x: Tensor) -> tuple[Tensor, Tensor | float]:
    """The map at x, and its log-det summed to ``(B,)``, or 0."""
    kind = _kind(transform)
    if kind == "DependentTransform":
        return forward(transform.base, x)
    if kind == "ComposedTransform":
        total: Tensor | float = 0.0
        for member in transform.transforms:
            x, log_det = forward(member, x)
            total = total + log_det
        return x, total
    if kind == "AutoregressiveTransform":
        return forward(transform.meta(x), x)
    if kind in ISOMETRIES:
        return transform(x), 0.0
    if kind == "MonotonicRQSTransform":
        y, log_slope = rational_quadratic(x, transform.horizontal, transform.vertical, transform.derivatives)
    else:
        y, log_slope = _monotonic(transform, x) if kind in BISECTED else transform.call_and_ladj(x)
    return y, summed(log_slope) if log_slope.dim() > 1 else log_slope


def inverse_and_log_det(transform: Any, y: Tensor) -> tuple[Tensor, Tensor | float]:
    """The inverse map at y, and its log-det."""
    x = inverse(transform, y)
    return x, -forward(transform, x)[1]


def inverse(transform: Any, y: Tensor) -> Tensor:
    """The inverse map at y, differentiable as often as :func:`forward` is."""
    kind = _kind(transform)
    if kind == "DependentTransform":
        return inverse(transform.base, y)
    if kind == "ComposedTransform":
        for member in reversed(transform.transforms):
            y = inverse(member, y)
        return y
    if kind == "AutoregressiveTransform":
        x = torch.zeros_like(y)
        for _ in range(transform.passes):
            x = inverse(transform.meta(x), y)
        return x
    if kind in BISECTED:
        return _root(transform, y)
    if kind == "MonotonicRQSTransform":
        return rational_quadratic(y, transform.horizontal, transform.vertical, transform.derivatives, inverse=True)[0]
    return transform.inv(y)


def bare(transform: Any) -> Any:
    """The univariate transform inside one that treats its last dimensions as an event."""
    return bare(transform.base) if _kind(transform) == "DependentTransform" else transform


def _kind(transform: Any) -> str | None:
    return type(transform).__name__ if ours(type(transform)) else None


def _monotonic(transform: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A monotonic function at x, and the log of its derivative there."""
    if _kind(transform) in INTEGRALS:
        return _integral(transform, x)
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # A copy, since the parameters of the function may depend on x.
        point = x.clone() if x.requires_grad else x.detach().requires_grad_()
        y = transform.f(point)
        (slope,) = torch.autograd.grad(y, point, torch.ones_like(y), create_graph=graph, retain_graph=True)
    return (y, slope.log()) if graph else (y.detach(), slope.log().detach())


def _integral(transform: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The integral of a positive function g from 0 to x, and log g(x).

    With gradients, it is the sum of the integral up to the detached x, which is constant, and the integral from there
    to x, which is zero but has the derivatives g(x), g'(x) and so on: with two quadrature points, up to the fourth.
    """
    if not torch.is_grad_enabled():
        value: Tensor = transform.f(x)
        return value, transform.g(x).log()
    from zuko.utils import GaussLegendre

    here, integral = x.detach(), GaussLegendre.quadrature
    constant = integral(transform.g, torch.zeros_like(here), here, transform.n)
    return constant + integral(transform.g, here, x, 2), transform.g(x).log()


def _root(transform: Any, y: Tensor) -> Tensor:
    """Bisection, followed by two Newton steps: accurate to rounding, and three times differentiable."""
    with torch.no_grad():
        x: Tensor = transform.inv(y)
    for _ in range(2):
        value, log_slope = _monotonic(transform, x)
        x = x - ((value - y) * torch.exp(-log_slope)).clamp(-NEWTON, NEWTON)  # y may be out of range, without a root
    return x
