"""Mean and covariance of activations over a stream of batches, in one pass and in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from ebflow_plugin.chunks import picked, rows_in_chunks
from ebflow_plugin.errors import EBFlowError, InputError
from ebflow_plugin.plan.inputs import batch_of, counted, in_memory, to_device

# The input of a plan, its context, the weights of its rows, and its log-volume in float64.
Rows = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
CHUNK = 1000  # rows per forward pass, and per update of a scatter matrix, which costs as much as a hundred of them
PATIENCE = timedelta(minutes=2)  # how long to wait for other processes


class Moments:
    """Mean and scatter matrix of rows, which may have weights, merged batch by batch: stable for large means.

    Arguments:
        diagonal: Keeps only the diagonal of the scatter: O(D) per row in place of O(D²).

    Attributes:
        mean: Their mean, with shape ``(D,)``.
        scatter: The sum of outer products of their deviations, with shape ``(D, D)``, or its diagonal, ``(D,)``.

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
        self._weight: float = 0  # the sum of the weights, and of their squares
        self._squares: float = 0
        self.mean = torch.zeros(0, dtype=torch.float64, device="cpu")
        self.scatter = torch.zeros(0 if diagonal else (0, 0), dtype=torch.float64, device="cpu")

    @property
    def count(self) -> float:
        r"""The effective number of rows, :math:`(\sum w)^2 / \sum w^2`; of equal weights, their number."""
        return self._weight**2 / self._squares if self._weight else 0

    def add(self, rows: Tensor, weights: Tensor | None = None) -> None:
        """Adds rows with shape ``(N, D)``, and their weights with shape ``(N,)``. Best many rows at a time: O(D²)."""
        rows = rows.detach().double()
        total = squares = float(len(rows))  # equal weights need no look at the device
        if weights is None:
            weights = rows.new_ones(len(rows))
        else:
            weights = weights.detach().double()
            total, squares = torch.stack([weights.sum(), weights.square().sum()]).tolist()
        if total:
            mean = (weights / total) @ rows
            deviations = rows - mean
            heavy = weights[:, None] * deviations
            scatter = (heavy * deviations).sum(0) if self.diagonal else heavy.T @ deviations
            self._merge(total, squares, mean, scatter)

    def merge(self, other: Moments) -> None:
        """Adds the rows of other moments."""
        self._merge(other._weight, other._squares, other.mean, other.scatter)

    def _merge(self, weight: float, squares: float, mean: Tensor, scatter: Tensor) -> None:
        if not weight:
            return
        if not self._weight:
            self._weight, self._squares, self.mean, self.scatter = weight, squares, mean, scatter.clone()
            return
        total = self._weight + weight
        shift = mean - self.mean
        self.scatter += scatter
        self.scatter += self._outer(shift * (self._weight * weight / total) ** 0.5)
        self.mean = self.mean + shift * (weight / total)
        self._weight, self._squares = total, self._squares + squares

    def part(self, chosen: Tensor) -> Moments:
        """The moments of some of the features, by their indices."""
        part = Moments()
        part._merge(self._weight, self._squares, self.mean[chosen], self.scatter[chosen][:, chosen])
        return part

    def _outer(self, vector: Tensor) -> Tensor:
        return vector.square() if self.diagonal else torch.outer(vector, vector)

    def reduce(self) -> None:
        """Merges the moments of all processes of a distributed run, so that each has those of all data."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        every: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(every, (self._weight, self._squares, self.mean.cpu(), self.scatter.cpu()))
        device = self.mean.device
        self._weight = self._squares = 0
        for weight, squares, mean, scatter in every:
            self._merge(weight, squares, mean.to(device), scatter.to(device))

    def covariance(self, unbiased: bool = True) -> Tensor:
        """The covariance, with the shape of the scatter; ``unbiased=False`` is the maximum-likelihood estimate."""
        least = 2 if unbiased else 1
        if self.count < least:
            raise InputError(f"a covariance needs at least {least} data points, got {self.count:.0f}")
        return self.scatter * (self.count / self._weight) / (self.count - int(unbiased))

    def second_moments(self, around: Tensor) -> Tensor:
        """The mean outer product (or square) of deviations from a point, with the shape of the scatter."""
        return self.covariance(unbiased=False) + self._outer(self.mean - around)


_met: Counter[str] = Counter()  # meetings per call so far: each meeting needs a new key in the store


def barrier(call: str, patience: timedelta = PATIENCE) -> None:
    """Waits for all processes of a distributed run, before a collective call.

    A process that makes the call alone raises an error, where the collective itself would hang. The processes meet
    through the store of the default process group, which needs no reply from processes that are busy elsewhere.

    Arguments:
        call: The name of the call.
        patience: How long to wait for the last process.

    Raises:
        EBFlowError: If some processes do not arrive in time; the message names them.

    Example:
        >>> barrier("model.calibrate()")  # a single process does not wait
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
        missing = [rank for rank, name in enumerate(names) if not store.check([name])]
        if not missing:
            raise
        store.delete_key(mine)
        raise EBFlowError(
            f"{call} must be called by all {world} processes together, and {', '.join(map(str, missing))} did not call "
            f"it within {patience.total_seconds():g} s. Call it in every process, each with its own part of the data "
            "(if one is slow: torch.distributed.barrier() before it)."
        ) from error
    _met[call] += 1


