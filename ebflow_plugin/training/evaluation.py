"""The exact NLL of data: what tells whether a model is getting better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from ebflow_plugin.closed_form.calibration import Calibration, CalibrationStep
from ebflow_plugin.log_z.exact import Normalizer
from ebflow_plugin.model import EBFlow
from ebflow_plugin.plan.values import per_sample
from ebflow_plugin.training.batches import Batches, LoaderBatches
from ebflow_plugin.training.distributed import Processes
from ebflow_plugin.training.randomness import mix

__all__ = ["Likelihood", "LikelihoodSum", "calibrated", "evaluate"]


class Likelihood(NamedTuple):
    """Exact means over data: the NLL, bits per dimension, and the NLL of the model without its calibration."""

    nll: float
    bits_per_dim: float
    uncalibrated: float


class LikelihoodSum:
    """Adds up the exact NLL of data, batch by batch. log Z is computed once.

    The noise of a :class:`~ebflow_plugin.Dequantize` is the same each time, so that evaluations can be compared. The
    flow of a calibrated model is gone through once for both of its likelihoods.

    Arguments:
        model: The model, which must stay as it is.
        seed: Where the noise comes from.
        processes: Who shares the data.
        rows: How many rows count, for this process; all of them by default.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> x = torch.randn(10, 2)
        >>> total = LikelihoodSum(model, seed=0)
        >>> for batch in x.split(4):
        ...     total.add(batch, None)
        >>> abs(total.mean().nll + model.log_prob(x).mean().item()) < 1e-5
        True
    """

    def __init__(self, model: EBFlow, seed: int, processes: Processes | None = None, rows: int | None = None) -> None:
        self._model, self._processes, self._left = model, processes or Processes(), rows
        self._device = model.like().device
        self._generator = Generator(self._device).manual_seed(mix(seed, "validation", self._processes.rank))
        self._log_probs = _densities(model.core)
        wide = torch.float32 if self._device.type == "mps" else torch.float64
        self._sums = torch.zeros(4, dtype=wide, device=self._device)

    @torch.no_grad()
    def add(self, x: Tensor, context: Tensor | None) -> None:
        """Takes in a batch."""
        if self._left is not None:
            x, context = x[: self._left], None if context is None else context[: self._left]
            self._left -= len(x)
        x, context = x.to(self._device), None if context is None else context.to(self._device)
        u, log_det = self._model.preprocess(x, self._generator)
        found = [-(value + log_det).to(self._sums).sum() for value in self._log_probs(u, context)]
        self._sums = self._sums + torch.stack([found[0], found[-1], *found[0].new_tensor([len(x), x.numel()])])

    def mean(self) -> Likelihood:
        """The means over the rows of all processes, which must ask together. NaN where there were none."""
        nll, uncalibrated, rows, values = self._processes.total(self._sums.clone()).tolist()
        if not rows:
            return Likelihood(math.nan, math.nan, math.nan)
        return Likelihood(nll / rows, nll / values / math.log(2.0), uncalibrated / rows)


@contextmanager
def calibrated(model: EBFlow, data: Any, kind: str | None) -> Iterator[None]:
    """Calibrates a model for the duration of a ``with`` block; not at all if ``kind`` is None.

    A :class:`LikelihoodSum` that is made inside of it is of the calibrated model, also after the block.
    """
    if kind is None:
        yield
        return
    kept = {name: getattr(model.calibration, name) for name in model.calibration.names}
    try:
        with torch.inference_mode(False), torch.no_grad():
            model.calibrate(data, kind)
        yield
    finally:
        model.calibration.set(**kept)


def evaluate(
    model: EBFlow, source: Batches | LoaderBatches, seed: int, processes: Processes | None = None
) -> Likelihood:
    """The exact mean NLL of data, in one pass.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from ebflow_plugin.training.batches import batches
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> x = 3.0 * torch.randn(100, 2)
        >>> before = -model.log_prob(x).mean().item()
        >>> report = model.calibrate(x)
        >>> found = evaluate(model, batches(x, 40, shuffle=False), seed=0)
        >>> abs(found.nll + model.log_prob(x).mean().item()) < 1e-4, abs(found.uncalibrated - before) < 1e-4
        (True, True)
    """
    total = LikelihoodSum(model, seed, processes)
    for x, context in source.once():
        total.add(x, context)
    return total.mean()


def _densities(core: EBFlow) -> Callable[[Tensor, Tensor | None], list[Tensor]]:
    """The log-density of the matched variable; of a calibrated model, that without its calibration too."""
    last = core.plan.steps[-1] if core.plan.steps else None
    if not isinstance(last, CalibrationStep):
        return lambda u, context: [core.log_prob(u, context)]
    bare = replace(core.plan, steps=core.plan.steps[:-1])
    normalizer = Normalizer(bare)

    fit = copy(last)  # of its own: the model's may be another one when the data come
    fit.module = Calibration()
    fit.module.set(**{name: getattr(last.module, name) for name in Calibration.names})

    def both(u: Tensor, context: Tensor | None) -> list[Tensor]:
        context = bare.embed(context)
        latents, log_det = bare.encode(u, context)
        fitted, _ = fit.encode(latents[0] if len(latents) == 1 else latents, context)
        log_z = normalizer.log_z(tuple(u.shape[1:]), u)
        scale = fit.log_det(tuple(tuple(part.shape[1:]) for part in latents))
        found = []
        for z, constant in (((fitted,) if isinstance(fitted, Tensor) else fitted, log_z - scale), (latents, log_z)):
            value = per_sample(bare.base.log_prob(z, context), u)
            found.append((value if log_det is None else value + log_det) - constant)
        return found

    return both
