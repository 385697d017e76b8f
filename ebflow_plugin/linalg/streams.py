"""Seeded random numbers for libraries whose sampling takes no generator."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Generator, Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.random import check_generator

__all__ = ["seeded_by"]


def seeded_by(generator: Generator | None) -> AbstractContextManager[object]:
    """Seeds all random operations of torch in this thread from a generator, inside a ``with`` block.

    One number is drawn from the generator. The global random state is neither read nor written, so other threads
    neither disturb these draws nor are disturbed by them.

    Example:
        >>> with seeded_by(torch.Generator().manual_seed(0)):
        ...     first = torch.randn(2)
        >>> with seeded_by(torch.Generator().manual_seed(0)):
        ...     second = torch.randn(2)
        >>> torch.equal(first, second)
        True
    """
    if generator is None:
        return nullcontext()
    check_generator(generator)
    return _Streams(int(torch.randint(2**62, (), generator=generator, device=generator.device)))


class _Streams(TorchDispatchMode):
    """Passes a generator to every random operation, one per device. A dispatch mode is local to its thread."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, Generator] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        tensor = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
        named = kwargs.get("device")
        device = torch.device(named) if named is not None else torch.device("cpu") if tensor is None else tensor.device
        seeded = _with_generator(func)
        if seeded is not None:
            return seeded(*args, **kwargs, generator=self._generator(device))
        if func.overloadpacket in (torch.ops.aten.randn_like, torch.ops.aten.rand_like):  # in older versions of torch
            drawn = torch.empty_like(*args, **kwargs)
            fill = drawn.normal_ if func.overloadpacket is torch.ops.aten.randn_like else drawn.uniform_
            return fill(generator=self._generator(device))
        raise InputError(f"{func} draws random numbers, and takes no generator: sample without generator=")

    def _generator(self, device: torch.device) -> Generator | None:
        if device.type == "meta":
            return None
        if device not in self._generators:
            self._generators[device] = Generator(device).manual_seed(self._seed)
        return self._generators[device]


@lru_cache(maxsize=256)
def _with_generator(func: OpOverload) -> OpOverload | None:
    """The operation itself if it takes a generator, or its overload that does."""
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func
    for overload in func.overloadpacket.overloads():
        other: OpOverload = getattr(func.overloadpacket, overload)
        if sorted(argument.name for argument in other._schema.arguments) == sorted([*names, "generator"]):
            return other
    return None
