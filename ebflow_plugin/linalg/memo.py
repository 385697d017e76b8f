"""A value computed from tensors, kept until one of them changes.

Factorisations and determinants cost O(D^3); their tensors change only when an optimiser, a checkpoint or the
user's own hand writes into them. :class:`Memo` notices all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["Memo"]

T = TypeVar("T")
SMALL = 10_000  # elements of a tensor that is not worth a reduction of its own


class Memo(Generic[T]):
    """Keeps one value until the tensors that it came from change.

    A change is noticed by identity (a swapped parameter, ``.to(dtype)``), by the version counter (an optimiser
    step, ``load_state_dict``, an edit under ``no_grad``) and, with ``contents=True``, by a checksum, since an edit
    through ``tensor.data`` raises no version counter. The checksum reads every element once and waits for the
    device; use ``contents=False`` where waiting is not allowed.

    Threads may share a memo: each gets the value of its own tensors and key, computed once more at worst.

    The value is dropped when the memo is copied or pickled: it belongs to the original's tensors.

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
        """Forgets the value."""
        self._kept: tuple[tuple[Any, ...], T] | None = None

    def get(self, tensors: Sequence[Tensor], compute: Callable[[], T], key: Hashable = None) -> T:
        """Returns the kept value, or computes it if ``key`` or a tensor changed.

        Arguments:
            tensors: All that the value depends on.
            compute: Computes the value. Called outside of any graph's concern: keep detached tensors.
            key: What else the value depends on (a shape, a method).
        """
        if any(tensor.is_meta for tensor in tensors):
            return compute()  # a meta tensor has no contents to compare
        # Identities, not references: torch refuses to swap a tensor that somebody holds a weak reference to. An
        # identity that is used again goes with the same contents here, for which the value is right too.
        state = (key, *(_stamp(tensor) for tensor in tensors), self._checksum(tensors))
        kept = self._kept  # once: another thread may put its own in its place at any time
        if kept is not None and kept[0] == state:
            return kept[1]
        value = compute()
        self._kept = (state, value)
        return value

    def _checksum(self, tensors: Sequence[Tensor]) -> tuple[float, ...]:
        if not (self.contents and tensors):
            return ()
        small = [tensor.detach() for tensor in tensors if tensor.numel() <= SMALL]
        parts = [tensor.detach() for tensor in tensors if tensor.numel() > SMALL]
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for part in small:
            kinds.setdefault((part.device, part.dtype), []).append(part.reshape(-1))
        for same in kinds.values():  # one tensor of many small ones: a hundred layers are not a hundred reductions
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
    """Two numbers that change with any one entry (the sum), and when entries change places (a bilinear form).

    The vectors of the form differ, since with twice the same one a matrix and its transpose have the same value.
    """
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.float64)
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)
    left, right = (
        torch.arange(1, size + 1, device=rows.device, dtype=rows.dtype).pow(power)
        for size, power in zip(rows.shape, (1 / 2, 1 / 3), strict=True)
    )
    return tensor.sum(dtype=torch.float64), (left @ (rows @ right)).to(torch.float64)
