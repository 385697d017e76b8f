"""EBFlow: the energy-based view of a flow."""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor, nn

from ebflow_plugin.adapting.adapter import Adapter
from ebflow_plugin.adapting.discovery import Found, find_flow
from ebflow_plugin.adapting.walk import Options, Walked, walk
from ebflow_plugin.closed_form import calibration, gaussianization, initialization
from ebflow_plugin.closed_form.calibration import Calibration, CalibrationReport, CalibrationStep
from ebflow_plugin.closed_form.gaussianization import StartReport
from ebflow_plugin.closed_form.moments import batches, in_memory, meet, refuse_one_shot
from ebflow_plugin.errors import InputError
from ebflow_plugin.log_z.estimate import Estimate
from ebflow_plugin.log_z.exact import Normalizer
from ebflow_plugin.log_z.methods import estimate_log_z
from ebflow_plugin.plan.energy_model import EnergyModel
from ebflow_plugin.plan.inputs import check_shape, is_number, one_of
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import Shape
from ebflow_plugin.report import FlowReport
from ebflow_plugin.sampling.inverse import draw

__all__ = ["EBFlow"]


class EBFlow(EnergyModel):
    """An energy-based view of a flow, created by :func:`wrap`.

    It follows the flow: after a layer is replaced, a method patched or a hook added, the next call walks the flow again
    (see :meth:`rebuild`).

    Attributes:
        flow: The user's own flow, the same object.
        preprocessing: The modules of the ``preprocess`` argument of :func:`wrap`.
        calibration: The affine map after the flow, which :meth:`calibrate` fits.
        options: The arguments of :func:`wrap`.
    """

    def __init__(
        self, found: Found, options: Options, calibration: Calibration | None = None, whole: EBFlow | None = None
    ) -> None:
        super().__init__()
        self.flow = found.flow
        self.preprocessing = nn.ModuleList(options.preprocess)
        self.calibration = Calibration() if calibration is None else calibration
        self.training = found.flow.training
        self._inside = found.inside
        self.options = options
        self._seen: tuple[Shape, torch.device, torch.dtype] | None = None
        # In lists, so that they are no submodules: a core and its model share parameters, which are not listed twice.
        self._whole = [] if whole is None else [whole]
        self._cores: list[EBFlow] = []
        self._last: Walked | None = None
        self._kept: tuple[Normalizer, ...] = ()
        if whole is None:
            self._last = walk(found, options, self.calibration, self._calibrating)
        self.register_load_state_dict_post_hook(_move_calibration)

    def rebuild(self) -> None:
        """Walks the flow again.

        This happens automatically after a module of the flow is replaced, added, removed, hooked or patched. Call it
        after changes that cannot be detected: after registering a class, or editing a plain list inside a module of
        your own.
        """
        if self._whole:
            self._whole[0].rebuild()
        else:
            self._last = walk(find_flow(self.flow), self.options, self.calibration, self._calibrating)

    def _walked(self) -> Walked:
        """The result of walking the current flow. Every method calls this once."""
        if self._whole:
            return self._whole[0]._walked().core
        if self._last is None or not self._last.is_current():
            self.rebuild()
        assert self._last is not None
        return self._last

    @property
    def plan(self) -> Plan:
        """The steps from data to noise, and the base."""
        return self._walked().plan

    @property
    def core(self) -> EBFlow:
        """The energy-based flow of the matched variable, which objectives train, with the same parameters.

        Without preprocessing, this is the model itself.
        """
        return self._core_of(self._walked())

    def _core_of(self, walked: Walked) -> EBFlow:
        if walked.start == 0:
            return self
        if not self._cores:
            after = Options(None, self.options.preprocess[walked.start :], check_finite=self.options.check_finite)
            found = Found(self.flow, walked.adapter, self._inside)
            self._cores.append(EBFlow(found, after, self.calibration, whole=self))
        return self._cores[0]

    @property
    def core_plan(self) -> Plan:
        """The steps from the matched variable to noise, and the base: the plan of :attr:`core`."""
        return self._walked().core.plan

    @property
    def adapter(self) -> Adapter:
        """The adapter of the flow's library."""
        return self._walked().adapter

    @property
    def prefix(self) -> Plan:
        """The fixed steps before the matched variable, which :meth:`preprocess` applies."""
        return self._walked().prefix

    def normalizer(self, plan: Plan) -> Normalizer:
        """The cache of log Z for a plan of this model."""
        for kept in self._kept:
            if kept.plan is plan:
                return kept
        made = Normalizer(plan)
        self._kept = (made, *self._kept[:1])  # two: the plan of the data, and that of the matched variable
        return made

    def _calibrating(self, bare: Plan) -> tuple[CalibrationStep, ...]:
        """The step of the calibration, after those of the flow, if the model is calibrated."""
        if self.calibration.mean is None:
            return ()
        shapes = bare.base.shapes or ((len(self.calibration.mean),),)  # one flat vector if the shapes are unknown
        return (CalibrationStep(self.calibration, shapes),)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """:meth:`energy`, so that losses and samplers of other libraries for energy-based models accept the model."""
        return self.energy(x, context)

    def energy(self, x: Tensor, context: Tensor | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Computes E(x) = -log p_u(g(x)) - the log-dets of the nonlinear steps (Eq. 9).

        It computes no determinant of a linear step, and does not synchronise with the device.

        Arguments:
            x: Data, with shape ``(B, *)``.
            context: The context of the flow, with ``B`` rows.
            generator: Draws the noise of a :class:`~ebflow_plugin.Dequantize`. Nothing else is random.

        Returns:
            Energies, with shape ``(B,)``.
        """
        walked = self._walked()
        x = walked.check(x, context)
        self._seen = tuple(x.shape[1:]), x.device, x.dtype
        return walked.energy(x, context, generator)

    def score(self, x: Tensor, context: Tensor | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Computes the score, d log p(x) / dx = -dE(x)/dx, with the shape of x.

        It carries a graph if grad mode is on, so that losses of the score can be trained. One forward and one
        backward pass. A generator draws the noise of a :class:`~ebflow_plugin.Dequantize`.
        """
        x = self.check(x, context)
        if torch._C._functorch.peek_interpreter_stack() is not None:  # inside a transform of torch.func
            score: Tensor = -torch.func.grad(lambda point: self.energy(point, context, generator=generator).sum())(x)
            return score
        differentiable = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            if not (differentiable and x.requires_grad):
                x = (x.clone() if x.is_inference() else x).detach().requires_grad_()
            energy = self.energy(x, context, generator=generator).sum()
            if not energy.requires_grad:  # a uniform base density, and only linear steps
                return torch.zeros_like(x)
            (gradient,) = torch.autograd.grad(
                energy, x, create_graph=differentiable, allow_unused=True, materialize_grads=True
            )
        return -gradient

    def log_prob(self, x: Tensor, context: Tensor | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Computes log p(x) = -E(x) - log Z exactly, with shape ``(B,)``; equal to the flow's own ``log_prob``.

        Without gradients, log Z is computed once and cached: evaluate under ``torch.no_grad()``. A generator draws the
        noise of a :class:`~ebflow_plugin.Dequantize`, so that the value is reproducible.
        """
        walked = self._walked()
        x = walked.check(x, context)
        self._seen = tuple(x.shape[1:]), x.device, x.dtype
        energy = walked.energy(x, context, generator)
        if x.shape[0] == 0:
            return -energy
        return -energy - self.normalizer(walked.plan).log_z(tuple(x.shape[1:]), energy)

    def log_z(self, event_shape: Shape | None = None, method: str = "exact", **options: Any) -> Estimate:
        r"""Computes log Z = -sum of the linear steps' log|det| (Eq. 9), a scalar with a standard error.

        - ``"exact"``: O(D^3) for a dense layer, once. It is cached until a parameter of a linear step changes; with
          grad mode on and trainable linear layers it is computed on each call, with its graph.
        - ``"lanczos"``: from ``2 · probes · iterations`` products with each large layer, in O(D) memory
          (``probes=16, iterations=40``).
        - ``"importance"``: from ``samples=1000`` energies (Eqs. A5 and A6).
        - ``"ais"``: by annealing, from ``steps · chains · leapfrogs`` gradients (100, 100 and 3; ``step_size=``).
        - ``"auto"``: exact if no layer needs more than 1e12 multiplications or 2 GB, else by Lanczos, with its options.

        Estimates take ``generator`` and ``progress``; they have no graph, and are not cached. The sampled ones also
        take ``batch_size``; ``context``, one row, since log Z is the same for all; and ``proposal``: data, to which a
        Gaussian is fitted, or, for ``importance``, anything with ``sample`` and ``log_prob`` over the matched variable.
        By default the proposal is N(0, I).

        Arguments:
            event_shape: The shape of one data point. By default that of the base density, or of the last data that the
                model was called on.
            method: The method.
            options: Options of the method.

        Returns:
            A scalar tensor with ``.std_error``, ``.method`` and, for the sampled ones, ``.effective_sample_size``.

        Example:
            >>> import ebflow_plugin as ebf
            >>> from nflows import distributions, flows, transforms
            >>> model = ebf.wrap(flows.Flow(transforms.LULinear(8), distributions.StandardNormal([8])))
            >>> bool(abs(model.log_z(method="lanczos", probes=4) - model.log_z()) < 1e-2)
            True
        """
        plan = self.plan
        shape = event_shape or plan.event_shape or (self._seen and self._seen[0])
        if shape is None:
            raise InputError("log_z needs event_shape: the base density does not define it, and there were no data yet")
        return estimate_log_z(self, self.normalizer(plan), check_shape("event_shape", shape), method, options)

    @torch.no_grad()
    def sample(
        self,
        n: int | Shape,
        context: Tensor | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Draws samples by the inverse of each step, without gradients.

        Factorisations are computed once and cached until a parameter changes, whatever the number of batches.

        Arguments:
            n: The number of samples (for each row of a context), or a shape of them.
            context: The context, with ``C`` rows.
            temperature: Scales the latents of a Gaussian base density about their mean: likelier samples below 1.
            generator: Makes the samples reproducible.
            batch_size: The largest number of samples to invert at a time. The samples depend on it only by rounding.

        Returns:
            Samples, with shape ``(n, *)``, or ``(C, n, *)`` with a context, as in nflows; ``(3, 4, *)`` for a shape
            of ``(3, 4)``.

        Raises:
            NoInverseError: If a step has no inverse; the message names the step.
            InputError: If the base density has no temperature.
        """
        plan = self.plan
        plan.refuse()
        return draw(plan, n, context, generator, self.like(), temperature=temperature, batch_size=batch_size)

    def initialize(
        self,
        x: Any,
        context: Tensor | None = None,
        *,
        whiten: bool = False,
        gaussianize: bool = False,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> StartReport | None:
        """Runs the data-dependent start of the flow, on data without added noise.

        ActNorms are initialised exactly once: those that are initialised already, by an earlier call, by training or
        by a loaded checkpoint, do not change. Under ``torchrun``, with ``whiten=True`` or ``gaussianize=True``, all
        processes must call it together, each with its own part of the data: the moments are those of all data. A
        process that calls it alone raises an error after two minutes.

        Arguments:
            x: A batch. To whiten or Gaussianise, all training data: a tensor, a pair ``(x, context)`` or a loader,
                which must not shuffle, so that the same rows are held out in each pass.
            context: The context of a batch.
            whiten: Whether the first FullLinear or FullConv2d becomes the whitening map of its input. Only ActNorms,
                permutations and fixed steps may precede it.
            gaussianize: Whether each FullLinear of a chain becomes a whitening map, and the elementwise nonlinearities
                between them make the features Gaussian: a fit in closed form
                (:mod:`~ebflow_plugin.closed_form.gaussianization`). No layer makes held-out rows less likely. It takes
                one pass over the data per layer, O(N·D² + D³). For a tensor, the activations are cached, in O(N·D)
                memory; a loader is iterated again, in O(D²) memory. Frozen layers are initialised too, and an existing
                calibration is removed.
            generator: Draws the noise of a :class:`~ebflow_plugin.Dequantize`.
            progress: Shows a progress bar for ``gaussianize=True``.

        Returns:
            For ``gaussianize=True``, the held-out NLL after each layer; else None.

        Raises:
            InputError, SingularError: If no layer can whiten, or the data cannot be whitened or iterated again.
        """
        walked = self._walked()
        walked.plan.refuse()
        plan = walked.drawing(generator)
        data = x if context is None else (x, context)
        if gaussianize:
            refuse_one_shot(data)
            meet("model.initialize(gaussianize=True)")
            report = gaussianization.gaussianize(plan, lambda: batches(data, self.check), in_memory(data), progress)
            self.calibration.set()  # it belongs to the old weights
            return report
        if whiten:
            meet("model.initialize(whiten=True)")
            initialization.whiten(plan, batches(data, self.check))
            self.calibration.set()
        else:
            plan.initialize(self.check(x, context), context)
        return None

    def calibrate(
        self,
        data: Any,
        kind: str = "full",
        *,
        shrinkage: float | None = None,
        fold: bool = False,
        generator: torch.Generator | None = None,
    ) -> CalibrationReport:
        """Fits the base to data in closed form: an affine map after the flow, matched to the moments of the latents.

        It is the maximum-likelihood choice among all affine maps, and is held as one more linear step of this model:
        the flow is not changed. O(N·D² + D³) for a full covariance, O(N·D) for a diagonal one, in one pass. Under
        ``torchrun`` all processes must call it together, each with its own part of the data: the fit is to all data.
        A process that calls it alone raises an error after two minutes.

        Arguments:
            data: Training data: a tensor, a pair ``(x, context)``, or a loader of either.
            kind: ``"full"`` or ``"diagonal"``.
            shrinkage: How far to shrink the covariance towards its diagonal, 0 to 1. By default the value with the
                lowest NLL of every tenth row, which is held out.
            fold: Folds the map into the flow's last layer, a FullLinear that shares its parameters with no other part.
            generator: Draws the noise of a :class:`~ebflow_plugin.Dequantize`.

        Returns:
            The held-out NLL before and after. If the fit would make it worse, the model is not calibrated.

        Raises:
            InputError: If the base is not a Gaussian with a diagonal covariance, or the map cannot be folded.
            SingularError: If the covariance is singular, and ``shrinkage`` does not make it regular.
        """
        one_of("kind", kind, ("full", "diagonal"))
        if shrinkage is not None and not (is_number(shrinkage) and 0.0 <= shrinkage <= 1.0):
            raise InputError(f"shrinkage must lie in [0, 1], got {shrinkage!r}")
        bare = self._walked().drawing(generator)
        bare.refuse()
        layer = calibration.last_layer(bare).module if fold else None
        meet("model.calibrate()")
        tensors, report = calibration.calibrate_plan(bare, batches(data, self.check), self.like(), kind, shrinkage)
        if layer is not None and tensors:
            calibration.fold(tensors, layer)
            tensors = {}
        self.calibration.set(**tensors)
        return report

    @torch.no_grad()
    def preprocess(self, x: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Applies the fixed steps before the matched variable u, without gradients.

        Returns:
            u, and the log-det of these steps, with shape ``(B,)``: ``log_prob(x) == core.log_prob(u) + log_det``.
        """
        walked = self._walked()
        return walked.to_matched(walked.check(x, None), generator)

    @torch.no_grad()
    def match(
        self, x: Tensor, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Plan, Tensor, Tensor]:
        """Checks and preprocesses a batch, with one walk of the flow: the first operation of a loss.

        Returns:
            The plan of the matched variable, this variable, and the log-det of the preprocessing with shape ``(B,)``.
        """
        walked = self._walked()
        u, log_det = walked.to_matched(walked.check(x, context), generator)
        core = self if walked.start == 0 else self._core_of(walked)
        core._seen = tuple(u.shape[1:]), u.device, u.dtype
        return walked.core.plan, u, log_det

    def bits_per_dim(
        self, x: Tensor, context: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Computes -log2 p(x) / D, with shape ``(B,)``: bits per dimension, in the units of x.

        With a :class:`~ebflow_plugin.Dequantize` in front, x are integers, and the mean over the noise is an upper
        bound on the bits of the integers. A generator makes the noise reproducible.
        """
        log_prob = self.log_prob(x, context, generator=generator)
        return -log_prob / (max(1, x[:1].numel()) * log(2.0))

    @property
    def report(self) -> FlowReport:
        """The report of the flow's steps, as from :func:`describe`."""
        walked = self._walked()
        return FlowReport.of(walked.plan, self._inside, walked.start)

    def like(self) -> Tensor:
        """An empty tensor with the device and dtype of the flow, or of the data if the flow has no parameters."""
        anchor = self._walked().like()
        if anchor is not None:
            return anchor.detach().new_empty(0)
        if self._seen is not None:
            return torch.empty(0, device=self._seen[1], dtype=self._seen[2])
        buffer = next((buffer for buffer in self.flow.buffers() if buffer.is_floating_point()), torch.empty(0))
        return buffer.new_empty(0)

    def check(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Raises on input that the flow cannot take. Returns x; integers for a Dequantize get the dtype of the flow.

        It checks dtypes, devices and shapes, and does not synchronise with the device.
        """
        return self._walked().check(x, context)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out caches that refer to the flow's modules: a copy builds its own."""
        self.adapter.release(self.flow)
        return {**self.__dict__, "_last": None, "_kept": (), "_cores": []}


def _move_calibration(model: nn.Module, keys: Any) -> None:
    """Moves a loaded calibration to the device and dtype of the model."""
    assert isinstance(model, EBFlow)
    like = model.like()
    model.calibration.to(device=like.device, dtype=like.dtype)
