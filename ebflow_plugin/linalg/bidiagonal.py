r"""Golub-Kahan bidiagonalisation: what products with a linear map tell of its singular values.

The same as Lanczos on :math:`W^\top W` in exact arithmetic, but it never squares the condition number of W.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Bands", "LinearMap", "bidiagonalise"]

Shape = tuple[int, ...]


class LinearMap:
    """The linear part W of an affine function of a batch, and its transpose, on flattened rows.

    Arguments:
        function: The function, of ``(B, *shape)``.
        shape: The event shape of its input.
        rows: Vectors with shape ``(B, D)``: as many as it will be given, with their device and dtype.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], shape: Shape, rows: Tensor) -> None:
        self._function, self._shape = function, shape
        with torch.inference_mode(False), torch.enable_grad():
            # The function is affine: one graph, at zero, transposes for every vector that comes.
            self._zero = rows.new_zeros(len(rows), *shape).requires_grad_()
            self._offset = function(self._zero)

    def __call__(self, rows: Tensor) -> Tensor:
        """W v for each row v."""
        with torch.no_grad():
            return (self._function(rows.reshape(-1, *self._shape)) - self._offset.detach()).flatten(1)

    def transposed(self, rows: Tensor) -> Tensor:
        """Wᵀ u for each row u."""
        with torch.inference_mode(False):
            out = rows.reshape(self._offset.shape)
            (gradient,) = torch.autograd.grad(self._offset, self._zero, out, retain_graph=True)
        return gradient.flatten(1)


class Bands(NamedTuple):
    """The bidiagonal matrices B of P starts.

    Attributes:
        diagonal: With shape ``(P, m)``.
        above: The entries above it, with shape ``(P, m - 1)``.
        complete: Whether there was nothing left to find: the singular values of B are then among those of W.
    """

    diagonal: Tensor
    above: Tensor
    complete: bool

    def matrices(self, size: int | None = None) -> Tensor:
        """The leading parts of B, in float64, with shape ``(P, size, size)``."""
        size = self.diagonal.shape[1] if size is None else size
        matrix = torch.diag_embed(self.diagonal[:, :size].double())
        return matrix if size < 2 else matrix + torch.diag_embed(self.above[:, : size - 1].double(), offset=1)


def bidiagonalise(
    linear: LinearMap, start: Tensor, iterations: int, enough: Callable[[Bands, int], bool] | None = None
) -> Bands:
    """Golub-Kahan from each row of ``start``: W V = U B with B upper bidiagonal, the columns of V orthonormal.

    ``2 · iterations`` products, and :math:`O(P m^2 D)` for the reorthogonalisation. One wait for the device a step.

    Arguments:
        linear: The map W.
        start: Where to begin, with shape ``(P, D)``.
        iterations: At most how many steps, at most D.
        enough: Asked at 8, 16, 32, … steps with what was found and D: whether to stop.

    Example:
        >>> weight = torch.tensor([3.0, 2.0, 1.0]).diag()
        >>> rows = torch.ones(1, 3)
        >>> found = bidiagonalise(LinearMap(lambda x: x @ weight.T, (3,), rows), rows, 3)
        >>> torch.linalg.svdvals(found.matrices()[0]).round(decimals=4).tolist()
        [3.0, 2.0, 1.0]
    """
    right = start / start.norm(dim=1, keepdim=True)
    basis = start.new_zeros(len(start), iterations, start.shape[1])
    left = linear(right)
    size = left.norm(dim=1)
    diagonal: list[Tensor] = [size]
    above: list[Tensor] = []
    scale = size.clone()  # of W, from below: what is noise beside it counts as nothing
    noise = 16 * torch.finfo(start.dtype).eps
    for k in range(1, iterations):
        basis[:, k - 1] = right
        left = left / size.clamp_min(torch.finfo(start.dtype).tiny)[:, None]
        right = linear.transposed(left) - size[:, None] * right
        found = basis[:, :k]
        for _ in range(2):  # twice is enough
            right = right - torch.einsum("pkd,pk->pd", found, torch.einsum("pkd,pd->pk", found, right))
        link = right.norm(dim=1)
        alive = link > noise * scale
        if not bool(alive.any()):
            return Bands(torch.stack(diagonal, 1), torch.stack(above, 1) if above else start[:, :0], True)
        # A finished probe goes on with zeros, and with numbers on the diagonal that no quadrature sees.
        link = link * alive
        right = torch.where(alive[:, None], right / link.clamp_min(torch.finfo(start.dtype).tiny)[:, None], 0.0)
        left = linear(right) - link[:, None] * left
        size = torch.where(alive, left.norm(dim=1), size)
        scale = torch.maximum(scale, torch.maximum(link, size))
        diagonal.append(size)
        above.append(link)
        if enough is not None and k >= 7 and (k + 1).bit_count() == 1:  # 8, 16, 32, … nodes
            bands = Bands(torch.stack(diagonal, 1), torch.stack(above, 1), False)
            if enough(bands, start.shape[1]):
                return bands
    complete = iterations == start.shape[1]
    return Bands(torch.stack(diagonal, 1), torch.stack(above, 1) if above else start[:, :0], complete)
