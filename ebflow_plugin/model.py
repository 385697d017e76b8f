"""EBFlow: the energy-based view of a flow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log
from typing import Any, Literal, overload

import torch
from torch import Generator, Tensor

from ebflow_plugin.closed_form import calibration, gaussianization, initialization
from ebflow_plugin.closed_form.calibration import CalibrationReport
from ebflow_plugin.closed_form.gaussianization import StartReport
from ebflow_plugin.closed_form.moments import barrier, refuse_one_shot, writable
from ebflow_plugin.errors import InputError
from ebflow_plugin.log_z.estimate import Estimate
from ebflow_plugin.log_z.importance import importance
from ebflow_plugin.log_z.lanczos import lanczos
from ebflow_plugin.options import check_shape, one_of
from ebflow_plugin.plan.inputs import check_weights, in_memory, to_device
from ebflow_plugin.plan.inverse import draw
from ebflow_plugin.plan.step import Shape
from ebflow_plugin.planned import PlannedFlow


class EBFlow(PlannedFlow):
    """An energy-based view of a flow, created by :func:`wrap`.

    It follows the flow: after a layer is replaced, a method patched or a hook added, the next call walks the flow again
    (see :meth:`rebuild`).

    Attributes:
        flow: The user's own flow, the same object.
        preprocessing: The modules of the ``preprocess`` argument of :func:`wrap`.
        calibration: The affine map after the flow, which :meth:`calibrate` fits.
    """

    @overload
    def log_z(self, event_shape: Shape | None = None, method: Literal["exact"] = "exact") -> Tensor: ...

    @overload
    def log_z(
        self, event_shape: Shape | None = None, *, method: Literal["lanczos", "importance"], **options: Any
    ) -> Estimate: ...

    def log_z(self, event_shape: Shape | None = None, method: str = "exact", **options: Any) -> Tensor | Estimate:
        r"""Computes log Z = -sum of the linear steps' log|det| (Eq. 9).

        - ``"exact"``: a scalar tensor, in O(D^3) for a dense layer, once. It is cached until a parameter of a linear
          step changes; with grad mode on and trainable linear layers it is computed on each call, with its graph.
        - ``"lanczos"``: an :class:`~ebflow_plugin.Estimate` from products with each large layer, in O(D) memory, for
          layers that are too large to factorise (:func:`~ebflow_plugin.log_z.lanczos.lanczos`).
        - ``"importance"``: an :class:`~ebflow_plugin.Estimate` from energies of samples of a proposal, independent of
          any determinant (:func:`~ebflow_plugin.log_z.importance.importance`).

        Arguments:
            event_shape: The shape of one data point; by default the one that follows from the base density.
            method: The method.
            options: Arguments of the function of an estimate: ``generator``, ``samples``, ``probes``, …; a ``proposal``
                that is a tensor is data.

        Example:
            >>> import ebflow_plugin as ebf
            >>> from nflows import distributions, flows, transforms
            >>> model = ebf.wrap(flows.Flow(transforms.LULinear(8), distributions.StandardNormal([8])))
            >>> bool(model.log_z().abs() < 1e-5), model.log_z(method="importance", samples=100).reliable
            (True, True)
        """
        shape = event_shape or self.plan.event_shape
        if shape is None:
            raise InputError("log_z needs event_shape, the shape of a data point: the base density does not define it")
        shape, like = check_shape("event_shape", shape), self.like()
        if isinstance(options.get("proposal"), Tensor):
            options["proposal"] = self.preprocess(options["proposal"], options.get("generator"))[0]
        methods: dict[str, Callable[..., Tensor | Estimate]] = {
            "exact": lambda: self._log_z(shape, like),
            "lanczos": partial(lanczos, self._plan, shape, like),
            "importance": partial(importance, self._prefix, self._core, shape, like),
        }
        return methods[one_of("method", method, methods)](**options)

    @torch.no_grad()
    def sample(
        self,
        n: int | Shape,
        context: Tensor | None = None,
        *,
        temperature: float = 1.0,
        generator: Generator | None = None,
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
        drawn = draw(plan, n, context, generator, self.like(), temperature=temperature, batch_size=batch_size)
        return drawn if self.dequantize is None else self.dequantize.quantize(drawn)

    def initialize(
        self,
        x: Any,
        context: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        whiten: bool = False,
        gaussianize: bool = False,
        generator: Generator | None = None,
        progress: bool = False,
    ) -> StartReport | None:
        """Runs the data-dependent start of the flow, on data without added noise.

        ActNorms are initialised exactly once: those that are initialised already, by an earlier call, by training or
        by a loaded checkpoint, do not change. Under ``torchrun``, with ``whiten=True`` or ``gaussianize=True``, all
        processes must call it together, each with its own part of the data: the moments are those of all data. A
        process that calls it alone raises an error after two minutes.

        Arguments:
            x: A batch. To whiten or Gaussianise, all training data: a tensor, a tuple ``(x, context)`` or ``(x,
                context, weights)``, or a loader of these, which must not shuffle, so that the same rows are held out
                in each pass. They may be on any device.
            context: The context of a batch.
            weights: The weights of its rows, ``(B,)``: at least 0, of any scale.
            whiten: Whether the first FullLinear or FullConv2d becomes the whitening map of its input: for a kernel of
                k × k pixels, the most likely one (:mod:`~ebflow_plugin.closed_form.kernels`). Only ActNorms,
                permutations and fixed steps may precede it. If only linear steps and a Gaussian base follow, it is
                fitted to that base; otherwise it scales the data for training, which may first make them less likely.
            gaussianize: Whether each FullLinear or FullConv2d of a chain becomes such a map, and the elementwise
                nonlinearities between them make the features Gaussian: a fit in closed form
                (:mod:`~ebflow_plugin.closed_form.gaussianization`) to a diagonal Gaussian base. If it would make
                held-out rows less likely, the model stays as it was. It takes a pass over the data per layer, and two
                to judge it, O(N·D² + D³). For a tensor, the activations are cached, in O(N·D) memory; a loader is
                iterated again, in O(D²) memory. Frozen layers are initialised too, and a calibration is removed.
            generator: Draws the noise of a :class:`~ebflow_plugin.Dequantize`.
            progress: Shows a progress bar for ``gaussianize=True``.

        Returns:
            For ``gaussianize=True``, the held-out NLL before, and after each layer; else None.

        Raises:
            InputError, SingularError: If no layer can whiten, the data cannot be whitened or iterated again, or
                ``gaussianize=True``, which then changes nothing, finds another base.
        """
        plan = self._uncalibrated()
        plan.refuse()
        data = x if context is None and weights is None else (x, context, weights)
        with writable(self._parameter()):
            if not (whiten or gaussianize):
                x, context, weights = to_device((x, context, weights), self.like().device)
                if weights is not None:
                    check_weights(weights, x)
                    x, context = initialization.resampled(x, context, weights)
                plan.initialize(self._input(x, context, generator)[0], context)
                return None
            if gaussianize:
                refuse_one_shot(data)
            barrier(f"model.initialize({'gaussianize' if gaussianize else 'whiten'}=True)")
            keep = gaussianize and in_memory(data) is not None
            passes = initialization.Passes(plan, lambda: self._rows(data, generator), keep)
            report = None
            if gaussianize:
                report = gaussianization.gaussianize(passes, self.flow, self._calibrated, progress)
            else:
                initialization.whiten(passes)
            if report is None or report.kept:
                self.calibration.set()  # it belongs to the old weights
        return report

    def calibrate(
        self,
        data: Any,
        kind: str = "full",
        *,
        generator: Generator | None = None,
    ) -> CalibrationReport:
        """Fits the base to data in closed form: an affine map after the flow, matched to the moments of the latents.

        It is the maximum-likelihood choice among all affine maps, and is held as one more linear step of this model:
        the flow is not changed. O(N·D² + D³) for a full covariance, O(N·D) for a diagonal one, in one pass. Under
        ``torchrun`` all processes must call it together, each with its own part of the data: the fit is to all data.
        Each holds out every tenth of its own rows, so other parts mean other held-out rows, and a report that differs
        by their sampling error. A process that calls it alone raises an error after two minutes.

        Arguments:
            data: Training data: a tensor, a tuple ``(x, context)`` or ``(x, context, weights)``, or a loader of
                these, on any device. A context may be None. Weights are at least 0, of any scale.
            kind: ``"full"`` or ``"diagonal"``.
            generator: Draws the noise of a :class:`~ebflow_plugin.Dequantize`.

        Returns:
            The held-out NLL before and after. If the fit would make it worse, the model is not calibrated.

        Raises:
            InputError: If the base is not a Gaussian with a diagonal covariance.
            SingularError: If the covariance is singular.
        """
        one_of("kind", kind, ("full", "diagonal"))
        plan = self._uncalibrated()
        plan.refuse()
        barrier("model.calibrate()")
        with writable(self._parameter()):
            tensors, report = calibration.calibrate_plan(plan, self._rows(data, generator), self.like(), kind)
            self.calibration.set(**tensors)
        return report

    def bits_per_dim(self, x: Tensor, context: Tensor | None = None, *, generator: Generator | None = None) -> Tensor:
        """Computes -log2 p(x) / D, with shape ``(B,)``: bits per dimension, in the units of x.

        With a :class:`~ebflow_plugin.Dequantize` in front, x are integers, and the mean over the noise is an upper
        bound on the bits of the integers. A generator makes the noise reproducible.
        """
        log_prob = self.log_prob(x, context, generator=generator)
        return -log_prob / (max(1, x[:1].numel()) * log(2.0))
