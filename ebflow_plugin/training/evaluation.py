"""The exact NLL of data: what tells whether a model is getting better."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Generator, Tensor

from ebflow_plugin.closed_form.calibration import CalibrationStep
from ebflow_plugin.log_z.exact import Normalizer
from ebflow_plugin.model import EBFlow
from ebflow_plugin.plan.values import per_sample
from ebflow_plugin.training.batches import Batches, LoaderBatches
from ebflow_plugin.training.distributed import Processes
from ebflow_plugin.training.randomness import mix

__all__ = ["evaluate", "evaluate_calibrated"]


@torch.no_grad()
def evaluate(
    model: EBFlow, source: Batches | LoaderBatches, seed: int, processes: Processes | None = None
) -> tuple[float, float]:
    """The exact mean NLL of data, and bits per dimension. log Z is computed once.

    The noise of a :class:`~ebflow_plugin.Dequantize` is the same each time, so that evaluations can be compared.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from ebflow_plugin.training.batches import batches
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> x = torch.randn(10, 2)
        >>> nll, bits = evaluate(model, batches(x, 4, shuffle=False), seed=0)
        >>> abs(nll + model.log_prob(x).mean().item()) < 1e-5
        True
    """
    (nll,), (bits,) = _means(model, source, seed, processes, lambda u, context: [model.core.log_prob(u, context)])
    return nll, bits


@torch.no_grad()
def evaluate_calibrated(
    model: EBFlow, source: Batches | LoaderBatches, seed: int, processes: Processes | None = None
) -> tuple[float, float, float]:
    """The same of a calibrated model, and its NLL without the calibration: the flow is gone through once for both.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from ebflow_plugin.training.batches import batches
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> x = 3.0 * torch.randn(100, 2)
        >>> before = -model.log_prob(x).mean().item()
        >>> report = model.calibrate(x)
        >>> nll, bits, uncalibrated = evaluate_calibrated(model, batches(x, 40, shuffle=False), seed=0)
        >>> abs(nll + model.log_prob(x).mean().item()) < 1e-4, abs(uncalibrated - before) < 1e-4
        (True, True)
    """
    core = model.core
    last = core.plan.steps[-1] if core.plan.steps else None
    if not isinstance(last, CalibrationStep):  # calibrating would have made it worse, and was left out
        nll, bits = evaluate(model, source, seed, processes)
        return nll, bits, nll
    bare = replace(core.plan, steps=core.plan.steps[:-1])
    normalizer = Normalizer(bare)

    def log_probs(u: Tensor, context: Tensor | None) -> list[Tensor]:
        context = bare.embed(context)
        latents, log_det = bare.encode(u, context)
        fitted, _ = last.encode(latents[0] if len(latents) == 1 else latents, context)
        log_z = normalizer.log_z(tuple(u.shape[1:]), u)
        scale = last.log_det(tuple(tuple(part.shape[1:]) for part in latents))
        found = []
        for z, constant in (((fitted,) if isinstance(fitted, Tensor) else fitted, log_z - scale), (latents, log_z)):
            value = per_sample(bare.base.log_prob(z, context), u)
            found.append((value if log_det is None else value + log_det) - constant)
        return found

    (fitted_nll, bare_nll), (fitted_bits, _) = _means(model, source, seed, processes, log_probs, count=2)
    return fitted_nll, fitted_bits, bare_nll


def _means(
    model: EBFlow,
    source: Batches | LoaderBatches,
    seed: int,
    processes: Processes | None,
    log_probs: Callable[[Tensor, Tensor | None], list[Tensor]],
    count: int = 1,
) -> tuple[list[float], list[float]]:
    """The mean NLL of data, and bits per dimension, by each of some densities of the matched variable."""
    processes = processes or Processes()
    like = model.like()
    generator = Generator(like.device).manual_seed(mix(seed, "validation", processes.rank))
    total = torch.zeros(count + 2, dtype=torch.float64, device=like.device)
    for x, context in source.once():
        x, context = x.to(like.device), None if context is None else context.to(like.device)
        u, log_det = model.preprocess(x, generator)
        sums = torch.stack([-(found + log_det).double().sum() for found in log_probs(u, context)])
        total = total + torch.cat([sums, sums.new_tensor([len(x), x.numel()])])
    *sums_of_all, rows, values = processes.total(total).tolist()
    return [nll / rows for nll in sums_of_all], [nll / values / math.log(2.0) for nll in sums_of_all]
