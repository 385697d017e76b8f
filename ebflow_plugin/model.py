"""EBFlow: the energy-based view of a flow."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from ebflow_plugin import calibration, starts
from ebflow_plugin.calibration import Calibration, CalibrationReport, CalibrationStep
from ebflow_plugin.discovery import Found, find_flow
from ebflow_plugin.errors import InputError, suggest
from ebflow_plugin.estimate import Estimate
from ebflow_plugin.inputs import check_input, check_shape, refuse_non_finite
from ebflow_plugin.moments import batches
from ebflow_plugin.normalizer import Normalizer, estimate_log_z
from ebflow_plugin.plan import Plan, Shape
from ebflow_plugin.preprocess import Dequantize, DequantizeStep, boundary, preprocessing_steps
from ebflow_plugin.report import FlowReport
from ebflow_plugin.sampling import draw

__all__ = ["EBFlow", "Options"]


@dataclass(frozen=True)
class Options:
    """What :func:`wrap` was asked for: enough to build the plan of a copy again."""

    match_after: str | int | None = "auto"
    preprocess: tuple[nn.Module, ...] = ()
    overrides: dict[str, str] = field(default_factory=dict)
    check_finite: bool = False
    skipped: int = 0  # how many leading steps a core leaves to its model

    def behind(self, count: int) -> Options:
        """The options of the core that begins behind the first steps."""
        return replace(self, match_after=None, skipped=count)

    def plan(self, found: Found) -> Plan:
        """The plan of a flow, with the preprocessing in front."""
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

    def __init__(self, found: Found, options: Options, calibration: Calibration | None = None) -> None:
        super().__init__()
        self.flow = found.flow
        self.preprocessing = nn.ModuleList(options.preprocess[options.skipped :])
        self.calibration = Calibration() if calibration is None else calibration
        self.training = found.flow.training
        self._inside = found.inside
        self._options = options
        self._seen: tuple[Shape, torch.device, torch.dtype] | None = None
        self._settle(found)
        self.register_load_state_dict_post_hook(_settle_again)

    def _settle(self, found: Found) -> None:
        """Makes what refers to the flow's modules from outside, and is never copied with them."""
        self._adapter = found.adapter
        self._bare = self._options.plan(found)
        self.plan = self._bare
        if self.calibration.ready:
            step = CalibrationStep(self.calibration, self._latent_shapes())
            self.plan = replace(self._bare, steps=(*self._bare.steps, step))
        self._normalizer = Normalizer(self.plan)
        # A hook makes a step unknown, since it may change what the step does: watched like the modules themselves.
        steps = [step.module for step in self._bare.steps if isinstance(step.module, nn.Module)]
        self._hooks = [hooks for module in steps for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._hook_counts = list(map(len, self._hooks))
        self._structure = [
            (part._modules, tuple(part._modules.values())) for part in _arrangement(self._bare, self.flow)
        ]
        # The largest parameter: some are of a dtype of their own (the mixture of normflows, a number inside Residual).
        sizes = {name: p.numel() for name, p in self.flow.named_parameters() if p.is_floating_point()}
        self._anchor_name = max(sizes, key=sizes.__getitem__, default=None)
        count = boundary(self.plan, self._options.match_after)
        self._prefix = replace(self.plan, steps=self.plan.steps[:count])
        core: EBFlow = self
        if count:
            core = EBFlow(found, self._options.behind(count), self.calibration)
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
        if torch._C._functorch.is_functorch_wrapped_tensor(x):  # inside of jvp, vmap and the like
            score: Tensor = -torch.func.grad(lambda point: self.energy(point, context).sum())(x)
            return score
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
            >>> from nflows import distributions, flows
            >>> from ebflow_nflows import FullLinear
            >>> model = ebf.wrap(flows.Flow(FullLinear(8, init="orthogonal"), distributions.StandardNormal([8])))
            >>> estimate = model.log_z(method="lanczos", probes=4)
            >>> bool(abs(estimate - model.log_z()) < 1e-5), estimate.method
            (True, 'lanczos')
        """
        shape = event_shape or self.plan.event_shape or (self._seen and self._seen[0])
        if shape is None:
            raise InputError("log_z needs event_shape: the base density does not tell it, and no data was seen yet")
        return estimate_log_z(self, check_shape("event_shape", shape), method, options)

    @torch.no_grad()
    def sample(
        self,
        n: int,
        context: Tensor | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Draws samples by the inverse of each step, without gradients.

        Factorisations are computed once and kept until a parameter changes, whatever the number of batches.

        Arguments:
            n: How many (for each row of a context).
            context: What to condition on, with ``C`` rows.
            temperature: Scales the latents of a Gaussian base density about their mean; below 1 for samples that are
                more likely and less varied.
            generator: Makes the draw repeatable.
            batch_size: At most how many samples go through the inverse at a time, to bound memory. The samples do not
                depend on it, but for rounding.

        Returns:
            Samples, with shape ``(n, *)``, or ``(C, n, *)`` with a context, as nflows has it.

        Raises:
            NoInverseError: If a step has no inverse; it names the step.
            InputError: If the base density has no temperature.
        """
        self.plan.refuse()
        return draw(self.plan, n, context, generator, self._like(), temperature=temperature, batch_size=batch_size)

    def initialize(
        self, x: Any, context: Tensor | None = None, *, whiten: bool = False, gaussianize: bool = False
    ) -> None:
        """Runs the data-dependent start of the flow on clean data.

        ActNorms are initialised exactly once: those that are initialised already, by an earlier call, by training or
        by a loaded checkpoint, stay as they are. With ``whiten=True`` the first full linear layer becomes the
        whitening map of what reaches it, from which score matching learns in seconds what takes it minutes from the
        paper's start.

        Arguments:
            x: A batch; with ``whiten=True`` all training data, as a tensor, a pair ``(x, context)`` or a loader.
            context: The context of a batch.
            whiten: Whether to whiten. A flow must have a FullLinear or FullConv2d, behind nothing but ActNorms,
                permutations and fixed steps.
            gaussianize: Whether to whiten, by a FullLinear, and then scale and shift each feature so that the
                elementwise nonlinearity behind the layer makes it as Gaussian as it can: :mod:`ebflow_plugin.starts`.
                O(N·D), no gradient; it takes the paper's MNIST model from 1045 to 1009 nats before any training.

        Raises:
            InputError: If no layer can whiten, or no elementwise nonlinearity is behind it.
            SingularError: If the data have no variance in some direction.
        """
        self.plan.refuse()
        if whiten or gaussianize:
            data = batches(x if context is None else (x, context), self._check)
            starts.whiten(self._bare, data, gaussianize)
        else:
            self.plan.initialize(self._check(x, context), context)

    def calibrate(
        self, data: Any, kind: str = "full", *, shrinkage: float | None = None, fold: bool = False
    ) -> CalibrationReport:
        """Fits the base to data in closed form: the affine map behind the flow that makes the latents' moments right.

        It is the maximum-likelihood choice among all affine maps, and is held as one more linear step of this model:
        the flow stays as it is. O(N·D² + D³) for a full covariance, O(N·D) for a diagonal one, in one pass.

        Arguments:
            data: Training data: a tensor, a pair ``(x, context)``, or a loader of either.
            kind: ``"full"`` or ``"diagonal"``.
            shrinkage: How far to move the covariance towards its diagonal, 0 to 1. By default what makes the rows that
                are held out for it (every tenth) most likely.
            fold: Puts the map into the flow's last layer instead, which must be a FullLinear. This edits the flow.

        Returns:
            The NLL of held-out rows before and after. Where calibrating would have made it worse, nothing is done,
            and the report says so.

        Raises:
            InputError: If the base is not a Gaussian with a diagonal covariance.
            SingularError: If the covariance is singular and must not be shrunk.
        """
        if kind not in ("full", "diagonal"):
            raise InputError(f"unknown kind {kind!r}. {suggest(kind, ('full', 'diagonal'))}")
        if shrinkage is not None and not 0.0 <= shrinkage <= 1.0:
            raise InputError(f"shrinkage must lie in [0, 1], got {shrinkage!r}")
        self._bare.refuse()
        tensors, report = calibration.calibrate_plan(
            self._bare, batches(data, self._check), self._like(), kind, shrinkage
        )
        if fold and tensors:
            calibration.fold(tensors, self._bare)
            tensors = {}
        self.calibration.set(**tensors)
        self._settle(find_flow(self.flow))
        return report

    def _latent_shapes(self) -> tuple[Shape, ...]:
        """The event shapes of the latents; one flat vector if nobody tells."""
        if self._bare.base.shapes is not None:
            return self._bare.base.shapes
        mean = self.calibration.mean
        assert mean is not None
        return ((len(mean),),)

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
        boundary(self.plan, len(self._prefix.steps) - 1 if self._prefix.steps else None)  # still without parameters?
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
        """Refuses input that the flow cannot take, in our words. Gives x to go on with."""
        rebuilt = any(tuple(members.values()) != held for members, held in self._structure)
        if rebuilt or list(map(len, self._hooks)) != self._hook_counts:
            self._settle(find_flow(self.flow))  # a transform was swapped, added or taken out, or got a hook
        integers = len(self.preprocessing) > 0 and isinstance(self.preprocessing[0], Dequantize)
        x = check_input(x, context, self.plan.event_shape, self._anchor(), integers)
        if self._options.check_finite:
            refuse_non_finite("x", x)
            if context is not None:
                refuse_non_finite("context", context)
        return x

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what refers to the flow's modules from outside: it is made anew for the copy."""
        self._adapter.release(self.flow)
        left_out = ("plan", "core", "_bare", "_structure", "_hooks", "_prefix", "_normalizer", "_adapter")
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._settle(find_flow(self.flow))


def _arrangement(plan: Plan, flow: nn.Module) -> list[nn.Module]:
    """The modules that hold the steps and the base of a plan: what changes when a flow is rebuilt."""
    owners = {""}
    for part in plan.parts():
        names = part.path.split(".")
        owners.update(".".join(names[:depth]) for depth in range(1, len(names)))
    known = dict(flow.named_modules(remove_duplicate=False))
    return [known[owner] for owner in owners if owner in known]


def _settle_again(model: nn.Module, keys: Any) -> None:
    """After a checkpoint was loaded: it may bring a calibration, from another device or in another dtype, or none."""
    assert isinstance(model, EBFlow)
    like = model._like()
    model.calibration.to(device=like.device, dtype=like.dtype)
    model._settle(find_flow(model.flow))
