"""Step, one transform of a flow in the density direction, and its kinds; and the base density.

A step refers to one module of the user's model, and uses the module's own parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.operators import LinearOperator
from ebflow_plugin.plan.smooth_modules import Smoothness
from ebflow_plugin.plan.smoothness import smoothness_of, stochastic_parts
from ebflow_plugin.plan.values import Value, per_sample

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Gaussian = Sequence[tuple[Tensor | float, Tensor | float]]  # mean and standard deviation of each tensor of latents


class Linearity(str, Enum):
    """The role of a step in the energy."""

    LINEAR = "linear"  # affine in x: its log-det is a constant and belongs to log Z
    NONLINEAR = "nonlinear"  # its log-det depends on x (or on the context) and belongs to the energy
    REFUSED = "refused"  # cannot be part of an energy

    __str__ = str.__str__


class Linearization(NamedTuple):
    """The value and the derivatives of a step f at a point x.

    Attributes:
        value: f(x).
        push: The Jacobian-vector product: maps a tangent of x to the tangent of the value.
        pull: Maps the adjoint of the value, dE/df, to the adjoint of x, dE/dx, including the step's log-det.
        curvature: Maps the adjoint of the value and a tangent of x to the step's contribution to the second derivative
            of E along the tangent, with shape ``(B,)``. None for linear steps, which contribute nothing.
        log_det: Computes the log-det, with shape ``(B,)``. None for linear steps.
    """

    value: Value
    push: Callable[[Any], Any]
    pull: Callable[[Any], Any]
    curvature: Callable[[Any, Any], Tensor] | None = None
    log_det: Callable[[], Tensor] | None = None


class Part:
    """A part of the user's flow: a step, or the base density.

    Attributes:
        module: The user's own object.
        path: Its path in the user's model.
    """

    stochastic: Sequence[Callable[[], str | None]] = ()  # reasons why its networks are not deterministic in their mode

    def __init__(self, module: Any, path: str) -> None:
        self.module = module
        self.path = path

    @property
    def class_name(self) -> str:
        """The class of the module, for messages and reports."""
        return type(self.module).__name__

    @property
    def where(self) -> str:
        """The path, the class and its package, for messages."""
        return f"{self.path}  {self.class_name} ({type(self.module).__module__})"

    @property
    def smoothness(self) -> Smoothness:
        """Whether the part's score is continuous."""
        return Smoothness.SMOOTH

    @property
    def conditional(self) -> bool:
        """Whether it needs a context: by default, whether an attribute inside has a name with ``context``.

        That is how libraries keep the size or the network of a context; that a method takes one says nothing. It only
        chooses the words of an error that has happened (:func:`~ebflow_plugin.errors.raise_from_step`).
        """
        if not isinstance(self.module, nn.Module):
            return False
        members = (item for one in self.module.modules() for item in (*vars(one).items(), *one._modules.items()))
        return any("context" in name and value for name, value in members)

    def refusal(self) -> str | None:
        """Returns why the part cannot be in an energy in its current mode, or None.

        Called on every evaluation, since ``train()`` and ``eval()`` decide for batch norm and dropout: read only flags.
        """
        for refusal in self.stochastic:  # a plain loop: torch.compile traces it
            why = refusal()
            if why is not None:
                return why
        return None


class Step(Part, ABC):
    """One transform of a flow, in the density direction.

    A class of steps defines how one class of modules acts in the modules' *own* forward direction; ``inverted`` says
    that data pass through the module's inverse on the way to noise. Steps work on a stack of tensors: nearly all pop
    one tensor and push one, a split pushes two, a merge pops two (``n_in`` and ``n_out``).

    Attributes:
        inverted: Whether the density direction is the module's inverse.
        reason: Why the step is linear, nonlinear or refused, for reports.
        known: Whether its class is known. An unknown class keeps its own log-det: exact, only slower.
    """

    linearity: ClassVar[Linearity]
    n_in: int = 1
    n_out: int = 1
    reason: str = ""
    known: bool = True

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path)
        self.inverted = inverted
        if inverted:
            self.n_in, self.n_out = self.n_out, self.n_in

    @property
    def closed(self) -> bool:
        """Whether :meth:`linearize` computes first and second derivatives in closed form."""
        return type(self).linearize is not Step.linearize

    def linearize(self, x: Any, context: Tensor | None) -> Linearization | None:
        """The value and the derivatives at x; None if they have no closed form, so that autograd computes them."""
        return None

    @property
    def match_after(self) -> bool:
        """Whether the derivative explodes at an edge of the domain (logit, log): MaP matches after such steps."""
        return False

    def own_shapes(self, shapes: Shapes, inverse: bool) -> Shapes:
        """The output shapes of the module's own forward, or of its inverse, for these event shapes."""
        return shapes

    def shapes(self, shapes: Shapes, *, back: bool = False) -> Shapes:
        """The event shapes of what :meth:`encode` returns, or with ``back`` :meth:`decode`, for input of these."""
        return self.own_shapes(shapes, inverse=self.inverted != back)

    @abstractmethod
    def encode(self, x: Any, context: Tensor | None) -> tuple[Any, Tensor | None]:
        """Maps towards noise. Returns the value and, for nonlinear steps, the log-det with shape ``(B,)``."""

    @abstractmethod
    def decode(self, z: Any, context: Tensor | None) -> Any:
        """Maps towards data: the inverse of :meth:`encode`."""


