"""The exact NLL of data: what tells whether a model gets better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from ebflow_plugin.closed_form.calibration import Calibration, CalibrationStep
from ebflow_plugin.log_z.exact import Normalizer
from ebflow_plugin.model import EBFlow
from ebflow_plugin.plan.inputs import Batch
from ebflow_plugin.training.distributed import Processes
from ebflow_plugin.training.randomness import mix

__all__ = ["Likelihood", "LikelihoodSum", "calibrated", "evaluate"]


class Likelihood(NamedTuple):
    """Exact means over data: the NLL, bits per dimension, and the NLL of the model without its calibration."""

    nll: float
    bits_per_dim: float
    uncalibrated: float


class LikelihoodSum:
    """Adds up the exact NLL of data, batch by batch, and computes log Z once.

    The noise of a :class:`~ebflow_plugin.Dequantize` is the same each time, so that evaluations can be compared. One
    pass through the flow serves both likelihoods of a calibrated model, calibrated and not.

    Arguments:
        model: The model. Its parameters and its calibration count as they are now.
        seed: Where the noise comes from.
        processes: The processes that share the data.
        rows: How many rows of this process count; all of them by default.

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
        device = model.like().device
        self._generator = Generator(device).manual_seed(mix(seed, "validation", self._processes.rank))
        self._sums = torch.zeros(4, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        plan = model.core_plan
        plan.refuse()
        self._fitted: CalibrationStep | None = None
        if plan.steps and isinstance(plan.steps[-1], CalibrationStep):
            # A copy: the model may be calibrated in another way when the data come.
            self._fitted, module = copy(plan.steps[-1]), Calibration()
            module.set(**{name: getattr(self._fitted.module, name) for name in Calibration.names})
            self._fitted.module = module
            plan = replace(plan, steps=plan.steps[:-1])
        self._plan, self._normalizer = plan, Normalizer(plan)

    @torch.no_grad()
    def add(self, x: Tensor, context: Tensor | None) -> None:
        """Takes in a batch."""
        if self._left is not None:
            x, context = x[: self._left], None if context is None else context[: self._left]
            self._left -= len(x)
        if len(x) == 0:
            return
        device, plan = self._sums.device, self._plan
        x, context = x.to(device), None if context is None else context.to(device)
        _, u, before = self._model.match(x, context, self._generator)
        context = plan.embed(context)
        latents, log_det = plan.encode(u, context)
        log_z = self._normalizer.log_z(tuple(u.shape[1:]), u)
        densities = [(latents, log_z)]
        if self._fitted is not None:
            moved, _ = self._fitted.encode(latents[0] if len(latents) == 1 else latents, context)
            scale = self._fitted.log_det(tuple(tuple(part.shape[1:]) for part in latents))
            densities.insert(0, ((moved,) if isinstance(moved, Tensor) else moved, log_z - scale))
        found = []
        for z, constant in densities:
            value = plan.base_log_prob(z, context)
            value = (value if log_det is None else value + log_det) - constant
            found.append(-(value + before).to(self._sums).sum())
        self._sums = self._sums + torch.stack([found[0], found[-1], *found[0].new_tensor([len(x), x.numel()])])

    def mean(self) -> Likelihood:
        """The means over the rows of all processes, which must ask together. NaN where there were none."""
        nll, uncalibrated, rows, values = self._processes.total(self._sums.clone()).tolist()
        if not rows:
            return Likelihood(math.nan, math.nan, math.nan)
        return Likelihood(nll / rows, nll / values / math.log(2.0), uncalibrated / rows)


def evaluate(
    model: EBFlow, rows: Iterable[Batch], seed: int, processes: Processes | None = None
) -> Likelihood:
    """The exact mean NLL of the rows of all processes, in one pass."""
    total = LikelihoodSum(model, seed, processes)
    for x, context in rows:
        total.add(x, context)
    return total.mean()


@contextmanager
def calibrated(model: EBFlow, data: Any, kind: str | None) -> Iterator[None]:
    """Calibrates a model inside a ``with`` block; not at all if ``kind`` is None.

    A :class:`LikelihoodSum` that is made inside it is of the calibrated model, also after the block.
    """
    if kind is None:
        yield
        return
    before = {name: getattr(model.calibration, name) for name in model.calibration.names}
    try:
        with torch.inference_mode(False), torch.no_grad():
            model.calibrate(data, kind)
        yield
    finally:
        model.calibration.set(**before)
