"""Which values of tensors may be read by Python, and which results may be cached.

Values cannot be read on the meta device, in transforms of ``torch.func``, or while a graph is recorded. Where they can,
a check outside of training reads what it needs, and synchronises with the device. A training step must not: there
:func:`may_read` says no, a value that is not finite goes on into the loss, and the guards of training find it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "free_to_read",
    "is_readable",
    "is_traced",
    "is_tracing",
    "may_read",
    "tracing",
    "transformed",
    "without_reading",
]


class _Local(threading.local):
    stepping = False  # in a training step
    tracing = False


_local = _Local()


@contextmanager
def tracing() -> Iterator[None]:
    """A ``with`` block that records a graph of tensors without values: none can be read, and nothing is cached.

    Example:
        >>> with tracing():
        ...     is_tracing()
        True
    """
    before, _local.tracing = _local.tracing, True
    try:
        yield
    finally:
        _local.tracing = before


def is_tracing() -> bool:
    """Whether the caller runs inside of :func:`tracing`."""
    return _local.tracing


def transformed() -> bool:
    """Whether the caller runs in ``torch.compile`` or a transform of ``torch.func``, where values cannot be read.

    Example:
        >>> transformed(), torch.func.vmap(lambda x: x + transformed())(torch.zeros(2))
        (False, tensor([1., 1.]))
    """
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def is_traced(tensor: Tensor) -> bool:
    """Whether results of a tensor must not be cached, because it is differentiated or batched by a transform.

    That is reverse mode, forward mode (a dual tensor, whatever the grad mode), and all of ``torch.func``.

    Example:
        >>> is_traced(torch.eye(2)), is_traced(torch.eye(2).requires_grad_())
        (False, True)
        >>> with forward_ad.dual_level():
        ...     is_traced(forward_ad.make_dual(torch.eye(2), torch.eye(2)))
        True
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    return forward_ad.unpack_dual(tensor).tangent is not None


def is_readable(tensor: Tensor) -> bool:
    """Whether Python can read the values of a tensor: not on the meta device, inside vmap, or in a graph.

    Example:
        >>> is_readable(torch.eye(2)), is_readable(torch.eye(2, device="meta"))
        (True, False)
    """
    if torch.compiler.is_compiling() or is_tracing():
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return not tensor.is_meta


def free_to_read(tensor: Tensor) -> bool:
    """Whether Python reads a tensor at no cost: elsewhere than on the CPU the host would wait for the device.

    Example:
        >>> free_to_read(torch.zeros(2)), free_to_read(torch.zeros(2, device="meta"))
        (True, False)
    """
    return tensor.device.type == "cpu" and is_readable(tensor)


@contextmanager
def without_reading() -> Iterator[None]:
    """Makes :func:`may_read` say no for all devices but the CPU inside a ``with`` block: a part of a training step.

    Example:
        >>> with without_reading():
        ...     may_read(torch.zeros(2))
        True
    """
    if torch.compiler.is_compiling():
        yield
        return
    before, _local.stepping = _local.stepping, True
    try:
        yield
    finally:
        _local.stepping = before


def may_read(tensor: Tensor) -> bool:
    """Whether a check may read a tensor: not in a graph of another device than the CPU, which is a training step's.

    Example:
        >>> may_read(torch.zeros(2)), may_read(torch.zeros(2, device="meta", requires_grad=True))
        (True, False)
    """
    return is_readable(tensor) and (tensor.device.type == "cpu" or not (_local.stepping or tensor.requires_grad))
