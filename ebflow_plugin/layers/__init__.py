"""The arithmetic of the layers that the flow libraries lack, shared by all adapters.

An adapter combines these modules with its library's base class and adds that library's ``forward`` and ``inverse``,
which they do not define. In: data. Out: ``transform``, the density direction, ``invert``, its inverse, and
log-determinants.
"""

from ebflow_plugin.layers.full_conv2d import FullConv2d
from ebflow_plugin.layers.full_linear import FullLinear
from ebflow_plugin.layers.sinh_arcsinh import SinhArcsinh
from ebflow_plugin.layers.smooth_leaky_relu import SmoothLeakyReLU

__all__ = ["FullConv2d", "FullLinear", "SinhArcsinh", "SmoothLeakyReLU"]
