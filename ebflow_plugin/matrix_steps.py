"""The steps whose log-det costs something: dense, triangular and LU matrices, and our own layers.

Factorisations are kept until a parameter changes. On images a matrix acts on the channels of each pixel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ebflow_plugin.jets import Expansion
from ebflow_plugin.linalg import Dense, KeptLU
from ebflow_plugin.operators import Operator, dense_operator, single_at_least
from ebflow_plugin.plan import LinearStep, Shape, Shapes

__all__ = ["FullStep", "MatrixStep", "PackedLUStep", "TriangularStep"]


class MatrixStep(LinearStep):
    """y = W x + b with a dense W that has no structure: O(D²) to apply, O(D³) for the log-det and the inverse.

    For a batch of images, W acts on the channels of each pixel (a 1 × 1 convolution).
    """

    reason = "full matrix"
    transposed: bool = False  # whether the library keeps the transpose of W

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        self._lu = KeptLU(lambda kept: Dense(kept.mT if self.transposed else kept))

    @abstractmethod
    def kept(self) -> Tensor:
        """W, or its transpose, as the library keeps it, with shape ``(D, D)``."""

    def bias(self) -> Tensor | None:
        """b, with shape ``(D,)``."""
        return None

    def determinant(self, shapes: Shapes | None) -> int | None:
        return self.kept().shape[0]

    def apply(self, x: Tensor) -> Tensor:
        return multiply(x, self.kept().mT if self.transposed else self.kept(), self.bias())

    def invert(self, y: Tensor) -> Tensor:
        return pixelwise(lambda rows: self._lu.solve(self.kept(), rows), subtract(y, self.bias()))

    def log_abs_det(self, shape: Shape) -> Tensor:
        return self._lu.log_abs_det(self.kept()) * prod(shape[1:])

    def operator(self, shape: Shape) -> Operator:
        kept = single_at_least(self.kept())
        return dense_operator(kept.mT if self.transposed else kept, times=prod(shape) // kept.shape[0])

    @property
    def closed(self) -> bool:
        return not self.inverted

    def expand(self, x: Tensor, context: Tensor | None) -> Expansion:
        weight = self.kept().mT if self.transposed else self.kept()
        return Expansion(
            value=self.apply(x),
            push=lambda tangent: multiply(tangent, weight, None),
            pull=lambda adjoint: multiply(adjoint, weight.mT, None),
        )


class TriangularStep(LinearStep):
    """y = P L U x[order] + b: O(D²) to apply and to invert, O(D) for the log-det."""

    reason = "matrix held as LU factors"

    @abstractmethod
    def factors(self) -> tuple[Tensor, Tensor]:
        """L (unit lower) and U (upper), each with shape ``(D, D)``."""

    @abstractmethod
    def log_diagonal(self) -> Tensor:
        """Log of the absolute diagonal of U, with shape ``(D,)``."""

    def bias(self) -> Tensor | None:
        """b, with shape ``(D,)``."""
        return None

    def order(self) -> Tensor | None:
        """How x is permuted before the matrix."""
        return None

    def row_order(self) -> Tensor | None:
        """How the rows of L U x are permuted."""
        return None

    def apply(self, x: Tensor) -> Tensor:
        return self._affine(x)[0]

    @property
    def closed(self) -> bool:
        return not self.inverted

    def expand(self, x: Tensor, context: Tensor | None) -> Expansion:
        return Expansion(*self._affine(x))

    def _affine(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """The map of x, its linear part, and the transpose of that, all with the same factors."""
        lower, upper = self.factors()
        order, rows = self.order(), self.row_order()
        if x.dim() != 2:
            weight = lower @ upper  # O(C³), next to O(B·H·W·C²) for the pixels
            weight = weight if order is None else weight[:, torch.argsort(order)]
            weight = weight if rows is None else weight[rows]
            return (
                multiply(x, weight, self.bias()),
                lambda tangent: multiply(tangent, weight, None),
                lambda adjoint: multiply(adjoint, weight.mT, None),
            )

        def push(tangent: Tensor) -> Tensor:  # two products with O(B·D²), where that of the factors would take O(D³)
            y = F.linear(F.linear(tangent if order is None else tangent[:, order], upper), lower)
            return y if rows is None else y[:, rows]

        def pull(adjoint: Tensor) -> Tensor:
            adjoint = adjoint if rows is None else adjoint[:, torch.argsort(rows)]
            x = adjoint @ lower @ upper
            return x if order is None else x[:, torch.argsort(order)]

        return add(push(x), self.bias()), push, pull

    def invert(self, y: Tensor) -> Tensor:
        return pixelwise(self._solve, subtract(y, self.bias()))

    def _solve(self, rows: Tensor) -> Tensor:
        lower, upper = self.factors()
        order, row_order = self.order(), self.row_order()
        if row_order is not None:
            rows = rows[:, torch.argsort(row_order)]
        # Row vectors: y = x Uᵀ Lᵀ, so that the solves run from the right.
        half = torch.linalg.solve_triangular(lower.mT, rows, upper=True, left=False, unitriangular=True)
        x = torch.linalg.solve_triangular(upper.mT, half, upper=False, left=False)
        return x if order is None else x[:, torch.argsort(order)]

    def log_abs_det(self, shape: Shape) -> Tensor:
        return self.log_diagonal().sum() * prod(shape[1:])


class PackedLUStep(TriangularStep):
    """An LULinear of nflows, and its twin in normflows, which unpack their factors from vectors of entries."""

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        self._places = _packed_places(module.features, module.lower_entries.device)

    def factors(self) -> tuple[Tensor, Tensor]:
        """The libraries copy the places of all entries from numpy on every call; here they are kept."""
        module, size, entries = self.module, self.module.features, self.module.lower_entries
        if self._places[0].device != entries.device:  # the model was moved
            self._places = _packed_places(size, entries.device)
        packed = torch.cat([entries, entries.new_ones(size)]), torch.cat([module.upper_entries, module.upper_diag])
        flat = [entries.new_zeros(size * size).scatter(0, *pair) for pair in zip(self._places, packed, strict=True)]
        return flat[0].view(size, size), flat[1].view(size, size)

    def log_diagonal(self) -> Tensor:
        return torch.log(self.module.upper_diag)

    def bias(self) -> Tensor:
        bias: Tensor = self.module.bias
        return bias


class FullStep(LinearStep):
    """A FullLinear or FullConv2d of ours, in its density direction."""

    reason = "full, unconstrained"
    cost = "D × D determinant"

    def determinant(self, shapes: Shapes | None) -> int | None:
        size: int | None = getattr(self.module, "features", None if shapes is None else prod(shapes[0]))
        return size

    def apply(self, x: Tensor) -> Tensor:
        result: Tensor = self.module.transform(x)
        return result

    def invert(self, y: Tensor) -> Tensor:
        result: Tensor = self.module.invert(y)
        return result

    def log_abs_det(self, shape: Shape) -> Tensor:
        result: Tensor = self.module.log_det(shape)
        return result

    def operator(self, shape: Shape) -> Operator:
        operator: Operator = self.module.operator(shape)
        return operator

    def forward_shapes(self, shapes: Shapes) -> Shapes:
        return (self.module.output_shape(shapes[0]),)

    def inverse_shapes(self, shapes: Shapes) -> Shapes:
        return (self.module.input_shape(shapes[0]),)

    @property
    def closed(self) -> bool:
        return not self.inverted

    def expand(self, x: Tensor, context: Tensor | None) -> Expansion:
        value = self.module.transform(x)
        return Expansion(value, self.module.multiply, lambda adjoint: self.module.multiply_transposed(adjoint, x.shape))


def _packed_places(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the packed entries of L and of U stand in a flat matrix, each with the diagonal behind them."""
    rows, columns = torch.tril_indices(size, size, -1, device=device)
    up_rows, up_columns = torch.triu_indices(size, size, 1, device=device)
    diagonal = torch.arange(size, device=device) * (size + 1)
    return torch.cat([rows * size + columns, diagonal]), torch.cat([up_rows * size + up_columns, diagonal])


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W x + b for a batch of vectors, or for the channels of a batch of images."""
    if x.dim() == 4:
        return F.conv2d(x, weight[:, :, None, None], bias)
    return F.linear(x, weight, bias)


def add(x: Tensor, bias: Tensor | None) -> Tensor:
    """Adds b over the features or channels."""
    return x if bias is None else x + bias.reshape(-1, *[1] * (x.dim() - 2))


def subtract(x: Tensor, bias: Tensor | None) -> Tensor:
    """Subtracts b over the features or channels."""
    return x if bias is None else x - bias.reshape(-1, *[1] * (x.dim() - 2))


def pixelwise(function: Any, x: Tensor) -> Tensor:
    """Applies a function of row vectors ``(N, C)`` to a batch of vectors, or to each pixel of a batch of images."""
    if x.dim() == 2:
        result: Tensor = function(x)
        return result
    moved = x.movedim(1, -1)
    result = function(moved.reshape(-1, x.shape[1])).reshape(moved.shape).movedim(-1, 1)
    return result
