"""The layers that zuko lacks, as zuko LazyTransforms.

They work inside a plain zuko ``Flow`` too, without wrapping it.

The arithmetic is in the core (:mod:`ebflow_plugin.layers`); here it gets the interface of zuko: ``forward`` returns a
transform of ``torch.distributions``, whose forward is the density direction, and which ignores the context.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform, constraints

from ebflow_plugin import layers
from ebflow_plugin.errors import AdapterError

__all__ = ["FullConv2d", "FullLinear", "SinhArcsinh", "SmoothLeakyReLU"]

if TYPE_CHECKING:
    LazyTransform = nn.Module
else:
    if find_spec("zuko") is None:
        raise AdapterError("the layers of ebflow_zuko need zuko: pip install 'ebflow-plugin[zuko]'")
    from zuko.lazy import LazyTransform


class LinearMap(Transform):
    """The map of a linear layer.

    Arguments:
        layer: A layer with ``transform``, ``invert`` and ``log_det(event_shape)``.
        event_dim: The number of dimensions of an event.
    """

    bijective = True

    def __init__(self, layer: Any, event_dim: int) -> None:
        super().__init__()
        self.layer = layer
        self.domain = self.codomain = constraints.independent(constraints.real, event_dim)

    def _call(self, x: Tensor) -> Tensor:
        return self._on_batch(self.layer.transform, x)

    def _inverse(self, y: Tensor) -> Tensor:
        return self._on_batch(self.layer.invert, y)

    def _on_batch(self, function: Any, x: Tensor) -> Tensor:
        """Applies a function of one batch dimension to any number of batch dimensions."""
        batch = x.shape[: -self.domain.event_dim]
        rows: Tensor = function(x.reshape(-1, *x.shape[len(batch) :]))
        return rows.reshape(*batch, *rows.shape[1:])

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """The log-det, which the wrapper's energy skips."""
        dim: int = self.domain.event_dim
        log_det: Tensor = self.layer.log_det(tuple(x.shape[-dim:]))
        return log_det.expand(x.shape[:-dim])

    def forward_shape(self, shape: tuple[int, ...]) -> torch.Size:
        """The shape of the output."""
        dim: int = self.domain.event_dim
        return torch.Size([*shape[:-dim], *self.layer.output_shape(tuple(shape[-dim:]))])

    def inverse_shape(self, shape: tuple[int, ...]) -> torch.Size:
        """The shape of the input."""
        dim: int = self.domain.event_dim
        return torch.Size([*shape[:-dim], *self.layer.input_shape(tuple(shape[-dim:]))])


class ActivationMap(Transform):
    """The map of a SmoothLeakyReLU or a SinhArcsinh, elementwise."""

    domain = constraints.real
    codomain = constraints.real
    bijective = True
    sign = 1

    def __init__(self, layer: layers.SmoothLeakyReLU | layers.SinhArcsinh) -> None:
        super().__init__()
        self.layer = layer

    def _call(self, x: Tensor) -> Tensor:
        return self.layer.transform(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return self.layer.invert(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """The log of the slope, for each element."""
        return self.layer.slope(x).log()


class FullLinear(layers.FullLinear, LazyTransform):
    """A full, unconstrained linear layer as a zuko LazyTransform.

    Its arguments are those of :class:`ebflow_plugin.layers.FullLinear`.

    Example:
        >>> from zuko.distributions import DiagNormal
        >>> from zuko.lazy import Flow, UnconditionalDistribution
        >>> base = UnconditionalDistribution(DiagNormal, torch.zeros(2), torch.ones(2), buffer=True)
        >>> flow = Flow([FullLinear(2, init="orthogonal")], base)
        >>> flow().log_prob(torch.zeros(3, 2)).shape
        torch.Size([3])
    """

    def forward(self, c: Tensor | None = None) -> Transform:
        """The map, from data to noise."""
        return LinearMap(self, event_dim=1)


class FullConv2d(layers.FullConv2d, LazyTransform):
    """A full, unconstrained convolution as a zuko LazyTransform.

    Its arguments are those of :class:`ebflow_plugin.layers.FullConv2d`.

    Example:
        >>> from zuko.distributions import DiagNormal
        >>> from zuko.lazy import Flow, UnconditionalDistribution
        >>> mean, std = torch.zeros(2, 4, 4), torch.ones(2, 4, 4)
        >>> base = UnconditionalDistribution(DiagNormal, mean, std, ndims=3, buffer=True)
        >>> flow = Flow([FullConv2d(2, kernel_size=3)], base)
        >>> flow().log_prob(torch.zeros(3, 2, 4, 4)).shape
        torch.Size([3])
    """

    def forward(self, c: Tensor | None = None) -> Transform:
        """The map, from data to noise."""
        return LinearMap(self, event_dim=3)


class SmoothLeakyReLU(layers.SmoothLeakyReLU, LazyTransform):
    """A smooth, invertible activation as a zuko LazyTransform.

    Its arguments are those of :class:`ebflow_plugin.layers.SmoothLeakyReLU`.

    Example:
        >>> transform = SmoothLeakyReLU(alpha=0.3)()
        >>> x = torch.zeros(3, 2)
        >>> transform(x).shape, transform.log_abs_det_jacobian(x, transform(x)).shape
        (torch.Size([3, 2]), torch.Size([3, 2]))
    """

    def forward(self, c: Tensor | None = None) -> Transform:
        """The map, from data to noise."""
        return ActivationMap(self)


class SinhArcsinh(layers.SinhArcsinh, LazyTransform):
    """A learnable elementwise sinh-arcsinh map, for tails and skewness, as a zuko LazyTransform.

    Its arguments are those of :class:`ebflow_plugin.layers.SinhArcsinh`.

    Example:
        >>> transform = SinhArcsinh(2)()
        >>> x = torch.zeros(3, 2)
        >>> transform(x).shape, transform.log_abs_det_jacobian(x, transform(x)).shape
        (torch.Size([3, 2]), torch.Size([3, 2]))
    """

    def forward(self, c: Tensor | None = None) -> Transform:
        """The map, from data to noise."""
        return ActivationMap(self)
