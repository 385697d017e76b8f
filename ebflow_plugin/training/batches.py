"""The data of a training run as batches, in an order that a resumed run reproduces."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from copy import copy
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, distributed
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.random import derive_seed
from ebflow_plugin.model import EBFlow
from ebflow_plugin.options import at_least
from ebflow_plugin.plan.inputs import (
    Batch,
    batch_of,
    check_weights,
    counted,
    counted_rows,
    in_memory,
    refuse_non_finite,
    to_device,
)

T = TypeVar("T")


def process() -> tuple[int, int]:
    """The rank of this process, and the number of processes."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def total_of(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if process()[1] > 1:
        distributed.all_reduce(tensor)
    return tensor


def least_of(tensor: Tensor) -> Tensor:
    """The elementwise minimum over all processes, in place."""
    if process()[1] > 1:
        distributed.all_reduce(tensor, distributed.ReduceOp.MIN)
    return tensor


def gathered(value: T) -> list[T]:
    """The values of all processes, in each of them."""
    values: list[Any] = [value] * process()[1]
    if len(values) > 1:
        distributed.all_gather_object(values, value)
    return values


class Loader:
    """Batches of rows that knows its place: what ``trainer.fit`` of Lightning needs to resume exactly.

    The seed and the number of the epoch determine its order, so the place is two numbers. It takes a batch of rows at
    once (a DataLoader takes them row by row), and each process takes its own part of every batch.

    Arguments:
        data: A tensor, a tuple ``(x, context)`` or ``(x, context, weights)``, or a Dataset with a length.
        batch_size: Rows of a batch, in each process.
        shuffle: Whether to shuffle each epoch; rows that do not fill a batch are left out of it. If not, all rows are
            used in order, and the last batch may be smaller.
        seed: The seed of the order.
        name: What errors call the data.

    Raises:
        InputError: If the data are empty, of another type, or hold NaN or inf.

    Example:
        >>> loader = Loader(torch.arange(10.0).reshape(5, 2), batch_size=2)
        >>> len(loader), [tuple(batch.shape) for batch in loader]
        (2, [(2, 2), (2, 2)])
    """

    def __init__(
        self, data: Any, batch_size: int = 128, *, shuffle: bool = True, seed: int = 0, name: str = "data"
    ) -> None:
        self.batch_size, self.shuffle, self.seed = at_least(1, "batch_size", batch_size), shuffle, seed
        self.epoch = self.place = 0
        self._data: Batch | Dataset[Any]
        whole = in_memory(data.tensors if isinstance(data, TensorDataset) else data, name)
        if whole is not None:
            self._data = whole = counted(whole)
            for what, part in ((name, whole[0]), (f"the context of {name}", whole[1])):
                if part is not None and part.is_floating_point() and not part.is_meta:
                    refuse_non_finite(what, part)
            self.rows = len(whole[0]) if whole[0].dim() else 0
        else:
            self._data = _dataset(data, name)
            self.rows = len(self._data)  # type: ignore[arg-type]
        if not self.rows:
            raise InputError(f"{name} is empty: 0 rows")

    batch_sampler = None  # Lightning looks for it

    @property
    def sampler(self) -> Loader:
        """Lightning calls its ``set_epoch``."""
        return self

    def __len__(self) -> int:
        rows = self._size() * process()[1]
        return self.rows // rows if self.shuffle else -(-self.rows // rows)

    def _size(self) -> int:
        """Rows of a batch, in each process."""
        world = process()[1]
        size = min(self.batch_size, self.rows // world if self.shuffle else self.rows)
        if not size:
            raise InputError(f"the data have {self.rows} rows, too few for {world} processes")
        return size

    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch from the current place on: x, (x, context) or (x, context, weights)."""
        for x, context, weights in self.batches():
            yield (x, context, weights) if weights is not None else x if context is None else (x, context)

    def batches(self) -> Iterator[Batch]:
        """The same, each as x, its context and its weights."""
        (rank, world), count = process(), len(self)
        if self.place == count:  # who counts batches does not exhaust it
            self.set_epoch(self.epoch + 1)
        size, order = self._size(), torch.arange(self.rows, device="cpu")
        if self.shuffle:
            generator = Generator("cpu").manual_seed(derive_seed(self.seed, "order", self.epoch))
            order = torch.randperm(self.rows, generator=generator, device="cpu")
        while self.place < count:
            begin = (self.place * world + rank) * size
            self.place += 1
            index = order[begin : begin + size]
            if isinstance(self._data, tuple):
                x, context, weights = (None if part is None else part[index.to(part.device)] for part in self._data)
                yield x, context, weights  # type: ignore[misc]
            else:
                yield batch_of(default_collate([self._data[row] for row in index.tolist()]))
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch, unless it is the current one."""
        if epoch != self.epoch:
            self.epoch, self.place = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """The place in the data, and what it is counted in."""
        return {"epoch": self.epoch, "place": self.place, "rows": self.rows, "batch": self._size() * process()[1]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes to a place; to the start of its epoch, if it is counted in other batches."""
        self.epoch, self.place = state["epoch"], state["place"]
        if state != self.state_dict():
            self.place = 0


def _dataset(data: Any, name: str) -> Dataset[Any]:
    """Data that are a Dataset with a length. Raises, with a hint, if they are something else."""
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset) and isinstance(data, Sized):
        return data
    hint = ""
    if isinstance(data, tuple):
        batch_of(data, name)  # which says what is wrong with it
    if isinstance(data, list) and data and all(isinstance(part, Tensor) for part in data):
        hint = "; torch.cat(…) makes rows of one kind of it, a tuple (x, context, weights) has more"
    elif isinstance(data, DataLoader):
        hint = "; it has batches already"
    elif type(data).__module__ == "numpy":
        hint = f"; torch.from_numpy({name}) turns it into a tensor"
    raise InputError(
        f"{name} must be a tensor, a tuple (x, context, weights), a Dataset with a length or a DataLoader, got "
        f"{type(data).__module__}.{type(data).__qualname__}{hint}"
    )


def loader_of(name: str, data: Any, size: int, seed: int | None) -> Any:
    """A DataLoader as it is, other data as batches, shuffled if there is a seed.

    Raises:
        InputError: If there are none, or nobody knows how many.
    """
    if not isinstance(data, DataLoader):
        return Loader(data, size, shuffle=seed is not None, seed=seed or 0, name=name)
    try:
        known = len(data)
    except TypeError:
        raise InputError(
            f"{name}: the DataLoader does not know its length (an IterableDataset without __len__); give the dataset "
            "a __len__, or pass a map-style Dataset"
        ) from None
    if not known:
        raise InputError(f"{name}: the DataLoader is empty: its dataset has no rows, or drop_last leaves none")
    return data


def once(loader: Any) -> Iterator[Batch]:
    """One pass over a loader, which leaves a pass that is under way, and torch's random state, as they are."""
    if isinstance(loader, (Loader, DataLoader)):
        loader = copy(loader)
    if isinstance(loader, Loader):
        loader.epoch = loader.place = 0
        yield from loader.batches()
    else:
        if isinstance(loader, DataLoader):
            loader._iterator = None  # persistent workers would begin anew, for the pass that is under way too
        with torch.random.fork_rng(devices=[]):
            yield from map(batch_of, loader)


def endless(loader: Any, device: torch.device) -> Iterator[Batch]:
    """The batches of one epoch after the other on a device, each as x, its context and its weights."""
    for epoch in count():
        if hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for batch in loader.batches() if isinstance(loader, Loader) else map(batch_of, loader):
            yield to_device(batch, device)


def refuse_batch(name: str, batch: Batch, model: EBFlow) -> None:
    """Raises if a batch is not what the model takes, or holds NaN or inf. Synchronises with the device."""
    (x, context, weights), dequantize = batch, model.dequantize
    try:
        model.check(x, context)
        rows = x if weights is None else x[counted_rows(check_weights(weights, x))]
        if rows.is_floating_point():
            refuse_non_finite("its first batch", rows)
        if dequantize is not None:
            dequantize.refuse(rows)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
