"""Random streams with names: what is drawn for one purpose has nothing to do with what is drawn for another.

A seed alone is not enough: weights, noise of training and noise of the test from the same seed are the same numbers,
and the test then tells of the very noise that the model was started with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator

from ebflow_plugin.linalg.random import derive_seed


def stream_seed(seed: int, *name: object) -> int:
    """The seed of a stream: the same for the same seed and name, unrelated to that of every other name.

    Example:
        >>> stream_seed(0, "test") == stream_seed(0, "test"), stream_seed(0, "test") == stream_seed(0, "start")
        (True, False)
    """
    return derive_seed(seed, "ebflow", *name)


def stream(seed: int, *name: object, device: torch.device | str = "cpu") -> Generator:
    """A generator of a stream of its own.

    Example:
        >>> torch.equal(torch.rand(3, generator=stream(0, "test")), torch.rand(3, generator=stream(0, "start")))
        False
    """
    return Generator(device).manual_seed(stream_seed(seed, *name))


@contextmanager
def drawing_from(seed: int, *name: object) -> Iterator[None]:
    """Lets what draws from torch's global generators draw from a stream; afterwards they are as before.

    Example:
        >>> with drawing_from(0, "weights"):
        ...     first = torch.rand(3)
        >>> with drawing_from(0, "weights"):
        ...     print(torch.equal(torch.rand(3), first))
        True
    """
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices):
        torch.manual_seed(stream_seed(seed, *name))
        yield
