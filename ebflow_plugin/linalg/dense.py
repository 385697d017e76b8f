r"""Log-determinants and solves of dense matrices, and :class:`CachedLU`, which caches those of a weight.

They are plain torch, as those of :mod:`~ebflow_plugin.linalg.band` are: they run on any device, inside or outside a
graph, and can be differentiated to any order.

Outside a graph a matrix is factorised once. A singular one raises :class:`~ebflow_plugin.errors.SingularError`, a check
that synchronises with the device. Inside a graph, ``log_abs_det`` is part of a training step and must not
synchronise: a singular matrix returns ``-inf`` there, which the loss shows. A solve in a graph checks on the CPU alone,
and notices only a pivot that is exactly zero; elsewhere it returns what is not finite.

:class:`CachedLU` chooses between the two for a weight that may or may not be trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

from ebflow_plugin.errors import SingularError
from ebflow_plugin.linalg.memo import Memo, free_to_read, is_traced, may_read
from ebflow_plugin.linalg.operators import (
    Approximation,
    Blocks,
    Cost,
    LinearOperator,
    Solver,
    dense_inverse,
    multiply_rows,
)
from ebflow_plugin.linalg.precision import full_precision, full_precision_backward

T = TypeVar("T")


class Dense(LinearOperator):
    r"""A dense matrix, or a batch of them: independent blocks.

    Cost: :math:`O(D^3)` for the determinant and for :meth:`inverse`, :math:`O(D^2)` for each vector solved.

    Its approximate inverse is :math:`c W^\top`. The factor :math:`c = D / \|W\|_F^2` makes it the multiple of
    :math:`W^\top` nearest to :math:`W^{-1}`. It is exact for orthogonal matrices and their multiples.

    Arguments:
        matrix: The entries, real or complex, with shape :math:`(*, D, D)`.
        times: The number of vectors that it acts on.
        scale: The magnitude of the terms that each entry is a sum of, with shape :math:`(D, D)`. A pivot below their
            rounding error counts as zero. By default the magnitude of the entries.

    Example:
        >>> matrix = Dense(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        >>> matrix.apply(torch.tensor([[3.0, 2.0]])), matrix.inverse()(torch.tensor([[4.0, 3.0]]))
        (tensor([[4., 3.]]), tensor([[3., 2.]]))
    """

    def __init__(self, matrix: Tensor, times: int = 1, scale: Tensor | None = None) -> None:
        self.weight = self.matrix = matrix
        self.shape = self.out_shape = tuple(matrix.shape[:-1])
        self.times, self.operations, self.scale = times, float(matrix.numel()), scale
        size, groups = matrix.shape[-1], math.prod(matrix.shape[:-2])
        self.blocks, self.cost = Blocks(size, groups), Cost(groups * size**3 / 3, 16.0 * size**2)

    def apply(self, x: Tensor) -> Tensor:
        return multiply_rows(self.weight, x)

    def apply_transposed(self, y: Tensor) -> Tensor:
        return multiply_rows(self.weight.mT, y)

    def approximate(self) -> Approximation:
        fixed = self.like
        return dense_inverse(fixed.mT * (fixed.shape[-1] / fixed.square().sum((-2, -1), keepdim=True)))

    def sum_of_squares(self) -> float:
        return float(self.like.double().square().sum())

    def log_abs_det(self) -> Tensor:
        r"""Returns :math:`\log |\det W|`, with shape :math:`(*)`, real."""
        if is_traced(self.weight):
            # The backward of slogdet is one solve; that of lu_factor costs three times as much (measured).
            return torch.linalg.slogdet(self.weight)[1]
        lu, _ = self._factors()
        return lu.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)

    def inverse(self) -> Solver:
        r"""Returns the map from rows :math:`b`, with shape :math:`(*, N, D)`, to the rows :math:`W^{-1} b`."""
        if is_traced(self.weight):
            return self._solve_traced
        lu, pivots = self._factors()
        return lambda rows: torch.linalg.lu_solve(lu, pivots, rows.to(lu.dtype).mT).mT

    def _solve_traced(self, rows: Tensor) -> Tensor:
        columns, info = torch.linalg.solve_ex(self.weight, rows.to(self.weight.dtype).mT)
        if free_to_read(info) and bool(info.any()):
            raise SingularError(f"{_name(self.weight.shape[-1])} is singular: a pivot is zero. {_ADVICE}")
        return columns.mT

    def _factors(self) -> tuple[Tensor, Tensor]:
        lu, pivots, _ = torch.linalg.lu_factor_ex(self.weight)
        scale = self.weight.abs() if self.scale is None else self.scale
        order = row_order(lu, pivots)
        rows = scale.amax(-1).expand(order.shape).gather(-1, order)
        refuse_singular(lu.diagonal(dim1=-2, dim2=-1), torch.minimum(rows, scale.amax(-2)), self.weight.shape[-1])
        return lu, pivots


class CachedLU:
    r"""The log-determinant and the inverse of the matrix of a weight, cached until the weight changes.

    If the weight is differentiated, in any mode, they are computed on every call, in the weight's own precision (at
    least single). If not, they are computed once, in double precision: in single precision the round trip through a
    random 784 x 784 weight has a ten times larger error, and the log-determinant is wrong by 1e-4.

    A copy or a pickle has an empty cache.

    Arguments:
        matrix: ``matrix(weight, *setting)`` builds the matrix; a setting is anything hashable.

    Example:
        >>> weight, lu = torch.eye(2) * 2, CachedLU()
        >>> lu.solve(weight, torch.ones(1, 2))
        tensor([[0.5000, 0.5000]])
        >>> weight.mul_(2)
        tensor([[4., 0.],
                [0., 4.]])
        >>> lu.solve(weight, torch.ones(1, 2))
        tensor([[0.2500, 0.2500]])
    """

    def __init__(self, matrix: Callable[..., LinearOperator] = Dense) -> None:
        self._matrix = matrix
        # Two memos, since a solver holds factors as large as the matrix, and a log-determinant is one number.
        self._log_abs_det: Memo[Tensor] = Memo()
        self._solver: Memo[Solver] = Memo()

    def log_abs_det(self, weight: Tensor, *setting: Hashable) -> Tensor:
        r"""Returns :math:`\log |\det A|` in the weight's type."""
        value = self._get(self._log_abs_det, lambda matrix: matrix.log_abs_det(), weight, setting)
        if value.requires_grad:
            return full_precision_backward(value).to(weight.dtype)
        return value.to(weight.dtype, copy=True)  # so that a caller cannot edit the cached value

    def solver(self, weight: Tensor, *setting: Hashable) -> Solver:
        r"""Returns :math:`y \mapsto A^{-1} y` in the type of ``y``, for ``y`` of the shape that the operator's takes.

        Under ``torch.no_grad()`` its factors are constants: derivatives in y exist, and none in the weight.

        Raises:
            SingularError: The matrix has no inverse.
        """
        solver = self._get(self._solver, lambda matrix: matrix.inverse(), weight, setting)
        precision = _precision(weight)

        def solve(y: Tensor) -> Tensor:
            with full_precision(weight):
                return solver(y.to(precision)).to(y.dtype)

        return solve

    def solve(self, weight: Tensor, y: Tensor, *setting: Hashable) -> Tensor:
        r"""Returns :math:`A^{-1} y`, by :meth:`solver`."""
        return self.solver(weight, *setting)(y)

    def _get(
        self, memo: Memo[T], compute: Callable[[LinearOperator], T], weight: Tensor, setting: tuple[Hashable, ...]
    ) -> T:
        precision = _precision(weight)
        if is_traced(weight):
            with full_precision(weight):
                return compute(self._matrix(weight.to(precision), *setting))
        # All below is in double precision, which neither autocast nor TF32 lowers.
        if not may_read(weight):  # a memo compares contents, and has no place for what was not checked
            return compute(self._matrix(weight.detach().to(precision), *setting))

        def outside() -> T:
            # The cached value may enter a graph later, which an inference tensor cannot.
            with torch.inference_mode(False), torch.no_grad():
                return compute(self._matrix(weight.detach().to(precision), *setting))

        return memo.get([weight], outside, key=(setting, weight.dtype, weight.device))


