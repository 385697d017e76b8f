"""The nflows adapter of ebflow_plugin, and the layers that nflows lacks.

``from ebflow_nflows import FullLinear, FullConv2d, SinhArcsinh, SmoothLeakyReLU``: these are nflows Transforms.
nflows itself is imported on their first use, so that models of other libraries can be wrapped without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebflow_nflows.adapter import ADAPTER
from ebflow_plugin.adapting import lazy_layers

if TYPE_CHECKING:
    from ebflow_nflows.layers import FullConv2d, FullLinear, SinhArcsinh, SmoothLeakyReLU

__all__ = ["ADAPTER", "FullConv2d", "FullLinear", "SinhArcsinh", "SmoothLeakyReLU"]

__getattr__ = lazy_layers(__name__, __all__)
