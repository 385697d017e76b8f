r"""GMRES: solves of large linear systems from products alone, for many right-hand sides at once.

GMRES minimises the residual of :math:`A x = b` over the Krylov space spanned by b, A b, A² b, …. Each right-hand side
has a space of its own; the products are batched. With a right preconditioner M the system is :math:`A M y = b`,
:math:`x = M y`, which has the same residual as :math:`A x = b`.

This is the form without a least-squares problem: it makes the images :math:`w_k = A z_k` of the directions orthonormal,
and the directions follow, so that the residual is a projection, and no number is needed on the host.

References:
    | GMRES: A Generalized Minimal Residual Algorithm for Solving Nonsymmetric Linear Systems (Saad and Schultz, 1986)
    | Adaptive version of simpler GMRES (Jiránek and Rozložník, 2010)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError

FIRST_VECTORS = 12  # the number of basis vectors allocated at first; doubled when they are used up
SAFETY = 0.9  # a factor of the tolerance, since rounding separates the residual of the recurrence from the true one
PROGRESS = 0.9  # the residual is the next direction where a step has reduced it to this, or else the last image


class Solution(NamedTuple):
    """The result of :func:`gmres`.

    Attributes:
        x: The solutions, with the shape of the right-hand sides.
        residuals: The norm of ``b - A x`` over that of ``b``, for each right-hand side.
        iterations: The number of products with A, without the last one, for the residuals.
        needed: The number of them after which nothing was left to do, a tensor: fewer, where nobody looks.
    """

    x: Tensor
    residuals: Tensor
    iterations: int
    needed: Tensor


@torch.no_grad()
def gmres(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    *,
    precondition: Callable[[Tensor], Tensor] | None = None,
    tolerance: float = 1e-6,
    iterations: int = 50,
) -> Solution:
    r"""Solves :math:`A x = b` for each row of ``right``.

    Cost for P rows of D numbers and m iterations: m + 1 products with A, and as many with M, of P rows each,
    :math:`O(P m^2 D)` for the reorthogonalisation, :math:`O(P m D)` memory.

    On the CPU it stops as soon as it has converged. Elsewhere a look would synchronise with the device, so it makes
    all ``iterations``; ``needed`` says how many would have done, for the next solve.

    It does not raise if it does not converge, or if A is singular or not finite: check the residuals.

    Arguments:
        product: The map of rows :math:`b \mapsto A b`, with shape ``(P, D)``.
        right: The right-hand sides, with shape ``(P, D)``.
        precondition: The map of rows :math:`b \mapsto M b`, with :math:`M \approx A^{-1}`, fixed and linear.
        tolerance: Stops when the relative residuals of all rows are below this.
        iterations: The largest number of products.

    Example:
        >>> matrix = torch.tensor([[2.0, 1.0], [0.0, 4.0]])
        >>> solution = gmres(lambda rows: rows @ matrix.T, torch.tensor([[3.0, 4.0]]))
        >>> solution.x.round(decimals=4), bool(solution.residuals < 1e-6), solution.iterations
        (tensor([[1., 1.]]), True, 2)
    """
    if right.dim() != 2:
        raise InputError(f"gmres takes right-hand sides as rows, shape (P, D), got shape {tuple(right.shape)}")
    rows, size = right.shape
    length = torch.linalg.vector_norm(right, dim=1, keepdim=True)
    if right.is_meta or rows == 0 or size == 0:
        zero = torch.zeros_like(length[:, 0])
        return Solution(torch.zeros_like(right), zero, 0, torch.zeros((), dtype=torch.int64, device=right.device))
    tiny = torch.finfo(right.dtype).tiny
    noise = 16 * math.sqrt(size) * torch.finfo(right.dtype).eps  # the relative rounding error of sums of D terms
    iterations = min(iterations, size)
    # Pairs of an image and its direction, side by side: what makes the images orthogonal moves the directions along.
    basis = right.new_empty(rows, min(iterations, FIRST_VECTORS), 2 * size)
    vector = right / length.clamp_min(tiny)
    state = torch.cat([vector, torch.zeros_like(vector)], 1)  # the residual, and the negative solution, of unit length
    error = torch.linalg.vector_norm(vector, dim=1, keepdim=True)
    unsettled: list[Tensor] = []
    for place in range(iterations):
        if place == basis.shape[1]:  # rare: most solves converge before
            basis = torch.cat([basis, torch.empty_like(basis)], 1)
        direction = vector if precondition is None else precondition(vector)
        image = product(direction)
        before = torch.linalg.vector_norm(image, dim=1, keepdim=True)
        pair, previous = torch.cat([image, direction], 1), basis[:, :place]
        for _ in range(2 if place else 0):  # Gram-Schmidt twice is enough
            along = torch.bmm(pair[:, None, :size], previous[:, :, :size].mT)
            pair = torch.baddbmm(pair[:, None], along, previous, alpha=-1)[:, 0]
        link = torch.linalg.vector_norm(pair[:, :size], dim=1, keepdim=True)
        new = link > noise * before  # otherwise the space contains the solution, or A is singular on it
        basis[:, place] = pair = torch.where(new, pair / link.clamp_min(tiny), 0.0)
        image = pair[:, :size]
        state = torch.addcmul(state, pair, (state[:, :size] * image).sum(1, keepdim=True), value=-1)
        last, error = error, torch.linalg.vector_norm(state[:, :size], dim=1, keepdim=True)
        vector = torch.where(error <= PROGRESS * last, state[:, :size] / error.clamp_min(tiny), image)
        unsettled.append((new & (error > SAFETY * tolerance)).any())
        if right.device.type == "cpu" and not unsettled[-1]:
            break
    solution = -state[:, size:] * length
    residual = torch.linalg.vector_norm(right - product(solution), dim=1) / length[:, 0].clamp_min(tiny)
    needed = (torch.stack(unsettled).sum() + 1).clamp_max(len(unsettled))
    return Solution(solution, residual, len(unsettled), needed)
