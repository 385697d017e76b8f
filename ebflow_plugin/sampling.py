"""Samples of a plan, by the inverse of each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError, NoInverseError
from ebflow_plugin.plan import Plan

__all__ = ["draw", "seeded_by"]


def draw(plan: Plan, n: int, context: Tensor | None, generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Draws ``n`` samples, or ``n`` for each row of a context: ``(n, *)`` or ``(C, n, *)``."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise InputError(f"n must be a whole number, at least 0, got {n!r}")
    if context is not None and context.device != like.device:
        raise InputError(f"context is on {context.device}, the flow is on {like.device}; move one with .to()")
    if n == 0:
        shape = plan.event_shape
        if shape is None:
            raise InputError("n = 0 samples have no known shape: the base density does not tell it")
        return like.new_empty(*(() if context is None else context.shape[:1]), 0, *shape)
    rows = None
    with seeded_by(generator):
        if context is not None:
            rows = plan.embed(context)
            rows = None if rows is None else rows.repeat_interleave(n, dim=0)
        count = n if context is None else n * context.shape[0]
        try:
            latents = plan.base.sample(count, rows, like)
        except NotImplementedError as error:
            raise NoInverseError(
                f"the model cannot be sampled: its base density cannot\n  {plan.base.where}"
            ) from error
        samples = plan.decode(latents, rows)
    return samples if context is None else samples.unflatten(0, (context.shape[0], n))


@contextmanager
def seeded_by(generator: torch.Generator | None) -> Iterator[None]:
    """Lets a generator decide what the global one draws, for libraries whose sampling takes no generator.

    One number is drawn from the generator; the global state, on every device, is as before afterwards.

    Example:
        >>> with seeded_by(torch.Generator().manual_seed(0)):
        ...     first = torch.randn(2)
        >>> with seeded_by(torch.Generator().manual_seed(0)):
        ...     second = torch.randn(2)
        >>> torch.equal(first, second)
        True
    """
    if generator is None:
        yield
        return
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
