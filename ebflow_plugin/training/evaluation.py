"""The exact NLL of data: what tells whether a model is getting better."""

from __future__ import annotations

import math

import torch
from torch import Generator

from ebflow_plugin.training.batches import Batches, LoaderBatches
from ebflow_plugin.training.distributed import Processes
from ebflow_plugin.training.randomness import mix
from ebflow_plugin.wrapper import EBFlow

__all__ = ["evaluate"]


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
    processes = processes or Processes()
    like = model._like()
    generator = Generator(like.device).manual_seed(mix(seed, "validation", processes.rank))
    total = torch.zeros(3, dtype=torch.float64, device=like.device)
    for x, context in source.once():
        x, context = x.to(like.device), None if context is None else context.to(like.device)
        u, log_det = model.preprocess(x, generator)
        log_prob = (model.core.log_prob(u, context) + log_det).double().sum()
        total = total + torch.stack([-log_prob, log_prob.new_tensor(len(x)), log_prob.new_tensor(x.numel())])
    nll, rows, values = processes.total(total).tolist()
    return nll / rows, nll / values / math.log(2.0)
