"""Samples of a plan, by the inverse of each step."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from ebflow_plugin.chunks import rows_in_chunks
from ebflow_plugin.errors import InputError, no_inverse, raise_from_step
from ebflow_plugin.linalg.random import seeded_by
from ebflow_plugin.options import at_least, check_generator, positive
from ebflow_plugin.plan.inputs import check_context
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import Shape


@torch.no_grad()
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

    They have no graph. The latents are drawn at once, since they are no larger than the samples; the inverses of the
    steps then process ``batch_size`` rows at a time.
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
    with seeded_by(generator, like.device):
        rows = plan.embed(context)
        rows = None if rows is None else rows.repeat_interleave(n, dim=0)
        count = n if context is None else n * context.shape[0]
        if rows is not None and len(rows) != count:
            raise InputError(f"the flow is conditional: pass context=, of which {n} samples are drawn for each row")
        latents = draw_latents(plan, count, rows, like, temperature)
        pieces = [
            plan.decode(tuple(z[part] for z in latents), rows if rows is None else rows[part])
            for part in rows_in_chunks(count, batch_size)
        ]
    samples = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return samples.reshape(*leading, *samples.shape[1:])


def draw_latents(
    plan: Plan, count: int, context: Tensor | None, like: Tensor, temperature: float = 1.0
) -> tuple[Tensor, ...]:
    """Draws latents of the base, one for each row of an embedded context."""
    try:
        if temperature == 1.0:
            return plan.base.sample(count, context, like)
        return plan.base.sample_at(temperature, count, context, like)
    except NotImplementedError as error:
        no_inverse("its base density cannot", plan.base.where, error, like.dtype)
    except Exception as error:
        raise_from_step(error, plan.base, like, context)


def reparametrised(plan: Plan, count: int, generator: torch.Generator | None, like: Tensor) -> tuple[Tensor, ...]:
    """Draws latents through which gradients reach the mean and the standard deviation of a Gaussian base.

    Raises:
        InputError: If another base has trainable parameters: its draws would carry no gradient, or a part of it.
    """
    check_generator(generator)
    with torch.no_grad(), seeded_by(generator, like.device):
        context = plan.embed(None)
        latents = draw_latents(plan, count, context, like)
    base = plan.base
    trained = [p for p in base.module.parameters() if p.requires_grad] if isinstance(base.module, nn.Module) else []
    if not (trained and torch.is_grad_enabled()):
        return latents
    gaussian = base.gaussian(context)
    if gaussian is None:
        raise InputError(
            f"draws of this base density carry no gradient of its parameters; freeze them, or use a Gaussian\n  "
            f"{base.where}"
        )
    return tuple(mean + std * ((z - mean) / std).detach() for z, (mean, std) in zip(latents, gaussian, strict=True))
