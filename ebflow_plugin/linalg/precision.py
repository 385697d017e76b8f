"""Full precision where nearly equal numbers are subtracted: no half precision of autocast, and no TF32.

On Ampere and later, cuDNN computes convolutions of single-precision numbers with 10 bits of their mantissa, unless told
otherwise, and cuBLAS does so with matrix products if asked to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

WITH_TF32 = {"cuda"}  # types of devices


@contextmanager
def full_precision(tensor: Tensor) -> Iterator[None]:
    """Switches autocast and TF32 off for the device of a tensor inside a ``with`` block, and puts the settings back.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16), full_precision(torch.ones(2)):
        ...     (torch.ones(2, 2) @ torch.ones(2)).dtype
        torch.float32
    """
    kind = tensor.device.type
    saved = None if torch.compiler.is_compiling() or kind not in WITH_TF32 else _without_tf32()
    try:
        if torch.amp.is_autocast_available(kind):
            with torch.autocast(kind, enabled=False):
                yield
        else:
            yield
    finally:
        _restore(saved)


def full_precision_backward(values: Tensor) -> Tensor:
    """Switches TF32 off for the backward pass that begins at these values, and puts the settings back at its end."""
    if values.requires_grad and values.device.type in WITH_TF32 and not torch.compiler.is_compiling():

        def switch(_: Tensor) -> None:
            saved = _without_tf32()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: _restore(saved))

        values.register_hook(switch)
    return values


def _settings() -> list[tuple[Any, str, Any]]:
    """The objects and names of torch's settings, and the values for full precision."""
    backends = torch.backends
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        return [(backends.cuda.matmul, "fp32_precision", "ieee"), (backends.cudnn.conv, "fp32_precision", "ieee")]  # type: ignore[attr-defined]
    return [(backends.cuda.matmul, "allow_tf32", False), (backends.cudnn, "allow_tf32", False)]  # before torch 2.9


def _without_tf32() -> list[tuple[Any, str, Any]]:
    """Switches it off. Returns what was there before."""
    settings = _settings()
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in settings]
    _restore(settings)
    return saved


def _restore(settings: list[tuple[Any, str, Any]] | None) -> None:
    for owner, name, value in settings or ():
        setattr(owner, name, value)
