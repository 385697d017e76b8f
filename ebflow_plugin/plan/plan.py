r"""The plan of a flow: its steps from data to noise, and its base density.

A flow's density is :math:`\log p(x) = \log p_u(g(x)) + \sum_i \log|\det J_i|`. A step is *linear* if it is affine in x:
its Jacobian, and so its log-determinant, does not depend on x. What does not depend on x can leave the training
objective (Eqs. 8 and 9 of the paper):

.. math::
    E(x)   &= -\log p_u(g(x)) - \sum_{i\ \text{nonlinear}} \log|\det J_i(x)| \\
    \log Z &= -\sum_{i\ \text{linear}} \log|\det J_i| \\
    \log p(x) &= -E(x) - \log Z

A :class:`Plan` is that split. An adapter builds it once, by walking the user's model; each :class:`Step` then refers to
one module of that model and acts through the module's own parameters. Nothing is copied, nothing is edited.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ebflow_plugin.errors import (
    EBFlowError,
    InputError,
    NoInverseError,
    SingularError,
    UnsupportedStepError,
    blame,
    refuse_precision,
)
from ebflow_plugin.linalg.dense import is_readable
from ebflow_plugin.linalg.operators import Operator
from ebflow_plugin.plan.smoothness import Smoothness, first_reason, smoothness_of, unsteady_parts
from ebflow_plugin.plan.values import Value, per_sample, pop

__all__ = [
    "Base",
    "Blocks",
    "LinearStep",
    "Linearity",
    "NonlinearStep",
    "Part",
    "Plan",
    "Shape",
    "Step",
    "Value",
    "own_tensors",
    "per_sample",
    "pop",
]

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]


class Linearity(str, Enum):
    """What a step is to the energy."""

    LINEAR = "linear"  # affine in x: its log-det is a constant and belongs to log Z
    NONLINEAR = "nonlinear"  # its log-det depends on x (or on the context) and belongs to the energy
    REFUSED = "refused"  # has no place in an energy

    __str__ = str.__str__


class Part:
    """A piece of the user's flow: a step, or the base density.

    Attributes:
        module: The user's own object.
        path: Where it stands in the user's model.
    """

    def __init__(self, module: Any, path: str) -> None:
        self.module = module
        self.path = path

    @property
    def class_name(self) -> str:
        """The class of the module, as people call it."""
        return type(self.module).__name__

    @property
    def where(self) -> str:
        """Path, class and origin, as error messages show them."""
        return f"{self.path}  {self.class_name} ({type(self.module).__module__})"

    @property
    def smoothness(self) -> Smoothness:
        """What the part does to the score."""
        return Smoothness.SMOOTH

    @property
    def closed(self) -> bool:
        """Whether its first and second derivatives are known in closed form, by :meth:`expand`."""
        return False

    def expand(self, x: Any, context: Tensor | None) -> Any:
        """How derivatives pass the part: an ``Expansion`` or, of a base, an ``End`` of :mod:`ebflow_plugin.plan.derivatives`."""
        raise NotImplementedError(f"{self.where} has no closed form")

    def refusal(self) -> str | None:
        """Says why the part cannot be in an energy in its present mode, or gives None.

        Asked at each call, since ``train()`` and ``eval()`` decide for batch norm and dropout: look at flags only.
        """
        return None


class Step(Part, ABC):
    """One transform of a flow, in the density direction.

    A class of steps says how one class of modules acts in *its own* forward direction; ``inverted`` says that data
    passes through the module's inverse on its way to noise. Steps work on a stack of tensors: nearly all take the
    top tensor and leave one, a split leaves two, a merge takes two (``takes`` and ``gives``).

    Attributes:
        inverted: Whether the density direction is the module's inverse.
        reason: Why the step is linear, nonlinear or refused, for people.
        cost: What its log-det costs, for people.
        known: Whether its class is registered. An unknown class keeps its own log-det: exact, only slower.
    """

    linearity: ClassVar[Linearity]
    takes: int = 1
    gives: int = 1
    reason: str = ""
    cost: str = "-"
    known: bool = True

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path)
        self.inverted = inverted
        if inverted:
            self.takes, self.gives = self.gives, self.takes

    @property
    def sensitive(self) -> bool:
        """Whether the derivative explodes at an edge of the domain (logit, log), which MaP looks for."""
        return False

    def initialize(self, x: Value) -> None:
        """Runs the module's data-dependent initialisation on a clean batch, if it has one and it is still due."""

    def library_flaw(self, shape: Shape) -> str | None:
        """What is wrong with the library's own log-det for events of this shape, as the end of a sentence; or None."""
        return None

    def forward_shapes(self, shapes: Shapes) -> Shapes:
        """The event shapes that the module's own forward makes of these."""
        return shapes

    def inverse_shapes(self, shapes: Shapes) -> Shapes:
        """The event shapes that the module's own inverse makes of these."""
        return shapes

    def encoded_shapes(self, shapes: Shapes) -> Shapes:
        """The event shapes that :meth:`encode` makes of these."""
        return self.inverse_shapes(shapes) if self.inverted else self.forward_shapes(shapes)

    def decoded_shapes(self, shapes: Shapes) -> Shapes:
        """The event shapes that :meth:`decode` makes of these."""
        return self.forward_shapes(shapes) if self.inverted else self.inverse_shapes(shapes)

    @abstractmethod
    def encode(self, x: Any, context: Tensor | None) -> tuple[Any, Tensor | None]:
        """Moves towards noise. Gives the value and, for nonlinear steps, the log-det with shape ``(B,)``."""

    @abstractmethod
    def decode(self, z: Any, context: Tensor | None) -> Any:
        """Moves towards data: the inverse of :meth:`encode`."""


