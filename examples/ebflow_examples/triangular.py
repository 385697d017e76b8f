"""A triangular linear layer, the L and U of Fig. A.4; each library's kit gives it that library's shape."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Triangular"]


class Triangular(nn.Module):
    r"""z = W y + b with the part of W above, or below, its diagonal masked.

    The log-determinant is :math:`\sum_i \log |W_{ii}|`. Cost: O(D²) for each vector, both ways; O(D) for the log-det.

    Arguments:
        features: The number D of features.
        upper: Whether W is upper triangular; lower by default.
        sign: What the diagonal begins as, 1 or -1.
    """

    def __init__(self, features: int, upper: bool = False, sign: float = 1.0) -> None:
        super().__init__()
        self.upper = upper
        self.weight = nn.Parameter(sign * torch.eye(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def matrix(self) -> Tensor:
        """W, with its mask."""
        return self.weight.triu() if self.upper else self.weight.tril()

    def transform(self, x: Tensor) -> Tensor:
        """Moves towards noise."""
        return F.linear(x, self.matrix(), self.bias)

    def invert(self, y: Tensor) -> Tensor:
        """Moves towards data."""
        return torch.linalg.solve_triangular(self.matrix().mT, y - self.bias, upper=not self.upper, left=False)

    def log_det(self) -> Tensor:
        """Returns log |det| of :meth:`transform`, a scalar."""
        return self.weight.diagonal().abs().log().sum()

    def extra_repr(self) -> str:
        """Describes the layer in the text of a model."""
        return f"{len(self.bias)}, upper={self.upper}"