def _precision(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32 if is_traced(weight) else torch.float64)


def row_order(lu: Tensor, pivots: Tensor) -> Tensor:
    """The row order of partial pivoting: which row of the matrix is each row of L, with shape (*, rows)."""
    permutation = torch.lu_unpack(lu.detach(), pivots, unpack_data=False)[0]
    permutation = permutation.real if permutation.is_complex() else permutation
    numbers = torch.arange(permutation.shape[-1], device=lu.device, dtype=permutation.dtype)
    return (numbers @ permutation).long()  # a product: argmax along the rows takes ten times as long


_ADVICE = (
    "It has no inverse and no finite log-determinant. Go back to parameters from before it became singular, "
    "train with a smaller learning rate, or initialise the layer with init='identity'."
)


def _name(size: int) -> str:
    return f"the {size} x {size} matrix of a linear layer"


def refuse_singular(pivots: Tensor, scale: Tensor, size: int) -> None:
    """Raises if a pivot is zero, not finite, or below the rounding error of the entries of its row and column."""
    if not may_read(pivots):
        return
    pivots, scale = pivots.abs().flatten(), scale.flatten()
    noise = max(size, 16) * torch.finfo(pivots.dtype).eps * scale
    bad = ~(pivots > noise) | ~pivots.isfinite()
    if not bad.any():
        return
    if not bool(pivots.isfinite().all()):
        raise SingularError(
            f"{_name(size)} holds NaN or infinite values, or overflows when it is "
            "factorised. Find the training step at which its parameters stopped being finite."
        )
    first = int(bad.nonzero()[0])
    raise SingularError(
        f"{_name(size)} is singular: a pivot of its LU factorisation is "
        f"{float(pivots[first]):.1e}, beside entries of size {float(scale[first]):.1e}. {_ADVICE}"
    )