class Blocks(NamedTuple):
    """The blocks of a matrix that its determinant is computed from.

    Attributes:
        size: Rows of a block; None where no shape is known.
        number: How many blocks there are.
        banded: Whether they are bands, which cost less than dense ones.

    Example:
        >>> str(Blocks(4)), str(Blocks(4, 25)), str(Blocks(784, 1, True)), str(Blocks(None))
        ('4 × 4 determinant', '25 determinants of 4 × 4', 'banded 784 × 784 determinant', 'D × D determinant')
    """

    size: int | None
    number: int = 1
    banded: bool = False

    def __str__(self) -> str:
        side = "D" if self.size is None else str(self.size)
        band = "banded " if self.banded else ""
        if self.number == 1:
            return f"{band}{side} × {side} determinant"
        return self.counted()

    def counted(self, steps: int = 1) -> str:
        """As part of a sentence, for a number of steps with such blocks."""
        side, number = "D" if self.size is None else str(self.size), self.number * steps
        band = "banded " if self.banded else ""
        return f"{number} {band}determinant{'s' * (number > 1)} of {side} × {side}"


class LinearStep(Step):
    """A step that is affine in x: its log-det is a constant, and :meth:`encode` never computes it.

    Subclasses give the module's own forward direction: :meth:`apply`, :meth:`invert`, :meth:`log_abs_det`.
    """

    linearity = Linearity.LINEAR
    reason = "affine in x"
    cost = "O(D)"

    def determinant(self, shapes: Shapes | None) -> int | None:
        """The size of the dense determinant that ``energy()`` skips; None if the log-det is cheap, or not known.

        Arguments:
            shapes: The event shapes before the step, if known.
        """
        return None

    def blocks(self, shapes: Shapes | None) -> Blocks | None:
        """The factorisations that its log-det takes, and ``energy()`` skips; None if it takes none.

        Arguments:
            shapes: The event shapes before the step, if known.
        """
        size = self.determinant(shapes)
        return None if size is None else Blocks(size)

    @abstractmethod
    def apply(self, x: Any) -> Any:
        """The module's own forward map, in the cheapest exact way, without a log-det."""

    @abstractmethod
    def invert(self, y: Any) -> Any:
        """The inverse of :meth:`apply`."""

    @abstractmethod
    def log_abs_det(self, shape: Shape) -> Tensor | float:
        """log|det| of :meth:`apply` for inputs with this event shape; differentiable in the parameters."""

    def operator(self, shape: Shape) -> Operator | None:
        """The linear part of :meth:`apply` for inputs with this event shape, as something that multiplies.

        None if the log-det is cheap, or nobody knows.
        """
        return None

    def own_shape(self, shapes: Shapes) -> Shape:
        """The event shape that :meth:`apply` takes, from the event shapes before the step."""
        return self.inverse_shapes(shapes)[0] if self.inverted else shapes[0]

    def encode(self, x: Any, context: Tensor | None) -> tuple[Any, Tensor | None]:
        return (self.invert(x) if self.inverted else self.apply(x)), None

    def decode(self, z: Any, context: Tensor | None) -> Any:
        return self.apply(z) if self.inverted else self.invert(z)

    def log_det(self, shapes: Shapes, like: Tensor | None = None) -> Tensor | float:
        """log|det| of :meth:`encode` for inputs with these event shapes.

        Arguments:
            shapes: The event shapes before the step.
            like: Has the device and dtype of the data, for steps that must be run to tell.
        """
        own = self.log_abs_det(self.own_shape(shapes))
        return -own if self.inverted else own


