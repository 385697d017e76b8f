r"""Linear maps as operators: products with W and its transpose, its determinant and inverse, and what these cost.

A :class:`LinearOperator` is the linear part W of a layer. Its :class:`Approximation` is a matrix
:math:`M \approx W^{-1}` that is as cheap to apply as W. It preconditions solves with W, and removes most of the
variance of an estimated trace:
:math:`\operatorname{tr}(M W)` is known, and only the remainder is estimated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, ...]
Solver = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Approximation:
    r"""A matrix near :math:`W^{-1}`, for two purposes. No gradient flows through it.

    The best preconditioner is not the best control variate: it must include the directions in which W is nearly
    singular, which add variance to the trace.

    Attributes:
        solve: The preconditioner: maps a batch of outputs of W to a batch of inputs.
        control: The control variate :math:`v \mapsto M v`, whose trace is known; None if there is none.
        trace: Maps the parameters of W to :math:`\operatorname{tr}(M W)` of ``control``, one for each block.
    """

    solve: Callable[[Tensor], Tensor]
    control: Callable[[Tensor], Tensor] | None = None
    trace: Callable[[Tensor], Tensor] | None = None


class Cost(NamedTuple):
    """The approximate cost of a computation: multiplications, and bytes in double precision."""

    operations: float
    memory: float

    def exceeds(self, other: Cost) -> bool:
        """Whether it needs more multiplications or more memory."""
        return self.operations > other.operations or self.memory > other.memory


class Blocks(NamedTuple):
    """The blocks of a matrix that its determinant is computed from.

    Attributes:
        size: The rows of a block; None if the shape of the data is unknown.
        number: The number of blocks.
        banded: Whether they are banded, which costs less than dense.

    Example:
        >>> str(Blocks(4)), str(Blocks(4, 25)), str(Blocks(784, 1, True)), str(Blocks(None))
        ('4 × 4 determinant', '25 determinants of 4 × 4', 'banded 784 × 784 determinant', 'D × D determinant')
    """

    size: int | None
    number: int = 1
    banded: bool = False

    def __str__(self) -> str:
        side = self.size or "D"
        return f"{'banded ' if self.banded else ''}{side} × {side} determinant" if self.number == 1 else self.counted()

    def counted(self, steps: int = 1) -> str:
        """A noun phrase for a number of steps with such blocks."""
        number, band, side = self.number * steps, "banded " if self.banded else "", self.size or "D"
        return f"{number} {band}determinant{'s' * (number > 1)} of {side} × {side}"


class LinearOperator(ABC):
    r"""The linear part W of a layer, or of each of the equal copies that a layer consists of.

    Estimates of log-determinants, of their gradients and of singular values are computed from products alone.

    Attributes:
        weight: The parameters of W.
        shape: The event shape of the input of W.
        out_shape: The event shape of its output.
        times: The number of copies in the layer, whose log-determinant is this many times that of W.
        operations: The approximate number of multiplications in a product.
        blocks: The blocks that the exact log-determinant of the layer is computed from.
        cost: Its cost.
        matrix: W itself, with shape ``(*, D, D)``, if it is dense.
    """

    weight: Tensor
    shape: Shape
    out_shape: Shape
    times: int = 1
    operations: float
    blocks: Blocks
    cost: Cost
    matrix: Tensor | None = None

    @property
    def like(self) -> Tensor:
        """A tensor with the device and dtype of W."""
        return self.weight.detach()

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """W x for each sample of a batch, differentiable in the parameters of W."""

    @abstractmethod
    def apply_transposed(self, y: Tensor) -> Tensor:
        """Wᵀ y for each sample of a batch, differentiable in the parameters of W."""

    @abstractmethod
    def approximate(self) -> Approximation:
        """The approximate inverse at the current parameters."""

    def sum_of_squares(self) -> float | None:
        """The sum of the squares of all entries of W; None if it is unknown."""
        return None

    def log_abs_det(self) -> Tensor:
        r"""Factorises W, and returns :math:`\log |\det W|`."""
        raise NotImplementedError

    def inverse(self) -> Solver:
        r"""Factorises W, and returns the map :math:`b \mapsto W^{-1} b`, for many calls."""
        raise NotImplementedError


def dense_inverse(approximate: Tensor) -> Approximation:
    """An approximate inverse of a dense matrix that is itself dense.

    Arguments:
        approximate: M, with shape ``(*, D, D)``, constant.
    """

    def solve(v: Tensor) -> Tensor:
        return multiply_rows(approximate, v)

    return Approximation(solve, control=solve, trace=lambda matrix: (approximate.mT * matrix).sum((-2, -1)).flatten())


def multiply_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """W x for each row, with shape ``(P, D)``, or ``(P, G, D)`` for blocks."""
    return (rows.movedim(0, -2) @ matrix.mT).movedim(-2, 0)


def single_at_least(weight: Tensor) -> Tensor:
    """A weight in at least single precision, which a solve needs."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
