"""Mean and covariance of what a stream of batches becomes inside a model, in one pass and in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from ebflow_plugin.errors import EBFlowError, InputError
from ebflow_plugin.plan.inputs import pair

__all__ = ["Moments", "batches", "in_memory", "meet", "refuse_one_shot"]

CHUNK = 1000  # rows that go through a model, or into a scatter, at once
PATIENCE = timedelta(minutes=2)  # for other processes


class Moments:
    """Count, mean and scatter of rows, merged part by part so that large means lose no digits.

    Small batches wait until there are enough of them: merging two scatters costs as much as hundreds of rows.

    Arguments:
        diagonal: Whether the scatter of each feature is enough. O(D) a row instead of O(D²).

    Example:
        >>> rows = torch.randn(10, 2, dtype=torch.float64) + 1e6
        >>> moments = Moments()
        >>> for part in rows.split(4):
        ...     moments.add(part)
        >>> torch.allclose(moments.covariance(), torch.cov(rows.T))
        True
    """

    def __init__(self, diagonal: bool = False) -> None:
        self.diagonal = diagonal
        self._merged = 0
        self._mean = torch.zeros(0, dtype=torch.float64)
        self._scatter = torch.zeros(0 if diagonal else (0, 0), dtype=torch.float64)
        self._waiting: list[Tensor] = []
        self._rows = 0  # that wait

    @property
    def count(self) -> int:
        """The number of rows."""
        return self._merged + self._rows

    @property
    def mean(self) -> Tensor:
        """Their mean, with shape ``(D,)``."""
        self._settle()
        return self._mean

    @property
    def scatter(self) -> Tensor:
        """The sum of outer products of their deviations, with shape ``(D, D)``, or its diagonal, ``(D,)``."""
        self._settle()
        return self._scatter

    def add(self, rows: Tensor) -> None:
        """Takes in rows with shape ``(N, D)``."""
        self._waiting.append(rows.detach().to(torch.float64, copy=True))  # a loader may use its memory again
        self._rows += len(rows)
        if self.diagonal or self._rows >= CHUNK:  # merging a diagonal costs no more than a row
            self._settle()

    def merge(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        """Takes in rows of which only the moments are known."""
        self._settle()
        if self._merged == 0:
            self._merged, self._mean, self._scatter = count, mean, scatter
            return
        total = self._merged + count
        shift = mean - self._mean
        self._scatter = self._scatter + scatter + self._outer(shift) * (self._merged * count / total)
        self._mean = self._mean + shift * (count / total)
        self._merged = total

    def _settle(self) -> None:
        """Merges the rows that wait."""
        if self._waiting:
            rows, self._waiting, self._rows = torch.cat(self._waiting), [], 0
            mean = rows.mean(0)
            deviations = rows - mean
            scatter = deviations.square().sum(0) if self.diagonal else deviations.T @ deviations
            self.merge(len(rows), mean, scatter)

    def _outer(self, vector: Tensor) -> Tensor:
        return vector.square() if self.diagonal else torch.outer(vector, vector)

    def reduce(self) -> None:
        """Merges the moments of all processes of a distributed run, so that each has those of the whole data."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        every: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(every, (self.count, self.mean.cpu(), self.scatter.cpu()))
        device = self.mean.device
        self._merged = 0
        for count, mean, scatter in every:
            self.merge(count, mean.to(device), scatter.to(device))

    def covariance(self, unbiased: bool = True) -> Tensor:
        """The covariance, with the shape of the scatter; the maximum-likelihood one with ``unbiased=False``."""
        least = 2 if unbiased else 1
        if self.count < least:
            raise InputError(f"a covariance needs at least {least} data points, got {self.count}")
        return self.scatter / (self.count - int(unbiased))

    def second_moments(self, around: Tensor) -> Tensor:
        """The mean of the squares, or outer products, of deviations from a point; with the shape of the scatter."""
        return self.covariance(unbiased=False) + self._outer(self.mean - around)


_met: Counter[str] = Counter()  # how often the processes met for each call: the next meeting needs a new name


def meet(call: str, patience: timedelta = PATIENCE) -> None:
    """Waits for all processes of a distributed run, before a call that they can only make together.

    Whoever calls alone gets an error instead of waiting for an answer that never comes. Asks the store that the
    processes met at first, which needs no answer from processes that are busy elsewhere; without one, nothing is asked.

    Arguments:
        call: What all of them are to call.
        patience: How long to wait for the last of them.

    Raises:
        EBFlowError: If some do not come; it names them.

    Example:
        >>> meet("model.calibrate()")  # one process: nobody to wait for
    """
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return
    store, world = distributed.distributed_c10d._get_default_store(), distributed.get_world_size()
    names = [f"ebflow_plugin/{call}/{_met[call]}/{rank}" for rank in range(world)]
    mine = names[distributed.get_rank()]
    store.set(mine, "here")
    try:
        store.wait(names, patience)
    except RuntimeError as error:  # a timeout
        lacking = [rank for rank, name in enumerate(names) if not store.check([name])]
        if not lacking:
            raise
        store.delete_key(mine)
        raise EBFlowError(
            f"{call} is for all of the {world} processes together, and {', '.join(map(str, lacking))} did not come "
            f"within {patience.total_seconds():g} s. Call it in every process, each with its own part of the data (if "
            "one is slow to come: torch.distributed.barrier() before it)."
        ) from error
    _met[call] += 1


def batches(data: Any, check: Callable[[Tensor, Tensor | None], Tensor]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Goes through data in batches: a tensor, a pair of a tensor and its context, or a loader of either.

    Arguments:
        data: The data.
        check: Refuses bad batches; gives x to go on with.
    """
    if isinstance(data, Tensor):
        parts: Iterable[Any] = data.split(CHUNK)
    elif in_memory(data):
        parts = zip(data[0].split(CHUNK), data[1].split(CHUNK), strict=True)
    elif isinstance(data, Iterable) and not hasattr(data, "__array__"):
        parts = data
    else:
        raise InputError(
            f"data must be a tensor, a pair (x, context) or a loader of these, got {type(data).__name__}; "
            "torch.as_tensor makes a tensor of an array"
        )
    empty = True
    for part in parts:
        x, context = pair(part)
        if x.shape[0] == 0:
            continue
        empty = False
        yield check(x, context), context
    if empty:
        raise InputError("data holds no batches")


def in_memory(data: Any) -> bool:
    """Whether data are a tensor, or a pair of a tensor and its context."""
    pair_of = isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)
    return isinstance(data, Tensor) or pair_of


def refuse_one_shot(data: Any) -> None:
    """Refuses an iterator, which is empty after it was gone through.

    Raises:
        InputError: If it is one.

    Example:
        >>> refuse_one_shot(iter([torch.zeros(2, 3)]))
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: gaussianize=True goes through the data once a layer, and list_iterator ...
    """
    if isinstance(data, Iterator):
        raise InputError(
            f"gaussianize=True goes through the data once a layer, and {type(data).__name__} ends after the first "
            "time; give a tensor, a list of batches or a loader"
        )
