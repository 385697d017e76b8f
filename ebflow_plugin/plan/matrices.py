"""Linear steps with a matrix: dense, triangular and LU matrices, and our own layers.

Factorisations are cached until a parameter changes. A matrix acts on the last dimension of an event, or on the channels
of images (a 1 × 1 convolution), as the class of the layer decides.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.dense import CachedLU, Dense
from ebflow_plugin.linalg.operators import LinearOperator, single_at_least
from ebflow_plugin.plan.step import Linearization, LinearStep, Shape, Shapes

Products = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


class Factor(NamedTuple):
    """A factor of a matrix: how it, its transpose and its inverse act on rows, with shape ``(*, D)``.

    Example:
        >>> factor = Factor.diagonal(torch.tensor([2.0, 4.0]))
        >>> factor.apply(torch.ones(1, 2)), factor.solve(torch.ones(1, 2))
        (tensor([[2., 4.]]), tensor([[0.5000, 0.2500]]))
    """

    apply: Callable[[Tensor], Tensor]
    transposed: Callable[[Tensor], Tensor]
    solve: Callable[[Tensor], Tensor]

    @classmethod
    def diagonal(cls, entries: Tensor) -> Factor:
        """A diagonal matrix."""
        return cls(lambda x: x * entries, lambda y: y * entries, lambda y: y / entries)

    @classmethod
    def triangular(cls, matrix: Tensor, upper: bool) -> Factor:
        """A triangular matrix."""

        def solve(y: Tensor) -> Tensor:  # of row vectors y = x Wᵀ, so from the right
            return torch.linalg.solve_triangular(matrix.mT, y, upper=not upper, left=False)

        return cls(lambda x: F.linear(x, matrix), lambda y: y @ matrix, solve)

    @classmethod
    def permutation(cls, order: Tensor) -> Factor:
        """x[..., order]."""

        def back(y: Tensor) -> Tensor:
            return y[..., torch.argsort(order)]

        return cls(lambda x: x[..., order], back, back)

    @classmethod
    def reflections(cls, vectors: Tensor) -> Factor:
        """Householder reflections, x - 2 (x·q) q / (q·q) for each q of ``(K, D)`` vectors, one after the other."""

        def reflect(x: Tensor, vectors: Tensor) -> Tensor:
            scaled = vectors * (2.0 / (vectors**2).sum(-1, keepdim=True))
            for vector, scaled_vector in zip(vectors.unbind(), scaled.unbind(), strict=True):
                x = x - (x @ vector)[..., None] * scaled_vector
            return x

        return cls(lambda x: reflect(x, vectors), *[lambda y: reflect(y, vectors.flip(0))] * 2)


class MixingStep(LinearStep):
    """y = W x + b, with a square W on the last dimension of an event, or on the channels of each pixel of an image.

    Subclasses hold W as factors, O(D²) to apply and to invert, O(D) for the log-det; or they are a :class:`MatrixStep`.

    Attributes:
        images: Whether it acts on the channels of images, with event shape ``(C, H, W)``.
    """

    images: bool = False

    @property
    def closed(self) -> bool:
        return not self.inverted

    def factors(self) -> Sequence[Factor]:
        """The factors of W, the one that acts on x first."""
        raise NotImplementedError

    def log_diagonal(self) -> Tensor:
        """The logs whose sum is log|det W|, with shape ``(D,)``."""
        raise NotImplementedError

    @property
    def features(self) -> int:
        """The size of W."""
        return self.log_diagonal().shape[0]

    def products(self) -> Products:
        """The maps x -> W x and y -> Wᵀ y, by parameters that are read once."""
        factors = self.factors()

        def push(x: Tensor) -> Tensor:  # a product for each factor, O(B·D²); multiplying them would take O(D³)
            return reduce(lambda value, factor: factor.apply(value), factors, x)

        def pull(y: Tensor) -> Tensor:
            return reduce(lambda value, factor: factor.transposed(value), reversed(factors), y)

        if not self.images:
            return push, pull
        unit = torch.diag_embed(torch.ones_like(self.log_diagonal()))
        return self.multiplications(push(unit).mT)  # O(C³), next to O(B·H·W·C²) for the pixels

    def solve(self, rows: Tensor) -> Tensor:
        """W⁻¹ of each row, ``(N, D)``."""
        return reduce(lambda value, factor: factor.solve(value), reversed(self.factors()), rows)

    def log_abs_det(self, shape: Shape) -> Tensor | float:
        return self.log_diagonal().sum() * self.copies(shape)

    def bias(self) -> Tensor | None:
        """b, with shape ``(D,)``: by default the ``bias`` of the module, if that is a tensor."""
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, Tensor) else None

    def apply(self, x: Tensor) -> Tensor:
        return self.shifted(self.products()[0](self.checked(x)))

    def invert(self, y: Tensor) -> Tensor:
        return self.on_rows(self.solve, self.checked(y))

    def linearize(self, x: Tensor, context: Tensor | None) -> Linearization:
        push, pull = self.products()
        return Linearization(self.shifted(push(self.checked(x))), push, pull)

    def checked(self, x: Tensor) -> Tensor:
        """Returns x.

        Raises:
            InputError: If the matrix does not fit x.
        """
        if self.images or x.dim() != 2 or x.shape[1] != self.features:
            self.copies(tuple(x.shape[1:]))
        return x

    def copies(self, shape: Shape) -> int:
        """The number of rows of features in an event of this shape: the log-det is this many times the matrix's own.

        Raises:
            InputError: If the matrix does not fit such events.
        """
        if self.images and (len(shape) != 3 or shape[0] != self.features):
            raise InputError(
                f"{self.where} acts on images with {self.features} channels, event shape ({self.features}, H, W), got "
                f"{shape}"
            )
        if not shape or (not self.images and shape[-1] != self.features):
            raise InputError(f"{self.where} acts on {self.features} features in the last dimension, got events {shape}")
        return prod(shape) // self.features

    def library_flaw(self, shape: Shape) -> str | None:
        if self.images or self.copies(shape) == 1:
            return None
        return f"counts one of the {self.copies(shape)} rows of {self.features} features in its log-det"

    def shifted(self, y: Tensor, sign: int = 1) -> Tensor:
        """The value with the bias added: y + b, or y - b."""
        bias = self.bias()
        if bias is None:
            return y
        return torch.add(y, bias[:, None, None] if self.images else bias, alpha=sign)

    def on_rows(self, solve: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
        """Applies a function of rows ``(N, D)`` to each row of features, or to each pixel, of y - b."""
        moved = self.shifted(y, -1)
        moved = moved.movedim(1, -1) if self.images else moved
        result = solve(moved.reshape(-1, self.features)).reshape(moved.shape)
        return result.movedim(-1, 1) if self.images else result

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """W x + b, for each row of features or each pixel."""
        if self.images:
            return F.conv2d(x, weight[:, :, None, None], bias)
        return F.linear(x, weight, bias)

    def multiplications(self, weight: Tensor) -> Products:
        """:meth:`products` with a dense W."""

        def pull(y: Tensor) -> Tensor:  # a product with W itself, so that the gradient of W has the layout of W
            return self.multiply(y, weight.mT) if self.images else y @ weight

        return lambda x: self.multiply(x, weight), pull


class MatrixStep(MixingStep):
    """y = W x + b with a dense W without structure: O(D²) to apply, O(D³) for the log-det and the inverse."""

    reason = "full matrix"
    transposed: bool = False  # whether weight() is the transpose of W

    @cached_property
    def lu(self) -> CachedLU:
        """The factors, cached until the weight changes."""
        return CachedLU(lambda weight: Dense(weight.mT if self.transposed else weight))

    @abstractmethod
    def weight(self) -> Tensor:
        """W, or its transpose, as the library stores it, with shape ``(D, D)``."""

    @property
    def features(self) -> int:
        return self.weight().shape[0]

    def dense(self) -> Tensor:
        """W."""
        return self.weight().mT if self.transposed else self.weight()

    def products(self) -> Products:
        return self.multiplications(self.dense())

    def apply(self, x: Tensor) -> Tensor:  # with the bias in the same kernel
        return self.multiply(self.checked(x), self.dense(), self.bias())

    def solve(self, rows: Tensor) -> Tensor:
        return self.lu.solve(self.weight(), rows)

    def encode(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, None]:
        if not self.inverted:
            return self.apply(x), None
        return self.on_rows(lambda rows: solved(self.dense(), rows), self.checked(x)), None

    def log_abs_det(self, shape: Shape) -> Tensor:
        times, each = self.copies(shape), self.lu.log_abs_det(self.weight())
        return each if times == 1 else each * times

    def operator(self, shapes: Shapes | None) -> LinearOperator:
        return Dense(single_at_least(self.dense()), 1 if shapes is None else self.copies(self.own_input(shapes)))

    def linearize(self, x: Tensor, context: Tensor | None) -> Linearization:
        return Linearization(self.apply(x), *self.products())


class TriangularStep(MixingStep):
    """y = P L U x[order] + b."""

    reason = "matrix held as LU factors"

    @abstractmethod
    def lower_upper(self) -> tuple[Tensor, Tensor]:
        """L (lower) and U (upper), each with shape ``(D, D)``."""

    def order(self) -> Tensor | None:
        """The permutation of x before the matrix."""
        return None

    def row_order(self) -> Tensor | None:
        """The permutation of the rows of L U x."""
        return None

    def factors(self) -> Sequence[Factor]:
        (lower, upper), order, rows = self.lower_upper(), self.order(), self.row_order()
        before = [] if order is None else [Factor.permutation(order)]
        after = [] if rows is None else [Factor.permutation(rows)]
        return [*before, Factor.triangular(upper, True), Factor.triangular(lower, False), *after]


class FullLinearStep(MatrixStep):
    """A FullLinear of ours. It shares the layer's own cache of factorisations."""

    reason = "full, unconstrained"

    @cached_property
    def lu(self) -> CachedLU:
        return self.module.lu

    def weight(self) -> Tensor:
        return self.module.weight

    dense = weight

    @property
    def features(self) -> int:
        return self.module.features

    def library_flaw(self, shape: Shape) -> str | None:
        return None


