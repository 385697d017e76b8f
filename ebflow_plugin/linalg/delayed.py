"""Numbers of a device that the host receives some steps later, so that no training step waits for them."""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ebflow_plugin.linalg.memo import free_to_read

T = TypeVar("T")
LAG = 4  # steps after which a device other than the CPU has computed a number, and the host has received it


class Delayed(Generic[T]):
    """A queue of tensors on their way to the host: each comes out a fixed number of calls later, at once on the CPU.

    The number is fixed, so that what is decided by it does not depend on how fast a device is: a run is the same again.

    Arguments:
        lag: How many calls of :meth:`add` later, elsewhere than on the CPU.

    Example:
        >>> numbers = Delayed()
        >>> numbers.add("first", torch.tensor([1.0, 2.0]))
        [('first', [1.0, 2.0])]
    """

    def __init__(self, lag: int = LAG) -> None:
        self.lag = lag
        self._queue: deque[tuple[T, Any, Any]] = deque()

    def add(self, note: T, tensor: Tensor) -> list[tuple[T, list[Any]]]:
        """Sends a tensor of at least one dimension to the host. Returns what has arrived, each with its note."""
        if tensor.is_meta:
            return []
        tensor = tensor.detach()
        if free_to_read(tensor):
            return [(note, tensor.tolist())]
        copy = tensor.to("cpu", non_blocking=True)  # into pinned memory, so that it is asynchronous
        arrived = torch.Event(tensor.device)
        arrived.record()
        self._queue.append((note, copy, arrived))
        return [self._next()] if len(self._queue) > self.lag else []

    def flush(self) -> list[tuple[T, list[Any]]]:
        """Returns all that is left. Synchronises with the device."""
        return [self._next() for _ in range(len(self._queue))]

    def _next(self) -> tuple[T, list[Any]]:
        note, copy, arrived = self._queue.popleft()
        return note, _numbers(copy, arrived)

    def state(self) -> list[tuple[T, list[Any]]]:
        """What is on its way, for a checkpoint. Synchronises with the device."""
        return [(note, _numbers(copy, arrived)) for note, copy, arrived in self._queue]

    def load_state(self, state: list[tuple[T, list[Any]]]) -> None:
        """Restores what :meth:`state` returned: it comes out when it would have."""
        self._queue = deque((note, numbers, None) for note, numbers in state)

    def __getstate__(self) -> dict[str, Any]:
        return {"lag": self.lag, "queue": self.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.lag = state["lag"]
        self.load_state(state["queue"])


def _numbers(copy: Any, arrived: Any) -> list[Any]:
    if arrived is None:  # from a checkpoint
        found: list[Any] = copy
        return found
    arrived.synchronize()  # long past
    return list(copy.tolist())
