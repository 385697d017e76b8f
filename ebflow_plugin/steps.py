"""The steps that libraries have in common: elementwise affine maps, permutations, matrices, and our own layers.

An adapter's step says where a library keeps the numbers; what is done with them stands here, once. All of these act in
the module's own forward direction.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from ebflow_plugin.conditioners import Smoothness
from ebflow_plugin.errors import InputError, UnsupportedStepError
from ebflow_plugin.jets import Expansion
from ebflow_plugin.linalg import Dense, KeptLU
from ebflow_plugin.memo import Memo
from ebflow_plugin.plan import Linearity, LinearStep, Shape, Shapes, Step

__all__ = [
    "ElementwiseAffineStep",
    "FullStep",
    "IdentityStep",
    "IndexedPermutationStep",
    "InitialisedAffineStep",
    "IsometryStep",
    "MatrixStep",
    "OrthogonalStep",
    "PackedLUStep",
    "PermutationStep",
    "RefusedStep",
    "SqueezeStep",
    "TriangularStep",
]


class RefusedStep(Step):
    """A step that can be part of no energy, whatever its mode. It is kept in the plan so that the report shows it."""

    linearity = Linearity.REFUSED

    @property
    def smoothness(self) -> Smoothness:
        return Smoothness.UNKNOWN

    def refusal(self) -> str | None:
        return self.reason

    def encode(self, x: Any, context: Tensor | None) -> NoReturn:
        raise UnsupportedStepError(f"{self.where}: {self.reason}")

    def decode(self, z: Any, context: Tensor | None) -> NoReturn:
        raise UnsupportedStepError(f"{self.where}: {self.reason}")


class IsometryStep(LinearStep):
    """A linear step that keeps distances (a translation, a reordering, a split, a reflection): its log-det is 0."""

    cost = "0"

    def log_abs_det(self, shape: Shape) -> float:
        return 0.0


class OrthogonalStep(IsometryStep):
    """A linear isometry that keeps the origin (a reordering, a split, reflections): its transpose is its inverse."""

    @property
    def closed(self) -> bool:
        return True

    def expand(self, x: Any, context: Tensor | None) -> Expansion:
        return Expansion(
            value=self.encode(x, context)[0],
            push=lambda tangent: self.encode(tangent, context)[0],
            pull=lambda adjoint: self.decode(adjoint, context),
        )


class IdentityStep(OrthogonalStep):
    """y = x."""

    reason = "identity"

    def apply(self, x: Tensor) -> Tensor:
        return x

    def invert(self, y: Tensor) -> Tensor:
        return y


class ElementwiseAffineStep(LinearStep):
    """y = scale · x + shift, elementwise. O(D)."""

    reason = "elementwise affine"

    @abstractmethod
    def scale_shift(self, dim: int) -> tuple[Tensor | float, Tensor | float]:
        """Scale and shift, to be broadcast against a batch with ``dim`` dimensions."""

    @abstractmethod
    def log_scale(self, dim: int) -> Tensor:
        """log|scale|, to be broadcast against a batch with ``dim`` dimensions."""

    def apply(self, x: Tensor) -> Tensor:
        scale, shift = self.scale_shift(x.dim())
        return x * scale + shift

    def invert(self, y: Tensor) -> Tensor:
        scale, shift = self.scale_shift(y.dim())
        return (y - shift) / scale

    def log_abs_det(self, shape: Shape) -> Tensor:
        log_scale = self.log_scale(len(shape) + 1)
        return log_scale.sum() * (prod(shape) // log_scale.numel())

    @property
    def closed(self) -> bool:
        return True

    def expand(self, x: Tensor, context: Tensor | None) -> Expansion:
        value = self.encode(x, context)[0]  # which may initialise the scale
        scale, _ = self.scale_shift(x.dim())

        def scaled(tangent: Tensor) -> Tensor:
            return tangent / scale if self.inverted else tangent * scale

        return Expansion(value, scaled, scaled)


class InitialisedAffineStep(ElementwiseAffineStep):
    """An ActNorm: an elementwise affine map that starts from the first batch it sees."""

    reason = "affine per feature (ActNorm)"

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        self._ready: Memo[bool] = Memo(contents=False)

    @abstractmethod
    def flag(self) -> Tensor:
        """The module's own flag: has it been initialised?"""

    @abstractmethod
    def start(self, x: Tensor) -> None:
        """Initialises the module from a batch that reaches it in the density direction."""

    def samples(self, x: Tensor) -> Tensor:
        """What the module takes its statistics from: ``(samples, features)``."""
        return x.movedim(1, -1).flatten(0, -2)

    @property
    def initialised(self) -> bool:
        """Reads the flag. Waits for the device at most once for each change of it."""
        flag = self.flag()
        return flag.is_meta or self._ready.get([flag], lambda: bool(flag > 0))

    def initialize(self, x: Any) -> None:
        if self.initialised:
            return
        samples = self.samples(x.detach())
        if samples.shape[0] < 2:
            raise InputError(
                f"{self.where} cannot be initialised from a batch of {x.shape[0]}: it needs a standard deviation. "
                "Call model.initialize(x) with a larger batch first."
            )
        spread = samples.std(0)
        bad = (~((spread > 0) & torch.isfinite(spread))).nonzero().flatten().tolist()
        if bad:
            raise InputError(
                f"{self.where} cannot be initialised from this batch: features {bad[:5]} are constant or not finite. "
                "Add noise (dequantize), or call model.initialize(x) with a larger batch first."
            )
        self.start(x)
        self._ready.clear()


