"""The exact negative log-likelihood (NLL) of data, by which models are compared and weights are selected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import InputError, TrainingError
from ebflow_plugin.linalg.random import kept_random_state
from ebflow_plugin.log_z.exact import exact_log_z
from ebflow_plugin.model import EBFlow
from ebflow_plugin.plan.inputs import counted_rows, refuse_weights
from ebflow_plugin.plan.values import shapes_of
from ebflow_plugin.training.batches import once
from ebflow_plugin.training.ema import EMA


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
        core, device = model.core, model.like().device
        self._model, self._exact = model, model.exact
        self._calibration: Any = deepcopy(core.steps[len(model.exact.steps) :])  # at most one step
        self._generator, self._left = Generator(device).manual_seed(seed), rows
        self._sums = torch.zeros(4, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)

    @torch.no_grad()
    def add(self, x: Tensor, context: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Adds a batch. A row counts by its weight, and one of weight zero not at all."""
        if self._left is not None:
            x = x[: self._left]
            context, weights = (None if part is None else part[: len(x)] for part in (context, weights))
            self._left -= len(x)
        if len(x) == 0:
            return
        plan, device = self._exact, self._sums.device
        x = x.to(device)
        context, weights = (None if part is None else part.to(device) for part in (context, weights))
        shares = self._sums.new_ones(len(x))
        if weights is not None:
            refuse_weights(weights, x)
            shares, rows = weights.to(shares), counted_rows(weights)
            x, context = x[rows], None if context is None else context[rows]
        _, u, before = self._model.match(x, context, self._generator)
        context = plan.embed(context)
        latents, log_det = plan.encode(u, context)
        volume = -exact_log_z(plan, tuple(u.shape[1:]), u)
        for part in (before, log_det):
            volume = volume if part is None else volume + part
        log_probs = [plan.base_log_prob(latents, context) + volume]
        for step in self._calibration:
            moved, _ = step.encode(latents[0] if len(latents) == 1 else latents, context)
            moved = (moved,) if isinstance(moved, Tensor) else moved
            scale = step.log_det(shapes_of(latents))
            log_probs.insert(0, plan.base_log_prob(moved, context) + (volume + scale))
        nlls, total = [-(shares * log_prob.to(shares)).sum() for log_prob in log_probs], shares.sum()
        self._sums = self._sums + torch.stack([nlls[0], nlls[-1], total, total * x[0].numel()])

    def mean(self, total: Callable[[Tensor], Tensor] = lambda sums: sums) -> Likelihood:
        """The means over all rows, or NaN if there are none. ``total`` reduces the sums over several processes."""
        nll, uncalibrated, rows, values = total(self._sums.clone()).tolist()
        if not rows:
            return Likelihood(math.nan, math.nan, math.nan)
        return Likelihood(nll / rows, nll / values / math.log(2.0), uncalibrated / rows)


@contextmanager
def calibrated(model: EBFlow, data: Any, kind: str | None) -> Iterator[dict[str, Tensor] | None]:
    """Calibrates a model inside a ``with`` block, and keeps the random state; does nothing if ``kind`` is None.

    A :class:`LikelihoodSum` created inside the block stays that of the calibrated model after it. The block receives
    the tensors of the calibration by name; those of no calibration, if it would have made the model worse.
    """
    if kind is None:
        yield None
        return
    before = {name: getattr(model.calibration, name) for name in model.calibration.names}
    try:
        with kept_random_state(model.like().device):
            model.calibrate(data, kind)
        after = {name: getattr(model.calibration, name) for name in model.calibration.names}
        yield {name: tensor for name, tensor in after.items() if tensor is not None}
    finally:
        model.calibration.set(**before)


class Judge:
    """The exact NLL of validation data on the way, and the weights with the lowest of them.

    Arguments:
        model: The model.
        held_out: The validation data, as batches.
        training: Returns the training data, on which the model is calibrated.
        kind: The kind of calibration, if any.
        average: The averaged weights, which are judged in the place of the current ones, if there are any.
        seed: Of the noise of a :class:`~ebflow_plugin.Dequantize`, the same each time.

    Attributes:
        nll: The lowest NLL so far, with its ``step`` and its ``state``, a state dict of the model on the CPU.
        stale: The evaluations since then.
    """

    nll: float | None = None
    step: int | None = None
    state: dict[str, Tensor] | None = None
    stale: int = 0

    def __init__(
        self,
        model: EBFlow,
        held_out: Any,
        training: Callable[[], Any],
        kind: str | None,
        average: EMA | None,
        seed: int,
    ) -> None:
        self.model, self.held_out, self.training, self.kind = model, held_out, training, kind
        self.average, self.seed = average, seed

    def __call__(self, step: int) -> dict[str, Any]:
        """Returns what is recorded of the weights of a step."""
        average = nullcontext() if self.average is None else self.average.applied()
        with average, calibrated(self.model, self.training() if self.kind else None, self.kind):
            likelihood = LikelihoodSum(self.model, self.seed)
            try:
                for batch in once(self.held_out):
                    likelihood.add(*batch)
            except InputError as error:
                raise InputError(f"validation: {error}") from error
            nll, bits, uncalibrated = likelihood.mean()
            if math.isnan(nll):
                raise TrainingError(f"step {step}: the NLL on the validation data is not a number")
            self.stale += 1
            if self.nll is None or nll < self.nll:
                self.nll, self.step, self.stale = nll, step, 0
                self.state = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
        found = {"nll": nll, "bits_per_dim": bits, "best_nll": self.nll}
        return found if self.kind is None else {**found, "nll_uncalibrated": uncalibrated}
