r"""The maps that the flow libraries lack, with their arithmetic written once.

An adapter mixes these modules with its library's base class and gives them that library's ``forward`` and
``inverse``; they define neither. ``transform`` is the density direction, from data to noise; ``invert`` undoes it.

The two linear maps factorise their matrix in one of two ways. If a gradient for the weight is wanted, the
factorisation is part of the graph and happens on every call, in the weight's own precision (at least single). If not, it is done
in double precision and kept until the weight changes: in single precision the round trip through a random 784 x 784
weight loses ten times as many digits, and its log-determinant is wrong by 1e-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ebflow_plugin.conv import Axis, Geometry, conv_matrix, convolve
from ebflow_plugin.errors import InputError, suggest
from ebflow_plugin.linalg import Dense, Matrix, Solver
from ebflow_plugin.memo import Memo

__all__ = ["FullConv2d", "FullLinear", "SmoothLeakyReLU"]

INITS = ("identity", "negative_identity", "normal", "orthogonal")
PADDING_MODES = ("circular", "reflect", "replicate", "zeros")


class _FullMap(nn.Module):
    """An affine map with an unconstrained weight: what a dense one and a convolution share."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        # Two memos, since a solver holds factors as large as the weight, and log_det needs only a number.
        self._log_dets: Memo[Tensor] = Memo()
        self._solvers: Memo[Solver] = Memo()

    def _matrix(self, weight: Tensor, event_shape: tuple[int, ...]) -> Matrix:
        raise NotImplementedError

    def _from_weight(self, memo: Memo[T], event_shape: tuple[int, ...], compute: Callable[[Matrix], T]) -> T:
        """Computes something from the matrix: inside of the graph if the weight wants a gradient, else kept."""
        weight = self.weight
        if weight.requires_grad and torch.is_grad_enabled():
            return compute(self._matrix(weight.to(torch.promote_types(weight.dtype, torch.float32)), event_shape))

        def compute_outside() -> T:
            # What is kept may be used in a later graph, so it cannot hold inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                return compute(self._matrix(weight.detach().to(torch.float64), event_shape))

        return memo.get([weight], compute_outside, key=(event_shape, weight.dtype, weight.device))
