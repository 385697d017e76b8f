"""Where the randomness of a training run comes from: seeds for each purpose, and states that can be kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator

from ebflow_plugin.objectives import Objective, WeightedSum
from ebflow_plugin.training.distributed import Processes

__all__ = ["RandomState", "mix", "random_state", "seeded", "set_random_state"]

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
    for generator, kept in zip(generators, state["generators"], strict=True):
        generator.set_state(kept)


@contextmanager
def seeded(objective: Objective, seed: int, processes: Processes) -> Iterator[list[Generator]]:
    """Gives the objective's terms a generator of this process, and gives torch's global ones back at the end."""
    device = objective.model.like().device
    terms = [term for term in objective.modules() if isinstance(term, Objective) and not isinstance(term, WeightedSum)]
    own = Generator(device).manual_seed(mix(seed, "noise", processes.rank))
    lent = [term for term in terms if term.generator is None]
    found = {id(own): own, **{id(term.generator): term.generator for term in terms if term.generator is not None}}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(mix(seed, "global", processes.rank))
        for term in lent:
            term.generator = own
        for generator in found.values():
            if generator is not own and processes.rank:
                generator.manual_seed(mix(generator.initial_seed(), processes.rank))
        try:
            yield list(found.values())
        finally:
            for term in lent:
                term.generator = None
