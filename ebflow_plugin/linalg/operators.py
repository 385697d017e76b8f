r"""Linear maps that are known by their products: what estimates of their log-determinants need.

An :class:`Operator` is the linear part W of a layer. Its :class:`Approximation` is a matrix :math:`M \approx W^{-1}`
that costs as little as a product: it preconditions solves with W, and takes most of the noise out of an estimated
trace, since :math:`\operatorname{tr}(M W)` is known and only what is left has to be estimated.
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
    r"""A matrix near :math:`W^{-1}`, for two purposes; constant: no gradient flows through it.

    What preconditions best is not what takes most of the noise out of a trace: directions in which W is nearly
    singular must be there in the first, and do harm in the second.

    Attributes:
        solve: Preconditions: the map of a batch of outputs of W to a batch of inputs.
        control: The map :math:`v \mapsto M v` whose trace is known; None if there is none.
        trace: Returns :math:`\operatorname{tr}(M W)` of it, differentiable in the parameters of W.
    """

    solve: Callable[[Tensor], Tensor]
    control: Callable[[Tensor], Tensor] | None = None
    trace: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class Operator:
    r"""The linear part W of a layer, or of each of the equal blocks that a layer consists of.

    Attributes:
        shape: The shape of what W is applied to.
        out_shape: The shape of what comes out.
        product: The map :math:`x \mapsto W x` of a batch, differentiable in the parameters of W.
        operations: How many multiplications a product takes, about.
        approximate: Makes the approximate inverse for the present parameters.
        like: A tensor with the device and dtype of W.
        times: How many equal blocks the layer has: its log-determinant is so many times that of W.
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
    r"""A dense matrix, or independent blocks, with :math:`c W^\top` for an approximate inverse.

    That is exact for orthogonal matrices; :math:`c = D / \|W\|_F^2` makes it the multiple of :math:`W^\top` that is
    nearest to :math:`W^{-1}`.

    Arguments:
        matrix: The matrix, with shape ``(D, D)``, or blocks that act side by side, with shape ``(G, D, D)``.
        times: On how many vectors it acts, one after the other.
    """
    shape = tuple(matrix.shape[:-1])

    def approximate() -> Approximation:
        fixed = matrix.detach()
        return dense_inverse(matrix, fixed.mT * (shape[-1] / fixed.square().sum((-2, -1), keepdim=True)))

    operations = float(matrix.numel())
    return Operator(
        shape, shape, lambda x: _multiply(matrix, x), operations, approximate, matrix.detach(), times, matrix
    )


def dense_inverse(matrix: Tensor, near: Tensor) -> Approximation:
    """The approximate inverse of a dense matrix by a constant one.

    Arguments:
        matrix: W, with shape ``(*, D, D)``.
        near: M, with the same shape.
    """

    def solve(v: Tensor) -> Tensor:
        return _multiply(near, v)

    return Approximation(solve, control=solve, trace=lambda: (near.mT * matrix).sum())


def _multiply(matrix: Tensor, rows: Tensor) -> Tensor:
    """W x for each row, with shape ``(P, D)``, or ``(P, G, D)`` for blocks."""
    return (rows.movedim(0, -2) @ matrix.mT).movedim(-2, 0)


def single_at_least(weight: Tensor) -> Tensor:
    """A weight in single precision if it is kept in less: a solve needs the digits."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
