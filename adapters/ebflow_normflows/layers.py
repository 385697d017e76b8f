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
from ebflow_plugin.layers import log_det_at

__all__ = ["FullConv2d", "FullLinear", "SinhArcsinh", "SmoothLeakyReLU"]

if TYPE_CHECKING:
    Flow = nn.Module
else:
    try:
        from normflows.flows import Flow
    except ImportError as error:
        raise AdapterError("the layers of ebflow_normflows need normflows: pip install normflows") from error


class _Layer(Flow):
    """forward and inverse of a layer of the core."""

    transform: Any
    invert: Any

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Maps towards data."""
        x = self.invert(z)
        return x, -log_det_at(self, x)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Maps towards noise. Computes the log-det too, which the wrapper's energy skips for a linear layer."""
        return self.transform(z), log_det_at(self, z)


class FullLinear(layers.FullLinear, _Layer):
    """A full, unconstrained linear layer as a normflows Flow.

    Its arguments are those of :class:`ebflow_plugin.layers.FullLinear`.

    Example:
        >>> import normflows as nf, torch
        >>> flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(2), [FullLinear(2, init="orthogonal")])
        >>> flow.log_prob(torch.zeros(3, 2)).shape
        torch.Size([3])
    """


class FullConv2d(layers.FullConv2d, _Layer):
    """A full, unconstrained convolution as a normflows Flow.

    Its arguments are those of :class:`ebflow_plugin.layers.FullConv2d`.

    Example:
        >>> import normflows as nf, torch
        >>> flow = nf.NormalizingFlow(nf.distributions.DiagGaussian((2, 4, 4)), [FullConv2d(2, kernel_size=3)])
        >>> flow.log_prob(torch.zeros(3, 2, 4, 4)).shape
        torch.Size([3])
    """


class SmoothLeakyReLU(layers.SmoothLeakyReLU, _Layer):
    """A smooth, invertible activation as a normflows Flow.

    Its arguments are those of :class:`ebflow_plugin.layers.SmoothLeakyReLU`.

    Example:
        >>> import torch
        >>> x = torch.randn(3, 2, dtype=torch.float64)
        >>> layer = SmoothLeakyReLU(alpha=0.3)
        >>> torch.allclose(layer(layer.inverse(x)[0])[0], x)
        True
    """


class SinhArcsinh(layers.SinhArcsinh, _Layer):
    """A learnable elementwise sinh-arcsinh map, for tails and skewness, as a normflows Flow.

    Its arguments are those of :class:`ebflow_plugin.layers.SinhArcsinh`.

    Example:
        >>> import torch
        >>> x = torch.randn(3, 2, dtype=torch.float64)
        >>> layer = SinhArcsinh(2).double()
        >>> torch.allclose(layer(layer.inverse(x)[0])[0], x)
        True
    """