class LinearStep(Step):
    """A step that is affine in x: its log-det is a constant, and :meth:`encode` never computes it.

    Subclasses implement the module's own forward direction: :meth:`apply`, :meth:`invert`, :meth:`log_abs_det`.

    Attributes:
        cost: The cost of its log-det, for reports.
    """

    linearity = Linearity.LINEAR
    reason = "affine in x"
    cost: str = "O(D)"

    @abstractmethod
    def apply(self, x: Any) -> Any:
        """The module's own forward map, in the cheapest exact way, without a log-det."""

    @abstractmethod
    def invert(self, y: Any) -> Any:
        """The inverse of :meth:`apply`."""

    @abstractmethod
    def log_abs_det(self, shape: Shape) -> Tensor | float:
        """log|det| of :meth:`apply` for inputs with this event shape; differentiable in the parameters."""

    def operator(self, shapes: Shapes | None) -> LinearOperator | None:
        """The linear part of :meth:`apply`, as an operator; None if the log-det is cheap, or its cost is unknown.

        Arguments:
            shapes: The event shapes of the step's input, if they are known.
        """
        return None

    def own_input(self, shapes: Shapes) -> Shape:
        """The input shape of :meth:`apply`, from the event shapes of the step's input."""
        return self.shapes(shapes)[0] if self.inverted else shapes[0]

    def library_flaw(self, shape: Shape) -> str | None:
        """The error of the library's own log-det for events of this shape, as the predicate of a sentence; or None."""
        return None

    def encode(self, x: Any, context: Tensor | None) -> tuple[Any, Tensor | None]:
        return (self.invert(x) if self.inverted else self.apply(x)), None

    def decode(self, z: Any, context: Tensor | None) -> Any:
        return self.apply(z) if self.inverted else self.invert(z)

    def log_det(self, shapes: Shapes, like: Tensor | None = None) -> Tensor | float:
        """log|det| of :meth:`encode` for inputs with these event shapes.

        Arguments:
            shapes: The event shapes of the step's input.
            like: A tensor with the device and dtype of the data, for steps whose log-det comes from a forward pass.
        """
        own = self.log_abs_det(self.own_input(shapes))
        return -own if self.inverted else own


class NonlinearStep(Step):
    """A step whose log-det depends on x (or on the context), computed by its module.

    Subclasses call the module in the way of their library: :meth:`call_forward` and :meth:`call_inverse`.
    """

    linearity = Linearity.NONLINEAR
    reason = "log-det depends on x"

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        self.stochastic = stochastic_parts(module)

    @abstractmethod
    def call_forward(self, x: Any, context: Tensor | None) -> tuple[Any, Any]:
        """The module's forward: the value, and the log-det in any form that :func:`per_sample` accepts."""

    @abstractmethod
    def call_inverse(self, y: Any, context: Tensor | None) -> tuple[Any, Any]:
        """The module's inverse: the value, and the log-det in any form that :func:`per_sample` accepts."""

    def encode(self, x: Any, context: Tensor | None) -> tuple[Any, Tensor | None]:
        value, log_det = (self.call_inverse if self.inverted else self.call_forward)(x, context)
        return value, per_sample(log_det, x if isinstance(x, Tensor) else x[0])

    def decode(self, z: Any, context: Tensor | None) -> Any:
        return (self.call_forward if self.inverted else self.call_inverse)(z, context)[0]


class Base(Part, ABC):
    """The base density of a flow, over the latents: the outputs of its last steps.

    Attributes:
        shapes: The event shapes of the latents, if the distribution defines them.
    """

    def __init__(self, module: Any, path: str, shapes: Shapes | None = None) -> None:
        super().__init__(module, path)
        self.shapes = shapes
        self.stochastic = stochastic_parts(module)

    @property
    def smoothness(self) -> Smoothness:
        return smoothness_of(self.module)

    @abstractmethod
    def log_prob(self, latents: tuple[Tensor, ...], context: Tensor | None) -> Tensor:
        """Log p_u, one value per sample."""

    @abstractmethod
    def sample(self, n: int, context: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
        """Draws ``n`` latents, one for each row of a context, with the device and dtype of ``like``."""

    def gaussian(self, context: Tensor | None) -> Gaussian | None:
        """Mean and standard deviation for each tensor of latents, if the density is a Gaussian of independent entries.

        They are broadcast against a batch of latents. With them, derivatives need no autograd.
        """
        return None

    def sample_at(self, temperature: float, n: int, context: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
        """Draws as :meth:`sample` does, from a Gaussian whose standard deviation is ``temperature`` times its own.

        Raises:
            InputError: If the density is no Gaussian of independent entries.
        """
        gaussian = self.gaussian(context)
        if gaussian is None:
            raise InputError(
                f"temperature={temperature:g} needs a Gaussian base density of independent entries, and this is none\n"
                f"  {self.where}"
            )
        drawn = zip(self.sample(n, context, like), gaussian, strict=True)
        return tuple(mean + temperature * (z - mean) for z, (mean, _) in drawn)
