"""Where the randomness of a training run comes from: a seed for each purpose, and states that can be restored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator

from ebflow_plugin.objectives import Objective, WeightedSum

__all__ = ["RandomState", "lend", "mix", "noise_of", "random_state", "set_random_state", "terms_of"]

RandomState = dict[str, Any]


def mix(*parts: object) -> int:
    """A seed for each purpose: the same parts give the same number, other parts an unrelated one.

    Example:
        >>> mix(0, "epoch", 1) == mix(0, "epoch", 1), mix(0, "epoch", 1) == mix(0, "epoch", 2)
        (True, False)
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def random_state(device: torch.device, generators: Sequence[Generator]) -> RandomState:
    """The state of torch's own generators and of these."""
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "generators": [generator.get_state() for generator in generators],
    }


def set_random_state(state: RandomState, device: torch.device, generators: Sequence[Generator]) -> None:
    """Undoes whatever was drawn since :func:`random_state`."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    for generator, saved in zip(generators, state["generators"], strict=True):
        generator.set_state(saved)


def terms_of(objective: Objective) -> list[Objective]:
    """The objectives that draw noise: the terms of a sum, or the objective itself."""
    return [part for part in objective.modules() if isinstance(part, Objective) and not isinstance(part, WeightedSum)]


def noise_of(objective: Objective, seed: int, rank: int, device: torch.device) -> dict[Objective, Generator]:
    """The generator that each term draws from in this process.

    The first process uses a term's own generator. Other processes use a copy with a seed of its own, so that no two
    have the same noise and the user's generator is not reseeded. Terms without a generator share one of the run.
    """
    shared = Generator(device).manual_seed(mix(seed, "noise", rank))
    copies: dict[int, Generator] = {}
    found = {}
    for term in terms_of(objective):
        own = term.generator
        if own is not None and rank:
            own = copies.setdefault(id(own), Generator(own.device).manual_seed(mix(own.initial_seed(), rank)))
        found[term] = shared if own is None else own
    return found


@contextmanager
def lend(noise: Mapping[Objective, Generator]) -> Iterator[None]:
    """Lets terms draw from these generators inside a ``with`` block."""
    own = {term: term.generator for term in noise}
    for term, generator in noise.items():
        term.generator = generator
    try:
        yield
    finally:
        for term, generator in own.items():
            term.generator = generator  # type: ignore[assignment]
