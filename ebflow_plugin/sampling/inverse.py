"""Samples of a plan, by the inverse of each step."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError, NoInverseError, blame, refuse_precision
from ebflow_plugin.linalg.random import at_least, check_generator, rows_in_chunks
from ebflow_plugin.linalg.streams import seeded_by
from ebflow_plugin.plan.inputs import check_context, positive
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import Shape

__all__ = ["draw"]


def draw(
    plan: Plan,
    n: int | Shape,
    context: Tensor | None,
    generator: torch.Generator | None,
    like: Tensor,
    *,
    temperature: float = 1.0,
    batch_size: int | None = None,
) -> Tensor:
    """Draws ``n`` samples, or ``n`` for each row of a context: ``(n, *)`` or ``(C, n, *)``. n may be a shape.

    The latents are drawn at once, since they are no larger than the samples; the inverses of the steps then process
    ``batch_size`` rows at a time.
    """
    shape = tuple(at_least(0, "n", size) for size in (n if isinstance(n, (tuple, list)) else (n,)))
    n = prod(shape)
    check_generator(generator)
    positive("temperature", temperature)
    if batch_size is not None:
        batch_size = at_least(1, "batch_size", batch_size)
    if context is not None:
        check_context(context, like, None, like.device)
    leading = shape if context is None else (context.shape[0], *shape)
    if n == 0:
        if plan.event_shape is None:
            raise InputError("n = 0 samples have no known shape: the base density does not define it")
        return like.new_empty(*leading, *plan.event_shape)
    with seeded_by(generator):
        rows = plan.embed(context)
        rows = None if rows is None else rows.repeat_interleave(n, dim=0)
        count = n if context is None else n * context.shape[0]
        if rows is not None and len(rows) != count:
            raise InputError(f"the flow is conditional: pass context=, of which {n} samples are drawn for each row")
        try:
            if temperature == 1.0:
                latents = plan.base.sample(count, rows, like)
            else:
                latents = plan.base.sample_at(temperature, count, rows, like)
        except NotImplementedError as error:
            refuse_precision(error, plan.base.where)
            raise NoInverseError(
                f"the model cannot be sampled: its base density cannot\n  {plan.base.where}"
            ) from error
        except Exception as error:
            blame(error, plan.base, like, rows)
        pieces = [
            plan.decode(tuple(z[part] for z in latents), rows if rows is None else rows[part])
            for part in rows_in_chunks(count, batch_size)
        ]
    samples = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return samples.reshape(*leading, *samples.shape[1:])
