"""The evaluations of a training run, for callbacks and for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebflow_plugin.model import EBFlow
from ebflow_plugin.training.ema import EMA

Record = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """The argument of a callback, at each evaluation; as text, one line of progress.

    Attributes:
        step: The number of the step.
        record: The metrics of the evaluation.
        model: The model, with its current weights.
        ema: The average of the weights, if there is one.
        steps: The number of steps of the run.
        seconds_left: The estimated time left, with its evaluations.
    """

    step: int
    record: Mapping[str, Any]
    model: EBFlow
    ema: EMA | None = None
    steps: int = 0
    seconds_left: float = 0.0

    def pace(self) -> list[str]:
        """The step, the speed, and the time left, as text."""
        step = f"step {self.step}/{self.steps}"
        if "steps_per_second" not in self.record:  # the start
            return [step]
        minutes, seconds = divmod(round(max(0.0, self.seconds_left)), 60)
        left = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left"
        return [step, f"{self.record['steps_per_second']:.1f} steps/s", left]

    def __str__(self) -> str:
        step, *pace = self.pace()
        return "  ".join([step, *describe(self.record), *pace])


def describe(record: Mapping[str, Any]) -> list[str]:
    """The metrics of an evaluation, as text.

    Example:
        >>> describe({"loss": 1.0, "nll": 2.0, "best_nll": 2.0})
        ['loss 1.0000', 'NLL 2.0000 (best)']
    """
    parts = []
    if record.get("loss") is not None:
        parts.append(f"loss {record['loss']:.4f}")
    if record.get("nll") is not None:
        best, before = record.get("best_nll"), record.get("nll_uncalibrated")
        note = "" if best is None else " (best)" if best == record["nll"] else f" (best {best:.4f})"
        parts.append(f"NLL {'' if before is None else f'{before:.4f} -> '}{record['nll']:.4f}{note}")
    if record.get("bits_per_dim") is not None:
        parts.append(f"bits/dim {record['bits_per_dim']:.4f}")
    if record.get("effective") is not None:
        parts.append(f"effective {record['effective']:.2f}")
    if record.get("condition"):
        parts.append(f"condition ≥ {max(values['condition'] for values in record['condition'].values()):.1e}")
    if record.get("exact_log_dets"):
        total = f" of {record['log_dets']}" if "log_dets" in record else ""
        parts.append(f"{record['exact_log_dets']}{total} log-dets exact (no convergence)")
    return parts
