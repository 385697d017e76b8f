"""The data of a training run as batches, in an order that a resumed run reproduces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.random import RandomState, mix, random_state, set_random_state
from ebflow_plugin.plan.inputs import Batch, pair, refuse_non_finite

__all__ = ["Batches", "LoaderBatches", "batches"]


class Batches:
    """Batches of indexable data: rows of tensors, or the items of a Dataset.

    The seed and the number of the epoch determine its order, so the position in the data is two numbers. Rows that do
    not fill a batch are left out of an epoch, different ones in each. Each process takes its own part of every batch.

    Arguments:
        fetch: Returns the batch of some indices.
        rows: The number of rows.
        size: The number of rows of a batch (in this process).
        shuffle: Whether to shuffle each epoch; if not, all rows are used in order, and the last batch may be smaller.
        seed: The seed of the order.
        rank: The rank of this process.
        world: The number of processes.

    Example:
        >>> x = torch.arange(10.0).reshape(5, 2)
        >>> source = Batches(lambda index: (x[index], None), rows=5, size=2, seed=0)
        >>> len(source), source.next()[0].shape
        (2, torch.Size([2, 2]))
    """

    generators: tuple[Generator, ...] = ()

    def __init__(
        self,
        fetch: Callable[[Tensor], Batch],
        rows: int,
        size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.rows, self.shuffle, self.seed, self.rank, self.world = rows, shuffle, seed, rank, world
        self.size = min(size, rows // world) if shuffle else min(size, rows)
        if self.size < 1:
            raise InputError(f"the data have {rows} rows, too few for {world} processes")
        self._fetch, self.epoch, self.position = fetch, 0, 0
        self._order: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return self.rows // (self.size * self.world) if self.shuffle else -(-self.rows // self.size)

    def __str__(self) -> str:
        return f"{self.rows} rows, batches of {self.size}"

    def next(self) -> Batch:
        """The next batch, over endless epochs."""
        batch = self._fetch(self._index(self.epoch, self.position))
        self.position += 1
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
        return batch

    def once(self) -> Iterator[Batch]:
        """This process's part of one epoch; the position in the data does not change."""
        for place in range(len(self)) if self.shuffle else range(self.rank, len(self), self.world):
            yield self._fetch(self._index(0, place))

    def first(self) -> Batch:
        """The first batch, with the rows of all processes."""
        return self._fetch(self._index(0, 0, joined=True))

    def state(self) -> dict[str, Any]:
        """The position in the data."""
        return {"epoch": self.epoch, "position": self.position}

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Moves to a position in the data."""
        self.epoch, self.position = state["epoch"], state["position"] % len(self)

    def _index(self, epoch: int, place: int, joined: bool = False) -> Tensor:
        """The rows of a batch: of this process, or of all of them together."""
        if not self.shuffle:
            return torch.arange(place * self.size, min((place + 1) * self.size, self.rows))
        if self._order is None or self._order[0] != epoch:
            generator = Generator().manual_seed(mix(self.seed, "order", epoch))
            self._order = epoch, torch.randperm(self.rows, generator=generator)
        batch = self._order[1][place * self.world * self.size : (place + 1) * self.world * self.size]
        return batch if joined else batch[self.rank * self.size : (self.rank + 1) * self.size]


class LoaderBatches:
    """The batches of a user's DataLoader.

    A resumed run reproduces the order if its randomness comes from torch: the global generator, the loader's own
    ``generator``, or that of its sampler. To move to a position, the generators are set to their state at the start of
    the epoch, and the batches before the position are loaded and dropped.

    With several processes, the sampler must assign each its own part.

    Example:
        >>> loader = DataLoader(TensorDataset(torch.zeros(6, 2)), batch_size=3, shuffle=True)
        >>> source = LoaderBatches(loader)
        >>> len(source), source.next()[0].shape
        (2, torch.Size([3, 2]))
    """

    def __init__(self, loader: DataLoader[Any], *, rank: int = 0, world: int = 1) -> None:
        self._loader, self.rank, self.world = loader, rank, world
        parts = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
        candidates = (getattr(part, "generator", None) for part in parts)
        self.generators = tuple({id(g): g for g in candidates if isinstance(g, Generator)}.values())
        self.epoch = self.position = 0
        self._device = torch.device("cpu")
        self._start: RandomState | None = None
        self._iterator: Iterator[Any] | None = None
        if not len(self):
            raise InputError("the DataLoader is empty: its dataset has no rows, or drop_last leaves none")

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        try:
            return len(self._loader)
        except TypeError:
            raise InputError(
                "the DataLoader does not know its length (an IterableDataset without __len__); give the dataset a "
                "__len__, or pass a map-style Dataset"
            ) from None

    @property
    def rows(self) -> int:
        """The approximate number of rows in an epoch."""
        size = self._loader.batch_size or getattr(self._loader.batch_sampler, "batch_size", None)
        dataset = self._loader.dataset
        return len(self) * size if size else len(dataset) if isinstance(dataset, Sized) else len(self)

    def __str__(self) -> str:
        return f"a DataLoader of {len(self)} batches"

    def next(self) -> Batch:
        """The next batch, over endless epochs."""
        for _ in range(2):
            if self._iterator is None:
                self._start = random_state(self._device, self.generators)
                self._iterator = self._begin()
            item = next(self._iterator, None)
            self.position += 1
            if item is None or self.position == len(self):
                self._iterator, self.epoch, self.position = None, self.epoch + 1, 0
            if item is not None:
                return pair(item)
        raise InputError("the DataLoader returned no batch")

    def once(self) -> Iterator[Batch]:
        """This process's part of one epoch."""
        for place, item in enumerate(self._loader):
            if place % self.world == self.rank:
                yield pair(item)

    def first(self) -> Batch:
        """The first batch of an epoch. The random state is restored."""
        before = random_state(self._device, self.generators)
        try:
            item = next(iter(self._loader), None)
        finally:
            set_random_state(before, self._device, self.generators)
        if item is None:
            raise InputError("the DataLoader returned no batch")
        return pair(item)

    def state(self) -> dict[str, Any]:
        """The position in the data, and the state of the generators at the start of the epoch."""
        return {"epoch": self.epoch, "position": self.position, "start": self._start if self.position else None}

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Moves to a position in the data, which advances the generators."""
        self.epoch, self._device = state["epoch"], device
        if state.get("start") is not None:
            self._start, self.position = state["start"], state["position"]
            set_random_state(state["start"], device, self.generators)
            self._iterator = self._begin()
            for _ in range(self.position):
                next(self._iterator, None)

    def _begin(self) -> Iterator[Any]:
        set_epoch = getattr(self._loader.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        return iter(self._loader)


def batches(
    data: Any, size: int, *, name: str = "data", shuffle: bool = True, seed: int = 0, rank: int = 0, world: int = 1
) -> Batches | LoaderBatches:
    """The batches of the data that :func:`~ebflow_plugin.fit` takes.

    Raises:
        InputError: If the data are empty, of an unsupported type, or hold NaN or inf.

    Example:
        >>> len(batches((torch.zeros(10, 2), torch.zeros(10, 3)), 5))
        2
        >>> batches(torch.zeros(0, 2), 5)
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: data is empty: 0 rows
    """
    if isinstance(data, DataLoader):
        plain = isinstance(data.sampler, (RandomSampler, SequentialSampler)) and data.batch_sampler is not None
        if shuffle and world > 1 and plain:
            raise InputError(
                f"{name} is a DataLoader that loads the same rows in each of {world} processes; pass the Dataset, or "
                "use a torch.utils.data.DistributedSampler in the DataLoader"
            )
        return LoaderBatches(data, rank=rank, world=world)
    if isinstance(data, TensorDataset):
        data = data.tensors
    fetch: Callable[[Tensor], Batch]
    if isinstance(data, Tensor) or (isinstance(data, tuple) and data and all(isinstance(p, Tensor) for p in data)):
        x, context = pair(data, name)
        for what, part in ((name, x), (f"the context of {name}", context)):
            if part is not None and part.is_floating_point() and not part.is_meta:
                refuse_non_finite(what, part)
        count = len(x) if x.dim() else 0
        if context is not None and len(context) != count:
            raise InputError(f"{name} and its context have {count} and {len(context)} rows")

        def fetch(index: Tensor) -> Batch:
            return x[index.to(x.device)], None if context is None else context[index.to(context.device)]
    elif isinstance(data, Dataset) and not isinstance(data, IterableDataset) and isinstance(data, Sized):
        dataset, count = data, len(data)

        def fetch(index: Tensor) -> Batch:
            return pair(default_collate([dataset[place] for place in index.tolist()]))
    elif isinstance(data, list) and data and all(isinstance(part, Tensor) for part in data):
        raise InputError(
            f"{name} is a list of {len(data)} tensors, which could be batches or a context; pass torch.cat(…) for rows "
            "of one kind, or a tuple (x, context)"
        )
    else:
        raise InputError(
            f"{name} must be a tensor, a pair (tensor, context), a Dataset with a length or a DataLoader, "
            f"got {type(data).__module__}.{type(data).__qualname__}"
            + (f"; torch.from_numpy({name}) turns it into a tensor" if type(data).__module__ == "numpy" else "")
        )
    if not count:
        raise InputError(f"{name} is empty: 0 rows")
    return Batches(fetch, count, size, shuffle=shuffle, seed=seed, rank=rank, world=world)
