"""The layers that nflows lacks, as nflows Transforms.

They work inside a plain nflows ``Flow`` too, without wrapping it.

The arithmetic is in the core (:mod:`ebflow_plugin.layers`); here it gets the interface of nflows: ``forward`` is the
density direction, and every method returns ``(value, log-det)``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ebflow_plugin import layers
from ebflow_plugin.errors import AdapterError
from ebflow_plugin.layers import log_det_at

__all__ = ["FullConv2d", "FullLinear", "SinhArcsinh", "SmoothLeakyReLU"]


def _transform_class() -> Any:
    """The Transform class of nflows, or of an installed fork if nflows is not installed."""
    for package in ("nflows", "glasflow", "enflows", "flowcon"):
        if find_spec(package) is not None:
            name = "glasflow.nflows" if package == "glasflow" else package
            return import_module(f"{name}.transforms.base").Transform
    raise AdapterError("the layers of ebflow_nflows need nflows: pip install nflows")


if TYPE_CHECKING:
    Transform = nn.Module
else:
    Transform = _transform_class()


class _Layer(Transform):
    """forward and inverse of a layer of the core."""

    transform: Any
    invert: Any

    def forward(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Maps towards noise. Computes the log-det too, which the wrapper's energy skips for a linear layer."""
        return self.transform(inputs), log_det_at(self, inputs)

    def inverse(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Maps towards data."""
        outputs = self.invert(inputs)
        return outputs, -log_det_at(self, outputs)


class Inverted(Transform):
    """The inverse of a transform, for full layers in place of an InverseTransform (which each fork has its own of)."""

    def __init__(self, transform: Any) -> None:
        super().__init__()
        self._transform: Any = transform

    def forward(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The transform's inverse."""
        return self._transform.inverse(inputs, context)

    def inverse(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The transform's forward."""
        return self._transform(inputs, context)


class FullLinear(layers.FullLinear, _Layer):
    """A full, unconstrained linear layer as an nflows Transform.

    Its arguments are those of :class:`ebflow_plugin.layers.FullLinear`.

    Example:
        >>> import torch
        >>> from nflows import distributions, flows
        >>> flow = flows.Flow(FullLinear(2, init="orthogonal"), distributions.StandardNormal([2]))
        >>> flow.log_prob(torch.zeros(3, 2)).shape
        torch.Size([3])
    """


class FullConv2d(layers.FullConv2d, _Layer):
    """A full, unconstrained convolution as an nflows Transform.

    Its arguments are those of :class:`ebflow_plugin.layers.FullConv2d`.

    Example:
        >>> import torch
        >>> from nflows import distributions, flows
        >>> flow = flows.Flow(FullConv2d(2, kernel_size=3), distributions.StandardNormal([2, 4, 4]))
        >>> flow.log_prob(torch.zeros(3, 2, 4, 4)).shape
        torch.Size([3])
    """


class SmoothLeakyReLU(layers.SmoothLeakyReLU, _Layer):
    """A smooth, invertible activation as an nflows Transform.

    Its arguments are those of :class:`ebflow_plugin.layers.SmoothLeakyReLU`.

    Example:
        >>> import torch
        >>> outputs, log_det = SmoothLeakyReLU(alpha=0.3)(torch.zeros(3, 2))
        >>> outputs.shape, log_det.shape
        (torch.Size([3, 2]), torch.Size([3]))
    """


class SinhArcsinh(layers.SinhArcsinh, _Layer):
    """A learnable elementwise sinh-arcsinh map, for tails and skewness, as an nflows Transform.

    Its arguments are those of :class:`ebflow_plugin.layers.SinhArcsinh`.

    Example:
        >>> import torch
        >>> outputs, log_det = SinhArcsinh(2)(torch.zeros(3, 2))
        >>> outputs.shape, log_det.shape
        (torch.Size([3, 2]), torch.Size([3]))
    """
