"""The plans of a flow: what :class:`~ebflow_plugin.EBFlow` computes with, and how it follows changes of the flow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ebflow_plugin.adapting.adapter import Adapter
from ebflow_plugin.adapting.discovery import FoundFlow, find_flow
from ebflow_plugin.closed_form.calibration import Calibration, CalibrationStep
from ebflow_plugin.closed_form.moments import Rows, batches
from ebflow_plugin.linalg.memo import without_reading
from ebflow_plugin.log_z.exact import exact_log_z
from ebflow_plugin.plan.inputs import check_input, refuse_non_finite
from ebflow_plugin.plan.plan import Plan, score_of
from ebflow_plugin.plan.preprocessing import Dequantize, boundary, preprocessing_steps, refuse_trainable
from ebflow_plugin.plan.step import Shape
from ebflow_plugin.report import FlowReport

# Values that steps read on each call: a module that counts its calls, say, does not change the plan.
_READ_EACH_CALL = (Tensor, int, float, complex, type(None), dict, list, tuple, set)


class PlannedFlow(nn.Module):
    """A flow with its preprocessing and calibration, and two plans: of the data, and of the matched variable.

    After a layer of the flow is replaced, a method patched or a hook added, the next call walks the flow again (see
    :meth:`rebuild`).

    Attributes:
        flow: The user's own flow, the same object.
        preprocessing: The modules of the ``preprocess`` argument of :func:`wrap`.
        calibration: The affine map after the flow, which ``calibrate`` fits.
        match_after, overrides, check_finite: The arguments of :func:`wrap`.
    """

    is_ebflow = True  # for modules that this one imports, and that must not mistake it for a flow

    def __init__(
        self,
        found: FoundFlow,
        match_after: str | int | None = "auto",
        preprocess: Sequence[nn.Module] = (),
        overrides: Mapping[str, str] | None = None,
        check_finite: bool = False,
    ) -> None:
        super().__init__()
        self.flow, self._adapter, self._inside = found.flow, found.adapter, found.inside
        self.preprocessing = nn.ModuleList(preprocess)
        self.calibration = Calibration()
        self.training = self.flow.training
        self.match_after, self.overrides, self.check_finite = match_after, dict(overrides or {}), check_finite
        self._watch: Watch | None = None
        self._build()
        self.register_load_state_dict_pre_hook(_make_room)

    def rebuild(self) -> None:
        """Walks the flow again.

        This happens automatically after a module of the flow is replaced, added, removed, hooked or patched. Call it
        after changes that cannot be detected: after registering a class, or editing a plain list inside a module of
        your own.
        """
        self._adapter = find_flow(self.flow).adapter
        self._build()

    def _build(self) -> None:
        """Builds the plans, with the adapter that there is."""
        bare, dequantized = self._adapter.plan(self.flow, self.overrides), self.dequantize is not None
        self._calibrated: tuple[CalibrationStep, ...] = ()
        if self.calibration.mean is not None:
            shapes = bare.base.shapes or ((len(self.calibration.mean),),)  # one flat vector if the shapes are unknown
            self._calibrated = (CalibrationStep(self.calibration, shapes),)
        bare = replace(bare, steps=(*preprocessing_steps(list(self.preprocessing)), *bare.steps))
        start = boundary(bare, self.match_after, dequantized)
        self._plan = replace(bare, steps=(*bare.steps, *self._calibrated))
        self._event_shape = self._plan.event_shape
        self._prefix, self._core, self._exact = bare[:start], self._plan[start:], bare[start:]
        sizes = {name: p.numel() for name, p in self.flow.named_parameters() if p.is_floating_point()}
        # The largest parameter has the device and dtype of the flow; others may have another dtype (the mixture of
        # normflows, a number inside Residual). Its name, since it may be moved or swapped.
        self._anchor = max(sizes, key=sizes.__getitem__, default=None)
        parts = {id(part): part for part in (*self.flow.modules(), *(part.module for part in bare.parts()))}
        self._watch = Watch([part for part in parts.values() if hasattr(part, "__dict__")], self.calibration)

    def _follow(self) -> None:
        """Walks the flow again if it has changed. Every public call does this once."""
        if self._watch is None or not self._watch.unchanged():
            self.rebuild()

    @property
    def plan(self) -> Plan:
        """The steps from data (after a :class:`~ebflow_plugin.Dequantize`) to noise, and the base."""
        self._follow()
        return self._plan

    @property
    def core(self) -> Plan:
        """The plan of the matched variable, which objectives train, with the same parameters.

        Without preprocessing, this is :attr:`plan`.
        """
        self._follow()
        return self._core

    @property
    def prefix(self) -> Plan:
        """The fixed steps before the matched variable, which :meth:`preprocess` applies."""
        self._follow()
        return self._prefix

    @property
    def exact(self) -> Plan:
        """The last :attr:`core` without its calibration, which caches its exact log Z."""
        return self._exact

    @property
    def adapter(self) -> Adapter:
        """The adapter of the flow's library."""
        self._follow()
        return self._adapter

    @property
    def dequantize(self) -> Dequantize | None:
        """The one random part: the first module of ``preprocess``, if it is a Dequantize."""
        first = self.preprocessing[0] if len(self.preprocessing) else None
        return first if isinstance(first, Dequantize) else None

    def _uncalibrated(self) -> Plan:
        """The plan without the step of the calibration."""
        plan = self.plan
        return plan[: len(plan.steps) - len(self._calibrated)]

    def _input(self, x: Tensor, context: Tensor | None, generator: Generator | None) -> tuple[Tensor, Tensor | None]:
        """Checks data, and dequantises them if there is such a step: the input of the plan, and its log-volume."""
        dequantize, x = self.dequantize, self.check(x, context)
        self._plan.refuse()
        return (x, None) if dequantize is None or len(x) == 0 else dequantize.dequantize(x, generator)

    def _rows(self, data: Any, generator: Generator | None) -> Iterator[Rows]:
        """The data in batches: the input of the plan, its context, weights, and the log-volume of a Dequantize."""
        return batches(data, lambda x, context: self._input(x, context, generator), self.like().device)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """:meth:`energy`, so that losses and samplers of other libraries for energy-based models accept the model."""
        return self.energy(x, context)

    def energy(self, x: Tensor, context: Tensor | None = None, *, generator: Generator | None = None) -> Tensor:
        """Computes E(x) = -log p_u(g(x)) - the log-dets of the nonlinear steps (Eq. 9).

        It computes no determinant of a linear step, and does not synchronise with the device.

        Arguments:
            x: Data, with shape ``(B, *)``.
            context: The context of the flow, with ``B`` rows.
            generator: Draws the noise of a :class:`~ebflow_plugin.Dequantize`. Nothing else is random.

        Returns:
            Energies, with shape ``(B,)``.
        """
        x, log_volume = self._input(x, context, generator)
        if len(x) == 0:
            return x.flatten(1).sum(1)
        energy = self._plan.energy(x, context)
        return energy if log_volume is None else energy - log_volume

    def score(self, x: Tensor, context: Tensor | None = None, *, generator: Generator | None = None) -> Tensor:
        """Computes the score, d log p(x) / dx = -dE(x)/dx, with the shape of x.

        It carries a graph if grad mode is on, so that losses of the score can be trained. One forward and one
        backward pass. A generator draws the noise of a :class:`~ebflow_plugin.Dequantize`.
        """
        return score_of(lambda point: self.energy(point, context, generator=generator), self.check(x, context))

    def log_prob(self, x: Tensor, context: Tensor | None = None, *, generator: Generator | None = None) -> Tensor:
        """Computes log p(x) = -E(x) - log Z exactly, with shape ``(B,)``; equal to the flow's own ``log_prob``.

        Without gradients, log Z is computed once and cached: evaluate under ``torch.no_grad()``. A generator draws the
        noise of a :class:`~ebflow_plugin.Dequantize`, so that the value is reproducible.
        """
        energy = self.energy(x, context, generator=generator)
        if len(x) == 0:
            return -energy
        return -energy - self._log_z(tuple(x.shape[1:]), energy)

    def _log_z(self, event_shape: Shape, like: Tensor) -> Tensor:
        """Log Z, of which the expensive part, of the flow behind the preprocessing, is cached."""
        if not self._prefix.steps:
            total = exact_log_z(self._exact, event_shape, like)
        else:
            total = exact_log_z(self._exact, self._prefix.latent_shapes(event_shape)[0], like)
            total = total + self._prefix.log_z(event_shape, like)
        for step in self._calibrated:
            total = total - step.log_abs_det(event_shape)
        return total

    @torch.no_grad()
    def preprocess(self, x: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Applies the fixed steps before the matched variable u, without gradients.

        Returns:
            u, and the log-det of these steps, with shape ``(B,)``: ``log_prob(x) == core.log_prob(u) + log_det``.
        """
        _, u, log_det = self.match(x, None, generator)
        return u, u.new_zeros(len(u)) if log_det is None else log_det

    @torch.no_grad()
    def match(
        self, x: Tensor, context: Tensor | None = None, generator: Generator | None = None
    ) -> tuple[Plan, Tensor, Tensor | None]:
        """Checks and preprocesses a batch, with one look at the flow: the first operation of a loss.

        Returns:
            The plan of the matched variable, this variable, and the log-det of the preprocessing, with shape ``(B,)``,
            or None if there is no preprocessing.
        """
        u, total = self._input(x, context, generator)
        if self._prefix.steps:
            refuse_trainable(self._prefix)
            total = u.new_zeros(len(u)) if total is None else total
            with without_reading():
                total = total - self._prefix.log_z(tuple(u.shape[1:]), u)
            (u,), log_det = self._prefix.encode(u)
            total = total if log_det is None else total + log_det
        return self._core, u, total

    @torch.no_grad()
    def to_data(self, u: Tensor, context: Tensor | None = None) -> Tensor:
        """Maps the matched variable back to data: the inverse of :meth:`preprocess`, but for the noise."""
        x = self.prefix.decode((u,), self._plan.embed(context))
        return x if self.dequantize is None else self.dequantize.quantize(x)

    @property
    def report(self) -> FlowReport:
        """The report of the flow's steps, as from :func:`describe`."""
        plan = self.plan
        return FlowReport.of(plan, self._inside, len(self._prefix.steps), self.dequantize)

    def like(self) -> Tensor:
        """An empty tensor with the device and dtype of the flow."""
        self._follow()
        parameter = self._parameter()
        if parameter is None:
            parameter = next((buffer for buffer in self.flow.buffers() if buffer.is_floating_point()), torch.empty(0))
        return parameter.detach().new_empty(0)

    def _parameter(self) -> Tensor | None:
        """A parameter with the device and dtype of the flow; None if it has none."""
        if self._anchor is None:
            return None
        *owners, name = self._anchor.split(".")
        owner: Any = self.flow
        for part in owners:
            owner = owner._modules[part]  # getattr takes ten times as long
        found: Tensor | None = owner._parameters.get(name)
        return getattr(owner, name, None) if found is None else found

    def check(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Raises on input that the flow cannot take. Returns x; integers for a Dequantize get the dtype of the flow.

        It checks dtypes, devices and shapes, and does not synchronise with the device.
        """
        self._follow()
        x = check_input(x, context, self._event_shape, self._parameter(), integers=self.dequantize is not None)
        if self.check_finite:
            refuse_non_finite("x", x)
            if context is not None:
                refuse_non_finite("context", context)
        return x

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what was built from the flow's modules: a copy builds its own."""
        self.adapter.release(self.flow)
        built = ("_adapter", "_plan", "_core", "_prefix", "_calibrated", "_exact")
        return {name: value for name, value in self.__dict__.items() if name not in built} | {"_watch": None}


def _make_room(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Makes room for the calibration of a state dict, or removes that of the model if there is none in it."""
    assert isinstance(model, PlannedFlow)
    stored, like = {name: state_dict.get(f"{prefix}calibration.{name}") for name in Calibration.names}, model.like()
    model.calibration.set(**{name: None if t is None else like.new_empty(t.shape) for name, t in stored.items()})


class Watch:
    """Detects changes of modules: of their class, members, hooks, and attributes that decide how they act.

    Arguments:
        parts: The modules.
        buffers: A module whose buffers are watched too.
        traced: Whether everything counts that a graph has as a constant: buffers, tensors, numbers with a point, and
            the flag ``training``.

    Example:
        >>> net = nn.Sequential(nn.Tanh())
        >>> watch = Watch([net])
        >>> watch.unchanged()
        True
        >>> net.append(nn.Tanh()) is net, watch.unchanged()
        (True, False)
    """

    def __init__(self, parts: list[Any], buffers: nn.Module | None = None, *, traced: bool = False) -> None:
        self._parts, self._classes = parts, list(map(type, parts))
        self._sized, self._sizes = list[dict[Any, Any]](), list[int]()
        self._held, self._names, self._values = list[dict[Any, Any]](), list[str](), list[Any]()
        for part in parts:
            attributes = vars(part)
            chosen = {name: value for name, value in attributes.items() if _decides(name, value, traced)}
            self._record(attributes, chosen)
            if isinstance(part, nn.Module):
                self._record(part._modules, part._modules)
                self._record(part._forward_hooks, {})
                self._record(part._forward_pre_hooks, {})
                if traced:
                    self._record(part._buffers, part._buffers)
        if buffers is not None:
            self._record(buffers._buffers, buffers._buffers)

    @classmethod
    def of_parameters(cls, model: nn.Module) -> Watch:
        """Watches which parameters the modules of a model hold, not their values."""
        watch = cls([])
        for part in model.modules():
            watch._record(part._parameters, part._parameters)
        return watch

    def _record(self, held: Any, members: Any) -> None:
        self._sized.append(held)
        self._sizes.append(len(held))
        self._held += [held] * len(members)
        self._names += members.keys()
        self._values += members.values()

    def unchanged(self) -> bool:
        """Whether nothing has changed."""
        # No loop of Python's: this runs in each call, over all modules.
        return (
            list(map(type, self._parts)) == self._classes
            and list(map(len, self._sized)) == self._sizes
            and all(map(is_, map(dict.get, self._held, self._names), self._values))
        )


def _decides(name: str, value: Any, traced: bool = False) -> bool:
    """Whether an attribute may decide how a module acts: a string, a flag, a function, an object."""
    if isinstance(value, bool):
        return traced or name != "training"  # read on each call
    if traced and isinstance(value, (Tensor, float)):
        return True
    return not isinstance(value, _READ_EACH_CALL)
