"""wrap(), describe() and the EBFlow: the front door."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from ebflow_plugin.discovery import Found, find_flow
from ebflow_plugin.errors import InputError, UnsupportedStepError
from ebflow_plugin.normalizer import Normalizer
from ebflow_plugin.plan import Plan, Shape
from ebflow_plugin.preprocess import Dequantize, DequantizeStep, boundary, preprocessing_steps
from ebflow_plugin.report import FlowReport
from ebflow_plugin.sampling import draw

__all__ = ["EBFlow", "describe", "wrap"]


def wrap(
    flow: Any,
    *,
    match_after: str | int | None = "auto",
    preprocess: Sequence[nn.Module] = (),
    strict: bool = False,
    overrides: Mapping[str, str] | None = None,
    check_finite: bool = False,
) -> EBFlow:
    """Turns a normalizing flow into an energy-based one, which shares every parameter with it.

    The flow itself stays as it is: it can be trained, saved and sampled as before, with or without the wrapper.

    Arguments:
        flow: A flow of a library that an adapter knows (nflows and its forks, normflows), or an object that holds
            exactly one (sbi's density estimators, nessai's ``FlowModel``).
        match_after: Where the variable begins that score matching sees (MaP): behind the step with this path or
            index; behind the leading fixed steps that end in a logit or similar (``"auto"``); or at the data (None).
            ``log_prob``, ``energy`` and ``score`` are those of the data in any case.
        preprocess: Steps to put in front of a flow that has none: :class:`~ebflow_plugin.Dequantize`,
            :class:`~ebflow_plugin.Rescale`, :class:`~ebflow_plugin.Logit`.
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
    options = _Options(match_after, tuple(preprocess), dict(overrides or {}), check_finite)
    plan = options.plan(found)
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
    return EBFlow(found, options)


def describe(flow: Any, *, overrides: Mapping[str, str] | None = None) -> FlowReport:
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
    plan = found.adapter.plan(found.flow, dict(overrides or {}))
    return FlowReport.of(plan, found.inside, boundary(plan, "auto"))


@dataclass(frozen=True)
class _Options:
    """What :func:`wrap` was asked for: enough to build the plan of a copy again."""

    match_after: str | int | None = "auto"
    preprocess: tuple[nn.Module, ...] = ()
    overrides: dict[str, str] = field(default_factory=dict)
    check_finite: bool = False
    skipped: int = 0  # how many leading steps a core leaves to its model

    def plan(self, found: Found) -> Plan:
        plan = found.adapter.plan(found.flow, self.overrides)
        return replace(plan, steps=(*preprocessing_steps(self.preprocess), *plan.steps)[self.skipped :])


