"""Training for so many CPU seconds: the one loop of the demo, the race, and all that compares objectives in equal time.

Seconds are CPU time of this process, so that a busy machine slows nobody's clock; call it with one thread. Evaluations
are not counted.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from math import cos, pi
from typing import Any, NamedTuple

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


class Timed(NamedTuple):
    """What came out of a run of so many seconds. The model has its last weights.

    Attributes:
        result: What :func:`ebflow_plugin.fit` returned; its history has a record for each step.
        curve: CPU seconds and what the judge said, from the start on; the last are the seconds of all steps.
    """

    result: FitResult
    curve: list[tuple[float, float]]


def train(
    objective: ebf.objectives.Objective,
    rows: Tensor,
    seconds: float,
    judge: Callable[[int], float],
    *,
    optimizer: Callable[[list[nn.Parameter]], optim.Optimizer],
    moments: Sequence[float],
    schedule: Callable[[float], float] = SCHEDULES["cosine"],
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
        **options: Further options of :func:`ebflow_plugin.fit`, such as ``batch_size``, ``ema`` and ``seed``.

    Raises:
        TrainingError: If a loss or a gradient is not finite.
    """
    used, since, waiting = 0.0, 0.0, list(moments)
    curve = [(0.0, judge(0))]

    def rate(step: int) -> float:
        """Marks the end of a step: what comes between this and the next :func:`go_on` is no training."""
        nonlocal used, since
        if step:
            now = time.process_time()
            used, since = used + now - since, now
        return schedule(used / seconds)

    def go_on() -> None:
        nonlocal since
        since = time.process_time()

    def scheduler(made: optim.Optimizer) -> LambdaLR:
        go_on()  # what fit does before this is no step
        return LambdaLR(made, rate)

    def after_step(event: Event) -> bool:
        share = used / seconds
        if share >= waiting[0]:
            curve.append((used, judge(event.step)))
            while len(waiting) > 1 and share >= waiting[0]:
                del waiting[0]
        go_on()
        return share >= 1.0

    with warnings.catch_warnings():
        # Where a solve does not converge the exact log-det is taken: right, and its time counts.
        warnings.simplefilter("ignore", ConditioningWarning)
        result = ebf.fit(
            objective, rows, optimizer=optimizer, scheduler=scheduler, callback=after_step, steps=NO_END,
            evaluate_every=1, progress=False, **options,
        )  # fmt: skip
    return Timed(result, curve)
