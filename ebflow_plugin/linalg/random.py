"""Helpers of everything random: seeds and states, draws, chunks of rows, checked options, progress bars."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import InputError

__all__ = [
    "RandomState",
    "as_integer",
    "at_least",
    "check_generator",
    "derive_seed",
    "gaussian_like",
    "kept_random_state",
    "over_rows",
    "random_state",
    "rows_in_chunks",
    "set_random_state",
    "signs_like",
    "uniform_like",
    "with_progress",
]

T = TypeVar("T")
RandomState = dict[str, Any]


def at_least(low: int, name: str, value: object) -> int:
    """Returns an integer of at least ``low``, or raises an error that names the option.

    Example:
        >>> at_least(2, "chains", 1)
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: chains must be an integer, at least 2, got 1
    """
    number = as_integer(value)
    if number is None or number < low:
        raise InputError(f"{name} must be an integer, at least {low}, got {value!r}")
    return number


def as_integer(value: object) -> int | None:
    """Returns an integer of any type (numpy's, say) as an int; None for anything that cannot be an index.

    Example:
        >>> as_integer(3), as_integer(3.0), as_integer(True), as_integer(torch.tensor([3]))
        (3, None, None, None)
    """
    if isinstance(value, (bool, Tensor)) or type(value).__name__ in ("bool_", "bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_generator(generator: object) -> None:
    """Raises if a value is neither a generator nor None.

    Example:
        >>> check_generator(0)
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: generator must be a torch.Generator or None, got 0; seed one with .manual_seed
    """
    if generator is not None and not isinstance(generator, Generator):
        raise InputError(f"generator must be a torch.Generator or None, got {generator!r}; seed one with .manual_seed")


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
    saved, module = state.get("device", state.get("cuda")), _device_module(device)  # the name in earlier versions
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


def _draw_device(x: Tensor, generator: Generator | None) -> torch.device:
    """The device to draw on: that of the generator, which may differ from that of x."""
    check_generator(generator)
    return x.device if generator is None else generator.device


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


def with_progress(items: Iterable[T], progress: bool, title: str, total: int | None = None) -> Iterator[T]:
    """Iterates over items, with a progress bar if ``progress``.

    Raises:
        InputError: If ``progress``, and ``rich`` is not installed.
    """
    if not progress:
        return iter(items)
    try:
        from rich.progress import track
    except ImportError:
        raise InputError("progress=True needs the package rich: pip install rich") from None
    return iter(track(items, description=title, total=total))


def rows_in_chunks(count: int, size: int | None) -> Iterator[slice]:
    """Splits ``count`` rows into slices of at most ``size`` rows; None for one slice.

    Example:
        >>> list(rows_in_chunks(5, 2))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, count) if size is None else at_least(1, "batch_size", size)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def over_rows(
    function: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, context: Tensor | None, size: int | None
) -> Tensor:
    """Applies a function of rows, one chunk at a time, without a graph, so that memory stays bounded."""
    if len(x) == 0:
        with torch.no_grad():
            return function(x, context)
    with torch.no_grad():
        pieces = [
            function(x[part], context if context is None else context[part]) for part in rows_in_chunks(len(x), size)
        ]
    return torch.cat(pieces)
