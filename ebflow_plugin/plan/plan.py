r"""The plan of a flow: its steps from data to noise, and its base density.

A flow's density is :math:`\log p(x) = \log p_u(g(x)) + \sum_i \log|\det J_i|`. A step is *linear* if it is affine in x:
its Jacobian, and so its log-determinant, does not depend on x. Terms that do not depend on x can be left out of the
training objective (Eqs. 8 and 9 of the paper):

.. math::
    E(x)   &= -\log p_u(g(x)) - \sum_{i\ \text{nonlinear}} \log|\det J_i(x)| \\
    \log Z &= -\sum_{i\ \text{linear}} \log|\det J_i| \\
    \log p(x) &= -E(x) - \log Z

A :class:`Plan` is this split. An adapter builds it by walking the user's model. Each :class:`Step` refers to one module
of that model and uses the module's own parameters. Nothing is copied, and nothing is edited.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ebflow_plugin.errors import (
    EBFlowError,
    InputError,
    SingularError,
    UnsupportedStepError,
    no_inverse,
    raise_from_step,
    refuse_inference_tensors,
)
from ebflow_plugin.linalg.memo import Memo, may_read
from ebflow_plugin.plan.inputs import usable
from ebflow_plugin.plan.linear import InitialisedAffineStep
from ebflow_plugin.plan.smoothness import stochastic_parts
from ebflow_plugin.plan.step import Base, LinearStep, Part, Shape, Shapes, Step
from ebflow_plugin.plan.values import Value, per_sample, pop


@dataclass(frozen=True)
class Plan:
    """The ordered steps of a flow from data to noise, and its base density.

    It is the energy as a pure function of tensors: no call changes it, and none looks whether the flow has changed.
    A slice of a plan, ``plan[start:]``, has some of its steps, and the same base.

    Attributes:
        steps: The steps, in density order.
        base: The base density.
        embedding: The embedding of the context before the steps (an nflows ``embedding_net``), if there is one.
        adapter: The name of the adapter that built the plan.
    """

    steps: tuple[Step, ...]
    base: Base
    embedding: Callable[[Tensor | None], Tensor | None] | None = None
    adapter: str = ""

    @cached_property
    def memo(self) -> Memo[Tensor]:
        """The cached log Z (:func:`~ebflow_plugin.log_z.exact.exact_log_z`)."""
        return Memo()

    def __getitem__(self, part: slice) -> Plan:
        return replace(self, steps=self.steps[part])

    def parts(self) -> tuple[Part, ...]:
        """The steps and the base."""
        return (*self.steps, self.base)

    def embed(self, context: Tensor | None) -> Tensor | None:
        """The embedded context, for the steps and the base.

        Raises:
            InputError: If there is no context, and the embedding network needs one.
        """
        context = None if context is None else usable(context)
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
            refuse_inference_tensors(error, self.embedding, "embedding")
            raise

    def energy(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Computes E(x) (Eq. 9), with shape ``(B,)``. No log-det of a linear step is computed."""
        return self.energy_from(0, (x,), self.embed(context))[0]

    def score(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Computes -dE/dx, with the shape of x, and with a graph if grad mode is on."""
        return score_of(lambda point: self.energy(point, context), x)

    def energy_from(
        self, start: int, stack: tuple[Tensor, ...], context: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The contribution to E of the base and the steps from ``start`` on, given the stack before them; the latents.

        The context is the embedded one.
        """
        latents, log_det = self.encode(stack, context, start=start)
        try:
            log_prob = per_sample(self.base.log_prob(latents, context), latents[0])
        except Exception as error:
            raise_from_step(error, self.base, latents, context)
        return -log_prob if log_det is None else -(log_prob + log_det), latents

    def base_log_prob(self, latents: tuple[Tensor, ...], context: Tensor | None) -> Tensor:
        """Log p_u of latents, with shape ``(B,)``. The context is the embedded one."""
        return -self.energy_from(len(self.steps), latents, context)[0]

    def encode(
        self,
        x: Value,
        context: Tensor | None = None,
        visit: Callable[[Step, Value], None] | None = None,
        start: int = 0,
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Maps data to noise: the latents, and the log-det of the nonlinear steps (None if there are none).

        Arguments:
            x: The data, with shape ``(B, *)``; or the stack of tensors before the step with the index ``start``.
            context: The embedded context.
            visit: Called with each step and its input.
            start: The index of the first step to apply.
        """
        stack = [x] if isinstance(x, Tensor) else list(x)
        total: Tensor | None = None
        for step in self.steps[start:]:
            value: Value = stack.pop() if step.n_in == 1 else pop(stack, step.n_in)
            try:
                if visit is not None:
                    visit(step, value)
                value, log_det = step.encode(value, context)
            except Exception as error:
                raise_from_step(error, step, value, context)
            stack.extend((value,) if isinstance(value, Tensor) else value)
            if log_det is not None:
                total = log_det if total is None else total + log_det
        return tuple(stack), total

    def decode(self, latents: tuple[Tensor, ...], context: Tensor | None = None) -> Tensor:
        """Maps noise to data, through the inverse of each step. The context is the embedded one."""
        stack = list(latents)
        for step in reversed(self.steps):
            value = pop(stack, step.n_out)
            try:
                value = step.decode(value, context)
            except NotImplementedError as error:
                no_inverse("one of its steps has no inverse", step.where, error, latents[0].dtype)
            except Exception as error:
                raise_from_step(error, step, value, context)
            stack.extend((value,) if isinstance(value, Tensor) else value)
        return stack[0]

    @cached_property
    def closed_steps(self) -> int:
        """The number of leading steps with derivatives in closed form."""
        return next((place for place, step in enumerate(self.steps) if not step.closed), len(self.steps))

    @cached_property
    def _starting(self) -> tuple[InitialisedAffineStep, ...]:
        """The steps with a data-dependent initialisation, pending or not."""
        return tuple(step for step in self.steps if isinstance(step, InitialisedAffineStep))

    def waits_for_data(self) -> bool:
        """Whether a step in training mode still needs its data-dependent initialisation.

        Reads only flags, so that it synchronises with the device at most once.
        """
        return any(getattr(step.module, "training", False) for step in self.uninitialised())

    def uninitialised(self) -> list[InitialisedAffineStep]:
        """The steps that still need their data-dependent initialisation, in training mode or not."""
        return [step for step in self._starting if not step.initialised]

    @property
    def in_use(self) -> bool:
        """Whether it has steps with a data-dependent initialisation, none of which needs it any more."""
        return bool(self._starting) and not self.uninitialised()

    def initialize(self, x: Tensor, context: Tensor | None = None) -> None:
        """Maps a batch without added noise to noise, and initialises each step from its input."""

        def visit(step: Step, value: Value) -> None:
            if isinstance(step, InitialisedAffineStep):
                step.initialize(value)

        with torch.no_grad():
            self.encode(x, self.embed(context), visit=visit)

    def _walk(self, *event_shapes: Shape, back: bool = False) -> tuple[list[tuple[Step, Shapes]], Shapes]:
        """Each step with the event shapes of its input, from data or, ``back``, from latents; and those of the end."""
        stack, reached = list(event_shapes), []
        for step in reversed(self.steps) if back else self.steps:
            count = step.n_out if back else step.n_in
            shapes, stack = tuple(stack[-count:]), stack[:-count]
            reached.append((step, shapes))
            stack.extend(step.shapes(shapes, back=back))
        return reached, tuple(stack)

    def shapes(self, event_shape: Shape) -> list[tuple[Step, Shapes]]:
        """Each step, and the event shapes of its input for data of this event shape."""
        return self._walk(event_shape)[0]

    def latent_shapes(self, event_shape: Shape) -> Shapes:
        """The event shapes of the outputs of the last step, for data of this event shape."""
        return self._walk(event_shape)[1]

    def log_dets(
        self, event_shape: Shape, like: Tensor, without: Collection[LinearStep] = ()
    ) -> Iterator[tuple[LinearStep, Tensor | float]]:
        """log|det| of each linear step, for data of this event shape. All O(D^3) work is here."""
        for step, shapes in self.shapes(event_shape):
            if isinstance(step, LinearStep) and step not in without:
                try:
                    yield step, step.log_det(shapes, like)
                except SingularError:  # log_z lists all singular layers
                    yield step, float("-inf")

    def log_z(self, event_shape: Shape, like: Tensor, without: Collection[LinearStep] = ()) -> Tensor:
        """Computes log Z (Eq. 9), a scalar with the device and dtype of ``like``, of all linear steps but ``without``.

        Raises:
            SingularError: If a linear step has no finite log-determinant; the message names every such step. In a
                training step on another device than the CPU, which must not wait for it, log Z is not finite instead.
        """
        terms = list(self.log_dets(event_shape, like, without))
        # torch.tensor of a number would copy it to the device
        each = [like.new_full((), x) if not isinstance(x, Tensor) else x.to(like).reshape(()) for _, x in terms]
        if not each:
            return like.new_zeros(())
        values = torch.stack(each)
        finite = map(math.isfinite, values.tolist()) if may_read(values) else [True] * len(each)
        singular = [step.where for (step, _), fine in zip(terms, finite, strict=True) if not fine]
        if singular:
            raise SingularError(
                f"{len(singular)} of {len(terms)} linear steps have no finite log-determinant: their weight is "
                "singular, or holds inf or NaN\n  " + "\n  ".join(singular) + "\nGo back to an earlier "
                "checkpoint, lower the learning rate, or start the layer from an orthogonal matrix."
            )
        return 0.0 - values.sum()

    @cached_property
    def event_shape(self) -> Shape | None:
        """The event shape of the data, if the base defines that of its latents and every step is known."""
        if self.base.shapes is None or not all(step.known for step in self.steps):
            return None
        return self._walk(*self.base.shapes, back=True)[1][0]

    @cached_property
    def _refusable(self) -> tuple[Part, ...]:
        """The parts that can be refused in some mode: the others are not asked on each call."""
        return tuple(part for part in self.parts() if part.stochastic or type(part).refusal is not Part.refusal)

    def refuse(self) -> None:
        """Raises :class:`UnsupportedStepError`, listing every step that cannot be part of an energy in its mode."""
        refused = [f"{part.where}: {why}" for part in self._refusable if (why := part.refusal()) is not None]
        embedding = () if self.embedding is None else stochastic_parts(self.embedding)
        refused += [f"the network that embeds the context {why}" for refusal in embedding if (why := refusal())]
        if refused:
            raise UnsupportedStepError(
                f"{len(refused)} of {len(self.steps)} steps cannot be wrapped (adapter {self.adapter!r})\n  "
                + "\n  ".join(refused)
                + "\nRemove them, or put the model in eval() where that makes the step deterministic."
            )


def score_of(energy: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The negative gradient of an energy at x, with a graph if grad mode is on, so that losses of it can be trained.

    Example:
        >>> score_of(lambda x: 0.5 * x.square().sum(1), torch.ones(1, 2)).detach()
        tensor([[-1., -1.]])
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:  # inside a transform of torch.func
        return -torch.func.grad(lambda point: energy(point).sum())(x)
    differentiable = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        if not (differentiable and x.requires_grad):
            x = usable(x).detach().requires_grad_()
        total = energy(x).sum()
        if not total.requires_grad:  # a uniform base density, and only linear steps
            return torch.zeros_like(x)
        (gradient,) = torch.autograd.grad(
            total, x, create_graph=differentiable, allow_unused=True, materialize_grads=True
        )
    return -gradient
