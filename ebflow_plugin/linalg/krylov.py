r"""GMRES: solves of large linear systems from products alone, for many right-hand sides at once.

GMRES minimises the residual of :math:`A x = b` over the Krylov space spanned by b, A b, A² b, …. Each right-hand side
has a space of its own; the products are batched. With a right preconditioner M the system is :math:`A M y = b`,
:math:`x = M y`, which has the same residual as :math:`A x = b`.

References:
    | GMRES: A Generalized Minimal Residual Algorithm for Solving Nonsymmetric Linear Systems (Saad and Schultz, 1986)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError

__all__ = ["Solution", "gmres"]

CHECK_EVERY = {"cpu": 1}  # iterations between two checks of the residuals, by device
CHECK_EVERY_ELSEWHERE = 4  # since a check synchronises with the device
FIRST_VECTORS = 12  # the number of basis vectors allocated at first; doubled when they are used up
SAFETY = 0.9  # a factor of the tolerance, since rounding separates the residual of the recurrence from the true one


class Solution(NamedTuple):
    """The result of :func:`gmres`.

    Attributes:
        x: The solutions, with the shape of the right-hand sides.
        residuals: The norm of ``b - A x`` over that of ``b``, for each right-hand side.
        iterations: The number of products with A, without the last one, for the residuals.
    """

    x: Tensor
    residuals: Tensor
    iterations: int


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
    :math:`O(P m^2 D)` for the reorthogonalisation, :math:`O(P m D)` memory. The small least-squares problem is solved
    on the host, which synchronises with the device once in four iterations (in every iteration on the CPU, where that
    is free).

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
    length = torch.linalg.vector_norm(right, dim=1)
    if right.is_meta or rows == 0 or size == 0:
        return Solution(torch.zeros_like(right), torch.zeros_like(length), 0)
    tiny = torch.finfo(right.dtype).tiny
    noise = 16 * math.sqrt(size) * torch.finfo(right.dtype).eps  # the relative rounding error of sums of D terms
    iterations = min(iterations, size)
    every = CHECK_EVERY.get(right.device.type, CHECK_EVERY_ELSEWHERE)
    basis = right.new_empty(rows, min(iterations, FIRST_VECTORS) + 1, size)
    basis[:, 0] = right / length.clamp_min(tiny)[:, None]
    problems = [_LeastSquares(noise) for _ in range(rows)]
    pending: list[Tensor] = []
    done = 0
    for place in range(iterations):
        if place + 1 == basis.shape[1]:  # rare: most solves converge before
            basis = torch.cat([basis, torch.empty_like(basis)], 1)
        vector = basis[:, place]
        vector = product(vector if precondition is None else precondition(vector))
        before = torch.linalg.vector_norm(vector, dim=1)
        previous = basis[:, : place + 1]
        along = torch.zeros_like(previous[:, :, 0])
        for _ in range(2):  # Gram-Schmidt twice is enough
            part = torch.bmm(previous, vector[:, :, None])
            vector = vector - torch.bmm(part.mT, previous)[:, 0]
            along = along + part[:, :, 0]
        link = torch.linalg.vector_norm(vector, dim=1)
        link = torch.where(link > noise * before, link, 0.0)  # zero: the space contains the solution
        basis[:, place + 1] = torch.where(link[:, None] > 0, vector / link.clamp_min(tiny)[:, None], 0.0)
        pending.append(torch.cat([along, link[:, None]], 1))
        done = place + 1
        if done % every == 0 or done == iterations:
            _add_columns(problems, pending)
            pending = []
            if all(problem.settled(SAFETY * tolerance) for problem in problems):
                break
    weights = torch.tensor([problem.solve(done) for problem in problems], dtype=right.dtype)
    weights = weights.to(right.device, non_blocking=True)
    solution = torch.bmm((weights * length[:, None])[:, None], basis[:, :done])[:, 0]
    if precondition is not None:
        solution = precondition(solution)
    residual = torch.linalg.vector_norm(right - product(solution), dim=1) / length.clamp_min(tiny)
    return Solution(solution, residual, done)


class _LeastSquares:
    """min ‖e₁ - H y‖ for a Hessenberg matrix H that grows column by column, by Givens rotations, in Python floats."""

    def __init__(self, noise: float) -> None:
        self.noise = noise  # relative to its column, an entry below this counts as zero
        self.columns: list[list[float]] = []  # the columns of R
        self.right = [1.0]
        self.rotations: list[tuple[float, float]] = []
        self.ended = False  # whether the Krylov space is complete, or something is not finite

    def settled(self, tolerance: float) -> bool:
        """Whether it has converged, or more columns cannot help."""
        return self.ended or abs(self.right[-1]) <= tolerance

    def add(self, column: Sequence[float]) -> None:
        """Adds a column, including the entry below the diagonal."""
        if self.ended:
            return
        if not all(map(math.isfinite, column)):
            self.ended = True
            return
        entries, below = list(column[:-1]), column[-1]
        scale = math.hypot(*column)
        for place, (cosine, sine) in enumerate(self.rotations):
            upper, lower = entries[place], entries[place + 1]
            entries[place], entries[place + 1] = cosine * upper + sine * lower, cosine * lower - sine * upper
        corner = entries[-1]
        size = math.hypot(corner, below)
        self.ended = below == 0.0
        if size <= self.noise * scale:
            self.ended = True  # A is singular: the column adds nothing, and is left out of y
            return
        cosine, sine = corner / size, below / size
        self.rotations.append((cosine, sine))
        self.columns.append([*entries[:-1], size])
        last = self.right.pop()
        self.right += [cosine * last, -sine * last]

    def solve(self, count: int) -> list[float]:
        """Returns y, padded with zeros to ``count`` entries."""
        y = self.right[: len(self.columns)]
        for place in reversed(range(len(self.columns))):
            y[place] /= self.columns[place][place]
            for row in range(place):
                y[row] -= self.columns[place][row] * y[place]
        return y + [0.0] * (count - len(y))


def _add_columns(problems: Sequence[_LeastSquares], columns: Sequence[Tensor]) -> None:
    """Adds new columns to the least-squares problems, with one synchronisation with the device."""
    sizes = [column.shape[1] for column in columns]
    for problem, entries in zip(problems, torch.cat(list(columns), 1).tolist(), strict=True):
        start = 0
        for size in sizes:
            problem.add(entries[start : start + size])
            start += size
