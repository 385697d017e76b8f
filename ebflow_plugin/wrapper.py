"""wrap(), describe() and the EBFlow: the front door."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ebflow_plugin.discovery import Found, find_flow
from ebflow_plugin.errors import InputError, UnsupportedStepError
from ebflow_plugin.normalizer import Normalizer
from ebflow_plugin.plan import Plan, Shape
from ebflow_plugin.report import FlowReport

__all__ = ["EBFlow", "describe", "wrap"]


def wrap(
    flow: Any,  # noqa: ANN401
    *,
    strict: bool = False,
    overrides: Mapping[str, str] | None = None,
    check_finite: bool = False,
) -> EBFlow:
    """Turns a normalizing flow into an energy-based one, which shares every parameter with it.

    The flow itself stays as it is: it can be trained, saved and sampled as before, with or without the wrapper.

    Arguments:
        flow: A flow of a library that an adapter knows (nflows and its forks, normflows), or an object that holds
            exactly one (sbi's density estimators, nessai's ``FlowModel``).
        strict: Raises on transforms of unknown class. By default they keep their own log-det, which is exact, and
            one warning lists them.
        overrides: ``"linear"`` or ``"nonlinear"`` by path in the flow, for transforms that you know better.
        check_finite: Looks for NaN and inf in every input. This waits for the device.

    Raises:
        NotAFlowError: If the object is no flow and does not hold exactly one.
        UnsupportedStepError: If steps cannot be part of an energy; it lists all of them, with the reasons.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> flow = flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2]))
        >>> model = ebf.wrap(flow)
        >>> x = torch.randn(5, 2)
        >>> torch.allclose(model.log_prob(x), flow.log_prob(x))
        True
        >>> model.energy(x).shape, model.score(x).shape
        (torch.Size([5]), torch.Size([5, 2]))
    """
    found = find_flow(flow)
    plan = found.adapter.plan(found.flow, dict(overrides or {}))
    plan.refuse()
    unknown = [f"{step.where}: {step.reason}" for step in plan.steps if not step.known]
    if unknown:
        message = (
            f"{len(unknown)} of {len(plan.steps)} steps are of a class that nobody registered (adapter "
            f"{plan.adapter!r})\n  " + "\n  ".join(unknown) + "\nThey keep their own log-det: exact, only slower. "
            "Teach their class with ebflow_plugin.register_linear, register_nonlinear or register_container, or pass "
            'overrides={"path": "linear"}.'
        )
        if strict:
            raise UnsupportedStepError(message)
        warnings.warn(message, stacklevel=2)
    return EBFlow(found, plan, dict(overrides or {}), check_finite)


def describe(flow: Any, *, overrides: Mapping[str, str] | None = None) -> FlowReport:  # noqa: ANN401
    """Walks a flow as :func:`wrap` does, and reports what it finds instead of wrapping it.

    Never raises on an unknown or a refused class: the report shows it.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> flow = flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2]))
        >>> [(row.path, row.linearity) for row in ebf.describe(flow)]
        [('_transform', 'linear')]
    """
    found = find_flow(flow)
    return FlowReport.of(found.adapter.plan(found.flow, dict(overrides or {})), found.inside)


class EBFlow(nn.Module):
    """An energy-based view of a flow, made by :func:`wrap`.

    Attributes:
        flow: The user's own flow, the same object.
        check_finite: Whether every input is searched for NaN and inf.
    """

    def __init__(self, found: Found, plan: Plan, overrides: dict[str, str], check_finite: bool = False) -> None:
        super().__init__()
        self.flow = found.flow
        self.check_finite = check_finite
        self.training = found.flow.training
        self._inside = found.inside
        self._overrides = overrides
        self._seen: tuple[Shape, torch.device, torch.dtype] | None = None
        self._settle(found, plan)

    def _settle(self, found: Found, plan: Plan) -> None:
        self._adapter = found.adapter
        self.plan = plan
        self._normalizer = Normalizer(plan)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """:meth:`energy`, so that any library's losses and samplers for energy-based models take the model."""
        return self.energy(x, context)

    def energy(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Computes E(x) = -log p_u(g(x)) - the log-dets of the nonlinear steps (Eq. 9).

        No determinant of a linear step is computed, and nothing waits for the device.

        Arguments:
            x: Data, with shape ``(B, *)``.
            context: What the flow is conditioned on, with ``B`` rows.

        Returns:
            Energies, with shape ``(B,)``.
        """
        self._check(x, context)
        self.plan.refuse()
        self._seen = tuple(x.shape[1:]), x.device, x.dtype
        if x.shape[0] == 0:
            return x.flatten(1).sum(1)
        return self.plan.energy(x, context)

    def score(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Computes the score, d log p(x) / dx = -dE(x)/dx, with the shape of x.

        It carries a graph if grad mode is on, so that losses of the score can be trained. One forward and one
        backward pass.
        """
        with torch.inference_mode(False):
            differentiable = torch.is_grad_enabled()
            with torch.enable_grad():
                if not (differentiable and x.requires_grad):
                    x = x.clone().detach() if x.is_inference() else x.detach()
                    x = x.requires_grad_() if x.is_floating_point() else x
                (gradient,) = torch.autograd.grad(self.energy(x, context).sum(), x, create_graph=differentiable)
        return -gradient

    def log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Computes log p(x) = -E(x) - log Z exactly, with shape ``(B,)``; equal to the flow's own ``log_prob``.

        log Z is computed once and kept while no gradient is asked for: evaluate under ``torch.no_grad()``.
        """
        energy = self.energy(x, context)
        if x.shape[0] == 0:
            return -energy
        return -energy - self._normalizer.exact(tuple(x.shape[1:]), energy)

    def log_z(self, event_shape: Shape | None = None, method: str = "exact") -> Tensor:
        """Computes log Z = -sum of the linear steps' log|det| (Eq. 9), a scalar.

        O(D^3) for a dense layer, once: it is kept until a parameter of a linear step changes. With grad mode on and
        trainable linear layers it is computed anew, with its graph.

        Arguments:
            event_shape: The shape of one data point. By default what the base density tells, or the data that the
                model saw last.
            method: ``"exact"``.
        """
        if method != "exact":
            raise InputError(f"log_z has no method {method!r}; valid: exact")
        shape = event_shape or self.plan.event_shape or (self._seen and self._seen[0])
        if shape is None:
            raise InputError("log_z needs event_shape: the base density does not tell it, and no data was seen yet")
        return self._normalizer.exact(tuple(shape), self._like())

    @torch.no_grad()
    def sample(
        self, n: int, context: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws samples by the inverse of each step, without gradients.

        Arguments:
            n: How many (for each row of a context).
            context: What to condition on, with ``C`` rows.
            generator: Makes the draw repeatable.

        Returns:
            Samples, with shape ``(n, *)``, or ``(C, n, *)`` with a context, as nflows has it.

        Raises:
            NoInverseError: If a step has no inverse; it names the step.
        """
        from ebflow_plugin.sampling import draw

        self.plan.refuse()
        return draw(self.plan, n, context, generator, self._like())

    def initialize(self, x: Tensor, context: Tensor | None = None) -> None:
        """Runs the data-dependent initialisation of the flow (ActNorm) on a clean batch.

        Each layer is initialised exactly once: layers that are initialised already, by an earlier call, by training
        or by a loaded checkpoint, stay as they are.
        """
        self._check(x, context)
        self.plan.refuse()
        self.plan.initialize(x, context)

    @property
    def report(self) -> FlowReport:
        """What was found in the flow, as :func:`describe` reports it."""
        return FlowReport.of(self.plan, self._inside)

    def _like(self) -> Tensor:
        """An empty tensor with the device and dtype of the flow, or of the data if the flow has no parameters."""
        anchor = self._anchor()
        if anchor is not None:
            return anchor.detach().new_empty(0)
        _, device, dtype = self._seen or (None, None, None)
        return torch.empty(0, device=device, dtype=dtype)

    def _anchor(self) -> Tensor | None:
        return next((parameter for parameter in self.flow.parameters() if parameter.is_floating_point()), None)

    def _check(self, x: Tensor, context: Tensor | None) -> None:
        """Refuses input that the flow cannot take, in our words, from flags and shapes alone."""
        if not isinstance(x, Tensor):
            raise InputError(f"x must be a tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise InputError(f"x must be floating point, got {x.dtype}; dequantize integer data, or cast it")
        expected, shape = self.plan.event_shape, tuple(x.shape)
        if x.dim() < 2 or (expected is not None and shape[1:] != expected):
            wanted = "(B, *)" if expected is None else f"(B, {', '.join(map(str, expected))})"
            hint = "; add the batch dimension with x.unsqueeze(0)" if shape == expected or x.dim() == 1 else ""
            raise InputError(f"x must have shape {wanted}, got {shape}{hint}")
        anchor = self._anchor()
        if anchor is not None:
            if x.device != anchor.device:
                raise InputError(f"x is on {x.device}, the flow is on {anchor.device}; move one with .to()")
            if x.dtype != anchor.dtype and not torch.is_autocast_enabled(x.device.type):
                raise InputError(f"x is {x.dtype}, the flow is {anchor.dtype}; cast one with .to()")
        if context is not None:
            if not isinstance(context, Tensor):
                raise InputError(f"context must be a tensor, got {type(context).__name__}")
            if context.dim() == 0 or context.shape[0] != x.shape[0]:
                raise InputError(f"context must have {x.shape[0]} rows, as x has, got shape {tuple(context.shape)}")
            if context.device != x.device:
                raise InputError(f"context is on {context.device}, x is on {x.device}; move one with .to()")
        if self.check_finite:
            for name, tensor in (("x", x), ("context", context)):
                if tensor is not None:
                    refuse_non_finite(name, tensor)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what refers to the flow's modules from outside: it is rebuilt from the copy (or the file)."""
        self._adapter.release(self.flow)
        return {key: value for key, value in self.__dict__.items() if key not in ("plan", "_normalizer", "_adapter")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        found = find_flow(self.flow)
        self._settle(found, found.adapter.plan(found.flow, self._overrides))


def refuse_non_finite(name: str, tensor: Tensor) -> None:
    """Raises if a tensor holds NaN or inf: how many, and where the first one stands.

    Example:
        >>> refuse_non_finite("x", torch.tensor([[0.0, float("nan")]]))
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: x holds 1 NaN or inf in 1 of 1 rows, the first at [0, 1]
    """
    bad = ~torch.isfinite(tensor)
    count = int(bad.sum())
    if count:
        rows = int(bad.flatten(1).any(1).sum()) if bad.dim() > 1 else count
        first = bad.nonzero()[0].tolist()
        raise InputError(f"{name} holds {count} NaN or inf in {rows} of {tensor.shape[0]} rows, the first at {first}")
