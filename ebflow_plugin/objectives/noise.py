"""The random generators of the terms of an objective, in each process of a training run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Generator

from ebflow_plugin.linalg.random import derive_seed
from ebflow_plugin.objectives.base import Objective, WeightedSum


def terms_of(objective: Objective) -> list[Objective]:
    """The objectives that draw noise: the terms of a sum, or the objective itself."""
    return [part for part in objective.modules() if isinstance(part, Objective) and not isinstance(part, WeightedSum)]


def noise_of(objective: Objective, seed: int, rank: int, device: torch.device) -> dict[Objective, Generator]:
    """The generator of each term in this process.

    The first process uses a term's own generator. Each other process uses a new one with a seed derived from it, so
    that no two processes draw the same noise, and the user's generator is not reseeded. Terms without a generator
    share one.
    """
    generators, copies = {}, dict[int, Generator]()
    terms, shared = terms_of(objective), Generator(device).manual_seed(derive_seed(seed, "noise", rank))
    for term in terms:
        own = term.generator
        if own is not None and rank:
            own = copies.setdefault(id(own), Generator(own.device).manual_seed(derive_seed(own.initial_seed(), rank)))
        generators[term] = shared if own is None else own
    return generators


@contextmanager
def use_generators(noise: Mapping[Objective, Generator]) -> Iterator[None]:
    """Replaces the generators of the terms inside a ``with`` block."""
    own = {term: term.generator for term in noise}
    for term, generator in noise.items():
        term.generator = generator
    try:
        yield
    finally:
        for term in noise:
            term.generator = own[term]