class EBFlow(nn.Module):
    """An energy-based view of a flow, made by :func:`wrap`.

    Attributes:
        flow: The user's own flow, the same object.
        core: The energy-based flow of the matched variable, which objectives train; the model itself where there is
            no preprocessing. It has the same parameters.
        plan: The steps from data to noise.
    """

    core: EBFlow

    def __init__(self, found: Found, options: _Options) -> None:
        super().__init__()
        self.flow = found.flow
        self.preprocessing = nn.ModuleList(options.preprocess)
        self.training = found.flow.training
        self._inside = found.inside
        self._options = options
        self._seen: tuple[Shape, torch.device, torch.dtype] | None = None
        self._settle(found)

    def _settle(self, found: Found) -> None:
        """Makes what refers to the flow's modules from outside, and is never copied with them."""
        self._adapter = found.adapter
        self.plan = self._options.plan(found)
        self._normalizer = Normalizer(self.plan)
        # The largest parameter: some are of a dtype of their own (the mixture of normflows, a number inside Residual).
        sizes = {name: p.numel() for name, p in self.flow.named_parameters() if p.is_floating_point()}
        self._anchor_name = max(sizes, key=sizes.__getitem__, default=None)
        count = boundary(self.plan, self._options.match_after)
        self._prefix = replace(self.plan, steps=self.plan.steps[:count])
        core: EBFlow = self
        if count:
            core = EBFlow(found, replace(self._options, match_after=None, preprocess=(), skipped=count))
        self.__dict__["core"] = core  # past nn.Module: the core's parameters are the flow's, and are not listed twice

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
        x = self._check(x, context)
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
        x = self._check(x, context)
        differentiable = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            if not (differentiable and x.requires_grad):
                x = (x.clone() if x.is_inference() else x).detach().requires_grad_()
            energy = self.energy(x, context).sum()
            if not energy.requires_grad:  # a flat base density, and linear steps alone
                return torch.zeros_like(x)
            (gradient,) = torch.autograd.grad(
                energy, x, create_graph=differentiable, allow_unused=True, materialize_grads=True
            )
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
    def sample(self, n: int, context: Tensor | None = None, *, generator: torch.Generator | None = None) -> Tensor:
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
        self.plan.refuse()
        return draw(self.plan, n, context, generator, self._like())

    def initialize(self, x: Tensor, context: Tensor | None = None) -> None:
        """Runs the data-dependent initialisation of the flow (ActNorm) on a clean batch.

        Each layer is initialised exactly once: layers that are initialised already, by an earlier call, by training
        or by a loaded checkpoint, stay as they are.
        """
        x = self._check(x, context)
        self.plan.refuse()
        self.plan.initialize(x, context)

    @torch.no_grad()
    def preprocess(self, x: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Takes the fixed steps in front of the matched variable, without gradients.

        Arguments:
            x: Data, with shape ``(B, *)``.
            generator: Draws the noise of a :class:`~ebflow_plugin.Dequantize`.

        Returns:
            The matched variable, and the log-det of the way to it with shape ``(B,)``, so that
            ``log_prob(x) == core.log_prob(u) + log_det``.
        """
        x = self._check(x, None)
        noisy = next((step for step in self._prefix.steps if isinstance(step, DequantizeStep)), None)
        if noisy is not None:
            noisy.generator = generator
        try:
            (matched,), log_det = self._prefix.encode(x)
        finally:
            if noisy is not None:
                noisy.generator = None
        total = x.new_zeros(len(x)) if log_det is None else log_det
        for _, constant in self._prefix.log_dets(tuple(x.shape[1:])):
            total = total + constant
        return matched, total

    def bits_per_dim(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Computes -log2 p(x) / D, with shape ``(B,)``: bits per dimension, in the units of x.

        With a :class:`~ebflow_plugin.Dequantize` in front, x are integers, and this is an upper bound (in the
        mean over the noise) on the bits that the integers cost.
        """
        return -self.log_prob(x, context) / (max(1, x[:1].numel()) * log(2.0))

    @property
    def report(self) -> FlowReport:
        """What was found in the flow, as :func:`describe` reports it."""
        return FlowReport.of(self.plan, self._inside, len(self._prefix.steps))

    def _like(self) -> Tensor:
        """An empty tensor with the device and dtype of the flow, or of the data if the flow has no parameters."""
        anchor = self._anchor()
        if anchor is not None:
            return anchor.detach().new_empty(0)
        if self._seen is not None:
            return torch.empty(0, device=self._seen[1], dtype=self._seen[2])
        buffer = next((buffer for buffer in self.flow.buffers() if buffer.is_floating_point()), torch.empty(0))
        return buffer.new_empty(0)

    def _anchor(self) -> Tensor | None:
        """A parameter that tells the device and dtype of the flow, looked up anew: it may be moved or swapped."""
        if self._anchor_name is None:
            return None
        owner, _, name = self._anchor_name.rpartition(".")
        anchor: Tensor | None = getattr(self.flow.get_submodule(owner), name, None)
        return anchor

    def _check(self, x: Tensor, context: Tensor | None) -> Tensor:
        """Refuses input that the flow cannot take, in our words, from flags and shapes alone. Gives x to go on with."""
        if not isinstance(x, Tensor):
            raise InputError(f"x must be a tensor, got {type(x).__name__}")
        anchor = self._anchor()
        if not x.is_floating_point():
            if not (self.preprocessing and isinstance(self.preprocessing[0], Dequantize)) or x.is_complex():
                raise InputError(
                    f"x must be floating point, got {x.dtype}; wrap the flow with preprocess=[Dequantize(levels), …] "
                    "for integer data, or cast it"
                )
            x = x.to(torch.get_default_dtype() if anchor is None else anchor.dtype)
        expected, shape = self.plan.event_shape, tuple(x.shape)
        if x.dim() < 2 or (expected is not None and shape[1:] != expected):
            wanted = "(B, *)" if expected is None else f"(B, {', '.join(map(str, expected))})"
            hint = "; add the batch dimension with x.unsqueeze(0)" if shape == expected or x.dim() == 1 else ""
            raise InputError(f"x must have shape {wanted}, got {shape}{hint}")
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
            if anchor is not None and context.is_floating_point() and context.dtype != anchor.dtype:
                raise InputError(f"context is {context.dtype}, the flow is {anchor.dtype}; cast one with .to()")
        if self._options.check_finite:
            for name, tensor in (("x", x), ("context", context)):
                if tensor is not None:
                    refuse_non_finite(name, tensor)
        return x

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what refers to the flow's modules from outside: it is made anew for the copy."""
        self._adapter.release(self.flow)
        left_out = ("plan", "core", "_prefix", "_normalizer", "_adapter")
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._settle(find_flow(self.flow))


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
