"""Linear steps that libraries have in common: elementwise affine maps, permutations, squeezes; and refused steps.

An adapter's step says where a library stores its parameters; the arithmetic is here. All of these act in the module's
own forward direction. Matrices have a module of their own, :mod:`ebflow_plugin.plan.matrices`.
"""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from ebflow_plugin.errors import InputError, UnsupportedStepError
from ebflow_plugin.linalg.memo import Memo
from ebflow_plugin.plan.smooth_modules import Smoothness
from ebflow_plugin.plan.step import Linearity, Linearization, LinearStep, Shape, Shapes, Step
from ebflow_plugin.plan.values import parts_of


class RefusedStep(Step):
    """A step that cannot be part of an energy in any mode. It stays in the plan so that the report shows it."""

    linearity = Linearity.REFUSED

    smoothness = Smoothness.UNKNOWN

    def refusal(self) -> str | None:
        return self.reason

    def encode(self, x: Any, context: Tensor | None) -> NoReturn:
        raise UnsupportedStepError(f"{self.where}: {self.reason}")

    def decode(self, z: Any, context: Tensor | None) -> NoReturn:
        raise UnsupportedStepError(f"{self.where}: {self.reason}")


class IsometryStep(LinearStep):
    """A linear step that preserves distances (a translation, a reordering, a split, a reflection): log-det 0."""

    cost = "0"

    def log_abs_det(self, shape: Shape) -> float:
        return 0.0


class OrthogonalStep(IsometryStep):
    """A linear isometry that fixes the origin (a reordering, a split, reflections): its transpose is its inverse.

    Attributes:
        reshapes: Whether the event shapes of its output differ from those of its input.
    """

    closed = True
    reshapes: ClassVar[bool] = False

    def own_shapes(self, shapes: Shapes, inverse: bool) -> Shapes:
        """The event shapes of what it makes of tensors without values."""
        if not self.reshapes:
            return shapes
        given = tuple(torch.empty(1, *shape, device="meta") for shape in shapes)
        result = (self.invert if inverse else self.apply)(given if len(given) > 1 else given[0])
        return tuple(tuple(part.shape[1:]) for part in parts_of(result))

    def linearize(self, x: Any, context: Tensor | None) -> Linearization:
        return Linearization(
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


class TranslationStep(IsometryStep):
    """y = x + b, where b may depend on the context."""

    reason = "translation"

    @abstractmethod
    def shift(self, x: Tensor, context: Tensor | None) -> Tensor:
        """b, to be broadcast against the batch x."""

    def apply(self, x: Tensor) -> Tensor:
        return x + self.shift(x, None)

    def invert(self, y: Tensor) -> Tensor:
        return y - self.shift(y, None)

    def encode(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, None]:
        return torch.sub(x, self.shift(x, context), alpha=1 if self.inverted else -1), None

    def decode(self, z: Tensor, context: Tensor | None) -> Tensor:
        return torch.sub(z, self.shift(z, context), alpha=-1 if self.inverted else 1)

    def linearize(self, x: Tensor, context: Tensor | None) -> Linearization:
        return Linearization(self.encode(x, context)[0], lambda tangent: tangent, lambda adjoint: adjoint)


class ElementwiseAffineStep(LinearStep):
    """y = scale · x + shift, elementwise. O(D)."""

    reason = "elementwise affine"

    @abstractmethod
    def scale_shift(self, x: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Scale and shift, to be broadcast against a batch x (or a batch with its number of dimensions)."""

    @abstractmethod
    def log_scale(self) -> Tensor | float:
        """log|scale|: one number for each entry that has a scale of its own."""

    def apply(self, x: Tensor) -> Tensor:
        scale, shift = self._fitting(x)
        return x * scale + shift

    def invert(self, y: Tensor) -> Tensor:
        scale, shift = self._fitting(y)
        return (y - shift) / scale

    def _fitting(self, x: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Scale and shift. Raises if broadcasting them would change the shape of x."""
        both = self.scale_shift(x)
        for part in both:
            if isinstance(part, Tensor) and not _broadcasts_to(tuple(part.shape), tuple(x.shape)):
                raise InputError(f"{self.where} has parameters of shape {tuple(part.shape)}, got x {tuple(x.shape)}")
        return both

    def log_abs_det(self, shape: Shape) -> Tensor | float:
        log_scale = self.log_scale()
        if not isinstance(log_scale, Tensor):
            return prod(shape) * log_scale
        return log_scale.sum() * (prod(shape) // log_scale.numel())

    def linearize(self, x: Tensor, context: Tensor | None) -> Linearization:
        value = self.encode(x, context)[0]  # first, since it may initialise the scale
        scale, _ = self.scale_shift(x)

        def scaled(tangent: Tensor) -> Tensor:
            return tangent / scale if self.inverted else tangent * scale

        return Linearization(value, scaled, scaled)


def _broadcasts_to(small: Shape, large: Shape) -> bool:
    """Whether broadcasting the first shape against the second yields the second."""
    after = large[len(large) - len(small) :]
    return len(small) <= len(large) and all(a in (1, b) for a, b in zip(small, after, strict=True))


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
        """Initialises the module from a batch of its inputs in the density direction."""

    def samples(self, x: Tensor) -> Tensor:
        """The samples of the module's statistics: ``(samples, features)``."""
        return x.movedim(1, -1).flatten(0, -2)

    @property
    def initialised(self) -> bool:
        """Whether it has been initialised. Synchronises with the device at most once for each change of it."""
        flag = self.flag()
        return flag.is_meta or self._ready.get([flag], lambda: bool(flag > 0))

    def initialize(self, x: Any) -> None:
        """Initialises the module from a batch without added noise, unless it has been."""
        self._ready.clear()  # a reset through .data does not raise the version counter: read the flag again
        self.initialize_if_due(x)

    def initialize_if_due(self, x: Any) -> None:
        """:meth:`initialize` with the cached flag, for the forward pass, which should not synchronise."""
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
    """A permutation of the entries of one dimension. O(D), log-det 0."""

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


class SqueezeStep(OrthogonalStep):
    """Trades a square of ``factor²`` pixels for ``factor²`` times the channels. Log-det 0."""

    reason = "reordering"
    reshapes = True
    factor = 2

    def apply(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[2] % self.factor or x.shape[3] % self.factor:
            raise InputError(
                f"{self.where} takes images whose sides are multiples of {self.factor}, got {tuple(x.shape[1:])}"
            )
        return F.pixel_unshuffle(x, self.factor)

    def invert(self, y: Tensor) -> Tensor:
        if y.dim() != 4 or y.shape[1] % self.factor**2:
            raise InputError(
                f"{self.where} returns images with a multiple of {self.factor**2} channels, not {tuple(y.shape[1:])}"
            )
        return F.pixel_shuffle(y, self.factor)
