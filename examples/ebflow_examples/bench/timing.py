"""Interleaved timing: contenders take turns, and only times of one such run are compared.

A machine is never equally fast for long. Two times can be compared if they were measured in one run, call by call, in
an order that changes from round to round; :func:`estimate` refuses anything else.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log
from time import perf_counter

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError

SAMPLE_SECONDS = 0.005  # a shorter call is repeated until a sample takes about as long
RESAMPLES = 1000
LOW, HIGH = 0.05, 0.95


@dataclass(frozen=True)
class Samples:
    """What one contender of an interleaved run took.

    Attributes:
        name: The contender.
        seconds: Seconds a call, one for each round.
        run: The run that it took part in; the same object for all of its contenders.
    """

    name: str
    seconds: tuple[float, ...]
    run: object = field(repr=False)

    @property
    def median(self) -> float:
        """The median of the rounds, in seconds."""
        return torch.tensor(self.seconds, dtype=torch.float64).quantile(0.5).item()


@dataclass(frozen=True)
class Spread:
    """A number from medians of rounds, with the bounds of its 90 % bootstrap interval over the rounds."""

    value: float
    low: float
    high: float


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    rounds: int = 200,
    least: int = 5,
    warmup: int = 2,
    seed: int = 0,
    device: torch.device | None = None,
    tick: Callable[[int], None] = lambda done: None,
) -> dict[str, Samples]:
    """Times contenders interleaved, in an order that is shuffled for each round.

    Arguments:
        contenders: What to call, by name.
        seconds: When to stop, once there are ``least`` rounds.
        rounds: At most how many rounds.
        least: At least how many rounds.
        warmup: How many calls of each contender are not timed.
        seed: Decides the order.
        device: What to wait for before the clock is read, if it is a GPU.
        tick: Called with the number of rounds done.
    """
    if rounds < least or least < 1 or warmup < 1:
        raise InputError(f"rounds >= least >= 1 and warmup >= 1 are needed, got {rounds}, {least} and {warmup}")
    repeats = {name: _repeats(function, warmup, device) for name, function in contenders.items()}
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    order, shuffle = list(contenders), random.Random(seed)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # as timeit does: a collection would be charged to whoever happens to run
    try:
        start = perf_counter()
        for done in range(rounds):
            if done >= least and perf_counter() - start > seconds:
                break
            shuffle.shuffle(order)
            for name in order:
                taken[name].append(_time(contenders[name], repeats[name], device))
            gc.collect(0)  # between the rounds, for what a graph with cycles leaves
            tick(done + 1)
    finally:
        if collecting:
            gc.enable()
    run = object()
    return {name: Samples(name, tuple(times), run) for name, times in taken.items()}


def ratio(ours: Samples, other: Samples) -> Spread:
    """The time of one contender over that of another of the same run.

    Raises:
        InputError: If the two were not interleaved.
    """
    return estimate(lambda medians: medians[..., 0] / medians[..., 1], [ours, other])


def exponent(sizes: Sequence[int], samples: Sequence[Samples]) -> Spread:
    """The p of time ~ size^p, by least squares of the logarithms; all sizes from the same run.

    Raises:
        InputError: If the sizes were not interleaved.
    """
    if len(sizes) != len(samples) or len(sizes) < 2:
        raise InputError(f"an exponent needs two sizes or more, and a time for each; got {len(sizes)}, {len(samples)}")
    logs = torch.tensor([log(size) for size in sizes], dtype=torch.float64)
    logs = logs - logs.mean()
    weights = logs / logs.square().sum()
    return estimate(lambda medians: medians.log() @ weights, samples)


def estimate(statistic: Callable[[Tensor], Tensor], sides: Sequence[Samples]) -> Spread:
    """A function of the medians of contenders that were interleaved, with its spread.

    Arguments:
        statistic: Takes medians with shape ``(*, sides)`` and returns values with shape ``(*)``.
        sides: The samples, all of one run. Whole rounds are resampled, so that what slows a round cancels.

    Raises:
        InputError: If they do not come from one interleaved run.
    """
    if any(side.run is not sides[0].run for side in sides):
        names = ", ".join(side.name for side in sides)
        raise InputError(f"these were not interleaved, so they are not compared: {names}. Time them in one run.")
    times = torch.tensor([side.seconds for side in sides], dtype=torch.float64)
    count = times.shape[1]
    drawn = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    values = statistic(times[:, drawn].quantile(0.5, dim=-1).T)
    low, high = values.quantile(torch.tensor([LOW, HIGH], dtype=torch.float64)).tolist()
    return Spread(statistic(times.quantile(0.5, dim=-1)).item(), low, high)


def _repeats(function: Callable[[], object], warmup: int, device: torch.device | None) -> int:
    """Warms a contender up, and says how often a sample calls it."""
    taken = min(_time(function, 1, device) for _ in range(warmup))
    return max(1, ceil(SAMPLE_SECONDS / max(taken, 1e-6)))


def _time(function: Callable[[], object], repeats: int, device: torch.device | None) -> float:
    _wait(device)
    start = perf_counter()
    for _ in range(repeats):
        function()
    _wait(device)
    return (perf_counter() - start) / repeats


def _wait(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
