"""The arithmetic of the layers that the flow libraries lack, shared by all adapters.

An adapter combines these modules with its library's base class and adds that library's ``forward`` and ``inverse``,
which they do not define. In: data. Out: ``transform``, the density direction, ``invert``, its inverse, and
log-determinants.
"""

from typing import Any

from torch import Tensor

from ebflow_plugin.layers.full_conv2d import FullConv2d
from ebflow_plugin.layers.full_linear import FullLinear
from ebflow_plugin.layers.sinh_arcsinh import SinhArcsinh
from ebflow_plugin.layers.smooth_leaky_relu import SmoothLeakyReLU

__all__ = ["FullConv2d", "FullLinear", "SinhArcsinh", "SmoothLeakyReLU", "log_det_at"]


def log_det_at(layer: Any, x: Tensor) -> Tensor:
    """The log-det of one of these layers at each sample of x, with shape ``(B,)``.

    Example:
        >>> import torch
        >>> log_det_at(FullLinear(2, init="negative_identity"), torch.zeros(3, 2)).tolist()
        [0.0, 0.0, 0.0]
    """
    linear = isinstance(layer, FullConv2d | FullLinear)
    return layer.log_det(tuple(x.shape[1:])).expand(len(x)) if linear else layer.log_det(x)
