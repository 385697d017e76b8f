"""Activations with closed-form derivatives: each yields f and its first three derivatives at a point.

A piecewise linear f may yield only the first; it has an attribute ``straight``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebflow_plugin.plan.chains import Derivatives

__all__ = ["FUNCTIONS", "MODULES", "scaling"]


def _silu(x: Tensor) -> Iterator[Tensor]:
    s = torch.sigmoid(x)
    y = x * s
    yield y
    rest = 1.0 - s
    yield torch.addcmul(s, y, rest)
    bell, odd = s * rest, rest - s
    inner = x * odd + 2.0
    yield bell * inner
    yield bell * ((inner + 1.0) * odd - 2.0 * x * bell)


def _tanh(x: Tensor) -> Iterator[Tensor]:
    y = torch.tanh(x)
    yield y
    slope = 1.0 - y * y
    yield slope
    yield -2.0 * y * slope
    yield slope * (4.0 - 6.0 * slope)


def _sigmoid(x: Tensor) -> Iterator[Tensor]:
    s = torch.sigmoid(x)
    yield s
    bell = s * (1.0 - s)
    yield bell
    yield bell * (1.0 - 2.0 * s)
    yield bell * (1.0 - 6.0 * bell)


def _gelu(x: Tensor) -> Iterator[Tensor]:
    yield F.gelu(x)
    mass, density = torch.special.ndtr(x), torch.exp(-0.5 * x * x) / sqrt(2.0 * pi)
    yield mass + x * density
    yield density * (2.0 - x * x)
    yield density * x * (x * x - 4.0)


def _softplus(module: nn.Softplus) -> Derivatives:
    beta, threshold = float(module.beta), float(module.threshold)

    def derivatives(x: Tensor) -> Iterator[Tensor]:
        yield F.softplus(x, beta, threshold)
        straight = x * beta > threshold  # where torch returns x itself
        s = torch.sigmoid(beta * x).masked_fill(straight, 1.0)
        yield s
        bell = beta * s * (1.0 - s)
        yield bell
        yield beta * bell * (1.0 - 2.0 * s)

    return derivatives


# By signs, since torch.where and masked_fill take twenty times as long on a CPU.
def _elu(alpha: float) -> Derivatives:
    def derivatives(x: Tensor) -> Iterator[Tensor]:
        yield F.elu(x, alpha)
        below = 1.0 - x.sign().clamp(min=0.0)
        bend = alpha * torch.exp(x.clamp(max=0.0)) * below
        yield 1.0 - below + bend
        yield bend
        yield bend

    return derivatives


def _leaky(slope: float) -> Derivatives:
    def derivatives(x: Tensor) -> Iterator[Tensor]:
        yield F.leaky_relu(x, slope)
        usual = 0.0 <= slope <= 1.0
        yield x.sign().clamp(min=slope) if usual else torch.where(x > 0, torch.ones_like(x), slope)

    derivatives.straight = True  # type: ignore[attr-defined]
    return derivatives


def scaling(factor: Tensor) -> Derivatives:
    """The multiplication of x by a number."""

    def derivatives(x: Tensor) -> Iterator[Tensor]:
        yield x * factor
        yield torch.ones_like(x) * factor

    derivatives.straight = True  # type: ignore[attr-defined]
    return derivatives


FUNCTIONS: dict[Any, Derivatives] = {
    **dict.fromkeys((F.silu,), _silu),
    **dict.fromkeys((torch.tanh, F.tanh), _tanh),
    **dict.fromkeys((torch.sigmoid, F.sigmoid), _sigmoid),
    **dict.fromkeys((F.relu, torch.relu), _leaky(0.0)),
    F.gelu: _gelu,
    F.elu: _elu(1.0),
    F.softplus: _softplus(nn.Softplus()),
    F.leaky_relu: _leaky(0.01),
}
MODULES: dict[type, Callable[[Any], Derivatives | None]] = {
    nn.SiLU: lambda module: _silu,
    nn.Tanh: lambda module: _tanh,
    nn.Sigmoid: lambda module: _sigmoid,
    nn.GELU: lambda module: _gelu if module.approximate == "none" else None,
    nn.ELU: lambda module: _elu(module.alpha),
    nn.Softplus: _softplus,
    nn.ReLU: lambda module: _leaky(0.0),
    nn.LeakyReLU: lambda module: _leaky(module.negative_slope),
}