class NonlinearStep(Step):
    """A step whose log-det depends on x (or on the context), as its module computes it.

    Subclasses say how their library calls a module: :meth:`call_forward` and :meth:`call_inverse`.
    """

    linearity = Linearity.NONLINEAR
    reason = "log-det depends on x"

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        self._unsteady = unsteady_parts(module)

    def refusal(self) -> str | None:
        return first_reason(self._unsteady)

    @abstractmethod
    def call_forward(self, x: Any, context: Tensor | None) -> tuple[Any, Any]:
        """The module's forward: value, and log-det in whatever form the library has it."""

    @abstractmethod
    def call_inverse(self, y: Any, context: Tensor | None) -> tuple[Any, Any]:
        """The module's inverse: value, and log-det in whatever form the library has it."""

    def encode(self, x: Any, context: Tensor | None) -> tuple[Any, Tensor | None]:
        value, log_det = (self.call_inverse if self.inverted else self.call_forward)(x, context)
        return value, per_sample(log_det, x if isinstance(x, Tensor) else x[0])

    def decode(self, z: Any, context: Tensor | None) -> Any:
        return (self.call_forward if self.inverted else self.call_inverse)(z, context)[0]


class Base(Part, ABC):
    """The base density of a flow, over the latents that its last step leaves.

    Attributes:
        shapes: The event shapes of the latents, if the distribution tells them.
    """

    def __init__(self, module: Any, path: str, shapes: Shapes | None = None) -> None:
        super().__init__(module, path)
        self.shapes = shapes
        self._unsteady = unsteady_parts(module)

    @property
    def smoothness(self) -> Smoothness:
        return smoothness_of(self.module)

    def refusal(self) -> str | None:
        return first_reason(self._unsteady)

    @abstractmethod
    def log_prob(self, latents: tuple[Tensor, ...], context: Tensor | None) -> Tensor:
        """Log p_u, one value for each sample."""

    @abstractmethod
    def sample(self, n: int, context: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
        """Draws ``n`` latents, one for each row of a context, on the device and in the dtype of ``like``."""


@dataclass(frozen=True)
class Plan:
    """The ordered steps of a flow from data to noise, and its base density.

    Attributes:
        steps: The steps, in density order.
        base: The base density.
        embedding: What the flow does to a context before its steps see it (an nflows ``embedding_net``), if anything.
        adapter: The name of the adapter that made the plan.
        event_shape: The event shape of the data, if the base tells that of its latents and every step is known.
    """

    steps: tuple[Step, ...]
    base: Base
    embedding: Callable[[Tensor | None], Tensor | None] | None = None
    adapter: str = ""
    event_shape: Shape | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "event_shape", self._event_shape())  # once, and not in a property: torch.compile
        object.__setattr__(self, "_embedding", unsteady_parts(self.embedding))

    def parts(self) -> tuple[Part, ...]:
        """The steps and the base."""
        return (*self.steps, self.base)

    def embed(self, context: Tensor | None) -> Tensor | None:
        """What the steps and the base see of a context.

        Raises:
            InputError: If there is none, and the network that embeds it cannot do without.
        """
        if self.embedding is None:
            return context
        try:
            return self.embedding(context)
        except Exception as error:
            if context is None and not isinstance(error, EBFlowError):
                raise InputError(
                    f"the flow is conditional, and no context was given: its {type(self.embedding).__name__} embeds "
                    "one. Pass context=."
                ) from error
            raise

    def energy(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Computes E(x) (Eq. 9), with shape ``(B,)``. No log-det of a linear step is computed."""
        return self.energy_behind(0, (x,), self.embed(context))

    def energy_behind(self, start: int, stack: tuple[Tensor, ...], context: Tensor | None) -> Tensor:
        """What the base and the steps from ``start`` on add to E, given all that reaches them."""
        latents, log_det = self.encode(stack, context, start=start)
        log_prob = self.base_log_prob(latents, context)
        return -log_prob if log_det is None else -(log_prob + log_det)

    def base_log_prob(self, latents: tuple[Tensor, ...], context: Tensor | None) -> Tensor:
        """Log p_u of latents, with shape ``(B,)``. The context is the embedded one."""
        try:
            return per_sample(self.base.log_prob(latents, context), latents[0])
        except Exception as error:
            blame(error, self.base, latents, context)

    def encode(
        self,
        x: Value,
        context: Tensor | None = None,
        visit: Callable[[Step, Value], None] | None = None,
        start: int = 0,
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Moves data to noise: the latents, and the log-det of the nonlinear steps (None if there are none).

        Arguments:
            x: The data, with shape ``(B, *)``; or all that reaches the step with the index ``start``.
            context: The embedded context.
            visit: Called with each step and the value that reaches it.
            start: The first step to take.
        """
        stack = [x] if isinstance(x, Tensor) else list(x)
        total: Tensor | None = None
        for step in self.steps[start:]:
            value = pop(stack, step.takes)
            try:
                if visit is not None:
                    visit(step, value)
                value, log_det = step.encode(value, context)
            except Exception as error:
                blame(error, step, value, context)
            stack.extend((value,) if isinstance(value, Tensor) else value)
            if log_det is not None:
                total = log_det if total is None else total + log_det
        return tuple(stack), total

    def decode(self, latents: tuple[Tensor, ...], context: Tensor | None = None) -> Tensor:
        """Moves noise to data, through the inverse of each step. The context is the embedded one."""
        stack = list(latents)
        for step in reversed(self.steps):
            value = pop(stack, step.gives)
            try:
                value = step.decode(value, context)
            except NotImplementedError as error:
                refuse_precision(error, step.where)
                raise NoInverseError(
                    f"the model cannot be sampled: one of its steps has no inverse\n  {step.where}"
                ) from error
            except Exception as error:
                blame(error, step, value, context)
            stack.extend((value,) if isinstance(value, Tensor) else value)
        return stack[0]

    def initialize(self, x: Tensor, context: Tensor | None = None) -> None:
        """Moves a clean batch to noise, and lets each step initialise itself from what reaches it."""
        with torch.no_grad():
            self.encode(x, self.embed(context), visit=lambda step, value: step.initialize(value))

    def shapes(self, event_shape: Shape) -> Iterator[tuple[Step, Shapes]]:
        """Each step, and the event shapes that reach it for data of this event shape."""
        stack = [event_shape]
        for step in self.steps:
            shapes, stack = tuple(stack[-step.takes :]), stack[: -step.takes]
            yield step, shapes
            stack.extend(step.encoded_shapes(shapes))

    def log_dets(
        self, event_shape: Shape, like: Tensor, without: Collection[LinearStep] = ()
    ) -> Iterator[tuple[LinearStep, Tensor | float]]:
        """log|det| of each linear step, for data of this event shape. The O(D^3) work is here, and only here."""
        for step, shapes in self.shapes(event_shape):
            if isinstance(step, LinearStep) and step not in without:
                try:
                    yield step, step.log_det(shapes, like)
                except SingularError:  # the layer saw it first; log_z says which layers these are
                    yield step, float("-inf")

    def log_z(self, event_shape: Shape, like: Tensor, without: Collection[LinearStep] = ()) -> Tensor:
        """Computes log Z (Eq. 9), a scalar on the device and in the dtype of ``like``; of all linear steps but some.

        Raises:
            SingularError: If a linear step has no finite log-determinant; it names every such step.
        """
        terms = [
            (step, torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(()))
            for step, value in self.log_dets(event_shape, like, without)
        ]
        if not terms:
            return like.new_zeros(())
        values = torch.stack([value for _, value in terms])
        if is_readable(values):
            finite = torch.isfinite(values.detach()).tolist()
            singular = [step.where for (step, _), good in zip(terms, finite, strict=True) if not good]
            if singular:
                raise SingularError(
                    f"{len(singular)} of {len(terms)} linear steps have no finite log-determinant: their weight is "
                    "singular, or holds inf or NaN\n  " + "\n  ".join(singular) + "\nGo back to an earlier "
                    "checkpoint, lower the learning rate, or start the layer from an orthogonal matrix."
                )
        return -values.sum()

    def _event_shape(self) -> Shape | None:
        if self.base.shapes is None or not all(step.known for step in self.steps):
            return None
        stack = list(self.base.shapes)
        for step in reversed(self.steps):
            shapes, stack = tuple(stack[-step.gives :]), stack[: -step.gives]
            stack.extend(step.decoded_shapes(shapes))
        return stack[0]

    def refuse(self) -> None:
        """Raises :class:`UnsupportedStepError`, listing every step that cannot be part of an energy as it is now."""
        refused = []
        for part in self.parts():  # plain loops: torch.compile traces them
            why = part.refusal()
            if why is not None:
                refused.append(f"{part.where}: {why}")
        for question in self._embedding:  # type: ignore[attr-defined]
            why = question()
            if why is not None:
                refused.append(f"the network that embeds the context {why}")
        if refused:
            raise UnsupportedStepError(
                f"{len(refused)} of {len(self.steps)} steps cannot be wrapped (adapter {self.adapter!r})\n  "
                + "\n  ".join(refused)
                + "\nRemove them, or put the model in eval() where that makes the step deterministic."
            )


def own_tensors(module: Any) -> Iterator[Tensor]:
    """All tensors that a module holds: parameters, buffers, and plain attributes.

    Example:
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> layer.scale = torch.ones(3)
        >>> [tuple(tensor.shape) for tensor in own_tensors(layer)]
        [(2, 2), (3,)]
    """
    if isinstance(module, nn.Module):
        yield from module.parameters()
        yield from module.buffers()
        for part in module.modules():
            yield from (value for value in vars(part).values() if isinstance(value, Tensor))
