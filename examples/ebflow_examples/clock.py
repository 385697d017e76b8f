"""Training for so many CPU seconds: the one loop of the demo, the race, and all that compares objectives in equal time.

Seconds are CPU time of this process, so that a busy machine slows nobody's clock; call it with one thread. Evaluations
are not counted.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Any

from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR

import ebflow_plugin as ebf
from ebflow_plugin.errors import ConditioningWarning
from ebflow_plugin.training import Event, FitResult

NO_END = 10**9  # steps; the clock ends a run
SCHEDULES: dict[str, Callable[[float], float]] = {  # the rate, as a share of the highest, by the share of a run
    "constant": lambda share: 1.0,
    "cosine": lambda share: 0.5 * (1.0 + cos(pi * min(1.0, share))),
    "multistep": lambda share: 0.1 ** ((share >= 0.5) + (share >= 0.75)),
}


class Clock:
    """Counts the CPU seconds of this process that go into steps.

    It stands still but between :meth:`go` and :meth:`stop`, and knows the time of the last :meth:`tick`, which comes
    with each step: what happens between the last step and an evaluation is no training.

    Arguments:
        seconds: How long training may take.

    Example:
        >>> clock = Clock(1000.0)
        >>> clock.go()
        >>> 0.0 <= clock.tick() < 1.0
        True
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._before = 0.0
        self._since = self._last = 0.0

    def go(self) -> None:
        """Starts, or goes on."""
        self._since = self._last = time.process_time()

    def tick(self) -> float:
        """Marks the end of a step, and returns the share of the time that is used up."""
        self._last = time.process_time()
        return self.share

    def stop(self) -> None:
        """Stands still from the last tick on, until :meth:`go`."""
        self._before, self._since = self.used, self._last

    @property
    def used(self) -> float:
        """Seconds of training up to the last tick."""
        return self._before + self._last - self._since

    @property
    def share(self) -> float:
        """How much of the time is used up; 1 and more at the end."""
        return self.used / self.seconds


@dataclass(frozen=True)
class Timed:
    """What came out of a run of so many seconds. The model has its last weights.

    Attributes:
        result: What :func:`ebflow_plugin.fit` returned; its history has a record for each step.
        curve: CPU seconds and what the judge said, from the start on.
    """

    result: FitResult
    curve: list[tuple[float, float]]

    @property
    def seconds(self) -> float:
        """CPU seconds of all steps."""
        return self.curve[-1][0]


def train(
    objective: ebf.objectives.Objective,
    rows: Tensor,
    seconds: float,
    judge: Callable[[int], float],
    *,
    optimizer: Callable[[list[nn.Parameter]], optim.Optimizer],
    moments: Sequence[float],
    schedule: Callable[[float], float] = SCHEDULES["cosine"],
    tick: Callable[[float, int], object] = lambda used, step: None,
    **options: Any,
) -> Timed:
    """Trains for so many seconds.

    Arguments:
        objective: The loss, with its model.
        rows: The training data.
        seconds: How long.
        judge: What is followed, of a step; it is asked before the first step and at the moments, and costs no time.
        optimizer: As of :func:`ebflow_plugin.fit`.
        moments: When to ask it, as shares of the time; the last is 1.
        schedule: The learning rate, as a share of the optimizer's, by the share of the time.
        tick: Called after each step with the seconds used, and the number of steps.
        **options: Further options of :func:`ebflow_plugin.fit`, such as ``batch_size``, ``ema`` and ``seed``.

    Raises:
        TrainingError: If a loss or a gradient is not finite.
    """
    clock, waiting = Clock(seconds), list(moments)
    curve = [(0.0, judge(0))]

    def scheduler(made: optim.Optimizer) -> LambdaLR:
        clock.go()  # what fit does before this is no step
        return LambdaLR(made, lambda step: schedule(clock.tick() if step else 0.0))

    def after_step(event: Event) -> bool:
        clock.stop()
        tick(clock.used, event.step)
        if clock.share >= waiting[0]:
            curve.append((clock.used, judge(event.step)))
            while len(waiting) > 1 and clock.share >= waiting[0]:
                del waiting[0]
        over = clock.share >= 1.0
        clock.go()
        return over

    with warnings.catch_warnings():
        # Where a solve does not converge the exact log-det is taken: right, and its time counts.
        warnings.simplefilter("ignore", ConditioningWarning)
        result = ebf.fit(
            objective, rows, optimizer=optimizer, scheduler=scheduler, callback=after_step, steps=NO_END,
            evaluate_every=1, progress=False, **options,
        )  # fmt: skip
    return Timed(result, curve)