class PermutationStep(OrthogonalStep):
    """y is x with the entries of one dimension in another order. O(D), log-det 0."""

    reason = "permutation"

    @abstractmethod
    def order(self) -> tuple[Tensor, int]:
        """The index of each output entry's input, and the dimension that it runs over."""

    def apply(self, x: Tensor) -> Tensor:
        order, dim = self.order()
        return self._select(x, order, dim)

    def invert(self, y: Tensor) -> Tensor:
        order, dim = self.order()
        return self._select(y, torch.argsort(order), dim)

    def _select(self, x: Tensor, order: Tensor, dim: int) -> Tensor:
        if x.dim() <= dim or x.shape[dim] != len(order):
            raise InputError(f"{self.where} permutes {len(order)} entries of dimension {dim}, got {tuple(x.shape)}")
        return torch.index_select(x, dim, order)


class IndexedPermutationStep(PermutationStep):
    """A permutation of nflows, and its twin in normflows, which keep the order and the dimension."""

    def order(self) -> tuple[Tensor, int]:
        return self.module._permutation, self.module._dim


class SqueezeStep(OrthogonalStep):
    """Trades a square of ``factor²`` pixels for ``factor²`` times the channels. Log-det 0."""

    reason = "reordering"
    factor = 2

    def apply(self, x: Tensor) -> Tensor:
        return F.pixel_unshuffle(x, self.factor)

    def invert(self, y: Tensor) -> Tensor:
        return F.pixel_shuffle(y, self.factor)

    def forward_shapes(self, shapes: Shapes) -> Shapes:
        ((channels, height, width),) = shapes
        return ((channels * self.factor**2, height // self.factor, width // self.factor),)

    def inverse_shapes(self, shapes: Shapes) -> Shapes:
        ((channels, height, width),) = shapes
        return ((channels // self.factor**2, height * self.factor, width * self.factor),)


class MatrixStep(LinearStep):
    """y = W x + b with a dense W that has no structure: O(D²) to apply, O(D³) for the log-det and the inverse.

    For a batch of images, W acts on the channels of each pixel (a 1 × 1 convolution).
    """

    reason = "full matrix"
    transposed: bool = False  # whether the library keeps the transpose of W

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        self._lu = KeptLU(lambda kept: Dense(kept.mT if self.transposed else kept))

    @abstractmethod
    def kept(self) -> Tensor:
        """W, or its transpose, as the library keeps it, with shape ``(D, D)``."""

    def bias(self) -> Tensor | None:
        """b, with shape ``(D,)``."""
        return None

    def determinant(self, shapes: Shapes | None) -> int | None:
        return self.kept().shape[0]

    def apply(self, x: Tensor) -> Tensor:
        return multiply(x, self.kept().mT if self.transposed else self.kept(), self.bias())

    def invert(self, y: Tensor) -> Tensor:
        return pixelwise(lambda rows: self._lu.solve(self.kept(), rows), subtract(y, self.bias()))

    def log_abs_det(self, shape: Shape) -> Tensor:
        return self._lu.log_abs_det(self.kept()) * prod(shape[1:])

    @property
    def closed(self) -> bool:
        return not self.inverted

    def expand(self, x: Tensor, context: Tensor | None) -> Expansion:
        weight = self.kept().mT if self.transposed else self.kept()
        return Expansion(
            value=self.apply(x),
            push=lambda tangent: multiply(tangent, weight, None),
            pull=lambda adjoint: multiply(adjoint, weight.mT, None),
        )


class TriangularStep(LinearStep):
    """y = P L U x[order] + b: O(D²) to apply and to invert, O(D) for the log-det."""

    reason = "matrix held as LU factors"

    @abstractmethod
    def factors(self) -> tuple[Tensor, Tensor]:
        """L (unit lower) and U (upper), each with shape ``(D, D)``."""

    @abstractmethod
    def log_diagonal(self) -> Tensor:
        """Log of the absolute diagonal of U, with shape ``(D,)``."""

    def bias(self) -> Tensor | None:
        """b, with shape ``(D,)``."""
        return None

    def order(self) -> Tensor | None:
        """How x is permuted before the matrix."""
        return None

    def row_order(self) -> Tensor | None:
        """How the rows of L U x are permuted."""
        return None

    def apply(self, x: Tensor) -> Tensor:
        return self._affine(x)[0]

    @property
    def closed(self) -> bool:
        return not self.inverted

    def expand(self, x: Tensor, context: Tensor | None) -> Expansion:
        return Expansion(*self._affine(x))

    def _affine(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """The map of x, its linear part, and the transpose of that, all with the same factors."""
        lower, upper = self.factors()
        order, rows = self.order(), self.row_order()
        if x.dim() != 2:
            weight = lower @ upper  # O(C³), next to O(B·H·W·C²) for the pixels
            weight = weight if order is None else weight[:, torch.argsort(order)]
            weight = weight if rows is None else weight[rows]
            return (
                multiply(x, weight, self.bias()),
                lambda tangent: multiply(tangent, weight, None),
                lambda adjoint: multiply(adjoint, weight.mT, None),
            )

        def push(tangent: Tensor) -> Tensor:  # two products with O(B·D²), where that of the factors would take O(D³)
            y = F.linear(F.linear(tangent if order is None else tangent[:, order], upper), lower)
            return y if rows is None else y[:, rows]

        def pull(adjoint: Tensor) -> Tensor:
            adjoint = adjoint if rows is None else adjoint[:, torch.argsort(rows)]
            x = adjoint @ lower @ upper
            return x if order is None else x[:, torch.argsort(order)]

        return add(push(x), self.bias()), push, pull

    def invert(self, y: Tensor) -> Tensor:
        return pixelwise(self._solve, subtract(y, self.bias()))

    def _solve(self, rows: Tensor) -> Tensor:
        lower, upper = self.factors()
        order, row_order = self.order(), self.row_order()
        if row_order is not None:
            rows = rows[:, torch.argsort(row_order)]
        # Row vectors: y = x Uᵀ Lᵀ, so that the solves run from the right.
        half = torch.linalg.solve_triangular(lower.mT, rows, upper=True, left=False, unitriangular=True)
        x = torch.linalg.solve_triangular(upper.mT, half, upper=False, left=False)
        return x if order is None else x[:, torch.argsort(order)]

    def log_abs_det(self, shape: Shape) -> Tensor:
        return self.log_diagonal().sum() * prod(shape[1:])


class PackedLUStep(TriangularStep):
    """An LULinear of nflows, and its twin in normflows, which unpack their factors from vectors of entries."""

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        self._places = _packed_places(module.features, module.lower_entries.device)

    def factors(self) -> tuple[Tensor, Tensor]:
        """The libraries copy the places of all entries from numpy on every call; here they are kept."""
        module, size, entries = self.module, self.module.features, self.module.lower_entries
        if self._places[0].device != entries.device:  # the model was moved
            self._places = _packed_places(size, entries.device)
        packed = torch.cat([entries, entries.new_ones(size)]), torch.cat([module.upper_entries, module.upper_diag])
        flat = [entries.new_zeros(size * size).scatter(0, *pair) for pair in zip(self._places, packed, strict=True)]
        return flat[0].view(size, size), flat[1].view(size, size)

    def log_diagonal(self) -> Tensor:
        return torch.log(self.module.upper_diag)

    def bias(self) -> Tensor:
        bias: Tensor = self.module.bias
        return bias


class FullStep(LinearStep):
    """A FullLinear or FullConv2d of ours, in its density direction."""

    reason = "full, unconstrained"
    cost = "D × D determinant"

    def determinant(self, shapes: Shapes | None) -> int | None:
        size: int | None = getattr(self.module, "features", None if shapes is None else prod(shapes[0]))
        return size

    def apply(self, x: Tensor) -> Tensor:
        result: Tensor = self.module.transform(x)
        return result

    def invert(self, y: Tensor) -> Tensor:
        result: Tensor = self.module.invert(y)
        return result

    def log_abs_det(self, shape: Shape) -> Tensor:
        result: Tensor = self.module.log_det(shape)
        return result

    def forward_shapes(self, shapes: Shapes) -> Shapes:
        return (self.module.output_shape(shapes[0]),)

    def inverse_shapes(self, shapes: Shapes) -> Shapes:
        return (self.module.input_shape(shapes[0]),)

    @property
    def closed(self) -> bool:
        return not self.inverted

    def expand(self, x: Tensor, context: Tensor | None) -> Expansion:
        value = self.module.transform(x)
        return Expansion(value, self.module.multiply, lambda adjoint: self.module.multiply_transposed(adjoint, x.shape))


def _packed_places(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the packed entries of L and of U stand in a flat matrix, each with the diagonal behind them."""
    rows, columns = torch.tril_indices(size, size, -1, device=device)
    up_rows, up_columns = torch.triu_indices(size, size, 1, device=device)
    diagonal = torch.arange(size, device=device) * (size + 1)
    return torch.cat([rows * size + columns, diagonal]), torch.cat([up_rows * size + up_columns, diagonal])


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W x + b for a batch of vectors, or for the channels of a batch of images."""
    if x.dim() == 4:
        return F.conv2d(x, weight[:, :, None, None], bias)
    return F.linear(x, weight, bias)


def add(x: Tensor, bias: Tensor | None) -> Tensor:
    """Adds b over the features or channels."""
    return x if bias is None else x + bias.reshape(-1, *[1] * (x.dim() - 2))


def subtract(x: Tensor, bias: Tensor | None) -> Tensor:
    """Subtracts b over the features or channels."""
    return x if bias is None else x - bias.reshape(-1, *[1] * (x.dim() - 2))


def pixelwise(function: Any, x: Tensor) -> Tensor:
    """Applies a function of row vectors ``(N, C)`` to a batch of vectors, or to each pixel of a batch of images."""
    if x.dim() == 2:
        result: Tensor = function(x)
        return result
    moved = x.movedim(1, -1)
    result = function(moved.reshape(-1, x.shape[1])).reshape(moved.shape).movedim(-1, 1)
    return result
