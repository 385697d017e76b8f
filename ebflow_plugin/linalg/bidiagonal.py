r"""Golub-Kahan bidiagonalisation: the singular values of a linear map from products with it.

The same as Lanczos on :math:`W^\top W` in exact arithmetic, but it does not square the condition number of W.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ebflow_plugin.linalg.operators import LinearOperator


class Bands(NamedTuple):
    """The bidiagonal matrices B of P starting vectors.

    Attributes:
        diagonal: The diagonals, with shape ``(P, m)``.
        above: The entries above them, with shape ``(P, m - 1)``.
        complete: Whether the Krylov spaces are complete: the singular values of B are then singular values of W.
    """

    diagonal: Tensor
    above: Tensor
    complete: bool

    def matrices(self, size: int | None = None) -> Tensor:
        """The leading blocks of B, in float64, with shape ``(P, size, size)``."""
        size = self.diagonal.shape[1] if size is None else size
        matrix = torch.diag_embed(self.diagonal[:, :size].double())
        return matrix if size < 2 else matrix + torch.diag_embed(self.above[:, : size - 1].double(), offset=1)


@torch.no_grad()
def bidiagonalise(
    operator: LinearOperator, start: Tensor, iterations: int, enough: Callable[[Bands, int], bool] | None = None
) -> Bands:
    """Golub-Kahan from each row of ``start``: W V = U B with B upper bidiagonal, the columns of V orthonormal.

    ``2 · iterations`` products, and :math:`O(P m^2 D)` for the reorthogonalisation. Synchronises with the device once
    per step.

    Arguments:
        operator: The map W.
        start: The starting vectors, with shape ``(P, D)``.
        iterations: The largest number of steps, at most D.
        enough: Called after 8, 16, 32, … steps with the bands so far and D; stops if it returns True.

    Example:
        >>> from ebflow_plugin.linalg.dense import Dense
        >>> weight = torch.tensor([3.0, 2.0, 1.0]).diag()
        >>> rows = torch.ones(1, 3)
        >>> bands = bidiagonalise(Dense(weight), rows, 3)
        >>> torch.linalg.svdvals(bands.matrices()[0]).round(decimals=4).tolist()
        [3.0, 2.0, 1.0]
    """

    def product(rows: Tensor) -> Tensor:
        return operator.apply(rows.reshape(-1, *operator.shape)).flatten(1)

    def transposed(rows: Tensor) -> Tensor:
        return operator.apply_transposed(rows.reshape(-1, *operator.out_shape)).flatten(1)

    right = start / start.norm(dim=1, keepdim=True)
    basis = start.new_zeros(len(start), iterations, start.shape[1])
    left = product(right)
    size = left.norm(dim=1)
    diagonal: list[Tensor] = [size]
    above: list[Tensor] = []
    scale = size.clone()  # a lower bound of the norm of W, for the rounding error
    noise = 16 * torch.finfo(start.dtype).eps
    for k in range(1, iterations):
        basis[:, k - 1] = right
        left = left / size.clamp_min(torch.finfo(start.dtype).tiny)[:, None]
        right = transposed(left) - size[:, None] * right
        previous = basis[:, :k]
        for _ in range(2):  # Gram-Schmidt twice is enough
            right = right - torch.einsum("pkd,pk->pd", previous, torch.einsum("pkd,pd->pk", previous, right))
        link = right.norm(dim=1)
        alive = link > noise * scale
        if not bool(alive.any()):
            return Bands(torch.stack(diagonal, 1), torch.stack(above, 1) if above else start[:, :0], True)
        # A finished probe continues with zeros, and with diagonal entries of quadrature weight zero.
        link = link * alive
        right = torch.where(alive[:, None], right / link.clamp_min(torch.finfo(start.dtype).tiny)[:, None], 0.0)
        left = product(right) - link[:, None] * left
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
