"""Work on many rows, a part of them at a time, and its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.options import at_least

T = TypeVar("T")


def rows_in_chunks(count: int, size: int | None) -> Iterator[slice]:
    """Splits ``count`` rows into slices of at most ``size`` rows; None for one slice.

    Example:
        >>> list(rows_in_chunks(5, 2))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, count) if size is None else at_least(1, "batch_size", size)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def picked(chosen: slice | Tensor, *parts: Tensor | None) -> tuple[Any, ...]:
    """The chosen rows of each of these tensors, such as x, its context and its weights; None stays None.

    Example:
        >>> picked(slice(1, 3), torch.arange(4), None)
        (tensor([1, 2]), None)
    """
    return tuple(None if part is None else part[chosen] for part in parts)


def over_rows(
    function: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, context: Tensor | None, size: int | None
) -> Tensor:
    """Applies a function of rows, one chunk at a time, without a graph, so that memory stays bounded."""
    if len(x) == 0:
        with torch.no_grad():
            return function(x, context)
    with torch.no_grad():
        pieces = [function(*picked(part, x, context)) for part in rows_in_chunks(len(x), size)]
    return torch.cat(pieces)


def with_progress(items: Iterable[T], progress: bool, title: str, total: int | None = None) -> Iterator[T]:
    """Iterates over items, with a progress bar if ``progress``.

    Raises:
        InputError: If ``progress``, and ``rich`` is not installed.
    """
    if not progress:
        return iter(items)
    try:
        from rich.progress import track
    except ImportError:
        raise InputError("progress=True needs the package rich: pip install rich") from None
    return iter(track(items, description=title, total=total))
