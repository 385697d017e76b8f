"""Seeded random numbers for libraries whose sampling takes no generator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator

from ebflow_plugin.linalg.random import check_generator, derive_seed, kept_random_state

__all__ = ["seeded_by"]

_one_at_a_time = threading.RLock()


@contextmanager
def seeded_by(generator: Generator | None, device: torch.device) -> Iterator[None]:
    """Seeds torch's global random numbers from a generator inside a ``with`` block, and restores their state after it.

    One number is drawn from the generator. The global state is shared by all threads: those that enter such a block too
    wait for each other, and what others draw meanwhile is seeded with it.

    Arguments:
        generator: The generator; None leaves the global numbers as they are.
        device: The device on which numbers are drawn, beside the CPU.

    Example:
        >>> device = torch.device("cpu")
        >>> with seeded_by(torch.Generator().manual_seed(0), device):
        ...     first = torch.randn(2)
        >>> with seeded_by(torch.Generator().manual_seed(0), device):
        ...     second = torch.randn(2)
        >>> torch.equal(first, second)
        True
    """
    check_generator(generator)
    if generator is None:
        yield
        return
    drawn = torch.randint(2**62, (), generator=generator, device=generator.device)
    # The number of another device would have to be waited for; the state of its generator is the host's.
    seed = int(drawn) if drawn.device.type == "cpu" else derive_seed(bytes(generator.get_state().tolist()))
    with _one_at_a_time, kept_random_state(device):
        torch.manual_seed(seed)
        yield
