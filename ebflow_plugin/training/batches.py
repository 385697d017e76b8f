"""The data of a training run as batches, in an order that can be taken up again at any place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data import default_collate as collate

from ebflow_plugin.errors import EBFlowError, InputError
from ebflow_plugin.model import EBFlow
from ebflow_plugin.plan.energy_model import perturbed
from ebflow_plugin.plan.inputs import refuse_non_finite
from ebflow_plugin.training.randomness import RandomState, mix, random_state, set_random_state

__all__ = ["Batch", "Batches", "LoaderBatches", "batches", "refuse_useless_context"]

Batch = tuple[Tensor, Tensor | None]


class Batches:
    """Batches of data that can be indexed: rows of tensors, or the items of a Dataset.

    The order of each epoch follows from the seed and the number of the epoch alone, so that the place is two numbers.
    Rows that do not fill a batch are left out of an epoch, other ones in each. Under several processes each takes its
    own part of every batch.

    Arguments:
        fetch: Gives the batch of these indices.
        rows: How many there are.
        size: How many rows a batch has (in this process).
        shuffle: Whether each epoch has an order of its own; else all rows come in order, the last batch being short.
        seed: Where the order comes from.
        rank: Which process this is.
        world: How many there are.

    Example:
        >>> x = torch.arange(10.0).reshape(5, 2)
        >>> source = Batches(lambda index: (x[index], None), rows=5, size=2, seed=0)
        >>> len(source), source.next()[0].shape
        (2, torch.Size([2, 2]))
    """

    generators: tuple[Generator, ...] = ()

    def __init__(
        self,
        fetch: Callable[[Tensor], Any],
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
        self._fetch = fetch
        self.epoch = self.position = 0
        self._order: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return self.rows // (self.size * self.world) if self.shuffle else -(-self.rows // self.size)

    def __str__(self) -> str:
        return f"{self.rows} rows, batches of {self.size}"

    def next(self) -> Batch:
        """The next batch; epochs follow each other without end."""
        batch = pair(self._fetch(self._index(self.epoch, self.position)))
        self.position += 1
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
        return batch

    def once(self) -> Iterator[Batch]:
        """This process's share of one epoch, from its start; the place in the data does not change."""
        mine = range(len(self)) if self.shuffle else range(self.rank, len(self), self.world)
        for place in mine:
            yield pair(self._fetch(self._index(0, place)))

    def first(self) -> Batch:
        """The first batch, with the rows of all processes."""
        if not self.shuffle:
            return pair(self._fetch(self._index(0, 0)))
        return pair(self._fetch(self._permutation(0)[: self.size * self.world]))

    def state(self) -> dict[str, Any]:
        """The place in the data."""
        return {"epoch": self.epoch, "position": self.position}

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Goes to a place in the data."""
        self.epoch, self.position = state["epoch"], state["position"] % len(self)

    def _index(self, epoch: int, place: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(place * self.size, min((place + 1) * self.size, self.rows))
        start = (place * self.world + self.rank) * self.size
        return self._permutation(epoch)[start : start + self.size]

    def _permutation(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = Generator().manual_seed(mix(self.seed, "order", epoch))
            self._order = epoch, torch.randperm(self.rows, generator=generator)
        return self._order[1]


class LoaderBatches:
    """The batches of a user's DataLoader.

    Its order can be taken up again exactly if its randomness comes from torch: the global generator, its own
    ``generator``, or that of its sampler. To go to a place, the epoch is begun from the state that the generators had
    at its start, and the batches before the place are loaded and dropped.

    Arguments:
        loader: The DataLoader.
        rank: Which process this is.
        world: How many there are; each needs a sampler that gives it its own part.

    Example:
        >>> loader = DataLoader(TensorDataset(torch.zeros(6, 2)), batch_size=3, shuffle=True)
        >>> source = LoaderBatches(loader)
        >>> len(source), source.next()[0].shape
        (2, torch.Size([3, 2]))
    """

    def __init__(self, loader: DataLoader[Any], *, rank: int = 0, world: int = 1) -> None:
        self._loader = loader
        self.rank, self.world = rank, world
        parts = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
        found = (getattr(part, "generator", None) for part in parts)
        self.generators = tuple({id(g): g for g in found if isinstance(g, Generator)}.values())
        self.epoch = self.position = 0
        self._device = torch.device("cpu")
        self._start: RandomState | None = None
        self._iterator: Iterator[Any] | None = None
        if not len(self):
            raise InputError("the DataLoader is empty: its dataset has no rows, or drop_last leaves none")

    def __len__(self) -> int:
        """How many batches an epoch has."""
        try:
            return len(self._loader)
        except TypeError:
            raise InputError(
                "the DataLoader does not know its length (an IterableDataset without __len__); give the dataset a "
                "__len__, or pass a map-style Dataset"
            ) from None

    @property
    def rows(self) -> int:
        """How many rows an epoch has, about."""
        size = self._loader.batch_size or getattr(self._loader.batch_sampler, "batch_size", None)
        dataset = self._loader.dataset
        return len(self) * size if size else len(dataset) if isinstance(dataset, Sized) else len(self)

    def __str__(self) -> str:
        return f"a DataLoader of {len(self)} batches"

    def next(self) -> Batch:
        """The next batch; epochs follow each other without end."""
        for _ in range(2):
            if self._iterator is None:
                self._start = random_state(self._device, self.generators)
                self._iterator = self._begin()
            item = next(self._iterator, None)
            if item is not None:
                self.position += 1
                if self.position == len(self):
                    self._end()
                return pair(item)
            self._end()
        raise InputError("the DataLoader gave no batch")

    def once(self) -> Iterator[Batch]:
        """This process's share of one epoch."""
        for place, item in enumerate(self._loader):
            if place % self.world == self.rank:
                yield pair(item)

    def first(self) -> Batch:
        """The first batch of an epoch; nothing that follows changes by asking."""
        kept = random_state(self._device, self.generators)
        try:
            item = next(iter(self._loader), None)
        finally:
            set_random_state(kept, self._device, self.generators)
        if item is None:
            raise InputError("the DataLoader gave no batch")
        return pair(item)

    def state(self) -> dict[str, Any]:
        """The place in the data, and what the generators were at the start of the epoch."""
        return {"epoch": self.epoch, "position": self.position, "start": self._start if self.position else None}

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Goes to a place in the data. The generators are left wherever that brings them."""
        self.epoch, self._device = state["epoch"], device
        if state.get("start") is not None:
            self._start = state["start"]
            set_random_state(state["start"], device, self.generators)
            self._iterator = self._begin()
            for _ in range(state["position"]):
                next(self._iterator, None)
            self.position = state["position"]

    def _begin(self) -> Iterator[Any]:
        set_epoch = getattr(self._loader.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        return iter(self._loader)

    def _end(self) -> None:
        self._iterator, self.epoch, self.position = None, self.epoch + 1, 0


def batches(
    data: Any, size: int, *, name: str = "data", shuffle: bool = True, seed: int = 0, rank: int = 0, world: int = 1
) -> Batches | LoaderBatches:
    """Makes batches of whatever :func:`~ebflow_plugin.fit` was given.

    Raises:
        InputError: If it is empty, of another kind, or holds NaN or inf.

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
                f"{name} is a DataLoader that gives every one of {world} processes the same rows; pass the Dataset, or "
                "give the DataLoader a torch.utils.data.DistributedSampler"
            )
        return LoaderBatches(data, rank=rank, world=world)
    if isinstance(data, TensorDataset):
        data = data.tensors if len(data.tensors) > 1 else data.tensors[0]
    if isinstance(data, Tensor):
        data = (data,)
    if isinstance(data, list) and data and all(isinstance(part, Tensor) for part in data):
        raise InputError(
            f"{name} is a list of {len(data)} tensors, which could be batches or a context; pass torch.cat(…) for rows "
            "of one kind, or a tuple (x, context)"
        )
    fetch: Callable[[Tensor], Any]
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        parts: tuple[Tensor, ...] = tuple(data)
        pair(parts, name)
        rows = {len(part) if part.dim() else 0 for part in parts}
        if len(rows) > 1:
            raise InputError(f"{name} and its context have {' and '.join(str(len(part)) for part in parts)} rows")
        for what, part in zip((name, f"the context of {name}"), parts, strict=False):
            if part.is_floating_point() and not part.is_meta:
                refuse_non_finite(what, part)
        count = rows.pop()

        def fetch(index: Tensor) -> Any:
            return tuple(part[index.to(part.device)] for part in parts)
    elif isinstance(data, Dataset) and not isinstance(data, IterableDataset) and isinstance(data, Sized):
        dataset, count = data, len(data)

        def fetch(index: Tensor) -> Any:
            return collate([dataset[place] for place in index.tolist()])
    else:
        raise InputError(
            f"{name} must be a tensor, a pair (tensor, context), a Dataset with a length or a DataLoader, "
            f"got {type(data).__module__}.{type(data).__qualname__}"
            + (f"; torch.from_numpy({name}) makes a tensor of it" if type(data).__module__ == "numpy" else "")
        )
    if not count:
        raise InputError(f"{name} is empty: 0 rows")
    return Batches(fetch, count, size, shuffle=shuffle, seed=seed, rank=rank, world=world)


