r"""Linear maps that are known by their products: what estimates of their log-determinants need.

An :class:`Operator` is the linear part W of a layer. Its :class:`Approximation` is a matrix :math:`M \approx W^{-1}`
that costs as little as a product: it preconditions solves with W, and takes most of the noise out of an estimated
trace, since :math:`\operatorname{tr}(M W)` is known and only what is left has to be estimated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

__all__ = ["Approximation", "Operator", "dense_operator"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Approximation:
    r"""A matrix :math:`M \approx W^{-1}`, constant: no gradient flows through it.

    Attributes:
        solve: The map :math:`v \mapsto M v`, from a batch of outputs of W to a batch of inputs.
        trace: Returns :math:`\operatorname{tr}(M W)`, differentiable in the parameters of W; None if it is not known.
    """

    solve: Callable[[Tensor], Tensor]
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
        times: How many equal blocks the layer has: its log-determinant is so many times that of W.

    Example:
        >>> weight = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
        >>> operator = dense_operator(weight, times=3)
        >>> operator.product(torch.ones(1, 2)), operator.approximate().solve(torch.ones(1, 2))
        (tensor([[2., 2.]]), tensor([[0.5000, 0.5000]]))
    """

    shape: Shape
    out_shape: Shape
    product: Callable[[Tensor], Tensor]
    operations: float
    approximate: Callable[[], Approximation | None]
    times: int = 1

    @property
    def size(self) -> int:
        """The number of elements of an input."""
        return prod(self.shape)


def dense_operator(weight: Tensor, times: int = 1) -> Operator:
    r"""A dense matrix, with :math:`c W^\top` for its approximate inverse: exact for orthogonal matrices.

    :math:`c = D / \|W\|_F^2` makes it the multiple of :math:`W^\top` that is nearest to :math:`W^{-1}`.

    Arguments:
        weight: The matrix, with shape ``(D, D)``.
        times: On how many vectors it acts, one after the other.
    """
    size = weight.shape[0]

    def approximate() -> Approximation:
        fixed = weight.detach()
        near = fixed * (size / fixed.square().sum())  # the transpose of M
        return Approximation(solve=lambda v: v @ near, trace=lambda: (near * weight).sum())

    return Operator((size,), (size,), lambda x: x @ weight.mT, float(size) ** 2, approximate, times)
