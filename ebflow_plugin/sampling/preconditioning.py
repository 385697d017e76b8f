r"""Preconditioning of Langevin moves by a covariance: long where the density is wide, short where it is narrow."""

from __future__ import annotations

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.plan.inputs import check_tensor, refuse_non_finite

__all__ = ["Preconditioner", "check_covariance"]


class Preconditioner:
    r"""The factor L of each chain, with :math:`L L^\top` the covariance of the moving entries given the frozen ones.

    A plain Langevin step on w with :math:`x = L w` is a preconditioned one on x,

    .. math:: x \leftarrow x - \alpha L L^\top \nabla E(x) + \sqrt{2 \alpha}\, L z.

    Its stationary density does not depend on L, but its speed does. Chains with the same frozen entries share a factor.

    Cost: :math:`O(D^3)` for each distinct set of frozen entries, then :math:`O(D^2)` for each chain and step.

    Arguments:
        covariance: The covariance of the (flattened) variable of the chains: ``(D, D)``.
        frozen: True for entries that do not change, with shape ``(B, *)``.

    Example:
        >>> covariance = torch.tensor([[4.0, 1.0], [1.0, 1.0]])
        >>> moves = Preconditioner(covariance, torch.tensor([[False, True]]))
        >>> moves.push(torch.ones(1, 2))  # the variance of the first given the second is 4 - 1
        tensor([[1.7321, 0.0000]])
    """

    def __init__(self, covariance: Tensor, frozen: Tensor) -> None:
        patterns, self._pattern_of = torch.unique(frozen.flatten(1), dim=0, return_inverse=True)
        precision = torch.linalg.inv(covariance.double())
        self._factors = []
        for pattern in patterns:
            moving = (~pattern).nonzero().flatten()
            block = torch.linalg.inv(precision[moving][:, moving])
            factor = torch.zeros_like(precision)
            factor[moving[:, None], moving] = torch.linalg.cholesky(0.5 * (block + block.mT))
            self._factors.append(factor.to(covariance))

    def push(self, w: Tensor) -> Tensor:
        """L w, with the shape of w."""
        return self._each(w, [factor.mT for factor in self._factors])

    def pull(self, slope: Tensor) -> Tensor:
        """Lᵀ times the gradient with respect to x, which is that with respect to w."""
        return self._each(slope, self._factors)

    def _each(self, rows: Tensor, matrices: list[Tensor]) -> Tensor:
        """Multiplies each row by the matrix of its pattern."""
        flat = rows.flatten(1)
        if len(matrices) == 1:
            return (flat @ matrices[0]).reshape(rows.shape)
        result = torch.empty_like(flat)
        for number, matrix in enumerate(matrices):
            chosen = (self._pattern_of == number).nonzero().flatten()
            result[chosen] = flat[chosen] @ matrix
        return result.reshape(rows.shape)


def check_covariance(covariance: Tensor, x: Tensor) -> Tensor:
    """Returns a covariance of the entries of x, with its device and dtype.

    Raises:
        InputError: If it is not a covariance.
    """
    check_tensor("covariance", covariance)
    size = x[0].numel()
    if covariance.shape != (size, size):
        raise InputError(f"covariance must have shape ({size}, {size}), got {tuple(covariance.shape)}")
    refuse_non_finite("covariance", covariance)
    wide = covariance.double()
    if not torch.allclose(wide, wide.mT, rtol=1e-4) or int(torch.linalg.cholesky_ex(wide).info) != 0:
        raise InputError("covariance must be symmetric and positive definite; add a small multiple of the identity")
    return covariance.to(x)
