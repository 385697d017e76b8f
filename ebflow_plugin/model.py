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
    """An energy-based view of a flow, made by :func:`wrap`.

    It follows the flow: where a layer was replaced, a method patched or a hook added, the next call walks the flow
    again (see :meth:`rebuild`).

    Attributes:
        flow: The user's own flow, the same object.
        preprocessing: The modules that :func:`wrap` put in front of it.
        calibration: The affine map after it, which :meth:`calibrate` fits.
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
        # In lists, past nn.Module: a core and its model have the same parameters, which are not listed twice.
        self._whole = [] if whole is None else [whole]
        self._cores: list[EBFlow] = []
        self._last: Walked | None = None
        self._kept: Normalizer | None = None
        if whole is None:
            self._last = walk(found, options, self.calibration, self._calibrating)
        self.register_load_state_dict_post_hook(_move_calibration)

    def rebuild(self) -> None:
        """Walks the flow again.

        A model does so by itself after a module of the flow was replaced, added, removed, hooked or patched. Call it
        where that cannot be noticed: after a class was registered, or a plain list inside of a module of your own
        was edited.
        """
        if self._whole:
            self._whole[0].rebuild()
        else:
            self._last = walk(find_flow(self.flow), self.options, self.calibration, self._calibrating)

    def _walked(self) -> Walked:
        """The flow as it is now: every method goes through here, once."""
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

        The model itself where there is no preprocessing.
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
        """What knows the flow's library."""
        return self._walked().adapter

    @property
    def prefix(self) -> Plan:
        """The fixed steps before the matched variable; :meth:`preprocess` takes them."""
        return self._walked().prefix

    def normalizer(self, plan: Plan) -> Normalizer:
        """What keeps log Z of a plan of this model, for as long as the flow stays what it is."""
        kept = self._kept
        if kept is None or kept.plan is not plan:
            kept = self._kept = Normalizer(plan)
        return kept

    def _calibrating(self, bare: Plan) -> tuple[CalibrationStep, ...]:
        """The step after those of the flow, once the model is calibrated."""
        if self.calibration.mean is None:
            return ()
        shapes = bare.base.shapes or ((len(self.calibration.mean),),)  # one flat vector if nobody tells
        return (CalibrationStep(self.calibration, shapes),)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """:meth:`energy`, so that any library's losses and samplers for energy-based models take the model."""
        return self.energy(x, context)

    def energy(self, x: Tensor, context: Tensor | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Computes E(x) = -log p_u(g(x)) - the log-dets of the nonlinear steps (Eq. 9).

        No determinant of a linear step is computed, and nothing waits for the device.

        Arguments:
            x: Data, with shape ``(B, *)``.
            context: What the flow is conditioned on, with ``B`` rows.
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
        if torch._C._functorch.peek_interpreter_stack() is not None:  # inside of grad, jvp, vmap and the like
            score: Tensor = -torch.func.grad(lambda point: self.energy(point, context, generator=generator).sum())(x)
            return score
        differentiable = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            if not (differentiable and x.requires_grad):
                x = (x.clone() if x.is_inference() else x).detach().requires_grad_()
            energy = self.energy(x, context, generator=generator).sum()
            if not energy.requires_grad:  # a flat base density, and linear steps alone
                return torch.zeros_like(x)
            (gradient,) = torch.autograd.grad(
                energy, x, create_graph=differentiable, allow_unused=True, materialize_grads=True
            )
        return -gradient

    def log_prob(self, x: Tensor, context: Tensor | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Computes log p(x) = -E(x) - log Z exactly, with shape ``(B,)``; equal to the flow's own ``log_prob``.

        log Z is computed once and kept while no gradient is asked for: evaluate under ``torch.no_grad()``. A generator
        draws the noise of a :class:`~ebflow_plugin.Dequantize`, so that the value is repeatable.
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

        - ``"exact"``: O(D^3) for a dense layer, once. It is kept until a parameter of a linear step changes; with grad
          mode on and trainable linear layers it is computed anew, with its graph.
        - ``"lanczos"``: from ``2 · probes · iterations`` products with each large layer, in O(D) memory
          (``probes=16, iterations=40``).
        - ``"importance"``: from ``samples=1000`` energies (Eqs. A5 and A6).
        - ``"ais"``: annealed, from ``steps · chains · leapfrogs`` gradients (100, 100 and 3; ``step_size=``).
        - ``"auto"``: exact while no layer takes more than 1e12 multiplications or 2 GB, else by Lanczos, with its
          options.

        Estimates take ``generator`` and ``progress``; they have no graph, and are not kept. The sampled ones take
        ``batch_size``; ``context``, one row, since log Z is the same for all; and ``proposal``: data, to which a
        Gaussian is fitted, or, for ``importance``, anything with ``sample`` and ``log_prob`` over the matched variable.
        By default it is N(0, I).

        Arguments:
            event_shape: The shape of one data point. By default what the base density tells, or the data that the
                model saw last.
            method: How to compute it.
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
            raise InputError("log_z needs event_shape: the base density does not tell it, and no data was seen yet")
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

        Factorisations are computed once and kept until a parameter changes, whatever the number of batches.

        Arguments:
            n: How many (for each row of a context), or a shape of them.
            context: What to condition on, with ``C`` rows.
            temperature: Scales the latents of a Gaussian base density about their mean: likelier samples below 1.
            generator: Makes the draw repeatable.
            batch_size: At most how many samples go through the inverse at a time; they depend on it by rounding alone.

        Returns:
            Samples, with shape ``(n, *)``, or ``(C, n, *)`` with a context, as nflows has it; ``(3, 4, *)`` for a
            shape of ``(3, 4)``.

        Raises:
            NoInverseError: If a step has no inverse; it names the step.
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
        """Runs the data-dependent start of the flow on clean data.

        ActNorms are initialised exactly once: those that are initialised already, by an earlier call, by training or
        by a loaded checkpoint, stay as they are. Under ``torchrun``, with ``whiten=True`` or ``gaussianize=True``, all
        processes must call it together, each with its own part of the data: the moments are those of all. One that
        calls alone gets an error after two minutes.

        Arguments:
            x: A batch; to whiten all training data, as a tensor, a pair ``(x, context)`` or a loader, which must not
                shuffle: the same rows are held out in each pass.
            context: The context of a batch.
            whiten: Whether the first FullLinear or FullConv2d becomes the whitening map of what reaches it, after
                nothing but ActNorms, permutations and fixed steps.
            gaussianize: Whether each of a chain of FullLinear does, and the elementwise nonlinearities between them
                make the features Gaussian: a fit in closed form (:mod:`~ebflow_plugin.closed_form.gaussianization`).
                No layer makes rows that are held out less likely. A pass over the data a layer, O(N·D² + D³); a tensor
                is kept as far as it came, in O(N·D) memory, a loader is gone through again, in O(D²). Frozen layers
                start too, and a calibration of the weights before is dropped.
            generator: Draws the noise of a :class:`~ebflow_plugin.Dequantize`.
            progress: Shows a bar for ``gaussianize=True``.

        Returns how far each layer of a Gaussianising start came.

        Raises:
            InputError, SingularError: If no layer can whiten, or the data cannot be whitened or gone through again.
        """
        walked = self._walked()
        walked.plan.refuse()
        plan = walked.drawing(generator)
        data = x if context is None else (x, context)
        if gaussianize:
            refuse_one_shot(data)
            meet("model.initialize(gaussianize=True)")
            report = gaussianization.gaussianize(plan, lambda: batches(data, self.check), in_memory(data), progress)
            self.calibration.set()  # of the weights before
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
        """Fits the base to data in closed form: the affine map after the flow that makes the latents' moments right.

        It is the maximum-likelihood choice among all affine maps, and is held as one more linear step of this model:
        the flow stays as it is. O(N·D² + D³) for a full covariance, O(N·D) for a diagonal one, in one pass. Under
        ``torchrun`` all processes must call it together, each with its own part of the data: the fit is that of
        all. One that calls alone gets an error after two minutes.

        Arguments:
            data: Training data: a tensor, a pair ``(x, context)``, or a loader of either.
            kind: ``"full"`` or ``"diagonal"``.
            shrinkage: How far to move the covariance towards its diagonal, 0 to 1. By default what every tenth row,
                which is held out for it, likes best.
            fold: Edits the flow's last layer instead, a FullLinear that shares its numbers with nothing else.
            generator: Draws the noise of a :class:`~ebflow_plugin.Dequantize`.

        Returns:
            The NLL of held-out rows before and after. Where it would have become worse, nothing is done.

        Raises:
            InputError: If the base is not a Gaussian with a diagonal covariance, or the last layer cannot take the map.
            SingularError: If the covariance is singular and must not be shrunk.
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
        """Takes the fixed steps in front of the matched variable u, without gradients.

        Returns u and the log-det of the way to it, with shape ``(B,)``: ``log_prob(x) == core.log_prob(u) + log_det``.
        """
        walked = self._walked()
        return walked.to_matched(walked.check(x, None), generator)

    @torch.no_grad()
    def match(
        self, x: Tensor, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Plan, Tensor, Tensor]:
        """What a loss begins with: checks a batch, and takes it through :meth:`preprocess`. Once is enough.

        Returns:
            The plan of the matched variable, this variable, and the log-det of the way to it with shape ``(B,)``.
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

        With a :class:`~ebflow_plugin.Dequantize` in front, x are integers, and this is an upper bound (in the
        mean over the noise, which a generator makes repeatable) on the bits that the integers cost.
        """
        log_prob = self.log_prob(x, context, generator=generator)
        return -log_prob / (max(1, x[:1].numel()) * log(2.0))

    @property
    def report(self) -> FlowReport:
        """What was found in the flow, as :func:`describe` reports it."""
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
        """Refuses input that the flow cannot take. Returns x; integers for a Dequantize get the dtype of the flow.

        Flags and shapes alone are looked at, so that nothing waits for the device.
        """
        return self._walked().check(x, context)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what refers to the flow's modules from outside: it is made anew for the copy."""
        self.adapter.release(self.flow)
        return {**self.__dict__, "_last": None, "_kept": None, "_cores": []}


def _move_calibration(model: nn.Module, keys: Any) -> None:
    """After a checkpoint was loaded: it may bring a calibration from another device or in another dtype."""
    assert isinstance(model, EBFlow)
    like = model.like()
    model.calibration.to(device=like.device, dtype=like.dtype)
