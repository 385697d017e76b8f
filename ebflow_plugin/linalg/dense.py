r"""Log-determinants and solves of large square matrices: dense, and banded.

Both are plain torch: they run on any device, inside or outside a graph, and can be differentiated to any order.

Outside a graph a matrix is factorised once. A singular one raises :class:`~ebflow_plugin.errors.SingularError`, a check
that synchronises with the device. Inside a graph, :meth:`~Matrix.log_abs_det` is part of a training step and must not
synchronise: a singular matrix returns ``-inf`` there, which the loss shows. A solve in a graph checks on the CPU alone,
and notices only a pivot that is exactly zero; elsewhere it returns what is not finite.

:class:`CachedLU` chooses between the two for a weight that may or may not be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ebflow_plugin.errors import SingularError
from ebflow_plugin.linalg.memo import Memo, free_to_read, is_traced, may_read
from ebflow_plugin.linalg.precision import full_precision, full_precision_backward

Solver = Callable[[Tensor], Tensor]
T = TypeVar("T")


class Matrix(Protocol):
    r"""A square matrix :math:`A` with a determinant and an inverse.

    Example:
        >>> matrix: Matrix = Dense(torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
        >>> matrix.log_abs_det().exp()
        tensor(8.)
    """

    def log_abs_det(self) -> Tensor:
        r"""Returns :math:`\log |\det A|`."""

    def inverse(self) -> Solver:
        r"""Factorises :math:`A` and returns the map :math:`b \mapsto A^{-1} b`, for many calls."""


class Dense:
    r"""A dense matrix, or a batch of them.

    Cost: :math:`O(D^3)` for the determinant and for :meth:`inverse`, :math:`O(D^2)` for each vector solved.

    Arguments:
        matrix: The entries, real or complex, with shape :math:`(*, D, D)`.
        scale: The magnitude of the terms that each entry is a sum of, with shape :math:`(D, D)`. A pivot below their
            rounding error counts as zero. By default the magnitude of the entries.

    Example:
        >>> matrix = Dense(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        >>> matrix.inverse()(torch.tensor([[4.0, 3.0]]))
        tensor([[3., 2.]])
    """

    def __init__(self, matrix: Tensor, scale: Tensor | None = None) -> None:
        self.matrix = matrix
        self.scale = scale

    def log_abs_det(self) -> Tensor:
        r"""Returns :math:`\log |\det A|`, with shape :math:`(*)`, real."""
        if is_traced(self.matrix):
            # The backward of slogdet is one solve; that of lu_factor costs three times as much (measured).
            return torch.linalg.slogdet(self.matrix)[1]
        lu, _ = self._factors()
        return lu.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)

    def inverse(self) -> Solver:
        r"""Returns the map from rows :math:`b`, with shape :math:`(*, N, D)`, to the rows :math:`A^{-1} b`."""
        if is_traced(self.matrix):
            return self._solve_traced
        lu, pivots = self._factors()
        return lambda rows: torch.linalg.lu_solve(lu, pivots, rows.to(lu.dtype).mT).mT

    def _solve_traced(self, rows: Tensor) -> Tensor:
        columns, info = torch.linalg.solve_ex(self.matrix, rows.to(self.matrix.dtype).mT)
        if free_to_read(info) and bool(info.any()):
            raise SingularError(f"{_name(self.matrix.shape[-1])} is singular: a pivot is zero. {_ADVICE}")
        return columns.mT

    def _factors(self) -> tuple[Tensor, Tensor]:
        lu, pivots, _ = torch.linalg.lu_factor_ex(self.matrix)
        scale = self.matrix.abs() if self.scale is None else self.scale
        order = _order(lu, pivots)
        rows = scale.amax(-1).expand(order.shape).gather(-1, order)
        _refuse_singular(lu.diagonal(dim1=-2, dim2=-1), torch.minimum(rows, scale.amax(-2)), self.matrix.shape[-1])
        return lu, pivots


class Band:
    r"""A banded matrix, which is never built: a function returns parts of its rows.

    The matrix is factorised with partial pivoting, one panel of columns at a time. A window of all rows that are
    nonzero in the panel moves down the diagonal, so that the work is done by matrix products and the memory of
    :meth:`log_abs_det` is that of one window, :math:`(l + w)(l + u + w)` numbers for :math:`l` lower and :math:`u`
    upper diagonals and panels of :math:`w` columns. :meth:`inverse` stores :math:`D (2 l + u + w)` numbers.

    Cost: :math:`O(D\, l\, (l + u))` for the determinant and for :meth:`inverse`, :math:`O(D (2 l + u))` for each
    vector solved. In a graph the backward pass through the elimination takes 1.5 to 2.1 times the factorisation
    (measured, 3 x 32 x 32 to 48 x 8 x 8 with 7 x 7 kernels), which a selected inversion of the band would take too.

    Arguments:
        size: The number :math:`D` of rows and of columns.
        lower: The number of diagonals below the main one.
        upper: The number of diagonals above the main one.
        rows: ``rows(start, stop, first, width)`` returns the entries of the rows ``start`` to ``stop`` in the columns
            ``first`` to ``first + width``, with shape :math:`(stop - start, width)`. All other entries of these rows
            are zero.

    Example:
        >>> full = torch.tensor([[2.0, 1.0, 0.0], [0.0, 2.0, 1.0], [0.0, 0.0, 2.0]])
        >>> matrix = Band(3, 0, 1, lambda start, stop, first, width: full[start:stop, first : first + width])
        >>> matrix.log_abs_det().exp().round()
        tensor(8.)
        >>> matrix.inverse()(torch.tensor([[3.0, 3.0, 2.0]]))
        tensor([[1., 1., 1.]])
    """

    # Wide enough for efficient matrix products, narrow enough that the panel's own factorisation does not dominate:
    # the fastest of 32, 64, 128 and 256 at D = 3,072 and 12,288 with 3x3 and 7x7 kernels.
    panel = 128

    def __init__(self, size: int, lower: int, upper: int, rows: Callable[[int, int, int, int], Tensor]) -> None:
        self.size = size
        self.lower = min(lower, size - 1)
        self.upper = min(upper, size - 1)
        self.rows = rows

    def log_abs_det(self) -> Tensor:
        r"""Returns :math:`\log |\det A|`, with shape :math:`()`."""
        # Clones, since views would keep all panels in memory.
        pivots, scale = zip(*((panel.lu.diagonal().clone(), panel.scale) for panel in self._panels()), strict=True)
        diagonal = torch.cat(pivots)
        if not is_traced(diagonal):
            _refuse_singular(diagonal, torch.cat(scale), self.size)
        return diagonal.abs().log().sum()

    def inverse(self) -> Solver:
        r"""Returns the map from rows :math:`b`, with shape :math:`(N, D)`, to the rows :math:`A^{-1} b`."""
        panels = list(self._panels())
        diagonal = torch.cat([panel.lu.diagonal() for panel in panels])
        _refuse_singular(diagonal.detach(), torch.cat([panel.scale for panel in panels]), self.size)
        return lambda rows: _substitute(panels, rows.to(diagonal.dtype).mT).mT

    def _panels(self) -> Iterator[_Panel]:
        window = self.rows(0, 0, 0, 0)
        row_scale = column_scale = window.new_zeros(0)
        below = 0  # the first row that has not entered the window
        for column in range(0, self.size, self.panel):
            width = min(self.panel, self.size - column)
            stop = min(column + width + self.lower, self.size)
            reach = min(column + width + self.lower + self.upper, self.size) - column
            entering = self.rows(below, stop, column, reach)
            carried = len(window)
            window = F.pad(window, (0, reach - window.shape[1], 0, len(entering)))
            window[carried:] = entering
            below = stop

            sizes = entering.detach().abs()
            row_scale = torch.cat([row_scale, sizes.amax(1)])
            column_scale = F.pad(column_scale, (0, reach - len(column_scale)))
            if len(sizes):
                column_scale = torch.maximum(column_scale, sizes.amax(0))

            lu, pivots, _ = torch.linalg.lu_factor_ex(window[:, :width])
            order = _order(lu, pivots)
            row_scale = row_scale[order]
            rest = window[order, width:]
            upper = torch.linalg.solve_triangular(lu[:width], rest[:width], upper=False, unitriangular=True)
            yield _Panel(lu, order, upper, torch.minimum(row_scale[:width], column_scale[:width]))
            # In place where no graph needs the old values: copies of the large windows took half of the time.
            update = torch.addmm if is_traced(rest) else Tensor.addmm_
            window = update(rest[width:], lu[width:], upper, alpha=-1)
            row_scale, column_scale = row_scale[width:], column_scale[width:]


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

    def __init__(self, matrix: Callable[..., Matrix] = Dense) -> None:
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

    def solve(self, weight: Tensor, y: Tensor, *setting: Hashable) -> Tensor:
        r"""Returns :math:`A^{-1} y` in the type of ``y``, for ``y`` with the shape that the matrix's solver takes.

        Raises:
            SingularError: The matrix has no inverse.
        """
        solver = self._get(self._solver, lambda matrix: matrix.inverse(), weight, setting)
        with full_precision(weight):
            return solver(y.to(_precision(weight))).to(y.dtype)

    def fixed_solver(self, weight: Tensor, *setting: Hashable) -> Solver:
        r"""Returns :math:`y \mapsto A^{-1} y` by the cached factors, in any mode: no gradient reaches the weight.

        Its derivative in y, the transposed solve, exists once: a second derivative through it raises.

        Raises:
            SingularError: The matrix has no inverse.
        """
        with torch.no_grad():
            solver = self._get(self._solver, lambda matrix: matrix.inverse(), weight, setting)
        precision = torch.promote_types(weight.dtype, torch.float64)

        def solve(y: Tensor) -> Tensor:
            solved: Tensor = _FixedSolve.apply(y.to(precision), solver)
            return solved.to(y.dtype)

        return solve

    def _get(self, memo: Memo[T], compute: Callable[[Matrix], T], weight: Tensor, setting: tuple[Hashable, ...]) -> T:
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


class _FixedSolve(Function):
    """A solve with constant factors. Its backward pass, the transposed solve, is the transpose of the forward one."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, solver: Solver) -> Tensor:
        ctx.solver, ctx.like = solver, y.new_empty(()).expand(y.shape)
        return solver(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            zero = torch.zeros_like(ctx.like).requires_grad_()  # the map is linear: any point will do
            (gradient,) = torch.autograd.grad(ctx.solver(zero), zero, delta)
        return gradient, None


def _precision(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32 if is_traced(weight) else torch.float64)


class _Panel(NamedTuple):
    lu: Tensor  # (rows of the window, width of the panel): L below the diagonal, U on and above it
    order: Tensor  # the rows of the window in the order in which partial pivoting takes them
    upper: Tensor  # (width of the panel, rest of the window): the rows of U, right of the panel
    scale: Tensor  # (width of the panel): the scale that a pivot is compared with


def _substitute(panels: list[_Panel], columns: Tensor) -> Tensor:
    """Solves for ``columns``, with shape (D, N), by forward and back substitution."""
    solved: list[Tensor] = []
    carried, below = columns[:0], 0
    for lu, order, _, _ in panels:
        width, entering = lu.shape[1], lu.shape[0] - len(carried)
        segment = torch.cat([carried, columns[below : below + entering]])[order]
        below += entering
        solved.append(torch.linalg.solve_triangular(lu[:width], segment[:width], upper=False, unitriangular=True))
        carried = torch.addmm(segment[width:], lu[width:], solved[-1], alpha=-1)
    tail = columns[:0]
    for place in reversed(range(len(panels))):
        lu, _, upper, _ = panels[place]
        right = solved[place] - upper @ tail[: upper.shape[1]]
        solved[place] = torch.linalg.solve_triangular(lu[: lu.shape[1]], right, upper=True)
        tail = torch.cat([solved[place], tail[: upper.shape[1]]])
    return torch.cat(solved)


def _order(lu: Tensor, pivots: Tensor) -> Tensor:
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


def _refuse_singular(pivots: Tensor, scale: Tensor, size: int) -> None:
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
