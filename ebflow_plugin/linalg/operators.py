r"""Linear maps as operators, for estimates of their log-determinants from products alone.

An :class:`Operator` is the linear part W of a layer. Its :class:`Approximation` is a matrix :math:`M \approx W^{-1}`
that is as cheap to apply as W. It preconditions solves with W, and removes most of the variance of an estimated trace:
:math:`\operatorname{tr}(M W)` is known, and only the remainder is estimated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Approximation", "Operator", "dense_inverse", "dense_operator", "single_at_least"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Approximation:
    r"""A matrix near :math:`W^{-1}`, for two purposes. No gradient flows through it.

    The best preconditioner is not the best control variate: it must include the directions in which W is nearly
    singular, which add variance to the trace.

    Attributes:
        solve: The preconditioner: maps a batch of outputs of W to a batch of inputs.
        control: The control variate :math:`v \mapsto M v`, whose trace is known; None if there is none.
        trace: Returns :math:`\operatorname{tr}(M W)` of ``control``, differentiable in the parameters of W.
    """

    solve: Callable[[Tensor], Tensor]
    control: Callable[[Tensor], Tensor] | None = None
    trace: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class Operator:
    r"""The linear part W of a layer, or of each of the equal blocks that a layer consists of.

    Attributes:
        shape: The event shape of the input of W.
        out_shape: The event shape of its output.
        product: The map :math:`x \mapsto W x` of a batch, differentiable in the parameters of W.
        operations: The approximate number of multiplications in a product.
        approximate: Computes the approximate inverse at the current parameters.
        like: A tensor with the device and dtype of W.
        times: The number of equal blocks in the layer, whose log-determinant is this many times that of W.
        matrix: W itself, with shape ``(*, D, D)``, if it is dense.

    Example:
        >>> operator = dense_operator(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), times=3)
        >>> operator.product(torch.ones(1, 2)), operator.approximate().solve(torch.ones(1, 2))
        (tensor([[2., 2.]]), tensor([[0.5000, 0.5000]]))
    """

    shape: Shape
    out_shape: Shape
    product: Callable[[Tensor], Tensor]
    operations: float
    approximate: Callable[[], Approximation]
    like: Tensor
    times: int = 1
    matrix: Tensor | None = None


def dense_operator(matrix: Tensor, times: int = 1) -> Operator:
    r"""A dense matrix, or independent blocks, with :math:`c W^\top` as the approximate inverse.

    The factor :math:`c = D / \|W\|_F^2` makes it the multiple of :math:`W^\top` nearest to :math:`W^{-1}`. It is exact
    for orthogonal matrices and their multiples.

    Arguments:
        matrix: The matrix, with shape ``(D, D)``, or the blocks of a block-diagonal one, with shape ``(G, D, D)``.
        times: The number of vectors that it acts on.
    """
    shape = tuple(matrix.shape[:-1])

    def approximate() -> Approximation:
        fixed = matrix.detach()
        return dense_inverse(matrix, fixed.mT * (shape[-1] / fixed.square().sum((-2, -1), keepdim=True)))

    operations = float(matrix.numel())
    return Operator(
        shape, shape, lambda x: _multiply(matrix, x), operations, approximate, matrix.detach(), times, matrix
    )


def dense_inverse(matrix: Tensor, approximate: Tensor) -> Approximation:
    """An approximate inverse of a dense matrix that is itself dense.

    Arguments:
        matrix: W, with shape ``(*, D, D)``.
        approximate: M, with the same shape, constant.
    """

    def solve(v: Tensor) -> Tensor:
        return _multiply(approximate, v)

    return Approximation(solve, control=solve, trace=lambda: (approximate.mT * matrix).sum())


def _multiply(matrix: Tensor, rows: Tensor) -> Tensor:
    """W x for each row, with shape ``(P, D)``, or ``(P, G, D)`` for blocks."""
    return (rows.movedim(0, -2) @ matrix.mT).movedim(-2, 0)


def single_at_least(weight: Tensor) -> Tensor:
    """A weight in at least single precision, which a solve needs."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
