"""Langevin chains: their result, the gradient that moves them, and their preconditioning by a covariance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ebflow_plugin.chunks import picked, rows_in_chunks
from ebflow_plugin.errors import InputError
from ebflow_plugin.plan.inputs import check_tensor, refuse_non_finite


@dataclass(frozen=True)
class Chains:
    """The result of :func:`~ebflow_plugin.sampling.langevin.langevin`.

    Attributes:
        samples: The last states of the chains, with shape ``(B, *)``.
        trajectory: Every ``thin``-th state, with shape ``(S, B, *)``; None if there are none.
        energies: The energy at the start and after each step, including the burn-in, with shape
            ``(burn_in + steps + 1, B)``. It is that of the variable in which the chains ran.
        acceptance: The fraction of accepted proposals after the burn-in, with shape ``(B,)``; ones if not adjusted.
        step_sizes: The step size of each chain after the burn-in, with shape ``(B,)``.
    """

    samples: Tensor
    trajectory: Tensor | None
    energies: Tensor
    acceptance: Tensor
    step_sizes: Tensor

    def __repr__(self) -> str:
        return (
            f"Chains({len(self.acceptance)} chains, {len(self.energies) - 1} steps, acceptance "
            f"{float(self.acceptance.mean()):.2f}, step size {float(self.step_sizes.mean()):.3g})"
        )


def energy_and_slope(
    energy: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, context: Tensor | None, batch_size: int | None
) -> tuple[Tensor, Tensor]:
    """An energy of each row of x, and its gradient, of at most ``batch_size`` rows at a time."""
    values, slopes = list[Tensor](), list[Tensor]()
    for part in rows_in_chunks(len(x), batch_size):
        with torch.inference_mode(False), torch.enable_grad():
            rows, given = picked(part, x.detach().clone(), context)
            value = energy(rows.requires_grad_(), given)
            slopes += torch.autograd.grad(value.sum(), rows, allow_unused=True, materialize_grads=True)
        values.append(value.detach())
    return torch.cat(values), torch.cat(slopes)


class Preconditioner:
    r"""The factor L of each chain, with :math:`L L^\top` the covariance of the moving entries given the frozen ones.

    A plain Langevin step on w with :math:`x = L w` is a preconditioned one on x,

    .. math:: x \leftarrow x - \alpha L L^\top \nabla E(x) + \sqrt{2 \alpha}\, L z.

    Its stationary density does not depend on L, but its speed does. Chains with the same frozen entries share a factor.

    Cost: :math:`O(D^3)` for each distinct set of frozen entries, then :math:`O(D^2)` for each chain and step.

    Arguments:
        covariance: The covariance of the (flattened) variable of the chains: ``(D, D)``; None for L = I.
        frozen: True for entries that do not change, with shape ``(B, *)``.

    Example:
        >>> covariance = torch.tensor([[4.0, 1.0], [1.0, 1.0]])
        >>> moves = Preconditioner(covariance, torch.tensor([[False, True]]))
        >>> moves.push(torch.ones(1, 2))  # the variance of the first given the second is 4 - 1
        tensor([[1.7321, 0.0000]])
    """

    def __init__(self, covariance: Tensor | None, frozen: Tensor) -> None:
        self._frozen, self._factors = frozen, list[Tensor]()
        if covariance is None:
            return
        patterns, self._pattern_of = torch.unique(frozen.flatten(1), dim=0, return_inverse=True)
        precision = torch.linalg.inv(covariance.double())
        unit = torch.ones_like(precision[0]).diag()
        for pattern in patterns:
            moving = ~pattern[:, None] & ~pattern
            among = torch.linalg.inv(precision.where(moving, unit))
            self._factors.append(torch.linalg.cholesky(0.5 * (among + among.mT)).where(moving, 0.0).to(covariance))

    def push(self, w: Tensor) -> Tensor:
        """L w, with the shape of w."""
        return self._each(w, [factor.mT for factor in self._factors])

    def pull(self, slope: Tensor) -> Tensor:
        """Lᵀ times the gradient with respect to x, which is that with respect to w."""
        return self._each(slope, self._factors)

    def _each(self, rows: Tensor, matrices: list[Tensor]) -> Tensor:
        """Multiplies each row by the matrix of its pattern."""
        if not matrices:
            return rows.masked_fill(self._frozen, 0.0)
        flat = rows.flatten(1)
        result = torch.empty_like(flat)
        for number, matrix in enumerate(matrices):
            chosen = self._pattern_of == number
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
