"""Random numbers: derived seeds, states of generators, and draws on the device of a tensor."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor

from ebflow_plugin.options import check_generator

RandomState = dict[str, Any]
_one_at_a_time = threading.RLock()  # the blocks of seeded_by()


def derive_seed(*parts: object) -> int:
    """Derives a seed by hashing: equal parts yield equal seeds, other parts unrelated ones.

    Example:
        >>> derive_seed(0, "epoch", 1) == derive_seed(0, "epoch", 2)
        False
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def random_state(device: torch.device, generators: Sequence[Generator]) -> RandomState:
    """The state of torch's global generators, of the CPU and of a device of any type, and of the given ones."""
    module = _device_module(device)
    return {
        "cpu": torch.get_rng_state(),
        "device": None if module is None else module.get_rng_state(*_named(device)),
        "generators": [generator.get_state() for generator in generators],
    }


def set_random_state(state: RandomState, device: torch.device, generators: Sequence[Generator]) -> None:
    """Restores the state that :func:`random_state` returned."""
    torch.set_rng_state(state["cpu"])
    saved, module = state["device"], _device_module(device)
    if module is not None and saved is not None:
        module.set_rng_state(saved, *_named(device))
    for generator, saved in zip(generators, state["generators"], strict=True):
        generator.set_state(saved)


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Restores torch's global generators, of the CPU and of a device of any type, at the end of a ``with`` block.

    Example:
        >>> first = torch.get_rng_state()
        >>> with kept_random_state(torch.device("cpu")):
        ...     _ = torch.rand(3)
        >>> torch.equal(first, torch.get_rng_state())
        True
    """
    state = random_state(device, ())
    try:
        yield
    finally:
        set_random_state(state, device, ())


def _device_module(device: torch.device) -> Any | None:
    """torch.cuda, torch.xpu, torch.mps, …: what has a random state beside that of the CPU."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "get_rng_state") else None


def _named(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # of which there is one, without an argument


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


def _draw_device(x: Tensor, generator: Generator | None) -> torch.device:
    """The device to draw on: that of the generator, which may differ from that of x."""
    if generator is None:
        return x.device
    check_generator(generator)
    return generator.device


def gaussian_like(x: Tensor, generator: Generator | None) -> Tensor:
    """Draws standard normal numbers with the device and dtype of x; the generator may be on another device."""
    device = _draw_device(x, generator)
    drawn = torch.randn(x.shape, generator=generator, device=device, dtype=x.dtype)
    return drawn.to(x.device, non_blocking=True)


def uniform_like(x: Tensor, generator: Generator | None) -> Tensor:
    """Draws uniform numbers from [0, 1) with the device and dtype of x; the generator may be on another device."""
    device = _draw_device(x, generator)
    drawn = torch.rand(x.shape, generator=generator, device=device, dtype=x.dtype)
    return drawn.to(x.device, non_blocking=True)


def signs_like(x: Tensor, generator: Generator | None) -> Tensor:
    """Draws Rademacher signs, -1 and 1, with the device and dtype of x; the generator may be on another device."""
    # Not in place, so that vmap draws anew for each sample; of a new tensor, so that its memory format does not matter.
    empty = torch.empty(x.shape, device=_draw_device(x, generator), dtype=x.dtype)
    drawn = torch.bernoulli(empty, 0.5, generator=generator)
    return drawn.mul(2.0).sub(1.0).to(x.device, non_blocking=True)
