"""The zuko adapter of ebflow_plugin, and the layers that zuko lacks.

``from ebflow_zuko import FullLinear, FullConv2d, SinhArcsinh, SmoothLeakyReLU``: these are zuko LazyTransforms.
zuko itself is imported on their first use, so that models of other libraries can be wrapped without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebflow_plugin.adapting import lazy_layers
from ebflow_zuko.adapter import ADAPTER

if TYPE_CHECKING:
    from ebflow_zuko.layers import FullConv2d, FullLinear, SinhArcsinh, SmoothLeakyReLU

__all__ = ["ADAPTER", "FullConv2d", "FullLinear", "SinhArcsinh", "SmoothLeakyReLU"]

__getattr__ = lazy_layers(__name__, __all__)