class FullConvStep(LinearStep):
    """A FullConv2d of ours."""

    reason = "full, unconstrained"

    @property
    def closed(self) -> bool:
        return not self.inverted

    def apply(self, x: Tensor) -> Tensor:
        return self.module.transform(x)

    def invert(self, y: Tensor) -> Tensor:
        return self.module.invert(y)

    def log_abs_det(self, shape: Shape) -> Tensor:
        return self.module.log_det(shape)

    def operator(self, shapes: Shapes | None) -> LinearOperator | None:
        return None if shapes is None else self.module.operator(self.own_input(shapes))

    def own_shapes(self, shapes: Shapes, inverse: bool) -> Shapes:
        return ((self.module.input_shape if inverse else self.module.output_shape)(shapes[0]),)

    def linearize(self, x: Tensor, context: Tensor | None) -> Linearization:
        layer = self.module
        return Linearization(
            layer.transform(x), layer.multiply, lambda adjoint: layer.multiply_transposed(adjoint, x.shape)
        )


FullStep = FullLinearStep | FullConvStep


def solved(weight: Tensor, rows: Tensor) -> Tensor:
    """W⁻¹ rows, in the density direction, without a check of the pivots, which would synchronise. O(D³) per call.

    A singular W yields inf or NaN, which the loss shows; log Z names the layer.

    Example:
        >>> solved(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.tensor([[2.0, 4.0]]))
        tensor([[1., 1.]])
    """
    return torch.linalg.solve_ex(weight, rows.to(weight.dtype).mT)[0].mT
