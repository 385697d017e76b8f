"""The random generators of the terms of an objective, in each process of a training run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Generator

from ebflow_plugin.linalg.random import derive_seed
from ebflow_plugin.objectives.base import Objective


def noise_of(objective: Objective, shared: Generator, rank: int = 0) -> dict[Objective, Generator]:
    """The generator of each term in a process: its own, or the shared one.

    Each process but the first uses, in place of a term's own generator, a new one with a seed derived from it, so that
    no two processes draw the same noise, and the user's generator is not reseeded.
    """
    generators, copies = {}, dict[int, Generator]()
    for _, term in objective.pairs():
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
