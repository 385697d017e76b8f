"""The exact negative log-likelihood (NLL) of data, by which models are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from ebflow_plugin.closed_form.calibration import Calibration, CalibrationStep
from ebflow_plugin.linalg.random import kept_random_state
from ebflow_plugin.log_z.exact import exact_log_z
from ebflow_plugin.model import EBFlow
from ebflow_plugin.plan.inputs import counted_rows, refuse_weights, to_device
from ebflow_plugin.plan.values import shapes_of


class Likelihood(NamedTuple):
    """Exact means over the data: the NLL, bits per dimension, and the NLL of the model without its calibration."""

    nll: float
    bits_per_dim: float
    uncalibrated: float


class LikelihoodSum:
    """Accumulates the exact NLL of data, batch by batch, and computes log Z once.

    One pass through the flow serves both likelihoods of a calibrated model.

    Arguments:
        model: The model. Its current calibration is used, even if it is changed later.
        seed: Of the noise of a :class:`~ebflow_plugin.Dequantize`: with the same one, evaluations can be compared.
        rows: Uses only the first rows; all of them by default.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> x = torch.randn(10, 2)
        >>> total = LikelihoodSum(model)
        >>> for batch in x.split(4):
        ...     total.add(batch)
        >>> abs(total.mean().nll + model.log_prob(x).mean().item()) < 1e-5
        True
    """

    def __init__(self, model: EBFlow, seed: int = 0, rows: int | None = None) -> None:
        steps, device = model.core.steps, model.like().device
        self._model, self._exact = model, model.exact
        self._generator, self._left = Generator(device).manual_seed(seed), rows
        self._sums = torch.zeros(4, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self._calibration: CalibrationStep | None = None
        last = steps[-1] if steps else None
        if isinstance(last, CalibrationStep):
            # A copy: the model may be calibrated anew before the data are added.
            self._calibration, module = copy(last), Calibration()
            module.set(**{name: getattr(self._calibration.module, name) for name in Calibration.names})
            self._calibration.module = module

    @torch.no_grad()
    def add(self, x: Tensor, context: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Adds a batch. A row counts by its weight, and one of weight zero not at all."""
        if self._left is not None:
            x = x[: self._left]
            context, weights = (None if part is None else part[: len(x)] for part in (context, weights))
            self._left -= len(x)
        if len(x) == 0:
            return
        plan, (x, context, weights) = self._exact, to_device((x, context, weights), self._sums.device)
        if weights is None:
            shares = self._sums.new_ones(len(x))
        else:
            refuse_weights(weights, x)
            shares, rows = weights.to(self._sums), counted_rows(weights)
            x, context = x[rows], None if context is None else context[rows]
        _, u, before = self._model.match(x, context, self._generator)
        context = plan.embed(context)
        latents, log_det = plan.encode(u, context)
        log_z = exact_log_z(plan, tuple(u.shape[1:]), u)
        densities = [(latents, log_z)]
        if self._calibration is not None:
            moved, _ = self._calibration.encode(latents[0] if len(latents) == 1 else latents, context)
            scale = self._calibration.log_det(shapes_of(latents))
            densities.insert(0, ((moved,) if isinstance(moved, Tensor) else moved, log_z - scale))
        nlls = []
        for z, constant in densities:
            value = plan.base_log_prob(z, context)
            value = (value if log_det is None else value + log_det) - constant
            nlls.append(-(shares * (value if before is None else value + before).to(self._sums)).sum())
        total = shares.sum()
        self._sums = self._sums + torch.stack([nlls[0], nlls[-1], total, total * x[0].numel()])

    def mean(self, total: Callable[[Tensor], Tensor] = lambda sums: sums) -> Likelihood:
        """The means over all rows, or NaN if there are none. ``total`` reduces the sums over several processes."""
        nll, uncalibrated, rows, values = total(self._sums.clone()).tolist()
        if not rows:
            return Likelihood(math.nan, math.nan, math.nan)
        return Likelihood(nll / rows, nll / values / math.log(2.0), uncalibrated / rows)


@contextmanager
def calibrated(model: EBFlow, data: Any, kind: str | None) -> Iterator[None]:
    """Calibrates a model inside a ``with`` block, and keeps the random state; does nothing if ``kind`` is None.

    A :class:`LikelihoodSum` created inside the block stays that of the calibrated model after it.
    """
    if kind is None:
        yield
        return
    before = {name: getattr(model.calibration, name) for name in model.calibration.names}
    try:
        with kept_random_state(model.like().device):
            model.calibrate(data, kind)
        yield
    finally:
        model.calibration.set(**before)