@contextmanager
def writable(anchor: Tensor | None) -> Iterator[None]:
    """The mode in which to write into a flow, without gradients: that in which its parameters were made.

    Tensors made under ``torch.inference_mode()`` cannot be part of a graph, nor be written to outside of that mode. So
    a start or a calibration called in that mode must leave it, unless the flow itself was made in it.

    Arguments:
        anchor: A parameter of the flow, if it has one.

    Example:
        >>> weight = torch.zeros(1, requires_grad=True)
        >>> with torch.inference_mode(), writable(weight):
        ...     torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        (False, False)
    """
    with torch.inference_mode(anchor is not None and anchor.is_inference()), torch.no_grad():
        yield


class HeldOut:
    """Chooses rows of a stream of batches: the last of each ``every`` rows of this process is held out.

    Attributes:
        rows: The number of rows so far.

    Example:
        >>> held_out = HeldOut(5)
        >>> held_out(torch.zeros(3, 2)), held_out(torch.zeros(4, 2))
        (tensor([False, False, False]), tensor([False,  True, False, False]))
    """

    def __init__(self, every: int) -> None:
        self.every, self.rows = every, 0

    def __call__(self, batch: Tensor) -> Tensor:
        """Which rows of the next batch are held out, with shape ``(B,)``."""
        first, self.rows = self.rows, self.rows + len(batch)
        return torch.arange(first, self.rows, device=batch.device) % self.every == self.every - 1


def batches(
    data: Any, prepare: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]], device: torch.device
) -> Iterator[Rows]:
    """Iterates over data in batches: a tensor, a tuple ``(x, context, weights)``, or a loader of either.

    Rows of weight zero are left out, whatever they hold.

    Arguments:
        data: The data.
        prepare: Raises on an invalid batch, and returns x to use, and the log-volume of that, ``(B,)`` or None.
        device: The device of the model, to which each batch is moved.
    """
    parts: Iterable[Any]
    if (whole := in_memory(data)) is not None:
        parts = (picked(part, *whole) for part in rows_in_chunks(len(whole[0]), CHUNK))
    elif isinstance(data, Iterable) and not hasattr(data, "__array__"):
        parts = data
    else:
        raise InputError(
            f"data must be a tensor, a tuple (x, context, weights) or a loader of these, got {type(data).__name__}; "
            "torch.as_tensor turns an array into a tensor"
        )
    empty = True
    for part in parts:
        x, context, weights = counted(to_device(batch_of(part), device))
        if x.shape[0] == 0:
            continue
        empty = False
        used, log_volume = prepare(x, context)
        yield used, context, weights, (used.new_zeros(len(used)) if log_volume is None else log_volume).double()
    if empty:
        raise InputError("data holds no batches, or no row of a weight above 0")


def refuse_one_shot(data: Any) -> None:
    """Raises if data are an iterator, which is exhausted after one pass.

    Raises:
        InputError: If they are.

    Example:
        >>> refuse_one_shot(iter([torch.zeros(2, 3)]))
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: gaussianize=True needs one pass over the data per layer, and list_iterator ...
    """
    if isinstance(data, Iterator):
        raise InputError(
            f"gaussianize=True needs one pass over the data per layer, and {type(data).__name__} is exhausted after "
            "the first; pass a tensor, a list of batches or a loader"
        )
