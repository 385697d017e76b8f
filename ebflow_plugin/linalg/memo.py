"""Which values of tensors may be read by Python, which results may be cached, and :class:`Memo`, a cache of one.

Values cannot be read on the meta device, in transforms of ``torch.func``, or while a graph is recorded. Where they can,
a check outside of training reads what it needs, and synchronises with the device. A training step must not: there
:func:`may_read` says no, a value that is not finite goes on into the loss, and the guards of training find it.

Factorisations and determinants cost O(D^3); their tensors change only when an optimiser, a checkpoint or the user
writes into them. :class:`Memo` notices all of these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

T = TypeVar("T")
SMALL = 10_000  # tensors of up to this many elements share one reduction


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


class Memo(Generic[T]):
    """Caches one value until the tensors it depends on change.

    A change is noticed by identity (a swapped parameter, ``.to(dtype)``), by the version counter (an optimiser
    step, ``load_state_dict``, an edit under ``no_grad``) and, with ``contents=True``, by a checksum, since an edit
    through ``tensor.data`` does not raise the version counter. The checksum reads every element once and synchronises
    with the device; use ``contents=False`` where that is not allowed.

    Threads may share a memo: each receives the value of its own tensors and key, computed once more at worst.

    A copy or a pickle of a memo holds no value, since the value belongs to the original's tensors.

    Example:
        >>> weight = torch.eye(2)
        >>> memo = Memo()
        >>> memo.get([weight], lambda: weight.sum().item())
        2.0
        >>> weight.data[0, 1] = 5.0
        >>> memo.get([weight], lambda: weight.sum().item())
        7.0
    """

    def __init__(self, contents: bool = True) -> None:
        self.contents = contents
        self.clear()

    def clear(self) -> None:
        """Drops the value."""
        self._cached: tuple[tuple[Any, ...], T] | None = None

    def get(self, tensors: Sequence[Tensor], compute: Callable[[], T], key: Hashable = None) -> T:
        """Returns the cached value, or computes it if ``key`` or a tensor changed.

        Arguments:
            tensors: All tensors that the value depends on.
            compute: Computes the value, which should hold no graph: it outlives the call.
            key: Anything else that the value depends on (a shape, a method).
        """
        if any(tensor.is_meta for tensor in tensors):
            return compute()  # a meta tensor has no contents to compare
        if is_tracing() and (self.contents or self._cached is None):
            return compute()
        # Ids, not references: torch refuses to swap a tensor that has a weak reference. If an id is reused, equal
        # checksums mean equal contents, for which the value is right too.
        state = (key, *(_stamp(tensor) for tensor in tensors), self._checksum(tensors))
        cached = self._cached  # read once: another thread may replace it at any time
        if cached is not None and cached[0] == state:
            return cached[1]
        value = compute()
        if not is_tracing():
            self._cached = (state, value)
        return value

    def _checksum(self, tensors: Sequence[Tensor]) -> tuple[float, ...]:
        if not (self.contents and tensors):
            return ()
        small = [tensor.detach() for tensor in tensors if tensor.numel() <= SMALL]
        parts = [tensor.detach() for tensor in tensors if tensor.numel() > SMALL]
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for part in small:
            kinds.setdefault((part.device, part.dtype), []).append(part.reshape(-1))
        for same in kinds.values():  # many small tensors share one reduction
            parts.append(torch.cat(same).to(torch.float64))
        sums = [total for part in parts for total in _weighted_sums(part)]
        return tuple(torch.stack([total.to(sums[0].device) for total in sums]).tolist())

    def __deepcopy__(self, memo: dict[int, Any]) -> Memo[T]:
        return Memo(self.contents)

    def __reduce__(self) -> tuple[Any, ...]:
        return Memo, (self.contents,)


def _stamp(tensor: Tensor) -> tuple[Hashable, ...]:
    version = -1 if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.dtype, tensor.device, tensor.shape


def _weighted_sums(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Two checksums: the sum, which changes with any entry, and a bilinear form, which changes if entries swap places.

    The two vectors of the form differ: with equal ones a matrix and its transpose would have the same checksum.
    """
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.float64)
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)
    left, right = (
        torch.arange(1, size + 1, device=rows.device, dtype=rows.dtype).pow(power)
        for size, power in zip(rows.shape, (1 / 2, 1 / 3), strict=True)
    )
    return tensor.sum(dtype=torch.float64), (left @ (rows @ right)).to(torch.float64)


def own_tensors(module: Any) -> Iterator[Tensor]:
    """All tensors of a module: parameters, buffers, and plain attributes.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> layer.scale = torch.ones(3)
        >>> [tuple(tensor.shape) for tensor in own_tensors(layer)]
        [(2, 2), (3,)]
    """
    if isinstance(module, nn.Module):
        yield from module.parameters()
        yield from module.buffers()
        for part in module.modules():
            yield from (value for value in vars(part).values() if isinstance(value, Tensor))


def own_numbers(module: Any) -> Iterator[Hashable]:
    """The plain numbers that a module holds (the scale of a Rescale, say).

    Example:
        >>> list(own_numbers(torch.nn.LeakyReLU(0.1)))
        [0.1, False]
    """
    for part in module.modules() if isinstance(module, nn.Module) else ():
        for name, value in vars(part).items():
            if isinstance(value, (int, float)) and name != "training":
                yield value
