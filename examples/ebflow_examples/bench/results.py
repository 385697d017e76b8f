"""What a group of measurements takes, and what it returns: settings, and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ebflow_examples.bench.timing import Samples, interleaved, ratio
from ebflow_examples.streams import stream


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        quick: Whether all groups together shall take about a minute.
        seed: Decides data, weights, noise and the order of the contenders.
        device: Where to measure.
        progress: Told what is being measured, and how many rounds of it are done.
    """

    quick: bool = True
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    progress: Callable[[str, int], None] = lambda what, rounds: None

    def choose(self, quick: Any, full: Any) -> Any:
        """The one for a quick run, or the one for a full run."""
        return quick if self.quick else full

    def data(self, *shape: int) -> Tensor:
        """Standard normal data, the same for the same seed."""
        return torch.randn(shape, generator=stream(self.seed, "data")).to(self.device)

    def time(
        self, what: str, contenders: Mapping[str, Callable[[], object]], *, seconds: float = 1.5, least: int = 5
    ) -> dict[str, Samples]:
        """Times contenders interleaved; ``seconds`` is for a quick run, and a full one takes six times as long."""
        self.progress(what, 0)
        return interleaved(
            contenders,
            seconds=self.choose(seconds, 6 * seconds),
            least=least,
            seed=self.seed,
            device=self.device,
            tick=lambda done: self.progress(what, done),
        )


@dataclass(frozen=True)
class Table:
    """A table of results; its rows have the same keys.

    Attributes:
        group: The group that it belongs to.
        title: What it shows.
        rows: Cells by column: text, numbers, :class:`Spread`, or None.
        note: What a reader must know.
    """

    group: str
    title: str
    rows: list[dict[str, Any]]
    note: str = ""


def compare(what: str, ours: Samples, other: Samples) -> dict[str, Any]:
    """A row about two contenders of one run: their milliseconds, and the ratio with its spread.

    Raises:
        InputError: If they were not interleaved.
    """
    return {
        "what": what,
        "against": other.name,
        "ours, ms": 1e3 * ours.median,
        "other, ms": 1e3 * other.median,
        "ratio": ratio(ours, other),
    }


def milliseconds(sizes: Sequence[int], series: Sequence[Samples]) -> dict[str, float]:
    """Cells with the milliseconds at each size."""
    return {f"D = {size}, ms": 1e3 * samples.median for size, samples in zip(sizes, series, strict=True)}
