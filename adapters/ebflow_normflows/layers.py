"""The layers that normflows lacks, as normflows Flows.

They work inside a plain ``NormalizingFlow`` too, without wrapping it.

The arithmetic is in the core (:mod:`ebflow_plugin.layers`); here it gets the interface of normflows: ``inverse`` is the
density direction, ``forward`` samples, and both return ``(value, log-det)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ebflow_plugin import layers
from ebflow_plugin.errors import AdapterError

__all__ = ["FullConv2d", "FullLinear", "SinhArcsinh", "SmoothLeakyReLU"]

if TYPE_CHECKING:
    Flow = nn.Module
else:
    try:
        from normflows.flows import Flow
    except ImportError as error:
        raise AdapterError("the layers of ebflow_normflows need normflows: pip install normflows") from error


class _Linear(Flow):
    """forward and inverse of a layer with ``transform``, ``invert`` and ``log_det(event_shape)``."""

    transform: Any
    invert: Any
    log_det: Any

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Maps towards data."""
        x = self.invert(z)
        return x, -self.log_det(tuple(x.shape[1:])).expand(z.shape[0])

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Maps towards noise. Computes the log-det too, which the wrapper's energy skips."""
        return self.transform(z), self.log_det(tuple(z.shape[1:])).expand(z.shape[0])


class FullLinear(layers.FullLinear, _Linear):
    """A full, unconstrained linear layer as a normflows Flow.

    Its arguments are those of :class:`ebflow_plugin.layers.FullLinear`.

    Example:
        >>> import normflows as nf, torch
        >>> flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(2), [FullLinear(2, init="orthogonal")])
        >>> flow.log_prob(torch.zeros(3, 2)).shape
        torch.Size([3])
    """


class FullConv2d(layers.FullConv2d, _Linear):
    """A full, unconstrained convolution as a normflows Flow.

    Its arguments are those of :class:`ebflow_plugin.layers.FullConv2d`.

    Example:
        >>> import normflows as nf, torch
        >>> flow = nf.NormalizingFlow(nf.distributions.DiagGaussian((2, 4, 4)), [FullConv2d(2, kernel_size=3)])
        >>> flow.log_prob(torch.zeros(3, 2, 4, 4)).shape
        torch.Size([3])
    """


class _Elementwise(Flow):
    """forward and inverse of a layer with ``transform``, ``invert`` and ``log_det(x)``."""

    transform: Any
    invert: Any
    log_det: Any

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Maps towards data."""
        x = self.invert(z)
        return x, -self.log_det(x)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Maps towards noise."""
        return self.transform(z), self.log_det(z)


class SmoothLeakyReLU(layers.SmoothLeakyReLU, _Elementwise):
    """A smooth, invertible activation as a normflows Flow.

    Its arguments are those of :class:`ebflow_plugin.layers.SmoothLeakyReLU`.

    Example:
        >>> import torch
        >>> x = torch.randn(3, 2, dtype=torch.float64)
        >>> layer = SmoothLeakyReLU(alpha=0.3)
        >>> torch.allclose(layer(layer.inverse(x)[0])[0], x)
        True
    """


class SinhArcsinh(layers.SinhArcsinh, _Elementwise):
    """A learnable elementwise sinh-arcsinh map, for tails and skewness, as a normflows Flow.

    Its arguments are those of :class:`ebflow_plugin.layers.SinhArcsinh`.

    Example:
        >>> import torch
        >>> x = torch.randn(3, 2, dtype=torch.float64)
        >>> layer = SinhArcsinh(2).double()
        >>> torch.allclose(layer(layer.inverse(x)[0])[0], x)
        True
    """