def pair(item: Any, name: str = "a batch") -> Batch:
    """A batch as x and its context, which may be None.

    Example:
        >>> pair([torch.zeros(2, 3)])
        (tensor([[0., 0., 0.],
                [0., 0., 0.]]), None)
    """
    if isinstance(item, Tensor):
        return item, None
    if isinstance(item, (tuple, list)) and 1 <= len(item) <= 2 and isinstance(item[0], Tensor):
        context = item[1] if len(item) == 2 else None
        if context is None or isinstance(context, Tensor):
            return item[0], context
    found = f"{type(item).__name__} of {len(item)}" if isinstance(item, (tuple, list, dict)) else type(item).__name__
    raise InputError(
        f"{name} must be a tensor x, or a pair (x, context), got a {found}; choose with a collate_fn: "
        "DataLoader(…, collate_fn=lambda rows: torch.stack([row[0] for row in rows]))"
    )


def refuse_useless_context(model: EBFlow, x: Tensor, context: Tensor | None) -> None:
    """Raises if a batch comes with values, such as labels or targets, that the model makes no use of.

    Looks at a perturbed copy of the model, since fresh couplings do not see their context.
    """
    if context is None:
        return
    fix = (
        f"Drop the {'targets' if context.is_floating_point() else 'labels'}: pass the tensor alone, or DataLoader(…, "
        "collate_fn=lambda rows: torch.stack([row[0] for row in rows])). To condition on them, give the flow a "
        "context, or an embedding of labels."
    )
    what = f"each batch comes with {context.dtype} values of shape {tuple(context.shape)}"
    twin, generator = perturbed(model), Generator().manual_seed(1)
    with torch.no_grad():
        u, _ = model.preprocess(x, Generator(x.device).manual_seed(0))
        try:
            seen = twin.core.energy(u, context)
        except Exception as error:
            if isinstance(error, EBFlowError) and "context" not in str(error):
                raise
            raise InputError(f"{what}, and the model cannot take them as a context ({error}). {fix}") from error
        used = _differs(seen, twin, u, None)
        if not used and context.is_floating_point():  # other labels need not be labels
            used = _differs(seen, twin, u, context + torch.randn(context.shape, generator=generator).to(context))
        if used is False:
            raise InputError(f"{what}, and the model makes no use of a context. {fix}")


def _differs(seen: Tensor, model: EBFlow, u: Tensor, context: Tensor | None) -> bool | None:
    """Whether a model has other energies with this context; None if it does not take it."""
    try:
        return not torch.equal(seen, model.core.energy(u, context))
    except Exception:
        return None
